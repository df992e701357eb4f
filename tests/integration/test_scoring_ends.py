"""A real run in which processes of rewards end all the time: scoring processes that exit, overrun their time or their
memory, children of reward code, an interpreter of its own, an OpenEnv server and an MCP server. Others attack their
generator (`boundary_rewards.py`). No engine is lost."""

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import Run
from ending_rewards import KINDS, questions, write_openenv

from asyncrl.buffer.records import FailureCount
from asyncrl.config.schema import Config
from asyncrl.demo.tiny_model import ensure_model
from asyncrl.learner.records import StepRecord, read_lines

pytestmark = [pytest.mark.integration, pytest.mark.campaign, pytest.mark.timeout(900)]

ENDS = int(os.environ.get("ENDS", "10"))
"""The least number of ends of each kind. `ENDS=50` takes three minutes."""
STEPS = 4 + ENDS * 3 // 5
CONFIG: dict[str, Any] = {
    "model": {
        "max_length": 192,
        "tiny": {
            "chat": True,
            "layers": 2,
            "hidden_size": 64,
            "heads": 2,
            "warmup_accuracy": 0.9,
            "warmup_steps": 100,
            "warmup_batch_size": 32,
        },
    },
    "data": {"dataset": "environment"},
    "environment": {"name": "ending_rewards:Demonstrations"},
    "generator": {"max_concurrent_groups": 8, "max_completion_tokens": 24, "tool_parser": "hermes"},
    "learner": {
        "total_steps": STEPS,
        "groups_per_step": 8,
        "group_size": 8,
        "batching": "packed",
        "micro_batch_tokens": 8192,
        "optimizer": {"learning_rate": 1e-5, "warmup_steps": 0},
    },
    "algorithm": {"zero_variance": "keep"},
    "staleness": {"max_versions": 3},
    "eval": {"prompts": 0},
}


@pytest.mark.fault("F19")
def test_no_end_of_a_process_of_reward_code_ends_an_engine(run_command: Run, tmp_path: Path) -> None:
    config = CONFIG | {"run": {"name": "ends", "dir": str(tmp_path / "runs")}}
    config["model"]["path"] = str(tmp_path / "model")
    ensure_model(Config.model_validate(config))
    for start in ("Score", "Number"):
        path = tmp_path / f"{start.lower()}.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in questions(start)))
    ends = str(tmp_path / "ends")
    reward = [{"name": "ending", "fn": "ending_rewards:ending", "options": {"ends": ends}}]
    server = [sys.executable, str(Path(__file__).with_name("ending_rewards.py")), ends]
    parts = [
        {
            "name": "scores",
            "weight": 2,
            "data": {"dataset": "jsonl", "path": str(tmp_path / "score.jsonl")},
            "environment": {"rewards": reward, "score_timeout_s": 0.3, "score_memory_mib": 128, "score_workers": 3},
        },
        {
            "name": "openenv",
            "weight": 3,
            "data": {"dataset": "environment"},
            "environment": {
                "name": "openenv",
                "options": write_openenv(tmp_path),
                "score_timeout_s": 60,
                "score_workers": 2,
            },
        },
        {
            "name": "mcp",
            "weight": 2,
            "data": {"dataset": "jsonl", "path": str(tmp_path / "number.jsonl")},
            "environment": {
                "reward": "dense_reward:by_checksum",
                "mcp_servers": [{"command": server}],
                "max_turns": 3,
                "score_timeout_s": 60,
                "score_workers": 2,
            },
        },
    ]
    config |= {"data": {"mixture": parts, "max_prompt_tokens": 150}, "environment": {}}
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    attacks = Path(__file__).parents[1] / "environments"
    search_path = os.pathsep.join([str(Path(__file__).parent), str(attacks), os.environ.get("PYTHONPATH", "")])
    command = run_command("up", "-c", str(tmp_path / "run.yaml"), "model.tiny=null", PYTHONPATH=search_path)
    assert command.wait(500) == 0, command.output()[-4000:]
    run = tmp_path / "runs" / "ends"
    seen = Counter(Path(ends).read_text().split())
    assert min(seen[kind] for kind in ({*KINDS, "interpreter", "server", "mcp"} - {"attacks"})) >= ENDS, seen
    assert seen["attacks"], "a group with attacks takes longer, so there are fewer"
    assert "is lost" not in command.output(), "an engine was lost"
    steps = read_lines(run / "steps.jsonl", StepRecord)
    assert len(steps) == STEPS
    failures = msgspec.json.decode((run / "failures.json").read_bytes(), type=list[FailureCount])
    assert {count.first.reason for count in failures} >= {"reward_crashed", "reward_timeout", "reward_raised"}
    assert any(step.diagnostics["failed_samples_ratio"] for step in steps)
    assert "base_url" not in command.output(), "an agent's failure shows its session"
    report = (run / "report.html").read_text()
    assert "ended its scoring process" in report
    assert "without a reward" in report, "the share of failed completions"
    summary = json.loads((run / "summary.json").read_bytes())
    assert summary["ledger_closed"]
