"""A row of several branches gives the values and gradients of its branches as rows of their own."""

import pytest
import torch
from rounding import assert_reordered, assert_within
from tiny_groups import rows_of
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3Model

from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.specs import BRANCH, SUPPORT, TOP_IDS, TOP_LOGPROBS
from asyncrl.policy.logprobs import model_logprobs
from asyncrl.policy.micro_batch import _logits
from asyncrl.ranks.batching import row_lengths, tokens_passed
from asyncrl.ranks.model_rows import Branches, ModelRows
from asyncrl.ranks.packed import ATTENTION, PackedRows
from asyncrl.value.model import ValueModel, model_values

pytestmark = pytest.mark.slow

VOCABULARY = 50
BRANCHES = [[[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9, 8, 7], [1, 2]], [[3, 3, 4]], [[1, 2, 3, 9], [1, 5]]]
"""The branches of three rows."""
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1,
}  # fmt: skip


@pytest.fixture
def model() -> PreTrainedModel:
    torch.manual_seed(3)
    made = Qwen3ForCausalLM(Qwen3Config(**SHAPE)).eval()
    made.set_attn_implementation(ATTENTION)
    return made


def rows() -> BatchedDataDict:
    """Returns the rows, whose padding is ordinary tokens."""
    lengths = [sum(map(len, branches)) for branches in BRANCHES]
    ids_BS = torch.full((len(BRANCHES), max(lengths) + 1), 7)
    numbers_BS = torch.full_like(ids_BS, -1)
    for row, branches in enumerate(BRANCHES):
        ids_BS[row, : lengths[row]] = torch.tensor([token for branch in branches for token in branch])
        numbers = [number for number, branch in enumerate(branches) for _ in branch]
        numbers_BS[row, : lengths[row]] = torch.tensor(numbers)
    return BatchedDataDict(
        {"input_ids": ids_BS, "input_lengths": torch.tensor(lengths), BRANCH: numbers_BS.to(torch.int32)}
    )


def supports(ids: torch.Tensor) -> torch.Tensor:
    """Returns supports of two tokens. The first one is the token itself."""
    return torch.stack([ids, (ids + 5) % VOCABULARY], dim=-1).int()


def columns(
    model: PreTrainedModel, ids_BS: torch.Tensor, *, packed_lengths_B: torch.Tensor | None, of_branches: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Returns log-probs, entropies, log-probs among supports and centering of all next tokens of all branches,
    [tokens, 4], and the gradients of a weighted sum of them."""
    numbers_BS = rows()[BRANCH] if of_branches else None
    options = {"packed_lengths_B": packed_lengths_B, "branch_ids_BS": numbers_BS}
    plain_BT, entropy_BT, _ = model_logprobs(model, rows_of(ids_BS, **options), temperature=0.8, with_entropy=True)
    supported = rows_of(ids_BS, support_BSK=supports(ids_BS), **options)
    supported_BT, _, _ = model_logprobs(model, supported, temperature=0.8, with_entropy=False)
    tops = {TOP_IDS: supports(ids_BS), TOP_LOGPROBS: torch.tensor([-0.5, -3.0]).expand(*ids_BS.shape, 2)}
    centered = rows_of(ids_BS, tops=tops, **options)
    *_, centering_BT = model_logprobs(model, centered, temperature=0.8, with_entropy=False, centered_kernel=(0.0, 2.0))
    assert entropy_BT is not None
    assert centering_BT is not None
    found_BT4 = torch.stack((plain_BT, entropy_BT, supported_BT, centering_BT), dim=-1)
    picked = []
    place = 0
    for row, branches in enumerate(BRANCHES):
        at = 0
        for branch in branches:
            if of_branches:
                picked.append(found_BT4[row, at : at + len(branch) - 1])
                assert not found_BT4[row, at - 1].any() or at == 0, "nothing predicts the first token of a branch"
                at += len(branch)
            else:
                picked.append(found_BT4[place, : len(branch) - 1])
                place += 1
    if of_branches:
        assert not found_BT4[1, len(BRANCHES[1][0]) - 1 :].any(), "padding has no value"
    values = torch.cat(picked)
    weights = torch.randn(values.shape, generator=torch.Generator().manual_seed(1)) / len(values)
    return values.detach(), list(torch.autograd.grad((values * weights).sum(), list(model.parameters())))


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_values_and_gradients_are_those_of_the_branches_alone(model: PreTrainedModel, packed: bool) -> None:
    branches = [branch for of_row in BRANCHES for branch in of_row]
    alone_RL = torch.zeros((len(branches), max(map(len, branches))), dtype=torch.int64)
    for row, branch in enumerate(branches):
        alone_RL[row, : len(branch)] = torch.tensor(branch)
    lengths_R = torch.tensor([len(branch) for branch in branches])
    lengths = (rows()["input_lengths"], lengths_R) if packed else (None, None)
    found, gradients = columns(model, rows()["input_ids"], packed_lengths_B=lengths[0], of_branches=True)
    wanted, wanted_gradients = columns(model, alone_RL, packed_lengths_B=lengths[1], of_branches=False)
    assert_reordered(found, wanted, spread=1e-6)
    for one, other in zip(gradients, wanted_gradients, strict=True):
        assert_within(one, other, bound=1e-6)


def test_packed_branches_compute_their_common_beginning_once(model: PreTrainedModel) -> None:
    split = Branches.of(rows()).rows
    sequence = PackedRows.of(split["input_ids"], lengths_B=split["input_lengths"]).input_ids_1N
    assert tokens_passed([rows()], packed=True) == (24, sequence.numel())
    assert sequence.numel() < 24
    assert row_lengths([rows()]) == [6, 7, 2, 3, 4, 2]
    with_supports = BatchedDataDict({**rows(), SUPPORT: supports(rows()["input_ids"])})
    assert tokens_passed([with_supports], packed=True, wide=[SUPPORT]) == tokens_passed([rows()], packed=True)
    assert tokens_passed([rows()], packed=False) == (24, 6 * 7)


@torch.no_grad()
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_logits_and_values_of_a_branch_do_not_depend_on_other_branches(model: PreTrainedModel, packed: bool) -> None:
    torch.manual_seed(4)
    backbone = Qwen3Model(Qwen3Config(**SHAPE)).eval()
    backbone.set_attn_implementation(ATTENTION)
    critic = ValueModel(backbone)
    torch.nn.init.normal_(critic.head.weight)
    batch = rows()
    together = ModelRows.of(batch, packed=packed)
    logits_BSV = _logits(model, together, temperature=1.0)
    values_BS = model_values(critic, together)
    for row, branches in enumerate(BRANCHES):
        at = 0
        for branch in branches:
            alone, end = rows_of(torch.tensor([branch])), at + len(branch)
            alone_SV = _logits(model, alone, temperature=1.0)[0]
            assert_within(logits_BSV[row, at : end - 1], alone_SV[:-1], bound=1e-5)
            assert_within(values_BS[row, at:end], model_values(critic, alone)[0], bound=1e-5)
            assert values_BS[row, at] == 0
            at = end
