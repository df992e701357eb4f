"""The centering of an objective is that of a plain loop over positions and tokens: loss and gradient. It takes the
expected score of the sampler out of the gradient."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algorithms.loss import ObjectiveLoss, centering
from asyncrl.algorithms.objective import Objective, Reinforce, centered_kernel
from asyncrl.algorithms.presets import PRESETS, resolve_objective
from asyncrl.algorithms.token_terms import LEAST_REST
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.errors import ConfigError, RunError

ALONE = Objective(surrogate=Reinforce(), centering="score")
WITH_CAP = PRESETS["score_centering"].objective
CAP = 2.0
BOTH = pytest.mark.parametrize("objective", [ALONE, WITH_CAP], ids=["alone", "with a cap"])


def by_loops(
    z: list[list[float]], q: list[list[float]], sampled: list[int], advantages: list[float], *, listed: int, cap: float
) -> tuple[float, list[list[float]]]:
    """Returns the loss of T tokens, and its derivatives by their logits [T, V]. With the cap 0, the kernel is 1."""

    def w(ratio: float) -> float:
        return min(ratio, cap) if cap else 1.0

    loss, slopes = 0.0, []
    for logits, of_q, y, advantage in zip(z, q, sampled, advantages, strict=True):
        total = math.fsum(math.exp(value) for value in logits)
        p = [math.exp(value) / total for value in logits]
        heads = sorted(range(len(p)), key=lambda v: -of_q[v])[:listed]
        rests = [max(1 - math.fsum(each[v] for v in heads), LEAST_REST) for each in (of_q, p)]
        rho = rests[0] / rests[1]
        alpha = rho * w(1 / rho) if listed < len(p) else 0.0
        centers = {v: of_q[v] * w(p[v] / of_q[v]) - alpha * p[v] for v in heads}
        own = w(p[y] / of_q[y])
        score = own * math.log(p[y]) - math.fsum(g * math.log(p[v]) for v, g in centers.items())
        loss -= advantage * score / len(z)
        slopes.append(
            [
                -advantage
                / len(z)
                * (own * ((v == y) - p[v]) - math.fsum(g * ((v == u) - p[v]) for u, g in centers.items()))
                for v in range(len(p))
            ]
        )
    return loss, slopes


def by_tensors(
    objective: Objective,
    z: list[list[float]],
    q: list[list[float]],
    sampled: list[int],
    advantages: list[float],
    *,
    listed: int,
) -> tuple[float, list[list[float]]]:
    """Computes the same with the loss of logits, for one row of T + 1 tokens."""
    tokens = len(z)
    log_q = torch.tensor(q, dtype=torch.float64).log()
    top_TL, ids_TL = log_q.topk(listed, dim=1)
    data = BatchedDataDict(
        input_ids=torch.tensor([[0, *sampled]]),
        token_mask=torch.tensor([[0.0, *[1.0] * tokens]]),
        sample_mask=torch.ones(1),
        advantages=torch.tensor([[0.0, *advantages]]),
        generation_logprobs=torch.cat([torch.zeros(1), log_q[torch.arange(tokens), sampled]]).unsqueeze(0),
        top_ids=torch.cat([torch.full((1, listed), -1), ids_TL]).int().unsqueeze(0),
        top_logprobs=torch.cat([torch.zeros(1, listed), top_TL]).unsqueeze(0),
    )
    logits = torch.tensor([[*z, z[0]]], dtype=torch.float64, requires_grad=True)
    # not the loss's call with logits, which computes log-probs in float32
    log_p = logits[:, :-1].log_softmax(-1)
    loss, _ = ObjectiveLoss(objective)(
        data=data,
        global_valid_seqs=torch.tensor(1.0),
        global_valid_toks=torch.tensor(float(tokens)),
        next_token_logprobs=log_p[0, torch.arange(tokens), sampled].unsqueeze(0),
        next_token_centering=centering(objective, logits, data) if objective.centering else None,
    )
    [slopes] = torch.autograd.grad(loss, logits)
    return float(loss.detach()), slopes[0, :-1].tolist()


@st.composite
def positions(draw: st.DrawFn) -> dict[str, object]:
    vocabulary, tokens = draw(st.integers(2, 7)), draw(st.integers(1, 3))
    number = st.floats(-4, 4, width=32)

    def rows() -> list[list[float]]:
        return [draw(st.lists(number, min_size=vocabulary, max_size=vocabulary)) for _ in range(tokens)]

    z, of_q = rows(), rows()
    q = []
    for row in of_q:
        # no two tokens are equally likely, so that both sides list the same ones
        odds = [math.exp(value) * (1 + place / 1e3) for place, value in enumerate(row)]
        q.append([value / math.fsum(odds) for value in odds])
    return {
        "z": z,
        "q": q,
        "sampled": [draw(st.integers(0, vocabulary - 1)) for _ in range(tokens)],
        "advantages": [draw(number) for _ in range(tokens)],
        "listed": draw(st.integers(1, vocabulary)),
    }


def distinct(q: list[list[float]]) -> bool:
    return all(abs(a - b) > 1e-9 for row in q for i, a in enumerate(row) for b in row[:i])


@BOTH
@given(drawn=positions())
def test_loss_and_gradient_are_those_of_a_plain_loop(objective: Objective, drawn: dict[str, object]) -> None:
    if not distinct(drawn["q"]):  # type: ignore[arg-type]
        return
    cap = 0.0 if objective is ALONE else CAP
    loss, slopes = by_loops(**drawn, cap=cap)  # type: ignore[arg-type]
    found, found_slopes = by_tensors(objective, **drawn)  # type: ignore[arg-type]
    assert found == pytest.approx(loss, abs=1e-6, rel=1e-6)
    for own, other in zip(found_slopes, slopes, strict=True):
        assert own == pytest.approx(other, abs=1e-6, rel=1e-6)


Q = [[0.5, 0.3, 0.15, 0.05]]
Z = [[0.3, -1.0, 0.2, 0.1]]


@BOTH
@pytest.mark.parametrize("listed", [1, 3, 4])
def test_it_is_reinforce_if_the_policy_is_the_sampler(objective: Objective, listed: int) -> None:
    z = [[math.log(value) for value in Q[0]]]
    found = by_tensors(objective, z, Q, [1], [2.0], listed=listed)[1][0]
    assert found == pytest.approx([-2.0 * ((v == 1) - Q[0][v]) for v in range(4)], abs=1e-9)


def expected_gradient(objective: Objective, z: list[list[float]], *, listed: int) -> list[float]:
    """Returns Σ_y q_y · ∇L(y) with the advantage 1 for each token y."""
    parts = [by_tensors(objective, z, Q, [y], [1.0], listed=listed)[1][0] for y in range(4)]
    return [math.fsum(q * part[v] for q, part in zip(Q[0], parts, strict=True)) for v in range(4)]


@BOTH
def test_the_expected_gradient_of_equal_advantages_is_0_if_all_tokens_are_listed(objective: Objective) -> None:
    assert expected_gradient(objective, Z, listed=4) == pytest.approx([0.0] * 4, abs=1e-7)
    uncentered = resolve_objective("score_centering", {"centering": None})
    if objective is ALONE:
        uncentered = Objective(surrogate=Reinforce())
    drift = expected_gradient(uncentered, Z, listed=4)
    assert max(map(abs, drift)) > 0.1, "without centering, the policy drifts although no token is better than another"
    assert max(map(abs, expected_gradient(objective, Z, listed=2))) > 1e-3, "the rest of q has not the shape of p here"


@BOTH
def test_it_is_0_with_few_listed_tokens_if_the_rest_of_the_sampler_has_the_policys_shape(objective: Objective) -> None:
    z = [[0.0, 0.7, math.log(0.6), math.log(0.2)]]  # 3 : 1, like the rest of q
    assert expected_gradient(objective, z, listed=2) == pytest.approx([0.0] * 4, abs=1e-7)


def test_a_sampler_that_is_nearly_sure_gives_finite_numbers() -> None:
    for q, z in product(([1 - 3e-12, 1e-12, 1e-12, 1e-12], Q[0]), ([0.0, -60.0, -60.0, -60.0], [-60.0, 0.0, 0.0, 0.0])):
        for objective in (ALONE, WITH_CAP):
            loss, slopes = by_tensors(objective, [z], [q], [1], [1.0], listed=2)
            assert math.isfinite(loss)
            assert all(map(math.isfinite, slopes[0]))


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"surrogate": {"kind": "clipped"}}, "surrogate: {kind: clipped}"),
        ({"surrogate": {"positive": {"hi": 3.0}}}, "the kernels Clamp("),
        ({"surrogate": {"positive": {"hi": math.inf}, "negative": {"hi": math.inf}}}, "the kernels Clamp("),
        ({"anchor": "proximal"}, "anchor: proximal and level: token"),
        ({"level": "sequence_sum"}, "anchor: behaviour and level: sequence_sum"),
        ({"weight": {"hi": 2.0}}, "weight"),
        ({"gates": [{"stat": "ratio", "hi": 2.0}]}, "gates"),
        ({"dropped": {"share": 0.1}}, "dropped"),
        ({"pre_clip": {"lo": 0.5, "hi": 2.0}}, "pre_clip"),
    ],
    ids=str,
)
def test_parts_with_which_the_expectation_is_another_one_are_refused(overrides: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_objective("score_centering", overrides)
    assert f"is not known with {named}" in str(caught.value)
    assert "or remove centering" in str(caught.value)
    resolve_objective("score_centering", {**overrides, "centering": None})


def test_another_value_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"centering.*the choices are score"):
        resolve_objective("score_centering", {"centering": "mean"})


def test_the_kernel_is_that_of_the_surrogate() -> None:
    assert centered_kernel(ALONE) == (1.0, 1.0)
    other = resolve_objective("score_centering", {"surrogate": {"positive": {"hi": 4.0}, "negative": {"hi": 4.0}}})
    assert (centered_kernel(WITH_CAP), centered_kernel(other)) == ((0.0, CAP), (0.0, 4.0))


def test_rows_without_the_columns_are_refused_by_name() -> None:
    loss = ObjectiveLoss(ALONE)
    assert {"top_ids", "top_logprobs"} <= loss.columns
    assert not {"top_ids", "top_logprobs"} & ObjectiveLoss(Objective(surrogate=Reinforce())).columns
    data = BatchedDataDict(input_ids=torch.tensor([[0, 1]]), token_mask=torch.ones(1, 2), sample_mask=torch.ones(1))
    data["advantages"] = torch.ones(1, 2)
    with pytest.raises(RunError, match=r"reads top_ids, top_logprobs, .*generator\.logprobs"):
        loss(torch.zeros(1, 2, 4), data, torch.tensor(1.0), torch.tensor(1.0))
    given = {"global_valid_seqs": torch.tensor(1.0), "global_valid_toks": torch.tensor(1.0)}
    with pytest.raises(RunError, match=r"reads top_ids, top_logprobs"):
        loss(data=data, next_token_logprobs=torch.zeros(1, 1), **given)
    data |= {"top_ids": torch.zeros(1, 2, 1).int(), "top_logprobs": torch.zeros(1, 2, 1)}
    with pytest.raises(TypeError, match="called without next_token_centering: pass what is missing, or logits"):
        loss(data=data, next_token_logprobs=torch.zeros(1, 1), **given)
    with pytest.raises(TypeError, match="called without next_token_logits: pass what is missing"):
        loss(data=data, **given)


def test_the_loss_of_logits_computes_the_centering_itself() -> None:
    data = BatchedDataDict(
        input_ids=torch.tensor([[0, 1]]),
        token_mask=torch.ones(1, 2),
        sample_mask=torch.ones(1),
        advantages=torch.ones(1, 2),
        top_ids=torch.tensor([[[-1, -1], [0, 2]]], dtype=torch.int32),
        top_logprobs=torch.tensor([[[0.0, 0.0], [math.log(0.5), math.log(0.15)]]]),
    )
    logits = torch.tensor([[Z[0], Z[0]]], requires_grad=True)
    loss, _ = ObjectiveLoss(ALONE)(logits, data, torch.tensor(1.0), torch.tensor(1.0))
    q = [[0.5, 0.1, 0.15, 0.1]]  # the masses of tokens that are not listed have no effect
    [slopes] = torch.autograd.grad(loss, logits)
    wanted, wanted_slopes = by_loops(Z, q, [1], [1.0], listed=2, cap=0.0)
    assert float(loss.detach()) == pytest.approx(wanted, abs=1e-6)
    assert slopes[0, 0].tolist() == pytest.approx(wanted_slopes[0], abs=1e-6)
