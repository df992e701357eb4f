"""Runs one rollout: from a ticket's prompt to a scored group with its rows and its metadata.

Expected failures are raised as RolloutError. The generator counts every other error as a DATA failure, so that a bug
stops the run (after `generator.max_data_failures` in a row) instead of being retried forever.
"""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl.buffer.attempts import seed_of_group
from asyncrl.buffer.failure_records import Failure
from asyncrl.buffer.records import GroupMeta, Ticket
from asyncrl.config.checks import BYTES_PER_BRANCH_ID, BYTES_PER_ROW, BYTES_PER_SUPPORT_TOKEN, BYTES_PER_TOKEN
from asyncrl.config.parts import part_configs
from asyncrl.config.schema import Config, HeldoutSet
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.prompts import Task
from asyncrl.data.row_checksums import row_checksums
from asyncrl.data.specs import BRANCH, SUPPORT
from asyncrl.data.tokenizer import encode_prompt
from asyncrl.environments.part_scorers import PartScorers
from asyncrl.environments.prompt_lengths import counted, longest_prompt_tokens
from asyncrl.environments.scores import Score
from asyncrl.errors import DataError
from asyncrl.generation.episodes import Episode, episode_rows, single_turn
from asyncrl.generation.interfaces import InferenceEngine, PartialCompletion, Sampled
from asyncrl.generation.long_work import beside_loop
from asyncrl.generation.reward_errors import components_of, failures_of, parts_of, rewards_of, total

if TYPE_CHECKING:
    from asyncrl.generation.agent_rollouts import AgentActivity, AgentRollouts


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedGroup:
    """A scored group: metadata for the buffer, rows for the data plane, and the seconds that scoring took. `failures`
    are those of completions whose reward failed. `activity` is what its agents did, if it has any."""

    meta: GroupMeta
    rows: BatchedDataDict
    scoring_s: float
    failures: tuple[Failure, ...] = ()
    activity: "AgentActivity | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldoutAnswer:
    """A completion of a held-out prompt with its reward, and the components of the reward, if it has any."""

    text: str
    reward: float
    components: Mapping[str, float]


