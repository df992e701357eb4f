"""Code that comes with a model is not run, and transformers does not ask on the terminal whether it may run it.

The configuration in a run's directory names the model, and its folder may be in the run's directory.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile_runs import write_run
from typer.testing import CliRunner

from asyncrl.cli.main import app
from asyncrl.config.load import dump_config
from asyncrl.config.schema import Config, LoraSection
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.errors import RunError
from asyncrl.generation.model_parameters import adapted_modules, expected_parameters

OF_CONFIG = {"AutoConfig": "sent_model.C", "AutoModelForCausalLM": "sent_model.M"}
OF_TOKENIZER = {"AutoTokenizer": ["sent_model.T", None]}
MODELS: dict[str, dict[str, Any]] = {
    "config": {"model_type": "sent", "auto_map": OF_CONFIG},
    "config of a Hub repository": {"model_type": "sent", "auto_map": {"AutoConfig": "sent/model--sent_model.C"}},
    "model": {"model_type": "sent", "auto_map": {"AutoModelForCausalLM": "sent_model.M"}},
    "no type": {"auto_map": OF_CONFIG | OF_TOKENIZER},
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the questions on the terminal. The user answers yes."""
    questions: list[str] = []

    def answer(question: str = "") -> str:
        questions.append(question)
        return "y"

    monkeypatch.setattr("builtins.input", answer)
    return questions


def model(folder: Path, config: dict[str, Any], *, tokenizer: dict[str, Any] | None = None) -> Path:
    """Writes a model with a module that leaves a file beside it when it is imported."""
    path = folder / "model"
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer or {}))
    code = f"open({str(folder / 'ran')!r}, 'w').close()\nclass C: pass\nclass M: pass\nclass T: pass\n"
    (path / "sent_model.py").write_text(code)
    return path


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    "load",
    [
        lambda path: expected_parameters(path, dtype="float32"),
        lambda path: adapted_modules(path, LoraSection()),
    ],
    ids=["parameters", "adapter"],
)
def test_code_of_a_model_is_not_run(load: Callable[[str], object], kind: str, asked: list[str], tmp_path: Path) -> None:
    path = model(tmp_path, MODELS[kind])
    with pytest.raises((OSError, ValueError)):
        load(str(path))
    assert asked == []
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["tokenizer", "config"])
def test_code_of_a_tokenizer_is_not_run(kind: str, asked: list[str], tmp_path: Path) -> None:
    found = {"auto_map": OF_TOKENIZER, "tokenizer_class": "T"} if kind == "tokenizer" else {}
    path = model(tmp_path, {"model_type": "sent", "auto_map": OF_CONFIG | OF_TOKENIZER}, tokenizer=found)
    with pytest.raises(RunError, match="cannot load a tokenizer"):
        load_tokenizer(str(path))
    assert asked == []
    assert not (tmp_path / "ran").exists()


@pytest.mark.usefixtures("in_tmp_path")
@pytest.mark.parametrize("kind", MODELS)
def test_export_of_an_adapter_asks_nothing_and_runs_no_code(kind: str, asked: list[str], tmp_path: Path) -> None:
    run = asyncio.run(write_run(tmp_path / "runs", "sent"))
    path = model(run, MODELS[kind])
    changed = {"run": {"name": "sent", "dir": "runs"}, "model": {"path": str(path), "lora": {"rank": 1}}}
    (run / "config.yaml").write_text(dump_config(Config.model_validate(changed)))
    result = CliRunner().invoke(app, ["export", "runs/sent", "weights"], input="y\n")
    assert result.exit_code == 1
    assert [line for line in result.output.splitlines() if line.startswith("error:")], result.output
    assert "[y/N]" not in result.output
    assert asked == []
    assert not (run / "ran").exists()
    assert "sent_model" not in sys.modules
