"""What a run has cost: device-seconds of each pool over restarts, lost and skipped steps, and changes of the pool."""

import doctest
from collections.abc import Sequence

import msgspec
import pytest
from made_up_run import make_step

from asyncrl.common import device_time as module
from asyncrl.common.device_time import Device, Devices, DeviceTime, Pool, PoolCost, added, device_time
from asyncrl.config.schema import Config
from asyncrl.learner.costs import costs, earlier_time, rank_devices, time_until_now
from asyncrl.learner.records import StepRecord


def time_of(
    pool: Pool, starting_s: float, waiting_s: float, working_s: float, *, device: Device = Device.GPU
) -> DeviceTime:
    return DeviceTime(pool=pool, device=device, starting_s=starting_s, waiting_s=waiting_s, working_s=working_s)


def steps_of(
    steps: Sequence[int], *, working_s: float, starting_s: float = 10.0, skipped: int | None = None
) -> list[StepRecord]:
    """Returns the records of steps of a learner with 2 GPUs. Before its first step it has worked for `working_s`
    GPU-seconds. In each step it works for 6, and waits for 2."""
    return [
        make_step(
            step,
            trained=step != skipped,
            trained_tokens=0 if step == skipped else 100,
            device_time=(time_of(Pool.LEARNER, starting_s, 2.0 * (index + 1), working_s + 6.0 * (index + 1)),),
        )
        for index, step in enumerate(steps)
    ]


def later(records: Sequence[StepRecord], *, than: StepRecord, starting_s: float) -> list[StepRecord]:
    """Returns the records of a process that was resumed after the record `than`."""
    start = (time_of(Pool.LEARNER, starting_s, 0.0, 0.0),)
    return [
        msgspec.structs.replace(each, device_time=added([*than.device_time, *start, *each.device_time]))
        for each in records
    ]


def test_devices_are_gpus_and_processes_where_there_are_none() -> None:
    config = Config.model_validate(
        {"learner": {"ranks": 4, "gpus": 0.5}, "critic": {"ranks": 2}, "algorithm": {"advantage": {"kind": "gae"}}}
    )
    assert rank_devices(config) == {
        Pool.LEARNER: Devices(kind=Device.GPU, number=2.0),
        Pool.CRITIC: Devices(kind=Device.PROCESS, number=2),
    }
    assert Devices.of(gpus=0.0, processes=4) == Devices(kind=Device.PROCESS, number=4)


def test_the_parts_of_a_process_are_those_of_its_states_times_its_devices() -> None:
    two = Devices(kind=Device.GPU, number=2.0)
    states = {"starting": 3.0, "waiting_for_groups": 4.0, "forward_backward": 5.0, "other": 1.0}
    assert device_time(Pool.CRITIC, two, states) == time_of(Pool.CRITIC, 6.0, 8.0, 12.0)
    states = {"starting": 3.0, "generating": 5.0, "idle": 1.0, "blocked_on_staleness": 2.0}
    assert device_time(Pool.GENERATORS, two, states) == time_of(Pool.GENERATORS, 6.0, 6.0, 10.0)


def test_pools_with_other_devices_are_added_apart() -> None:
    gpu, cpu = time_of(Pool.GENERATORS, 1.0, 2.0, 3.0), time_of(Pool.GENERATORS, 4.0, 5.0, 6.0, device=Device.PROCESS)
    assert added([gpu, cpu, gpu], less=[cpu]) == (
        time_of(Pool.GENERATORS, 2.0, 4.0, 6.0),
        time_of(Pool.GENERATORS, 0.0, 0.0, 0.0, device=Device.PROCESS),
    )


def test_a_resumed_learner_adds_its_time_to_that_of_the_last_record_and_generators_bring_all_of_theirs() -> None:
    earlier = [time_of(Pool.LEARNER, 10.0, 20.0, 30.0), time_of(Pool.GENERATORS, 1.0, 1.0, 1.0)]
    generators = [time_of(Pool.GENERATORS, 5.0, 6.0, 7.0)]
    more = Devices(kind=Device.GPU, number=4.0)
    assert time_until_now({Pool.LEARNER: more}, {"optimizer": 2.0}, earlier=earlier, generators=generators) == (
        time_of(Pool.LEARNER, 10.0, 20.0, 38.0),
        time_of(Pool.GENERATORS, 5.0, 6.0, 7.0),
    )


