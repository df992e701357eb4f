"""Replicas whose engine dies, stands still or fails every rollout: they end, and their groups go elsewhere."""

import asyncio
from typing import Any

import pytest
from buffer_scenes import everything_else_runs
from pool import started_pool, until
from scraped import scraped

from asyncrl.buffer.fleet import Cause, ReplicaState
from asyncrl.buffer.ledger import Fate
from asyncrl.common.version import Version
from asyncrl.environments.scores import Score
from asyncrl.errors import EngineDied, EngineStuck, InfraError, Quarantined
from asyncrl.generation.generator import HELD_PER_SLOT


@pytest.mark.asyncio
@pytest.mark.fault("F2")
@pytest.mark.fault("F26")
async def test_a_replica_whose_engine_dies_ends_at_once_and_its_groups_go_elsewhere() -> None:
    async with started_pool() as (pool, doomed):
        await until(lambda: pool.counts.ready >= 2)
        doomed.gate.clear()
        await until(lambda: doomed.running > 0)
        held = pool.counts.reserved
        doomed.die()
        with pytest.raises(EngineDied, match="engine of replica a has died: killed by a test"):
            await pool.running["a"]
        assert held
        status = pool.coordinator.status()
        assert status.counts.reserved == 0, "its tickets have ended without a timeout"
        [view] = status.replicas
        assert (view.state, view.live) == (ReplicaState.QUARANTINED, False)
        assert "killed by a test" in view.cause
        pool.add("b")
        for _ in range(3):
            await pool.step()
        assert pool.coordinator.status().account.fates[Fate.FAILED].groups == 0


@pytest.mark.asyncio
async def test_an_engine_that_loads_weights_when_it_dies_ends_its_replica_at_once() -> None:
    async with started_pool() as (pool, doomed):
        await until(lambda: doomed.loads)
        stuck = asyncio.Event()

        async def load(*_: object, **__: object) -> None:
            stuck.set()
            await asyncio.Event().wait()

        doomed.load = load  # type: ignore[method-assign,assignment]
        await pool.train()
        await pool.publish(1)
        async with asyncio.timeout(60):
            await stuck.wait()
            doomed.die()
            with pytest.raises(EngineDied):
                await pool.running["a"]


@pytest.mark.asyncio
@pytest.mark.fault("F3")
async def test_an_engine_that_generates_nothing_is_asked_for_a_token_and_then_its_replica_ends() -> None:
    async with started_pool(generator={"stall_timeout_s": 0.05}) as (pool, engine):
        await until(lambda: pool.counts.ready >= 2)
        engine.gate.clear()
        await until(lambda: engine.running > 0)
        running = engine.running
        await everything_else_runs()  # tokens that had passed the gate
        pool.clock.now_s += 0.06
        async with asyncio.timeout(60):
            with pytest.raises(
                EngineStuck, match=r"no token for generator\.stall_timeout_s = 0\.05 s while \d groups ran"
            ):
                await pool.running["a"]
        assert running
        assert pool.coordinator.status().counts.reserved == 0


@pytest.mark.asyncio
async def test_an_engine_that_is_slow_but_answers_goes_on() -> None:
    async with started_pool(generator={"stall_timeout_s": 0.05}) as (pool, engine):
        await until(lambda: engine.running > 0)
        probes: list[int] = []
        generate = engine.generate

        async def slow(prompt_ids: list[int], **options: object) -> object:
            if options["max_tokens"] == 1:
                probes.append(1)
                return []
            return await generate(prompt_ids, **options)  # type: ignore[arg-type]

        engine.generate = slow  # type: ignore[method-assign,assignment]
        engine.gate.clear()
        await everything_else_runs()  # tokens that had passed the gate
        for _ in range(3):
            pool.clock.now_s += 0.06
            asked = len(probes)
            async with asyncio.timeout(60):
                while len(probes) == asked:
                    await asyncio.sleep(0.01)
        assert not pool.running["a"].done()
        engine.gate.set()
        await pool.step()


