"""A replica loads only whole, matching, verified versions. Groups that bad weights produced are never committed."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio
from buffer_scenes import everything_else_runs
from fake_engine import FakeEngine
from pool import WEIGHTS, Pool, empty_pool, manifest_of, started_pool, until
from update_scene import Scene, waits

from asyncrl.buffer.ledger import Fate
from asyncrl.common.version import Version
from asyncrl.data.prompts import Task
from asyncrl.errors import FetchFailed, FirstParityError, ManifestMismatch, ParityError, TornReplica, WeightError
from asyncrl.generation.interfaces import LoadTimes
from asyncrl.weights.manifest import Bucket, Bytes, Manifest, Piece, ReadBack, checksum
from asyncrl.weights.staging import StagedWeights
from asyncrl.weights.store import Publication
from asyncrl.weights.transports.interfaces import BroadcastEnd

MakeScene = Callable[..., Scene]

OTHER_MODEL = {"w": ((3,), "float32")}


@pytest.fixture(autouse=True)
def _no_pause_before_a_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.generation.weight_updates.RETRY_PAUSE_S", 0.0)
    monkeypatch.setattr("asyncrl.generation.weight_updates.REFETCH_PAUSE_S", 0.001)
    # 0.02 s may pass between two lines of a test, and then other groups are in flight.
    monkeypatch.setattr("asyncrl.generation.generator.RESERVE_EVERY_S", 0.2)


@pytest.mark.asyncio
async def test_a_version_that_is_held_stays_and_the_next_one_is_loaded_afterwards() -> None:
    async with started_pool() as (pool, engine):
        await pool.step()
        await until(lambda: engine.version == Version(1, 1))
        updates = pool.updates["a"]
        async with updates.held() as version:
            assert version == Version(1, 1)
            loads = len(engine.loads)
            await pool.train()
            await pool.publish(2)
            await everything_else_runs()
            assert (engine.version, len(engine.loads)) == (version, loads)
        await until(lambda: engine.version == Version(1, 2))


@pytest.mark.asyncio
async def test_a_version_that_waits_for_an_evaluation_leaves_the_memory_to_the_other_replicas_of_its_node(
    tmp_path: Path,
) -> None:
    scene = Scene(staged_at=tmp_path / "pointer")
    receive, load = scene.wire.receive, scene.engine.load
    received: list[Any] = []
    loaded: list[bytes] = []

    async def noted(handle: Any, *, timeout_s: float) -> Bytes:
        received.append(handle)
        return await receive(handle, timeout_s=timeout_s)

    async def noting(manifest: Manifest, staged: StagedWeights, **options: Any) -> LoadTimes:
        loaded.append(staged.flat.tobytes())
        return await load(manifest, staged, **options)

    other, ones = StagedWeights(tmp_path / "pointer"), np.ones(len(WEIGHTS), dtype=np.uint8)
    bucket = Bucket(pieces=(Piece(0, len(WEIGHTS)),), checksum=checksum([ones]))

    async def other_replica_stages(step: int) -> None:
        manifest = msgspec.structs.replace(manifest_of(step), buckets=(bucket,))
        async with asyncio.timeout(5.0):
            await other.stage(manifest, lambda part: asyncio.sleep(0, ones))
        other.release()

    async def reached(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5.0):
            while not condition():
                await asyncio.sleep(0.001)

    scene.wire.receive, scene.engine.load = noted, noting  # type: ignore[method-assign,assignment]
    scene.source.offer(0, serial=1)
    await reached(lambda: scene.updates.version == Version(1, 0))
    await other_replica_stages(8)
    async with scene.updates.held():
        scene.source.offer(1, serial=2)
        await reached(lambda: len(received) == 2)
        await other_replica_stages(9)
    await reached(lambda: len(scene.source.asked) == 3)
    assert scene.source.asked[2] == (Version(1, 0), None), "there may be a newer one by now"
    scene.source.offer(1, serial=2)
    await reached(lambda: scene.updates.version == Version(1, 1))
    assert loaded == [WEIGHTS, WEIGHTS]
    assert len(received) == 3
    scene.running.cancel()


@pytest.mark.asyncio
async def test_a_replica_takes_part_in_broadcasts_until_it_ends() -> None:
    scene = Scene()
    await everything_else_runs()
    assert scene.wire.members == ["a"]
    for outcome in ("received", "missed", "absent", "received"):
        scene.wire.ended(BroadcastEnd(outcome=outcome, nbytes=0 if outcome == "absent" else 100, seconds=0.5))
    value = scene.metrics.registry.get_sample_value
    broadcasts = "asyncrl_weight_broadcasts_total"
    assert [value(broadcasts, {"outcome": each}) for each in ("received", "missed", "absent")] == [2, 1, 1]
    assert value("asyncrl_weight_broadcast_bytes_total") == 300
    assert value("asyncrl_weight_broadcast_seconds_sum") == 1.5
    assert value("asyncrl_weight_broadcast_seconds_count") == 3
    scene.running.cancel()
    await asyncio.gather(scene.running, return_exceptions=True)
    await everything_else_runs()
    assert scene.wire.members == []


@pytest.mark.asyncio
async def test_a_replica_that_gets_no_broadcasts_any_more_fetches_weights(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    scene.wire.broken = True
    scene.source.offer(0, serial=1)
    await until(lambda: scene.updates.version == Version(1, 0))
    assert [record.message for record in caplog.records] == [
        "broadcasts of weights are not received any more, so weights are fetched"
    ]
    scene.running.cancel()


# --- in a pool ----------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.fault("F15")
async def test_an_update_in_the_middle_of_a_sequence_is_recorded_token_by_token() -> None:
    async with started_pool(generator={"max_concurrent_groups": 8, "max_completion_tokens": 30}) as (pool, engine):
        leases = [await pool.step() for _ in range(3)]
        await until(lambda: engine.running > 0)
        leases += [await pool.step() for _ in range(12)]
        groups = [group.meta for lease in leases for group in lease.groups]
        mixed = [meta for meta in groups if meta.newest > meta.oldest]
        assert mixed, "no update happened during a running sequence"
        for meta in mixed:
            rows = pool.rows.kept[meta.key]
            steps = rows["weight_versions"][rows["token_mask"] > 0]
            assert (meta.oldest, meta.newest) == (steps.min(), steps.max())


@pytest.mark.asyncio
@pytest.mark.fault("F12")
async def test_a_manifest_of_another_model_changes_nothing() -> None:
    async with started_pool() as (pool, engine):
        await pool.step()
        await until(lambda: engine.version == Version(1, 1))
        await pool.train()
        await pool.publish(2, parameters=OTHER_MODEL)
        await until(lambda: pool.counts.ready >= 4)
        assert engine.version == Version(1, 1)
        assert pool.generators["a"].version == Version(1, 1)


@pytest.mark.asyncio
@pytest.mark.fault("F25")
async def test_a_first_manifest_of_another_model_ends_the_replica() -> None:
    async with empty_pool() as pool:
        pool.add("a")
        await pool.publish(0, parameters=OTHER_MODEL)
        with pytest.raises(ManifestMismatch, match=r"w is float32\[3\]"):
            await pool.running["a"]


@pytest.mark.asyncio
@pytest.mark.fault("F38")
async def test_a_void_manifest_leaves_the_replica_at_its_version() -> None:
    async with started_pool() as (pool, engine):
        await pool.train()
        await pool.publish(1, handles=[None])
        await until(lambda: pool.counts.ready >= 1)
        assert engine.loads == [Version(1, 0)]


@pytest.mark.asyncio
@pytest.mark.fault("F11")
async def test_a_torn_replica_stays_paused_until_a_whole_update() -> None:
    async with started_pool() as (pool, engine):
        await until(lambda: pool.counts.ready >= 4)
        engine.fail_next_load = OSError("the sender died half way")
        torn = versions_at_each_load(pool, engine)
        await pool.step()
        await until(lambda: len(torn) == 2)
        assert torn == [Version(1, 0), None], "a torn replica has no version"
        await until(lambda: pool.generators["a"].version == Version(1, 1))
        for _ in range(3):
            await pool.step()
        assert pool.coordinator.status().account.closed


def versions_at_each_load(pool: Pool, engine: FakeEngine) -> list[Version | None]:
    """Returns a list that grows: the version of replica `a` at each later call of its engine's `load`."""
    seen: list[Version | None] = []
    load = engine.load

    async def observed(manifest: Manifest, buckets: Any, **options: Any) -> LoadTimes:
        seen.append(pool.generators["a"].version)
        return await load(manifest, buckets, **options)

    engine.load = observed  # type: ignore[method-assign]
    return seen


