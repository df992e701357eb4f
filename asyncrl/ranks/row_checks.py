"""Checks a rank's rows before any pass. All ranks refuse wrong rows together, instead of failing inside the model.

Legend: B rows, S tokens, K numbers of a token in one of `WIDE_FIELDS`, N trained tokens.
"""

import torch

from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.specs import BRANCH, NO_BRANCH, NO_TOKEN, SUPPORT, TOP_IDS, TOP_LOGPROBS, WIDE_FIELDS
from asyncrl.errors import CallRefused

_INTEGERS = ("input_ids", "input_lengths", "weight_versions", "group_ids", BRANCH, SUPPORT, TOP_IDS)
_SHAPES = {
    **dict.fromkeys(("input_lengths", "sample_mask", "rewards", "group_ids"), ("[B]",)),
    **dict.fromkeys(("input_ids", "weight_versions", "staleness", "token_mask", "values", "returns"), ("[B, S]",)),
    **dict.fromkeys(("generation_logprobs", "prev_logprobs", "reference_policy_logprobs"), ("[B, S]",)),
    BRANCH: ("[B, S]",),
    **dict.fromkeys(WIDE_FIELDS, ("[B, S, K]",)),
    "advantages": ("[B]", "[B, S]"),
}
"""The possible shapes of each column that the ranks themselves read."""
EQUAL_NATS = 1e-4
"""Accepted rounding of a log-prob, nats: between the two columns that store the same log-prob of the engine, and above
0."""


def check_rows(batch: BatchedDataDict, *, vocabulary: int) -> None:
    """Raises CallRefused if rows cannot be passed through a model. The message names the column, and its shape or
    number type or the place of its first wrong value.

    It checks shapes and number types of the known columns, token ids against `vocabulary`, lengths against the width,
    numbers of branches, and masks. If the rows have supports or the sampler's most likely tokens, those of a sampled
    token must fit it. The rows of an estimator may lack `input_ids`; their shape is then taken from `token_mask`.
    """
    if batch.size == 0:
        return
    first = "input_ids" if "input_ids" in batch else "token_mask"
    column_BS = _tensor(batch, first)
    if column_BS.ndim != 2 or column_BS.shape[1] == 0:
        raise CallRefused(
            f"{first} has shape {list(column_BS.shape)}; it must be [rows, tokens] with at least one token"
        )
    rows, width = column_BS.shape
    for name in (name for name in _SHAPES if name in batch):
        column = _tensor(batch, name)
        numbers = max([1, *column.shape[2:]])  # the K of [B, S, K]
        shapes = {"[B]": (rows,), "[B, S]": (rows, width), "[B, S, K]": (rows, width, numbers)}
        if tuple(column.shape) not in {shapes[shape] for shape in _SHAPES[name]}:
            raise CallRefused(
                f"{name} has shape {list(column.shape)}; it must be {' or '.join(_SHAPES[name])}, and {first} has "
                f"B = {rows} rows and S = {width} tokens"
            )
        if name in _INTEGERS and column.dtype not in (torch.int32, torch.int64):
            raise CallRefused(f"{name} has dtype {column.dtype}; it must be torch.int64 or torch.int32")
        if name == TOP_LOGPROBS and not column.is_floating_point():
            raise CallRefused(f"{name} has dtype {column.dtype}; it must be a floating-point type")
        if column.is_complex():
            raise CallRefused(f"{name} has dtype {column.dtype}; it must be a real number type")
    if "input_ids" in batch:
        why = f"the model's vocabulary has {vocabulary} tokens"
        _check_range("input_ids", batch["input_ids"], 0, vocabulary - 1, why=why)
    if "input_lengths" in batch:
        _check_range("input_lengths", batch["input_lengths"], 0, width, why=f"{first} is {width} tokens wide")
    for name in ("token_mask", "sample_mask"):
        if name in batch:
            _check_range(name, batch[name].float(), 0.0, torch.finfo(torch.float32).max, why="it is a weight")
    if "token_mask" in batch and "input_lengths" in batch:
        beyond_BS = torch.arange(width) >= batch["input_lengths"].unsqueeze(1)
        masked_BS = batch["token_mask"].float() * beyond_BS
        _check_range("token_mask", masked_BS, 0.0, 0.0, why="the token is beyond its row's input_lengths")
    if BRANCH in batch and "input_lengths" in batch:
        inside_BS = torch.arange(width) < batch["input_lengths"].unsqueeze(1)
        wrong_BS = (batch[BRANCH] != NO_BRANCH) != inside_BS
        if wrong_BS.any():
            row, place = wrong_BS.nonzero()[0].tolist()
            raise CallRefused(
                f"{BRANCH}[{row}, {place}] is {int(batch[BRANCH][row, place])}; it must be the number of a branch for "
                f"the tokens of a row, and {NO_BRANCH} beyond its input_lengths"
            )
    if SUPPORT in batch and "input_ids" in batch:
        _check_supports(batch, vocabulary=vocabulary)
    if TOP_IDS in batch:
        _check_range(TOP_IDS, batch[TOP_IDS], NO_TOKEN, vocabulary - 1, why=_why_ids(vocabulary))
    if {TOP_IDS, TOP_LOGPROBS} <= set(batch):
        _check_tops(batch)


