"""Trials before Ray starts: the user's code, the first rows of a dataset, the Hugging Face Hub."""

import json
import os
import re
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import RepositoryNotFoundError
from typer.testing import CliRunner

from asyncrl.cli import preflight
from asyncrl.cli.main import app
from asyncrl.cli.preflight import checked_config, look, prepare
from asyncrl.common.roles import Role
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.demo.tiny_model import build_tokenizer
from asyncrl.errors import ConfigError, DatasetError

pytestmark = pytest.mark.slow

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
OWN = "before_start_tasks"
TASKS = """
from asyncrl.data.prompts import Task

calls = []


def good():
    calls.append("good")
    for number in range(300):
        yield {"prompt": f"{number}+1=", "answer": str(number + 1)}


def fails():
    raise KeyError("split")


def reward(task, completion):
    return 0.0


def of_group(task, completions):
    return [0.0 for _ in completions]


def of_trl(prompts, completions=(), **columns):
    return [0.0 for _ in completions]


def swapped(task, session):
    return 0.0


async def agent(session, task):
    return 0.0


def loss(policy, rewards):
    return 0.0


def factory():
    raise KeyError("beta")


def advantage(rewards):
    return rewards
"""


@pytest.fixture(autouse=True)
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Creates two modules of a user: `before_start_tasks`, and `before_start_broken`, whose import raises."""
    (tmp_path / "before_start_tasks.py").write_text(TASKS)
    (tmp_path / "before_start_broken.py").write_text('import os\n\nKEY = os.environ["JUDGE_API_KEY"]\n')
    for name in (OWN, "before_start_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)  # the module that another test imported
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUDGE_API_KEY", "set here, but not in a scoring process")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")  # commands set it in this process


def settings(*overrides: str) -> Config:
    return load_config([QUICKSTART], [*overrides])


ROWS = ("data.prompt_template='{question}'", "data.max_prompt_tokens=8")


def said(config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        look(config)
    return str(caught.value)


def test_built_in_parts_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    for trial in ("_try_scoring", "_try_loss", "_try_advantage", "_try_optimizers"):
        monkeypatch.setattr(preflight, trial, lambda config: pytest.fail("was tried"))
    assert look(settings()) == []
    assert prepare(settings()) is None, "prompts of a built-in environment are made while Ray starts"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"environment.reward={OWN}:rewrd", "names 'rewrd', which before_start_tasks lacks; did you mean 'reward'?"),
        (f"environment.reward={OWN}:calls", "is a list, not a callable"),
        ("environment.reward=before_start_broken:f", "raised KeyError: 'JUDGE_API_KEY' (before_start_broken.py:3)"),
        (
            f"environment.agent={OWN}:reward",
            "has the parameters (task, completion), but an agent takes (session, task)",
        ),
        (f"environment.agent={OWN}:of_group", "(task, completions), but an agent takes (session, task)"),
        (f"environment.agent={OWN}:of_trl", "(prompts, completions=(), **columns), but an agent takes"),
        (f"environment.agent={OWN}:swapped", "has the parameters (task, session), but an agent takes (session, task)"),
        (f"environment.agent={OWN}:factory", "cannot be called with two arguments"),
        (f"environment.reward={OWN}:agent", "has the parameters (session, task), like an agent; a reward takes"),
        (f"algorithm.loss={OWN}:los", "did you mean 'loss'?"),
        (f"learner.optimizer.name={OWN}:los", "learner.optimizer.name: 'before_start_tasks:los' names 'los'"),
        (f"learner.optimizer.name={OWN}:loss", "needs a value for rewards, which is missing"),
        (f"algorithm.loss={OWN}:loss", "cannot be called as a loss: "),
        (
            f"algorithm.loss={OWN}:factory",
            "was called without arguments to make a loss, and it raised KeyError: 'beta' (before_start_tasks.py:",
        ),
        (f"algorithm.advantage={OWN}:advantage", "cannot be called with (rewards, group_ids): too many positional"),
        (f"data.dataset={OWN}:god", "did you mean 'good'?"),
        (f"data.dataset={OWN}:fails", "raised KeyError: 'split' (before_start_tasks.py:14)"),
    ],
)
@pytest.mark.fault("F28")
def test_code_of_the_user_that_a_run_could_not_use_is_refused_by_check_and_by_the_run(
    override: str, message: str
) -> None:
    config = settings(override, *ROWS)
    assert message in said(config)
    with pytest.raises((ConfigError, DatasetError)) as caught:
        prepare(config)
    assert message in str(caught.value)


@pytest.mark.fault("F28")
def test_all_that_is_wrong_is_said_at_once() -> None:
    config = settings(f"environment.reward={OWN}:rewrd", f"algorithm.loss={OWN}:los", f"data.dataset={OWN}:god")
    assert [line.partition(":")[0] for line in said(config).splitlines()] == [
        "environment.reward",
        "algorithm.loss",
        "data.dataset",
    ]


@pytest.mark.parametrize(("role", "tried"), [(Role.GENERATOR, {"rewrd"}), (Role.LEARNER, {"los", "advantag"})])
def test_each_role_tries_what_it_needs(role: Role, tried: set[str]) -> None:
    config = settings(
        f"environment.reward={OWN}:rewrd", f"algorithm.loss={OWN}:los", f"algorithm.advantage={OWN}:advantag"
    )
    with pytest.raises(ConfigError) as caught:
        prepare(config, roles=[role])
    assert set(re.findall(r"names '(\w+)', which", str(caught.value))) == tried


@pytest.mark.parametrize(
    ("prompt", "unknown"),
    [
        ("{question} {answer} {completion} {topic}", None),
        ('{completion} {"score": 1} {a b} {}', None),
        ("{completion} {reference}", "{reference} stays as it is"),
        ("{completion} {Topic} {level}", "{Topic}, {level} stays as it is"),
    ],
)
def test_names_in_a_judges_prompt_that_no_row_has_are_noted(prompt: str, unknown: str | None, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "topic": "sums"}\n' * 1)
    options = {"model": "m", "url": "http://127.0.0.1:9/v1", "prompt": prompt}
    rewards = json.dumps([{"name": "grade", "fn": "judge", "options": options}])
    config = settings(
        "data.dataset=jsonl", f"data.path={tmp_path / 'rows.jsonl'}", f"environment.rewards={rewards}",
        "data.prompt_template='{question}'", "eval.prompts=0",
    )  # fmt: skip
    notes = [note for note in look(config) if "options.prompt" in note]
    assert len(notes) == (unknown is not None)
    assert unknown is None or (unknown in notes[0] and "known are question, answer, completion, topic" in notes[0])


def test_a_scoring_process_does_not_stay() -> None:
    before = threading.active_count()
    [note] = look(settings(f"environment.reward={OWN}:reward", f"data.dataset={OWN}:good", *ROWS))
    assert "the first 100 rows were read" in note
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    names = [Path(f"/proc/{pid}/cmdline").read_text() for pid in children]
    assert not [name for name in names if "scoring_worker" in name]
    assert threading.active_count() == before


def test_a_run_reads_all_rows_once_and_check_reads_the_first() -> None:
    import before_start_tasks  # type: ignore[import-not-found]

    before_start_tasks.calls.clear()
    prompts = prepare(settings(f"data.dataset={OWN}:good", *ROWS))
    assert prompts is not None
    assert len(prompts.train) + len(prompts.heldout) == 300
    assert before_start_tasks.calls == ["good"]


def test_a_small_file_is_read_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    [note] = look(settings("data.dataset=jsonl", "data.path=rows.jsonl", *ROWS))
    assert note == "data.dataset = jsonl: all rows were read; a run reads all of them before it starts"


def model_in(folder: Path, *, template: str = "", vocabulary: int = 98, added: Sequence[str] = ()) -> Path:
    tokenizer = build_tokenizer(max_length=16)
    tokenizer.add_special_tokens({"additional_special_tokens": [*added]})
    tokenizer.chat_template = template or None
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocabulary}))
    (folder / "model.safetensors").touch()
    return folder


@pytest.mark.parametrize("only_transformers", [False, True], ids=["", "only transformers renders it"])
@pytest.mark.parametrize(
    ("turn", "end"),
    [
        ("[{{ m.role }}]{{ m.content }}<|im_end|>", "<|im_end|>"),
        ("{{ m.role }}: {{ m.content }}<|eot|>", "<|eot|>"),
        ("<turn>{{ m.role }} {{ m.content }}</turn>", "</turn>"),
    ],
)
def test_check_names_the_end_of_a_base_models_template(
    turn: str, end: str, only_transformers: bool, tmp_path: Path
) -> None:
    template = f"{{% for m in messages %}}{turn}{{% endfor %}}" + "{{ strftime_now('') }}" * only_transformers
    model = model_in(tmp_path / "model", template=template, added=["<turn>", end])
    overrides = ("model.tiny=null", f"model.path={model}")
    [note] = look(settings(*overrides))
    assert note.startswith(f"the chat template ends an answer with {end!r}, and the model's own end is '<eos>'")
    assert look(settings(*overrides, "data.chat=off")) == []
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 99]}))
    assert look(settings(*overrides)) == []


def rows_of(tmp_path: Path, *prompts: str) -> Sequence[str]:
    lines = [json.dumps({"prompt": prompt, "answer": "2"}) for prompt in prompts]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    return ("data.dataset=jsonl", "data.path=rows.jsonl", "data.prompt_template='{question}'")


@pytest.mark.fault("F33")
def test_a_prompt_that_is_too_long_is_refused_before_the_start_with_the_templates_share(tmp_path: Path) -> None:
    model = model_in(tmp_path / "model", template="<u>{{ messages[0].content }}<b>")
    overrides = ("model.tiny=null", f"model.path={model}", *rows_of(tmp_path, "12", "1234"))
    message = said(settings(*overrides, "data.max_prompt_tokens=9"))
    assert (
        "row 2: the prompt '1234' has 10 tokens (6 of them from the model's chat template, which data.chat: off"
        in message
    )
    assert look(settings(*overrides, "data.max_prompt_tokens=9", "data.chat=off")) != []
    assert look(settings(*overrides, "data.max_prompt_tokens=10")) != []
    assert look(settings(*overrides, "data.max_prompt_tokens=9", "data.on_bad_row=skip")) != []


@pytest.mark.fault("F25")
def test_a_first_prompt_beyond_the_models_vocabulary_is_refused_with_the_token(tmp_path: Path) -> None:
    model = model_in(tmp_path / "model", vocabulary=97)
    overrides = ("model.tiny=null", f"model.path={model}")
    assert "token '~' with the id 97, but the model's vocabulary has 97 tokens" in said(
        settings(*overrides, *rows_of(tmp_path, "1~2"))
    )
    assert look(settings(*overrides, *rows_of(tmp_path, "1+2"))) != []


@pytest.mark.parametrize(
    ("limit", "answers", "note"),
    [
        (1, ["12", "123", "4"], "2 of 3 answers of the dataset have more tokens (up to 3)"),
        (4, ["12345", "123456"], "2 of 2 answers of the dataset have more tokens (up to 6)"),
        (2, ["12", "123", "4"], None),  # a few long answers are usual
        (3, ["12", "123", "4"], None),
        (1, ["", ""], None),
    ],
)
def test_answers_that_are_longer_than_a_completion_get_a_note(
    limit: int, answers: list[str], note: str | None, tmp_path: Path
) -> None:
    model = model_in(tmp_path / "model")
    overrides = ("model.tiny=null", f"model.path={model}", *rows_of(tmp_path, "12"))
    lines = [json.dumps({"prompt": f"{n}+1", "answer": answer}) for n, answer in enumerate(answers)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    notes = look(settings(*overrides, f"generator.max_completion_tokens={limit}", "data.max_prompt_tokens=10"))
    found = [each for each in notes if each.startswith(f"generator.max_completion_tokens = {limit}: ")]
    assert len(found) == (note is not None)
    assert note is None or note in found[0]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionError("no route"), "the Hugging Face Hub does not answer (ConnectionError)"),
        (RepositoryNotFoundError.__new__(RepositoryNotFoundError), "the Hugging Face Hub has no such model"),
    ],
)
@pytest.mark.fault("F28")
def test_a_model_that_the_hub_does_not_give_is_refused_after_one_try(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[str] = []

    def answer(url: str, **_: object) -> None:
        tries.append(url)
        raise error

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", answer)
    monkeypatch.setattr(huggingface_hub.constants, "is_offline_mode", lambda: False)
    config = settings("model.tiny=null", "model.path=owner/no-such-model-of-ours")
    look(config)
    assert tries == [], "config check sends no request to the Hub"
    with pytest.raises(ConfigError) as caught:
        prepare(config)
    assert f"there is no folder owner/no-such-model-of-ours here, and {reason}" in str(caught.value)
    assert len(tries) == 1
    monkeypatch.setattr(huggingface_hub.constants, "is_offline_mode", lambda: True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        prepare(config)
    assert len(tries) == 1


@pytest.mark.fault("F28")
def test_the_commands_that_run_refuse_the_users_mistakes_before_ray_and_before_a_directory_is_made(
    tmp_path: Path,
) -> None:
    for command in ("up", "learner", "generator"):
        result = CliRunner().invoke(
            app, [command, "-c", str(QUICKSTART), f"run.dir={tmp_path}/runs", f"data.dataset={OWN}:fails", *ROWS]
        )
        assert result.exit_code == 1, result.output
        assert "raised KeyError: 'split' (before_start_tasks.py:14)" in result.stderr
        assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


CACHED = "acme/small"


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of the hub whose files are in the hub's cache."""
    files = tmp_path / "snapshot"
    build_tokenizer(max_length=32).save_pretrained(files)
    (files / "config.json").write_text(json.dumps({"vocab_size": 200, "max_position_embeddings": 32}))
    cache = {CACHED: str(files / "config.json")}
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: cache.get(name))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    return files


