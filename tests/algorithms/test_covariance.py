"""Choices of tokens by covariance: the presets kl_cov and clip_cov are the plain loops of 2505.22617 in float64,
however a step is cut."""

import math
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from asyncrl.algorithms.calibration import calibrated
from asyncrl.algorithms.loss import ObjectiveLoss
from asyncrl.algorithms.objective import ByCovariance, Objective, Penalty, Reinforce
from asyncrl.algorithms.presets import PRESETS, resolve_objective
from asyncrl.algorithms.step_statistics import StepTokens
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.errors import ConfigError
from asyncrl.policy.step_loss import with_statistics
from asyncrl.ranks.plan import PlannedUpdate, plan_of

ROWS, TOKENS = 12, 10
Place = tuple[int, int]

# a step of 90 tokens has fewer tokens with a large covariance than the published numbers are for
KL_COV = {"penalties": [{"kind": "abs", "beta": 0.7, "tokens": {"share": 0.2}}]}
CLIP_COV = {"dropped": {"share": 0.1, "lo": 0.2, "hi": 3.0}}


def step_rows() -> tuple[BatchedDataDict, torch.Tensor]:
    """Returns the columns of a step, and the current log-probs [B, S], all in float64."""
    draw = torch.Generator().manual_seed(3)
    old, lp, sampled = (-torch.rand(ROWS, TOKENS, generator=draw, dtype=torch.float64) * 3 for _ in range(3))
    mask = (torch.rand(ROWS, TOKENS, generator=draw) < 0.8).double()
    mask[:, 0] = 0
    rows = BatchedDataDict(
        input_ids=mask.long(),
        prev_logprobs=old,
        generation_logprobs=sampled,
        advantages=torch.randn(ROWS, 1, generator=draw, dtype=torch.float64).expand(ROWS, TOKENS).clone(),
        token_mask=mask,
        sample_mask=torch.ones(ROWS),
    )
    return rows, lp


def trained(rows: BatchedDataDict) -> list[Place]:
    return [(row, token) for row in range(ROWS) for token in range(TOKENS) if rows["token_mask"][row, token]]


def covariances(rows: BatchedDataDict) -> dict[Place, float]:
    places = trained(rows)
    columns = [rows[name].tolist() for name in ("prev_logprobs", "advantages")]
    means = [sum(column[row][token] for row, token in places) / len(places) for column in columns]
    return {(r, t): (columns[0][r][t] - means[0]) * (columns[1][r][t] - means[1]) for r, t in places}


def hash_of(value: float) -> int:
    """Two rounds of xor-shift and multiply on the bits of a float32."""
    [bits] = struct.unpack("<I", struct.pack("<f", value))
    bits = (bits ^ bits >> 16) * 0x21F0AAAD & 0xFFFFFFFF
    bits = (bits ^ bits >> 15) * 0x735A2D97 & 0xFFFFFFFF
    return int(bits ^ bits >> 15)


def kl_cov_terms(rows: BatchedDataDict, lp: torch.Tensor) -> dict[Place, tuple[float, float]]:
    """Returns the loss and its derivative by the log-prob of each token."""
    apart = covariances(rows)
    chosen = sorted(apart, key=apart.__getitem__)[-int(0.2 * len(apart)) :]
    found = {}
    for place in apart:
        d, a = float(lp[place] - rows["prev_logprobs"][place]), float(rows["advantages"][place])
        pull = place in chosen
        found[place] = (-a * math.exp(d) + 0.7 * abs(d) * pull, -a * math.exp(d) + math.copysign(0.7, d) * pull)
    return found


def clip_cov_terms(rows: BatchedDataDict, lp: torch.Tensor) -> dict[Place, tuple[float, float]]:
    apart = covariances(rows)
    band = [place for place, value in apart.items() if 0.2 <= value <= 3.0]
    wanted = int(0.1 * len(apart))
    assert wanted < len(band) < len(apart) / 2
    chosen = sorted(band, key=lambda place: hash_of(float(rows["generation_logprobs"][place])))[-wanted:]
    found = {}
    for place in apart:
        u, a = math.exp(float(lp[place] - rows["prev_logprobs"][place])), float(rows["advantages"][place])
        losses = [-a * u, -a * min(max(u, 0.8), 1.2)]
        flat = losses[1] > losses[0] or place in chosen
        found[place] = (0.0 if place in chosen else max(losses), 0.0 if flat else -a * u)
    return found


