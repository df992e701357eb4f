"""Packed rows give the same results as each row alone, and no token sees another row."""

import pytest
import torch
from rounding import GRADIENT, OUTPUT, assert_reordered
from tiny_groups import rows_of
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from asyncrl.errors import ConfigError
from asyncrl.policy.logprobs import CHUNK_LOGITS, model_logprobs
from asyncrl.ranks.packed import ATTENTION, PackedRows, packed_attention

pytestmark = pytest.mark.slow

LENGTHS = (5, 1, 9, 2, 6)
SHAPE = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2,
}  # fmt: skip
MODELS = {
    "grouped heads": (Qwen3ForCausalLM, Qwen3Config(**SHAPE)),
    "sliding window": (MistralForCausalLM, MistralConfig(**SHAPE, sliding_window=4)),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    monkeypatch.setitem(CHUNK_LOGITS, "cpu", 64 * 12)
    torch.manual_seed(3)
    kind, config = MODELS[request.param]
    made: PreTrainedModel = kind(config).double().eval()
    return made


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rows whose padding is an ordinary token, so that a model that reads padding gives another result."""
    tokens_BS = torch.randint(50, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(0))
    return tokens_BS, torch.tensor(LENGTHS)


def packed_logprobs(model: PreTrainedModel, tokens_BS: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    model.set_attn_implementation(ATTENTION)
    packed = rows_of(tokens_BS, packed_lengths_B=lengths_B)
    logprobs_BT, _, _ = model_logprobs(model, packed, temperature=0.8, with_entropy=True)
    return logprobs_BT


def alone(model: PreTrainedModel, tokens_BS: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """Computes each row without padding, with transformers' own attention and full logits."""
    model.set_attn_implementation("eager")
    found_BT = torch.zeros(tokens_BS.shape[0], tokens_BS.shape[1] - 1, dtype=torch.float64)
    for row, length in enumerate(lengths_B.tolist()):
        logits_1SV = model(input_ids=tokens_BS[row : row + 1, :length], use_cache=False).logits / 0.8
        logprobs_SV = logits_1SV[0].log_softmax(-1)
        for place in range(length - 1):
            found_BT[row, place] = logprobs_SV[place, tokens_BS[row, place + 1]]
    return found_BT


def test_log_probs_and_gradients_are_those_of_each_row_alone(model: PreTrainedModel) -> None:
    tokens_BS, lengths_B = rows()
    weights_BT = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    want_BT, got_BT = alone(model, tokens_BS, lengths_B), packed_logprobs(model, tokens_BS, lengths_B)
    # the norms compute in float32, even in a float64 model
    assert_reordered(got_BT, want_BT, spread=OUTPUT)
    parameters = list(model.parameters())
    want = torch.autograd.grad((want_BT * weights_BT).sum(), parameters)
    got = torch.autograd.grad((got_BT * weights_BT).sum(), parameters)
    for got_part, want_part in zip(got, want, strict=True):
        assert_reordered(got_part, want_part, spread=GRADIENT)


def test_no_token_sees_another_row_or_a_later_token(model: PreTrainedModel) -> None:
    tokens_BS, lengths_B = rows()
    before_BT = packed_logprobs(model, tokens_BS, lengths_B).detach()
    changed_BS = tokens_BS.clone()
    changed_BS[2, 4] = (changed_BS[2, 4] + 1) % 50
    after_BT = packed_logprobs(model, changed_BS, lengths_B).detach()
    differs_BT = after_BT != before_BT
    assert not differs_BT[[0, 1, 3, 4]].any()
    assert not differs_BT[2, :3].any()
    assert differs_BT[2, 3:6].all(), "the change must be visible in its own row"


def test_without_boundaries_it_is_causal_attention_over_padded_rows(model: PreTrainedModel) -> None:
    tokens_BS, lengths_B = rows()
    want_BT = alone(model, tokens_BS, lengths_B).detach()
    model.set_attn_implementation(ATTENTION)
    got_BT, _, _ = model_logprobs(model, rows_of(tokens_BS), temperature=0.8, with_entropy=False)
    inside_BT = torch.arange(8) < (lengths_B - 1).unsqueeze(1)
    assert_reordered(got_BT[inside_BT], want_BT[inside_BT], spread=OUTPUT)


def test_values_return_to_their_rows() -> None:
    tokens_BS, lengths_B = rows()
    packed = PackedRows.of(tokens_BS, lengths_B=lengths_B)
    numbers_1NC = packed.input_ids_1N.unsqueeze(-1)
    inside_BT = torch.arange(8) < (lengths_B - 1).unsqueeze(1)
    assert torch.equal(packed.at_tokens(numbers_1NC)[..., 0], tokens_BS[:, :-1] * inside_BT)
    assert torch.equal(packed.at_next_tokens(numbers_1NC)[..., 0], tokens_BS[:, 1:] * inside_BT)


@pytest.mark.parametrize("asked", [{"softcap": 30.0}, {"s_aux": torch.zeros(1)}])
def test_attention_of_another_kind_is_refused(asked: dict[str, object]) -> None:
    one_1HSD = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ConfigError, match=f"learner.batching: Linear passes {next(iter(asked))} to its attention"):
        packed_attention(torch.nn.Linear(1, 1), one_1HSD, one_1HSD, one_1HSD, None, **asked)
