"""The witness's optimizer and schedule are torch's AdamW and the learner's schedule, for single elements."""

import pytest
import torch

from asyncrl.config.schema import OptimizerSection
from asyncrl.ranks.schedule import learning_rate
from asyncrl.witness.optimizer import Element, difference, rate_of_step, stepped

SECTION = OptimizerSection(learning_rate=3e-3, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, max_grad_norm=0.7)


def test_an_element_steps_as_in_torch() -> None:
    torch.manual_seed(0)
    weights = torch.nn.Parameter(torch.randn(12))
    optimizer = torch.optim.AdamW([weights], lr=1.0, betas=SECTION.betas, eps=SECTION.eps, weight_decay=0.1)
    norms: list[float] = []
    for step in range(6):
        gradient = torch.randn(12) * 10 ** -(step % 3)
        state = optimizer.state.get(weights, {})
        zeros = torch.zeros(12)
        before = [
            Element(value=value, gradient=gradient, first=first, second=second, steps=step)
            for value, gradient, first, second in zip(
                weights.detach().double().tolist(),
                gradient.double().tolist(),
                state.get("exp_avg", zeros).double().tolist(),
                state.get("exp_avg_sq", zeros).double().tolist(),
                strict=True,
            )
        ]
        weights.grad = gradient.clone()
        norm = float(torch.nn.utils.clip_grad_norm_([weights], SECTION.max_grad_norm))
        optimizer.param_groups[0]["lr"] = rate = 1e-3 * (step + 1)
        optimizer.step()
        after = weights.detach().double().tolist()
        for found, least, most in ((rate, 0.0, 0.5), (1.01 * rate, 1.0, 1e9)):
            apart = [
                difference(element, stepped(element, SECTION, rate=found, norm=norm), value, rate=rate)
                for element, value in zip(before, after, strict=True)
            ]
            assert least <= max(apart) <= most, "a rate that is 1 % too high is found, and the right one is not"
        norms.append(norm)
    assert min(norms) < SECTION.max_grad_norm < max(norms), "some gradients were clipped"


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_the_rate_is_that_of_the_learner(schedule: str, warmup: int) -> None:
    section = OptimizerSection(learning_rate=2e-4, schedule=schedule, warmup_steps=warmup, final_fraction=0.2)  # type: ignore[arg-type]
    for step in range(12):
        expected = learning_rate(section, step=step, total_steps=10)
        assert rate_of_step(section, step=step, total_steps=10) == pytest.approx(expected, rel=1e-12)
