"""A replica reserves nothing before it has loaded weights, commits only verified groups, and settles every ticket."""

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import pytest
from buffer_scenes import everything_else_runs
from pool import TASKS, empty_pool, started_pool, until
from scraped import scraped
from stacks import functions_of_asyncrl

import asyncrl
from asyncrl.buffer.groups import Groups, Slot
from asyncrl.buffer.ledger import Event, Fate
from asyncrl.buffer.records import CommitOutcome, FailedTicket, Failure, GroupMeta, LeaseWait, Refusal
from asyncrl.common.device_time import Device, DeviceTime, Pool
from asyncrl.common.version import Version
from asyncrl.coordinator.client import CoordinatorClient, perform
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.prompts import Task
from asyncrl.environments.scores import Score
from asyncrl.errors import ActorGone, DataError, FailureClass
from asyncrl.generation.evaluation import Rewards, evaluate
from asyncrl.generation.generator import throttle_of
from asyncrl.generation.interfaces import LoadTimes
from asyncrl.generation.rollout import AnswerNumbers
from asyncrl.metrics.catalogue import GENERATOR_STATES
from asyncrl.metrics.vllm_counters import PromptTokens
from asyncrl.weights.manifest import Manifest


@pytest.mark.asyncio
async def test_steps_are_filled_and_every_sample_is_accounted_for() -> None:
    async with started_pool() as (pool, _):
        leases = [await pool.step() for _ in range(6)]
        for lease in leases:
            assert len(lease.groups) == 4
            for group in lease.groups:
                assert 0 <= lease.step - group.meta.oldest <= 1
                rows = pool.rows.kept[group.meta.key]
                assert rows["token_mask"].sum(1).tolist() == list(group.meta.completion_tokens)
                sampled = rows["weight_versions"][rows["token_mask"] > 0]
                assert (len(sampled), sampled.min()) == (group.meta.generated_tokens, group.meta.oldest)
        status = pool.coordinator.status()
        assert status.account.closed
        assert status.account.fates[Fate.TRAINED].groups == 24
        read = pool.metrics["a"].registry.get_sample_value
        labels = {"environment": "test"}
        rollouts = read("asyncrl_rollout_duration_seconds_count", labels)
        assert read("asyncrl_reward_duration_seconds_count", labels) == rollouts
        assert (rollouts or 0) >= 24


