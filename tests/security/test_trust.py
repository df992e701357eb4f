"""Code that the configuration in a run's directory names is imported and run only with --trust."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_up_run import make_step
from typer.testing import CliRunner
from written_runs import write_run

from asyncrl.audit import replay
from asyncrl.audit.history import NotPossible
from asyncrl.cli import resume
from asyncrl.cli.main import app
from asyncrl.config.load import dump_config
from asyncrl.config.named_code import named_code
from asyncrl.config.schema import Config

MODULE = "sent_with_the_run"
URL = "http://server.of.the.sender/"
CODE: dict[str, dict[str, Any]] = {
    "algorithm.loss": {"algorithm": {"loss": f"{MODULE}:f"}},
    "algorithm.advantage": {"algorithm": {"advantage": f"{MODULE}:f"}},
    "algorithm.advantage.name": {"algorithm": {"advantage": {"name": f"{MODULE}:f"}}},
    "learner.optimizer.name": {"learner": {"optimizer": {"name": f"{MODULE}:f"}}},
    "data.dataset": {"data": {"dataset": f"{MODULE}:f"}},
    "environment.name": {"environment": {"name": f"{MODULE}:f"}},
    "environment.agent": {"environment": {"agent": f"{MODULE}:f"}},
    "environment.reward": {"environment": {"reward": f"{MODULE}:f"}},
    "environment.rewards.0.fn": {"environment": {"rewards": [{"name": "a", "fn": f"{MODULE}:f"}]}},
    "environment.tools.0": {"environment": {"tools": [f"{MODULE}:f"]}},
    "environment.options.action": {"environment": {"name": "openenv", "options": {"action": f"{MODULE}:f"}}},
    "environment.options.command": {"environment": {"name": "openenv", "options": {"command": ["touch", "ran"]}}},
    "environment.options.python": {"environment": {"name": "verifiers", "options": {"python": "./ran"}}},
    "environment.secrets": {"environment": {"secrets": ["KEY"]}},
    "generator.engine_args.compilation_config.backend": {
        "generator": {"engine_args": {"compilation_config": {"backend": f"{MODULE}.f"}}}
    },
    "generator.engine_args.compilation_config": {
        "generator": {"engine_args": {"compilation_config": f'{{"backend": "{MODULE}.f"}}'}}
    },
    "generator.engine_args.additional_config.files.0": {
        "generator": {"engine_args": {"additional_config": {"files": ["sent/ran.py"]}}}
    },
    "environment.mcp_servers.0.url": {"environment": {"mcp_servers": [{"url": URL}]}},
    "run.mirror": {"run": {"mirror": URL}},
    "environment.options.url": {"environment": {"name": "openenv", "options": {"url": URL}}},
    "environment.rewards.0.options.url": {
        "environment": {"rewards": [{"name": "a", "fn": "judge", "options": {"model": "m", "url": URL}}]}
    },
    "eval.sets.hard.environment.rewards.0.options.url": {
        "eval": {
            "sets": {
                "hard": {
                    "environment": {"rewards": [{"name": "a", "fn": "judge", "options": {"model": "m", "url": URL}}]}
                }
            }
        }
    },
    "environment.mcp_servers.0.command": {"environment": {"mcp_servers": [{"command": ["touch", "ran"]}]}},
}
"""Settings that name code, by the key under which it is named."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The present directory has a module that leaves a file when it is imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / f"{MODULE}.py").write_text("open('ran', 'w').close()\n\n\ndef f(*given, **named):\n    return 1.0\n")
    return tmp_path


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("written"), [make_step(step) for step in range(3)], name="sent")


@pytest.fixture
def run(here: Path, written: Path) -> Path:
    """A copy, because writing a run takes as long as a command."""
    return shutil.copytree(written, here / "runs" / "sent")


def sent(run: Path, changed: dict[str, Any]) -> None:
    """Writes the configuration of the run with these settings."""
    of_run = {"run": {**changed.get("run", {}), "name": run.name, "dir": str(run.parent)}}
    (run / "config.yaml").write_text(dump_config(Config.model_validate(changed | of_run)))


def ran(here: Path) -> bool:
    return (here / "ran").exists() or MODULE in sys.modules