class Rollouts:
    """Runs episodes on one engine: an answer to each prompt, or with `agents` conversations of several turns."""

    def __init__(
        self,
        *,
        config: Config,
        engine: InferenceEngine,
        tokenizer: Any,
        scorer: PartScorers,
        replica: str,
        agents: "AgentRollouts | None" = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self.engine = engine
        self.agents = agents
        self._tokenizer = tokenizer
        self._scorer = scorer
        self._replica = replica
        self._clock = clock

    def agents_of(self, task: Task) -> "AgentRollouts | None":
        """Returns what runs the agent of a task; None if the task has none."""
        return self.agents if self.agents is not None and self._scorer.runs_agent(task) else None

    async def run(
        self,
        ticket: Ticket,
        *,
        prefix: Sequence[PartialCompletion] = (),
        on_progress: Callable[[Sampled], None] | None = None,
        on_generated: Callable[[], None] = lambda: None,
        on_environment: Callable[[bool], None] = lambda waits: None,
    ) -> FinishedGroup:
        """Generates the whole group in one call, so that its samples share the prompt's KV cache, and scores it.

        Begins with the samples of `prefix`, if there are any. Calls `on_progress` from time to time with what the group
        has so far, and `on_generated` when the engine is done with it. An agent begins anew, and gets the answers of
        `prefix` for equal calls. With an agent, calls `on_environment` when the group begins and ends to wait for the
        agent's own code.
        """
        if (agents := self.agents_of(ticket.task)) is not None:
            played = await agents.run(
                ticket.task,
                samples=self._config.learner.group_size,
                seed=ticket.seed if self._config.seeds_samples else None,
                temperature=self._config.generator.temperature,
                prefix=prefix,
                on_progress=on_progress,
                on_environment=on_environment,
            )
            on_generated()
            group = await self._finished(ticket, played.episodes, played.scores, scoring_s=played.environment_s)
            meta = msgspec.structs.replace(group.meta, continued_tokens=played.continued_tokens)
            return dataclasses.replace(group, meta=meta, activity=played.activity)
        prompt_ids, budget = self._prompt(ticket.task)
        completions = await self.engine.generate(
            prompt_ids,
            n=self._config.learner.group_size,
            seed=ticket.seed if self._config.seeds_samples else None,
            temperature=self._config.generator.temperature,
            max_tokens=budget,
            prefix=prefix,
            on_progress=on_progress,
        )
        on_generated()
        top_k = self._config.generator.top_k
        episodes = [single_turn(prompt_ids, completion, top_k=top_k) for completion in completions]
        scored_from_s = self._clock()
        try:
            scores = await self._scorer.score(ticket.task, [episode.text for episode in episodes])
        except asyncio.CancelledError as cancelled:  # the generator cancels a rollout that takes too long
            environment = part_configs(self._config)[ticket.task.part].environment
            cancelled.add_note(
                f"its scoring had not finished after {self._clock() - scored_from_s:.1f} s. Raise "
                f"generator.rollout_timeout_s or environment.score_workers = {environment.score_workers}, or make the "
                f"reward faster: environment.score_timeout_s = {environment.score_timeout_s:g} s limits only one "
                "completion"
            )
            raise
        return await self._finished(ticket, episodes, scores, scoring_s=self._clock() - scored_from_s, prefix=prefix)

    async def _finished(
        self,
        ticket: Ticket,
        episodes: Sequence[Episode],
        scores: Sequence[Score],
        *,
        scoring_s: float,
        prefix: Sequence[PartialCompletion] = (),
    ) -> FinishedGroup:
        build = partial(
            finished_group,
            ticket,
            episodes=episodes,
            rewards=rewards_of(scores, config=self._config),
            components=components_of(scores),
            replica=self._replica,
            scoring_s=scoring_s,
            failures=failures_of(scores, prompt=ticket.task.prompt),
            prefix=prefix,
            branches=self._config.most_branches > 1,
        )
        return await beside_loop(build, tokens=sum(episode.tokens for episode in episodes))

    async def answers(self, task: Task, how: HeldoutSet, *, number: int) -> list[HeldoutAnswer]:
        """Generates the completions of a task of the held-out set `how`, which belong to no group. One completion is
        greedy. If samples have seeds of their own, those of the task follow from its `number` in the evaluation.

        Raises DataError if a reward fails.
        """
        samples = how.samples
        seeded = self._config.seeds_samples and samples > 1
        seed = seed_of_group(self._config.run.seed, number, group_size=samples) if seeded else None
        temperature = how.temperature if samples > 1 else 0.0
        if (agents := self.agents_of(task)) is not None:
            played = await agents.run(task, samples=samples, seed=seed, temperature=temperature)
            texts, scores = [episode.text for episode in played.episodes], played.scores
        else:
            prompt_ids, budget = self._prompt(task)
            completions = await self.engine.generate(
                prompt_ids, n=samples, seed=seed, temperature=temperature, max_tokens=budget
            )
            texts = [completion.text for completion in completions]
            scores = await self._scorer.score(task, texts)
        answers: list[HeldoutAnswer] = []
        for text, score in zip(texts, scores, strict=True):
            if isinstance(score, DataError):
                raise score
            answers.append(HeldoutAnswer(text=text, reward=total(score), components=parts_of(score)))
        return answers

    def _prompt(self, task: Task) -> tuple[list[int], int]:
        ids = encode_prompt(self._tokenizer, task.input)
        limit = longest_prompt_tokens(self._config)
        if not 0 < len(ids) <= limit:
            raise DataError(
                f"the prompt {task.prompt[:40]!r} has {counted(self._tokenizer, task, ids)}, but must have 1 to "
                f"{limit}; shorten the prompt or raise data.max_prompt_tokens or model.max_length",
                reason="prompt_length",
            )
        return ids, min(self._config.generator.max_completion_tokens, self._config.model.max_length - len(ids))


def finished_group(
    ticket: Ticket,
    *,
    episodes: Sequence[Episode],
    rewards: Sequence[float | None],
    components: Mapping[str, tuple[float | None, ...]] = {},
    replica: str,
    scoring_s: float,
    failures: tuple[Failure, ...] = (),
    prefix: Sequence[PartialCompletion] = (),
    branches: bool = False,
) -> FinishedGroup:
    """Builds the rows and the metadata of a scored group. The sampled tokens of its episodes begin with those of
    `prefix`, if there are any. `branches`: the rows have the column of branches."""
    spans = tuple(episode.version_spans for episode in episodes)
    steps = [span.step for of_episode in spans for span in of_episode]
    lengths = [episode.sampled_tokens for episode in episodes]
    prompt_tokens = min(episode.prompt_tokens for episode in episodes)  # those of agents may differ
    read = tuple(episode.tokens - prompt_tokens - episode.sampled_tokens for episode in episodes)
    rows = episode_rows(episodes, branches=branches)
    support_bytes = rows[SUPPORT].shape[2] * BYTES_PER_SUPPORT_TOKEN if SUPPORT in rows else 0
    branch_bytes = BYTES_PER_BRANCH_ID if BRANCH in rows else 0
    token_bytes = sum(episode.tokens for episode in episodes) * (BYTES_PER_TOKEN + support_bytes + branch_bytes)
    meta = GroupMeta(
        group=ticket.group,
        attempt=ticket.attempt,
        incarnation=ticket.version.incarnation,
        replica=replica,
        row_bytes=token_bytes + len(episodes) * BYTES_PER_ROW,
        prompt_tokens=prompt_tokens,
        completion_tokens=tuple(lengths),
        read_tokens=read if any(read) else (),
        rewards=tuple(rewards),
        components=dict(components),
        part=ticket.task.part,
        truncated=tuple(episode.truncated for episode in episodes),
        oldest=min(steps, default=ticket.version.step),
        newest=max(steps, default=ticket.version.step),
        mid_sequence_updates=sum(len({(s.incarnation, s.step) for s in of_one}) - 1 for of_one in spans if of_one),
        # A completion is shorter than its prefix if a stop string was found in the prefix.
        continued_tokens=sum(min(len(p.token_ids), n) for p, n in zip(prefix, lengths, strict=False)),
        version_spans=spans,
        row_checksums=tuple(row_checksums(rows)),
    )
    return FinishedGroup(meta=meta, rows=rows, scoring_s=scoring_s, failures=failures)
