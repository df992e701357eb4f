"""Device-seconds: for how long a pool of a run held its GPUs, and in which part of this time it worked.

    device-seconds of a process = its devices × the seconds since its start

A device is a GPU. A pool on CPUs counts processes instead: a rank is one, and an engine has
`generator.tensor_parallel_size`. A process with half a GPU (`gpus: 0.5`) counts half of one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec


class Pool(StrEnum):
    """A pool of processes that hold devices."""

    LEARNER = "learner"
    CRITIC = "critic"
    GENERATORS = "generators"


class Device(StrEnum):
    """The kind of device that a pool holds."""

    GPU = "gpu"
    PROCESS = "process"

    @property
    def words(self) -> str:
        """The unit of the device's time, as views show it."""
        return "GPU-seconds" if self is Device.GPU else "process-seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """A number of devices of one kind."""

    kind: Device
    number: float

    @classmethod
    def of(cls, *, gpus: float, processes: int) -> "Devices":
        """Returns the GPUs, or the processes if they have no GPU."""
        return cls(kind=Device.GPU, number=gpus) if gpus else cls(kind=Device.PROCESS, number=processes)


class DeviceTime(msgspec.Struct, frozen=True, kw_only=True):
    """The device-seconds of a pool, in three parts. `starting_s`: its processes were in the state `starting`.
    `waiting_s`: a learner or a critic waited for groups; for generators, slots of an engine generated nothing.
    `working_s` is the rest."""

    pool: Pool
    device: Device
    starting_s: float = 0.0
    waiting_s: float = 0.0
    working_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All device-seconds of the pool."""
        return self.starting_s + self.waiting_s + self.working_s

    def plus(self, other: "DeviceTime", *, sign: int = 1) -> "DeviceTime":
        """Returns this time with that of `other` added; with `sign` -1, subtracted."""
        return msgspec.structs.replace(
            self,
            starting_s=self.starting_s + sign * other.starting_s,
            waiting_s=self.waiting_s + sign * other.waiting_s,
            working_s=self.working_s + sign * other.working_s,
        )


def device_time(pool: Pool, devices: Devices, state_seconds: Mapping[str, float]) -> DeviceTime:
    """Returns the device-seconds of a pool that holds `devices`, computed from its seconds in each state.

    >>> device_time(Pool.LEARNER, Devices.of(gpus=4.0, processes=4), {"starting": 2.0, "optimizer": 1.0}).working_s
    4.0
    """
    starting_s, total_s = state_seconds.get("starting", 0.0), sum(state_seconds.values())
    if pool is Pool.GENERATORS:
        waiting_s = total_s - starting_s - state_seconds.get("generating", 0.0)
    else:
        waiting_s = state_seconds.get("waiting_for_groups", 0.0)
    return DeviceTime(
        pool=pool,
        device=devices.kind,
        starting_s=devices.number * starting_s,
        waiting_s=devices.number * waiting_s,
        working_s=devices.number * (total_s - starting_s - waiting_s),
    )


def added(times: Iterable[DeviceTime], *, less: Iterable[DeviceTime] = ()) -> tuple[DeviceTime, ...]:
    """Returns the sums of `times`, one for each pool and kind of device. The times `less` are subtracted."""
    sums: dict[tuple[Pool, Device], DeviceTime] = {}
    for sign, part in ((1, times), (-1, less)):
        for time in part:
            key = (time.pool, time.device)
            sums[key] = sums.get(key, DeviceTime(pool=time.pool, device=time.device)).plus(time, sign=sign)
    return tuple(sums.values())


class PoolCost(msgspec.Struct, frozen=True, kw_only=True):
    """The device-seconds of a pool since the run began (`asyncrl.learner.costs`), with the parts that were lost: to
    starts, to waiting, to steps that were trained again, and to steps that were skipped, because a loss or a gradient
    was not finite. No second is in two parts. `per_token_s` is `device_s` for each trained token; None if no token was
    trained."""

    pool: Pool
    device: Device
    device_s: float
    starting_s: float
    waiting_s: float
    again_s: float
    skipped_s: float
    per_token_s: float | None
