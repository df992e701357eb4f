import os
import time

import pytest

from asyncrl.data.prompts import Task
from asyncrl.environments.scoring_messages import MAX_FRAME_BYTES, Progress, Request, encode


def test_a_frame_beyond_the_limit_is_refused_before_it_is_sent() -> None:
    huge = Request(id=7, task=Task(question="q", prompt="q", answer="a"), completions=("x" * (MAX_FRAME_BYTES + 1),))
    with pytest.raises(ValueError, match="beyond the limit"):
        encode(huge)


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
