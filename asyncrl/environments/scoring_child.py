"""One operating system process of reward code, from outside: its socket, its progress, its output, and its end."""

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import psutil

from asyncrl.environments.output import OutputReader
from asyncrl.environments.scoring_messages import MAX_REPLY_BYTES, Message, Progress
from asyncrl.environments.secrets import Secrets

_WORKER_MODULE = "asyncrl.environments.scoring_worker"
_REAP_TIMEOUT_S = 10.0
"""Seconds in which a killed process must end, before that is logged as an error."""

_log = logging.getLogger(__name__)


class Died(Exception):
    """The process has ended, or sent an unexpected message."""


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
        self._received = bytearray()  # what was received after the last message
        self._death = os.pidfd_open(self.process.pid)
        self._reader = OutputReader(printed, pid=self.process.pid, secrets=secrets, output=output)

    def close(self) -> None:
        """Closes everything. Call it after the process has ended."""
        self._socket.close()
        self._reader.join()
        self.progress.close()
        os.close(self._death)

    def alive(self) -> bool:
        """Checks without reaping: until a dead process is reaped, no other process can get its id or group."""
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
        """Receives one message. Watches the process as well as the socket, because a forked child may keep the socket
        open after the process has died."""
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
            return msgspec.json.decode(line, type=kind)
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
            with contextlib.suppress(psutil.Error):  # psutil kills no other process that got the same pid meanwhile
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