PLAIN: Mapping[str, tuple[Mapping[str, Any], Callable[..., Mapping[Place, tuple[float, float]]]]] = {
    "kl_cov": (KL_COV, kl_cov_terms),
    "clip_cov": (CLIP_COV, clip_cov_terms),
}


def in_one_row(part: BatchedDataDict) -> BatchedDataDict:
    """Returns the rows one after the other in one packed row."""
    packed = BatchedDataDict({name: part[name].reshape(1, -1) for name in part if part[name].ndim == 2})
    packed["segment_ids"] = torch.arange(part.size).repeat_interleave(TOKENS)[None]
    packed["sample_mask"] = torch.ones(1)
    return packed


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("cut", [[12], [5, 7], [1] * 12])
@pytest.mark.parametrize("name", PLAIN)
def test_a_preset_is_the_plain_loop_in_float64_however_the_step_is_cut(
    name: str, cut: Sequence[int], packed: bool
) -> None:
    overrides, plain = PLAIN[name]
    rows, lp = step_rows()
    starts = [sum(cut[:i]) for i in range(len(cut))]
    parts = [rows.slice(start, start + size) for start, size in zip(starts, cut, strict=True)]
    given = [in_one_row(part) if packed else part for part in parts]
    configured = ObjectiveLoss(resolve_objective(name, overrides))
    loss: Any = with_statistics(configured, [PlannedUpdate(plan_of(rows), given)], reduce=lambda sums: sums)
    current, expected = lp.clone().requires_grad_(), plain(rows, lp)
    total = torch.zeros((), dtype=torch.float64)
    for part, start, size in zip(given, starts, cut, strict=True):
        own = current[start : start + size]
        values, _ = loss(
            data=part,
            next_token_logprobs=(own.reshape(1, -1) if packed else own)[:, 1:],
            global_valid_seqs=torch.tensor(float(ROWS)),
            global_valid_toks=torch.tensor(float(len(expected))),
        )
        total = total + values
    [slopes] = torch.autograd.grad(total, current)
    gradient = torch.zeros_like(lp)
    for place, (_, slope) in expected.items():
        gradient[place] = slope / len(expected)
    assert float(total.detach()) == pytest.approx(sum(each for each, _ in expected.values()) / len(expected), abs=1e-6)
    assert torch.allclose(slopes, gradient, atol=1e-6)


def test_the_published_numbers() -> None:
    """Table 3 and section 4 of the paper: k = 2e-3 and β = 1; r = 2e-4 of the tokens with 1 ≤ c ≤ 5."""
    [penalty] = PRESETS["kl_cov"].objective.penalties
    assert (penalty.kind, penalty.beta, penalty.q) == ("abs", 1.0, "proximal")
    assert penalty.tokens == ByCovariance(share=2e-3)
    assert PRESETS["clip_cov"].objective.dropped == ByCovariance(share=2e-4, order="random", lo=1.0, hi=5.0)


def chosen_by(
    choice: ByCovariance, logprobs: Sequence[float], advantages: Sequence[float], sampled: Sequence[float] = ()
) -> list[bool]:
    """Returns True for each token of a step that loses its surrogate."""
    objective = Objective(surrogate=Reinforce(), dropped=choice)
    columns = {"proximal": logprobs, "behaviour": sampled or logprobs}
    sources = {name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()}
    tokens = StepTokens(sources=sources, advantages=torch.tensor(advantages))
    data = BatchedDataDict(
        prev_logprobs=torch.tensor([[0.0, *logprobs]], dtype=torch.float64),
        generation_logprobs=torch.tensor([[0.0, *columns["behaviour"]]], dtype=torch.float64),
        advantages=torch.tensor([[0.0, *advantages]]),
        token_mask=torch.tensor([[0.0, *([1.0] * len(logprobs))]]),
        sample_mask=torch.ones(1),
    )
    loss = ObjectiveLoss(calibrated(objective, tokens=tokens, reduce=lambda sums: sums))
    gated: list[bool] = loss.terms(data, logprobs_BT=torch.zeros(1, len(logprobs))).gated_BT[0].tolist()
    return gated


def test_the_share_is_rounded_down_but_one_token_is_chosen_by_hand() -> None:
    """Means −2 and 0, so the covariances are 1, −1, −2, 2."""
    logprobs, advantages = [-1.0, -3.0, 0.0, -4.0], [1.0, 1.0, -1.0, -1.0]
    for share, expected in (
        (0.01, [False, False, False, True]),
        (0.49, [False, False, False, True]),
        (0.5, [True, False, False, True]),
        (1.0, [True] * 4),
    ):
        assert chosen_by(ByCovariance(share=share), logprobs, advantages) == expected, share
    assert chosen_by(ByCovariance(share=0.5, hi=1.5), logprobs, advantages) == [True, True, False, False]
    assert chosen_by(ByCovariance(share=1.0, lo=-1.0, hi=1.0), logprobs, advantages) == [True, True, False, False]
    assert chosen_by(ByCovariance(share=0.5), [-1.0], [1.0]) == [True]


