"""Reward code that attacks what its process shares with the generator: memory, socket, and the names in its replies."""

import fcntl
import itertools
import json
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.data.prompts import Task

_numbers = itertools.count()


def attack(task: Task, completion: str) -> Any:
    """Does what the completion requests. Returns the length of any other completion."""
    behaviour = BEHAVIOURS.get(completion)
    return behaviour() if behaviour else float(len(completion))


def attack_group(task: Task, completions: list[str]) -> list[Any]:
    """Does for a group what `attack` does for a completion, with one call."""
    return [attack(task, completion) for completion in completions]


def new_name(task: Task, completion: str) -> dict[str, float]:
    """Returns a component whose name differs in each call, as a name that contains the completion would."""
    return {f"{completion} {next(_numbers)}": 1.0}


def _memory() -> int:
    return int(sys.argv[3])


def _hang() -> None:
    threading.Event().wait()


def _truncated(size: int) -> Callable[[], None]:
    def attack() -> None:
        os.ftruncate(_memory(), size)
        _hang()

    return attack


def _written(number: float, begun_s: float) -> Callable[[], None]:
    def attack() -> None:
        os.pwrite(_memory(), struct.pack("dd", number, begun_s), 0)
        _hang()

    return attack


def _write_behind_the_end() -> None:
    os.pwrite(_memory(), b"x" * 2**20, 8)
    _hang()


def _seal() -> None:
    fcntl.fcntl(_memory(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def _id() -> int:
    """Returns the id of the request that is being scored."""
    frame = sys._getframe()
    while not hasattr(frame.f_locals.get("self"), "_request"):
        assert frame.f_back is not None
        frame = frame.f_back
    return int(frame.f_locals["self"]._request)


def _send(message: bytes) -> None:
    message = message.replace(b"ID", str(_id()).encode())
    while message:
        message = message[os.write(int(sys.argv[1]), message) :]


def _sent(message: bytes) -> Callable[[], None]:
    def attack() -> None:
        _send(message + b"\n")
        _hang()

    return attack


def _forged(outcome: object) -> Callable[[], None]:
    reply = {"id": "ID", "outcomes": [[0, outcome]], "last": True}
    return _sent(json.dumps(reply).replace('"ID"', "ID").encode())


def _send_replies_without_end() -> None:
    while True:
        _send(b'{"id":ID,"outcomes":[],"last":false}\n' * 1000)


def _raised(text: str) -> Callable[[], None]:
    def attack() -> None:
        raise type("E" * 5000, (Exception,), {})(text)

    return attack


def _signalled(process: Callable[[], int]) -> Callable[[], None]:
    """SIGCONT ends no process, so the tests survive it if nothing keeps it back."""

    def attack() -> None:
        os.kill(process(), signal.SIGCONT)

    return attack


class _Key:
    def __repr__(self) -> str:
        return "\ud800" * 10_000


MEMORY = {
    "shrink": _truncated(0),
    "grow": _truncated(2**30),
    "cut": _truncated(9),
    "nan": _written(float("nan"), float("nan")),
    "infinite": _written(float("inf"), float("inf")),
    "minus_infinite": _written(float("-inf"), float("-inf")),
    "huge": _written(1e300, 1e300),
    "fraction": _written(-0.5, -1e300),
    "behind": _write_behind_the_end,
    "seal": _seal,
}
NAMES: dict[str, Callable[[], Any]] = {
    "high_surrogate": lambda: {"\ud800": 1.0},
    "low_surrogate": lambda: {"right": 1.0, "a\udfffb": 1.0},
    "escape": lambda: {"\x1b]0;title\x07": 1.0},
    "newline": lambda: {"a\nb": 1.0},
    "overridden": lambda: {"\u202eabc": 1.0},
    "long": lambda: {"x" * 201: 1.0},
    "very_long": lambda: {"x" * 2**22: 1.0},
    "many": lambda: {str(number): 1.0 for number in range(65)},
    "very_many": lambda: {str(number): 1.0 for number in range(50_000)},
    "bytes": lambda: {b"right": 1.0},
    "object": lambda: {_Key(): 1.0},
}
TEXTS = {
    "surrogates": _raised("\ud800\udfff"),
    "long_text": _raised("x" * 2**22),
    "escapes": _raised("\x1b[2J\udc80"),
}
MESSAGES = {
    "deep_list": _sent(b'{"id":ID,"outcomes":[],"last":true,"x":' + b"[" * 10**6),
    "deep_dict": _sent(b'{"id":ID,"outcomes":[],"last":true,"x":' + b'{"a":' * 10**5),
    "deep_outcome": _sent(b'{"id":ID,"outcomes":' + b"[" * 10**5),
    "no_utf8": _sent(b'{"id":ID,"outcomes":[],"last":true,"retire":"\xff\xfe"}'),
    "surrogate_escape": _sent(b'{"id":ID,"outcomes":[],"last":true,"retire":"\\ud800"}'),
    "many_digits": _sent(b'{"id":ID,"outcomes":[[' + b"9" * 10**6 + b',1]],"last":true}'),
    "nan_literal": _sent(b'{"id":ID,"outcomes":[[0,NaN]],"last":true}'),
    "infinite_number": _sent(b'{"id":ID,"outcomes":[[0,1e999]],"last":true}'),
    "retires_without_an_outcome": _sent(b'{"id":ID,"outcomes":[],"last":true,"retire":"tired"}'),
    "long_retirement": _sent(b'{"id":ID,"outcomes":[],"last":true,"retire":"' + b"x" * 10**6 + b'"}'),
    "long_failure": _forged({"type": "Failure", "reason": "reward_raised", "message": "x" * 10**6}),
    "many_parts": _forged({"type": "Components", "total": 1, "parts": {str(n): 1 for n in range(65)}}),
    "long_part": _forged({"type": "Components", "total": 1, "parts": {"x" * 201: 1}}),
    "infinite_part": _sent(
        b'{"id":ID,"outcomes":[[0,{"type":"Components","total":1,"parts":{"a":1e999}}]],"last":true}'
    ),
    "twice": _sent(b'{"id":ID,"outcomes":[[0,1],[0,1]],"last":true}'),
    "another_completion": _sent(b'{"id":ID,"outcomes":[[-1,1]],"last":true}'),
    "replies_without_end": _send_replies_without_end,
}
FORGED_NAMES = {
    "forged_escape": _forged({"type": "Components", "total": 1, "parts": {"\x1b[2J": 1}}),
    "forged_line": _forged({"type": "Components", "total": 1, "parts": {"a\nb": 1}}),
    "forged_override": _forged({"type": "Components", "total": 1, "parts": {"\u202e": 1}}),
}
SIGNALS = {
    "parent": _signalled(os.getppid),
    "group_of_parent": _signalled(lambda: -os.getpgid(os.getppid())),
    "all_processes": _signalled(lambda: -1),
    "parent_of_parent": _signalled(
        lambda: int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
    ),
    "from_a_child": lambda: subprocess.run(["kill", "-CONT", str(os.getppid())], check=True),
}
BEHAVIOURS: dict[str, Callable[[], Any]] = MEMORY | SIGNALS | NAMES | TEXTS | MESSAGES | FORGED_NAMES
