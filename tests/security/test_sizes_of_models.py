"""A model that came with a run directory costs a command no more time or memory than its files justify, whatever its
config.json says."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_runs import write_run
from safetensors.torch import save_file
from typer.testing import CliRunner

from asyncrl.cli.main import app
from asyncrl.config.load import dump_config
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.policy.lm_policy import Policy
from asyncrl.policy.model_directory import MOST_COUNTED, counts_problem
from asyncrl.policy.tq_policy import TQPolicy

SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32}
FORGED: dict[str, dict[str, Any]] = {
    "20,000 layers": {"num_hidden_layers": 20_000},
    "10^12 layers": {"num_hidden_layers": 10**12},
    "10^12 layers under another name": {"model_type": "gpt2", "n_layer": 10**12},
    "10^12 layers in a section": {"model_type": "gemma3", "text_config": {"num_hidden_layers": 10**12}},
    "10^12 labels": {"num_labels": 10**12},
}


def model(folder: Path, *, tensors: int = 3, **config: Any) -> Path:
    """Writes the files of a model with so many tensors, and a tokenizer that needs nothing but config.json."""
    path = folder / "model"
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3", "num_hidden_layers": 2} | SIZES | config))
    (path / "tokenizer_config.json").write_text("{}")
    save_file({f"layers.{number}": torch.zeros(1) for number in range(tensors)}, path / "model.safetensors")
    return path


def config_of(path: Path, **lora: Any) -> Config:
    return Config.model_validate({"run": {"name": "sent", "dir": "runs"}, "model": {"path": str(path), **lora}})


@pytest.mark.usefixtures("in_tmp_path")
@pytest.mark.timeout(60)  # without the check, the command takes many minutes
@pytest.mark.parametrize("merge", [False, True], ids=["adapter", "merged"])
@pytest.mark.parametrize("kind", FORGED)
def test_export_of_an_adapter_is_refused(kind: str, merge: bool, tmp_path: Path) -> None:
    run = asyncio.run(write_run(tmp_path / "runs", "sent"))
    path = model(run, **FORGED[kind])
    (run / "config.yaml").write_text(dump_config(config_of(path, lora={"rank": 1})))
    command = ["export", "runs/sent", "weights", *(["--merge"] if merge else [])]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2, result.output
    [line] = result.stderr.splitlines()
    assert "in its config.json is" in line
    assert "its weights (*.safetensors) have 3 tensors" in line
    assert not (tmp_path / "weights").exists()


@pytest.mark.parametrize("kind", FORGED)
@pytest.mark.parametrize("policy", [Policy, TQPolicy])
def test_no_rank_loads_the_model(policy: type[Policy], kind: str, tmp_path: Path) -> None:
    """Check 5 of `audit` and `resume` load the model in ranks."""
    config = config_of(model(tmp_path, **FORGED[kind]))
    options = {"dp_cfg": config.data_plane} if policy is TQPolicy else {}
    with pytest.raises(ConfigError, match=r"in its config\.json is"):
        policy(config, **options)


@pytest.mark.parametrize("kind", FORGED)
def test_a_start_is_refused(kind: str, tmp_path: Path) -> None:
    path = model(tmp_path, **FORGED[kind])
    result = CliRunner().invoke(app, ["config", "check", f"model.path={path}"])
    assert result.exit_code == 2, result.output
    assert "in its config.json is" in result.output


def test_a_large_model_has_as_many_tensors_as_layers(tmp_path: Path) -> None:
    more = MOST_COUNTED + 50
    assert counts_problem(model(tmp_path / "large", tensors=more, num_hidden_layers=more)) is None
    assert counts_problem(model(tmp_path / "forged", tensors=more, num_hidden_layers=more + 1)) is not None


def test_a_machine_without_the_weights_uses_a_model_of_common_depth(tmp_path: Path) -> None:
    path = model(tmp_path, num_hidden_layers=126)
    (path / "model.safetensors").unlink()
    assert counts_problem(path) is None
    described = json.loads((path / "config.json").read_bytes())
    (path / "config.json").write_text(json.dumps(described | {"num_hidden_layers": MOST_COUNTED + 1}))
    assert "have 0 tensors" in str(counts_problem(path))
