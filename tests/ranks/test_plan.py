"""The columns that a call must have before any rank is called."""

import pytest

from asyncrl.algorithms.loss import ObjectiveLoss
from asyncrl.algorithms.presets import PRESETS
from asyncrl.algorithms.value_loss import ClippedValueLoss
from asyncrl.errors import MissingColumns
from asyncrl.ranks.plan import check_columns, required_columns

MASKS = ("input_ids", "input_lengths", "token_mask", "sample_mask")


@pytest.mark.parametrize(
    ("name", "given", "missing"),
    [
        ("m2po", {"generation_logprobs"}, "prev_logprobs"),
        ("a3po", {"generation_logprobs", "prev_logprobs"}, "staleness"),
        ("grpo", {"generation_logprobs"}, "reference_policy_logprobs"),
        ("tis", set(), "generation_logprobs"),
    ],
)
def test_a_missing_column_is_named_with_those_that_are_there(name: str, given: set[str], missing: str) -> None:
    needed = required_columns(ObjectiveLoss(PRESETS[name].objective), updates=1)
    with pytest.raises(MissingColumns, match=f"the loss reads {missing}, but .* they have advantages, "):
        check_columns({*MASKS, *given, "advantages"}, needed, reader="the loss")


def test_advantages_returns_and_masks_are_required_like_log_probs() -> None:
    present = {"generation_logprobs", "values"}
    for loss, missing in (
        (ObjectiveLoss(PRESETS["tis"].objective), "advantages"),
        (ClippedValueLoss(clip=0.2), "returns"),
    ):
        with pytest.raises(MissingColumns, match=f"reads {missing}, but"):
            check_columns({*MASKS, *present}, required_columns(loss, updates=1), reader="the loss")
        with pytest.raises(MissingColumns, match=r"reads .*sample_mask, token_mask, but"):
            check_columns({"advantages", "returns", *present}, required_columns(loss, updates=1), reader="the loss")


def test_log_probs_of_the_step_s_start_are_made_in_the_pass_of_a_sole_update_and_required_for_several() -> None:
    present = {*MASKS, "generation_logprobs", "advantages"}
    for name in ("tis", "dapo"):
        loss = ObjectiveLoss(PRESETS[name].objective)
        check_columns(present, required_columns(loss, updates=1), reader="the loss")
        check_columns(present, required_columns(loss, updates=3, eval_mode=True), reader="the loss")
        with pytest.raises(MissingColumns, match=r"prev_logprobs.*call get_logprobs\(\) to compute"):
            check_columns(present, required_columns(loss, updates=3), reader="the loss")
    for name in ("aipo", "reinforce"):  # these objectives do not read log-probs of the step's start
        check_columns(present, required_columns(ObjectiveLoss(PRESETS[name].objective), updates=3), reader="the loss")


def test_a_loss_of_a_user_is_asked_for_its_columns() -> None:
    class Own:
        columns = frozenset({"prev_logprobs", "mine"})

    assert required_columns(Own(), updates=2) == {*MASKS, "prev_logprobs", "mine"}  # type: ignore[arg-type]
    assert required_columns(Own(), updates=1) == {*MASKS, "mine"}  # type: ignore[arg-type]
    assert required_columns(lambda *_: None, updates=2) == {*MASKS}  # type: ignore[arg-type]
    Own.columns = "advantages"  # type: ignore[assignment]
    with pytest.raises(TypeError, match="columns are the string 'advantages'"):
        required_columns(Own(), updates=1)  # type: ignore[arg-type]
