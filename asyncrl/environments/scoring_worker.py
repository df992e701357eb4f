"""The process that runs reward code: `python -m asyncrl.environments.scoring_worker SOCKET PARENT_PID PROGRESS`.

`scoring_process.py` starts it. It reads one `Start`, and then answers each `Request` with one or more replies. Messages
are lines of JSON on an inherited socket. PROGRESS is the file descriptor of the shared memory of `Progress`. Standard
output and standard error are a pipe to the parent. The module imports none of torch, ray and vllm, so that only the
environment decides how long the start takes.
"""

import ctypes
import io
import os
import resource
import socket
import sys
from typing import BinaryIO

import psutil

from asyncrl.config.schema import EnvironmentSection
from asyncrl.environments.group_scoring import GroupScoring
from asyncrl.environments.interfaces import build_reward
from asyncrl.environments.scoring_messages import (
    Message,
    Progress,
    Reply,
    Request,
    Start,
    Started,
    decode,
    encode,
    sendable,
)
from asyncrl.environments.secrets import Secrets, secrets_hint
from asyncrl.errors import ConfigError
from asyncrl.parent_death import die_with
from asyncrl.shown_text import hide, redacted
from asyncrl.user_code import describe_error

_SPARE_PROCESSES = 512
"""Processes and threads that reward code may add to those that the Unix user already has."""
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_LANDLOCK_CREATE_RULESET = 444
_LANDLOCK_RESTRICT_SELF = 446
_LANDLOCK_VERSION_OF_SCOPES = 6
_LANDLOCK_SCOPE_SIGNAL = 2


def main(connection: socket.socket, *, parent_pid: int, progress: Progress) -> None:
    """Serves requests until the parent closes its end of the socket. If the reward cannot be built, sends the error and
    returns."""
    _die_with(parent_pid)
    _scope_signals()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # flush every line, because the process may be killed at any time
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    messages = connection.makefile("rb")
    start = _receive(messages, Start)
    section = EnvironmentSection.model_validate_json(start.section)
    hide(Secrets({name: os.environ[name] for name in section.secrets if name in os.environ}).redact)

    def refuse(message: str, error: Exception) -> None:
        hint = secrets_hint(error, start.withheld)
        connection.sendall(encode(Started(error=sendable(redacted(message) + hint))))

    try:
        reward = build_reward(section)
    except ConfigError as error:
        return refuse(str(error), error)
    except Exception as error:  # raised by the constructor of the environment
        return refuse(f"environment.options: the environment cannot be built: {describe_error(error)}", error)
    own_pid = os.getpid()

    def send(reply: Reply) -> None:
        if os.getpid() != own_pid:
            os._exit(0)  # reward code has forked and this is the copy; only the original process replies
        connection.sendall(encode(reply))

    begin = progress.begin
    scoring = GroupScoring(reward, section, send=send, begin=begin, withheld=start.withheld)
    _limit(memory_bytes=section.score_memory_mib * 2**20)
    os.register_at_fork(after_in_child=progress.detach)  # reward code may fork: the copy must not write progress
    connection.sendall(encode(Started(form=reward.form)))
    while True:
        scoring.score(_receive(messages, Request))


def _receive(messages: BinaryIO, kind: type[Message]) -> Message:
    line = messages.readline()
    if not line.endswith(b"\n"):
        os._exit(0)  # the parent has closed its end or has died
    return decode(line, kind)


def _die_with(parent_pid: int) -> None:
    """Ends this process when the parent ends, even during a reward that hangs, and adopts orphans of reward code."""
    if sys.platform == "linux":
        # As a subreaper this process becomes the parent of orphans, so that killing its process tree reaches them.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    die_with(parent_pid)


def _scope_signals() -> None:
    """Lets this process and its descendants send signals only to each other: the signal scope of Landlock
    (`struct landlock_ruleset_attr` in linux/landlock.h). Linux before 6.12 does not have it, and nothing changes there.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, 1) < _LANDLOCK_VERSION_OF_SCOPES:
        return
    scopes = (ctypes.c_uint64 * 3)(0, 0, _LANDLOCK_SCOPE_SIGNAL)  # the first two numbers would limit files and networks
    ruleset = libc.syscall(_LANDLOCK_CREATE_RULESET, ctypes.byref(scopes), ctypes.sizeof(scopes), 0)
    if ruleset < 0:
        return
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # without this, Landlock refuses the next call
    libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _limit(*, memory_bytes: int) -> None:
    """Sets the limits for reward code. Call it after the imports, so that the limits need no allowance for them."""
    _lower(resource.RLIMIT_AS, psutil.Process().memory_info().vms + memory_bytes)
    _lower(resource.RLIMIT_CORE, 0)
    if sys.platform == "linux":
        # The kernel counts all threads of the user against this limit. It does not apply the limit to root.
        uid = os.getuid()
        running = psutil.process_iter(["uids", "num_threads"])
        threads = sum(
            each.info["num_threads"] or 0 for each in running if each.info["uids"] and each.info["uids"].real == uid
        )
        _lower(resource.RLIMIT_NPROC, threads + _SPARE_PROCESSES)


def _lower(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), parent_pid=int(sys.argv[2]), progress=Progress(int(sys.argv[3])))
