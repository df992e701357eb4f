"""Reward code with forbidden behaviour. Tests name it by import path; it runs in scoring processes only."""

import contextlib
import ctypes
import math
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.data.prompts import Task

NOT_CALLABLE = 3


def length(task: Task, completion: str) -> float:
    return float(len(completion))


def misbehave(task: Task, completion: str) -> Any:
    """Does what the completion requests. Returns the length of any other completion."""
    behaviour = _BEHAVIOURS.get(completion)
    return behaviour(task) if behaviour else float(len(completion))


def _raise(task: Task) -> None:
    raise RuntimeError("the verifier is broken")


def _raise_unprintable(task: Task) -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise ValueError("no")

    raise Unprintable


def _hang(task: Task) -> None:
    threading.Event().wait()


def _hang_in_c(task: Task) -> None:
    ctypes.PyDLL(None).pause()  # PyDLL keeps the interpreter's lock, so no Python code of the process runs any more


def _segfault(task: Task) -> None:
    ctypes.string_at(0)


def _eat_memory(task: Task) -> None:
    hoard = []
    while True:
        hoard.append(bytearray(16 * 2**20))


def _fork_and_return(task: Task) -> float:
    os.fork()
    return 1.0


def _fork_and_hang(task: Task) -> None:
    """Starts a child in the process's group and one in a session of its own. Writes their ids to the file."""
    in_group = os.fork()
    if in_group == 0:
        threading.Event().wait()
    command = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    own_session = subprocess.Popen(command, start_new_session=True)
    Path(task.metadata["pids_file"]).write_text(f"{in_group} {own_session.pid}")
    threading.Event().wait()


def _leave_children(task: Task) -> float:
    for _ in range(40):
        if os.fork() == 0:
            threading.Event().wait()
    return 1.0


def _die_with_a_child_that_holds_the_socket(task: Task) -> None:
    child = os.fork()
    if child == 0:
        threading.Event().wait()
    Path(task.metadata["pids_file"]).write_text(str(child))
    os._exit(3)


def _print_without_end(task: Task) -> None:
    with contextlib.suppress(OSError):
        while True:
            os.write(1, b"x" * 65536)
            os.write(2, b"x" * 65536)


def _sends(message: bytes) -> Callable[[Task], None]:
    def send(task: Task) -> None:
        os.write(int(sys.argv[1]), message)  # the socket of the scoring process
        threading.Event().wait()

    return send


def _send_a_pickle(task: Task) -> None:
    """The pickle makes a folder when it is loaded."""

    class MakesAFolder:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (task.metadata["pids_file"],)

    _sends(pickle.dumps(MakesAFolder()) + b"\n")(task)


def _send_without_end(task: Task) -> None:
    while True:
        os.write(int(sys.argv[1]), b"x" * 65536)


def _environment(task: Task) -> float:
    return float(sum(name in os.environ for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "SOME_API_KEY")))


def _certificates(task: Task) -> float:
    return float(os.environ.get("SSL_CERT_FILE") == "/certificates")


def _heavy_imports(task: Task) -> float:
    return float(sum(name in sys.modules for name in ("torch", "ray", "vllm", "transformers")))


_BEHAVIOURS = {
    "raise": _raise,
    "raise_unprintable": _raise_unprintable,
    "raise_system_exit": lambda task: sys.exit(0),
    "nan": lambda task: math.nan,
    "inf": lambda task: -math.inf,
    "huge": lambda task: 10**400,
    "none": lambda task: None,
    "string": lambda task: "1.0",
    "list": lambda task: [1.0, 2.0],
    "bool": lambda task: True,
    "hang": _hang,
    "hang_in_c": _hang_in_c,
    "segfault": _segfault,
    "exit": lambda task: os._exit(0),
    "eat_memory": _eat_memory,
    "fork_and_return": _fork_and_return,
    "fork_and_hang": _fork_and_hang,
    "leave_children": _leave_children,
    "die_with_a_child": _die_with_a_child_that_holds_the_socket,
    "print_without_end": _print_without_end,
    "send_garbage": _sends(b"{not json\n"),
    "send_another_reply": _sends(b'{"id": 999, "results": []}\n'),
    "send_a_pickle": _send_a_pickle,
    "send_without_end": _send_without_end,
    "environment": _environment,
    "certificates": _certificates,
    "heavy_imports": _heavy_imports,
}
