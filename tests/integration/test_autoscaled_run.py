"""A real run changes its number of generators by itself.

At first, its only replica may start two groups a second, and the learner waits: a second replica is added. Then the
learner's rank is frozen again and again, so that the generators wait: one replica is drained. No group is lost.
"""

import json
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from conftest import QUICKSTART, Run, small_overrides
from kills import PROCESSES, name_of, processes_of

pytestmark = [pytest.mark.integration, pytest.mark.campaign]

SETTINGS = [
    "generator.autoscale={max: 2, dwell_s: 10}",
    "generator.max_starts_per_s=2",
    "generator.max_concurrent_groups=8",
    "learner.groups_per_step=8",
    "learner.group_size=4",
    "learner.total_steps=10000",
    "staleness.max_versions=3",
    "eval.prompts=0",
    "checkpoint.every_steps=1000",
    "run.max_restarts=0",
    "generator.startup_timeout_s=900",  # the machine may be busy
]
FROZEN_S = 8.0
"""Two replicas start the groups of a step in a quarter of this time."""
CHANGE = re.compile(r"generator\.autoscale: from (\d) to (\d) replicas, because (the learner|the staleness limit)")


@pytest.mark.timeout(3000)
def test_a_replica_is_added_while_the_learner_waits_and_drained_while_the_generators_wait(
    run_command: Run, model_path: str, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "scaled"
    command = run_command(
        "up", "-c", str(QUICKSTART), f"run.dir={run.parent}", f"run.name={run.name}",
        *small_overrides(model_path), *SETTINGS,
    )  # fmt: skip

    def changes() -> list[tuple[str, str, str]]:
        return [found for log in sorted((run / "logs").glob("*.log")) for found in CHANGE.findall(log.read_text())]

    def engines() -> int:
        return sum(name_of(each).startswith("VLLM::EngineCore") for each in processes_of(command.process))

    def steps() -> int:
        path = run / "steps.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    command.wait_for(lambda: len(changes()) == 1, timeout_s=1200, what="a second replica is wanted")
    assert changes() == [("1", "2", "the learner")]
    command.wait_for(lambda: engines() == 2, timeout_s=900, what="a second engine")

    [rank] = [each for each in processes_of(command.process) if re.match(PROCESSES["rank"], name_of(each))]
    deadline_s = time.monotonic() + 600
    while len(changes()) == 1:
        assert time.monotonic() < deadline_s, command.output()[-4000:]
        trained = steps()
        frozen_for(rank, FROZEN_S)
        command.wait_for(lambda trained=trained: steps() > trained, timeout_s=120, what="a step")
    assert changes() == [("1", "2", "the learner"), ("2", "1", "the staleness limit")]
    command.wait_for(lambda: engines() == 1, timeout_s=300, what="the end of one engine")

    command.process.send_signal(signal.SIGINT)
    assert command.wait(400) == 0, command.output()[-4000:]
    summary = json.loads((run / "summary.json").read_bytes())
    assert (summary["ledger_closed"], summary["groups_failed"]) == (True, {})
    assert summary["tokens_thrown_away"] == 0, "the drained replica has finished its groups"
    audit = run_command("audit", str(run))
    assert audit.wait(300) == 0, audit.output()[-4000:]


def frozen_for(process: psutil.Process, seconds: float) -> None:
    """Stops a process for some seconds, and lets it go on."""
    process.suspend()
    try:
        time.sleep(seconds)
    finally:
        process.resume()