@pytest.mark.parametrize(
    ("error", "alone"),
    [(ConnectionError("no route"), True), (RepositoryNotFoundError.__new__(RepositoryNotFoundError), False)],
)
def test_a_hub_that_does_not_answer_is_left_alone_when_its_cache_has_the_model(
    error: Exception, alone: bool, cached: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(url: str, **_: object) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", answer)
    prepare(settings("model.tiny=null", f"model.path={CACHED}", "model.max_length=32"))
    assert os.environ["HF_HUB_OFFLINE"] == ("1" if alone else "0")
    assert huggingface_hub.is_offline_mode() == alone
    assert ("is read from its local cache" in capsys.readouterr().err) == alone


@pytest.mark.fault("F28")
def test_a_cached_model_that_is_too_short_is_refused_by_check(cached: Path) -> None:
    with pytest.raises(ConfigError, match="max_position_embeddings"):
        checked_config([QUICKSTART], ["model.tiny=null", f"model.path={CACHED}", "model.max_length=33"])


@pytest.mark.fault("F28")
def test_check_refuses_rows_that_are_all_held_out(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    overrides = ("data.dataset=jsonl", f"data.path={tmp_path / 'rows.jsonl'}", "data.heldout_fraction=0.999999", *ROWS)
    with pytest.raises(
        ConfigError,
        match=r"none of its 1 tasks remains for training, because data\.heldout_fraction = 0\.999999 holds out 1",
    ):
        look(settings(*overrides))
