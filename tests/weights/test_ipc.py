"""Weights in shared memory of learner and engine: groups have the right size, one exists at a time, none is left."""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import torch

from asyncrl.errors import ManifestMismatch, WeightError
from asyncrl.run.version import Version
from asyncrl.weights.transports import ipc
from asyncrl.weights.transports.ipc import (
    SharedGroup,
    device_key,
    get_weights_ipc_handles,
    open_group,
    release_weights_for_ipc,
    void_weights_for_ipc,
)

pytestmark = pytest.mark.slow  # imports torch

CPU = torch.device("cpu")
VERSION = Version(1, 3)
WEIGHTS = {
    "a": torch.arange(4.0),
    "b": torch.arange(6.0).reshape(2, 3) + 10,
    "large": torch.arange(100.0).reshape(10, 10),
    "half": torch.arange(3, dtype=torch.bfloat16),
    "z": torch.full((2, 1, 2), 7.0),
}


class Trainer:
    """The only rank, with the model `WEIGHTS`."""

    world_size = 1
    refit: ipc.Refit | None = None

    def weights_metadata(self) -> list[tuple[str, tuple[int, ...], str, int]]:
        return [
            (name, tuple(value.shape), str(value.dtype).removeprefix("torch."), value.nbytes)
            for name, value in WEIGHTS.items()
        ]

    def gather_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from WEIGHTS.items()


def prepare(trainer: Trainer, buffer_bytes: int | None = None) -> list[list[str]]:
    return ipc.prepare_weights_for_ipc(trainer, buffer_bytes, version=VERSION)


def own(handles: dict[str, SharedGroup]) -> SharedGroup:
    return handles[device_key(CPU)]


def named_segments() -> list[str]:
    """Returns the names of this process's shared memory that are visible on the machine."""
    mapped = [Path(region.path) for region in psutil.Process().memory_maps(grouped=True)]
    return [path.name for path in mapped if path.parent == Path("/dev/shm") and path.exists()]


def memory_files() -> list[str]:
    """Returns the link targets of the open descriptors of memory files."""
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(descriptor))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return [link for link in links if "asyncrl-weights" in link]


def test_groups_fit_the_buffer_and_an_oversize_tensor_is_a_group_of_its_own() -> None:
    assert prepare(Trainer(), 160) == [["a", "b"], ["large"], ["half", "z"]]
    for too_small in (0, 1):
        assert prepare(Trainer(), too_small) == [[name] for name in WEIGHTS]
    assert prepare(Trainer()) == [list(WEIGHTS)]


def test_a_group_fits_half_of_the_free_memory_whatever_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    free = type("Free", (), {"available": 320})
    monkeypatch.setattr(ipc.psutil, "virtual_memory", lambda: free)
    assert prepare(Trainer(), 2**30) == [["a", "b"], ["large"], ["half", "z"]]


@pytest.mark.parametrize("buffer_bytes", [1, 160, 2**30])
def test_what_the_engine_opens_is_what_the_learner_had(buffer_bytes: int) -> None:
    trainer, found = Trainer(), {}
    for names in prepare(trainer, buffer_bytes):
        handles = get_weights_ipc_handles(trainer, names)
        travelled = msgspec.convert(msgspec.to_builtins(own(handles)), SharedGroup)
        assert travelled.version == VERSION
        found |= dict(open_group(travelled, device=CPU))
    release_weights_for_ipc(trainer)
    assert list(found) == list(WEIGHTS)
    for name, tensor in WEIGHTS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), "opened tensors stay valid after the learner frees them"


def test_one_group_is_kept_at_a_time_and_none_afterwards() -> None:
    trainer = Trainer()
    first, second, _ = prepare(trainer, 160)
    assert own(get_weights_ipc_handles(trainer, first)).path
    assert len(memory_files()) == 1
    assert own(get_weights_ipc_handles(trainer, second)).path
    assert len(memory_files()) == 1
    assert not named_segments(), "a killed learner would leave a named segment behind"
    prepare(trainer, 160)  # a new refit discards the unfinished one
    assert not memory_files()
    get_weights_ipc_handles(trainer, first)
    release_weights_for_ipc(trainer)
    release_weights_for_ipc(trainer)
    assert not memory_files()


@pytest.mark.fault("F12")
def test_a_flipped_bit_is_refused_before_anything_is_applied() -> None:
    trainer = Trainer()
    [names] = prepare(trainer)
    group = own(get_weights_ipc_handles(trainer, names))
    with open(group.path, "r+b") as file:
        file.seek(5)
        file.write(b"\x01")
    with pytest.raises(ManifestMismatch, match="group with a, b, large"):
        open_group(group, device=CPU)
    release_weights_for_ipc(trainer)


def test_groups_are_asked_for_in_order_and_after_they_were_prepared() -> None:
    trainer = Trainer()
    with pytest.raises(AssertionError, match="call prepare_weights_for_ipc"):
        get_weights_ipc_handles(trainer, ["a"])
    first, second, third = prepare(trainer, 160)
    with pytest.raises(WeightError, match="the next group is a, b"):
        get_weights_ipc_handles(trainer, second)
    for names in (first, second, third):
        get_weights_ipc_handles(trainer, names)
    with pytest.raises(WeightError, match="the next group is none"):
        get_weights_ipc_handles(trainer, first)
    release_weights_for_ipc(trainer)
    with pytest.raises(AssertionError, match="call prepare_weights_for_ipc"):
        get_weights_ipc_handles(trainer, first)


def test_groups_of_weights_that_have_changed_since_are_not_to_be_had_before_they_are_prepared_again() -> None:
    trainer = Trainer()
    void_weights_for_ipc(trainer)
    first, second, _ = prepare(trainer, 160)
    shared = own(get_weights_ipc_handles(trainer, first))
    void_weights_for_ipc(trainer)
    with pytest.raises(WeightError, match=r"changed since prepare_weights_for_ipc\(\) announced them as 1\.3"):
        get_weights_ipc_handles(trainer, second)
    assert open_group(shared, device=CPU), "an engine may still be loading the earlier group"
    prepare(trainer, 160)
    assert own(get_weights_ipc_handles(trainer, first)).path
    release_weights_for_ipc(trainer)
