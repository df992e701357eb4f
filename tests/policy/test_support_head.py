"""Log-probs over supports are those of a softmax over the logits of the supports: values and gradients."""

import pytest
import torch
from rounding import GRADIENT, OUTPUT, assert_reordered, spread
from tiny_groups import rows_of
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from asyncrl.data.specs import SUPPORT
from asyncrl.policy.logprobs import head_logprobs, model_logprobs
from asyncrl.ranks.packed import ATTENTION, PackedRows

pytestmark = pytest.mark.slow

VOCABULARY = 200
TOKENS, TOP_K = 12, 5
SMALL = 64 * TOKENS  # a chunk of the smallest width; of the four chunks, the last is narrower
TOKEN_WITHOUT_SUPPORT = 7


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_ND = torch.randn(TOKENS, 8, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    weight_VD = torch.randn(VOCABULARY, 8, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    return hidden_ND, weight_VD


def supports(*, of: torch.Tensor | None = None, vocabulary: int = VOCABULARY) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns targets [N] (or `of`) and supports [N, K] with 1 to K tokens, the target at any place. One token has no
    support."""
    generator = torch.Generator().manual_seed(1)
    targets_N = torch.randint(vocabulary, (TOKENS,), generator=generator) if of is None else of
    if of is None:
        targets_N[:4] = torch.tensor([0, 63, 64, vocabulary - 1])  # both ends of the vocabulary and of a chunk
    support_NK = torch.full((len(targets_N), TOP_K), -1, dtype=torch.int32)
    for token, target in enumerate(targets_N.tolist()):
        others = [each for each in torch.randperm(vocabulary, generator=generator).tolist() if each != target]
        size = 1 + token % TOP_K
        chosen = [target, *others[: size - 1]]
        support_NK[token, :size] = torch.tensor(chosen)[torch.randperm(size, generator=generator)].int()
    if len(targets_N) > TOKEN_WITHOUT_SUPPORT:
        support_NK[TOKEN_WITHOUT_SUPPORT] = -1
    return targets_N, support_NK


def plain(logits: torch.Tensor, targets_N: torch.Tensor, support_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the same one token after the other, with autograd's gradients."""
    logprobs, entropies = [], []
    for token, target in enumerate(targets_N.tolist()):
        ids = [each for each in support_NK[token].tolist() if each >= 0]
        if not ids:
            logprobs.append(logits[token].sum() * 0.0)
            entropies.append(logits[token].sum() * 0.0)
            continue
        logp = logits[token][ids].log_softmax(dim=0)
        logprobs.append(logp[ids.index(target)])
        entropies.append(-(logp.exp() * logp).sum())
    return torch.stack(logprobs), torch.stack(entropies)


@pytest.mark.parametrize("chunk_logits", [1, SMALL, 10**6])
def test_values_and_gradients_are_those_of_the_supports_logits(chunk_logits: int) -> None:
    hidden_ND, weight_VD = inputs(torch.float64)
    targets_N, support_NK = supports()
    upstream_2N = torch.randn(2, TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    want = torch.stack(plain(hidden_ND @ weight_VD.t() / 0.7, targets_N, support_NK))
    want_gradients = torch.autograd.grad((want * upstream_2N).sum(), (hidden_ND, weight_VD))
    logprobs_N, entropy_N, _ = head_logprobs(
        hidden_ND,
        weight_VD,
        targets_N=targets_N,
        support_NK=support_NK,
        temperature=0.7,
        with_entropy=True,
        chunk_logits=chunk_logits,
    )
    assert entropy_N is not None
    got = torch.stack([logprobs_N, entropy_N])
    got_gradients = torch.autograd.grad((got * upstream_2N).sum(), (hidden_ND, weight_VD))
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(got_gradients, want_gradients)
    assert want_gradients[1].any(dim=1).sum() < VOCABULARY, "some tokens are in no support"


@pytest.mark.parametrize("with_entropy", [False, True])
def test_the_gradient_is_the_derivative(with_entropy: bool) -> None:
    hidden_ND = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    weight_VD = torch.randn(70, 2, dtype=torch.float64, requires_grad=True)
    targets_N, support_NK = torch.tensor([0, 63, 69]), torch.tensor([[0, 1, 69], [63, 0, -1], [-1, -1, 69]])

    def outputs(hidden_ND: torch.Tensor, weight_VD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pair = head_logprobs(
            hidden_ND,
            weight_VD,
            targets_N=targets_N,
            support_NK=support_NK,
            temperature=1.3,
            with_entropy=with_entropy,
            chunk_logits=1,
        )
        return tuple(each for each in pair if each is not None)

    assert torch.autograd.gradcheck(outputs, (hidden_ND, weight_VD))


def test_a_token_without_a_support_is_0_and_moves_no_weight() -> None:
    hidden_ND, weight_VD = inputs(torch.float32)
    targets_N, support_NK = supports()
    logprobs_N, entropy_N, _ = head_logprobs(
        hidden_ND, weight_VD, targets_N=targets_N, support_NK=support_NK, with_entropy=True
    )
    assert entropy_N is not None
    own = logprobs_N[TOKEN_WITHOUT_SUPPORT] + entropy_N[TOKEN_WITHOUT_SUPPORT]
    assert own.item() == 0.0
    for gradient in torch.autograd.grad(own, (hidden_ND, weight_VD)):
        assert not gradient.any()


def test_a_support_of_all_tokens_is_the_whole_softmax() -> None:
    hidden_ND, weight_VD = inputs(torch.float32)
    targets_N, _ = supports()
    every_NK = torch.arange(VOCABULARY).expand(TOKENS, -1)
    want = head_logprobs(hidden_ND, weight_VD, targets_N=targets_N, with_entropy=True)
    got = head_logprobs(hidden_ND, weight_VD, targets_N=targets_N, support_NK=every_NK, with_entropy=True)
    for got_N, want_N in zip(got[:2], want[:2], strict=True):
        assert got_N is not None
        assert want_N is not None
        assert_reordered(got_N, want_N, spread=spread(8 + VOCABULARY))


@pytest.mark.parametrize("has_products", [False, True])
def test_bfloat16_inputs_give_float32_values_and_gradients_of_their_own_dtype(
    has_products: bool,
) -> None:
    hidden_ND, weight_VD = inputs(torch.bfloat16)
    targets_N, support_NK = supports()
    exact = [tensor.detach().float().requires_grad_() for tensor in (hidden_ND, weight_VD)]
    want_N, _ = plain(exact[0] @ exact[1].t(), targets_N, support_NK)
    got_N, _, _ = head_logprobs(
        hidden_ND, weight_VD, targets_N=targets_N, support_NK=support_NK, bfloat16_products=has_products
    )
    assert got_N.dtype is torch.float32
    assert_reordered(got_N, want_N, spread=spread(8 + VOCABULARY))
    want = torch.autograd.grad(want_N.sum(), exact)
    got = torch.autograd.grad(got_N.sum(), (hidden_ND, weight_VD))
    for got_part, want_part in zip(got, want, strict=True):
        assert got_part.dtype is torch.bfloat16
        torch.testing.assert_close(got_part.float(), want_part, rtol=2**-7, atol=2**-7)


LENGTHS = (8, 8, 3, 6)
START = 2


def model() -> PreTrainedModel:
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=16, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2,
    )  # fmt: skip
    made: PreTrainedModel = Qwen3ForCausalLM(config).double().eval()
    return made


def rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns rows of one group, their lengths and supports. The first two rows have the same first sampled tokens, and
    another support at the second of them."""
    tokens_BS = torch.randint(50, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(0))
    tokens_BS[:, :START] = torch.tensor([4, 5])
    tokens_BS[1, : START + 3] = tokens_BS[0, : START + 3]
    _, support_NK = supports(of=tokens_BS.flatten(), vocabulary=50)
    support_BSK = support_NK.view(*tokens_BS.shape, TOP_K).clone()
    support_BSK[1, START] = support_BSK[0, START]
    support_BSK[:, :START] = -1
    for row, length in enumerate(LENGTHS):
        support_BSK[row, length:] = -1
        for place in range(START, length):
            if (support_BSK[row, place] < 0).all():
                support_BSK[row, place, 0] = tokens_BS[row, place].int()
    assert not torch.equal(support_BSK[0, START + 1], support_BSK[1, START + 1])
    return tokens_BS, torch.tensor(LENGTHS), support_BSK


@pytest.mark.parametrize("packed", [False, True])
def test_a_model_gives_them_for_padded_and_packed_rows(packed: bool) -> None:
    tokens_BS, lengths_B, support_BSK = rows()
    made = model()
    logits_BTV = made(input_ids=tokens_BS, use_cache=False).logits[:, :-1] / 0.8
    want_N, want_entropy_N = plain(
        logits_BTV.flatten(0, 1), tokens_BS[:, 1:].flatten(), support_BSK[:, 1:].flatten(0, 1)
    )
    if packed:
        made.set_attn_implementation(ATTENTION)
    logprobs_BT, entropy_BT, _ = model_logprobs(
        made,
        rows_of(tokens_BS, packed_lengths_B=lengths_B if packed else None, support_BSK=support_BSK),
        temperature=0.8,
        with_entropy=True,
        chunk_logits=64 * 12,
    )
    assert entropy_BT is not None
    assert_reordered(logprobs_BT.flatten(), want_N, spread=OUTPUT)
    assert_reordered(entropy_BT.flatten(), want_entropy_N, spread=OUTPUT)
    weights_N = torch.randn(len(want_N), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    parameters = list(made.parameters())
    want = torch.autograd.grad(((want_N + want_entropy_N) * weights_N).sum(), parameters)
    got = torch.autograd.grad(((logprobs_BT + entropy_BT).flatten() * weights_N).sum(), parameters)
    for got_part, want_part in zip(got, want, strict=True):
        assert_reordered(got_part, want_part, spread=GRADIENT)


def test_packed_rows_share_what_has_the_same_support() -> None:
    tokens_BS, lengths_B, support_BSK = rows()
    shared = len(tokens_BS.flatten()) - sum(8 - length for length in LENGTHS)
    with_supports = PackedRows.of(tokens_BS, lengths_B=lengths_B, wide={SUPPORT: support_BSK})
    assert with_supports.wide[SUPPORT].shape == (with_supports.input_ids_1N.shape[1], TOP_K)
    without = PackedRows.of(tokens_BS, lengths_B=lengths_B)
    assert without.input_ids_1N.shape[1] < with_supports.input_ids_1N.shape[1] < shared
