"""Losses by import path: every signature that the policy can call is accepted, and any other one is refused before a
run."""

from typing import Any

import pytest

from asyncrl.algorithms.loss import build_loss, load_loss
from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError


def by_position(logits: Any, data: Any, global_valid_seqs: Any, global_valid_toks: Any) -> Any: ...


def by_keyword(*, next_token_logits: Any, data: Any, global_valid_seqs: Any, global_valid_toks: Any) -> Any: ...


def of_logprobs(*, data: Any, global_valid_seqs: Any, global_valid_toks: Any, next_token_logprobs: Any) -> Any: ...


def of_unknown_input(*, data: Any, global_valid_seqs: Any, global_valid_toks: Any, hidden_states: Any) -> Any: ...


def without_counts(next_token_logits: Any, data: Any) -> Any: ...


def of_another_kind(next_token_logits: Any, data: Any, global_valid_seqs: Any, global_valid_toks: Any) -> Any: ...


def failing_factory() -> Any:
    raise KeyError("beta")


of_logprobs.input_type = "logprob"  # type: ignore[attr-defined]
of_another_kind.input_type = "hidden"  # type: ignore[attr-defined]


@pytest.mark.parametrize("loss", [by_position, by_keyword, of_logprobs])
def test_a_loss_that_the_policy_can_call_is_taken_as_it_is(loss: Any) -> None:
    assert load_loss(f"{__name__}:{loss.__name__}") is loss


def test_a_loss_of_logits_is_refused_with_supports() -> None:
    loss = f"algorithm.loss={__name__}:by_position"
    with pytest.raises(ConfigError, match="reads the logits of all tokens") as caught:
        build_loss(load_config([], [loss, "generator.top_k=8"]))
    assert "generator.top_k" in str(caught.value)
    assert build_loss(load_config([], [loss])) is by_position
    of_logprobs_too = [f"algorithm.loss={__name__}:of_logprobs", "generator.top_k=8"]
    assert build_loss(load_config([], of_logprobs_too)) is of_logprobs


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("of_unknown_input", "cannot be called as a loss: "),
        ("without_counts", "it must take (next_token_logits, data, global_valid_seqs, global_valid_toks)"),
        ("of_another_kind", "cannot be called as a loss: the loss's input_type is 'hidden'; it must be one of 'logit'"),
        ("failing_factory", "was called without arguments to make a loss, and it raised KeyError: 'beta'"),
    ],
)
def test_any_other_callable_is_refused_with_the_reason(name: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_loss(f"{__name__}:{name}")
    assert words in str(caught.value)
    assert "algorithm.loss" in str(caught.value)