@pytest.mark.asyncio
async def test_nothing_is_committed_from_weights_that_fail_the_probe() -> None:
    async with started_pool() as (pool, engine):
        await until(lambda: pool.counts.ready >= 4)
        engine.score_error_nats = 0.5
        await pool.step()
        await until(lambda: pool.generators["a"].version is None)
        committed = pool.coordinator.status().account.issued.tokens
        await everything_else_runs()
        status = pool.coordinator.status()
        assert status.account.issued.tokens == committed, "a group was committed without a verdict"
        assert any(label.startswith("infra/") for label in pool.failures)
        engine.score_error_nats = 0.0
        for _ in range(4):
            await pool.step()
        status = pool.coordinator.status()
        assert status.account.closed
        assert status.account.fates[Fate.FAILED].groups == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("held_back", ["by the verdict", "by its reward"])
async def test_a_group_of_weights_that_fail_the_probe_is_not_committed_after_the_next_whole_update(
    held_back: str,
) -> None:
    async with started_pool() as (pool, engine):
        await until(lambda: pool.counts.ready >= 4)
        may_probe, may_score, score, reward = asyncio.Event(), asyncio.Event(), engine.score, pool.scorer.score

        async def probed(tokens: Sequence[int]) -> list[float]:
            await may_probe.wait()
            return await score(tokens)

        async def scored(task: Task, completions: Sequence[str]) -> list[float]:
            await may_score.wait()
            return await reward(task, completions)

        engine.score = probed  # type: ignore[method-assign]
        pool.scorer.score = scored  # type: ignore[method-assign]
        engine.score_error_nats = 0.5
        generator = pool.generators["a"]
        await pool.step()
        await until(lambda: engine.version == Version(1, 1))
        await until(lambda: pool.counts.reserved and not engine.running)
        if held_back == "by the verdict":
            may_score.set()
            await everything_else_runs()
        spoiled = pool.tickets("a").keys()
        may_probe.set()
        await until(lambda: generator.version is None)
        may_score.set()
        engine.score_error_nats = 0.0
        leases = [await pool.step() for _ in range(4)]
        trained = {group.meta.key for lease in leases for group in lease.groups}
        assert not spoiled & (trained | set(pool.rows.kept))
        assert pool.coordinator.status().account.fates[Fate.FAILED].groups == 0


