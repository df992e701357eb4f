"""The answers of agents are stored, and another replica gives them to agents that make the same calls."""

import asyncio
import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest
from agent_pool import ANSWER_TOKENS, AgentPool, LocalSession, agent_pool
from buffer_scenes import everything_else_runs
from pool import WEIGHTS, manifest_of, until
from test_stored_prefixes import killed_in_the_middle

from asyncrl.buffer.ledger import Event
from asyncrl.buffer.records import GroupMeta, Prefix, VersionSpan
from asyncrl.common.roles import Role
from asyncrl.common.version import Lineage, Version
from asyncrl.config.load import shared_config
from asyncrl.coordinator.registry import Deployment
from asyncrl.coordinator.status import Restored
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.prompts import Task
from asyncrl.data.specs import SUPPORT
from asyncrl.data_plane.codec import PAD_VALUES, Picked, decode, encode
from asyncrl.errors import InfraError
from asyncrl.gateway.agent_rollouts import GroupProgress, call_of
from asyncrl.gateway.gateway import Asked
from asyncrl.generation.episodes import Attempt
from asyncrl.generation.interfaces import Completion, PartialCompletion
from asyncrl.generation.prefixes import (
    PREFIX_COLUMNS,
    TURN_COLUMNS,
    joined,
    prefix_of,
    rows_of,
    samples_of_rows,
    turns_of,
)

TURNS = 6
STORED = 34  # two samples, each with four answers and one or more tokens of the fifth one
OLD, NEW = Version(1, 4), Version(1, 5)
FIRST, SECOND = (Deployment(id=name, role=Role.LEARNER, host="h", pid=7) for name in ("first", "second"))


async def talk(session: LocalSession, task: Task) -> float:
    """Makes `TURNS` calls. Replica `c` says something else from the third call on."""
    messages: list[Any] = [{"role": "user", "content": task.question}]
    length = 0
    for turn in range(TURNS):
        reply = await session.chat(messages)
        length += len(reply["content"])
        says = "other" if session.replica == "c" and turn >= 1 else "more"
        messages += [reply, {"role": "user", "content": f"{says} {turn}"}]
    return float(length)


async def finished_by(pool: AgentPool, replica: str) -> GroupMeta:
    """Lets a replica with newer weights play group 0 to its end. Returns the metadata of the group."""
    await pool.step_elsewhere()
    pool.add(replica).ends_one_in = 10**9
    await until(lambda: pool.counts.ready)
    meta = pool.ready()[0].meta
    assert meta is not None
    assert meta.key == "0.1"
    return meta


def sampled_of(pool: AgentPool, key: str) -> list[list[tuple[int, float, int]]]:
    """Returns the token, log-prob and version of each sampled token of a group's rows."""
    rows = pool.rows.kept[key]
    columns = [rows[name] for name in ("input_ids", "generation_logprobs", "weight_versions")]
    return [
        list(zip(*(column[row][mask].tolist() for column in columns), strict=True))
        for row, mask in enumerate(rows["token_mask"].bool())
    ]


@pytest.mark.asyncio
@pytest.mark.fault("F2")
async def test_another_replica_samples_only_the_turns_that_are_not_stored() -> None:
    async with agent_pool(talk) as pool:
        _, before = await killed_in_the_middle(pool, tokens=STORED)
        for sample in before:
            *whole, last = [len(answer.token_ids) for _, answer in turns_of(sample)]
            assert whole == [ANSWER_TOKENS] * 4
            assert 0 < last < ANSWER_TOKENS
        meta = await finished_by(pool, "b")
        heir = pool.engines["b"]
        answers = [answer.token_ids for sample in before for _, answer in turns_of(sample)]
        assert sorted(heir.prefixes) == sorted(answers), "each stored answer is used once"
        for sample, sampled in zip(before, sampled_of(pool, meta.key), strict=True):
            stored = len(sample.token_ids)
            assert [token for token, _, _ in sampled[:stored]] == sample.token_ids
            assert [logprob for _, logprob, _ in sampled[:stored]] == pytest.approx(sample.logprobs)
            assert [step for _, _, step in sampled] == [0] * stored + [1] * (TURNS * ANSWER_TOKENS - stored)
        assert meta.completion_tokens == (TURNS * ANSWER_TOKENS,) * 2
        total = sum(len(sample.token_ids) for sample in before)
        assert (meta.oldest, meta.newest, meta.continued_tokens) == (0, 1, total)
        events = pool.coordinator.status().account.events
        assert (events[Event.TOKENS_CONTINUED], events[Event.TOKENS_DROPPED]) == (total, 0)
        assert pool.coordinator.status().account.closed


