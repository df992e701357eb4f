"""Rollouts of agents, with real scoring processes, a real gateway, and an engine that only answers with numbers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from asyncrl.buffer.records import Ticket
from asyncrl.common.version import Version
from asyncrl.config.parts import all_configs
from asyncrl.config.schema import Config, HeldoutSet
from asyncrl.data.prompts import Task
from asyncrl.data.specs import BRANCH, NO_BRANCH
from asyncrl.demo.chat_tokenizer import END, build_chat_tokenizer
from asyncrl.environments.scoring import PartScorers
from asyncrl.environments.scoring_messages import RewardFailure
from asyncrl.errors import DataError, InfraError
from asyncrl.gateway.agent_rollouts import AgentRollouts
from asyncrl.gateway.rendering import Renderer
from asyncrl.gateway.server import GatewayServer
from asyncrl.generation.episodes import Attempt
from asyncrl.generation.interfaces import Completion, PartialCompletion, Sampled
from asyncrl.generation.rollout import FinishedGroup, Rollouts

pytestmark = [pytest.mark.asyncio, pytest.mark.integration, pytest.mark.timeout(120)]

TOKENIZER = build_chat_tokenizer(max_length=4096)
END_ID = TOKENIZER.convert_tokens_to_ids(END)


class Engine:
    """Answers the n-th call with `n`, under version n. Records the prompts and the seeds. Its n-th answer has n tokens
    that are not the most probable ones."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.seeds: list[int | None] = []
        self.error: Exception | None = None

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        n: int,
        seed: int | None,
        temperature: float,
        max_tokens: int,
        stop: Sequence[str] = (),
        prefix: Sequence[PartialCompletion] = (),
        on_progress: Callable[[Sampled], None] | None = None,
        count_non_greedy: bool = False,
    ) -> list[Completion]:
        del temperature, max_tokens, stop, prefix, on_progress
        assert n == 1
        self.prompts.append(list(prompt_ids))
        self.seeds.append(seed)
        number = len(self.prompts)
        await asyncio.sleep(0.01)
        if self.error is not None:
            raise self.error
        token_ids = [*TOKENIZER(f"{number}")["input_ids"], END_ID]
        count = len(token_ids)
        versions = [Version(1, number)] * count
        return [
            Completion(
                token_ids=token_ids, logprobs=[-0.5] * count, versions=versions, text=f"{number}", truncated=False,
                non_greedy_tokens=number if count_non_greedy else None,
            )
        ]  # fmt: skip


class Setup:
    def __init__(self, config: Config, engine: Engine, rollouts: Rollouts, scorer: PartScorers) -> None:
        self.config, self.engine, self.rollouts, self.scorer = config, engine, rollouts, scorer
        self.progress: list[tuple[int, list[int]]] = []

    async def run(self, **metadata: Any) -> FinishedGroup:
        task = Task(question="hello", prompt="hello", answer="", metadata=metadata)
        ticket = Ticket(
            group=3, attempt=1, task=task, seed=50, version=Version(1, 0), max_staleness_versions=2, replica="a"
        )
        return await self.rollouts.run(ticket, Attempt(on_progress=self.note))

    def note(self, sampled: Sampled) -> None:
        self.progress.append((sum(sampled.lengths), list(sampled.lengths)))


@asynccontextmanager
async def playing(agent: str, *, samples: int = 2, **environment: Any) -> AsyncIterator[Setup]:
    config = Config.model_validate(
        {
            "environment": {"agent": f"agents_of_tests:{agent}", **environment},
            "learner": {"group_size": samples},
            "model": {"max_length": 200},
            "generator": {"seeded": True},
        }
    )
    scorer, engine = PartScorers(all_configs(config)), Engine()
    renderer = Renderer(TOKENIZER)
    server = GatewayServer(config=config, renderer=renderer, sample=lambda asked: agents.sample(asked))
    agents = AgentRollouts(config=config, gateway=server, engine=engine, scorer=scorer, tokenizer=TOKENIZER)  # type: ignore[arg-type]
    try:
        await asyncio.gather(scorer.start(), server.start())
        rollouts = Rollouts(
            config=config,
            engine=engine,
            tokenizer=TOKENIZER,
            scorer=scorer,
            replica="a",
            agents=agents,  # type: ignore[arg-type]
        )
        yield Setup(config, engine, rollouts, scorer)
    finally:
        await asyncio.gather(server.shutdown(), scorer.close())