@pytest.mark.asyncio
async def test_tokens_of_weights_that_fail_their_probe_are_not_stored() -> None:
    """The rollout goes on after the verdict, because it is being scored."""
    limits = {"max_concurrent_groups": 1, "max_completion_tokens": 40, "persist_every_tokens": 2}
    async with empty_pool(generator=limits) as pool:
        engine, generator = pool.add("a"), pool.generators["a"]
        may_probe, may_score, score, reward = asyncio.Event(), asyncio.Event(), engine.score, pool.scorer.score
        scoring: list[Task] = []

        async def probed(tokens: Sequence[int]) -> list[float]:
            await may_probe.wait()
            return await score(tokens)

        async def scored(task: Task, completions: Sequence[str]) -> list[float]:
            scoring.append(task)
            await may_score.wait()
            return await reward(task, completions)

        engine.gate.clear()
        await pool.publish(0)
        await until(lambda: engine.running)
        engine.score, pool.scorer.score = probed, scored  # type: ignore[method-assign]
        engine.score_error_nats = 0.5
        await pool.reserve_elsewhere()
        await pool.step_elsewhere()
        await until(lambda: engine.version == Version(1, 1))
        engine.gate.set()
        await until(lambda: scoring)
        may_probe.set()
        await until(lambda: generator.version is None)
        engine.score_error_nats = 0.0
        await until(lambda: generator.version == Version(1, 1))
        await everything_else_runs()
        assert "0.0" not in pool.prefixes.kept
        may_score.set()
        await until(lambda: pool.failures["infra/parity"] == 1)
        assert "0.0" not in pool.prefixes.kept


