"""Weights that a second process takes over: CUDA IPC on a GPU, a memory file on a CPU.

The first process shares one tensor after the other with `SharedWeights`, as a rank does, from tensors on the CPU. The
second one opens each group, which verifies its checksum on the CPU, and copies the tensors into memory of its own.
"""

import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from asyncrl.common.version import Version
from asyncrl.weights.manifest import ParameterSpec, checksum
from asyncrl.weights.transports.ipc import SharedGroup, SharedWeights, device_key, open_group
from gpu.rows import GB, CheckFailed, Row, synchronize
from gpu.sizes import Size

TENSORS = 4
DEADLINE_S = 120.0


class _Received(NamedTuple):
    """What the second process found: the checksums of its copies by name, and the seconds to open and to copy them."""

    checksums: dict[str, str]
    open_s: float
    copy_s: float


def sharing(size: Size) -> Iterator[Row]:
    """Shares four tensors. The first group is not measured, because it starts CUDA in the second process."""
    device = torch.device("cuda", 0) if size.device == "cuda" else torch.device("cpu")
    # These come from the device because random numbers take seconds on a CPU.
    weights = {
        f"tensor{index}": torch.randn(size.shared_bytes // 2, dtype=torch.bfloat16, device=device).cpu()
        for index in range(TENSORS)
    }
    ours, theirs = multiprocessing.Pipe()
    receiver = multiprocessing.get_context("forkserver").Process(target=_receive, args=(theirs, str(device)))
    receiver.start()
    theirs.close()
    try:
        share_s, received = _send(weights, ours, device=device)
    finally:
        ours.close()  # the receiver ends
        receiver.join(timeout=10)
        receiver.kill()
    for name, tensor in weights.items():
        if received[name].checksums[name] != _checksum(tensor):
            raise CheckFailed(f"the bytes of {name} changed on their way to the second process")
    measured = list(weights)[1:]
    way = "CUDA IPC" if device.type == "cuda" else "a memory file"
    seconds = {
        "shared: copied to the device, with the checksum": [share_s[name] for name in measured],
        "opened in the second process, with the checksum": [received[name].open_s for name in measured],
        "copied there, without a checksum": [received[name].copy_s for name in measured],
    }
    yield Row(f"{TENSORS} tensors of {size.shared_bytes / 2**20:.2f} MiB, {way}", "all bytes arrive")
    for what, each in seconds.items():
        yield Row(what, f"{size.shared_bytes / min(each) / GB:.2f} GB/s")


def _send(
    weights: dict[str, torch.Tensor], connection: Connection, *, device: torch.device
) -> tuple[dict[str, float], dict[str, _Received]]:
    """Shares one tensor after the other. Returns the seconds of each, and what the receiver found."""
    specs = [ParameterSpec(name, tuple(value.shape), "bfloat16", value.nbytes) for name, value in weights.items()]
    shared = SharedWeights(world_size=1, device=device)
    groups = shared.prepare(specs, iter(weights.items()), specs[0].nbytes, version=Version(1, 1))
    share_s: dict[str, float] = {}
    received: dict[str, _Received] = {}
    for names in groups:
        started_s = time.perf_counter()
        handles = shared.next_group(names)
        share_s[names[0]] = time.perf_counter() - started_s
        connection.send(handles)
        if not connection.poll(DEADLINE_S):
            raise TimeoutError(f"the second process did not answer within {DEADLINE_S:.0f} s")
        answer = connection.recv()
        if isinstance(answer, str):
            raise CheckFailed(f"the second process: {answer}")
        received[names[0]] = answer
    shared.release()
    return share_s, received


def _receive(connection: Connection, device_name: str) -> None:
    """Answers each group with a _Received, or with an error as text. Ends when the sender closes the connection."""
    device = torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    while True:
        try:
            handles: dict[str, SharedGroup] = connection.recv()
        except EOFError:
            return
        try:
            connection.send(_taken(handles[device_key(device)], device=device))
        except Exception as error:
            connection.send(f"{type(error).__name__}: {error}")


def _taken(group: SharedGroup, *, device: torch.device) -> _Received:
    started_s = time.perf_counter()
    opened = open_group(group, device=device)
    synchronize(device)
    opened_s = time.perf_counter()
    own = {name: tensor.clone() for name, tensor in opened}
    synchronize(device)
    copied_s = time.perf_counter()
    checksums = {name: _checksum(tensor) for name, tensor in own.items()}
    return _Received(checksums, opened_s - started_s, copied_s - opened_s)


def _checksum(tensor: torch.Tensor) -> str:
    return checksum([tensor.flatten().view(torch.uint8).cpu().numpy()])
