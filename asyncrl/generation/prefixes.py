"""Partial generations of a group: the rows in which they are stored, and the seeds of samples.

While a replica generates a group, it stores all tokens so far from time to time (`generator.persist_every_tokens`). If
the replica dies, the ticket of the group's next attempt names the stored tokens. The replica with this ticket reads
them, prefills the prompt followed by them, and samples the rest. The stored tokens keep their log-probs and versions.

Only completion tokens are stored, because the prompt is in the ticket. A finished sample is stored whole.
"""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import chain

import torch
from torch.nn.utils.rnn import pad_sequence

from asyncrl.buffer.records import Prefix, Ticket
from asyncrl.common.version import Version
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.specs import WIDE_FIELDS
from asyncrl.data_plane.codec import PAD_VALUES
from asyncrl.data_plane.rows import Rows
from asyncrl.errors import AsyncRLError, InfraError
from asyncrl.generation.interfaces import PartialCompletion, Sampled, concatenated
from asyncrl.generation.long_work import beside_loop

logger = logging.getLogger(__name__)

PREFIX_COLUMNS = (
    "input_ids",
    "input_lengths",
    "generation_logprobs",
    "weight_versions",
    "weight_incarnations",
    "sample_state",
)
"""Columns of stored partial generations: per token its id, log-prob, and version (step and incarnation); per sample the
number of its tokens, and its state: 0 not finished, 1 finished, 2 finished at the length limit. The columns of
`Config.widths` are stored too."""
TURN_COLUMNS = ("turn_calls", "turn_ends")
"""Further columns of the samples of agents, per token: the id of the call that the token answers, and at the last token
of an answer the state of the answer (1 not finished, 2 finished, 3 finished at the length limit); 0 at others."""
_RUNS, _FINISHED, _TRUNCATED = range(3)


def seed_of(seed: int, child: int, tokens: int) -> int:
    """Returns the seed with which child `child` of a group continues after `tokens` tokens.

    Without tokens it is the seed of a group that starts: `seed` + child. Otherwise it is a hash, so that the draws
    after a prefix are independent of those that sampled the prefix.

    >>> seed_of(8, 1, 0)
    9
    >>> seed_of(8, 1, 5) != seed_of(8, 1, 6)
    True
    """
    if not tokens:
        return seed + child
    return hash_of(f"{seed},{child},{tokens}")


def hash_of(text: str) -> int:
    """Returns a hash of the text as a number of 63 bits, which fits into an int64 column. It is the same in every
    process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def engine_seed(seed: int, name: str) -> int:
    """Returns the seed (32 bits) from which an engine samples requests that have no seed of their own: a hash of
    `run.seed` and the engine's name."""
    return int.from_bytes(hashlib.blake2b(f"{seed},{name}".encode(), digest_size=4).digest(), "big")


