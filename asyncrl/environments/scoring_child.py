"""One operating system process of reward code, from outside: its socket, its progress, its output, and its end."""

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from asyncrl.environments.scoring_messages import MAX_REPLY_BYTES, Message, Progress, decode
from asyncrl.environments.secrets import Secrets
from asyncrl.shown_text import escaped

# Reads what reward code prints from a pipe, within bounds that hold for any amount of output.
#
# The reader never makes other scoring processes wait. It keeps one line in memory and passes on at most
# `LINES_A_SECOND` lines a second. Reward code that writes more than `BYTES_A_SECOND` bytes a second waits in its own
# `print`.

LINE_CHARS = 1000
"""Longest line that is passed on. The rest of a longer line is cut."""

LINES_A_SECOND = 200
"""Lines that are passed on in a second. Further lines are only counted."""
BYTES_A_SECOND = 16 * 2**20
"""Bytes that are read in a second. Reward code that writes more waits in its own `print`."""
_READ_BYTES = 2**16
_AFTER_DEATH_BYTES = 2**20
"""Largest output that is still read after the process has ended."""
_JOIN_TIMEOUT_S = 5.0
"""Seconds that `join` waits for the reading thread."""

_output_log = logging.getLogger(__name__)


class BoundedLines:
    """Splits a stream of bytes into lines. A line is redacted, cut at `LINE_CHARS`, and escaped.

    At most `LINES_A_SECOND` lines are passed on in a second. Further lines are counted. When the second is over, their
    number is passed on as a line of its own.
    """

    def __init__(self, secrets: Secrets, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._secrets = secrets
        self._clock = clock
        # Keep enough bytes that a secret which begins before the limit is complete: redaction happens before the cut.
        self._kept_bytes = 4 * (LINE_CHARS + secrets.longest)
        self._partial = bytearray()
        self._cut = False
        self._second_s = clock()
        self._passed = 0
        self._left_out = 0

    @property
    def due_s(self) -> float | None:
        """The time (of the clock) at which to report the number of left-out lines, also if no more output comes; None
        if no line was left out."""
        return self._second_s + 1.0 if self._left_out else None

    def feed(self, data: bytes) -> list[str]:
        """Adds `data`. Returns the lines to pass on: those that end in it and are not left out, and after a second the
        number of left-out lines."""
        lines = self._new_second()
        start = 0
        while self._passed < LINES_A_SECOND and (end := data.find(b"\n", start)) >= 0:
            self._keep(data[start:end])
            lines.append(self._line())
            self._passed += 1
            start = end + 1
        if (skipped := data.count(b"\n", start)) > 0:
            self._left_out += skipped
            self._begin_line()
            start = data.rindex(b"\n") + 1
        self._keep(data[start:])
        return lines

    def flush(self) -> list[str]:
        """Ends the stream. Returns its unfinished last line, and the count of left-out lines."""
        rest = [self._line()] if self._partial else []
        return rest + self._counted()

    def _new_second(self) -> list[str]:
        now_s = self._clock()
        if now_s - self._second_s < 1.0:
            return []
        self._second_s, self._passed = now_s, 0
        return self._counted()

    def _counted(self) -> list[str]:
        count, self._left_out = self._left_out, 0
        return [f"… {count} lines left out"] if count else []

    def _keep(self, data: bytes) -> None:
        room = self._kept_bytes - len(self._partial)
        self._partial += data[:room]
        self._cut = self._cut or len(data) > room

    def _line(self) -> str:
        text = self._secrets.redact(self._partial.decode(errors="replace").rstrip("\r"))
        if self._cut:  # the end of the text may be the first part of a secret
            text = text[: len(text) - self._secrets.longest]
        cut = self._cut or len(text) > LINE_CHARS
        self._begin_line()
        return escaped(f"{text[:LINE_CHARS]}…" if cut else text)

    def _begin_line(self) -> None:
        self._partial.clear()
        self._cut = False


class OutputReader:
    """Reads the pipe of one process in its own thread until the process has ended, and then closes the pipe."""

    def __init__(self, pipe: int, *, pid: int, secrets: Secrets, output: Callable[[str], None]) -> None:
        os.set_blocking(pipe, False)
        self._pipe = pipe
        self._death = os.pidfd_open(pid)
        self._lines = BoundedLines(secrets)
        self._output = output
        self._refused = False
        self._thread = threading.Thread(target=self._read, name="reward output", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Waits at most `_JOIN_TIMEOUT_S` until everything that the process printed before its end is passed on."""
        self._thread.join(_JOIN_TIMEOUT_S)

    def _read(self) -> None:
        try:
            self._read_while_alive()
            self._read_some(_AFTER_DEATH_BYTES)  # bounded: a child of the process may hold the pipe open and write on
            self._pass_on(self._lines.flush())
        finally:
            os.close(self._pipe)
            os.close(self._death)

    def _read_while_alive(self) -> None:
        death, poll = select.poll(), select.poll()
        death.register(self._death, select.POLLIN)
        poll.register(self._death, select.POLLIN)
        poll.register(self._pipe, select.POLLIN)
        begun_s, count = time.monotonic(), 0
        while True:
            due_s = self._lines.due_s
            events = dict(poll.poll(None if due_s is None else max(0.0, due_s - time.monotonic()) * 1000))
            if self._death in events:
                return
            if self._pipe not in events:
                self._pass_on(self._lines.feed(b""))
                continue
            read = self._read_some(_READ_BYTES)
            if read == 0:  # the process has closed its output and cannot open it again
                poll.unregister(self._pipe)
            now_s = time.monotonic()
            if now_s - begun_s >= 1.0:
                begun_s, count = now_s, 0
            count += read
            if count > BYTES_A_SECOND and death.poll((begun_s + 1.0 - now_s) * 1000):
                return

    def _read_some(self, limit: int) -> int:
        """Reads the available bytes, at most `limit`. Returns how many were read."""
        count = 0
        while count < limit:
            try:
                data = os.read(self._pipe, _READ_BYTES)
            except BlockingIOError:
                break
            if not data:
                break
            count += len(data)
            self._pass_on(self._lines.feed(data))
        return count

    def _pass_on(self, lines: list[str]) -> None:
        for line in lines:
            try:
                self._output(line)
            except Exception as error:  # an error of the log must not end scoring
                if not self._refused:
                    self._refused = True
                    _output_log.warning("cannot log the output of reward code: %s: %s", type(error).__name__, error)


_WORKER_MODULE = "asyncrl.environments.scoring_worker"
_REAP_TIMEOUT_S = 10.0
"""Seconds after which a killed process that has not ended is logged as an error."""

_log = logging.getLogger(__name__)


class Died(Exception):
    """The process has ended, closed its connection, or sent an unexpected message."""


class Late(Exception):
    """The deadline has passed."""


class ScoringChild:
    """A process of reward code, with its socket, the shared memory of its progress, and the reader of its output."""

    def __init__(self, *, environment: Mapping[str, str], secrets: Secrets, output: Callable[[str], None]) -> None:
        self._socket, theirs = socket.socketpair()
        progress = Progress.new_file()
        printed, prints = os.pipe()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", _WORKER_MODULE, str(theirs.fileno()), str(os.getpid()), str(progress)],
                stdin=subprocess.DEVNULL,
                stdout=prints,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno(), progress],
                env=environment,
                start_new_session=True,  # a process group of its own, so that one kill also reaches forked processes
            )
            self.progress = Progress(progress)
        finally:
            theirs.close()
            os.close(progress)
            os.close(prints)
        self._received = bytearray()  # the bytes after the last complete message
        self._death = os.pidfd_open(self.process.pid)
        self._reader = OutputReader(printed, pid=self.process.pid, secrets=secrets, output=output)

    def close(self) -> None:
        """Closes the socket, the pipe and the shared memory. Call it after the process has ended."""
        self._socket.close()
        self._reader.join()
        self.progress.close()
        os.close(self._death)

    def alive(self) -> bool:
        """Returns whether the process runs. Does not reap a dead process: until it is reaped, no other process can get
        its id or group."""
        try:
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:
            return False

    def send(self, message: bytes, *, deadline_s: float) -> None:
        self._socket.settimeout(max(0.001, deadline_s - time.monotonic()))
        try:
            self._socket.sendall(message)
        except TimeoutError as error:
            raise Late("does not read its requests") from error
        except OSError as error:
            raise Died("closed its connection") from error

    def receive(self, kind: type[Message], *, deadline: Callable[[], float]) -> Message:
        """Receives one message. Raises Late at the deadline, and Died. Watches the process as well as the socket,
        because a forked child may keep the socket open after the process has died."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._death, select.POLLIN)
        searched = 0
        while (end := self._received.find(b"\n", searched)) < 0:
            searched = len(self._received)
            left_s = deadline() - time.monotonic()
            if left_s <= 0:
                raise Late("does not answer")
            events = dict(poll.poll(left_s * 1000))
            if self._socket.fileno() in events:  # check this first: a dead process may have left replies
                self._received += self._read()
            elif events:
                raise Died("ended")
            if len(self._received) > MAX_REPLY_BYTES:
                raise Died(f"sent a message beyond the limit of {MAX_REPLY_BYTES} bytes")
        line, self._received = bytes(self._received[:end]), self._received[end + 1 :]
        try:
            return decode(line, kind)
        except (ValueError, RecursionError) as error:  # a DecodeError of msgspec is a ValueError, as that of UTF-8 is
            raise Died(f"sent a malformed message, {error}") from error

    def _read(self) -> bytes:
        with contextlib.suppress(ConnectionError):
            if data := self._socket.recv(2**20):
                return data
        raise Died("closed its connection")

    def kill(self) -> None:
        """Kills and reaps the process, its process group, and descendants that have left the group."""
        if self.process.returncode is not None:
            return  # already reaped, so its id may belong to another process
        descendants: list[psutil.Process] = []
        for pid in self.descendants():
            with contextlib.suppress(psutil.NoSuchProcess):
                descendants.append(psutil.Process(pid))
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for descendant in descendants:
            # psutil compares start times, so it does not kill another process that got the same pid meanwhile
            with contextlib.suppress(psutil.Error):
                descendant.kill()
        try:
            self.process.wait(timeout=_REAP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            _log.error("the scoring process %d has not ended after SIGKILL", self.process.pid)

    def descendants(self) -> list[int]:
        """Returns the ids of all descendants of the process that still run, as /proc lists them, nearest first."""
        found = _children(self.process.pid)
        for child in found:
            found.extend(_children(child))
        return found

    def ending(self) -> str:
        """Returns how the process has ended."""
        if self.process.returncode is None:
            return "still running"
        if self.process.returncode < 0:
            return f"signal {signal.Signals(-self.process.returncode).name}"
        return f"exit status {self.process.returncode}"


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has just ended
            found.extend(map(int, listing.read_text().split()))
    return found
