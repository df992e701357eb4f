import os
import subprocess
import sys
import time

import pytest

from asyncrl.data.prompts import Task
from asyncrl.environments.scoring_messages import MAX_MESSAGE_BYTES, Group, Progress, Request, encode


@pytest.mark.fault("F32")
def test_a_message_beyond_the_limit_is_refused_before_it_is_sent() -> None:
    task = Task(question="q", prompt="q", answer="a")
    huge = Group(task=task, completions=("x" * (MAX_MESSAGE_BYTES + 1),))
    with pytest.raises(ValueError, match="more than the limit"):
        encode(Request(id=7, groups=(huge,)))


def test_progress_is_seen_by_the_other_side_until_it_is_detached() -> None:
    file = os.memfd_create("progress")
    os.ftruncate(file, Progress.BYTES)
    ours, theirs = Progress(file), Progress(file)
    os.close(file)
    before_s = time.monotonic()
    theirs.begin(3)
    sample, since_s = ours.read()
    assert sample == 3
    assert before_s <= since_s <= time.monotonic()
    theirs.detach()
    theirs.begin(4)
    assert ours.read()[0] == 3


def test_no_reader_sees_a_time_that_is_half_written() -> None:
    file = os.memfd_create("progress")
    os.ftruncate(file, Progress.BYTES)
    progress = Progress(file)
    progress.begin(0)
    program = f"""
import sys
from asyncrl.environments.scoring_messages import Progress
progress = Progress({file})
progress.begin(1)
sys.stdout.write(".")
sys.stdout.flush()
while True:
    progress.begin(1)
"""
    before_s = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, pass_fds=[file]) as writer:
        assert writer.stdout is not None
        writer.stdout.read(1)
        try:
            torn = sum(progress.read()[1] < before_s for _ in range(500_000))
        finally:
            writer.kill()
            os.close(file)
    assert progress.read()[0] == 1
    assert torn == 0
