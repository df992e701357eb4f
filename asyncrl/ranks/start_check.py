"""The check at the start of the ranks: rows that share a pass must have the log-probs that each of them has alone.

"Alone" is a pass without padding, with transformers' own attention (eager). So the check finds layers that mix the
tokens of rows (recurrences, convolutions, attention that does not use `asyncrl.ranks.packed`), and attention with
arguments that packed rows or sdpa ignore. It cannot find attention windows and chunks that are longer than its rows;
`asyncrl.policy.families` refuses rows beyond them.

It runs once, after the model is sharded. It leaves gradients and random generators as they are.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.errors import ConfigError
from asyncrl.ranks.accelerator import compute_dtype
from asyncrl.ranks.batching import token_batch
from asyncrl.ranks.gather import reshard
from asyncrl.ranks.model_rows import ModelRows
from asyncrl.weights.parity import Differences, ParityJudge, ParityLimits

LONGEST, SHORTER, SHARED = 24, 17, 8
"""Numbers of tokens: of the first row, of each of the two other rows, and of the prefix that these two share."""


def check_start(
    score: Callable[[ModelRows], torch.Tensor],
    *,
    sharded: torch.nn.Module,
    model: PreTrainedModel,
    config: Config,
    vocabulary: int,
    device: torch.device,
) -> None:
    """Compares the scores of three random rows that share passes, as `learner.batching` says, with those of each row
    alone. A collective.

    `score` returns [B, S], one number of nats for each token: its log-prob, or for a critic a number made from its
    hidden state. Entry 0 of a row is not compared. `model` is the part of the `sharded` model that transformers has
    made. Raises ConfigError if the numbers differ by more than `weights.parity_*` accept in the precision of the
    passes.
    """
    rows, packed = _rows(vocabulary, longest=config.model.max_length), config.learner.batching == "packed"

    def scored(part: BatchedDataDict, *, packed: bool) -> torch.Tensor:
        return score(ModelRows.of(part.to(device), packed=packed)).float().cpu()

    with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        together_BS = scored(token_batch(rows), packed=packed)
        with _eager(model):
            alone = [scored(token_batch([row]), packed=False)[0] for row in rows]
    reshard(sharded)
    limits = replace(ParityLimits.of(config), exact=compute_dtype(config) == torch.float32)
    found = [
        (one_S[1 : len(row)] - other_S[1 : len(row)]).abs()
        for row, one_S, other_S in zip(rows, together_BS, alone, strict=True)
    ]
    verdict = ParityJudge(limits).judge(Differences.of(torch.cat(found).tolist()))
    if verdict.ratio > 1.0:
        batching, family = config.learner.batching, model.config.model_type
        other = "set learner.batching to dynamic, which pads rows" if packed else "choose another model"
        raise ConfigError(
            f"learner.batching = {batching}: for models of the family {family}, rows that share a pass do not have "
            f"the log-probs that each of them has alone: {verdict.words}; {other}. If the difference is "
            "only rounding, raise that limit"
        )


@contextmanager
def _eager(model: PreTrainedModel) -> Iterator[None]:
    """Lets the model compute in this block with transformers' eager attention."""
    usual = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(usual)


def _rows(vocabulary: int, *, longest: int) -> list[list[int]]:
    """Returns three rows of random tokens, which are equal in all processes. The last two begin with the same tokens.
    No row has more than `longest` tokens (`model.max_length`)."""
    draw = torch.Generator().manual_seed(0)
    lengths = [min(length, longest) for length in (LONGEST, SHORTER, SHORTER)]
    first, leader, other = (torch.randint(vocabulary, (length,), generator=draw).tolist() for length in lengths)
    shared = min(SHARED, lengths[2] - 1)
    other[:shared] = leader[:shared]
    other[shared] = (leader[shared] + 1) % vocabulary
    return [first, leader, other]
