"""The output of reward code is passed on within limits for each line, for each second, and for memory."""

import os
import signal
import subprocess
import sys
import threading
import tracemalloc

import pytest

from asyncrl.environments import scoring_child
from asyncrl.environments.scoring_child import LINE_CHARS, LINES_A_SECOND, BoundedLines, OutputReader
from asyncrl.environments.secrets import Secrets


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def bounded(secrets: Secrets | None = None) -> tuple[BoundedLines, Clock]:
    clock = Clock()
    return BoundedLines(secrets or Secrets(), clock=clock), clock


def test_lines_are_joined_from_pieces_and_the_last_one_needs_no_end() -> None:
    lines, _ = bounded()
    assert lines.feed(b"on") == []
    assert lines.feed(b"e\ntwo\r\n\nth") == ["one", "two", ""]
    assert lines.feed("é".encode()[:1]) == []
    assert lines.feed("é".encode()[1:] + b"\n\xff\n") == ["thé", "�"]
    assert lines.feed(b"end") == []
    assert lines.flush() == ["end"]
    assert lines.flush() == []


def test_a_long_line_is_cut_and_takes_no_more_memory_than_is_shown() -> None:
    lines, _ = bounded()
    piece = b"x" * 65536
    tracemalloc.start()
    try:
        for _ in range(1000):
            assert lines.feed(piece) == []
        assert tracemalloc.get_traced_memory()[1] < 10 * len(piece)
    finally:
        tracemalloc.stop()
    assert lines.feed(b"\nshort\n") == ["x" * LINE_CHARS + "…", "short"]


def test_lines_beyond_the_limit_of_a_second_are_counted_in_one_line() -> None:
    lines, clock = bounded()
    passed = lines.feed(b"a\n" * (LINES_A_SECOND - 1) + b"last\n" + b"b\n" * 312)
    assert len(passed) == LINES_A_SECOND
    assert passed[-1] == "last"
    assert lines.feed(b"c\n" * 8) == []
    assert lines.due_s == 1.0
    clock.now_s = 1.0
    assert lines.feed(b"") == ["… 320 lines left out"]
    assert lines.due_s is None
    assert lines.feed(b"d\n") == ["d"]
    lines.feed(b"e\n" * LINES_A_SECOND)
    assert lines.flush() == ["… 1 lines left out"]


def test_the_rest_of_a_line_that_is_left_out_does_not_begin_the_next_one() -> None:
    lines, clock = bounded()
    lines.feed(b"a\n" * LINES_A_SECOND + b"left ")
    lines.feed(b"out\nkept ")
    clock.now_s = 1.0
    assert lines.feed(b"line\n") == ["… 1 lines left out", "kept line"]


def test_secrets_are_redacted_before_a_line_is_cut() -> None:
    secret = "sk-0123456789abcdef"
    lines, _ = bounded(Secrets({"KEY": secret}))
    straddling = lines.feed(b"x" * (LINE_CHARS - 5) + secret.encode() + b"y" * 5000 + b"\n")
    repeated = lines.feed(secret.encode() * 5000 + b"\n")
    for line in (*straddling, *repeated):
        assert "sk-" not in line
    assert straddling[0].endswith("x<KEY>…")
    assert lines.feed(b"sk-01234") + lines.feed(b"56789abcdef\n") == ["<KEY>"]


def test_control_characters_of_a_line_are_escaped() -> None:
    lines, _ = bounded()
    assert lines.feed(b"\x1b[31mred\x1b[0m\t50 %\r100 %\n") == ["\\u001b[31mred\\u001b[0m\t50 %\\u000d100 %"]


def printed(program: str, output: list[str] | None = None) -> list[str]:
    """Returns the lines that an `OutputReader` passes on from a program until it ends."""
    lines: list[str] = [] if output is None else output
    ours, theirs = os.pipe()
    others = set(threading.enumerate())
    with subprocess.Popen([sys.executable, "-c", program], stdout=theirs, stderr=subprocess.STDOUT) as process:
        os.close(theirs)
        reader = OutputReader(ours, pid=process.pid, secrets=Secrets(), output=lines.append)
        reader.join()
        assert set(threading.enumerate()) <= others, "the thread of the reader has ended"
    return lines


@pytest.mark.slow
def test_the_last_lines_of_a_process_that_ends_are_read_although_a_child_of_it_holds_the_pipe() -> None:
    lines = printed("""
import os, threading
child = os.fork()
if child == 0:
    threading.Event().wait()
os.write(1, f"{child}\\n".encode())
os.write(2, b"err\\nunfinished")
""")
    os.kill(int(lines[0]), signal.SIGKILL)
    assert lines[1:] == ["err", "unfinished"]


@pytest.mark.slow
def test_a_count_of_what_was_left_out_is_passed_on_although_nothing_follows() -> None:
    counted = threading.Event()

    class Noted(list[str]):
        def append(self, line: str) -> None:
            super().append(line)
            if line.startswith("…"):
                counted.set()

    lines = Noted()
    ours, theirs = os.pipe()
    program = f"import os, sys; os.write(1, b'x\\n' * {LINES_A_SECOND + 50}); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=theirs) as process:
        os.close(theirs)
        reader = OutputReader(ours, pid=process.pid, secrets=Secrets(), output=lines.append)
        assert counted.wait(60)
        assert process.stdin is not None
        process.stdin.close()
        reader.join()
    assert lines == ["x"] * LINES_A_SECOND + ["… 50 lines left out"]


@pytest.mark.slow
def test_a_flood_is_bounded_and_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring_child, "BYTES_A_SECOND", 2**20)
    lines = printed("import os\nfor _ in range(32): os.write(1, (b'x' * 63 + b'\\n') * 1024)")
    shown = [line for line in lines if line.startswith("x")]
    left_out = sum(int(line.split()[1]) for line in lines if line.startswith("…"))
    assert len(shown) + left_out == 32 * 1024
    assert len(shown) < 32 * 1024 / 4


@pytest.mark.slow
def test_a_receiver_that_fails_does_not_end_the_reading() -> None:
    class Failing(list[str]):
        def append(self, line: str) -> None:
            super().append(line)
            raise OSError("the disk is full")

    assert printed("print('a'); print('b')", Failing()) == ["a", "b"]
