"""A group is stored while it is generated, and another replica continues the stored tokens."""

import asyncio
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from buffer_scenes import everything_else_runs
from fake_engine import FakeEngine
from pool import Pool, empty_pool, until

from asyncrl.buffer.ledger import Event
from asyncrl.buffer.records import Prefix, Ticket, VersionSpan
from asyncrl.common.version import Version
from asyncrl.coordinator.coordinator import SWEEP_EVERY_S
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.prompts import Task
from asyncrl.data.specs import SUPPORT, TOP_IDS, TOP_LOGPROBS
from asyncrl.data_plane.codec import PAD_VALUES, Picked, decode, encode
from asyncrl.errors import InfraError, RowsLost
from asyncrl.generation.interfaces import PartialCompletion
from asyncrl.generation.prefixes import PREFIX_COLUMNS, PrefixKeeper, prefix_of, rows_of, samples_of_rows, seed_of

STORED: dict[str, Any] = {
    "generator": {"max_concurrent_groups": 1, "max_completion_tokens": 40, "persist_every_tokens": 2},
    "staleness": {"max_versions": 2},
}


def sample(tokens: int, *, steps: tuple[int, ...] = (0,), **ended: bool) -> PartialCompletion:
    versions = [Version(1, steps[min(place, len(steps) - 1)]) for place in range(tokens)]
    logprobs = [-0.5 * place for place in range(tokens)]
    return PartialCompletion(token_ids=[*range(2, 2 + tokens)], logprobs=logprobs, versions=versions, **ended)


def test_rows_keep_samples_as_they_are() -> None:
    samples = [
        sample(3, steps=(4, 4, 5)),
        sample(0),
        sample(2, finished=True),
        sample(4, finished=True, truncated=True),
    ]
    prefix = prefix_of(samples, attempt=1)
    assert prefix == Prefix(attempt=1, tokens=9, versions=(Version(1, 0), Version(1, 4), Version(1, 5)))
    rows = rows_of(samples)
    assert set(rows) == set(PREFIX_COLUMNS)
    assert samples_of_rows(rows, prefix=prefix) == samples
    stored = encode(BatchedDataDict.from_batches([rows], pad_value_dict=dict(PAD_VALUES)))
    picked = {name: [Picked(column, range(4), range(4))] for name, column in stored.items()}
    read = decode(picked, lengths=[3, 0, 2, 4])
    assert samples_of_rows(read, prefix=prefix) == samples


def test_stored_samples_keep_their_supports_and_their_most_likely_tokens() -> None:
    wide: dict[str, Any] = {
        SUPPORT: np.array([[2, 9], [3, -1], [4, 2]], dtype=np.int32),
        TOP_IDS: np.array([[9], [3], [-1]], dtype=np.int32),
        TOP_LOGPROBS: np.array([[-0.3], [-0.1], [0.0]], dtype=np.float32),
    }
    samples = [
        dataclasses.replace(sample(3, steps=(4, 4, 5)), wide=wide),
        dataclasses.replace(sample(0), wide={name: column[:0] for name, column in wide.items()}),
    ]
    rows = rows_of(samples)
    assert set(rows) == {*PREFIX_COLUMNS, *wide}
    stored = encode(BatchedDataDict.from_batches([rows], pad_value_dict=dict(PAD_VALUES)))
    picked = {name: [Picked(column, range(2), range(2))] for name, column in stored.items()}
    read = samples_of_rows(decode(picked, lengths=[3, 0]), prefix=prefix_of(samples, attempt=1))
    for name, column in wide.items():
        assert [each.wide[name].tolist() for each in read] == [column.tolist(), []]
        assert read[0].wide[name].dtype == column.dtype
    [cut, _] = samples_of_rows(rows, prefix=Prefix(attempt=1, tokens=2, versions=(Version(1, 4),)))
    assert all(cut.wide[name].tolist() == column[:2].tolist() for name, column in wide.items())


