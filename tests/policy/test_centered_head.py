"""The head computes the centering of each token in chunks, like the loss of whole logits: values and gradients, also
among supports, and in rows that share passes."""

import math
from collections.abc import Sequence

import pytest
import torch
from rounding import GRADIENT, OUTPUT, assert_reordered, assert_within, spread
from test_micro_batch import model, outcome
from tiny_groups import TEMPERATURE, make_group, with_tops

from asyncrl.algorithms.loss import ObjectiveLoss, centering
from asyncrl.algorithms.objective import Objective, Reinforce
from asyncrl.algorithms.presets import PRESETS
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.specs import TOP_IDS, TOP_LOGPROBS
from asyncrl.policy.logprobs import Centered, head_logprobs

pytestmark = pytest.mark.slow

HEAD, TOKENS, LISTED = 200, 12, 5
SMALL = 64 * TOKENS  # four chunks
KERNELS = {"alone": (1.0, 1.0), "with a cap": (0.0, 2.0)}
BOTH = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
OBJECTIVES = {
    (1.0, 1.0): Objective(surrogate=Reinforce(), centering="score"),
    (0.0, 2.0): PRESETS["score_centering"].objective,
}


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Returns hidden states, head, targets, and most likely tokens, of which one token has none."""
    draw = torch.Generator().manual_seed(3)
    hidden_ND = torch.randn(TOKENS, 8, generator=draw, dtype=dtype, requires_grad=True)
    weight_VD = torch.randn(HEAD, 8, generator=draw, dtype=dtype, requires_grad=True)
    targets_N = torch.randint(HEAD, (TOKENS,), generator=draw)
    ids_NL = torch.rand(TOKENS, HEAD, generator=draw).argsort(1)[:, :LISTED]
    ids_NL[0, 3:], ids_NL[7] = -1, -1
    logprobs_NL = torch.randn(TOKENS, LISTED + 1, generator=draw).log_softmax(1)[:, :LISTED]
    return hidden_ND, weight_VD, targets_N, ids_NL, logprobs_NL.masked_fill(ids_NL < 0, 0.0)


def of_logits(
    logits_NV: torch.Tensor, ids_NL: torch.Tensor, logprobs_NL: torch.Tensor, kernel: tuple[float, float]
) -> torch.Tensor:
    """Returns the centering by the loss of whole logits, whose results a test compares with plain loops."""
    data = BatchedDataDict(
        {TOP_IDS: ids_NL.unsqueeze(1).expand(-1, 2, -1), TOP_LOGPROBS: logprobs_NL.unsqueeze(1).expand(-1, 2, -1)}
    )
    return centering(OBJECTIVES[kernel], logits_NV.unsqueeze(1).expand(-1, 2, -1), data)[:, 0]


def gradients(outputs: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    found = [each for each in outputs if each is not None]
    draw = torch.Generator().manual_seed(4)
    total = sum((torch.randn(each.shape, generator=draw) * each).sum() for each in found)
    return torch.autograd.grad(total, inputs)  # type: ignore[arg-type]


@BOTH
@pytest.mark.parametrize("with_entropy", [False, True])
def test_values_and_gradients_are_those_of_whole_logits(kernel: tuple[float, float], with_entropy: bool) -> None:
    hidden_ND, weight_VD, targets_N, ids_NL, logprobs_NL = inputs()
    centered = Centered(ids_NL=ids_NL, logprobs_NL=logprobs_NL, kernel=kernel)
    got = head_logprobs(
        hidden_ND,
        weight_VD,
        targets_N=targets_N,
        temperature=0.7,
        with_entropy=with_entropy,
        centered=centered,
        chunk_logits=SMALL,
    )
    exact = [each.detach().double().requires_grad_() for each in (hidden_ND, weight_VD)]
    log_p = (exact[0] @ exact[1].t() / 0.7).log_softmax(1)
    entropy_N = -(log_p.exp() * log_p).sum(1) if with_entropy else None
    want = (
        log_p.gather(1, targets_N.unsqueeze(1)).squeeze(1),
        entropy_N,
        of_logits(log_p, ids_NL, logprobs_NL, kernel),
    )
    assert got[2] is not None
    assert_reordered(got[2], want[2], spread=spread(8 + HEAD))
    assert float(got[2][7].detach()) == 0.0
    for one, other in zip(gradients(got, (hidden_ND, weight_VD)), gradients(want, exact), strict=True):
        assert_reordered(one, other, spread=spread(8 + HEAD))


@BOTH
def test_among_supports_they_are_those_of_the_logits_of_the_supports(kernel: tuple[float, float]) -> None:
    """The temperature leaves the policy some mass outside the listed tokens, whose rounding would else decide."""
    hidden_ND, weight_VD, targets_N, ids_NL, logprobs_NL = inputs()
    draw = torch.Generator().manual_seed(5)
    # the support has the target, the most likely tokens, two more tokens, and padding between them
    support_NK = torch.full((TOKENS, LISTED + 5), -1)
    for n in range(TOKENS):
        known = [*dict.fromkeys([int(targets_N[n]), *ids_NL[n][ids_NL[n] >= 0].tolist()])]
        more = [v for v in range(HEAD) if v not in known][:2]
        places = torch.randperm(LISTED + 5, generator=draw)[: len(known) + len(more)]
        support_NK[n, places] = torch.tensor([*known, *more])
    centered = Centered(ids_NL=ids_NL, logprobs_NL=logprobs_NL, kernel=kernel)
    got = head_logprobs(
        hidden_ND,
        weight_VD,
        targets_N=targets_N,
        support_NK=support_NK,
        temperature=3.0,
        centered=centered,
        chunk_logits=SMALL,
    )
    exact = [each.detach().double().requires_grad_() for each in (hidden_ND, weight_VD)]
    allowed_NV = torch.zeros(TOKENS, HEAD + 1, dtype=torch.bool).scatter_(1, support_NK % (HEAD + 1), True)[:, :-1]
    log_p = (exact[0] @ exact[1].t() / 3.0).masked_fill(~allowed_NV, -math.inf).log_softmax(1)
    want = (log_p.gather(1, targets_N.unsqueeze(1)).squeeze(1), None, of_logits(log_p, ids_NL, logprobs_NL, kernel))
    assert got[2] is not None
    assert_reordered(got[2], want[2], spread=spread(8 + HEAD))
    for one, other in zip(gradients(got, (hidden_ND, weight_VD)), gradients(want, exact), strict=True):
        assert_reordered(one, other, spread=spread(8 + HEAD))


@BOTH
def test_a_support_whose_tokens_are_all_listed_has_no_rest(kernel: tuple[float, float]) -> None:
    """Then the coefficient of each listed token is q · w(p/q)."""
    hidden_ND, weight_VD, targets_N, ids_NL, logprobs_NL = inputs()
    ids_NL[:, 0], ids_NL[7, 1:] = targets_N, -1
    logprobs_NL = logprobs_NL.masked_fill(ids_NL < 0, 0.0)
    centered = Centered(ids_NL=ids_NL, logprobs_NL=logprobs_NL, kernel=kernel)
    for support_NK in (ids_NL, ids_NL.flip(1)):
        *_, found_N = head_logprobs(hidden_ND, weight_VD, targets_N=targets_N, support_NK=support_NK, centered=centered)
        assert found_N is not None
        logits = (hidden_ND @ weight_VD.t()).gather(1, ids_NL.clamp(min=0)).masked_fill(ids_NL < 0, -math.inf)
        log_p, q = logits.log_softmax(1), logprobs_NL.exp().masked_fill(ids_NL < 0, 0.0)
        kept = log_p.exp().clamp(kernel[0] * q, kernel[1] * q)
        assert_reordered(found_N, torch.where(ids_NL >= 0, kept * log_p, 0.0).sum(1), spread=spread(8 + LISTED))


@torch.no_grad()
@pytest.mark.parametrize("columns", ["all", "none", "one"])
def test_padding_and_order_of_the_listed_tokens_have_no_effect(columns: str) -> None:
    hidden_ND, weight_VD, targets_N, ids_NL, logprobs_NL = inputs()
    order = {"all": [4, 2, 0, 1, 3], "none": [0, 1, 2, 3, 4], "one": [1, 0, 2, 3, 4]}[columns]
    padded = [
        torch.nn.functional.pad(each[:, order], (1, 2), value=fill) for each, fill in ((ids_NL, -1), (logprobs_NL, 9.0))
    ]
    one, other = (
        head_logprobs(
            hidden_ND, weight_VD, targets_N=targets_N,
            centered=Centered(ids_NL=ids, logprobs_NL=logprobs, kernel=(0.0, 2.0)),
        )[2]
        for ids, logprobs in ((ids_NL, logprobs_NL), padded)
    )  # fmt: skip
    assert one is not None
    assert other is not None
    assert_within(other, one, bound=OUTPUT)


@torch.no_grad()
def test_a_listed_token_outside_the_support_is_not_taken_for_another_one() -> None:
    hidden_ND, weight_VD, _, _, logprobs_NL = inputs()
    ids_NL = torch.arange(10, 10 + LISTED).expand(TOKENS, -1)
    support_NK = torch.cat([ids_NL, torch.tensor([[20, 30]]).expand(TOKENS, -1)], dim=1)
    found = []
    for outside in ([], [15], [199]):  # between two tokens of the support, and above all of them
        more = (TOKENS, len(outside))
        centered = Centered(
            ids_NL=torch.cat([ids_NL, torch.tensor(outside, dtype=torch.int64).expand(more)], dim=1),
            logprobs_NL=torch.cat([logprobs_NL, torch.full(more, -50.0)], dim=1),
            kernel=(0.0, 2.0),
        )
        *_, each = head_logprobs(hidden_ND, weight_VD, targets_N=ids_NL[:, 0], support_NK=support_NK, centered=centered)
        assert each is not None
        found.append(each)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_micro_batch_has_the_loss_and_gradient_of_whole_logits_also_if_it_is_packed() -> None:
    data = with_tops(make_group(0))
    data["advantages"] = data["advantages"].unsqueeze(1).expand_as(data["input_ids"])
    loss_fn = ObjectiveLoss(PRESETS["score_centering"].objective)
    network = model()
    logits = network(input_ids=data["input_ids"]).logits / TEMPERATURE
    counts = data["sample_mask"].sum(), (data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(1)).sum()
    wanted, _ = loss_fn(logits, data, *counts)
    slopes = torch.autograd.grad(wanted, list(network.parameters()))
    found = outcome(loss_fn, data)
    assert found.loss == pytest.approx(float(wanted.detach()), rel=1e-5)
    for one, other in zip(torch.autograd.grad(found.differentiable, list(network.parameters())), slopes, strict=True):
        assert_within(one, other, bound=GRADIENT)
