"""The cost of a run: the device-seconds of each pool since the run began, and the parts that were lost.

`asyncrl.common.device_time` says what a device-second is. Step records have the sums since the first start of the run,
up to the end of the step (`StepRecord.device_time`):

- Of the learner and the critic: their devices times the seconds of the learner's process, from its start.
- Of the generators: the sum over all replicas that ever sent a heartbeat, up to the last heartbeat of each. It includes
  replicas that failed, and those that `asyncrl scale` or the autoscaler added or removed.

A resumed run goes on adding to the last record that it wrote, also if this record is of a step that it trains again.
Time that no record has is left out: the time of the learner between its last record and its death, a start of a
replica that ended before its first heartbeat, and the time after the last step. The records do not say how long engines
worked for single groups that were discarded. So there is no number for the cost of these groups, only for that of
skipped steps.
"""

from collections.abc import Mapping, Sequence

from asyncrl.common.device_time import Devices, DeviceTime, Pool, PoolCost, added, device_time
from asyncrl.config.schema import Config
from asyncrl.learner.records import StepRecord


def rank_devices(config: Config) -> dict[Pool, Devices]:
    """Returns the devices of all ranks of the learner and of the critic."""
    return {
        Pool(name): Devices.of(gpus=pool.ranks * pool.gpus, processes=pool.ranks)
        for name, pool in config.rank_pools().items()
    }


def earlier_time(steps: Sequence[StepRecord], lost: Sequence[StepRecord]) -> tuple[DeviceTime, ...] | None:
    """Returns the device-seconds of a resumed run up to its newest record, which is in `steps` or in `lost` (the
    records of the file `LOST_STEPS`). None if they are not known, because an earlier version of asyncrl wrote some of
    the records; empty without a record."""
    records = [*steps, *lost]
    if any(not record.device_time for record in records):
        return None
    return added(max(records, key=_total_s).device_time) if records else ()


def time_until_now(
    ranks: Mapping[Pool, Devices],
    state_seconds: Mapping[str, float],
    *,
    earlier: Sequence[DeviceTime],
    generators: Sequence[DeviceTime],
) -> tuple[DeviceTime, ...]:
    """Returns the device-seconds of all pools since the run began. `state_seconds` are the seconds by state of this
    process of the learner. `earlier` has the time of all pools before this process started. `generators` has the time
    of the generators since the run began, and replaces their part of `earlier`."""
    own = [device_time(pool, devices, state_seconds) for pool, devices in ranks.items()]
    return added([*(time for time in earlier if time.pool is not Pool.GENERATORS), *own, *generators])


def costs(steps: Sequence[StepRecord], *, lost: Sequence[StepRecord] = ()) -> tuple[PoolCost, ...]:
    """Returns the cost of each pool and kind of device of a run with the records `steps`. `lost` are the records of the
    steps that were trained again (`LOST_STEPS`). Empty if the records have no device-seconds.

    The sums of the records only grow. So they give the order in which the records were written, also over restarts,
    and a record's difference to the one before is the time of its step.
    """
    if not steps or (newest := earlier_time(steps, lost)) is None:
        return ()
    again, skipped = list[DeviceTime](), list[DeviceTime]()
    before: tuple[DeviceTime, ...] = ()
    written = [*((record, False) for record in steps), *((record, True) for record in lost)]
    for record, is_lost in sorted(written, key=lambda each: _total_s(each[0])):
        span = added(record.device_time, less=before)
        if is_lost:
            again += span
        elif not record.trained:
            skipped += span
        before = record.device_time
    tokens = sum(record.trained_tokens for record in steps)
    return tuple(_cost(time, again=_of(time, again), skipped=_of(time, skipped), tokens=tokens) for time in newest)


def _of(time: DeviceTime, spans: Sequence[DeviceTime]) -> DeviceTime:
    """Returns the sum of those `spans` that are of the same pool and the same kind of device as `time`."""
    same = [span for span in spans if (span.pool, span.device) == (time.pool, time.device)]
    return added([DeviceTime(pool=time.pool, device=time.device), *same])[0]


def _cost(time: DeviceTime, *, again: DeviceTime, skipped: DeviceTime, tokens: int) -> PoolCost:
    # another program may have written the records; if their sums shrink, no part may become negative
    return PoolCost(
        pool=time.pool,
        device=time.device,
        device_s=time.total_s,
        starting_s=time.starting_s,
        waiting_s=max(0.0, time.waiting_s - again.waiting_s - skipped.waiting_s),
        again_s=max(0.0, again.waiting_s + again.working_s),
        skipped_s=max(0.0, skipped.waiting_s + skipped.working_s),
        per_token_s=time.total_s / tokens if tokens > 0 else None,
    )


def _total_s(record: StepRecord) -> float:
    return sum(time.total_s for time in record.device_time)