def _why_ids(vocabulary: int) -> str:
    return f"{NO_TOKEN} is padding, and the model's vocabulary has {vocabulary} tokens"


def _check_supports(batch: BatchedDataDict, *, vocabulary: int) -> None:
    """Raises CallRefused unless the supports are token ids, or NO_TOKEN, and contain the tokens that were sampled,
    which `token_mask` marks if the rows have it."""
    ids_BS, support_BSK = batch["input_ids"], batch[SUPPORT]
    _check_range(SUPPORT, support_BSK, NO_TOKEN, vocabulary - 1, why=_why_ids(vocabulary))
    if "token_mask" not in batch:
        return
    missing_BS = (batch["token_mask"] > 0) & ~(support_BSK == ids_BS.unsqueeze(-1)).any(dim=-1)
    if missing_BS.any():
        row, place = missing_BS.nonzero()[0].tolist()
        raise CallRefused(
            f"{SUPPORT}[{row}, {place}] does not contain the token {int(ids_BS[row, place])} of input_ids, which "
            "token_mask marks as sampled; pass the supports with which the tokens were sampled"
        )


def _check_tops(batch: BatchedDataDict) -> None:
    """Raises CallRefused if the lists of most likely tokens do not fit the tokens that were sampled, which `token_mask`
    marks if the rows have it.

    A sampled token needs a list of different tokens with finite log-probs of at most 0. If it is in its list, it must
    have its own log-prob there, so that lists of other tokens are noticed.
    """
    if batch[TOP_IDS].shape != batch[TOP_LOGPROBS].shape:
        raise CallRefused(
            f"{TOP_IDS} has shape {list(batch[TOP_IDS].shape)} and {TOP_LOGPROBS} has {list(batch[TOP_LOGPROBS].shape)}"
            "; they must have a log-prob for each id"
        )
    if "token_mask" not in batch:
        return
    sampled_BS = batch["token_mask"] > 0
    ids_NK, logprobs_NK = batch[TOP_IDS][sampled_BS], batch[TOP_LOGPROBS][sampled_BS].float()
    listed_NK, sorted_NK = ids_NK != NO_TOKEN, ids_NK.sort(dim=-1).values
    twice_N = ((sorted_NK[:, 1:] == sorted_NK[:, :-1]) & (sorted_NK[:, 1:] != NO_TOKEN)).any(dim=-1)
    possible_NK = logprobs_NK.isfinite() & (logprobs_NK <= EQUAL_NATS)
    wrong = {
        f"{TOP_IDS}{{place}} has no token": ~listed_NK.any(dim=-1),
        f"{TOP_IDS}{{place}} has a token twice": twice_N,
        f"{TOP_LOGPROBS}{{place}} has a log-prob that is not finite or above 0": (listed_NK & ~possible_NK).any(dim=-1),
    }
    if {"input_ids", "generation_logprobs"} <= set(batch):
        own_N1 = batch["generation_logprobs"][sampled_BS].unsqueeze(-1)
        # a column in half precision is rounded
        eps = max(torch.finfo(column.dtype).eps for column in (own_N1, batch[TOP_LOGPROBS]))
        apart_NK = (logprobs_NK - own_N1).abs() > EQUAL_NATS + eps * logprobs_NK.abs()
        is_own_NK = listed_NK & (ids_NK == batch["input_ids"][sampled_BS].unsqueeze(-1)) & own_N1.isfinite()
        name = f"{TOP_LOGPROBS}{{place}} has another log-prob of the sampled token than generation_logprobs"
        wrong[name] = (is_own_NK & apart_NK).any(dim=-1)
    for words, wrong_N in wrong.items():
        if wrong_N.any():
            place = sampled_BS.nonzero()[wrong_N][0].tolist()
            raise CallRefused(
                f"{words.format(place=place)}; token_mask marks the token as sampled, so it must have the most likely "
                "tokens of its own place, with the log-probs under which it was sampled"
            )


def _tensor(batch: BatchedDataDict, name: str) -> torch.Tensor:
    column = batch[name]
    if not isinstance(column, torch.Tensor):
        raise CallRefused(f"{name} is a {type(column).__name__}; it must be a tensor")
    return column


def _check_range(name: str, values: torch.Tensor, least: float, most: float, *, why: str) -> None:
    outside = ~((values >= least) & (values <= most))  # negated, so that NaN counts as outside
    if outside.any():
        place = outside.nonzero()[0].tolist()
        raise CallRefused(
            f"{name}{place} is {values[tuple(place)].item()}; it must be from {least} to {most}, because {why}"
        )