@pytest.mark.asyncio
async def test_few_functions_are_between_a_delivery_and_the_change_of_its_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over Ray there are three more: `patiently`, `finished` and `CoordinatorActor.perform`."""
    found: list[list[str]] = []
    commit = Groups.commit

    def noted(groups: Groups, slot: Slot, meta: GroupMeta, *, step: int) -> None:
        found.append([*functions_of_asyncrl(), Groups.commit.__qualname__])
        commit(groups, slot, meta, step=step)

    monkeypatch.setattr(Groups, "commit", noted)
    async with started_pool() as (pool, _):
        await pool.step()
    assert found[0][0] == "Delivery.run"
    assert max(map(len, found)) <= 7, found


@pytest.mark.asyncio
async def test_groups_that_end_shortly_after_each_other_are_delivered_together() -> None:
    async with empty_pool() as pool:
        put, delivered = pool.rows.put, list[int]()

        async def noted(rows_by_key: Mapping[str, BatchedDataDict]) -> None:
            delivered.append(len(rows_by_key))
            await put(rows_by_key)

        pool.rows.put = noted  # type: ignore[method-assign]
        pool.add("a")
        await pool.publish(0)
        await until(lambda: pool.counts.ready == 8)
        assert delivered[0] < max(delivered), "the first one is delivered at once, and later ones together"


@pytest.mark.asyncio
async def test_a_replica_asks_for_nothing_before_it_has_loaded_a_version() -> None:
    async with empty_pool() as pool:
        engine = pool.add("a")
        await until(lambda: "a" in pool.coordinator.status().reports)
        await everything_else_runs()
        assert pool.coordinator.status().account.issued.groups == 0
        await pool.publish(0)
        await until(lambda: engine.running > 0)


@pytest.mark.asyncio
async def test_a_ticket_that_waits_for_the_throttle_takes_a_slot_like_one_that_is_generated() -> None:
    async with started_pool(generator={"max_starts_per_s": 0.01}) as (pool, _):
        await until(lambda: pool.counts.reserved > 1)
        held, slots = pool.counts.reserved, pool.config.generator.max_concurrent_groups
        await pool.generators["a"].report()
        status = pool.coordinator.status()
        (view,) = status.replicas
        assert (view.reserved_groups, view.free_slots) == (held, slots - held)
        report = status.reports["a"]
        assert (report.running_groups, report.slots) == (1, slots), "the other groups wait for their start"


@pytest.mark.asyncio
async def test_a_replica_reports_the_prompt_tokens_that_its_engine_did_not_compute_again() -> None:
    async with started_pool() as (pool, engine):
        engine.prompt_tokens = PromptTokens(all=80, cached=70)
        await pool.generators["a"].report()
        totals = pool.coordinator.status().totals
        assert (totals.prompt_tokens, totals.cached_prompt_tokens) == (80, 70)


@pytest.mark.asyncio
async def test_a_late_joiner_gets_tickets_only_at_the_current_version() -> None:
    async with started_pool() as (pool, _):
        for _ in range(5):
            await pool.step()
        late = pool.add("late")
        await until(lambda: late.running > 0)
        assert late.loads[0] == Version(1, 5)


@pytest.mark.parametrize("scoring", [False, True])
@pytest.mark.asyncio
async def test_a_rollout_that_takes_too_long_says_whether_its_scoring_did(
    scoring: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def score(task: Task, completions: Sequence[str]) -> list[Score]:
        await asyncio.Event().wait()
        return []

    async with empty_pool(generator={"rollout_timeout_s": 1.0}) as pool:
        pool.scorer.score = score  # type: ignore[method-assign]
        engine = pool.add("a")
        if not scoring:
            engine.gate.clear()
        await pool.publish(0)
        expected = "; its scoring had not finished after" if scoring else "generator.rollout_timeout_s = 1 s"
        async with asyncio.timeout(60):
            while expected not in caplog.text:
                await asyncio.sleep(0)
    assert "took longer than generator.rollout_timeout_s = 1 s" in caplog.text
    assert ("its scoring had not finished" in caplog.text) == scoring
    assert ("environment.score_timeout_s = 10 s limits only one completion" in caplog.text) == scoring


@pytest.mark.asyncio
async def test_heartbeats_carry_the_progress_of_held_tickets() -> None:
    async with started_pool() as (pool, engine):
        engine.ends_one_in = 10**9
        await until(lambda: pool.counts.reserved == 3 and engine.running == 6 and engine.tokens)
        engine.gate.clear()
        await everything_else_runs()
        assert engine.running == 6
        await pool.generators["a"].report()
        progress = dict[str, int]()
        for held in pool.heartbeats("a"):
            progress |= held.tokens
        assert progress.keys() == pool.tickets("a").keys()
        assert sum(progress.values()) == engine.tokens
        await pool.generators["a"].report()
        assert pool.heartbeats("a")[-1].tokens == {}, "the buffer knows all of it"


@pytest.mark.asyncio
async def test_the_rollout_of_a_ticket_that_the_buffer_has_ended_is_ended_and_is_no_failure() -> None:
    async with started_pool() as (pool, engine):
        engine.gate.clear()
        generator = pool.generators["a"]
        await until(lambda: engine.running == 6)
        assert pool.tickets("a").keys() == {"0.0", "1.0", "2.0"}
        await pool.expire_tickets()
        assert pool.tickets("a") == {}
        await generator.report()
        await until(lambda: engine.running == 0)
        await until(lambda: engine.running == 6)
        assert pool.tickets("a").keys() == {"0.1", "1.1", "2.1"}
        engine.gate.set()
        lease = await pool.step()
        assert {(group.meta.group, group.meta.attempt) for group in lease.groups} >= {(0, 1), (1, 1), (2, 1)}
        status = pool.coordinator.status()
        assert (status.account.closed, pool.failures.total()) == (True, 0)
        assert status.account.events[Event.FAIL_REFUSED] == status.account.events[Event.COMMIT_LATE] == 0
        samples = pool.metrics["a"].registry.get_sample_value
        assert samples("asyncrl_generator_samples_total", {"outcome": "cancelled"}) == 6
        generator.drain()
        await pool.running["a"]  # it holds none of the tickets that have ended


@pytest.mark.asyncio
async def test_a_ticket_that_the_buffer_ended_while_it_waited_for_its_start_is_not_started() -> None:
    async with empty_pool() as pool:
        engine = pool.add("a")
        engine.gate.clear()
        startable, may_start = pool.updates["a"].startable, asyncio.Event()

        async def late() -> Version:
            if pool.counts.reserved:
                await may_start.wait()
            return await startable()

        pool.updates["a"].startable = late  # type: ignore[method-assign]
        await pool.publish(0)
        await until(lambda: pool.tickets("a").keys() == {"0.0", "1.0", "2.0"})
        await pool.generators["a"].report()
        await pool.expire_tickets()
        await pool.generators["a"].report()
        may_start.set()
        await until(lambda: engine.running == 6)
        assert pool.tickets("a").keys() == {"0.1", "1.1", "2.1"}
        assert len(engine.prompts) == 3, "no ticket that has ended was started"


@pytest.mark.asyncio
@pytest.mark.fault("F2")
async def test_a_killed_replica_loses_its_tickets_and_no_committed_group() -> None:
    async with started_pool() as (pool, doomed):
        await until(lambda: pool.counts.ready >= 2)
        doomed.gate.clear()
        await until(lambda: doomed.running > 0)
        committed = dict(pool.rows.kept)
        pool.coordinator.leave = _no_answer  # type: ignore[method-assign]  # a dead process says no goodbye
        pool.running["a"].cancel()
        await asyncio.gather(pool.running["a"], return_exceptions=True)
        held = pool.tickets("a").keys()
        assert held
        await pool.expire_tickets()
        assert pool.tickets("a") == {}
        pool.add("b")
        trained = {group.meta.key for _ in range(3) for group in (await pool.step()).groups}
        assert set(committed) - held <= trained | set(pool.rows.kept)
        status = pool.coordinator.status()
        assert status.account.closed
        assert status.account.events[Event.TICKET_EXPIRED] == len(held)
        assert status.account.fates[Fate.FAILED].groups == 0


async def _no_answer(*_: object, **__: object) -> None:
    raise ConnectionError


@pytest.mark.asyncio
async def test_a_failing_reward_is_a_data_failure_and_the_prompt_is_replaced() -> None:
    async with empty_pool() as pool:
        pool.scorer.fail = True
        pool.add("a")
        await pool.publish(0)
        await until(lambda: pool.failures["data/reward_raised"] >= 5)
        pool.scorer.fail = False
        await pool.step()
        status = pool.coordinator.status()
        exported = pool.metrics["a"].registry.get_sample_value(
            "asyncrl_reward_failures_total", {"reason": "reward_raised"}
        )
        assert exported == 2 * pool.failures["data/reward_raised"], "a group has two samples"
        assert status.account.closed


@pytest.mark.asyncio
@pytest.mark.fault("F19")
async def test_a_failed_sample_is_left_out_of_its_group_and_counted_in_metrics_and_failures() -> None:
    async with empty_pool(algorithm={"loss": "tis", "advantage": "reinforce_pp"}) as pool:
        pool.scorer.fail_first = True
        pool.add("a")
        await pool.publish(0)
        lease = await pool.step()
        assert {reward is None for group in lease.groups for reward in group.meta.rewards[:1]} == {True}
        assert all(group.meta.rewards[1] is not None for group in lease.groups)
        await until(lambda: sum(count.samples for count in pool.coordinator.status().failures) >= 4)
        status = pool.coordinator.status()
        [count] = status.failures
        assert (count.rollouts, count.groups) == (0, 0)
        assert count.first.prompt in {task.prompt for task in TASKS}
        assert status.failure_streak is None
        assert status.account.fates[Fate.FAILED].groups == 0
        read = pool.metrics["a"].registry.get_sample_value
        assert read("asyncrl_reward_failures_total", {"reason": "reward_raised"}) >= 4
        rewards = read("asyncrl_reward_count", {"environment": "test"})
        samples = read("asyncrl_generator_samples_total", {"outcome": "accepted"})
        assert rewards == (samples or 0) / 2, "a sample without a reward is not in the histogram of rewards"


@pytest.mark.asyncio
@pytest.mark.fault("F18")
async def test_a_commit_that_is_repeated_because_its_answer_was_lost_counts_once_and_its_rows_stay() -> None:
    async with empty_pool(environment={"on_error": "zero"}) as pool:
        commit = pool.coordinator.commit

        async def first_answer_lost(metas: Sequence[GroupMeta]) -> list[CommitOutcome]:
            await commit(metas)
            return await commit(metas)

        pool.coordinator.commit = first_answer_lost  # type: ignore[method-assign]
        pool.scorer.fail_first = True
        pool.add("a")
        await pool.publish(0)
        for lease in [await pool.step() for _ in range(3)]:
            assert {group.meta.key for group in lease.groups} <= set(pool.rows.kept)
        read = pool.metrics["a"].registry.get_sample_value

        def committed() -> int:
            fates = pool.coordinator.status().account.fates
            return sum(fates[fate].samples for fate in (Fate.TRAINED, Fate.LEASED, Fate.READY))

        await until(lambda: read("asyncrl_generator_samples_total", {"outcome": "accepted"}) == committed() >= 24)
        await until(lambda: pool.coordinator.status().failures[0].samples == committed() / 2)


@pytest.mark.asyncio
@pytest.mark.fault("F19")
async def test_a_reward_that_always_fails_stops_the_run_also_if_failed_samples_get_the_reward_0() -> None:
    async with empty_pool(environment={"on_error": "zero"}, generator={"max_data_failures": 3}) as pool:
        pool.scorer.fail = True
        pool.add("a")
        await pool.publish(0)
        assert await pool.coordinator.lease(1, wait_s=60.0) is LeaseWait.TOO_MANY_FAILURES


@pytest.mark.asyncio
async def test_failures_do_not_overtake_groups_whose_rows_are_still_being_stored() -> None:
    """Every second reward fails. There are never three failures in a row, even if storing the rows takes long."""
    async with empty_pool(generator={"max_data_failures": 3, "max_concurrent_groups": 8}) as pool:
        scored = itertools.count()
        score, put = pool.scorer.score, pool.rows.put

        async def every_second(task: Task, completions: Sequence[str]) -> list[Score]:
            if next(scored) % 2:
                raise DataError("the reward raised", reason="reward_raised")
            return await score(task, completions)

        async def slow(rows_by_key: Mapping[str, BatchedDataDict]) -> None:
            await everything_else_runs()
            await put(rows_by_key)

        pool.scorer.score, pool.rows.put = every_second, slow  # type: ignore[method-assign]
        pool.add("a")
        await pool.publish(0)
        for _ in range(4):
            await pool.step()
        assert pool.failures["data/reward_raised"] > 10
        assert await pool.coordinator.lease(1, wait_s=0.0) is not LeaseWait.TOO_MANY_FAILURES


@pytest.mark.asyncio
async def test_the_buffer_keeps_the_text_prompt_and_completion_of_a_failed_rollout() -> None:
    async with empty_pool() as pool:
        pool.scorer.fail = True
        pool.add("a")
        await pool.publish(0)
        await until(lambda: pool.failures)
        [count] = pool.coordinator.status().failures
        first = count.first
        assert first.message == "the reward raised; 2 of 2 completions of the group have no reward"
        assert first.prompt in {task.prompt for task in TASKS}
        assert first.completion == f"answer to {first.prompt}"


@pytest.mark.asyncio
@pytest.mark.fault("F24")
async def test_a_prompt_beyond_the_model_is_a_data_failure() -> None:
    limits = {"model": {"max_length": 4}, "data": {"max_prompt_tokens": 1}, "generator": {"max_completion_tokens": 2}}
    async with started_pool(**limits) as (pool, _):
        await until(lambda: pool.failures["data/prompt_length"] >= 3)


@pytest.mark.asyncio
async def test_a_drained_replica_commits_what_is_in_flight_and_takes_nothing_new() -> None:
    async with started_pool() as (pool, engine):
        await until(lambda: engine.running > 0)
        engine.gate.clear()
        pool.generators["a"].drain()
        assert pool.counts.reserved > 0
        ready = pool.counts.ready
        engine.gate.set()
        await pool.running["a"]
        assert pool.counts.reserved == 0
        assert pool.counts.ready >= ready + 1
        assert pool.counts.waiting == 0, "a drained replica gives no prompts back"


@pytest.mark.asyncio
@pytest.mark.fault("F16")
async def test_a_cancelled_wait_for_tickets_leaks_no_slot() -> None:
    async with started_pool() as (pool, _):
        await until(lambda: pool.counts.ready == 8)
        waiting = asyncio.create_task(pool.coordinator.reserve("b", Version(1, 0), 3, wait_s=60.0))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        before = pool.counts
        await pool.step()
        await until(lambda: pool.counts.ready == 8)
        assert (pool.counts.reserved, pool.counts.ready) == (before.reserved, before.ready)


@pytest.mark.asyncio
async def test_a_refused_reserve_says_why_after_its_wait() -> None:
    async with empty_pool() as pool:
        pool.coordinator.pause(1)
        reservation = await pool.coordinator.reserve("b", Version(1, 0), 3, wait_s=0.0)
        assert reservation.refusal is Refusal.PAUSED


@pytest.mark.asyncio
async def test_generator_and_buffer_say_in_their_metrics_which_run_they_are_of() -> None:
    async with empty_pool(model={"path": "models/m"}, algorithm={"loss": "tis"}) as pool:
        pool.add("a")
        labels = {
            "run_name": pool.config.run.name, "version": asyncrl.__version__, "model": "models/m",
            "environment": "reasoning_gym", "loss": "tis",
        }  # fmt: skip
        await pool.coordinator.start()
        for registry in (pool.metrics["a"].registry, await scraped(pool.coordinator)):
            assert registry.get_sample_value("asyncrl_run_info", labels) == 1


@pytest.mark.asyncio
@pytest.mark.fault("F40")
async def test_a_replica_that_was_declared_dead_clears_the_rows_that_it_comes_back_with() -> None:
    async with started_pool() as (pool, engine):
        engine.gate.clear()
        await until(lambda: engine.running > 0)
        mine = pool.tickets("a").keys()
        pool.coordinator.pause(1)
        await pool.expire_tickets()  # the buffer counts it as dead, although it was only slow
        engine.gate.set()
        await until(lambda: pool.coordinator.status().account.events[Event.COMMIT_LATE] == len(mine))
        await until(lambda: not mine & pool.rows.kept.keys())
        await pool.coordinator.resume(1)
        leases = [await pool.step() for _ in range(3)]
        assert not mine & {group.meta.key for lease in leases for group in lease.groups}
        assert pool.coordinator.status().account.closed


@pytest.mark.asyncio
@pytest.mark.fault("F37")
async def test_groups_whose_rows_could_not_be_stored_are_generated_again() -> None:
    async with started_pool() as (pool, _):
        await pool.step()
        pool.rows.fail_next_put = ActorGone("the actor's process has ended")
        leases = [await pool.step() for _ in range(4)]
        assert pool.rows.fail_next_put is None
        for lease in leases:
            assert {group.meta.key for group in lease.groups} <= pool.rows.kept.keys()
        status = pool.coordinator.status()
        assert pool.failures["infra/row_store"] > 0
        assert status.account.closed


@pytest.mark.asyncio
@pytest.mark.fault("F37")
@pytest.mark.parametrize("cleared", [True, False])
async def test_rows_of_a_put_whose_answer_was_lost_are_cleared(cleared: bool, caplog: pytest.LogCaptureFixture) -> None:
    async with started_pool() as (pool, _):
        put, clear, failed = pool.rows.put, pool.rows.clear, set()

        async def put_without_an_answer(rows_by_key: Mapping[str, BatchedDataDict]) -> None:
            await put(rows_by_key)
            if not failed:
                failed.update(rows_by_key)
                raise TimeoutError("storing 1 objects of rows took longer than 30 s")

        async def clear_too_late(keys: Sequence[str]) -> None:
            raise TimeoutError("clear took longer than 30 s")

        pool.rows.put = put_without_an_answer  # type: ignore[method-assign]
        if not cleared:
            pool.rows.clear = clear_too_late  # type: ignore[method-assign]
        for _ in range(3):
            await pool.step()
        pool.rows.clear = clear  # type: ignore[method-assign]
        assert failed
        assert (not failed & pool.rows.kept.keys()) is cleared
        assert ("may be left" in caplog.text) is not cleared
        assert pool.coordinator.status().account.closed


@pytest.mark.asyncio
async def test_a_failure_that_the_buffer_did_not_hear_of_expires() -> None:
    async with empty_pool() as pool:
        pool.scorer.fail = True
        pool.add("a")
        generator, unheard, known = pool.generators["a"], list[FailedTicket](), 0

        async def fail(tickets: Sequence[FailedTicket]) -> None:
            nonlocal known
            unheard.extend(tickets)
            known = len(pool.heartbeats("a"))
            raise TimeoutError("the buffer's fail took longer than 30 s")

        pool.coordinator.fail = fail  # type: ignore[method-assign]
        await pool.publish(0)
        await until(lambda: len(unheard) == pool.counts.reserved == 8)
        await everything_else_runs()
        await generator.report()
        assert any(held.complete and not held.tokens for held in pool.heartbeats("a")[known:]), (
            "it tells the buffer which tickets it does not hold any longer"
        )
        for _ in range(2):
            await generator.report()
            pool.clock.now_s += 20.0
        await generator.report()
        await pool.coordinator.start()
        await everything_else_runs()
        await pool.clock.passes(1.0)
        assert pool.coordinator.status().account.events[Event.TICKET_EXPIRED] == 8


@pytest.mark.asyncio
async def test_a_heldout_question_whose_reward_fails_does_not_spoil_the_others() -> None:
    async with started_pool() as (pool, engine):
        await until(lambda: engine.version is not None)
        score = pool.scorer.score

        async def picky(task: Task, completions: Sequence[str]) -> list[float]:
            if task.question == TASKS[1].question:
                raise DataError("the reward raised", reason="reward_raised", completion="c")
            return await score(task, completions)

        pool.scorer.score = picky  # type: ignore[method-assign]
        coordinator = CoordinatorClient(partial(perform, pool.coordinator))
        how = pool.config.eval.each_set()["heldout"]
        rewards = await evaluate(TASKS[:3], how=how, rollouts=pool.rollouts["a"], coordinator=coordinator, at_once=2)
        assert [None if isinstance(each, Failure) else each.non_greedy_tokens for each in rewards] == [0, None, 0]
        assert isinstance(rewards[0], Rewards)
        assert rewards[0].numbers == AnswerNumbers(
            components={}, completion_tokens=rewards[0].of_samples[0] + 1, truncated=0.0, turns=None
        ), "the reward of these tests is the length of the text, which has no end token"
        assert rewards[1] == Failure(
            failure_class=FailureClass.DATA,
            reason="reward_raised",
            message="the reward raised",
            prompt=TASKS[1].prompt,
            completion="c",
        )
        status = pool.coordinator.status()
        [reported] = status.failures
        assert (reported.rollouts, reported.groups, reported.first) == (1, 0, rewards[1])
        assert status.failure_streak is None, "it is no group of the training"


@pytest.mark.parametrize(("starts_per_s", "burst", "period_s"), [(0.25, 1, 4.0), (2.4, 2, 2 / 2.4), (200.0, 200, 1.0)])
def test_the_pace_of_starts_is_the_configured_one_below_one_a_second_too(
    starts_per_s: float, burst: int, period_s: float
) -> None:
    throttle = throttle_of(starts_per_s)
    assert (throttle.rate_limit, throttle.period) == (burst, pytest.approx(period_s))


@pytest.mark.asyncio
async def test_the_endpoint_of_a_replica_that_left_is_no_target_any_more() -> None:
    async with empty_pool() as pool:
        pool.add("a", metrics_address="127.0.0.1:9")
        await pool.publish(0)
        await pool.generators["a"].report()
        assert pool.coordinator.status().targets == {"a": "127.0.0.1:9"}
        pool.generators["a"].drain()
        await pool.running["a"]
        status = pool.coordinator.status()
        assert status.targets == {}
        assert "a" in status.reports, "the run's totals still count its report"


@pytest.mark.asyncio
async def test_what_a_replica_took_until_its_engine_was_ready_is_its_start_and_no_more() -> None:
    async with empty_pool() as pool:
        pool.clock.now_s = 30.0
        pool.add("a")
        pool.clock.now_s = 42.0
        read = pool.metrics["a"].registry.get_sample_value
        name = "asyncrl_generator_state_seconds_total"
        seconds = {state: read(name, {"state": state}) for state in GENERATOR_STATES}
        assert {state: total for state, total in seconds.items() if total} == {"starting": 30.0, "idle": 12.0}


@pytest.mark.asyncio
@pytest.mark.parametrize(("gpus", "device"), [(0.0, Device.PROCESS), (2.0, Device.GPU)])
async def test_a_replica_reports_the_time_of_its_devices(gpus: float, device: Device) -> None:
    async with empty_pool(generator={"gpus": gpus, "tensor_parallel_size": 2}) as pool:
        pool.clock.now_s = 30.0
        pool.add("a", node="node-1")
        pool.clock.now_s = 42.0
        await pool.generators["a"].report()
        report = pool.coordinator.status().reports["a"]
        assert report.device_time == (
            DeviceTime(pool=Pool.GENERATORS, device=device, starting_s=60.0, waiting_s=24.0, working_s=0.0),
        )
        assert report.node == "node-1"


@pytest.mark.asyncio
async def test_slots_of_groups_that_are_scored_wait_for_the_environment() -> None:
    async with started_pool() as (pool, _):
        score, scoring, scored = pool.scorer.score, list[Task](), asyncio.Event()

        async def slow(task: Task, completions: Sequence[str]) -> list[Score]:
            scoring.append(task)
            await scored.wait()
            return await score(task, completions)

        def shown(state: str) -> float:
            return (
                pool.metrics["a"].registry.get_sample_value("asyncrl_generator_state_seconds_total", {"state": state})
                or 0.0
            )

        pool.scorer.score = slow  # type: ignore[method-assign]
        await pool.publish(0)
        await until(lambda: len(scoring) == pool.counts.reserved == 8)
        before = shown("generating"), shown("waiting_for_environment")
        pool.clock.now_s += 8.0
        assert shown("generating") == before[0]
        assert shown("waiting_for_environment") == pytest.approx(before[1] + 8.0), "more groups than slots are scored"
        scored.set()


@pytest.mark.asyncio
async def test_while_weights_load_all_slots_are_paused_for_weights_and_no_longer() -> None:
    async with started_pool() as (pool, engine):
        generator, load = pool.generators["a"], engine.load
        loading, may_load = asyncio.Event(), asyncio.Event()

        async def slow_load(
            manifest: Manifest, buckets: Sequence[memoryview], *, on_paused: Callable[[], None] | None = None
        ) -> LoadTimes:
            assert on_paused is not None
            on_paused()
            loading.set()
            await may_load.wait()
            return await load(manifest, buckets)

        def shown() -> dict[str, float]:
            read = pool.metrics["a"].registry.get_sample_value
            name = "asyncrl_generator_state_seconds_total"
            return {state: read(name, {"state": state}) or 0.0 for state in GENERATOR_STATES}

        def growth(seconds: float) -> dict[str, float]:
            before = shown()
            pool.clock.now_s += seconds
            return {state: total - before[state] for state, total in shown().items() if total != before[state]}

        await pool.train()
        engine.gate.clear()
        await everything_else_runs()
        await generator.report()
        report = pool.coordinator.status().reports["a"]
        part = report.running_groups / report.slots
        assert part > 0
        assert growth(6.0)["generating"] == pytest.approx(6.0 * part)
        engine.load = slow_load  # type: ignore[method-assign]
        await pool.publish(1)
        await loading.wait()
        assert growth(5.0) == {"paused_for_weights": pytest.approx(5.0)}
        may_load.set()
        await until(lambda: generator.version == Version(1, 1))
        after = growth(4.0)
        assert "paused_for_weights" not in after
        assert sum(after.values()) == pytest.approx(4.0)
