"""A configuration with a value that looks like a secret is refused, and the error does not show the value."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from asyncrl.cli.main import app
from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError

RANDOM = "aB3" * 12
"""Stands for the random part of a key. The tests put the known beginnings of keys before it."""

QUERIES = (
    *("api_key=hunter2", "apikey=hunter2", "user=me&token=hunter2", "key=hunter2", "sig=hunter2", "auth=hunter2"),
    *("X-Amz-Signature=hunter2", "X-Amz-Security-Token=hunter2", "model=a&pwd=hunter2", "access_token=hunter%32"),
    *("a=1;client-secret=hunter2", "db_pass=hunter2"),
)
URLS = (
    *("https://hunter2@judge.example/v1", "http://hunter2@judge.example", "postgres://me:hunter2@db/rows"),
    *("redis://:hunter2@cache:6379", "https://judge.example/v1#access_token=hunter2"),
)

SECRETS = [
    ("environment.options.api_key", "hunter2"),
    ("environment.options.judge.apiKey", "hunter2"),
    ("environment.options.judgeAccessToken", "hunter2"),
    ("environment.options.judge.password", "correct horse battery staple"),
    ("environment.options.client-secret", "hunter2"),
    ("environment.options.headers.Authorization", "Bearer hunter2"),
    ("environment.options.api_keys.0", "hunter2"),
    ("environment.options.token", RANDOM),
    ("environment.options.judge_key", RANDOM),
    ("environment.options.note", f"ask with sk-proj-{RANDOM}"),
    ("environment.options.note", f"hf_{RANDOM}"),
    ("environment.options.note", f"ghp_{RANDOM}"),
    ("environment.options.note", f"AKIA{'A1' * 8}"),
    ("environment.options.note", f"eyJ{RANDOM}.{RANDOM}.{RANDOM}"),
    ("environment.options.note", "-----BEGIN PRIVATE KEY-----"),
    ("environment.options.judge_url", "https://user:hunter2@judge.example/v1"),
    *(
        (f"environment.options.{name}", "hunter2")
        for name in (
            "pwd",
            "db_pass",
            "dbPassword",
            "smtp-pass",
            "DB_PWD",
            "userpass",
            "passcode",
            "pass",
            "wandb_token",
        )
    ),
    *(("environment.options.url", f"https://judge.example/v1?{query}") for query in QUERIES),
    *(("environment.options.url", url) for url in URLS),
    ("environment.options.command.0", "serve --api-key=hunter2"),
    ("environment.options.run", "serve --api-key hunter2 --port 8000"),
    ("environment.options.run", "--password hunter2"),
    ("environment.options.run", "serve -v --client-secret 'hunter2'"),
    ("environment.options.run", "serve --port 8000 --hf-token\thunter2"),
    ("environment.options.dsn", "host=db user=me password=hunter2"),
    ("environment.options.header", "Bearer hunter2"),
    ("data.options.access_token", "hunter2"),
    ("algorithm.advantage.password", "hunter2"),
    ("metrics.project", f"hf_{RANDOM}"),
    ("environment.api_key", "hunter2"),
]
HARMLESS = {
    "answer_key": "final_answer_of_2024",
    "stop_token": "<|reserved_special_token_250|>",
    "key": "question",
    "token": 7,
    "max_tokens": 1024,
    "api_key": "EMPTY",
    "judge_api_key": "none",
    "auth_token": "JUDGE_TOKEN",
    "access_token": "$JUDGE_TOKEN",
    "api_key_var": "judge",
    "credentials": "/run/secrets/judge.json",
    "secret_word": "banana",
    "password": "",
    "tokenizer": f"models/{RANDOM}",
    "url": "https://judge.example:8000/v1?user=a@b",
    "path": "models/hf-llama-3-8b-instruct-finetuned",
    "special_tokens": ["<think>", "</think>"],
    "token_budget": "4096",
    "stop_token_ids": [128001, 128009],
    "pad_token": "<pad>",
    "key_column": "question",
    "two_pass": "always",
    "compass": "north",
    "bypass": "cache",
    "repository": "ssh://git@code.example/tasks",
    "search": "https://judge.example/v1?q=a&model=big-model&max_tokens=512&top=5#part=2",
    "judge": "https://judge.example/v1?api_key=$JUDGE_KEY",
    "database": "host=db user=me password=$DB_PASSWORD",
    "command": ["serve", "--api-key", "$KEY", "--port", "8000", "--tokenizer=models/a"],
    "run": "serve --api-key $KEY --password /run/secrets/a --max-tokens 512 --secret --port 8000",
    "prompt": "Answer with answer=5, token by token. The secret of the number is its key.",
    "header": "Bearer $JUDGE_KEY",
    "bearer": "Bearer of news",
    "num_secrets": 3,
    "file_pat": "rows-*.jsonl",
    "password_length": 2048,
}


def tree_of(key: str, value: object) -> dict[str, object]:
    """Returns a configuration in which one key has this value. A number in the key is the index in a list."""
    for name in reversed(key.split(".")):
        value = [value] if name == "0" else {name: value}
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize(("key", "value"), SECRETS)
def test_a_secret_is_refused_by_its_key_with_where_to_put_it_and_is_not_shown(key: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([tree_of(key, value) | {"run.seed": "wrong"}])
    [line] = str(caught.value).splitlines()
    assert line.startswith(f"{key} (in mapping 1): looks like a secret")
    assert "environment.secrets" in line
    assert value not in line


@pytest.mark.parametrize(("key", "value"), HARMLESS.items())
def test_what_is_no_secret_is_accepted(key: str, value: object) -> None:
    assert load_config([{"environment": {"options": {key: value}}}]).environment.options == {key: value}


@pytest.mark.parametrize(
    "command", [["serve", "--api-key", "hunter2"], ["--password", "hunter2"], ["a", "-token=b", "--pwd", "hunter2"]]
)
def test_a_secret_among_the_arguments_of_a_command_is_refused(command: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"looks like a secret.*environment\.secrets") as caught:
        load_config([{"environment": {"options": {"command": command}}}])
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("value", [123456, 2**40, 1000])
def test_a_password_of_digits_is_refused(value: int) -> None:
    with pytest.raises(ConfigError, match="looks like a secret"):
        load_config([{"environment": {"options": {"db_pwd": value}}}])


@pytest.mark.parametrize("key", [f"hf_{RANDOM}", f"sk-proj-{RANDOM}", f"AKIA{'A1' * 8}"])
@pytest.mark.parametrize("section", ["environment.options", "environment", "metrics"])
def test_a_secret_in_the_place_of_a_key_is_refused_and_not_shown(section: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([tree_of(section, {key: 1})])
    assert str(caught.value).startswith(f"{section}.<a secret in the place of a key> (in mapping 1): looks like")
    assert key not in str(caught.value)


@pytest.mark.parametrize(
    "file", sorted((Path(__file__).parents[2] / "configs").glob("*.yaml")), ids=lambda file: file.stem
)
def test_no_recipe_looks_like_a_secret(file: Path) -> None:
    load_config([file])


def test_all_secrets_are_named_with_where_they_were_set(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("environment: {options: {api_key: hunter2}}\n")
    with pytest.raises(ConfigError) as caught:
        load_config([file], ["data.options.password=hunter2"])
    first, second = str(caught.value).splitlines()
    assert first.startswith(f"environment.options.api_key (in {file}): ")
    assert second.startswith("data.options.password (on the command line): ")


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("environment.options.api_key", "*hunter2"),
        ("environment.options.judge.password", "[hunter2"),
        ("data.options.token", f"a: b: {RANDOM}"),
        ("environment.options.note", f"@hf_{RANDOM}"),
    ],
)
def test_a_secret_on_the_command_line_that_is_no_yaml_is_not_shown(key: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([], [f"{key}={text}"])
    assert str(caught.value).startswith(f"{key} (on the command line): looks like a secret")
    assert "hunter2" not in str(caught.value)
    assert RANDOM not in str(caught.value)


@pytest.mark.parametrize("value", [f"hf_{RANDOM}", "my password", "sk-1", ["hunter 2"], {"KEY": "hunter2"}])
def test_a_value_in_the_place_of_the_name_of_a_secret_is_not_shown(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([{"environment": {"secrets": value if isinstance(value, list | dict) else [value]}}])
    message = str(caught.value)
    assert message.startswith("environment.secrets")
    assert "name" in message
    for shown in (RANDOM, "password", "sk-1", "hunter"):
        assert shown not in message


@pytest.mark.parametrize("command", [["config", "show"], ["config", "check"]])
def test_no_command_prints_a_secret_of_its_configuration(command: list[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("environment: {options: {judge: {api_key: hunter2}}}\n")
    result = CliRunner().invoke(app, [*command, "-c", str(file)])
    assert result.exit_code == 2
    assert "environment.options.judge.api_key" in result.stderr
    assert "hunter2" not in result.output
