"""Packed rows that share a prompt give the values and gradients of rows that share nothing, and see no other answer."""

from dataclasses import dataclass

import pytest
import torch
from rounding import assert_reordered, assert_within
from tiny_groups import rows_of
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from asyncrl.policy.logprobs import model_logprobs
from asyncrl.ranks import packed
from asyncrl.ranks.packed import ATTENTION, PackedRows
from asyncrl.ranks.prefixes import SharedPrefixes

pytestmark = pytest.mark.slow

VOCABULARY = 50
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1,
}  # fmt: skip
MODELS = {
    "qwen3, grouped heads": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
    "llama, all heads": lambda: LlamaForCausalLM(LlamaConfig(**{**SHAPE, "num_key_value_heads": 4})),
    "sliding window": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=4)),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(3)
    made: PreTrainedModel = MODELS[request.param]().eval()
    made.set_attn_implementation(ATTENTION)
    return made


@dataclass(frozen=True)
class Case:
    """Groups as (tokens of the prompt, tokens of each answer)."""

    groups: tuple[tuple[int, tuple[int, ...]], ...]
    same_first_tokens: bool = False

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the rows [B, S] and their lengths. Padding is ordinary tokens."""
        chance = torch.Generator().manual_seed(0)
        lengths = [prompt + answer for prompt, answers in self.groups for answer in answers]
        tokens_BS = torch.randint(1, VOCABULARY, (len(lengths), max(lengths) + 1), generator=chance)
        row = 0
        for number, (prompt, answers) in enumerate(self.groups):
            tokens_BS[row : row + len(answers), :prompt] = tokens_BS[row, :prompt].clone()
            tokens_BS[row : row + len(answers), 0] = 1 if self.same_first_tokens else number
            row += len(answers)
        return tokens_BS, torch.tensor(lengths)


CASES = {
    "long prompts": Case(((9, (3, 5, 2, 5)), (7, (4, 4, 4)))),
    "long answers": Case(((3, (9, 12, 5, 12)),)),
    "group sizes, also one": Case(((6, (3, 3)), (5, (2,)), (6, (1, 2, 3, 4, 5)), (4, (6,)))),
    "prompts of one token": Case(((1, (2, 3, 1)), (1, (4, 4)))),
    "empty answers": Case(((6, (0, 3, 0)), (5, (2, 0)), (3, (0, 0)))),
    "groups with the same first token": Case(((6, (3, 2)), (5, (4, 3, 2)), (7, (1, 1))), same_first_tokens=True),
}


def results(
    model: PreTrainedModel, tokens_BS: torch.Tensor, lengths_B: torch.Tensor, *, in_packs: bool = True
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Returns log-probs and entropies [B, T, 2], 0 beyond the rows, and the gradients of a weighted sum of them."""
    rows = rows_of(tokens_BS, packed_lengths_B=lengths_B if in_packs else None)
    logprobs_BT, entropy_BT, _ = model_logprobs(model, rows, temperature=0.8, with_entropy=True)
    assert entropy_BT is not None
    inside_BT = torch.arange(tokens_BS.shape[1] - 1) < (lengths_B - 1).unsqueeze(1)
    both_BTC = torch.stack((logprobs_BT, entropy_BT), dim=-1) * inside_BT.unsqueeze(-1)
    weights_BTC = torch.randn(both_BTC.shape, generator=torch.Generator().manual_seed(1)) / lengths_B.sum()
    return both_BTC.detach(), list(torch.autograd.grad((both_BTC * weights_BTC).sum(), list(model.parameters())))