def rows_of(samples: Sequence[PartialCompletion]) -> BatchedDataDict:
    """Returns the rows that store the samples: columns of shape [G] and [G, S], and if the samples have columns with
    several numbers for each token, also these columns, of shape [G, S, K]."""

    def column(of_samples: Iterable[Sequence[float]], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return pad_sequence([torch.tensor(of_tokens, dtype=dtype) for of_tokens in of_samples], batch_first=True)

    rows = BatchedDataDict(
        input_ids=column(sample.token_ids for sample in samples),
        input_lengths=torch.tensor([len(sample.token_ids) for sample in samples]),
        generation_logprobs=column((sample.logprobs for sample in samples), torch.float32),
        weight_versions=column([version.step for version in sample.versions] for sample in samples),
        weight_incarnations=column([version.incarnation for version in sample.versions] for sample in samples),
        sample_state=torch.tensor([_state(sample) for sample in samples]),
    )
    for name in dict.fromkeys(name for sample in samples for name in sample.wide):
        no_token = next(sample.wide[name][:0] for sample in samples if name in sample.wide)
        of_samples = [torch.from_numpy(sample.wide.get(name, no_token)) for sample in samples]
        rows[name] = pad_sequence(of_samples, batch_first=True, padding_value=PAD_VALUES.get(name, 0))
    if any(sample.calls for sample in samples):
        calls, ends = TURN_COLUMNS
        rows[calls] = column(sample.calls for sample in samples)
        rows[ends] = column((sample.ends for sample in samples), torch.int8)
    return rows


def samples_of_rows(rows: BatchedDataDict, *, prefix: Prefix) -> list[PartialCompletion]:
    """Returns the stored samples, each cut before its first token of a version that `prefix` does not name.

    The rows may be newer than `prefix`, if their replica stored them and died before it reported this. The buffer has
    admitted only the reported versions. Raises InfraError if no token is left.
    """
    allowed = set(prefix.versions)
    samples: list[PartialCompletion] = []
    for i, length in enumerate(rows["input_lengths"].tolist()):
        steps, incarnations = rows["weight_versions"][i, :length], rows["weight_incarnations"][i, :length]
        pairs = zip(incarnations.tolist(), steps.tolist(), strict=True)
        versions = [Version(incarnation, step) for incarnation, step in pairs]
        kept = next((place for place, version in enumerate(versions) if version not in allowed), length)
        state = int(rows["sample_state"][i]) if kept == length else _RUNS
        calls, ends = (rows[name][i, :kept].tolist() if name in rows else [] for name in TURN_COLUMNS)
        samples.append(
            PartialCompletion(
                token_ids=rows["input_ids"][i, :kept].tolist(),
                logprobs=rows["generation_logprobs"][i, :kept].tolist(),
                versions=versions[:kept],
                finished=state != _RUNS,
                truncated=state == _TRUNCATED,
                wide={name: rows[name][i, :kept].numpy() for name in WIDE_FIELDS if name in rows},
                calls=calls,
                ends=ends,
            )
        )
    if not any(sample.token_ids for sample in samples):
        raise InfraError(f"the stored rows have no token of the versions {prefix.versions}", reason="prefix")
    return samples


def prefix_of(
    samples: Sequence[PartialCompletion], *, attempt: int, continued: Sequence[PartialCompletion] = ()
) -> Prefix:
    """Returns the record of stored samples for the buffer. The attempt `attempt` stored them, and began with
    `continued`, the samples of an earlier attempt."""
    return Prefix(
        attempt=attempt,
        tokens=sum(len(sample.token_ids) for sample in samples),
        versions=tuple(sorted({version for sample in samples for version in sample.versions})),
        continued_tokens=sum(len(sample.token_ids) for sample in continued),
    )


def joined(turns: Sequence[tuple[int, PartialCompletion]]) -> PartialCompletion:
    """Returns the answers of one agent's sample, one after the other, as one PartialCompletion. `turns` has a pair for
    each answer: the id of the call that it answers, and the answer. Each answer has at least one token."""
    answers = [answer for _, answer in turns]
    return PartialCompletion(
        token_ids=list(chain.from_iterable(answer.token_ids for answer in answers)),
        logprobs=list(chain.from_iterable(answer.logprobs for answer in answers)),
        versions=list(chain.from_iterable(answer.versions for answer in answers)),
        wide=concatenated(answer.wide for answer in answers),
        calls=[call for call, answer in turns for _ in answer.token_ids],
        ends=[end for answer in answers for end in (*[0] * (len(answer.token_ids) - 1), _state(answer) + 1)],
    )


def turns_of(sample: PartialCompletion) -> list[tuple[int, PartialCompletion]]:
    """Returns the answers of a sample with their calls: the inverse of `joined`. The last answer is not finished if the
    sample ends within it."""
    turns: list[tuple[int, PartialCompletion]] = []
    start = 0
    for place, end in enumerate(sample.ends, start=1):
        if end or place == len(sample.ends):
            finished, truncated = end - 1 > _RUNS, end - 1 == _TRUNCATED
            turns.append((sample.calls[start], sample.part(start, place, finished=finished, truncated=truncated)))
            start = place
    return turns


def _state(sample: PartialCompletion) -> int:
    if not sample.finished:
        return _RUNS
    return _TRUNCATED if sample.truncated else _FINISHED


# Stores what the rollouts of a replica have sampled so far, and reads what an earlier attempt has stored.
#
# Storing never fails a rollout. If a group cannot be stored, its generation goes on. A later attempt would then
# continue from the tokens that were stored before, or begin again. Invariant: stored tokens were sampled by verified
# weights, because a put waits for the probe of the last weight update.


class PrefixKeeper:
    """Stores a group when one of its samples has grown by `every_tokens` tokens since it was stored last, and no put of
    the group runs. With 0, it stores nothing. `wide` names the columns with several numbers for each token that the
    samples have (`Config.widths`).

    `verified` waits until the last weight update is verified. `stored` is called after each successful put, with the
    key of the ticket and the stored prefix.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        every_tokens: int,
        wide: Sequence[str] = (),
        verified: Callable[[], Awaitable[None]],
        stored: Callable[[str, Prefix], None],
    ) -> None:
        self._rows = rows
        self._every_tokens = every_tokens
        self._columns = (*PREFIX_COLUMNS, *wide)
        self._verified = verified
        self._stored = stored
        self._lengths: dict[str, Sequence[int]] = {}  # tokens of each sample at the last put of a group
        self._puts: dict[str, asyncio.Task[None]] = {}

    async def read(self, ticket: Ticket, *, turns: bool = False) -> list[PartialCompletion]:
        """Returns the samples with which the ticket's attempt begins; an empty list if none are stored, or if they
        cannot be read. With `turns`, for tasks with an agent, also reads `TURN_COLUMNS`."""
        prefix = ticket.prefix
        if prefix is None:
            return []
        columns = (*self._columns, *(TURN_COLUMNS if turns else ()))
        try:
            rows = await self._rows.get(f"{ticket.group}.{prefix.attempt}", columns)
            return samples_of_rows(rows, prefix=prefix)
        except (AsyncRLError, TimeoutError, KeyError) as error:
            logger.warning(
                "group %s begins again, because %d stored tokens of attempt %d cannot be read: %s",
                ticket.key,
                prefix.tokens,
                prefix.attempt,
                error,
            )
            return []

    def sampled(self, ticket: Ticket, sampled: Sampled, *, continued: Sequence[PartialCompletion]) -> None:
        """Stores the tokens of the group in the background.

        Does nothing while an earlier call still stores this group, if no sample has grown by
        `generator.persist_every_tokens` tokens since the last time, or if `sampled.partial` returns None. `continued`
        has the partial completions with which the attempt began.
        """
        if not self._every_tokens or ticket.key in self._puts:
            return
        before = self._lengths.get(ticket.key) or [len(sample.token_ids) for sample in continued]
        grown = [now - then for now, then in zip(sampled.lengths, before or [0] * len(sampled.lengths), strict=True)]
        if max(grown) < self._every_tokens or (samples := sampled.partial()) is None:
            return
        self._lengths[ticket.key] = [len(sample.token_ids) for sample in samples]
        put = asyncio.create_task(self._put(ticket, samples, continued), name=f"store {ticket.key}")
        self._puts[ticket.key] = put
        put.add_done_callback(lambda _: self._puts.pop(ticket.key, None))

    def ended(self, key: str) -> None:
        """Forgets a group whose rollout has ended, and cancels its put if one runs."""
        self._lengths.pop(key, None)
        if put := self._puts.get(key):
            put.cancel()

    async def _put(
        self, ticket: Ticket, samples: Sequence[PartialCompletion], continued: Sequence[PartialCompletion]
    ) -> None:
        def built() -> tuple[BatchedDataDict, Prefix]:
            return rows_of(samples), prefix_of(samples, attempt=ticket.attempt, continued=continued)

        await self._verified()
        try:
            rows, prefix = await beside_loop(built, tokens=sum(len(sample.token_ids) for sample in samples))
            await self._rows.put({ticket.key: rows})
        except Exception as error:
            logger.warning(
                "the tokens so far of group %s were not stored, and a later attempt may begin again: %s",
                ticket.key,
                error,
            )
            return
        self._stored(ticket.key, prefix)
