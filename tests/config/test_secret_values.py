"""A configuration with a value that looks like a secret is refused, and the error does not show the value."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from asyncrl.cli.main import app
from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError

RANDOM = "aB3" * 12
"""Stands for the random part of a key. The tests put the known beginnings of keys before it."""

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
    "password_length": 8,
    "password": "",
    "tokenizer": f"models/{RANDOM}",
    "url": "https://judge.example:8000/v1?user=a@b",
    "path": "models/hf-llama-3-8b-instruct-finetuned",
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


def test_all_secrets_are_named_with_where_they_were_set(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("environment: {options: {api_key: hunter2}}\n")
    with pytest.raises(ConfigError) as caught:
        load_config([file], ["data.options.password=hunter2"])
    first, second = str(caught.value).splitlines()
    assert first.startswith(f"environment.options.api_key (in {file}): ")
    assert second.startswith("data.options.password (on the command line): ")


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