def without_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(input_ids_BS: torch.Tensor, lengths_B: torch.Tensor, wide: object) -> SharedPrefixes:
        return SharedPrefixes(leaders=list(range(len(lengths_B))), tokens=[0] * len(lengths_B))

    monkeypatch.setattr(packed, "shared_prefixes", nothing)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_rows_that_share_nothing(
    model: PreTrainedModel, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens_BS, lengths_B = CASES[name].rows()
    sequence = PackedRows.of(tokens_BS, lengths_B=lengths_B).input_ids_1N
    assert sequence.numel() < lengths_B.sum(), "the case must share tokens"
    # the norms of the models compute their gradients in float32, also in a float64 model
    for dtype, value_bound, gradient_bound in ((torch.float32, 1e-6, 1e-6), (torch.float64, 1e-13, 1e-7)):
        model.to(dtype)
        shared_BTC, shared_gradients = results(model, tokens_BS, lengths_B)
        with monkeypatch.context() as context:
            without_sharing(context)
            plain_BTC, plain_gradients = results(model, tokens_BS, lengths_B)
        padded_BTC, padded_gradients = results(model, tokens_BS, lengths_B, in_packs=False)
        for wanted_BTC, gradients in ((plain_BTC, plain_gradients), (padded_BTC, padded_gradients)):
            assert_reordered(shared_BTC, wanted_BTC, spread=value_bound)
            for found, wanted in zip(shared_gradients, gradients, strict=True):
                assert_within(found, wanted, bound=gradient_bound)


def test_an_answer_moves_its_own_row_only_and_a_prompt_moves_all_of_its_rows(model: PreTrainedModel) -> None:
    tokens_BS, lengths_B = CASES["long prompts"].rows()
    before_BTC, _ = results(model, tokens_BS, lengths_B)
    for row in range(len(tokens_BS)):
        prompt = 9 if row < 4 else 7
        changed_BS = tokens_BS.clone()
        changed_BS[row, prompt] = (changed_BS[row, prompt] + 1) % VOCABULARY
        moved_B = (results(model, changed_BS, lengths_B)[0] != before_BTC).flatten(1).any(1)
        assert moved_B.nonzero().flatten().tolist() == [row]
    changed_BS = tokens_BS.clone()
    changed_BS[:4, 6] = (changed_BS[:4, 6] + 1) % VOCABULARY
    moved_BT = (results(model, changed_BS, lengths_B)[0] != before_BTC).any(-1)
    assert moved_BT[:4, 5:9].all(), "all rows see the changed prompt"
    assert not moved_BT[:4, :5].any()
    assert not moved_BT[4:].any()


def test_a_row_without_its_group_gives_the_same_values(model: PreTrainedModel) -> None:
    tokens_BS, lengths_B = CASES["groups with the same first token"].rows()
    together_BTC, _ = results(model, tokens_BS, lengths_B)
    for row in range(len(tokens_BS)):
        alone_BTC, _ = results(model, tokens_BS[row : row + 1], lengths_B[row : row + 1])
        assert_reordered(together_BTC[row], alone_BTC[0], spread=1e-6)


def test_segments_describe_whole_rows_for_a_kernel_that_aligns_last_queries_with_last_keys() -> None:
    """The kernel of half precision runs on GPUs only. Its inputs are compared with the rows here."""
    for case in CASES.values():
        tokens_BS, lengths_B = case.rows()
        rows = PackedRows.of(tokens_BS, lengths_B=lengths_B)
        segments, tokens_N = rows.segments, rows.input_ids_1N[0]
        keys_M = tokens_N[segments.places_M]
        queries, keys = segments.query_starts.diff().tolist(), segments.key_starts.diff().tolist()
        wanted = [tuple(row[:length].tolist()) for row, length in zip(tokens_BS, lengths_B, strict=True)]
        whole = [tuple(part.tolist()) for part in keys_M.split(keys)]
        assert {*whole} <= {*wanted}
        for row in {*wanted} - {*whole}:
            assert any(leader[: len(row)] == row for leader in whole), "only a row without own tokens may be missing"
        for own, row in zip(tokens_N.split(queries), whole, strict=True):
            assert tuple(own.tolist()) == row[len(row) - len(own) :]
        assert segments.query_starts.dtype == segments.key_starts.dtype == torch.int32