@pytest.mark.parametrize("key", CODE)
def test_code_is_found_under_every_key(key: str) -> None:
    [(found, value)] = named_code(Config.model_validate(CODE[key])).items()
    assert found == key
    assert (
        value in (URL, f"{MODULE}:f", "touch ran", "./ran", "KEY", f"{MODULE}.f", "sent/ran.py") or "backend" in value
    )


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"data": {"path": "folder/rows.jsonl", "prompt_template": "Question: {prompt}\nAnswer:"}},
        {"environment": {"name": "math", "reward": "math_verify"}},
        {"algorithm": {"loss": "grpo", "advantage": {"name": "group_norm", "eps": 1e-4}}},
        {"generator": {"engine_args": {"max_num_batched_tokens": 16384, "kv_cache_dtype": "fp8", "swap_space": "0.5"}}},
    ],
    ids=["defaults", "data", "built-in", "algorithm", "engine"],
)
def test_settings_of_built_in_parts_are_no_code(changed: dict[str, Any]) -> None:
    assert named_code(Config.model_validate(changed)) == {}


@pytest.mark.parametrize("key", CODE)
@pytest.mark.parametrize(
    "command", ["report", "samples", "status", "compare", "export", "audit", "resume", "config show"]
)
def test_no_command_runs_code_of_a_run_directory(command: str, key: str, here: Path, run: Path) -> None:
    sent(run, CODE[key])
    words = {
        "compare": ["compare", str(run), str(run)],
        "export": ["export", str(run), "exported"],
        "config show": ["config", "show", "-c", str(run / "config.yaml")],
    }
    CliRunner().invoke(app, words.get(command, [command, str(run)]))
    assert not ran(here)


@pytest.mark.parametrize("key", CODE)
def test_down_runs_no_code_of_a_run_directory(key: str, here: Path) -> None:
    run = write_run(here / "runs", [make_step(0)], name="sent")  # for a copy, `down` waits for 20 s
    sent(run, CODE[key])
    CliRunner().invoke(app, ["down", str(run)])
    assert not ran(here)


@pytest.mark.parametrize("key", [key for key in CODE if key.startswith("algorithm.")])
def test_the_replay_of_an_own_loss_or_advantage_needs_trust(
    key: str, here: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trusted(*_: object) -> None:
        raise NotPossible("trusted")

    sent(run, CODE[key])
    monkeypatch.setattr(replay, "kept_steps", lambda _: None)
    monkeypatch.setattr(replay, "_check_same_conditions", trusted)
    history: Any = SimpleNamespace(directory=run, steps=[])
    with pytest.raises(NotPossible, match=rf"names code, .*here: {key} = {MODULE}:f; if you trust it, pass --trust$"):
        replay.steps_replay(history)
    with pytest.raises(NotPossible, match=r"^trusted$"):
        replay.steps_replay(history, trust=True)
    assert not ran(here)


@pytest.mark.parametrize("key", ["data.dataset", "environment.reward", "environment.options.command"])
def test_a_replay_that_does_not_import_the_code_needs_no_trust(
    key: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent(run, CODE[key])
    monkeypatch.setattr(replay, "kept_steps", lambda _: None)
    monkeypatch.setattr(replay, "_check_same_conditions", lambda *_: (_ for _ in ()).throw(NotPossible("goes on")))
    with pytest.raises(NotPossible, match=r"^goes on$"):
        replay.steps_replay(SimpleNamespace(directory=run, steps=[]))  # type: ignore[arg-type]


@pytest.fixture
def begun(run: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What `resume` prepared. No run starts."""
    given_to: list[object] = []

    def prepared(*given: object, **_: object) -> tuple[Config, None]:
        given_to.append(given)
        return Config.model_validate({"run": {"name": run.name, "dir": str(run.parent)}}), None

    monkeypatch.setattr(resume, "prepared", prepared)
    monkeypatch.setattr(resume, "run_in_terminal", lambda *_, **__: None)
    return given_to


@pytest.mark.parametrize("key", CODE)
def test_a_run_with_code_is_resumed_with_trust_only(key: str, here: Path, run: Path, begun: list[object]) -> None:
    sent(run, CODE[key])
    answer = CliRunner().invoke(app, ["resume", str(run)])
    assert answer.exit_code == 2, answer.output
    assert f"names code, programs, servers or secrets, which would be used here: {key} = " in " ".join(
        answer.stderr.split()
    )
    assert not begun
    assert CliRunner().invoke(app, ["resume", str(run), "--trust"]).exit_code == 0
    assert begun
    assert not ran(here)


@pytest.mark.parametrize("address", ["10.0.0.9:6379", "cluster.example:6379", "127.0.0.1:1"])
def test_a_run_on_a_cluster_elsewhere_is_resumed_with_trust_only(address: str, run: Path, begun: list[object]) -> None:
    sent(run, {"ray": {"address": address}})
    answer = CliRunner().invoke(app, ["resume", str(run)])
    assert answer.exit_code != 0
    assert f"names the Ray cluster at {address}, but this machine is not a node of it" in " ".join(
        answer.stderr.split()
    )
    assert not begun
    assert CliRunner().invoke(app, ["resume", str(run), "--trust"]).exit_code == 0
    assert begun
