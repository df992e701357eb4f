"""Runs one rollout: from a ticket's prompt to a scored group with its rows and its metadata.

Expected failures are raised as RolloutError. The generator counts every other error as a DATA failure, so that a bug
stops the run (after `generator.max_data_failures` without a committed group) instead of being retried forever.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import replace as with_changes
from functools import cached_property
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from asyncrl.algorithms.filters import is_equal_group, scored_samples
from asyncrl.buffer.groups import seed_of_group
from asyncrl.buffer.records import Failure, GroupMeta, Ticket
from asyncrl.config.parts import all_configs
from asyncrl.config.row_bytes import BYTES_PER_BRANCH_ID, BYTES_PER_ROW, BYTES_PER_TOKEN, BYTES_PER_WIDE_NUMBER
from asyncrl.config.schema import Config, HeldoutSet
from asyncrl.data.answer_text import AnswerText
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.prompts import Task
from asyncrl.data.row_checksums import prompt_checksum, row_checksums
from asyncrl.data.specs import BRANCH, WIDE_FIELDS
from asyncrl.data.tokenizer import encode_prompt
from asyncrl.data.turn_ends import generation_prompt
from asyncrl.environments.prompt_lengths import counted, longest_prompt_tokens
from asyncrl.environments.scoring import PartScorers
from asyncrl.errors import DataError
from asyncrl.generation.episodes import AgentActivity, Attempt, Played, episode_rows, single_turn
from asyncrl.generation.interfaces import InferenceEngine
from asyncrl.generation.long_work import beside_loop
from asyncrl.generation.reward_errors import (
    components_of,
    failures_of,
    failures_of_tools,
    parts_of,
    rewards_of,
    total,
)

if TYPE_CHECKING:
    from asyncrl.gateway.agent_rollouts import AgentRollouts


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedGroup:
    """A scored group: metadata for the buffer, rows for the data plane, and the seconds that scoring took. `failures`
    has the failures of single rewards and of tool calls. `activity` is what the group's agents did; None without
    agents."""

    meta: GroupMeta
    rows: BatchedDataDict
    scoring_s: float
    failures: tuple[Failure, ...]
    activity: AgentActivity | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerNumbers:
    """Numbers of a completion of a held-out prompt; of several completions, their means.

    `components` has the components of the reward, without their weights, if it has any. `completion_tokens` is the
    number of sampled tokens. `truncated` is 1 for a completion that was cut at its length limit, and 0 for another one.
    `turns` is the number of the agent's calls of the model; None without an agent.
    """

    components: Mapping[str, float]
    completion_tokens: float
    truncated: float
    turns: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldoutAnswer:
    """A completion of a held-out prompt with its reward and its other numbers.

    `non_greedy_tokens` is the number of its tokens that were not the most probable ones. It must be 0 for the only
    completion of a prompt, and is None for one of several."""

    text: str
    reward: float
    numbers: AnswerNumbers
    non_greedy_tokens: int | None


@dataclass(kw_only=True)
class Rollouts:
    """Runs episodes on one engine: an answer to each prompt, or with `agents` conversations of several turns."""

    config: Config
    engine: InferenceEngine
    tokenizer: Any
    scorer: PartScorers
    replica: str
    agents: "AgentRollouts | None" = None
    clock: Callable[[], float] = time.monotonic

    def agents_of(self, task: Task) -> "AgentRollouts | None":
        """Returns what runs the agent of a task; None if the task has none."""
        return self.agents if self.agents is not None and self.scorer.runs_agent(task) else None

    async def run(self, ticket: Ticket, attempt: Attempt) -> FinishedGroup:
        """Generates a ticket's whole group in one call of the engine, so that its samples share the prompt's KV cache,
        and scores it. With an agent, the agent's calls generate the samples."""
        played = await self._played(
            ticket.task,
            samples=self.config.learner.group_size,
            seed=ticket.seed if self.config.seeds_samples else None,
            temperature=self.config.generator.temperature,
            attempt=attempt,
        )
        return await beside_loop(
            lambda: finished_group(ticket, played, config=self.config, replica=self.replica),
            tokens=sum(episode.tokens for episode in played.episodes),
        )

    async def answers(self, task: Task, how: HeldoutSet, *, number: int) -> list[HeldoutAnswer]:
        """Generates and scores the completions of a task of a held-out set, as `how` says. They belong to no group. A
        single completion is greedy. If samples have seeds of their own (`generator.seeded`), those of the task follow
        from its `number` in the evaluation.

        Raises DataError if a reward fails, or if the prompt is too long.
        """
        samples = how.samples
        seeded = self.config.seeds_samples and samples > 1
        seed = seed_of_group(self.config.run.seed, number, group_size=samples) if seeded else None
        temperature = how.temperature if samples > 1 else 0.0
        attempt = Attempt(greedy=samples == 1)
        played = await self._played(task, samples=samples, seed=seed, temperature=temperature, attempt=attempt)
        turns = [None] * samples if played.activity is None else played.activity["turns"]
        answers: list[HeldoutAnswer] = []
        for episode, score, of_agent in zip(played.episodes, played.scores, turns, strict=True):
            if isinstance(score, DataError):
                raise score
            answers.append(
                HeldoutAnswer(
                    text=episode.text,
                    reward=total(score),
                    numbers=AnswerNumbers(
                        components=parts_of(score),
                        completion_tokens=episode.sampled_tokens,
                        truncated=float(episode.truncated),
                        turns=of_agent,
                    ),
                    non_greedy_tokens=played.non_greedy_tokens,
                )
            )
        return answers

    async def _played(
        self, task: Task, *, samples: int, seed: int | None, temperature: float, attempt: Attempt
    ) -> Played:
        """Generates `samples` episodes of a task, by one call of the engine or by the task's agent, and scores them."""
        task = replace(task, generation_prompt=self._generation_prompt)
        if (agents := self.agents_of(task)) is not None:
            return await agents.run(task, samples=samples, seed=seed, temperature=temperature, attempt=attempt)
        prompt_ids, budget = self._prompt(task)
        completions = await self.engine.generate(
            prompt_ids,
            n=samples,
            seed=seed,
            temperature=temperature,
            max_tokens=budget,
            prefix=attempt.prefix,
            on_progress=attempt.on_progress,
            count_non_greedy=attempt.greedy,
        )
        attempt.on_generated()
        widths = self.config.widths if temperature > 0 else {}
        environment = all_configs(self.config)[task.part].environment
        if environment.special_tokens == "keep":
            completions = [
                with_changes(each, text=self._answer_text(each.token_ids, special_tokens="keep"))
                for each in completions
            ]
        episodes = [single_turn(prompt_ids, completion, widths=widths) for completion in completions]
        scored_from_s = self.clock()
        try:
            scores = await self.scorer.score(task, [episode.text for episode in episodes])
        except asyncio.CancelledError as cancelled:  # the generator cancels a rollout that takes too long
            cancelled.add_note(
                f"its scoring had not finished after {self.clock() - scored_from_s:.1f} s. Raise "
                f"generator.rollout_timeout_s or environment.score_workers = {environment.score_workers}, or make the "
                f"reward faster: environment.score_timeout_s = {environment.score_timeout_s:g} s limits only one "
                "completion"
            )
            raise
        # A completion is shorter than its prefix if a stop string was found in the prefix.
        begun = [len(sample.token_ids) for sample in attempt.prefix] or [0] * samples
        continued = [min(tokens, episode.sampled_tokens) for tokens, episode in zip(begun, episodes, strict=True)]
        return Played(
            episodes=episodes,
            scores=scores,
            environment_s=self.clock() - scored_from_s,
            continued_tokens=sum(continued),
            non_greedy_tokens=sum(each.non_greedy_tokens or 0 for each in completions) if attempt.greedy else None,
        )

    @cached_property
    def _answer_text(self) -> AnswerText:
        return AnswerText(self.tokenizer, stops=self.config.generator.stop)

    @cached_property
    def _generation_prompt(self) -> str:
        return generation_prompt(self.tokenizer)

    def _prompt(self, task: Task) -> tuple[list[int], int]:
        ids = encode_prompt(self.tokenizer, task.input)
        limit = longest_prompt_tokens(self.config)
        if not 0 < len(ids) <= limit:
            raise DataError(
                f"the prompt {task.prompt[:40]!r} has {counted(self.tokenizer, task, ids)}, but must have 1 to "
                f"{limit}; shorten the prompt or raise data.max_prompt_tokens or model.max_length",
                reason="prompt_length",
            )
        return ids, min(self.config.generator.max_completion_tokens, self.config.model.max_length - len(ids))


