"""One rollout: from a ticket's prompt to a scored group, its rows and its metadata.

Every failure leaves as a RolloutError; what is not recognised is DATA, so that bugs are loud.
"""

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from asyncrl.buffer.records import GroupMeta, Ticket
from asyncrl.config.schema import Config
from asyncrl.data.prompts import Task
from asyncrl.data.tokenizer import encode_prompt
from asyncrl.data_plane.row_store import Rows, row_bytes
from asyncrl.environments.prompt_lengths import longest_prompt_tokens
from asyncrl.errors import DataError, HandshakeError
from asyncrl.generation.interfaces import Completion, InferenceEngine


class GroupScorer(Protocol):
    """Rewards of completions of one task."""

    def score(self, task: Task, completions: Sequence[str]) -> Awaitable[list[float]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedGroup:
    """A scored group: rows for the row store, metadata for the buffer."""

    meta: GroupMeta
    rows: Rows


class Rollouts:
    """Single-turn episodes on one engine."""

    def __init__(
        self, *, config: Config, engine: InferenceEngine, tokenizer: Any, scorer: GroupScorer, replica: str, store: str
    ) -> None:
        self._config = config
        self._engine = engine
        self._tokenizer = tokenizer
        self._scorer = scorer
        self._replica = replica
        self._store = store

    async def run(self, ticket: Ticket) -> FinishedGroup:
        """One `generate` call for the whole group, so that it shares its prompt's KV cache, then the scores."""
        prompt_ids, budget = self._prompt(ticket.task)
        group_size = self._config.learner.group_size
        completions = await self._engine.generate(
            prompt_ids,
            n=group_size,
            seed=ticket.seed,
            temperature=self._config.generator.temperature,
            max_tokens=budget,
        )
        for completion in completions:
            check_completion(completion)
        rewards = await self._scorer.score(ticket.task, [completion.text for completion in completions])
        return finished_group(
            ticket,
            prompt_ids=prompt_ids,
            completions=completions,
            rewards=rewards,
            replica=self._replica,
            store=self._store,
        )

    async def answer(self, task: Task) -> tuple[float, Completion]:
        """The reward of one greedy completion, outside any group."""
        prompt_ids, budget = self._prompt(task)
        [completion] = await self._engine.generate(prompt_ids, n=1, seed=None, temperature=0.0, max_tokens=budget)
        [reward] = await self._scorer.score(task, [completion.text])
        return reward, completion

    def _prompt(self, task: Task) -> tuple[list[int], int]:
        ids = encode_prompt(self._tokenizer, task.prompt)
        limit = longest_prompt_tokens(self._config)
        if not 0 < len(ids) <= limit:
            raise DataError(
                f"the prompt {task.prompt[:40]!r} has {len(ids)} tokens; 1 to {limit} fit (data.max_prompt_tokens, "
                "model.max_length)",
                reason="prompt_length",
            )
        return ids, min(self._config.generator.max_completion_tokens, self._config.model.max_length - len(ids))


def check_completion(completion: Completion) -> None:
    """One log-prob and one version a token, or the pools do not fit together (F25)."""
    tokens = len(completion.token_ids)
    if len(completion.logprobs) != tokens or len(completion.versions) != tokens:
        raise HandshakeError(
            f"the engine returned {tokens} tokens with {len(completion.logprobs)} log-probs and "
            f"{len(completion.versions)} versions"
        )


def finished_group(
    ticket: Ticket,
    *,
    prompt_ids: Sequence[int],
    completions: Sequence[Completion],
    rewards: Sequence[float],
    replica: str,
    store: str,
) -> FinishedGroup:
    """Rows and metadata of a group. Columns are flat over the group's samples; `output_lengths` cuts them."""
    steps = [version.step for completion in completions for version in completion.versions]
    rows: Rows = {
        "prompt_ids": np.asarray(prompt_ids, dtype=np.int32),
        "output_ids": np.asarray([token for c in completions for token in c.token_ids], dtype=np.int32),
        "output_lengths": np.asarray([len(c.token_ids) for c in completions], dtype=np.int32),
        "logprobs": np.asarray([logprob for c in completions for logprob in c.logprobs], dtype=np.float32),
        "weight_versions": np.asarray(steps, dtype=np.int64),
        "truncated": np.asarray([c.truncated for c in completions], dtype=np.bool_),
    }
    meta = GroupMeta(
        group=ticket.group,
        attempt=ticket.attempt,
        incarnation=ticket.version.incarnation,
        replica=replica,
        store=store,
        row_bytes=row_bytes(rows),
        prompt_tokens=len(prompt_ids),
        completion_tokens=tuple(len(c.token_ids) for c in completions),
        rewards=tuple(float(reward) for reward in rewards),
        truncated=tuple(c.truncated for c in completions),
        oldest=min(steps, default=ticket.version.step),
        newest=max(steps, default=ticket.version.step),
        mid_sequence_updates=sum(len(set(c.versions)) - 1 for c in completions if c.versions),
    )
    return FinishedGroup(meta=meta, rows=rows)
