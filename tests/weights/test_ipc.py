"""Weights in shared memory of learner and engine: groups have the right size, one exists at a time, none is left."""

import contextlib
import os
from pathlib import Path

import msgspec
import psutil
import pytest
import torch

from asyncrl.common.version import Version
from asyncrl.errors import ManifestMismatch, WeightError
from asyncrl.weights.manifest import ParameterSpec
from asyncrl.weights.transports import ipc
from asyncrl.weights.transports.ipc import (
    SharedGroup,
    SharedWeights,
    device_key,
    open_group,
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


def prepare(trainer: SharedWeights, buffer_bytes: int | None = None) -> list[list[str]]:
    specs = [
        ParameterSpec(name, tuple(value.shape), str(value.dtype).removeprefix("torch."), value.nbytes)
        for name, value in WEIGHTS.items()
    ]
    return trainer.prepare(specs, iter(WEIGHTS.items()), buffer_bytes, version=VERSION)


def own(handles: dict[str, SharedGroup]) -> SharedGroup:
    return handles[device_key(CPU)]


def named_segments() -> list[str]:
    """Returns the names of this process's shared memory that are visible on the machine."""
    mapped = [Path(region.path) for region in psutil.Process().memory_maps(grouped=True)]
    return [path.name for path in mapped if path.parent == Path("/dev/shm") and path.exists()]


def memory_files() -> set[int]:
    """Returns the inodes of the memory files that this process keeps open."""
    inodes = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            if "asyncrl-weights" in os.readlink(descriptor):
                inodes.add(descriptor.stat().st_ino)
    return inodes


def test_groups_fit_the_buffer_and_an_oversize_tensor_is_a_group_of_its_own() -> None:
    assert prepare(SharedWeights(world_size=1), 160) == [["a", "b"], ["large"], ["half", "z"]]
    for too_small in (0, 1):
        assert prepare(SharedWeights(world_size=1), too_small) == [[name] for name in WEIGHTS]
    assert prepare(SharedWeights(world_size=1)) == [list(WEIGHTS)]


def test_a_group_fits_half_of_the_free_memory_whatever_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    free = type("Free", (), {"available": 320})
    monkeypatch.setattr(ipc.psutil, "virtual_memory", lambda: free)
    assert prepare(SharedWeights(world_size=1), 2**30) == [["a", "b"], ["large"], ["half", "z"]]


@pytest.mark.parametrize("buffer_bytes", [1, 160, 2**30])
def test_what_the_engine_opens_is_what_the_learner_had(buffer_bytes: int) -> None:
    trainer, found = SharedWeights(world_size=1), {}
    for names in prepare(trainer, buffer_bytes):
        handles = trainer.next_group(names)
        travelled = msgspec.convert(msgspec.to_builtins(own(handles)), SharedGroup)
        assert travelled.version == VERSION
        found |= dict(open_group(travelled, device=CPU))
    trainer.release()
    assert list(found) == list(WEIGHTS)
    for name, tensor in WEIGHTS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), "opened tensors stay valid after the learner frees them"


def test_one_group_is_kept_at_a_time_and_none_afterwards() -> None:
    before = memory_files()  # other tests may have left some
    trainer = SharedWeights(world_size=1)
    first, second, _ = prepare(trainer, 160)
    assert own(trainer.next_group(first)).path
    assert len(memory_files() - before) == 1
    assert own(trainer.next_group(second)).path
    assert len(memory_files() - before) == 1
    assert not named_segments(), "a killed learner would leave a named segment behind"
    prepare(trainer, 160)  # a new refit discards the unfinished one
    assert not memory_files() - before
    trainer.next_group(first)
    trainer.release()
    trainer.release()
    assert not memory_files() - before


@pytest.mark.fault("F12")
def test_a_flipped_bit_is_refused_before_anything_is_applied() -> None:
    trainer = SharedWeights(world_size=1)
    [names] = prepare(trainer)
    group = own(trainer.next_group(names))
    with open(group.path, "r+b") as file:
        file.seek(5)
        file.write(b"\x01")
    with pytest.raises(ManifestMismatch, match="group of tensors with a, b, large"):
        open_group(group, device=CPU)
    trainer.release()


def test_groups_are_asked_for_in_order_and_after_they_were_prepared() -> None:
    trainer = SharedWeights(world_size=1)
    with pytest.raises(AssertionError, match="call prepare_weights_for_ipc"):
        trainer.next_group(["a"])
    first, second, third = prepare(trainer, 160)
    with pytest.raises(WeightError, match="the next group is a, b"):
        trainer.next_group(second)
    for names in (first, second, third):
        trainer.next_group(names)
    with pytest.raises(WeightError, match="the next group is none"):
        trainer.next_group(first)
    trainer.release()
    with pytest.raises(AssertionError, match="call prepare_weights_for_ipc"):
        trainer.next_group(first)


def test_groups_of_weights_that_have_changed_since_are_not_to_be_had_before_they_are_prepared_again() -> None:
    trainer = SharedWeights(world_size=1)
    trainer.void()
    first, second, _ = prepare(trainer, 160)
    shared = own(trainer.next_group(first))
    trainer.void()
    with pytest.raises(WeightError, match=r"changed since prepare_weights_for_ipc\(\) announced them as 1\.3"):
        trainer.next_group(second)
    assert open_group(shared, device=CPU), "an engine may still be loading the earlier group"
    prepare(trainer, 160)
    assert own(trainer.next_group(first)).path
    trainer.release()