@pytest.mark.asyncio
@pytest.mark.parametrize("wide", [(), (SUPPORT,), (TOP_IDS, TOP_LOGPROBS)], ids=str)
async def test_wide_columns_are_read_if_samples_have_them(wide: tuple[str, ...]) -> None:
    asked: list[tuple[str, ...]] = []

    class Rows:
        async def get(self, key: str, columns: tuple[str, ...]) -> BatchedDataDict:
            asked.append(columns)
            return rows_of([sample(2)])

    async def verified() -> None: ...

    keeper = PrefixKeeper(
        Rows(),  # type: ignore[arg-type]
        every_tokens=2, wide=wide, verified=verified, stored=lambda *_: None,
    )  # fmt: skip
    ticket = Ticket(
        group=3, attempt=1, task=Task(question="q", prompt="q", answer="a"), seed=0, version=Version(1, 0),
        max_staleness_versions=2, replica="a", prefix=prefix_of([sample(2)], attempt=0),
    )  # fmt: skip
    assert await keeper.read(ticket) == [sample(2)]
    assert asked == [(*PREFIX_COLUMNS, *wide)]


def test_tokens_of_versions_that_were_not_reported_are_cut_off() -> None:
    """The store may be newer than the last heartbeat: the buffer knows nothing of version 6."""
    rows = rows_of([sample(4, steps=(5, 5, 6, 5)), sample(1, steps=(5,), finished=True)])
    known = Prefix(attempt=0, tokens=2, versions=(Version(1, 5),))
    cut, whole = samples_of_rows(rows, prefix=known)
    assert cut == sample(2, steps=(5, 5))
    assert whole.finished
    with pytest.raises(InfraError, match="no token of the versions"):
        samples_of_rows(rows, prefix=Prefix(attempt=0, tokens=2, versions=(Version(2, 5),)))


def test_seeds_after_a_prefix_differ_by_child_and_length_and_fit_into_63_bits() -> None:
    seeds = {seed_of(seed, child, tokens) for seed in (0, 8) for child in range(8) for tokens in range(1, 50)}
    assert len(seeds) == 2 * 8 * 49
    assert all(0 <= seed < 2**63 for seed in seeds)


async def killed_in_the_middle(pool: Pool, *, tokens: int = 6) -> tuple[FakeEngine, list[PartialCompletion]]:
    """Kills replica `a` while it generates group 0, after it has reported at least `tokens` stored tokens. Returns its
    engine and what it has stored."""
    engine = pool.add("a")
    engine.ends_one_in = 10**9
    engine.gate.clear()
    await pool.publish(0)
    generator = pool.generators["a"]
    await until(lambda: engine.running)
    await pool.reserve_elsewhere()
    prefix: Prefix | None = None
    while prefix is None or prefix.tokens < tokens:
        engine.gate.set()
        await asyncio.sleep(0)
        engine.gate.clear()
        await everything_else_runs()
        await generator.report()
        prefix = pool.tickets("a")["0.0"].prefix
    before = samples_of_rows(pool.prefixes.kept["0.0"], prefix=prefix)
    pool.running["a"].cancel()
    await asyncio.gather(pool.running["a"], return_exceptions=True)  # it leaves, so its ticket expires
    assert not pool.tickets("a")
    return engine, before


@pytest.mark.asyncio
@pytest.mark.fault("F2")
async def test_another_replica_continues_the_tokens_of_a_killed_one() -> None:
    async with empty_pool(**STORED) as pool:
        _, before = await killed_in_the_middle(pool)
        heir = pool.add("b")
        await until(lambda: "0.1" in pool.rows.kept)
        assert heir.prefixes[:2] == [each.token_ids for each in before]
        rows = pool.rows.kept["0.1"]
        start = int(rows["token_mask"][0].nonzero()[0])  # after the prompt
        for place, each in enumerate(before):
            stored = slice(start, start + len(each.token_ids))
            assert rows["input_ids"][place, stored].tolist() == each.token_ids
            assert torch.equal(rows["generation_logprobs"][place, stored], torch.tensor(each.logprobs))
        await until(lambda: pool.counts.ready)
        [group] = pool.ready()
        continued = sum(len(each.token_ids) for each in before)
        assert group.meta is not None
        assert (group.meta.key, group.meta.replica, group.meta.continued_tokens) == ("0.1", "b", continued)
        assert group.meta.generated_tokens > continued
        events = pool.coordinator.status().account.events
        assert (events[Event.TOKENS_CONTINUED], events[Event.TOKENS_DROPPED]) == (continued, 0)
        await pool.coordinator.start()
        await everything_else_runs()
        await pool.clock.passes(1.0)
        await until(lambda: not {"0.0", "0.1"} & set(pool.prefixes.kept))