@pytest.mark.asyncio
async def test_each_answer_stands_in_the_context_in_which_it_was_sampled() -> None:
    """The answers of the dead replica follow the tokens of its calls, and the later ones those of the other replica."""
    async with agent_pool(talk) as pool:
        await killed_in_the_middle(pool, tokens=STORED)
        meta = await finished_by(pool, "c")
        rows = pool.rows.kept[meta.key]
        prompts = [pool.engines[name].prompts for name in ("a", "c")]  # by version
        for row in range(2):
            ids = rows["input_ids"][row, : int(rows["input_lengths"][row])].tolist()
            mask = rows["token_mask"][row].bool().tolist()
            starts = [i for i in range(1, len(ids)) if mask[i] and not mask[i - 1]]
            assert len(starts) == TURNS
            assert all(mask[start : start + ANSWER_TOKENS] == [True] * ANSWER_TOKENS for start in starts)
            versions = [int(rows["weight_versions"][row, start]) for start in starts]
            assert versions == [0] * 2 + [1] * 4
            assert all(ids[:start] in prompts[version] for start, version in zip(starts, versions, strict=True))


@pytest.mark.asyncio
async def test_an_agent_that_makes_other_calls_gets_new_answers_and_the_stored_ones_are_dropped() -> None:
    async with agent_pool(talk) as pool:
        _, before = await killed_in_the_middle(pool, tokens=STORED)
        meta = await finished_by(pool, "c")
        for sample, sampled in zip(before, sampled_of(pool, meta.key), strict=True):
            assert [token for token, _, _ in sampled[:8]] == sample.token_ids[:8]
            assert [step for _, _, step in sampled] == [0] * 8 + [1] * 16
        events = pool.coordinator.status().account.events
        dropped = sum(len(sample.token_ids) for sample in before) - 16
        assert (meta.continued_tokens, events[Event.TOKENS_CONTINUED]) == (16, 16)
        assert events[Event.TOKENS_DROPPED] == dropped


@pytest.mark.asyncio
@pytest.mark.fault("F6")
async def test_after_a_learner_went_back_only_answers_of_surviving_weights_are_given_again() -> None:
    """The learner trains a step in the middle of an episode, dies, and another one goes back to before that step."""
    async with agent_pool(talk) as pool:
        coordinator, shared = pool.coordinator, shared_config(pool.config)
        await coordinator.attach(FIRST, shared=shared)
        engine = pool.add("a")
        engine.ends_one_in = 10**9
        engine.gate.clear()
        await pool.publish(0)
        await until(lambda: engine.running)
        snapshot = coordinator.snapshot(1)
        await pool.reserve_elsewhere()
        await stored_tokens(pool, at_least=13)
        await pool.step_elsewhere()
        await until(lambda: engine.version == Version(1, 1))
        mixed = await stored_tokens(pool, at_least=27)
        assert mixed.versions == (Version(1, 0), Version(1, 1))
        rows = pool.prefixes.kept["0.0"]
        pairs = zip(rows["weight_versions"], rows["input_lengths"].tolist(), strict=True)
        kept = [int((versions[:length] == 0).sum()) for versions, length in pairs]

        pool.clock.now_s = pool.config.buffer.heartbeat_timeout_s + 1.0
        restored = Restored(snapshot=snapshot, lineage=Lineage((snapshot.version,)))
        await coordinator.attach(SECOND, shared=shared, restored=restored)
        again = msgspec.structs.replace(manifest_of(0), version=Version(2, 0))
        coordinator.published(again.version)
        await pool.store.publish(again, [WEIGHTS])
        engine.gate.set()
        await pool.generators["a"].report()
        await until(lambda: pool.counts.ready > pool.config.learner.groups_per_step)  # those of the lost step are back
        [meta] = [group.meta for group in pool.ready() if group.ticket.group == 0]
        assert meta is not None
        assert (meta.group, meta.attempt, meta.continued_tokens) == (0, 1, sum(kept))
        for spans, tokens in zip(meta.version_spans, kept, strict=True):
            assert spans == (VersionSpan(1, 0, tokens), VersionSpan(2, 0, TURNS * ANSWER_TOKENS - tokens))


