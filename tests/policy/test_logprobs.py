"""Compares the chunked head with full logits: values, gradients, and its use of memory."""

import pytest
import torch
from rounding import GRADIENT, OUTPUT, assert_reordered, spread
from tiny_groups import rows_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    GPTJConfig,
    GPTJForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from asyncrl.errors import ConfigError
from asyncrl.policy.logprobs import head_logprobs, model_logprobs, rounded_weights

pytestmark = pytest.mark.slow

VOCABULARY = 200
BFLOAT16 = 2.0**-8  # the largest relative error of rounding to bfloat16
SMALL = 64 * 12  # a chunk of the smallest width for twelve tokens; of the four chunks, the last is narrower


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_ND = torch.randn(12, 8, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    weight_VD = torch.randn(VOCABULARY, 8, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    # targets at both ends of the vocabulary and of a chunk
    targets_N = torch.randint(VOCABULARY, (12,), generator=generator)
    targets_N[:4] = torch.tensor([0, 63, 64, VOCABULARY - 1])
    return hidden_ND, weight_VD, targets_N


def full(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logp = logits.log_softmax(dim=-1)
    return logp.gather(-1, targets.unsqueeze(-1)).squeeze(-1), -(logp.exp() * logp).sum(dim=-1)


@pytest.mark.parametrize("chunk_logits", [1, SMALL, 10**6])
def test_values_and_gradients_are_those_of_full_logits_however_many_chunks(chunk_logits: int) -> None:
    hidden_ND, weight_VD, targets_N = inputs(torch.float64)
    upstream_2N = torch.randn(2, len(targets_N), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    want = torch.stack(full(hidden_ND @ weight_VD.t() / 0.7, targets_N))
    want_gradients = torch.autograd.grad((want * upstream_2N).sum(), (hidden_ND, weight_VD))
    logprobs_N, entropy_N, _ = head_logprobs(
        hidden_ND, weight_VD, targets_N=targets_N, temperature=0.7, with_entropy=True, chunk_logits=chunk_logits
    )
    assert entropy_N is not None
    got = torch.stack([logprobs_N, entropy_N])
    got_gradients = torch.autograd.grad((got * upstream_2N).sum(), (hidden_ND, weight_VD))
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(got_gradients, want_gradients)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_the_gradient_is_the_derivative(with_entropy: bool) -> None:
    # finite differences need two passes for each element, so the inputs are small and give only two chunks
    hidden_ND = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    weight_VD = torch.randn(70, 2, dtype=torch.float64, requires_grad=True)
    targets_N = torch.tensor([0, 63, 69])

    def outputs(hidden_ND: torch.Tensor, weight_VD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pair = head_logprobs(
            hidden_ND,
            weight_VD,
            targets_N=targets_N,
            temperature=1.3,
            with_entropy=with_entropy,
            chunk_logits=64 * 3 * (1 + with_entropy),
        )
        return tuple(values for values in pair if values is not None)

    assert torch.autograd.gradcheck(outputs, (hidden_ND, weight_VD))


def test_the_entropy_alone_has_its_gradient() -> None:
    hidden_ND, weight_VD, targets_N = inputs(torch.float64)
    _, want_N = full(hidden_ND @ weight_VD.t(), targets_N)
    _, got_N, _ = head_logprobs(hidden_ND, weight_VD, targets_N=targets_N, with_entropy=True, chunk_logits=SMALL)
    assert got_N is not None
    want = torch.autograd.grad(want_N.sum(), (hidden_ND, weight_VD))
    torch.testing.assert_close(torch.autograd.grad(got_N.sum(), (hidden_ND, weight_VD)), want)


def test_a_frozen_input_gets_no_gradient_and_the_other_the_same_one() -> None:
    hidden_ND, weight_VD, targets_N = inputs(torch.float64)
    want = torch.autograd.grad(
        head_logprobs(hidden_ND, weight_VD, targets_N=targets_N)[0].sum(), (hidden_ND, weight_VD)
    )
    frozen_weight, _, _ = head_logprobs(hidden_ND, weight_VD.detach(), targets_N=targets_N)
    frozen_hidden, _, _ = head_logprobs(hidden_ND.detach(), weight_VD, targets_N=targets_N)
    torch.testing.assert_close(torch.autograd.grad(frozen_weight.sum(), hidden_ND)[0], want[0])
    torch.testing.assert_close(torch.autograd.grad(frozen_hidden.sum(), weight_VD)[0], want[1])


def test_huge_logits_of_both_signs_stay_finite() -> None:
    hidden_ND, weight_VD, targets_N = inputs(torch.float32)
    logprobs_N, entropy_N, _ = head_logprobs(
        hidden_ND * 1000, weight_VD, targets_N=targets_N, with_entropy=True, chunk_logits=SMALL
    )
    assert entropy_N is not None
    want_N, _ = full(hidden_ND.double() * 1000 @ weight_VD.double().t(), targets_N)
    # two roundings count: the products of a logit, and the log-sum of exponentials; log-probs are about as large as
    # logits
    assert_reordered(logprobs_N, want_N.float(), spread=spread(8 + VOCABULARY))
    gradients = torch.autograd.grad(logprobs_N.sum() + entropy_N.sum(), (hidden_ND, weight_VD))
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    assert bool((entropy_N >= 0).all())


def test_bfloat16_inputs_are_multiplied_in_float32_and_rounded_once_on_a_cpu_without_bfloat16() -> None:
    hidden_ND, weight_VD, targets_N = inputs(torch.bfloat16)
    exact = [tensor.detach().float().requires_grad_() for tensor in (hidden_ND, weight_VD)]
    want_N, _ = full(exact[0] @ exact[1].t(), targets_N)
    got_N, _, _ = head_logprobs(hidden_ND, weight_VD, targets_N=targets_N, chunk_logits=SMALL, bfloat16_products=False)
    assert got_N.dtype is torch.float32
    # products that were rounded to bfloat16 would have an error of 1e-2
    assert_reordered(got_N, want_N, spread=spread(8 + VOCABULARY))
    got = torch.autograd.grad(got_N.sum(), (hidden_ND, weight_VD))
    want = torch.autograd.grad(want_N.sum(), exact)
    for got_part, want_part in zip(got, want, strict=True):
        assert got_part.dtype is torch.bfloat16
        # bfloat16 rounds a value by at most 2⁻⁸ of it, and the value is a float32 sum over the vocabulary
        rounding = spread(8 + 2 * VOCABULARY) * float(want_part.abs().max())
        torch.testing.assert_close(got_part.float(), want_part, rtol=2**-8, atol=rounding)


def large_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns inputs in bfloat16 with logits of about 100. Rounded to bfloat16, they have errors of up to 0.25."""
    hidden_ND, weight_VD, targets_N = inputs(torch.bfloat16)
    with torch.no_grad():
        hidden_ND[:, 0], weight_VD[:, 0] = 10, 10
    return hidden_ND, weight_VD, targets_N


@pytest.mark.parametrize("with_entropy", [False, True])
def test_bfloat16_products_round_only_what_is_left_after_a_number_near_the_result_is_subtracted(
    with_entropy: bool,
) -> None:
    hidden_ND, weight_VD, targets_N = large_inputs()
    hidden, weight = (tensor.detach().double().requires_grad_() for tensor in (hidden_ND, weight_VD))
    logits_NV = hidden @ weight.t() / 0.7
    want = torch.stack(full(logits_NV, targets_N)[: 1 + with_entropy])
    pair = head_logprobs(
        hidden_ND,
        weight_VD,
        targets_N=targets_N,
        temperature=0.7,
        with_entropy=with_entropy,
        chunk_logits=SMALL,
        bfloat16_products=True,
    )
    got = torch.stack([values for values in pair if values is not None])
    assert got.dtype is torch.float32

    # The target's logit is subtracted after it was rounded twice: its sum, and its division by the temperature.
    logp_NV = logits_NV.log_softmax(dim=1).detach()
    probs_NV = logp_NV.exp()
    target_N1 = logits_NV.detach().gather(1, targets_N.unsqueeze(1))
    rounding_NV = BFLOAT16 * ((logits_NV.detach() - target_N1).abs() + 4 * BFLOAT16 * target_N1.abs())
    logprob_error_N = 1.1 * (probs_NV * rounding_NV).sum(dim=1) + 1e-5
    assert float(logprob_error_N.mean()) < 0.05
    assert bool(((got[0] - want[0]).abs() <= logprob_error_N).all())
    # the entropy's derivative is −p · (log p + H)
    if with_entropy:
        slope_NV = (probs_NV * (logp_NV + want[1].detach().unsqueeze(1))).abs()
        entropy_error_N = 1.2 * (slope_NV * rounding_NV).sum(dim=1) + 1e-4
        assert bool(((got[1] - want[1]).abs() <= entropy_error_N).all())


@pytest.mark.parametrize("trains_entropy", [False, True])
def test_gradients_from_bfloat16_products_are_those_of_full_logits_within_five_percent(trains_entropy: bool) -> None:
    hidden_ND, weight_VD, targets_N = large_inputs()
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden_ND, weight_VD)]
    upstream_2N = torch.randn(2, len(targets_N), generator=torch.Generator().manual_seed(1))
    upstream_2N[1] *= trains_entropy
    want_2N = torch.stack(full(exact[0] @ exact[1].t() / 0.7, targets_N))
    want = torch.autograd.grad((want_2N * upstream_2N).sum(), exact)
    logprobs_N, entropy_N, _ = head_logprobs(
        hidden_ND,
        weight_VD,
        targets_N=targets_N,
        temperature=0.7,
        with_entropy=True,
        chunk_logits=SMALL,
        bfloat16_products=True,
    )
    assert entropy_N is not None
    got_2N = torch.stack([logprobs_N, entropy_N])
    got = torch.autograd.grad((got_2N * upstream_2N).sum(), (hidden_ND, weight_VD))
    for got_part, want_part in zip(got, want, strict=True):
        assert got_part.dtype is torch.bfloat16
        # measured: at most 3.4 %; logits that are rounded to bfloat16 give 7.4 % to 8.5 %
        assert float((got_part.double() - want_part).norm()) < 0.05 * float(want_part.norm())


class Float32Sizes(TorchDispatchMode):
    """Records the number of elements of the largest float32 tensor that an operation creates."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.dtype is torch.float32 and "view" not in str(func):
                self.largest = max(self.largest, tensor.numel())
        return result


@pytest.mark.parametrize(
    ("dtype", "has_products", "trains_entropy", "float32_numbers_per_logit"),
    [
        (torch.float32, False, False, 1),
        (torch.float32, False, True, 2),
        (torch.bfloat16, False, False, 1),
        (torch.bfloat16, False, True, 2),
        (torch.bfloat16, True, False, 1.5),
        (torch.bfloat16, True, True, 2.5),
    ],
)
def test_a_chunk_is_as_large_as_its_buffers_may_be(
    dtype: torch.dtype,
    has_products: bool,
    trains_entropy: bool,
    float32_numbers_per_logit: float,
) -> None:
    hidden_ND = torch.randn(100, 2, dtype=dtype, requires_grad=True)
    weight_VD = torch.randn(2000, 2, dtype=dtype, requires_grad=True)
    targets_N = torch.randint(2000, (100,))
    limit = 100 * 64 * 30
    with Float32Sizes() as sizes:
        logprobs_N, entropy_N, _ = head_logprobs(
            hidden_ND,
            weight_VD,
            targets_N=targets_N,
            with_entropy=trains_entropy,
            chunk_logits=limit,
            bfloat16_products=has_products,
        )
        loss = logprobs_N.sum() if entropy_N is None else logprobs_N.sum() + entropy_N.sum()
        torch.autograd.backward(loss)
    # the buffers are: logits, probabilities if the entropy is trained, and operands of half the size in bfloat16
    assert sizes.largest == limit / float32_numbers_per_logit


@pytest.mark.parametrize("has_products", [False, True])
def test_a_weight_in_bfloat16_and_its_gradient_are_never_whole_in_float32(has_products: bool) -> None:
    hidden_ND = torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True)
    weight_VD = torch.randn(2000, 32, dtype=torch.bfloat16, requires_grad=True)
    with Float32Sizes() as sizes:
        logprobs_N, _, _ = head_logprobs(
            hidden_ND,
            weight_VD,
            targets_N=torch.randint(2000, (16,)),
            chunk_logits=256 * 16,
            bfloat16_products=has_products,
        )
        logprobs_N.sum().backward()
    assert sizes.largest <= 256 * 32


def test_only_the_inputs_and_two_numbers_a_token_wait_for_the_backward() -> None:
    hidden_ND, weight_VD, targets_N = inputs(torch.float32)
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        head_logprobs(hidden_ND, weight_VD, targets_N=targets_N, with_entropy=True, chunk_logits=SMALL)
    shapes = sorted(tuple(tensor.shape) for tensor in saved)
    assert shapes == sorted([hidden_ND.shape, weight_VD.shape, targets_N.shape, targets_N.shape, targets_N.shape])


# -- inside a model ----------------------------------------------------------------------------------------------------


def tiny_qwen3(*, tied: bool) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=tied,
        initializer_range=0.5,
    )
    model = Qwen3ForCausalLM(config)
    return model.train(False)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_gives_the_log_probs_and_every_gradient_of_its_full_logits(
    tied: bool, temperature: float, with_entropy: bool
) -> None:
    model = tiny_qwen3(tied=tied)
    input_ids_BS = torch.randint(1, VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(2))
    weights_BT = torch.randn(3, 6, generator=torch.Generator().manual_seed(3))
    input_ids_BS[1, 4:], weights_BT[1, 3:] = 0, 0.0  # makes the second row a padded one
    logits_BTV = model(input_ids=input_ids_BS, use_cache=False).logits[:, :-1].float() / temperature
    want_logprobs_BT, want_entropy_BT = full(logits_BTV, input_ids_BS[:, 1:])
    parameters = dict(model.named_parameters())
    want_loss = (weights_BT * want_logprobs_BT).sum()
    if with_entropy:
        want_loss = want_loss + 0.1 * (weights_BT * want_entropy_BT).sum()
    want = torch.autograd.grad(want_loss, list(parameters.values()))

    logprobs_BT, entropy_BT, _ = model_logprobs(
        model, rows_of(input_ids_BS), temperature=temperature, with_entropy=with_entropy, chunk_logits=64 * 18
    )
    assert_reordered(logprobs_BT, want_logprobs_BT, spread=OUTPUT)
    loss = (weights_BT * logprobs_BT).sum()
    if with_entropy:
        assert entropy_BT is not None
        assert_reordered(entropy_BT, want_entropy_BT, spread=OUTPUT)
        loss = loss + 0.1 * (weights_BT * entropy_BT).sum()
    else:
        assert entropy_BT is None
    got = torch.autograd.grad(loss, list(parameters.values()))
    for name, got_part, want_part in zip(parameters, got, want, strict=True):
        assert bool(want_part.any()), name
        assert_reordered(got_part, want_part, spread=GRADIENT, name=name)


def test_an_entropy_that_is_only_reported_changes_no_gradient() -> None:
    model = tiny_qwen3(tied=True)
    input_ids_BS = torch.randint(1, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(2))
    gradients = [
        torch.autograd.grad(
            model_logprobs(model, rows_of(input_ids_BS), temperature=1.0, with_entropy=with_entropy)[0].sum(),
            list(model.parameters()),
        )
        for with_entropy in (False, True)
    ]
    for reported, plain in zip(gradients[1], gradients[0], strict=True):
        assert_reordered(reported, plain, spread=GRADIENT)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_computes_with_rounded_weights_in_its_own_precision_and_has_its_own_afterwards(tied: bool) -> None:
    model, rounded = tiny_qwen3(tied=tied), tiny_qwen3(tied=tied)
    for parameter in rounded.parameters():
        parameter.data = parameter.detach().to(torch.bfloat16).to(parameter.dtype)
    rows = rows_of(torch.randint(1, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(2)))

    def scored(of: PreTrainedModel) -> torch.Tensor:
        return model_logprobs(of, rows, temperature=1.0, with_entropy=False)[0]

    own = scored(model)
    with rounded_weights(model, torch.bfloat16):
        assert torch.equal(scored(model), scored(rounded))
        assert not torch.equal(scored(model), own)
    assert torch.equal(scored(model), own)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_pass_with_rounded_weights_that_fails_leaves_the_weights() -> None:
    model = tiny_qwen3(tied=False)
    before = dict(model.named_parameters())
    with pytest.raises(IndexError), rounded_weights(model, torch.bfloat16):
        model_logprobs(model, rows_of(torch.full((1, 3), VOCABULARY + 1)), temperature=1.0, with_entropy=False)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(after[name] is parameter for name, parameter in before.items())


def test_padding_does_not_move_the_log_probs_before_it() -> None:
    model = tiny_qwen3(tied=True)
    input_ids_BS = torch.randint(1, VOCABULARY, (1, 5), generator=torch.Generator().manual_seed(2))
    alone_BT, _, _ = model_logprobs(model, rows_of(input_ids_BS), temperature=1.0, with_entropy=False)
    padded_BS = torch.nn.functional.pad(input_ids_BS, (0, 3))
    padded_BT, _, _ = model_logprobs(model, rows_of(padded_BS), temperature=1.0, with_entropy=False)
    assert_reordered(padded_BT[:, :4], alone_BT, spread=OUTPUT)


def test_a_row_of_one_token_has_no_next_token() -> None:
    logprobs_BT, entropy_BT, _ = model_logprobs(
        tiny_qwen3(tied=True), rows_of(torch.ones(2, 1, dtype=torch.long)), temperature=1.0, with_entropy=True
    )
    assert entropy_BT is not None
    assert logprobs_BT.shape == entropy_BT.shape == (2, 0)
    logprobs_BT.sum().backward()


@torch.no_grad()
def test_the_model_has_its_own_head_again_after_the_call_and_after_a_failed_one() -> None:
    model = tiny_qwen3(tied=False)
    input_ids_BS = torch.ones(1, 4, dtype=torch.long)
    before = model(input_ids=input_ids_BS).logits
    model_logprobs(model, rows_of(input_ids_BS), temperature=1.0, with_entropy=False)
    assert torch.equal(model(input_ids=input_ids_BS).logits, before)
    with pytest.raises(IndexError):
        model_logprobs(model, rows_of(torch.full((1, 4), VOCABULARY)), temperature=1.0, with_entropy=False)
    assert torch.equal(model(input_ids=input_ids_BS).logits, before)
    assert "forward" not in model.lm_head.__dict__


def test_a_forward_that_another_library_put_on_the_head_is_there_again() -> None:
    model = tiny_qwen3(tied=False)
    wrapped = model.lm_head.forward
    model.lm_head.forward = wrapped
    model_logprobs(model, rows_of(torch.ones(1, 4, dtype=torch.long)), temperature=1.0, with_entropy=False)
    assert model.lm_head.__dict__["forward"] is wrapped


def refused(model: PreTrainedModel) -> str:
    with pytest.raises(ConfigError) as failure:
        model_logprobs(model, rows_of(torch.ones(1, 4, dtype=torch.long)), temperature=1.0, with_entropy=False)
    assert "model.path" in str(failure.value)
    return str(failure.value)


def test_a_head_with_a_bias_is_refused() -> None:
    config = GPTJConfig(vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=1, n_head=2, rotary_dim=4)
    assert "with a bias" in refused(GPTJForCausalLM(config))


@pytest.mark.parametrize(
    ("key", "value"), [("final_logit_softcapping", 30.0), ("logit_scale", 0.0625), ("logits_scaling", 8.0)]
)
def test_a_config_that_changes_logits_after_the_head_is_refused_by_the_name_of_its_key(key: str, value: float) -> None:
    model = tiny_qwen3(tied=True)
    setattr(model.config, key, value)
    assert f"{key} = {value}" in refused(model)


def test_neutral_values_of_such_keys_are_no_reason_to_refuse() -> None:
    model = tiny_qwen3(tied=True)
    model.config.final_logit_softcapping, model.config.logit_scale = None, 1.0
    model_logprobs(model, rows_of(torch.ones(1, 4, dtype=torch.long)), temperature=1.0, with_entropy=False)


def test_a_model_that_changes_its_logits_is_refused_whatever_its_config_calls_it() -> None:
    config = CohereConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=0,
    )
    model = CohereForCausalLM(config)
    model.config.logit_scale = None  # the module keeps its own copy of the value
    assert "changes its logits" in refused(model)


class LastPositionOnly(Qwen3ForCausalLM):
    def forward(self, input_ids: torch.Tensor, **kwargs: object):  # type: ignore[no-untyped-def]
        return super().forward(input_ids=input_ids, logits_to_keep=1, **kwargs)


def test_a_head_that_does_not_see_every_position_is_refused() -> None:
    model = tiny_qwen3(tied=True)
    model.__class__ = LastPositionOnly
    assert "(1, 1, 16)" in refused(model)