def test_tokens_that_are_equal_to_one_that_is_left_out_are_left_out_too() -> None:
    assert not any(chosen_by(ByCovariance(share=0.5), [-1.0, -2.0, -3.0, -4.0], [1.0] * 4)), "all covariances are 0"
    equal = chosen_by(ByCovariance(share=0.5), [-4.0, -4.0, -4.0, -1.0, 0.0, 0.0], [-1.0, -1.0, -1.0, 1.0, 1.0, 1.0])
    assert equal == [False, False, False, False, True, True], "three of the others have the third largest covariance"


def test_a_random_choice_does_not_prefer_any_tokens_and_does_not_depend_on_their_order() -> None:
    """Half of 4,000 tokens are in the bounds, and a twentieth of all is chosen. In ten parts of these, ordered by
    covariance, 10 % ± 5 standard deviations of each are chosen."""
    rng = random.Random(5)
    logprobs = [struct.unpack("<f", struct.pack("<f", -3 * rng.random()))[0] for _ in range(4000)]
    advantages = [rng.choice([-1.0, 1.0]) for _ in logprobs]
    choice = ByCovariance(share=0.05, order="random", lo=0.0)
    found = chosen_by(choice, logprobs, advantages)
    order = rng.sample(range(4000), 4000)
    shuffled = chosen_by(choice, [logprobs[n] for n in order], [advantages[n] for n in order])
    assert shuffled == [found[n] for n in order]
    assert sum(found) == 200
    mean_logprob, mean_advantage = sum(logprobs) / 4000, sum(advantages) / 4000
    apart = [(lp - mean_logprob) * (a - mean_advantage) for lp, a in zip(logprobs, advantages, strict=True)]
    inside = sorted((n for n in range(4000) if apart[n] >= 0), key=apart.__getitem__)
    assert not any(found[n] for n in {*range(4000)} - {*inside})
    size, share = len(inside) // 10, 200 / len(inside)
    for part in range(10):
        number = sum(found[n] for n in inside[part * size : (part + 1) * size])
        assert abs(number - share * size) < 5 * math.sqrt(size * share * (1 - share))


def test_a_difference_that_may_be_rounding_has_no_penalty() -> None:
    lp = torch.tensor([[-1.0, -1.0 + 5e-6, -1.0 - 5e-6, -1.0 + 2e-5, -1.0 - 2e-5]], dtype=torch.float64)
    data = BatchedDataDict(
        prev_logprobs=torch.full((1, 6), -1.0, dtype=torch.float64),
        advantages=torch.zeros(1, 6),
        token_mask=torch.tensor([[0.0, 1.0, 1.0, 1.0, 1.0, 1.0]]),
        sample_mask=torch.ones(1),
    )
    penalty = Penalty(beta=1.0, kind="abs", q="proximal")
    leaf = lp.requires_grad_()
    terms = ObjectiveLoss(Objective(surrogate=Reinforce(), penalties=(penalty,))).terms(data, logprobs_BT=leaf)
    [slopes] = torch.autograd.grad(terms.loss_BT.sum(), leaf)
    assert slopes.tolist() == [[0.0, 0.0, 0.0, 1.0, -1.0]]


@pytest.mark.parametrize(
    ("loss", "overrides", "words"),
    [
        ("kl_cov", {"penalties": [{"kind": "abs", "tokens": {"share": 0}}]}, "must be above 0 and at most 1"),
        ("clip_cov", {"dropped": {"share": 1.1}}, "must be above 0 and at most 1"),
        ("clip_cov", {"dropped": {"lo": 5.0}}, "must satisfy lo < hi"),
        ("a3po", {"dropped": {"share": 0.1}}, "set proximal to recomputed"),
        ("vapo", {"penalties": [{"kind": "positive_nll", "tokens": {"share": 0.1}}]}, "remove tokens"),
        ("p3o", {"penalties": [{"kind": "k3", "tokens": {"share": 0.1}}]}, "remove tokens"),
        ("clip_cov", {"dropped": {"above": 1.0}}, "there is no field 'above'"),
    ],
)
def test_a_choice_that_could_not_be_made_is_refused(loss: str, overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve_objective(loss, overrides)
