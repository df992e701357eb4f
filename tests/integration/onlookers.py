"""Checks the sentence about what limits a run, as a user sees it: in `asyncrl top` and `asyncrl status` during the run,
and in its report."""

import html
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY, Command

from asyncrl.common.concern import Concern
from asyncrl.learner.records import StepRecord, read_lines, state_shares
from asyncrl.views.headline import Bottleneck, Bound, Headline, bottleneck
from asyncrl.views.report import read_run
from asyncrl.views.setting import setting_at

HEARD_S = 400.0
ONE_LINE = {"COLUMNS": "500"}
"""Width for a whole sentence. Without a terminal, the width would be 80 columns."""


def expect_advice(command: Command, run: Path, *, bound: Bound, advice: str, steps: int = 1) -> None:
    """Waits until the records show this bound, which costs little. Then repeats `top`, `status` and `status --json`
    until each has named the setting for it, and waits until the run has `steps` steps. The run must go on until
    then."""
    command.wait_for((run / "steps.jsonl").exists, timeout_s=HEARD_S, what="a first step")
    command.wait_for(lambda: recorded(run).bound is bound, timeout_s=HEARD_S, what=f"{bound} in the records")
    address = json.loads((run / "run.json").read_bytes())["ray_address"]
    status = ["status", run.name, "--address", address]
    top = ["top", str(run), "--once", "--every", "1"]

    def json_says() -> bool:
        answer = said_by(*status, "--json")
        found = json.loads(answer)["since_start"] if answer else {}
        limited = found.get("bottleneck")
        if limited is None or limited["bound"] != bound or advice not in limited["sentence"]:
            return False
        for side in ("learner_shares", "generator_shares"):
            assert sum(found[side].values()) == pytest.approx(1.0), side
        return True

    command.wait_for(lambda: advice in said_by(*top), timeout_s=HEARD_S, what=f"{advice!r} of top")
    command.wait_for(lambda: advice in said_by(*status), timeout_s=HEARD_S, what=f"{advice!r} of status")
    command.wait_for(json_says, timeout_s=HEARD_S, what=f"{bound} of status --json")
    command.wait_for(
        lambda: (run / "steps.jsonl").read_bytes().count(b"\n") >= steps, timeout_s=HEARD_S, what=f"{steps} steps"
    )


def said_by(*arguments: str) -> str:
    """Returns what the command prints without a terminal; "" if it ends with an error message."""
    answer = subprocess.run(
        [sys.executable, "-m", "asyncrl", *arguments],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=REPOSITORY,
        env=os.environ | ONE_LINE,
        check=False,
    )
    assert "Traceback" not in answer.stderr, answer.stderr
    return answer.stdout.strip() if answer.returncode == 0 else ""


def recorded(run: Path) -> Bottleneck:
    """Returns what limits the run according to its records so far."""
    steps = read_lines(run / "steps.jsonl", StepRecord)
    shares = (state_shares(steps, "learner_state_s"), state_shares(steps, "generator_state_s"))
    return bottleneck(*shares, room=setting_at(run).room)


def reported(run: Path) -> Bottleneck:
    """Returns what limited the run according to its records, and checks that its report says the same."""
    found = recorded(run)
    assert read_run(run).headline == Headline(concern=Concern.BOTTLENECK, sentence=found.sentence)
    assert found.sentence in html.unescape((run / "report.html").read_text())
    return found