@pytest.mark.asyncio
@pytest.mark.fault("F11")
async def test_tickets_that_arrive_while_the_replica_is_torn_wait_for_a_whole_update() -> None:
    async with started_pool() as (pool, engine):
        await until(lambda: pool.counts.ready == 8)  # the buffer is full, so the replica's next reserve waits
        await pool.train()
        may_mend, load = asyncio.Event(), engine.load

        async def loads_again_when_told(manifest: Manifest, buckets: Any, **options: Any) -> LoadTimes:
            if manifest.version in engine.loads:
                await may_mend.wait()
                engine.score_error_nats = 0.0
            return await load(manifest, buckets, **options)

        engine.load = loads_again_when_told  # type: ignore[method-assign]
        engine.score_error_nats = 0.5
        await pool.publish(1)
        generator = pool.generators["a"]
        await until(lambda: engine.loads == [Version(1, 0), Version(1, 1)] and generator.version is None)
        begun = len(engine.prompts)
        await pool.coordinator.rows_lost(1, [pool.ready()[0].ticket.key])
        await until(lambda: pool.counts.reserved)
        await everything_else_runs()
        assert pool.counts.reserved
        assert len(engine.prompts) == begun, "a torn replica starts no rollout"
        assert pool.failures.total() == 0
        may_mend.set()
        await until(lambda: pool.counts.ready >= 4)
        assert generator.version == Version(1, 1)


# --- without a pool -----------------------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def make_scene() -> AsyncIterator[MakeScene]:
    scenes: list[Scene] = []

    def make(**weights: Any) -> Scene:
        scenes.append(Scene(**weights))
        return scenes[-1]

    yield make
    for scene in scenes:
        scene.running.cancel()
    await asyncio.gather(*[scene.running for scene in scenes], return_exceptions=True)


@pytest.mark.asyncio
async def test_nothing_starts_and_nothing_may_be_committed_before_the_first_verdict(
    make_scene: MakeScene,
) -> None:
    scene = make_scene()
    scene.may_load.clear()
    scene.source.offer(3, serial=1)
    assert await waits(scene.updates.startable())
    assert await waits(scene.updates.verified())
    assert scene.loading == [True], "generation of the replica has paused"
    scene.may_load.set()
    assert await scene.updates.startable() == Version(1, 3)
    await scene.updates.verified()
    assert scene.loading == [True, False]
    assert scene.reported == [Version(1, 3)], "the replica reports the version to the buffer at once"
    assert (scene.updates.updates, scene.outcomes("applied")) == (1, 1)


@pytest.mark.asyncio
async def test_during_an_update_rollouts_start_and_no_commit_passes(make_scene: MakeScene) -> None:
    scene = make_scene(max_lag_publications=1)
    scene.source.offer(0, serial=1)
    await scene.updates.startable()
    scene.may_load.clear()
    scene.source.offer(1, serial=2)
    await until(lambda: scene.loading[-1])
    assert await scene.updates.startable() == Version(1, 0), "the old version stays until the verdict"
    assert await waits(scene.updates.verified())
    scene.may_load.set()
    await scene.updates.verified()
    assert scene.updates.version == Version(1, 1)


@pytest.mark.asyncio
async def test_a_replica_that_lags_too_many_publications_starts_nothing_until_it_has_loaded(
    make_scene: MakeScene,
) -> None:
    scene = make_scene(max_lag_publications=1)
    scene.source.offer(0, serial=1)
    await scene.updates.startable()
    scene.may_load.clear()
    scene.source.offer(2, serial=3)
    await until(lambda: scene.loading[-1])
    assert await waits(scene.updates.startable())
    scene.may_load.set()
    assert await scene.updates.startable() == Version(1, 2)