async def stored_tokens(pool: AgentPool, *, at_least: int) -> Prefix:
    """Lets replica `a` sample until it has reported so many stored tokens of group 0."""
    while (prefix := pool.tickets("a")["0.0"].prefix) is None or prefix.tokens < at_least:
        pool.engines["a"].gate.set()
        await asyncio.sleep(0)
        pool.engines["a"].gate.clear()
        await everything_else_runs()
        await pool.generators["a"].report()
    return prefix


@pytest.mark.asyncio
async def test_answers_of_versions_that_the_ticket_does_not_name_are_not_given_again() -> None:
    """A learner that goes back takes lost versions out of the prefix of a ticket (tests/buffer/test_roll_back.py)."""
    async with agent_pool(talk) as pool:
        await killed_in_the_middle(pool, tokens=STORED)
        rows = pool.prefixes.kept["0.0"]
        rows["weight_versions"][:, 9:] = 1  # only one token of the third answer is good
        [waits] = [prompt for prompt in pool.snapshot().waiting if prompt.group == 0]
        assert waits.prefix is not None
        assert waits.prefix.versions == (Version(1, 0),)
        meta = await finished_by(pool, "b")
        for sampled in sampled_of(pool, meta.key):
            assert [step for _, _, step in sampled] == [0] * 9 + [1] * 15
        assert meta.continued_tokens == 18


def answer(*tokens: int, version: Version = OLD, **ended: bool) -> PartialCompletion:
    count = len(tokens)
    return PartialCompletion(
        token_ids=list(tokens), logprobs=[-0.5 * token for token in tokens], versions=[version] * count, **ended
    )


def completion(*tokens: int) -> Completion:
    count = len(tokens)
    return Completion(token_ids=list(tokens), logprobs=[-1.0] * count, versions=[NEW] * count, text="", truncated=False)


def asked(*tokens: int, **changes: Any) -> Asked:
    plain = Asked(session="s", token_ids=list(tokens), max_tokens=4, temperature=1.0, seed=7, begun=1)
    return msgspec.structs.replace(plain, **changes)


SAMPLES = [
    joined([(11, answer(2, 3, finished=True)), (12, answer(4, finished=True, truncated=True)), (11, answer(5, 6))]),
    joined([]),
]


def test_rows_keep_the_turns_of_samples() -> None:
    assert (SAMPLES[0].calls, SAMPLES[0].ends) == ([11, 11, 12, 11, 11], [0, 2, 3, 0, 1])
    assert turns_of(SAMPLES[0]) == [
        (11, answer(2, 3, finished=True)),
        (12, answer(4, finished=True, truncated=True)),
        (11, answer(5, 6)),
    ]
    rows = rows_of(SAMPLES)
    assert set(rows) == {*PREFIX_COLUMNS, *TURN_COLUMNS}
    stored = encode(BatchedDataDict.from_batches([rows], pad_value_dict=dict(PAD_VALUES)))
    picked = {name: [Picked(column, range(2), range(2))] for name, column in stored.items()}
    read = decode(picked, lengths=[5, 0])
    assert samples_of_rows(read, prefix=prefix_of(SAMPLES, attempt=0)) == SAMPLES


def test_turns_are_cut_at_the_first_token_of_another_lineage() -> None:
    mixed = dataclasses.replace(answer(4, 5, 6, finished=True), versions=[OLD, NEW, OLD])
    rows = rows_of([joined([(11, answer(2, 3, finished=True)), (12, mixed), (13, answer(7, finished=True))])])
    [cut] = samples_of_rows(rows, prefix=Prefix(attempt=0, tokens=6, versions=(OLD,)))
    assert turns_of(cut) == [(11, answer(2, 3, finished=True)), (12, answer(4))]


def test_turns_keep_their_supports() -> None:
    supports = np.array([[2, 9], [3, -1]], dtype=np.int32)
    turns = [(11, dataclasses.replace(answer(2), wide={SUPPORT: supports[:1]})),
             (12, dataclasses.replace(answer(3), wide={SUPPORT: supports[1:]}))]  # fmt: skip
    again = turns_of(joined(turns))
    assert [each.wide[SUPPORT].tolist() for _, each in again] == [[[2, 9]], [[3, -1]]]