@pytest.mark.asyncio
async def test_a_prefix_keeps_its_versions_when_newer_weights_continue_it() -> None:
    async with empty_pool(**STORED, learner={"groups_per_step": 1, "group_size": 2, "total_steps": 50}) as pool:
        _, before = await killed_in_the_middle(pool)
        await pool.step_elsewhere()
        pool.add("b")
        await until(lambda: pool.counts.ready)
        [group] = pool.ready()
        assert group.meta is not None
        assert (group.meta.oldest, group.meta.newest, group.deadline) == (0, 1, 2)
        for each, spans, tokens in zip(before, group.meta.version_spans, group.meta.completion_tokens, strict=True):
            new = tokens - len(each.token_ids)
            assert spans == (VersionSpan(1, 0, len(each.token_ids)), *([VersionSpan(1, 1, new)] if new else []))


@pytest.mark.parametrize("error", [RowsLost("the row store has ended", sample_ids=["0.0_g0"]), KeyError("0.0_g0")])
@pytest.mark.asyncio
async def test_a_prefix_that_cannot_be_read_is_counted_and_the_group_begins_again(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def lost(*_: object) -> BatchedDataDict:
        raise error

    async with empty_pool(**STORED) as pool:
        _, before = await killed_in_the_middle(pool)
        pool.prefixes.get = lost  # type: ignore[method-assign]
        heir = pool.add("b")
        await until(lambda: pool.counts.ready)
        assert heir.prefixes == []
        status = pool.coordinator.status()
        assert status.account.events[Event.TOKENS_DROPPED] == sum(len(each.token_ids) for each in before)
        assert (status.account.closed, pool.failures.total()) == (True, 0)
        assert "begins again" in caplog.text


@pytest.mark.asyncio
async def test_a_put_that_fails_does_not_fail_the_rollout() -> None:
    async with empty_pool(**STORED) as pool:
        pool.prefixes.fail_next_put = TimeoutError("no answer")
        pool.add("a")
        await pool.publish(0)
        await until(lambda: pool.counts.ready >= 2)
        assert pool.failures.total() == 0


@pytest.mark.asyncio
async def test_a_commit_names_what_the_attempt_has_stored() -> None:
    async with empty_pool(**STORED) as pool:
        pool.add("a")
        await pool.publish(0)
        await until(lambda: pool.counts.ready >= 1)
        metas = [group.meta for group in pool.ready() if group.meta is not None]
        stored = [meta.stored for meta in metas if meta.stored is not None]
        assert stored, metas
        assert all(
            0 < prefix.tokens <= sum(meta.completion_tokens) for prefix, meta in zip(stored, metas, strict=False)
        )


@pytest.mark.asyncio
async def test_nothing_is_stored_unless_it_is_set() -> None:
    async with empty_pool(generator={"max_completion_tokens": 40}) as pool:
        pool.add("a")
        await pool.publish(0)
        await until(lambda: pool.counts.ready >= 3)
        assert not pool.prefixes.kept


@pytest.mark.asyncio
async def test_what_no_attempt_needs_is_swept() -> None:
    async with empty_pool(**STORED) as pool:
        await killed_in_the_middle(pool)
        pool.prefixes.kept |= {"0.5": rows_of([sample(1)]), "77.0": rows_of([sample(1)])}
        await pool.coordinator.start()
        await everything_else_runs()
        await pool.clock.passes(SWEEP_EVERY_S)
        assert set(pool.prefixes.kept) == {"0.0"}