@pytest.mark.asyncio
@pytest.mark.fault("F11")
async def test_a_probe_that_fails_ends_what_runs_and_fails_what_is_finished(
    make_scene: MakeScene,
) -> None:
    scene = make_scene()
    scene.source.offer(0, serial=1)
    await scene.updates.startable()
    scene.engine.score_error_nats = 0.5
    scene.source.offer(1, serial=2)
    await until(lambda: scene.failed)
    assert scene.updates.version is None
    assert scene.engine.aborts == 1
    [error] = scene.failed
    assert error.reason == "parity"
    assert "the largest difference of 2 tokens is 0.5 nats, and weights.parity_tolerance_nats = 0.0001" in str(error)
    assert await waits(scene.updates.startable())
    assert await waits(scene.updates.verified())
    scene.engine.score_error_nats = 0.0
    scene.source.offer(1, serial=2)
    assert await scene.updates.startable() == Version(1, 1), "a whole update of the same version repairs the replica"
    assert (scene.outcomes("torn"), scene.outcomes("applied")) == (1, 2)
    assert scene.updates.parity_max_nats == 0.0, "a failed probe does not count as the parity of trained tokens"


@pytest.mark.asyncio
@pytest.mark.fault("F11")
async def test_slots_count_as_paused_until_a_whole_update_after_a_load_that_broke_off(make_scene: MakeScene) -> None:
    scene = make_scene()
    scene.source.offer(0, serial=1)
    await scene.updates.startable()
    scene.engine.fail_next_load = OSError("the sender died half way")
    scene.source.offer(1, serial=2)
    await until(lambda: scene.outcomes("torn") == 1)
    assert scene.loading[-1], "the engine stays paused"
    scene.source.offer(1, serial=2)
    await until(lambda: scene.updates.version == Version(1, 1))
    assert not scene.loading[-1]


@pytest.mark.asyncio
@pytest.mark.fault("F11")
async def test_a_live_parameter_that_is_not_as_published_fails_the_update(make_scene: MakeScene) -> None:
    scene = make_scene()
    scene.source.offer(0, serial=1)
    await scene.updates.startable()
    scene.engine.live = ReadBack(alike=frozenset("ab"), differing=frozenset({"embed_tokens.weight"}))
    scene.source.offer(1, serial=2)
    await until(lambda: scene.failed)
    assert scene.updates.version is None
    [error] = scene.failed
    assert "1 of 3 live parameters are not as published, such as embed_tokens.weight" in str(error)
    assert "probe" not in str(error), "its log-probs agree"
    assert scene.metrics.registry.get_sample_value("asyncrl_weight_parity_ratio") == math.inf


@pytest.mark.asyncio
async def test_parameters_that_the_loader_changes_are_left_to_the_probe(
    make_scene: MakeScene, caplog: pytest.LogCaptureFixture
) -> None:
    """The first probe agrees, so a parameter that differs then is kept in another form by vLLM."""
    scene = make_scene()
    scene.engine.live = ReadBack(
        alike=frozenset("ab"), differing=frozenset({"norm.weight"}), unread=frozenset({"experts.w13"})
    )
    with caplog.at_level(logging.INFO):
        scene.source.offer(0, serial=1)
        await scene.updates.startable()
    assert "each update that is verified compares 2 live parameters" in caplog.text
    assert (
        "2 are not compared, because vLLM keeps them in another form, such as experts.w13, norm.weight" in caplog.text
    )
    scene.source.offer(1, serial=2)
    await until(lambda: scene.updates.version == Version(1, 1))
    scene.engine.live = ReadBack(alike=frozenset("ab"), differing=frozenset({"norm.weight", "head.weight"}))
    scene.source.offer(2, serial=3)
    await until(lambda: scene.failed)
    assert "such as head.weight" in str(scene.failed[0])


@pytest.mark.asyncio
@pytest.mark.fault("F11")
async def test_one_layer_that_differs_in_the_first_update_is_a_fault_although_the_probe_agrees(
    make_scene: MakeScene,
) -> None:
    scene = make_scene()
    scene.engine.live = ReadBack(alike=frozenset({"layers.0.q.bias"}), differing=frozenset({"layers.12.q.bias"}))
    scene.source.offer(0, serial=1)
    await until(lambda: scene.failed)
    assert "1 of 2 live parameters are not as published, such as layers.12.q.bias" in str(scene.failed[0])