def test_a_call_is_known_by_what_it_asks_for_and_not_by_its_session() -> None:
    assert call_of(asked(1, 2)) == call_of(asked(1, 2, session="t", seed=8, begun=3))
    tool = {"type": "function", "function": {"name": "calculator"}}
    others = [{"token_ids": [1, 3]}, {"max_tokens": 5}, {"stop": ("x",)}, {"tools": (tool,)}, {"temperature": 0.5}]
    ids = {call_of(asked(1, 2, **changes)) for changes in ({}, *others)}
    assert len(ids) == 1 + len(others)
    assert all(0 <= id < 2**63 for id in ids)
    large = {"type": "function", "function": {"name": "t", "parameters": {"maximum": 2**70}}}
    assert call_of(asked(1, 2, tools=(large,))) not in ids, "JSON has integers beyond 64 bits"


def test_a_stored_answer_is_given_once_and_only_to_its_call() -> None:
    stored = answer(2, 3, finished=True)
    group = GroupProgress(1, Attempt(prefix=[joined([(call_of(asked(1)), stored)])]))
    [sample] = group.samples
    with sample.answering(asked(9)) as other:
        assert other.prefix == []
        with sample.answering(asked(1)) as first, sample.answering(asked(1)) as second:
            assert (first.prefix, second.prefix) == ([stored], [])
            first.answered(completion(2, 3))
            second.answered(completion(6))
        other.answered(completion(7, 8))
    assert (group.lengths, group.continued_tokens) == ([5], 2)
    with sample.answering(asked(1)) as third:
        assert third.prefix == []
        third.answered(completion(6))


def test_what_is_not_used_yet_is_stored_again() -> None:
    calls = [call_of(asked(token)) for token in (1, 2, 3)]
    stored = [(call, answer(call % 100, finished=True)) for call in calls]
    group = GroupProgress(1, Attempt(prefix=[joined(stored)]))
    with group.samples[0].answering(asked(1)) as turn:
        turn.answered(completion(*stored[0][1].token_ids))
    with group.samples[0].answering(asked(4)) as turn:
        turn.answered(completion(6, 7))
    now = group.partial()
    assert now is not None
    tokens = [(call, len(each.token_ids)) for call, each in turns_of(now[0])]
    assert tokens == [*((call, 1) for call in calls), (call_of(asked(4)), 2)]
    assert (group.lengths, group.continued_tokens) == ([5], 1)


def test_an_agent_that_begins_again_gets_the_stored_answers_again() -> None:
    stored = answer(2, 3, finished=True)
    group = GroupProgress(1, Attempt(prefix=[joined([(call_of(asked(1)), stored)])]))
    [sample] = group.samples
    for _ in range(2):
        with sample.answering(asked(1)) as turn:
            turn.answered(completion(2, 3))
    assert group.lengths == [4]
    with sample.answering(asked(1, begun=2)) as turn:
        assert turn.prefix == [stored]
        turn.answered(completion(2, 3))
    assert group.lengths == [2]
    with pytest.raises(InfraError, match="begun again"), sample.answering(asked(1)):
        pass


def test_a_call_that_failed_may_be_made_again() -> None:
    stored = answer(2, 3)
    group = GroupProgress(1, Attempt(prefix=[joined([(call_of(asked(1)), stored)])]))
    [sample] = group.samples
    for call in (asked(1), asked(9)):
        with pytest.raises(InfraError), sample.answering(call):
            raise InfraError("the engine failed", reason="engine")
    with sample.answering(asked(1)) as turn:
        assert turn.prefix == [stored]
    assert (group.lengths, group.partial()) == ([2], [joined([(call_of(asked(1)), stored)])])


def test_nothing_is_known_while_an_answer_is_on_its_way() -> None:
    class OnItsWay:
        lengths = (3,)

        def partial(self) -> None:
            return None

    reports: list[int] = []
    group = GroupProgress(2, Attempt(on_progress=lambda sampled: reports.append(sum(sampled.lengths))))
    with group.samples[0].answering(asked(1)) as turn:
        turn.progressed(OnItsWay())
        assert group.partial() is None
        turn.answered(completion(2, 3, 4))
    assert group.partial() is not None
    assert reports == [3, 3]
