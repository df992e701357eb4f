"""The witness of a loss of the user's own, for which there is no formula: its function is called again.

A loss is a sum over samples that is divided by counts of the whole update (`asyncrl.algorithms.interfaces`). So the
derivatives by the tokens of the drawn group (the one that the witness computes again) are the same without the other
groups of the micro-batch. The function gets the model's outputs of the step's own pass for these rows, so that only the
function can make a difference.

The function is also called with each sample alone. A loss may compare the samples of a group, so a difference from the
derivatives of the group is no error. The kind of the finding says whether there was one.

Legend: B rows, S tokens, T = S − 1 next tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.specs import trained_mask
from asyncrl.user_code import describe_error
from asyncrl.witness.judge import EQUAL, Finding

EACH_SAMPLE = "own function, each sample alone"
GROUP_ALONE = "own function, the group alone"
MASKS = "own function, its masks"


@dataclass(slots=True, kw_only=True)
class OwnLoss:
    """The derivatives of a loss by the trained tokens of this rank's rows of the drawn group. `in_step` are those of
    the step's backward pass, `of_group` those with the group alone, `of_sample` those with each sample alone. The key
    is the index of a row within the drawn group. `problem` says why the function could not be called again, or why its
    results cannot be compared.

    The backward pass multiplies the loss by `world_size`, because FSDP averages gradients over the ranks. So the noted
    derivatives are divided by it.
    """

    world_size: int
    in_step: dict[int, list[float]] = field(default_factory=dict)
    of_group: dict[int, list[float]] = field(default_factory=dict)
    of_sample: dict[int, list[float]] = field(default_factory=dict)
    problem: str = ""

    def watch(
        self,
        data: BatchedDataDict,
        output: torch.Tensor,
        slopes_of_rows: Callable[[Sequence[int]], torch.Tensor],
        *,
        numbers: Sequence[int],
    ) -> None:
        """Calls the loss again with only the rows of the drawn group, and with each of them alone, and notes its
        derivatives. A hook notes those of the step's own backward pass.

        `output` is the argument of the loss with its graph: log-probs [B, T] or logits [B, S, V]. `slopes_of_rows`
        calls the loss as if the micro-batch had only the given rows, and returns its derivatives by their `output`.
        `numbers` has for each row its index within the drawn group, −1 for rows of other groups.
        """
        mask_BT = trained_mask(data)[:, 1:]
        drawn = {row: number for row, number in enumerate(numbers) if number >= 0 and bool(mask_BT[row].any())}
        if not drawn:
            return

        def noted(slopes: torch.Tensor, row: int) -> list[float]:
            return _of_trained(slopes, mask_BT[row], data["input_ids"][row, 1:])

        group = _group(data, numbers)
        try:
            first, second = slopes_of_rows(group), slopes_of_rows(group)
        except Exception as error:  # the step itself did not fail, so it goes on
            self.problem = f"the loss failed on the drawn group alone: {describe_error(error)}"
            return
        if not torch.isfinite(first).all():
            self.problem = "the derivatives of the loss are not finite"
        elif not torch.allclose(first, second, rtol=EQUAL, atol=EQUAL * float(first.abs().max())):
            self.problem = "two calls with the same rows give different derivatives"
        self.of_group |= {number: noted(first[group.index(row)], row) for row, number in drawn.items()}
        try:
            self.of_sample |= {number: noted(slopes_of_rows([row])[0], row) for row, number in drawn.items()}
        except Exception:  # a loss that compares samples may not accept one sample
            self.of_sample.clear()

        def note(slopes: torch.Tensor) -> None:
            self.in_step |= {number: noted(slopes[row] / self.world_size, row) for row, number in drawn.items()}

        output.register_hook(note)  # type: ignore[no-untyped-call]

    def findings(self, *, scale: float) -> list[Finding]:
        """Compares the derivatives of the step with those of the group alone. `scale` is the largest derivative of the
        step. If there was a problem, the only finding says that the loss was not witnessed."""
        if self.problem:
            return [Finding(check="coefficients", ratio=0.0, kind=f"not witnessed: {self.problem}")]
        accepted = EQUAL * (scale or 1.0)
        alike = all(
            len(values) == len(self.of_sample.get(number, ()))
            and all(abs(a - b) <= accepted for a, b in zip(values, self.of_sample[number], strict=True))
            for number, values in self.of_group.items()
        )
        return [
            Finding(
                check="coefficients",
                ratio=abs(value - expected) / accepted,
                words=(
                    f"the ranks' backward pass gave sample {number} of the drawn group the derivative {value:.6g} by a "
                    f"trained token, and the loss gives {expected:.6g} if the micro-batch has only this group"
                ),
                kind=EACH_SAMPLE if alike else GROUP_ALONE,
            )
            for number, values in self.in_step.items()
            for value, expected in zip(values, self.of_group[number], strict=True)
        ]


def masked_finding(outside: float, *, inside: float, kind: str) -> Finding:
    """Judges the largest derivative of the loss by a token that its masks leave out (`outside`). It must be 0
    up to rounding. `inside` is the largest derivative by a token that is trained."""
    return Finding(
        check="coefficients",
        ratio=outside / (EQUAL * (inside or outside)),
        words=(
            f"the loss has the derivative {outside:.6g} by a token that its masks leave out (of a prompt, of padding, "
            f"or of a masked sample), and at most {inside:.6g} by a trained one"
        ),
        kind=kind,
    )


def _group(data: BatchedDataDict, numbers: Sequence[int]) -> list[int]:
    """Returns the rows of the drawn group, also those that were not drawn because the group is too long. The latter are
    known only if the batch has the column `group_ids`."""
    drawn = [row for row, number in enumerate(numbers) if number >= 0]
    if "group_ids" not in data:
        return drawn
    group: list[int] = (data["group_ids"] == data["group_ids"][drawn[0]]).nonzero().flatten().tolist()
    return group


def _of_trained(slopes: torch.Tensor, mask_T: torch.Tensor, targets_T: torch.Tensor) -> list[float]:
    """Returns the derivatives by the trained tokens of a row. `slopes` are those by log-probs [T] or by logits [S, V].
    From logits, returns two numbers for each token: the derivative by its own logit, and the norm of those by all
    logits of its position."""
    if slopes.ndim == 1:
        return slopes[mask_T].double().tolist()
    of_token_NV = slopes[:-1][mask_T]
    own_N = of_token_NV.gather(1, targets_T[mask_T].unsqueeze(1)).squeeze(1)
    return torch.cat([own_N, torch.linalg.vector_norm(of_token_NV, dim=1)]).double().tolist()