@pytest.mark.asyncio
@pytest.mark.fault("F3")
async def test_a_replica_whose_rollouts_fail_in_a_row_waits_and_then_ends_and_no_prompt_has_failed() -> None:
    async with started_pool(generator={"max_infra_failures": 3}) as (pool, engine):

        async def fails(*_: object, **__: object) -> None:
            raise InfraError("no room in /dev/shm", reason="engine")

        await until(lambda: pool.counts.ready >= 2)
        engine.generate = fails  # type: ignore[method-assign,assignment]
        pool.add("b")
        await pool.coordinator.start()
        async with asyncio.timeout(60):
            while not pool.running["a"].done():
                pool.clock.now_s += 1.0
                await pool.generators["b"].report()
                await asyncio.sleep(0.01)
        with pytest.raises(Quarantined, match=r"3 of its rollouts failed in a row \(generator\.max_infra_failures\)"):
            await pool.running["a"]
        for _ in range(3):
            await pool.step()
        status = pool.coordinator.status()
        assert status.account.fates[Fate.FAILED].groups == 0
        pool.clock.now_s += 1.0
        await everything_else_runs()
        read = (await scraped(pool.coordinator)).get_sample_value
        counts = {cause: read("asyncrl_replica_quarantines_total", {"cause": cause}) for cause in Cause}
        assert {cause: count for cause, count in counts.items() if count} == {Cause.INFRA_FAILURES: 1}


@pytest.mark.asyncio
@pytest.mark.fault("F4")
async def test_a_replica_that_was_started_again_waits_for_the_current_weights_and_continues_its_totals() -> None:
    async with started_pool() as (pool, doomed):
        await pool.step()
        await until(lambda: pool.coordinator.status().reports["a"].samples >= 8)
        doomed.die()
        await asyncio.gather(pool.running["a"], return_exceptions=True)
        before = pool.coordinator.status().reports["a"]
        await pool.coordinator.restarting("a", Cause.ENGINE_DIED, "killed")
        again = pool.add("a.2")
        await until(lambda: again.running > 0)
        assert again.loads == [Version(1, 1)], "it begins with the current version"
        await pool.step()
        await pool.generators["a.2"].report()
        status = pool.coordinator.status()
        [view] = status.replicas
        assert (view.replica, view.actor, view.restarts, view.state) == ("a", "a.2", 1, ReplicaState.HEALTHY)
        after = status.reports["a"]
        assert after.actor == "a.2"
        assert after.samples > before.samples
        assert after.weight_updates > before.weight_updates
        assert status.reports.keys() == {"a"}


@pytest.mark.asyncio
async def test_a_replica_that_left_gets_no_tickets_for_a_reserve_that_still_waits() -> None:
    async with started_pool() as (pool, _):
        await until(lambda: pool.counts.ready == 8)
        await everything_else_runs()
        waiting = asyncio.create_task(pool.coordinator.reserve("a", Version(1, 0), 2, wait_s=60.0))
        await everything_else_runs()
        assert not waiting.done(), "the staleness limit admits no group"
        await pool.coordinator.leave("a")
        answer = await waiting
        assert answer.tickets == ()
        await pool.train()
        assert pool.counts.reserved == 0


@pytest.mark.asyncio
async def test_a_replica_does_not_take_groups_faster_than_it_can_deliver_them() -> None:
    async with started_pool(generator={"max_concurrent_groups": 2}) as (pool, _):
        gate, most = asyncio.Event(), HELD_PER_SLOT * pool.config.generator.max_concurrent_groups

        async def slow(*_: object) -> None:
            await gate.wait()

        pool.rows.put = slow  # type: ignore[method-assign]
        for _ in range(5):
            await everything_else_runs()
            pool.clock.now_s += 1.0
        assert pool.counts.reserved == most < 8, "8 groups are within the staleness limit"
        gate.set()
        await until(lambda: pool.counts.ready == 8)


@pytest.mark.asyncio
async def test_groups_that_are_only_scored_take_no_slot() -> None:
    async with started_pool(generator={"max_concurrent_groups": 2}) as (pool, engine):
        scores, most = asyncio.Event(), HELD_PER_SLOT * pool.config.generator.max_concurrent_groups
        score = pool.scorer.score

        async def slow(*arguments: Any) -> list[Score]:
            await scores.wait()
            return await score(*arguments)

        pool.scorer.score = slow  # type: ignore[method-assign]
        await until(lambda: pool.counts.reserved == most)
        await everything_else_runs()
        assert engine.running == 0
        await pool.generators["a"].report()
        assert pool.coordinator.status().reports["a"].running_groups == 0
        scores.set()
        await until(lambda: pool.counts.ready == 8)


@pytest.mark.asyncio
@pytest.mark.fault("F1")
async def test_a_replica_that_asks_for_no_groups_hears_in_its_heartbeat_that_it_is_quarantined() -> None:
    async with started_pool() as (pool, engine):
        await until(lambda: pool.counts.ready >= 2)
        engine.gate.clear()
        await until(lambda: engine.running > 0)
        await pool.coordinator.quarantine("a", Cause.INFRA_FAILURES, "made up")
        with pytest.raises(Quarantined, match="replica a gets no groups any more"):
            await pool.generators["a"].report()
