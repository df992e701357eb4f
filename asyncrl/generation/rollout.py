"""Runs one rollout: from a ticket's prompt to a scored group with its rows and its metadata.

Expected failures are raised as RolloutError. The generator counts every other error as a DATA failure, so that a bug
stops the run (after `generator.max_data_failures` in a row) instead of being retried forever.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asyncrl.buffer.failure_records import Failure
from asyncrl.buffer.records import GroupMeta, Ticket, VersionSpan
from asyncrl.common.version import Version
from asyncrl.config.checks import BYTES_PER_ROW, BYTES_PER_TOKEN
from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.prompts import Task
from asyncrl.data.row_checksums import row_checksums
from asyncrl.data.specs import NO_VERSION
from asyncrl.data.tokenizer import encode_prompt
from asyncrl.environments.prompt_lengths import counted, longest_prompt_tokens
from asyncrl.environments.scoring import Scorer
from asyncrl.errors import DataError, HandshakeError
from asyncrl.generation.interfaces import Completion, InferenceEngine, PartialCompletion, Sampled
from asyncrl.generation.long_work import beside_loop
from asyncrl.generation.reward_errors import components_of, failures_of, rewards_of, total

GENERATED_FIELDS = ("input_ids", "input_lengths", "generation_logprobs", "weight_versions", "token_mask")
"""Columns of a finished group's rows. Later columns of the same samples are stored under the same keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedGroup:
    """A scored group: metadata for the buffer, rows for the data plane, and the seconds that scoring took. `failures`
    are those of completions whose reward failed."""

    meta: GroupMeta
    rows: BatchedDataDict
    scoring_s: float
    failures: tuple[Failure, ...] = ()


