"""`python -m asyncrl.algorithms.docs [--check]` writes docs/losses.md from the docstrings of the axes and the presets.

With `--check` it only checks that the page is up to date. The numbers of the table about stale tokens are computed with
the code of the loss.
"""

import inspect
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch

from asyncrl.algorithms import step_statistics
from asyncrl.algorithms.axes import all_axes
from asyncrl.algorithms.calibration import needs_calibration
from asyncrl.algorithms.checks import NEEDS_CRITIC
from asyncrl.algorithms.interfaces import RUN_COLUMNS
from asyncrl.algorithms.loss import interpolated_policy
from asyncrl.algorithms.objective import Objective, is_corrected
from asyncrl.algorithms.presets import DEFAULT_BASELINE, PRESETS
from asyncrl.algorithms.token_terms import Segments, token_terms
from asyncrl.config.docs import write_page
from asyncrl.config.load import dump_yaml, parse_yaml
from asyncrl.config.text_templates import TEMPLATES

PATH = Path(__file__).parents[2] / "docs" / "losses.md"
RATIOS = (0.1, 0.4, 0.75, 1.0, 1.25, 4.0, 8.0)
"""Columns of the table about stale tokens: π/μ of the trained policy π and the sampler μ. No preset of the
table begins to drop tokens at one of them, because rounding would decide there."""
SAMPLED_PROBABILITY = 0.1
"""The probability with which the sampler chose the token of the table. Gates on probabilities depend on it."""

_REDUCTIONS = {
    "mean": step_statistics.mean,
    "total": step_statistics.total,
    "smallest": step_statistics.smallest,
    "largest": step_statistics.largest,
    "quantile(q)": step_statistics.quantile,
    "effective_share": step_statistics.effective_share,
}
"""The reductions for statistics of a user's loss."""


def markdown() -> str:
    """Returns the text of the page, made with the template `losses.md.j2`."""
    axes = all_axes()
    examples = {
        place: dump_yaml(parse_yaml(example, source=place))
        for axis in axes
        for place, example in axis.examples().items()
    }
    corrected = {name: preset for name, preset in PRESETS.items() if is_corrected(preset.objective)}
    fixed = {name: preset.objective for name, preset in corrected.items() if not needs_calibration(preset.objective)}
    return TEMPLATES.get_template("algorithms/losses.md.j2").render(
        axes=axes,
        examples=examples,
        columns=RUN_COLUMNS,
        reductions=[(name, " ".join((inspect.getdoc(each) or "").split())) for name, each in _REDUCTIONS.items()],
        presets=PRESETS,
        corrected=corrected,
        needs_critic=NEEDS_CRITIC,
        default_baseline=DEFAULT_BASELINE,
        ratios=RATIOS,
        probability=SAMPLED_PROBABILITY,
        stale=[(name, *_cells(objective)) for name, objective in fixed.items()],
        fitted=[name for name in corrected if name not in fixed],
    )


def stale_gradients(objective: Objective, *, advantage: float) -> list[float]:
    """Returns, for each of `RATIOS`, the gradient of a token with this ratio to its sampler, divided by the gradient of
    a fresh token (ratio 1).

    The token is one version old and a sequence of its own. It is trained in the first update of its step, so the
    current and the proximal policy are equal unless the latter is interpolated. Centering and penalties do not count.
    """
    behaviour_BT = torch.full((len(RATIOS), 1), math.log(SAMPLED_PROBABILITY), dtype=torch.float64)
    logprobs_BT = (behaviour_BT + torch.tensor(RATIOS, dtype=torch.float64).log().unsqueeze(1)).requires_grad_()
    proximal_BT = logprobs_BT.detach()
    if objective.proximal == "interpolated":
        proximal_BT = interpolated_policy(logprobs_BT, behaviour=behaviour_BT, staleness=torch.ones_like(behaviour_BT))
    terms = token_terms(
        msgspec.structs.replace(objective, centering=None, penalties=()),
        logprobs_BT=logprobs_BT,
        sources={"behaviour": behaviour_BT, "proximal": proximal_BT, "reference": proximal_BT},
        advantages_BT=torch.full_like(behaviour_BT, advantage),
        segments=Segments(torch.ones_like(behaviour_BT, dtype=torch.bool)),
    )
    [gradient_BT] = torch.autograd.grad(terms.push_BT.sum(), logprobs_BT)
    fresh = gradient_BT[RATIOS.index(1.0)]
    return [float(value) for value in gradient_BT.flatten() / fresh]


def main(arguments: Sequence[str]) -> int:
    return write_page(PATH, markdown(), arguments, module="asyncrl.algorithms.docs")


def _cells(objective: Objective) -> Iterator[str]:
    """Yields the cells of a preset's row. A cell with two numbers has that of A > 0 and that of A < 0."""
    for good, bad in zip(
        stale_gradients(objective, advantage=1.0), stale_gradients(objective, advantage=-1.0), strict=True
    ):
        yield " / ".join(dict.fromkeys(f"{value + 0.0:.2g}" for value in (good, bad)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
