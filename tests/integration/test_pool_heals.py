"""The generators of a real run fail and change their number, and the run goes on.

A replica is killed in the middle of long answers: the other one continues them by tokens. While it is started again,
the engine of the other one is frozen, and is started again too. Then the pool is scaled in. The audit scores every
continued token again under the weights of its version. Weights are broadcast: each replica that fails leaves, and joins
again.
"""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import QUICKSTART, Run, small_overrides
from kills import kill, name_of, processes_of, ray_session

from asyncrl.buffer.records import LeasedGroup
from asyncrl.common.version import Version
from asyncrl.learner.saving import KeptSteps

pytestmark = [pytest.mark.integration, pytest.mark.campaign]

LIMIT = 5
"""staleness.max_versions. When the tickets of the killed replica end, the learner is a few versions further, and their
tokens can still be trained."""
LONG_ANSWERS = [
    "model.max_length=264",
    "model.tiny.warmup_steps=1",
    "generator.max_completion_tokens=256",
    "generator.temperature=2",  # almost uniform, so the end of the sequence is rare
    "generator.persist_every_tokens=8",
    "generator.replicas=2",
    "generator.max_concurrent_groups=3",  # the learner waits for groups, so each replica has answers at any time
    "generator.stall_timeout_s=8",
    "weights.transport=collective",
    "weights.load_timeout_s=15",  # the engine may be frozen while it loads weights
    "learner.groups_per_step=6",
    "learner.group_size=4",
    "learner.total_steps=10000",
    f"staleness.max_versions={LIMIT}",
    "buffer.heartbeat_timeout_s=10",
    "environment.reward=dense_reward:by_checksum",
    "eval.prompts=0",
    "checkpoint.every_steps=1000",
    "run.max_restarts=0",
    "audit.keep_weights=all",
]
IMPORTS = {"PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.mark.fault("F1")
@pytest.mark.fault("F2")
@pytest.mark.fault("F3")
@pytest.mark.fault("F4")
@pytest.mark.fault("F26")
@pytest.mark.timeout(900)
def test_replicas_that_fail_are_started_again_and_others_continue_their_answers(
    run_command: Run, model_path: str, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "long"
    command = run_command(
        "up", "-c", str(QUICKSTART), f"run.dir={run.parent}", f"run.name={run.name}",
        *small_overrides(model_path), f"model.path={tmp_path / 'model'}", *LONG_ANSWERS, **IMPORTS,
    )  # fmt: skip

    def last_broadcast_to(replicas: int, *, after: int) -> bool:
        membership, took_part = max(broadcasts_in(session).items(), default=(0, []))
        return membership > after and len(set(took_part)) == replicas

    command.wait_for(lambda: len(steps_of(run)) >= 2, timeout_s=300, what="a second step")
    session = Path(ray_session(command.process))
    command.wait_for(lambda: last_broadcast_to(2, after=0), timeout_s=300, what="a broadcast to both")
    command.wait_for(lambda: len(staged_in(command.process)) == 1, timeout_s=60, what="one memory for both replicas")
    before = max(broadcasts_in(session))
    kill(run, "generator")
    command.wait_for(lambda: last_broadcast_to(1, after=before), timeout_s=300, what="a broadcast to the other one")
    time.sleep(1)  # lets it load them: an engine that is frozen meanwhile is found later than one that generates
    before = max(broadcasts_in(session))
    oldest_engine(command.process).suspend()
    command.wait_for(
        lambda: command.output().count("has started again") == 2, timeout_s=300, what="the restart of both"
    )
    replicas = set(re.findall(r"replica (\S+) is lost", command.output()))
    assert replicas == set(re.findall(r"replica (\S+) has started again", command.output())), "they keep their names"
    assert len(replicas) == 2, "each replica has failed once"
    command.wait_for(lambda: last_broadcast_to(2, after=before), timeout_s=300, what="a broadcast to both again")
    command.wait_for(lambda: len(staged_in(command.process)) == 1, timeout_s=60, what="one memory again")
    before = max(broadcasts_in(session))
    scale = run_command("scale", str(run), "generators=1")
    assert scale.wait(300) == 0, scale.output()
    trained = len(steps_of(run))
    command.wait_for(lambda: len(steps_of(run)) > trained, timeout_s=300, what="a step with one replica")
    command.wait_for(lambda: last_broadcast_to(1, after=before), timeout_s=300, what="a broadcast to one replica")
    command.process.send_signal(signal.SIGINT)
    assert command.wait(400) == 0, command.output()[-4000:]
    by_broadcast = sum(map(len, broadcasts_in(session).values()))
    assert by_broadcast > trained / 2, "most versions came by broadcast"
    summary = json.loads((run / "summary.json").read_bytes())
    assert (summary["ledger_closed"], summary["groups_failed"]) == (True, {})
    assert summary["max_token_staleness"] <= LIMIT

    kept = KeptSteps(run)
    batches = [kept.batch(Version(1, step)) for step in range(summary["steps"])]
    groups: list[LeasedGroup] = [group for batch in batches if batch is not None for group in batch[0].groups]
    continued = [group for group in groups if group.meta.continued_tokens]
    assert continued, "no trained group was continued"
    for group in continued:
        assert group.meta.attempt > 0
        assert group.deadline <= group.meta.oldest + LIMIT
        assert 0 < group.meta.continued_tokens <= group.meta.generated_tokens
    assert summary["tokens_continued"] >= sum(group.meta.continued_tokens for group in continued)
    assert f"{summary['tokens_continued']} stored tokens" in command.output()

    audit = run_command("audit", str(run), **IMPORTS)
    assert audit.wait(300) == 0, audit.output()[-4000:]
    assert "tokens were scored again under the weights of their versions" in audit.output()


def broadcasts_in(session: Path) -> dict[int, list[str]]:
    """Returns for each membership the replicas that got a version by broadcast, once for each version, from their
    logs."""
    found: dict[int, list[str]] = {}
    for path in (session / "logs").glob("worker-*.err"):
        text = path.read_text(errors="replace")
        for replica, membership in re.findall(r"replica (\S+): weights \S+ came by broadcast, membership (\d+)", text):
            found.setdefault(int(membership), []).append(replica)
    return found


def staged_in(command: psutil.Process) -> set[str]:
    """Returns the numbers of the memory files in which the replicas stage weights."""
    replicas = [each for each in processes_of(command) if name_of(each).startswith("ray::GeneratorActor")]
    lines = [line for each in replicas for line in Path(f"/proc/{each.pid}/maps").read_text().splitlines()]
    return {line.split()[4] for line in lines if "memfd:asyncrl-weights" in line}


def oldest_engine(command: psutil.Process) -> psutil.Process:
    """Returns the engine that was started first, of the replicas that live. Its parent is its replica's process."""
    replicas = [each for each in processes_of(command) if name_of(each).startswith("ray::GeneratorActor")]
    engines = [
        engine for each in replicas for engine in each.children() if name_of(engine).startswith("VLLM::EngineCore")
    ]
    return min(engines, key=psutil.Process.create_time)


def steps_of(run: Path) -> list[dict[str, Any]]:
    path = run / "steps.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