async def test_the_rows_of_a_conversation_are_what_the_engine_saw() -> None:
    async with playing("polite") as setup:
        group = await setup.run(turns=3)
    meta, rows = group.meta, group.rows
    assert meta.rewards == (4.0, 4.0)
    assert meta.components == {"turns": (3.0, 3.0), "length": (1.0, 1.0)}
    assert meta.completion_tokens == (6, 6), "three answers of a digit and the end of a turn"
    sequences = [
        row[:length] for row, length in zip(rows["input_ids"].tolist(), rows["input_lengths"].tolist(), strict=True)
    ]
    masks = rows["token_mask"].bool()
    for number, sequence in enumerate(sequences):
        sampled = [token for token, mask in zip(sequence, masks[number].tolist(), strict=False) if mask]
        assert sampled.count(END_ID) == 3, "the ends of the model's turns are trained"
        longest = max((p for p in setup.engine.prompts if sequence[: len(p)] == p), key=len)
        assert sequence[len(longest) :] == sampled[-2:], "the last answer follows the last prompt"
    steps = [[span.step for span in spans] for spans in meta.version_spans]
    assert sorted(step for of_sample in steps for step in of_sample) == [1, 2, 3, 4, 5, 6], "each turn has its version"
    assert (meta.oldest, meta.newest) == (1, 6)
    assert meta.read_tokens[0] == len(sequences[0]) - meta.prompt_tokens - 6
    assert len(set(setup.engine.seeds)) == 6, "each turn of each sample has a seed of its own"
    assert {50, 51} < set(setup.engine.seeds)
    assert setup.progress[-1] == (12, [6, 6])


@pytest.mark.parametrize(("turns", "failed"), [(1, 0), (2, 1), (3, 5)])
async def test_turns_and_failed_calls_of_tools_are_in_the_metadata_of_the_group(turns: int, failed: int) -> None:
    async with playing("clumsy") as setup:
        group = await setup.run(turns=turns, failed=failed)
    assert group.meta.turns == (turns, turns)
    assert (group.meta.tool_calls, group.meta.failed_tool_calls) == (0, 2 * failed)
    labels = {failure.label for failure in group.failures}
    assert labels == {f"data/tool_failed/price/{error}" for error in ("KeyError", "NameError")[:failed]}
    assert len(group.failures) == 2 * failed
    assert all(failure.prompt == "hello" for failure in group.failures)


async def test_a_bad_sample_does_not_cost_the_others() -> None:
    expected = {
        "raise": RewardFailure.RAISED,
        "hang": RewardFailure.TIMEOUT,
        "exit": RewardFailure.CRASHED,
        "text": RewardFailure.WRONG_TYPE,
        "fork": RewardFailure.LIMIT,
        "talk": RewardFailure.LIMIT,
        "flood": RewardFailure.LIMIT,
    }
    reasons: dict[str, str] = {}
    async with playing("unlucky", samples=3, score_timeout_s=2.0, max_turns=5, max_branches=1) as setup:
        for how in expected:
            setup.engine.prompts.clear()
            group = await setup.run(how=how)
            [failure] = group.failures
            reasons[how] = failure.reason
            assert "api_key" not in failure.completion, "the session with its key is not the completion"
            assert sorted(group.meta.rewards, key=str) == [1.0, 1.0, None], how
    assert reasons == expected