@pytest.mark.asyncio
@pytest.mark.fault("F11")
async def test_weights_that_are_wrong_in_the_first_update_are_found_by_both(make_scene: MakeScene) -> None:
    scene = make_scene()
    scene.engine.score_error_nats = 0.5
    scene.engine.live = ReadBack(alike=frozenset("ab"), differing=frozenset({"head.weight"}))
    scene.source.offer(0, serial=1)
    await until(lambda: scene.failed)
    assert "such as head.weight; and the engine's log-probs of the probe" in str(scene.failed[0])


@pytest.mark.asyncio
@pytest.mark.parametrize("nats", [0.5, 2.25, 1e-3, math.inf])
@pytest.mark.parametrize("verified", [0, 1, 2])
async def test_the_error_of_wrong_first_weights_has_their_difference(
    make_scene: MakeScene, nats: float, verified: int
) -> None:
    scene = make_scene(load_timeout_s=60.0)
    scene.clock.now_s = 10.0
    for step in range(verified):
        scene.source.offer(step, serial=1 + step)
        await until(lambda step=step: scene.updates.version == Version(1, step))
    scene.engine.score_error_nats = nats
    for _ in range(2):
        scene.source.offer(verified, serial=1 + verified)
        await everything_else_runs()
        scene.clock.now_s += 61.0
    with pytest.raises(ParityError) as raised:
        await asyncio.wait_for(scene.running, timeout=10.0)
    if verified:
        assert not isinstance(raised.value, FirstParityError)
    else:
        assert isinstance(raised.value, FirstParityError)
        assert raised.value.nats == pytest.approx(nats)


