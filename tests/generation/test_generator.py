"""A replica asks for nothing before it has loaded, commits only what is verified, and settles every ticket."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
from pool import Pool

from asyncrl.buffer.ledger import Event, Fate
from asyncrl.buffer.records import Refusal, Version
from asyncrl.errors import ManifestMismatch

MakePool = Callable[..., Pool]


@pytest_asyncio.fixture
async def make_pool() -> AsyncIterator[MakePool]:
    pools: list[Pool] = []

    def make(**overrides: object) -> Pool:
        pools.append(Pool(**overrides))
        return pools[-1]

    yield make
    for pool in pools:
        await pool.close()


@pytest.mark.asyncio
async def test_steps_are_filled_and_every_sample_is_accounted_for(make_pool: MakePool) -> None:
    pool = make_pool()
    pool.add("a")
    await pool.publish(0)
    leases = [await pool.step() for _ in range(6)]
    for lease in leases:
        assert len(lease.groups) == 4
        for group in lease.groups:
            assert 0 <= lease.step - group.meta.oldest <= 1
            rows = pool.rows.kept[group.meta.key]
            assert rows["output_lengths"].tolist() == list(group.meta.completion_tokens)
            assert len(rows["logprobs"]) == len(rows["weight_versions"]) == group.meta.generated_tokens
            assert rows["weight_versions"].min() == group.meta.oldest
    status = await pool.buffer.status()
    assert status.account.closed
    assert status.account.fates[Fate.TRAINED].groups == 24


@pytest.mark.asyncio
async def test_a_replica_asks_for_nothing_before_it_has_loaded_a_version(make_pool: MakePool) -> None:
    pool = make_pool()
    engine = pool.add("a")
    await pool.until(lambda: "a" in pool.buffer._reports)
    for _ in range(50):
        await asyncio.sleep(0)
    assert (await pool.buffer.status()).account.issued.groups == 0
    await pool.publish(0)
    await pool.until(lambda: engine.running > 0)


@pytest.mark.asyncio
async def test_a_late_joiner_gets_tickets_only_at_the_current_version(make_pool: MakePool) -> None:
    pool = make_pool()
    pool.add("a")
    await pool.publish(0)
    for _ in range(5):
        await pool.step()
    late = pool.add("late")
    await pool.until(lambda: late.running > 0)
    assert late.loads[0] == Version(1, 5)


@pytest.mark.asyncio
async def test_f15_an_update_in_the_middle_of_a_sequence_is_recorded_token_by_token(make_pool: MakePool) -> None:
    pool = make_pool(generator={"max_concurrent_groups": 8, "max_completion_tokens": 30})
    engine = pool.add("a")
    await pool.publish(0)
    leases = [await pool.step() for _ in range(3)]
    await pool.until(lambda: engine.running > 0)
    leases += [await pool.step() for _ in range(12)]
    groups = [group.meta for lease in leases for group in lease.groups]
    mixed = [meta for meta in groups if meta.newest > meta.oldest]
    assert mixed, "no update met a running sequence"
    for meta in mixed:
        steps = pool.rows.kept[meta.key]["weight_versions"]
        assert (meta.oldest, meta.newest) == (steps.min(), steps.max())


@pytest.mark.asyncio
async def test_f2_a_killed_replica_loses_its_tickets_and_no_committed_group(make_pool: MakePool) -> None:
    pool = make_pool()
    doomed = pool.add("doomed")
    await pool.publish(0)
    await pool.until(lambda: (pool.buffer._buffer.counts().ready) >= 2)
    doomed.gate.clear()
    await pool.until(lambda: doomed.running > 0)
    committed = dict(pool.rows.kept)
    pool.generators["doomed"]._buffer.call = _no_answer  # type: ignore[method-assign]  # a dead process says no goodbye
    pool.running["doomed"].cancel()
    await asyncio.gather(pool.running["doomed"], return_exceptions=True)
    held = set(pool.generators["doomed"]._held)
    assert held
    pool.add("b")
    pool.clock.now_s += 100.0
    expired = pool.buffer._buffer.expire()
    assert set(expired) == held
    await pool.buffer._notify()
    trained = {group.meta.key for _ in range(3) for group in (await pool.step()).groups}
    assert set(committed) - held <= trained | set(pool.rows.kept)
    status = await pool.buffer.status()
    assert status.account.closed
    assert status.account.events[Event.TICKET_EXPIRED] == len(held)
    assert status.account.fates[Fate.FAILED].groups == 0


async def _no_answer(*_: object, **__: object) -> None:
    raise ConnectionError


@pytest.mark.asyncio
async def test_f12_a_manifest_of_another_model_changes_nothing(make_pool: MakePool) -> None:
    pool = make_pool()
    engine = pool.add("a")
    await pool.publish(0)
    await pool.step()
    await pool.until(lambda: engine.version == Version(1, 1))
    lease = await pool.buffer.lease(60.0)
    await pool.buffer.ack(1, lease.step)
    await pool.publish(2, parameters={"w": ((3,), "float32")})
    await pool.until(lambda: pool.buffer._buffer.counts().ready >= 4)
    assert engine.version == Version(1, 1)
    assert pool.generators["a"].version == Version(1, 1)


@pytest.mark.asyncio
async def test_f25_a_first_manifest_of_another_model_ends_the_replica(make_pool: MakePool) -> None:
    pool = make_pool()
    pool.add("a")
    await pool.publish(0, parameters={"w": ((3,), "float32")})
    with pytest.raises(ManifestMismatch, match=r"w is float32\[3\]"):
        await pool.running["a"]


@pytest.mark.asyncio
async def test_f11_a_torn_replica_stays_paused_until_a_whole_update(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.generation.generator.RETRY_PAUSE_S", 0.0)
    pool = make_pool()
    engine = pool.add("a")
    await pool.publish(0)
    await pool.until(lambda: pool.buffer._buffer.counts().ready >= 4)
    engine.fail_next_load = OSError("the sender died half way")
    torn: list[Version | None] = []
    load = engine.load

    async def observed(manifest: object, buckets: object) -> object:
        torn.append(pool.generators["a"].version)
        return await load(manifest, buckets)  # type: ignore[arg-type]

    engine.load = observed  # type: ignore[method-assign, assignment]
    await pool.step()
    await pool.until(lambda: len(torn) == 2)
    assert torn == [Version(1, 0), None], "a torn replica carries no version"
    await pool.until(lambda: pool.generators["a"].version == Version(1, 1))
    for _ in range(3):
        await pool.step()
    assert (await pool.buffer.status()).account.closed


@pytest.mark.asyncio
async def test_nothing_is_committed_from_weights_that_fail_the_probe(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.generation.generator.RETRY_PAUSE_S", 0.0)
    pool = make_pool()
    engine = pool.add("a")
    await pool.publish(0)
    await pool.until(lambda: pool.buffer._buffer.counts().ready >= 4)
    engine.score_error_nats = 0.5
    await pool.step()
    await pool.until(lambda: pool.generators["a"].version is None)
    committed = (await pool.buffer.status()).account.issued.tokens
    for _ in range(200):
        await asyncio.sleep(0)
    status = await pool.buffer.status()
    assert status.account.issued.tokens == committed, "a commit passed without a verdict"
    assert sum(count for label, count in status.account.failures.items() if label.startswith("infra/")) > 0
    engine.score_error_nats = 0.0
    for _ in range(4):
        await pool.step()
    status = await pool.buffer.status()
    assert status.account.closed
    assert status.account.fates[Fate.FAILED].groups == 0


@pytest.mark.asyncio
async def test_a_void_manifest_leaves_the_replica_at_its_version(make_pool: MakePool) -> None:
    pool = make_pool()
    engine = pool.add("a")
    await pool.publish(0)
    lease = await pool.buffer.lease(60.0)
    await pool.buffer.ack(1, lease.step)
    await pool.publish(1, handles=[None])
    await pool.until(lambda: pool.buffer._buffer.counts().ready >= 1)
    assert engine.loads == [Version(1, 0)]


@pytest.mark.asyncio
async def test_a_failing_reward_is_a_data_failure_and_the_prompt_is_replaced(make_pool: MakePool) -> None:
    pool = make_pool()
    pool.scorer.fail = True
    pool.add("a")
    await pool.publish(0)
    await pool.until(lambda: pool.buffer._buffer.counts().data_failures_in_a_row >= 5)
    pool.scorer.fail = False
    await pool.step()
    status = await pool.buffer.status()
    assert status.account.failures["data/reward_raised"] >= 5
    exported = pool.metrics["a"].registry.get_sample_value("asyncrl_reward_failures_total", {"reason": "reward_raised"})
    assert exported == 2 * status.account.failures["data/reward_raised"], "two samples a group"
    assert status.account.closed


@pytest.mark.asyncio
async def test_f24_a_prompt_beyond_the_model_is_a_data_failure(make_pool: MakePool) -> None:
    pool = make_pool(model={"max_length": 4}, data={"max_prompt_tokens": 1}, generator={"max_completion_tokens": 2})
    pool.add("a")
    await pool.publish(0)
    await pool.until(lambda: pool.buffer._buffer.counts().data_failures_in_a_row >= 3)
    assert (await pool.buffer.status()).account.failures["data/prompt_length"] >= 3


@pytest.mark.asyncio
async def test_a_drained_replica_commits_what_is_in_flight_and_takes_nothing_new(make_pool: MakePool) -> None:
    pool = make_pool()
    engine = pool.add("a")
    await pool.publish(0)
    await pool.until(lambda: engine.running > 0)
    engine.gate.clear()
    pool.generators["a"].drain()
    held = len(pool.generators["a"]._held)
    assert held > 0
    ready = pool.buffer._buffer.counts().ready
    engine.gate.set()
    await pool.running["a"]
    counts = pool.buffer._buffer.counts()
    assert counts.reserved == 0
    assert counts.ready >= ready + 1
    assert counts.waiting == 0, "a drained replica gives nothing back"


@pytest.mark.asyncio
async def test_f16_a_cancelled_wait_for_tickets_leaks_no_slot(make_pool: MakePool) -> None:
    pool = make_pool()
    pool.add("a")
    await pool.publish(0)
    await pool.until(lambda: pool.buffer._buffer.counts().ready == 8)
    waiting = asyncio.create_task(pool.buffer.reserve("b", Version(1, 0), 3, 60.0))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    before = pool.buffer._buffer.counts()
    await pool.step()
    await pool.until(lambda: pool.buffer._buffer.counts().ready == 8)
    after = pool.buffer._buffer.counts()
    assert (after.reserved, after.ready) == (before.reserved, before.ready)


@pytest.mark.asyncio
async def test_a_refused_reserve_says_why_after_its_wait(make_pool: MakePool) -> None:
    pool = make_pool()
    await pool.buffer.pause()
    reservation = await pool.buffer.reserve("b", Version(1, 0), 3, 0.0)
    assert reservation.refusal is Refusal.PAUSED