class Rollouts:
    """Runs single-turn episodes on one engine."""

    def __init__(
        self,
        *,
        config: Config,
        engine: InferenceEngine,
        tokenizer: Any,
        scorer: Scorer,
        replica: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self.engine = engine
        self._tokenizer = tokenizer
        self._scorer = scorer
        self._replica = replica
        self._clock = clock

    async def run(
        self,
        ticket: Ticket,
        *,
        prefix: Sequence[PartialCompletion] = (),
        on_progress: Callable[[Sampled], None] | None = None,
        on_generated: Callable[[], None] = lambda: None,
    ) -> FinishedGroup:
        """Generates the whole group in one call, so that its samples share the prompt's KV cache, and scores it.

        Begins with the samples of `prefix`, if there are any. Calls `on_progress` from time to time with what the group
        has so far, and `on_generated` when the engine is done with it.
        """
        prompt_ids, budget = self._prompt(ticket.task)
        group_size = self._config.learner.group_size
        completions = await self.engine.generate(
            prompt_ids,
            n=group_size,
            seed=ticket.seed if self._config.seeds_samples else None,
            temperature=self._config.generator.temperature,
            max_tokens=budget,
            prefix=prefix,
            on_progress=on_progress,
        )
        on_generated()
        for completion in completions:
            check_completion(completion)
        scored_from_s = self._clock()
        try:
            scores = await self._scorer.score(ticket.task, [completion.text for completion in completions])
        except asyncio.CancelledError as cancelled:  # the generator cancels a rollout that takes too long
            environment = self._config.environment
            cancelled.add_note(
                f"its scoring had not finished after {self._clock() - scored_from_s:.1f} s. Raise "
                f"generator.rollout_timeout_s or environment.score_workers = {environment.score_workers}, or make the "
                f"reward faster: environment.score_timeout_s = {environment.score_timeout_s:g} s limits only one "
                "completion"
            )
            raise
        scoring_s = self._clock() - scored_from_s
        build = partial(
            finished_group,
            ticket,
            prompt_ids=prompt_ids,
            completions=completions,
            rewards=rewards_of(scores, config=self._config),
            components=components_of(scores),
            replica=self._replica,
            scoring_s=scoring_s,
            failures=failures_of(scores, prompt=ticket.task.prompt),
            prefix=prefix,
        )
        return await beside_loop(build, tokens=sum(len(completion.token_ids) for completion in completions))

    async def answers(self, task: Task) -> tuple[float, ...]:
        """Generates the `eval.samples` completions of a held-out task, which belong to no group, and returns their
        rewards. One completion is greedy. Raises DataError if a reward fails."""
        prompt_ids, budget = self._prompt(task)
        samples, temperature = self._config.eval.samples, self._config.eval.temperature
        completions = await self.engine.generate(
            prompt_ids,
            n=samples,
            seed=None,
            temperature=temperature if samples > 1 else 0.0,
            max_tokens=budget,
        )
        scores = await self._scorer.score(task, [completion.text for completion in completions])
        for score in scores:
            if isinstance(score, DataError):
                raise score
        return tuple(total(score) for score in scores if not isinstance(score, DataError))

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


def check_completion(completion: Completion) -> None:
    """Raises HandshakeError unless every token has one log-prob and one version (F25)."""
    tokens = len(completion.token_ids)
    if len(completion.logprobs) != tokens or len(completion.versions) != tokens:
        raise HandshakeError(
            f"the engine returned {tokens} tokens, but {len(completion.logprobs)} log-probs and "
            f"{len(completion.versions)} versions; every token needs one log-prob and one version"
        )


def finished_group(
    ticket: Ticket,
    *,
    prompt_ids: Sequence[int],
    completions: Sequence[Completion],
    rewards: Sequence[float | None],
    components: Mapping[str, tuple[float | None, ...]] = {},
    replica: str,
    scoring_s: float,
    failures: tuple[Failure, ...] = (),
    prefix: Sequence[PartialCompletion] = (),
) -> FinishedGroup:
    """Builds the rows and the metadata of a scored group. Its completions begin with those of `prefix`, if there are
    any."""
    spans = tuple(version_spans(completion.versions) for completion in completions)
    steps = [span.step for of_completion in spans for span in of_completion]
    lengths = [len(c.token_ids) for c in completions]
    rows = sample_rows(prompt_ids, completions)
    meta = GroupMeta(
        group=ticket.group,
        attempt=ticket.attempt,
        incarnation=ticket.version.incarnation,
        replica=replica,
        row_bytes=sum(len(prompt_ids) + tokens for tokens in lengths) * BYTES_PER_TOKEN + len(lengths) * BYTES_PER_ROW,
        prompt_tokens=len(prompt_ids),
        completion_tokens=tuple(lengths),
        rewards=tuple(rewards),
        components=dict(components),
        truncated=tuple(c.truncated for c in completions),
        oldest=min(steps, default=ticket.version.step),
        newest=max(steps, default=ticket.version.step),
        mid_sequence_updates=sum(len({(s.incarnation, s.step) for s in of_one}) - 1 for of_one in spans if of_one),
        # A completion is shorter than its prefix if a stop string was found in the prefix.
        continued_tokens=sum(min(len(p.token_ids), n) for p, n in zip(prefix, lengths, strict=False)),
        version_spans=spans,
        row_checksums=tuple(row_checksums(rows)),
    )
    return FinishedGroup(meta=meta, rows=rows, scoring_s=scoring_s, failures=failures)


def version_spans(versions: Sequence[Version]) -> tuple[VersionSpan, ...]:
    """Returns the runs of equal versions of a completion's tokens.

    >>> version_spans([Version(1, 2), Version(1, 2), Version(1, 3)])
    (VersionSpan(incarnation=1, step=2, tokens=2), VersionSpan(incarnation=1, step=3, tokens=1))
    """
    runs = ((version, len([*tokens])) for version, tokens in groupby(versions))
    return tuple(VersionSpan(version.incarnation, version.step, tokens) for version, tokens in runs)


def sample_rows(prompt_ids: Sequence[int], completions: Sequence[Completion]) -> BatchedDataDict:
    """Returns rows of shape [G, S]: the prompt followed by each of its G completions.

    Prompt and padding tokens have log-prob 0, version NO_VERSION and mask 0, because the engine did not sample them.
    """
    start, lengths = len(prompt_ids), np.array([len(c.token_ids) for c in completions], dtype=np.int64)
    shape = (len(completions), start + int(lengths.max(initial=0)))
    positions_S = np.arange(shape[1])
    # A mask takes the tokens of all rows one after another, so that each column is written at once.
    sampled_GS = (positions_S >= start) & (positions_S < start + lengths[:, None])

    def column(fill: float, sampled: npt.NDArray[Any], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        column_GS = np.full(shape, fill, dtype=dtype)
        column_GS[sampled_GS] = sampled
        return column_GS

    input_ids_GS = column(0, _flat([c.token_ids for c in completions], np.int64), np.int64)
    input_ids_GS[:, :start] = prompt_ids
    spans = [span for c in completions for span in version_spans(c.versions)]
    steps = np.repeat(*np.array([(span.step, span.tokens) for span in spans], dtype=np.int64).reshape(-1, 2).T)
    versions_GS = column(NO_VERSION, steps, np.int64)
    logprobs_GS = column(0, _flat([c.logprobs for c in completions], np.float32), np.float32)
    return BatchedDataDict(
        input_ids=torch.from_numpy(input_ids_GS),
        weight_versions=torch.from_numpy(versions_GS),
        generation_logprobs=torch.from_numpy(logprobs_GS),
        token_mask=torch.from_numpy(sampled_GS.astype(np.float32)),
        input_lengths=torch.from_numpy(start + lengths),
    )


def _flat(rows: Sequence[Sequence[float]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Returns all numbers of the rows. Each row is converted by itself, so that other threads run in between."""
    return np.concatenate([np.array(row, dtype=dtype) for row in rows]) if rows else np.empty(0, dtype=dtype)
