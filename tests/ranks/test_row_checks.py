"""Rows that a model or a loss cannot use are refused before any pass. The error has the column, place and value."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_groups import VOCABULARY, make_batch, with_tops

from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.specs import BRANCH, NO_BRANCH, NO_TOKEN, TOP_IDS, TOP_LOGPROBS
from asyncrl.errors import CallRefused
from asyncrl.ranks.row_checks import check_rows


def changed(**columns: Any) -> BatchedDataDict:
    return BatchedDataDict({**make_batch(), **columns})


def with_value(name: str, value: float) -> BatchedDataDict:
    """Returns the batch with `value` at the last place of a column."""
    column = make_batch()[name].clone()
    column.view(-1)[-1] = value
    return changed(**{name: column})


def own_supports() -> torch.Tensor:
    """Returns supports that have only the token itself, and padding."""
    ids_BS = make_batch()["input_ids"].int()
    return torch.stack([torch.full_like(ids_BS, NO_TOKEN), ids_BS], dim=-1)


def of_tops(change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> BatchedDataDict:
    """Returns the batch with changed ids and log-probs of the most likely tokens."""
    batch = with_tops(make_batch())
    batch[TOP_IDS], batch[TOP_LOGPROBS] = change(batch[TOP_IDS], batch[TOP_LOGPROBS])
    return batch


def at_a_trained_token(column: torch.Tensor, value: float) -> torch.Tensor:
    changed_BSK = column.clone()
    changed_BSK[11, 5] = value
    return changed_BSK


def test_rows_of_the_tests_and_no_rows_are_fine() -> None:
    check_rows(make_batch(), vocabulary=VOCABULARY)
    check_rows(changed(advantages=torch.zeros(12, 13)), vocabulary=VOCABULARY)
    halves = changed(sample_mask=torch.full((12,), 0.5), token_mask=make_batch()["token_mask"].bool())
    check_rows(halves, vocabulary=VOCABULARY)
    check_rows(changed(input_ids=make_batch()["input_ids"].int()), vocabulary=VOCABULARY)
    estimated = {name: make_batch()[name] for name in ("input_lengths", "token_mask", "sample_mask")}
    check_rows(BatchedDataDict(estimated), vocabulary=VOCABULARY)
    check_rows(changed(support_ids=own_supports()), vocabulary=VOCABULARY)
    masked_BSK = own_supports().masked_fill((make_batch()["token_mask"] == 0).unsqueeze(-1), NO_TOKEN)
    check_rows(changed(support_ids=masked_BSK), vocabulary=VOCABULARY)
    scored = {name: make_batch()[name] for name in ("input_ids", "input_lengths")}
    check_rows(BatchedDataDict(scored, support_ids=masked_BSK), vocabulary=VOCABULARY)
    check_rows(with_tops(make_batch()), vocabulary=VOCABULARY)
    check_rows(of_tops(lambda ids, logprobs: (ids, logprobs.bfloat16())), vocabulary=VOCABULARY)
    unlikely = with_tops(make_batch())
    place = tuple(unlikely["token_mask"].nonzero()[0].tolist())
    unlikely["generation_logprobs"][place] = torch.nan  # it is masked later
    unlikely[TOP_IDS][place][0] = unlikely["input_ids"][place]
    check_rows(unlikely, vocabulary=VOCABULARY)
    without_ids = BatchedDataDict(
        {name: with_tops(make_batch())[name] for name in ("token_mask", TOP_IDS, TOP_LOGPROBS)}
    )
    check_rows(without_ids, vocabulary=VOCABULARY)
    check_rows(BatchedDataDict(), vocabulary=VOCABULARY)
    check_rows(make_batch().slice(0, 0), vocabulary=VOCABULARY)


def branches() -> torch.Tensor:
    """Returns the number 0 for the tokens of the rows, and padding."""
    batch = make_batch()
    inside_BS = torch.arange(batch["input_ids"].shape[1]) < batch["input_lengths"].unsqueeze(1)
    return torch.zeros_like(batch["input_ids"]).masked_fill(~inside_BS, NO_BRANCH)


def test_branches_have_numbers_for_all_tokens_and_for_no_padding() -> None:
    check_rows(changed(**{BRANCH: branches()}), vocabulary=VOCABULARY)
    with pytest.raises(CallRefused, match=r"branch_ids\[0, 8\] is 0; .* and -1 beyond its input_lengths"):
        check_rows(changed(**{BRANCH: torch.zeros_like(branches())}), vocabulary=VOCABULARY)
    with pytest.raises(CallRefused, match=r"branch_ids\[0, 0\] is -1; it must be the number of a branch"):
        check_rows(changed(**{BRANCH: torch.full_like(branches(), NO_BRANCH)}), vocabulary=VOCABULARY)


WRONG = {
    "token beyond the vocabulary": (with_value("input_ids", VOCABULARY), r"input_ids\[11, 12\] is 40; .* 0 to 39"),
    "negative token": (with_value("input_ids", -1), r"input_ids\[11, 12\] is -1"),
    "length beyond the width": (with_value("input_lengths", 14), r"input_lengths\[11\] is 14; .* 0 to 13"),
    "negative mask": (with_value("sample_mask", -0.5), r"sample_mask\[11\] is -0.5; .* it is a weight"),
    "mask of NaN": (with_value("token_mask", torch.nan), r"token_mask\[11, 12\] is nan"),
    "ids of floats": (
        changed(input_ids=torch.zeros(12, 13)),
        "input_ids has dtype torch.float32; it must be torch.int64",
    ),
    "short ids": (
        changed(input_ids=torch.zeros(12, 13).short()),
        "input_ids has dtype torch.int16; it must be torch.int64",
    ),
    "short lengths": (changed(input_lengths=torch.ones(12).byte()), "input_lengths has dtype torch.uint8"),
    "no token": (changed(input_ids=torch.zeros(12, 0).long()), r"input_ids has shape \[12, 0\]; .* at least one token"),
    "complex rewards": (
        changed(rewards=torch.zeros(12) * 1j),
        "rewards has dtype torch.complex64; it must be a real number",
    ),
    "a mask beyond the length": (
        changed(token_mask=torch.ones(12, 13)),
        r"token_mask\[0, 8\] is 1.0; .* the token is beyond its row's input_lengths",
    ),
    "lengths of floats": (changed(input_lengths=torch.ones(12)), "input_lengths has dtype torch.float32"),
    "one id a row": (changed(input_ids=torch.zeros(12).long()), r"input_ids has shape \[12\]"),
    "a mask a token": (changed(sample_mask=torch.ones(12, 13)), r"sample_mask has shape \[12, 13\]; it must be \[B\]"),
    "log-probs of next tokens": (
        changed(generation_logprobs=torch.zeros(12, 12)),
        r"generation_logprobs has shape \[12, 12\]; it must be \[B, S\], and input_ids has B = 12 rows and S = 13",
    ),
    "advantages of another kind": (changed(advantages=torch.zeros(12, 13, 1)), r"must be \[B\] or \[B, S\]"),
    "supports of one number a token": (
        changed(support_ids=make_batch()["input_ids"].int()),
        r"support_ids has shape \[12, 13\]; it must be \[B, S, K\], and input_ids has B = 12 rows and S = 13",
    ),
    "supports of floats": (changed(support_ids=own_supports().float()), "support_ids has dtype torch.float32"),
    "a support beyond the vocabulary": (
        changed(support_ids=own_supports() + VOCABULARY),
        rf"support_ids\[0, 0, 1\] is .* it must be from -1 to {VOCABULARY - 1}, because -1 is padding",
    ),
    "a support without the token": (
        changed(support_ids=own_supports() * 0 - 1),
        r"support_ids\[0, \d+\] does not contain the token \d+ of input_ids, which token_mask marks",
    ),
    "one most likely token a token": (
        changed(top_ids=make_batch()["input_ids"].int()),
        r"top_ids has shape \[12, 13\]; it must be \[B, S, K\]",
    ),
    "most likely tokens of floats": (changed(top_ids=own_supports().float()), "top_ids has dtype torch.float32"),
    "a most likely token beyond the vocabulary": (
        changed(top_ids=own_supports() + VOCABULARY),
        rf"top_ids\[0, 0, 1\] is .* it must be from -1 to {VOCABULARY - 1}, because -1 is padding",
    ),
    "most likely tokens without log-probs": (
        changed(top_ids=own_supports(), top_logprobs=torch.zeros(12, 13, 1)),
        r"top_ids has shape \[12, 13, 2\] and top_logprobs has \[12, 13, 1\]; they must have a log-prob for each id",
    ),
    "log-probs of integers": (
        of_tops(lambda ids, logprobs: (ids, logprobs.int())),
        "top_logprobs has dtype torch.int32; it must be a floating-point type",
    ),
    "a sampled token without most likely tokens": (
        of_tops(lambda ids, logprobs: (at_a_trained_token(ids, NO_TOKEN), logprobs)),
        r"top_ids\[11, 5\] has no token; token_mask marks the token as sampled",
    ),
    "a most likely token twice": (
        of_tops(lambda ids, logprobs: (at_a_trained_token(ids, 3), logprobs)),
        r"top_ids\[11, 5\] has a token twice",
    ),
    "a log-prob of NaN": (
        of_tops(lambda ids, logprobs: (ids, at_a_trained_token(logprobs, torch.nan))),
        r"top_logprobs\[11, 5\] has a log-prob that is not finite or above 0",
    ),
    "a log-prob above 0": (
        of_tops(lambda ids, logprobs: (ids, at_a_trained_token(logprobs, 0.01))),
        r"top_logprobs\[11, 5\] has a log-prob that is not finite or above 0",
    ),
    "lists of the next tokens": (
        of_tops(lambda ids, logprobs: (ids.roll(-1, 1), logprobs.roll(-1, 1))),
        r"top_ids\[0, 7\] has no token; token_mask",
    ),
    "log-probs of the tokens before": (
        changed(
            top_ids=own_supports(),
            top_logprobs=make_batch()["generation_logprobs"].roll(1, 1)[..., None].expand(-1, -1, 2),
        ),
        r"top_logprobs\[0, \d+\] has another log-prob of the sampled token than generation_logprobs",
    ),
    "a list": (changed(advantages=[0.0] * 12), "advantages is a list; it must be a tensor"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_column_is_named_with_its_place_and_what_it_must_be(name: str) -> None:
    batch, text = WRONG[name]
    with pytest.raises(CallRefused, match=text):
        check_rows(batch, vocabulary=VOCABULARY)