@pytest.mark.asyncio
@pytest.mark.parametrize("at_first", [True, False])
async def test_with_an_alarm_no_replica_is_lost(
    make_scene: MakeScene, at_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    scene = make_scene(on_parity_failure="alarm")
    if not at_first:
        scene.source.offer(0, serial=1)
        await scene.updates.startable()
    scene.engine.score_error_nats = 0.5
    scene.engine.live = ReadBack(alike=frozenset("ab"), differing=frozenset({"head.weight"}))
    scene.source.offer(1, serial=2)
    await until(lambda: scene.updates.version == Version(1, 1))
    assert await scene.updates.startable() == Version(1, 1)
    assert scene.outcomes("torn") == 0
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "such as head.weight; and the engine's log-probs" in record.getMessage()


@pytest.mark.asyncio
@pytest.mark.parametrize("tear", [TornReplica, ParityError])
@pytest.mark.fault("F11")
async def test_a_replica_that_stays_torn_beyond_the_deadline_ends(
    make_scene: MakeScene, tear: type[WeightError]
) -> None:
    scene = make_scene(load_timeout_s=60.0)
    scene.clock.now_s = 10.0

    async def tear_again() -> None:
        if tear is TornReplica:
            scene.engine.fail_next_load = OSError("again")
        else:
            scene.engine.score_error_nats = 0.5
        scene.source.offer(0, serial=1)
        await everything_else_runs()

    await tear_again()
    scene.clock.now_s += 60.0
    await tear_again()
    assert not scene.running.done(), "the deadline has not passed yet"
    assert scene.outcomes("torn") == 2
    scene.clock.now_s += 1.0
    await tear_again()
    with pytest.raises(tear):
        await scene.running


DAMAGED = b"\1" * len(WEIGHTS)
assert DAMAGED != WEIGHTS


@pytest.mark.asyncio
@pytest.mark.fault("F12")
@pytest.mark.parametrize("step", [0, 1], ids=["first version", "later version"])
async def test_weights_that_arrive_damaged_are_fetched_again(
    make_scene: MakeScene, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    """D14: with η = 0 there is no later version until this one is loaded."""
    scene = make_scene()
    if step:
        scene.source.offer(0, serial=1)
        await scene.updates.startable()
    scene.source.asked.clear()
    scene.source.offer(step, serial=2, delivery=7, handle=DAMAGED)
    await until(lambda: scene.outcomes("refused") == 1)
    assert scene.source.refused == [7], "the learner is asked for another delivery"
    loaded = Version(1, 0) if step else None
    async with asyncio.timeout(5.0):
        while (loaded, Version(1, step)) not in scene.source.asked:
            await asyncio.sleep(0.001)
    assert "bucket 0 (with w) has the checksum" in caplog.text
    assert scene.updates.version == loaded
    scene.source.offer(step, serial=2)
    await until(lambda: scene.updates.version == Version(1, step))
    assert not scene.running.done()


@pytest.mark.asyncio
@pytest.mark.fault("F38")
async def test_lost_weights_are_asked_for_with_growing_pauses_until_there_are_others(make_scene: MakeScene) -> None:
    scene = make_scene()
    scene.source.offer(0, serial=1)
    await scene.updates.startable()
    for delivery in (2, 2, 3):
        scene.source.offer(1, serial=2, delivery=delivery, handle=None)
    async with asyncio.timeout(5.0):
        while scene.outcomes("refused") != 3:
            await asyncio.sleep(0.001)
    assert scene.source.refused == [2, 2, 3]
    scene.source.offer(2, serial=3)
    async with asyncio.timeout(5.0):
        while scene.updates.version != Version(1, 2):
            await asyncio.sleep(0.001)
    assert scene.outcomes("applied") == 2


@pytest.mark.asyncio
async def test_weights_that_are_late_are_not_asked_for_again_and_another_model_neither(
    make_scene: MakeScene,
) -> None:
    scene = make_scene()
    scene.source.offer(0, serial=1)
    await scene.updates.startable()

    async def late(handle: Any, *, timeout_s: float) -> Any:
        raise FetchFailed("too late")

    scene.wire.receive = late  # type: ignore[method-assign]
    scene.source.offer(1, serial=2, delivery=2)
    async with asyncio.timeout(5.0):
        while scene.outcomes("refused") != 1:
            await asyncio.sleep(0.001)
    manifest = manifest_of(1, parameters=OTHER_MODEL)
    scene.source.offered.put_nowait(Publication(serial=3, delivery=3, manifest=manifest, handles=[None]))
    async with asyncio.timeout(5.0):
        while scene.outcomes("refused") != 2:
            await asyncio.sleep(0.001)
    assert scene.source.refused == []


@pytest.mark.asyncio
@pytest.mark.fault("F11")
async def test_a_load_that_hangs_ends_the_replica_and_names_the_knob(make_scene: MakeScene) -> None:
    scene = make_scene(load_timeout_s=0.001)
    scene.may_load.clear()
    scene.source.offer(0, serial=1)
    with pytest.raises(
        WeightError, match=r"loading the weights of step 0 took longer than weights\.load_timeout_s = 0\.001 s"
    ):
        await scene.running
    assert scene.loading == [True, False], "the shown state does not stay at paused"
    assert scene.outcomes("failed") == 1


@pytest.mark.asyncio
@pytest.mark.fault("F13")
async def test_a_version_that_is_loaded_already_is_counted_as_repeated(make_scene: MakeScene) -> None:
    scene = make_scene()
    for serial in (1, 2):
        scene.source.offer(0, serial=serial)
    await until(lambda: scene.outcomes("repeated"))
    assert (scene.outcomes("repeated"), scene.outcomes("applied"), scene.updates.updates) == (1, 1, 1)


@pytest.mark.asyncio
async def test_every_nth_update_is_probed_and_always_the_first(make_scene: MakeScene) -> None:
    scene = make_scene(probe_every_updates=3)
    probed: list[Version | None] = []
    score = scene.engine.score

    async def observed(tokens: Any) -> list[float]:
        probed.append(scene.engine.version)
        return await score(tokens)

    scene.engine.score = observed  # type: ignore[method-assign]
    for step in range(7):
        scene.source.offer(step, serial=step + 1)
    await until(lambda: scene.updates.updates == 7)
    assert probed == [Version(1, 0), Version(1, 2), Version(1, 5)]


@pytest.mark.asyncio
@pytest.mark.fault("F10")
async def test_a_probe_that_hangs_ends_the_replica_and_names_the_knob(make_scene: MakeScene) -> None:
    scene = make_scene(load_timeout_s=0.5)

    async def hang(tokens: Any) -> list[float]:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    scene.engine.score = hang  # type: ignore[method-assign]
    scene.source.offer(0, serial=1)
    with pytest.raises(
        WeightError, match=r"probing the weights of step 0 took longer than weights\.load_timeout_s = 0\.5 s"
    ):
        await scene.running
    assert scene.updates.version is None, "unverified weights have no version"
