import math
import os
import struct
import subprocess
import sys
import time

import msgspec
import pytest

from asyncrl.data.prompts import Task
from asyncrl.environments.scoring_messages import (
    MAX_FAILURE_CHARS,
    MAX_MESSAGE_BYTES,
    NO_COMPLETION,
    Failure,
    Group,
    Progress,
    Request,
    RewardFailure,
    encode,
    sendable,
)


@pytest.mark.fault("F32")
def test_a_message_beyond_the_limit_is_refused_before_it_is_sent() -> None:
    task = Task(question="q", prompt="q", answer="a")
    huge = Group(task=task, completions=("x" * (MAX_MESSAGE_BYTES + 1),))
    with pytest.raises(ValueError, match="more than the limit"):
        encode(Request(id=7, groups=(huge,)))


def test_progress_is_seen_by_the_other_side_until_it_is_detached() -> None:
    file = Progress.new_file()
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
    file = Progress.new_file()
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


@pytest.mark.parametrize("size", [0, 8, 15, 17, 4096])
@pytest.mark.fault("F32")
def test_the_size_of_the_shared_memory_cannot_change(size: int) -> None:
    file = Progress.new_file()
    progress = Progress(file)
    progress.begin(5)
    with pytest.raises(PermissionError):
        os.ftruncate(file, size)
    with pytest.raises(PermissionError):
        os.pwrite(file, b"x", Progress.BYTES + size)
    os.close(file)
    assert progress.read()[0] == 5


@pytest.mark.parametrize("written", [math.nan, math.inf, -math.inf])
@pytest.mark.fault("F32")
def test_numbers_that_are_not_finite_are_read_as_an_unknown_completion_without_a_beginning(written: float) -> None:
    file = Progress.new_file()
    progress = Progress(file)
    os.pwrite(file, struct.pack("dd", written, written), 0)
    os.close(file)
    assert progress.read() == (NO_COMPLETION, math.inf)


@pytest.mark.parametrize("text", ["\ud800", "x" * MAX_FAILURE_CHARS + "\udfff" * 3, "\udc80" * MAX_FAILURE_CHARS])
def test_any_text_of_reward_code_is_made_sendable(text: str) -> None:
    sent = Failure(reason=RewardFailure.RAISED, message=sendable(text))
    assert msgspec.json.decode(encode(sent), type=Failure) == sent


def test_threads_may_decode_the_first_messages_of_a_process_at_the_same_time() -> None:
    """The scoring processes of a generator start together, and each has a thread. `msgspec.json.decode(line, type=…)`
    ended this program with SIGSEGV in 23 of 25 tries."""
    program = """
import sys, threading
from asyncrl.environments.scoring_messages import Started, decode, encode

sys.setswitchinterval(1e-6)
line, together = encode(Started()), threading.Barrier(16)

def first() -> None:
    together.wait()
    decode(line, Started)

threads = [threading.Thread(target=first) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", program], env=environment, timeout=120, check=False).returncode == 0
