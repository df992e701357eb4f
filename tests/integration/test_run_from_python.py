"""`asyncrl.run` with real Ray, vLLM and FSDP2: the example of docs/python.md, and a run with stragglers that is
interrupted, in one process. The engine computes in bfloat16, and only changed weights are sent."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import QUICKSTART, REPOSITORY, in_this_process

from asyncrl.audit.history import read_history
from asyncrl.learner.records import StepRecord, read_lines

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

EXAMPLE = REPOSITORY / "examples" / "01_train_in_python.py"
STEPS = 3
INTERRUPTED_AT = 8
"""The fewest steps of the second run. It goes on until a straggler was trained late."""
STRAGGLERS = {
    "run.name": "second",
    "learner.total_steps": 100000,
    "learner.group_size": 2,
    "staleness.on_deadline": "mask",
    "staleness.max_versions": 1,
    "buffer.max_attempts": 3,
    "eval.prompts": 0,
    "environment.reward": "dense_reward:late_for_some_prompts",
    "environment.score_workers": 16,
    "weights.transport": "filesystem",
}
"""Every fifth prompt is scored late. With η = 1, its group would make the learner wait at every second step."""

NOTEBOOK = """
import asyncio, json, signal, sys
import psutil, ray
import asyncrl

masked, interrupted = 0, False

def interrupt(step):
    global masked, interrupted
    masked += step.diagnostics["stale_tokens"] or 0
    late = masked or step.step == 99  # a fast learner makes many steps before the first straggler has its reward
    if step.step + 1 >= int(sys.argv[4]) and late and not interrupted:
        interrupted = True
        signal.raise_signal(signal.SIGINT)

def second_cell():
    try:
        asyncrl.run(sys.argv[2], OVERRIDES | json.loads(sys.argv[3]), on_step=interrupt, progress=False)
    except KeyboardInterrupt:
        print("interrupted")

async def cells():
    exec(compile(open(sys.argv[1]).read(), sys.argv[1], "exec"), globals())
    second_cell()

asyncio.new_event_loop().run_until_complete(cells())  # as a notebook, which has a running event loop
print("Ray is up:", ray.is_initialized(), "children:", [child.name() for child in psutil.Process().children()])
"""


@pytest.fixture(scope="module")
def runs(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Returns the folder of the runs `first` and `second`, and the process that made both, beside an event loop."""
    tmp_path = tmp_path_factory.mktemp("from-python")
    overrides = {
        "run": {"name": "first", "dir": str(tmp_path), "shutdown_grace_s": 60.0},
        "model": {"path": model_path, "max_length": 64, "tiny": None, "dtype": "bfloat16"},
        "learner": {"total_steps": STEPS, "groups_per_step": 4, "group_size": 4, "optimizer": {"warmup_steps": 0}},
        "generator": {"max_concurrent_groups": 8, "max_completion_tokens": 10},
        "eval.prompts": 16,
        "environment.options.size": 4000,  # fewer questions take less time to make
        "weights.delta": True,
        "staleness.max_versions": 2,
    }
    text, changed = re.subn(r"^OVERRIDES = .*$", f"OVERRIDES = {overrides!r}", EXAMPLE.read_text(), flags=re.MULTILINE)
    assert changed == 1
    example, notebook = tmp_path / "example.py", tmp_path / "notebook.py"
    example.write_text(text)
    notebook.write_text(NOTEBOOK)
    done = subprocess.run(
        [sys.executable, str(notebook), str(example), str(QUICKSTART), json.dumps(STRAGGLERS), str(INTERRUPTED_AT)],
        cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True,
        timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return tmp_path, done


def test_the_example_trains_and_a_second_run_ends_in_order_when_it_is_interrupted(
    runs: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    tmp_path, done = runs
    lines = done.stdout.splitlines()
    reported = [line for line in lines if re.match(r"step \d+: \d+ samples, mean reward \d\.\d{3}$", line)]
    plotted = [line for line in lines if re.match(r" +\d+ █* \d\.\d{3}$", line)]
    assert [len(reported), len(plotted)] == [STEPS, STEPS], done.stdout
    assert f"weights: {tmp_path}/first/checkpoints/step-{STEPS}/hf" in lines
    assert "interrupted" in lines
    assert lines[-1] == "Ray is up: False children: []"
    assert "SIGTERM" not in done.stderr, "Ray's warning about the thread is not for the user"
    first, second = [json.loads((tmp_path / name / "run.json").read_bytes()) for name in ("first", "second")]
    assert (first["state"], second["state"]) == ("finished", "stopped")
    summary = json.loads((tmp_path / "first" / "summary.json").read_bytes())
    assert 1e-4 < summary["parity_max_nats"] < 1, "engine and learner round differently in bfloat16"
    assert re.search(r"after step \d+ of 100000", second["exit_reason"])
    assert list((tmp_path / "second" / "checkpoints").glob("step-*/hf")), "the weights must be saved"
    assert (tmp_path / "first" / "report.html").exists()


def test_stragglers_do_not_stop_the_learner_and_the_audit_passes(
    runs: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    run = runs[0] / "second"
    steps, summary = read_lines(run / "steps.jsonl", StepRecord), json.loads((run / "summary.json").read_bytes())
    assert len(steps) >= INTERRUPTED_AT
    assert (summary["ledger_closed"], summary["groups_discarded"], summary["groups_failed"]) == (True, 0, {})
    assert summary["max_token_staleness"] <= 1
    assert not (run / "weights").exists(), "the files of the weights are left"
    attempts = [group.attempt for step in read_history(run).steps for group in step.groups]
    assert max(attempts) == 0, "no attempt is ended"
    masked = sum(step.diagnostics["stale_tokens"] or 0 for step in steps)
    assert masked > 0, "the tokens of the stragglers that were trained late"
    audit = in_this_process("audit", str(run))
    assert audit.count("passed") == 4, audit
    assert "were masked (staleness.on_deadline: mask)" in audit, audit