async def test_an_agent_that_goes_back_has_one_row_with_all_of_its_branches() -> None:
    async with playing("undecided") as setup:
        group = await setup.run()
    meta, rows = group.meta, group.rows
    assert meta.completion_tokens == (8, 8), "four answers of a digit and the end of a turn, each trained once"
    assert meta.rewards == (1.0, 1.0)
    assert group.activity is not None
    assert group.activity["forks"] == {"compacted": 2, "resampled": 2}
    prompts = [tuple(prompt) for prompt in setup.engine.prompts]
    for row, length in enumerate(rows["input_lengths"].tolist()):
        ids, masks, numbers = (rows[name][row, :length] for name in ("input_ids", "token_mask", BRANCH))
        assert numbers.unique(return_counts=False).tolist() == [0, 1, 2]
        for branch in range(3):
            sequence, mask = ids[numbers == branch].tolist(), masks[numbers == branch].bool().tolist()
            last = max(place for place, trained in enumerate(mask) if trained) + 1
            assert last == len(sequence), "a branch ends with the answer that is its own"
            begun = len(sequence) - 2
            assert tuple(sequence[:begun]) in prompts, "its last answer follows what the engine saw"
        assert rows[BRANCH][row, length:].tolist() == [NO_BRANCH] * (rows[BRANCH].shape[1] - length)
    assert meta.row_bytes == rows["input_lengths"].sum() * 28 + 2 * 8


async def test_an_agent_may_continue_tokens_instead_of_messages() -> None:
    async with playing("of_tokens") as setup:
        group = await setup.run()
    sequences = group.rows["input_ids"].tolist()
    masks = group.rows["token_mask"].tolist()
    assert [row[:3] for row in sequences] == [[1, 2, 3]] * 2
    assert [row[5] for row in sequences] == [4] * 2, "two sampled tokens, and one that the agent added"
    assert masks == [[0, 0, 0, 1, 1, 0, 1, 1]] * 2
    assert group.rows[BRANCH].tolist() == [[0] * 8] * 2


async def test_an_agent_that_makes_no_call_has_no_reward() -> None:
    async with playing("silent") as setup:
        with pytest.raises(DataError, match="made no call") as caught:
            await setup.run()
    assert caught.value.reason == RewardFailure.NO_CALL


async def test_an_agent_whose_calls_were_all_refused_has_no_reward() -> None:
    async with playing("too_long") as setup:
        with pytest.raises(DataError, match=r"answered no call of the agent \(.*model.max_length = 200") as caught:
            await setup.run()
    assert caught.value.reason == RewardFailure.LIMIT


async def test_a_failure_of_the_engine_is_a_failure_of_the_machine() -> None:
    async with playing("polite") as setup:
        setup.engine.error = InfraError("the engine failed", reason="engine")
        with pytest.raises(InfraError, match="the engine failed"):
            await setup.run(turns=1)


async def test_a_cancelled_rollout_ends_its_sessions() -> None:
    async with playing("polite") as setup:
        running = asyncio.create_task(setup.run(turns=12))
        while not setup.engine.prompts:
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await asyncio.sleep(0.2)
        calls = len(setup.engine.prompts)
        await asyncio.sleep(0.2)
        assert len(setup.engine.prompts) == calls, "an agent whose session has ended gets no answer"


async def test_held_out_questions_are_answered_by_agents_too() -> None:
    async with playing("polite") as setup:
        task = Task(question="hello", prompt="hello", answer="", metadata={"turns": 2})
        [answer] = await setup.rollouts.answers(
            task, HeldoutSet(prompts=1, samples=1, temperature=1.0, pass_reward=1.0), number=0
        )
    assert (answer.reward, answer.numbers.components) == (3.0, {"turns": 2.0, "length": 1.0})
    assert (answer.numbers.turns, answer.numbers.truncated) == (2, 0.0)
    assert setup.engine.seeds == [None, None]
    assert answer.non_greedy_tokens == 1 + 2, "those of all turns"