def finished_group(ticket: Ticket, played: Played, *, config: Config, replica: str) -> FinishedGroup:
    """Builds the rows and the metadata of a scored group. Raises DataError if a reward failed and
    `environment.on_error` is `fail`, or if too few completions have a reward."""
    episodes, scores = played.episodes, played.scores
    rewards = rewards_of(scores, config=config)
    spans = tuple(episode.version_spans for episode in episodes)
    steps = [span.step for of_episode in spans for span in of_episode]
    prompt_tokens = min(episode.prompt_tokens for episode in episodes)  # agents may begin with different prompts
    read = tuple(episode.tokens - prompt_tokens - episode.sampled_tokens for episode in episodes)
    rows = episode_rows(episodes, branches=config.most_branches > 1)
    wide_bytes = sum(rows[name].shape[2] for name in WIDE_FIELDS if name in rows) * BYTES_PER_WIDE_NUMBER
    branch_bytes = BYTES_PER_BRANCH_ID if BRANCH in rows else 0
    token_bytes = sum(episode.tokens for episode in episodes) * (BYTES_PER_TOKEN + wide_bytes + branch_bytes)
    activity = played.activity
    meta = GroupMeta(
        group=ticket.group,
        attempt=ticket.attempt,
        incarnation=ticket.version.incarnation,
        replica=replica,
        row_bytes=token_bytes + len(episodes) * BYTES_PER_ROW,
        prompt_tokens=prompt_tokens,
        completion_tokens=tuple(episode.sampled_tokens for episode in episodes),
        read_tokens=read if any(read) else (),
        rewards=rewards,
        components=components_of(scores),
        part=ticket.task.part,
        truncated=tuple(episode.truncated for episode in episodes),
        oldest=min(steps, default=ticket.version.step),
        newest=max(steps, default=ticket.version.step),
        mid_sequence_updates=sum(len({(s.incarnation, s.step) for s in of_one}) - 1 for of_one in spans if of_one),
        continued_tokens=played.continued_tokens,
        version_spans=spans,
        row_checksums=tuple(row_checksums(rows)),
        prompt=prompt_checksum(ticket.task.input),
        turns=tuple(activity["turns"]) if activity else (),
        tool_calls=activity["tool_calls"] if activity else 0,
        failed_tool_calls=len(played.tool_failures),
    )
    if config.algorithm.zero_variance == "resample":
        meta = replace(meta, equal=_has_equal_rewards(meta, config))
    return FinishedGroup(
        meta=meta,
        rows=rows,
        scoring_s=played.environment_s,
        failures=(
            *failures_of(scores, prompt=ticket.task.prompt),
            *failures_of_tools(played.tool_failures, prompt=ticket.task.prompt),
        ),
        activity=activity,
    )


def _has_equal_rewards(meta: GroupMeta, config: Config) -> bool:
    scored = scored_samples(
        meta.rewards,
        group_ids=[meta.group] * len(meta.rewards),
        completion_tokens=meta.completion_tokens,
        truncated=meta.truncated,
        components=meta.components,
        config=config,
    )
    return is_equal_group(scored, config=config)