def test_the_cost_of_a_run_by_hand() -> None:
    records = steps_of(range(0, 10), working_s=4.0, skipped=3)
    assert costs(records) == (
        PoolCost(
            pool=Pool.LEARNER,
            device=Device.GPU,
            device_s=94.0,
            starting_s=10.0,
            waiting_s=18.0,
            again_s=0.0,
            skipped_s=8.0,
            per_token_s=94.0 / 900,
        ),
    )


def test_steps_that_were_trained_again_are_paid_for_twice() -> None:
    first = steps_of(range(0, 10), working_s=4.0)
    # killed after step 9, resumed from step 6, killed after step 7, and resumed from step 6 again
    second = later(steps_of(range(6, 8), working_s=0.0, starting_s=0.0), than=first[-1], starting_s=10.0)
    third = later(steps_of(range(6, 9), working_s=0.0, starting_s=0.0), than=second[-1], starting_s=10.0)
    [spent] = costs([*first[:6], *third], lost=[*first[6:], *second])
    assert (spent.device_s, spent.starting_s, spent.again_s) == (10 + 4 + 80 + 10 + 16 + 10 + 24, 30.0, 6 * 8.0)
    assert spent.waiting_s == 2.0 * 9, "the waits of lost steps are in the part of these steps"
    assert spent.per_token_s == spent.device_s / 900
    assert earlier_time(first[:6], first[6:]) == first[-1].device_time, "lost steps are not forgotten"
    assert earlier_time([], first) == first[-1].device_time
    assert earlier_time([], []) == ()


def test_costs_that_are_not_known_are_left_out() -> None:
    old = [make_step(0), make_step(1)]
    assert costs(old) == costs([]) == ()
    # a newer version goes on with a run of an earlier one: its sums would lack the earlier time
    assert earlier_time([*old, *steps_of([2], working_s=0.0)], []) is None
    assert costs([*old, *steps_of([2], working_s=0.0)]) == ()
    [spent] = costs([msgspec.structs.replace(steps_of([0], working_s=0.0)[0], trained_tokens=0)])
    assert spent.per_token_s is None


@pytest.mark.parametrize("number", [-5.0, 0.0, 1e308])
def test_records_of_another_program_give_costs_and_no_error(number: float) -> None:
    strange = make_step(1, device_time=(time_of(Pool.LEARNER, number, number, number),))
    for lost in ([], [strange]):
        for spent in costs([*steps_of([0], working_s=3.0), strange], lost=lost):
            assert min(spent.waiting_s, spent.again_s, spent.skipped_s) >= 0.0


def test_a_record_of_another_program_with_thousands_of_entries_has_one_cost_for_each_kind_of_device() -> None:
    many = make_step(0, trained_tokens=10, device_time=(time_of(Pool.LEARNER, 0.5, 0.25, 0.25),) * 5000)
    again = make_step(1, trained_tokens=10, device_time=(time_of(Pool.LEARNER, 6000.0, 0.0, 0.0),))
    for records in ([many], [again, many]):
        assert len(costs(records, lost=[many])) == 1
    assert earlier_time([many], []) == (time_of(Pool.LEARNER, 2500.0, 1250.0, 1250.0),)


def test_records_have_only_pools_and_devices_that_exist() -> None:
    line = msgspec.json.encode(steps_of([0], working_s=0.0)[0])
    assert msgspec.json.decode(line, type=StepRecord).device_time == steps_of([0], working_s=0.0)[0].device_time
    for wrong in (line.replace(b'"learner","device"', b'"\\u001b[31m","device"'), line.replace(b'"gpu"', b'"tpu"')):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(wrong, type=StepRecord)


def test_the_examples_of_the_documentation_hold() -> None:
    assert doctest.testmod(module).failed == 0
