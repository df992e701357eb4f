"""The ranks' side of the witness: watches the passes of an update, and computes the drawn group again by plain passes.

The drawn group is one group of the step, chosen at random. The column `witness` has the index of each of its rows
within the group, and −1 for other rows. A plain pass computes one sequence, without padding and packing. This module
notes the inputs and results of the ranks' passes, and compares them with the formulas in `asyncrl.witness`.

Legend: B rows, S tokens, T = S − 1 next tokens.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.distributed.tensor import DTensor

from asyncrl.config.schema import Config, LearnerSection, OptimizerSection
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.specs import SUPPORT, listed_tops, trained_mask
from asyncrl.errors import WitnessFailed
from asyncrl.ranks.accelerator import compute_dtype
from asyncrl.ranks.batching import empty_micro_batch
from asyncrl.ranks.collectives import Collectives
from asyncrl.ranks.model_rows import branches_as_rows
from asyncrl.ranks.own_loss import MASKS, OwnLoss, masked_finding
from asyncrl.ranks.report import UpdatePlan
from asyncrl.user_code import describe_error
from asyncrl.weights.parity import Differences, ParityLimits, room_for_few
from asyncrl.witness.judge import (
    FORMULA,
    GRADIENT_BFLOAT16,
    GRADIENT_FLOAT32,
    Finding,
    GradientLimits,
    Request,
    advantage_findings,
    coefficients,
    counts_finding,
    steps_finding,
    worst,
)
from asyncrl.witness.objective import Axes, Derivatives, Sample
from asyncrl.witness.optimizer import Element, difference, rate_of_step, stepped
from asyncrl.witness.plain_pass import plain_attention, plain_pass

WITNESS = "witness"
"""Column [B]: the index of a row within the drawn group, −1 for rows of other groups."""


@dataclass(slots=True, kw_only=True)
class Watched:
    """The inputs and results of an update's passes for the drawn rows of this rank. The key is the index of a row
    within the drawn group.

    Lists have one entry for each trained token. `places` are the indices of the tokens in their row, minus 1.
    `slopes` are the derivatives of the loss by the tokens' log-probs, entropies and centering, by the names of the
    fields of `Derivatives`; a name is missing if the loss does not read the output. `tokens` is the weighted number of
    trained tokens of all rows that had a backward pass. `inside` is the largest derivative of the loss by a trained
    token, and `outside` the largest by a masked token. `own` is None unless the loss is the user's own. The backward
    pass multiplies the loss by `world_size`, so the derivatives are divided by it. `step` is the version of the
    weights.
    """

    world_size: int
    step: int | None
    own: OwnLoss | None = None
    tokens: float = 0.0
    inside: float = 0.0
    outside: float = 0.0
    samples: dict[int, Sample] = field(default_factory=dict)
    places: dict[int, list[int]] = field(default_factory=dict)
    slopes: dict[str, dict[int, list[float]]] = field(default_factory=dict)

    @property
    def by_logprob(self) -> dict[int, list[float]]:
        return self.slopes.get("logprobs", {})

    def watch(self, data: BatchedDataDict, outputs: Mapping[str, torch.Tensor]) -> None:
        """Notes the columns of the drawn rows of a micro-batch, and with hooks the derivatives that the backward pass
        gives their log-probs, entropies and centering. `outputs` are the model's outputs that the loss gets, with their
        graph: [B, T], or logits [B, S, V], for which only `tokens`, `inside` and `outside` are noted."""
        weight_BT = data["token_mask"][:, 1:].double() * data["sample_mask"].double().unsqueeze(1)
        self._count(next(iter(outputs.values())), float(weight_BT.sum()), trained_mask(data)[:, 1:])
        if WITNESS not in data or "next_token_logprobs" not in outputs:
            return
        mask_BT = trained_mask(data)[:, 1:]
        for row, number in enumerate(data[WITNESS].tolist()):
            if number >= 0 and bool(mask_BT[row].any()):
                logprobs_BT = outputs["next_token_logprobs"]
                self.samples[number] = _sample(data, logprobs_BT, row=row, mask_T=mask_BT[row], step=self.step)
                self.places[number] = mask_BT[row].nonzero().flatten().tolist()
                for name in Derivatives._fields:
                    if (output := outputs.get(f"next_token_{name}")) is not None:
                        self._note(output, self.slopes.setdefault(name, {}), number, row, mask_BT[row])

    def _count(self, output: torch.Tensor, tokens: float, mask_BT: torch.Tensor) -> None:
        def count(gradient: torch.Tensor) -> None:
            self.tokens += tokens
            # one number for each token, also of logits [B, S, V]
            size_BS = gradient.abs() if gradient.ndim == 2 else torch.linalg.vector_norm(gradient, torch.inf, dim=-1)
            inside_BS = torch.zeros_like(size_BS, dtype=torch.bool)
            inside_BS[:, : mask_BT.shape[1]] = mask_BT
            largest = [float(size_BS.masked_fill(left_out, 0.0).max()) for left_out in (~inside_BS, inside_BS)]
            self.inside = max(self.inside, largest[0] / self.world_size)
            self.outside = max(self.outside, largest[1] / self.world_size)

        output.register_hook(count)  # type: ignore[no-untyped-call]

    def _note(
        self, output_BT: torch.Tensor, into: dict[int, list[float]], number: int, row: int, mask_T: torch.Tensor
    ) -> None:
        def note(gradient_BT: torch.Tensor) -> None:
            into[number] = (gradient_BT[row][mask_T].double() / self.world_size).tolist()

        output_BT.register_hook(note)  # type: ignore[no-untyped-call]


def _sample(
    data: BatchedDataDict, logprobs_BT: torch.Tensor, *, row: int, mask_T: torch.Tensor, step: int | None
) -> Sample:
    def column(name: str) -> list[float]:
        return data[name][row, 1:][mask_T].double().tolist() if name in data else []

    return Sample(
        group=int(data["group_ids"][row]) if "group_ids" in data else 0,
        reward=float(data["rewards"][row]) if "rewards" in data else 0.0,
        weight=float(data["sample_mask"][row]),
        token_weights=column("token_mask"),
        advantages=column("advantages"),
        current=logprobs_BT[row].detach()[mask_T].double().tolist(),
        proximal=column("prev_logprobs"),
        behaviour=column("generation_logprobs"),
        reference=column("reference_policy_logprobs"),
        staleness=[] if step is None else [step - version for version in column("weight_versions")],
    )


def drawn_rows(parts: Sequence[BatchedDataDict]) -> list[BatchedDataDict]:
    """Returns the rows of the drawn group in each micro-batch that has some of them, with all of their columns."""
    found = []
    for part in parts:
        rows = (part[WITNESS] >= 0).nonzero().flatten() if WITNESS in part else []
        if len(rows):
            found.append(part.select_indices(rows))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainSequence:
    """A sequence as a model sees it: a row, or a branch of a row. `number` is the row's index within the
    drawn group, which the witness computes again.

    `tokens` has all tokens of the sequence. The other lists have one entry for each token but the first. `supports` has
    the ids among which the token was sampled, if the rows have supports. `tops` has the ids and log-probs of the
    sampler's most likely tokens, if the rows have them. `row_places` has the token's index in the row, minus 1.
    """

    number: int
    tokens: list[int]
    supports: list[list[int]] | None
    tops: list[dict[int, float]]
    row_places: list[int]


NO_SEQUENCE = PlainSequence(number=-1, tokens=[0, 0], supports=None, tops=[], row_places=[-1])
"""A sequence without a trained token, for a rank that has fewer sequences than another one."""


def plain_sequences(rows: BatchedDataDict) -> Iterator[PlainSequence]:
    """Yields the sequences of drawn rows, one after the other."""
    for row, number in enumerate(rows[WITNESS].tolist()):
        one = rows.select_indices([row])
        sequences, branches = branches_as_rows(one)
        for branch, length in enumerate(sequences["input_lengths"].tolist()):
            places = list(range(length - 1))
            if branches is not None:
                inside_S = branches.inside_BS[0].nonzero().flatten()
                places = (inside_S[branches.branches_M == branch] - 1).tolist()[1:]
            supports = None
            if SUPPORT in sequences:
                listed = sequences[SUPPORT][branch, 1:length].tolist()
                supports = [[token for token in support if token >= 0] for support in listed]
            yield PlainSequence(
                number=number,
                tokens=sequences["input_ids"][branch, :length].tolist(),
                supports=supports,
                tops=listed_tops({name: column[branch] for name, column in sequences.items()}, slice(1, length)),
                row_places=places,
            )


def equal_sequences(sequences: Iterable[PlainSequence]) -> list[list[PlainSequence]]:
    """Returns the sequences in lists: those of a list have the same tokens, supports and most likely tokens."""
    found = defaultdict(list)
    for sequence in sequences:
        supports = None if sequence.supports is None else tuple(map(tuple, sequence.supports))
        found[tuple(sequence.tokens), supports, tuple(tuple(each.items()) for each in sequence.tops)].append(sequence)
    return list(found.values())


def squares(model: torch.nn.Module, *, world_size: int) -> dict[str, float]:
    """Returns this rank's part of the sum of the squares of all elements of each gradient, by the name of the tensor.
    The parts of all ranks add up to the sum of the whole tensor, also if several ranks have the same shard."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            norm = torch.linalg.vector_norm(_own(parameter.grad), dtype=torch.float64)
            found[name] = float(norm) ** 2 / _copies(parameter.grad, world_size=world_size)
    return found


def _copies(tensor: torch.Tensor, *, world_size: int) -> int:
    """Returns the number of ranks that have the same shard of a tensor."""
    if not isinstance(tensor, DTensor):
        return world_size
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_replicate())


def _own(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


EQUAL_NORMS = 0.05
"""Largest accepted difference between the gradients' norm that the clipping measures and a second sum, as a share of
the norm. torch adds up squares in float32: on a CPU, the norm of 136 million normal elements is 1.7 % too small."""
PART_ELEMENTS = 64
"""Number of randomly chosen elements of each shard of a gradient that are compared with their sums over the
micro-batches."""
DrawnGradient = Mapping[str, Sequence[float]]
"""Drawn elements of this rank's shard of each gradient, by the name of the tensor."""


def drawn_gradient(model: torch.nn.Module, *, seed: int) -> DrawnGradient:
    """Returns `PART_ELEMENTS` elements of this rank's shard of each gradient, the same ones for the same `seed`."""
    draw, found = torch.Generator().manual_seed(seed), dict[str, list[float]]()
    for name, parameter in model.named_parameters():
        own = _own(parameter.detach())
        places = torch.randint(max(own.numel(), 1), (PART_ELEMENTS,), generator=draw).to(own.device)
        if parameter.grad is not None and own.numel():
            found[name] = _own(parameter.grad).flatten()[places].double().tolist()
    return found


class UpdateWitness:
    """Checks one update on one rank by computing parts of it a second time. Call the methods in the order of a step:
    `pass_group`, `pass_parts`, the update's own passes with `watched`, `judge`, `compare_reference`, and after the
    optimizer's step `compare_elements`. All but the last are collectives.

    `update` is the number of the update in its step, `train_calls` that of the step in the learning-rate schedule, and
    `optimizer_steps` the number of steps that the optimizer has made so far, also before a resume. Without `axes`, the
    loss is one of the user's own, whose coefficients have no formula.
    """

    def __init__(
        self,
        *,
        ranks: Collectives,
        config: Config,
        request: Request,
        update: int,
        axes: Axes | None,
        step: int | None,
        train_calls: int,
        optimizer_steps: int,
    ) -> None:
        self._ranks = ranks
        self._config = config
        self._request = request
        self._update = update
        self._axes = axes
        self._train_calls = train_calls
        self._optimizer_steps = optimizer_steps
        self._step = step
        self._exact = compute_dtype(config) == torch.float32
        self._findings: list[Finding] = []
        self._elements: DrawnElements | None = None
        self._norm = 0.0
        self._parts: list[DrawnGradient] = []
        own = OwnLoss(world_size=ranks.world_size) if axes is None else None
        self.watched = Watched(world_size=ranks.world_size, step=step, own=own)

    @property
    def worst(self) -> tuple[Finding, ...]:
        """The worst finding of each check so far on this rank."""
        return tuple(worst(self._findings).values())

    @property
    def failure(self) -> WitnessFailed | None:
        """The error of this rank that ends the step, if a check has failed and `witness.on_failure` is `stop`."""
        failed = [finding for finding in self.worst if finding.failed]
        if not failed or self._config.witness.on_failure != "stop":
            return None
        step = "" if self._step is None else f"step {self._step}: "
        return WitnessFailed(f"{step}{failed[0].message}")

    def pass_group(
        self,
        parts: Sequence[BatchedDataDict],
        model: Any,
        run: Callable[[BatchedDataDict, Watched], object],
        *,
        device: torch.device,
    ) -> None:
        """Compares the gradient and the log-probs of the drawn group's rows with those of plain passes.

        The model's gradients must be 0 before the call, and the caller sets them to 0 afterwards. `run` passes a
        micro-batch forward and backward as a step does, and notes inputs and results in the `Watched`. The plain passes
        then subtract the same gradient, so the model's gradients are the difference, and no second copy is needed.
        """
        own, seen = drawn_rows(parts), Watched(world_size=self._ranks.world_size, step=self._step)
        for part in _filled(own, self._ranks, empty_micro_batch):
            run(part, seen)
        fast = left = squares(model, world_size=self._ranks.world_size)
        largest, apart = fast, dict[str, list[float]]()
        for sequences, logprobs in self._plain_passes(own, model, seen, device=device, backward=True):
            left = squares(model, world_size=self._ranks.world_size)
            largest = {name: max(square, largest.get(name, 0.0)) for name, square in left.items()}
            _add_differences(apart, "", seen, sequences, logprobs, of="current")
            if not self._update:  # before the first update, the weights are those of the step's start
                _add_differences(apart, " of the step's start", seen, sequences, logprobs, of="proximal")
        noted = self._ranks.gather(len(seen.by_logprob))
        if not any(noted):
            return  # the loss reads logits, of which no derivatives are noted, or no drawn row has a trained token
        sides = [_added(self._ranks.gather(side)) for side in (fast, left, largest)]
        tokens = _effective_number([size for sizes in self._ranks.gather(_sizes(seen)) for size in sizes])
        self._findings += _gradient_findings(*sides, limits=self._limits, of="the drawn group", tokens=tokens)
        self._compare_rows(apart)

    def pass_parts(
        self,
        parts: Sequence[BatchedDataDict],
        model: torch.nn.Module,
        run: Callable[[BatchedDataDict], object],
        *,
        reset: Callable[[], object],
    ) -> None:
        """Notes some elements of the gradient of each micro-batch alone, if the request has `every_part`. `judge`
        compares their sums with the gradient of the update. `run` passes a micro-batch forward and backward, and
        `reset` sets the gradients to 0."""
        if not self._request.every_part:
            return
        for part in parts:
            # a copy: a pass may write columns, which the step's own pass would then find
            run(part.select_indices(range(part.size)))
            self._parts.append(drawn_gradient(model, seed=self._config.run.seed))
            reset()

    def compare_reference(
        self, parts: Sequence[BatchedDataDict], model: Any, *, is_initial: bool, device: torch.device
    ) -> None:
        """Compares the log-probs of the drawn rows under the reference policy with those of a plain pass by `model`,
        which has the reference's weights. `is_initial` says whether these weights are unchanged since they were
        loaded; if not, this is a failed finding."""
        seen, apart = self.watched, dict[str, list[float]]()
        for sequences, logprobs in self._plain_passes(drawn_rows(parts), model, seen, device=device, backward=False):
            _add_differences(apart, " of the reference", seen, sequences, logprobs, of="reference")
        self._compare_rows(apart)
        words = "the weights of the reference have changed since they were loaded"
        self._findings.append(Finding(check="rows", ratio=0.0 if is_initial else math.inf, words=words))

    def _plain_passes(
        self, rows: Sequence[BatchedDataDict], model: Any, seen: Watched, *, device: torch.device, backward: bool
    ) -> Iterator[tuple[list[PlainSequence], list[float]]]:
        """Yields this rank's sequences with their log-probs by plain passes. With `backward`, each pass also subtracts
        its gradient from the model's gradients. The gradient follows from the slopes in `seen`: the derivatives of the
        loss by each token's log-prob and entropy.

        Equal sequences share a pass, because a gradient is linear in the slopes. But with `backward` in bfloat16, each
        sequence has a pass of its own, because the rounding of its log-probs changes its slopes.
        """
        sequences = [sequence for part in rows for sequence in plain_sequences(part)]
        shared = equal_sequences(sequences) if self._exact or not backward else [[each] for each in sequences]
        with plain_attention(model, longest=max((len(sequence.tokens) for sequence in sequences), default=0)):
            for equal in _filled(shared, self._ranks, lambda: [NO_SEQUENCE]):
                logprobs = plain_pass(
                    model,
                    equal[0].tokens,
                    temperature=self._config.generator.temperature,
                    device=device,
                    supports=equal[0].supports,
                    slopes=Derivatives(*(_slopes(seen, equal, of=of) for of in Derivatives._fields))
                    if backward
                    else None,
                    axes=self._axes,
                    tops=equal[0].tops,
                    rounded=_trained_logprobs(seen, equal[0]) if backward and not self._exact else None,
                    factor=-float(self._ranks.world_size),
                )
                yield equal, logprobs

    def _compare_rows(self, apart: Mapping[str, Sequence[float]]) -> None:
        """Adds one finding for each policy: whether the log-probs that trained the drawn rows of all ranks agree with
        those of the plain second pass. `apart` has this rank's absolute differences, in nats, by policy: the current
        one (""), that of the step's start, and the reference. A collective."""
        found = self._ranks.gather({policy: Differences.of(values) for policy, values in apart.items()})
        for policy in dict.fromkeys(policy for own in found for policy in own):
            differences = sum((own[policy] for own in found if policy in own), Differences())
            self._findings += _row_findings(differences, policy=policy, config=self._config, exact=self._exact)

    def judge(self, plan: UpdatePlan, model: torch.nn.Module, state: Mapping[Any, Mapping[str, Any]]) -> None:
        """Compares the counts of the update, the derivatives of the loss by each token (coefficients), and the
        advantages that its passes used with the formulas. Derivatives by masked tokens must be 0. Compares the gradient
        with the sums that `pass_parts` noted. Notes elements of the weights for `compare_elements`. Call it between the
        update's backward passes and the clipping of the gradients. `state` is that of the optimizer."""
        expected = self._request.counts[self._update]
        seen = self.watched
        passed = sum(self._ranks.gather(seen.tokens))
        self._findings.append(counts_finding(expected, tokens=plan.valid_toks, sequences=plan.valid_seqs))
        self._findings.append(counts_finding(expected, tokens=passed, sequences=plan.valid_seqs))
        # if the counts are not those of the lease, the formulas may divide by 0 for samples that the lease leaves out
        if self._axes is not None and not any(finding.failed for finding in self._findings[-2:]):
            for of in Derivatives._fields:
                column = seen.slopes.get(of, {})
                largest = max((abs(each) for values in column.values() for each in values), default=0.0)
                scale = max(self._ranks.gather(largest)) or 1.0
                compare = partial(
                    coefficients,
                    self._axes,
                    self._rewarded(seen.samples),
                    expected,
                    column,
                    scale=scale,
                    of=of,
                )
                self._findings += judged("coefficients", compare)
        inside, outside = (max(ranks) for ranks in zip(*self._ranks.gather((seen.inside, seen.outside)), strict=True))
        if seen.own is not None:
            self._findings += seen.own.findings(scale=inside)
        if outside > 0:
            masked = masked_finding(outside, inside=inside, kind=FORMULA if seen.own is None else MASKS)
            if masked.failed:  # the plain passes leave out masked tokens, so their gradient differs for this reason
                self._findings = [finding for finding in self._findings if finding.check != "gradient"]
            self._findings.append(masked)
        self._findings += advantage_findings(self._request, seen.samples)
        self._norm = math.sqrt(sum(self._ranks.gather(sum(squares(model, world_size=self._ranks.world_size).values()))))
        if self._parts and self._repeats_itself():
            self._compare_parts(drawn_gradient(model, seed=self._config.run.seed))
        if self._config.learner.optimizer.own is None:  # only AdamW's state is known
            self._elements = DrawnElements(model, state, seed=self._config.run.seed + self._train_calls + self._update)
            # a tensor that had no gradient in some updates, as that of an expert without tokens, has made fewer steps
            steps = max((int(moments["step"]) for moments in state.values() if moments), default=0)
            self._findings.append(steps_finding(steps, expected=self._optimizer_steps))

    def _rewarded(self, samples: Mapping[int, Sample]) -> Mapping[int, Sample]:
        """Returns the samples with the rewards of the request, or unchanged if the request has no rewards."""
        rewards = self._request.rewards
        return {n: replace(sample, reward=rewards[n]) for n, sample in samples.items()} if rewards else samples

    def _repeats_itself(self) -> bool:
        """Returns whether the loss has the same gradient in each pass. A loss of the user's own may draw random
        numbers, so for such a loss the result is True only if some rank has called it twice with the same rows, and no
        rank had a problem, such as different derivatives. A collective."""
        own = self.watched.own
        if own is None:
            return True
        called = self._ranks.gather((bool(own.of_group), own.problem))
        return any(compared for compared, _ in called) and not any(problem for _, problem in called)

    def _compare_parts(self, whole: DrawnGradient) -> None:
        """Compares drawn elements of the update's gradient with the sums of the same elements over passes of each
        micro-batch alone."""
        fast, left, largest = dict[str, float](), dict[str, float](), dict[str, float]()
        none = [0.0] * PART_ELEMENTS
        for name in dict.fromkeys(name for drawn in (whole, *self._parts) for name in drawn):
            elements, parts = whole.get(name, none), [part.get(name, none) for part in self._parts]
            sums = [sum(values) for values in zip(*parts, strict=True)]  # fsum may raise an error for infinite values
            fast[name] = math.fsum(value**2 for value in elements)
            left[name] = math.fsum((value - own) ** 2 for value, own in zip(elements, sums, strict=True))
            largest[name] = max(math.fsum(value**2 for value in drawn) for drawn in (elements, *parts))
        sides = [_added(self._ranks.gather(side)) for side in (fast, left, largest)]
        self._findings += _gradient_findings(*sides, limits=self._limits, of="the update", tokens=math.inf)

    @property
    def _limits(self) -> GradientLimits:
        return GRADIENT_FLOAT32 if self._exact else GRADIENT_BFLOAT16

    def compare_elements(self, *, norm: float) -> None:
        """Compares elements of the weights after the optimizer's step with AdamW's formula; not for an optimizer of the
        user's own, which has no formula. Also compares the norm of the gradients that the clipping has measured
        (`norm`) with a second sum. Not a collective."""
        learner = self._config.learner
        if self._elements is not None:
            rate = rate_of_step(learner.optimizer, step=self._train_calls, total_steps=learner.total_steps)
            self._findings += self._elements.findings(learner.optimizer, rate=rate, norm=norm)
        words = f"the clipping measured the gradient norm {norm:.9g}, and a second sum gives {self._norm:.9g}"
        ratio = abs(norm - self._norm) / (EQUAL_NORMS * self._norm) if self._norm else norm
        self._findings.append(Finding(check="optimizer", ratio=ratio, words=words))


def judged(check: str, compare: Callable[[], list[Finding]]) -> list[Finding]:
    """Returns the findings of `compare`. If it raises an error, that is a failed finding too: a rank that ended with an
    error would leave the others waiting in a collective."""
    try:
        return compare()
    except Exception as error:
        return [Finding(check=check, ratio=math.inf, words=f"the formulas failed: {describe_error(error)}")]


def _filled(own: Sequence[Any], ranks: Collectives, empty: Callable[[], Any]) -> list[Any]:
    """Returns the inputs `own` of this rank's passes, followed by empty inputs, so that all ranks make the same number
    of passes. A collective."""
    return [*own, *(empty() for _ in range(max(ranks.gather(len(own))) - len(own)))]


def _slopes(watched: Watched, sequences: Sequence[PlainSequence], *, of: str) -> list[float]:
    """Returns the slope of each next token of equal sequences, added up over the sequences: the derivative of the loss
    by `of`, a field of `Derivatives`. It is 0 for tokens that are not trained."""
    column, slopes = watched.slopes.get(of, {}), []
    for sequence in sequences:
        at = dict(zip(watched.places.get(sequence.number, []), column.get(sequence.number, []), strict=False))
        slopes.append([at.get(place, 0.0) for place in sequence.row_places])
    return [sum(each) for each in zip(*slopes, strict=True)]


def _trained_logprobs(watched: Watched, sequence: PlainSequence) -> list[float]:
    """Returns the log-prob with which each next token of a sequence is trained; 0 for tokens that are not trained."""
    sample = watched.samples.get(sequence.number)
    at = {} if sample is None else dict(zip(watched.places[sequence.number], sample.current, strict=True))
    return [at.get(place, 0.0) for place in sequence.row_places]


def _add_differences(
    apart: dict[str, list[float]],
    policy: str,
    watched: Watched,
    sequences: Sequence[PlainSequence],
    logprobs: Sequence[float],
    *,
    of: str,
) -> None:
    """Appends to `apart[policy]` the absolute difference of each trained token of equal sequences: between its log-prob
    by a plain pass and that in the column `of` of its sample. Leaves out samples without this column."""
    for sequence in sequences:
        sample = watched.samples.get(sequence.number)
        column: Sequence[float] = [] if sample is None else getattr(sample, of)
        if column:
            at = dict(zip(watched.places[sequence.number], column, strict=True))
            places = zip(sequence.row_places, logprobs, strict=True)
            apart.setdefault(policy, []).extend(abs(at[place] - own) for place, own in places if place in at)


def _row_findings(found: Differences, *, policy: str, config: Config, exact: bool) -> list[Finding]:
    """Returns a finding that judges how far the log-probs of a policy for the drawn rows of all ranks differ from those
    of plain passes."""
    if exact:
        limits = ParityLimits.of(config, temperature=config.generator.temperature)
        ratio, words = found.max_nats / limits.largest_nats, f"by at most {found.max_nats:.3g} nats"
    else:
        # half of the accepted difference between engine and learner, because both passes are the learner's
        limit_nats = config.weights.parity_mean_nats / 2 * room_for_few(found.tokens)
        mean_nats = found.spread().mean_nats
        ratio, words = mean_nats / limit_nats, f"by {mean_nats:.3g} nats on average (limit {limit_nats:.3g})"
    words = f"log-probs{policy} of {found.tokens} tokens differ {words} from those of their rows alone"
    return [Finding(check="rows", ratio=ratio, words=words)]


def _sizes(watched: Watched) -> list[float]:
    """Returns for each trained token the size of the loss's gradient by its logits, up to a factor: with p the token's
    probability, |∂L/∂log p| · (1 − p)."""
    return [
        abs(slope) * -math.expm1(min(logprob, 0.0))
        for number, slopes in watched.by_logprob.items()
        for slope, logprob in zip(slopes, watched.samples[number].current, strict=True)
    ]


def _effective_number(sizes: Sequence[float]) -> float:
    """Returns (Σs)² / Σs² of the sizes s, at least 1. If all sizes are equal, this is their number; a few large ones
    make it smaller."""
    squares_of_all = math.fsum(size**2 for size in sizes)
    return max(1.0, math.fsum(sizes) ** 2 / squares_of_all) if squares_of_all else 1.0


def _gradient_findings(
    fast: Mapping[str, float],
    left: Mapping[str, float],
    largest: Mapping[str, float],
    *,
    limits: GradientLimits,
    of: str,
    tokens: float,
) -> Iterator[Finding]:
    """Yields a finding for all tensors together, and for each tensor, from sums of squares by tensor: `fast` of the
    gradient, `left` of its difference from the second computation, and `largest` of the largest partial sum. `tokens`
    is the effective number of tokens that have a gradient. Yields none if there is no gradient.

    The difference is measured against the largest partial sum: gradients of samples that cancel each other have the
    rounding errors of their sums.
    """
    if not any(fast.values()) and not any(left.values()):
        return
    whole, more = math.sqrt(math.fsum(largest.values())), limits.of_token / math.sqrt(tokens)
    apart = math.sqrt(math.fsum(left.values())) / whole
    words = f"the gradient of {of} differs by {apart:.3g} of its norm"
    yield Finding(check="gradient", ratio=apart / (limits.of_all + more), words=words)
    for name, square in largest.items():
        apart = math.sqrt(left.get(name, 0.0)) / max(math.sqrt(square), limits.least * whole)
        words = f"the gradient of {name} for {of} differs by {apart:.3g} of its norm"
        yield Finding(check="gradient", ratio=apart / (limits.of_tensor + more), words=words)


def _added(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for part in parts:
        for name, value in part.items():
            total[name] += value
    return dict(total)


# --- the optimizer's step ---------------------------------------------------------------------------------------------

ELEMENTS = 4
"""Number of elements of each shard of a tensor that are compared with the optimizer's formula."""


class DrawnElements:
    """A few elements of this rank's shard of each trained tensor, drawn by `seed`, before and after an optimizer's
    step."""

    def __init__(self, model: torch.nn.Module, state: Mapping[Any, Mapping[str, Any]], *, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self._drawn: list[tuple[str, torch.Tensor, torch.Tensor, list[Element]]] = []
        for name, parameter in model.named_parameters():
            own = _own(parameter.detach()).flatten()
            if parameter.grad is None or not own.numel():
                continue
            places = torch.randint(own.numel(), (min(ELEMENTS, own.numel()),), generator=draw).to(own.device)
            known = state.get(parameter, {})
            columns = [own, _own(parameter.grad).flatten()]
            columns += [_own(known[key]).flatten() if key in known else torch.zeros_like(own) for key in _MOMENTS]
            numbers = torch.stack([column[places].double() for column in columns], dim=1).tolist()
            steps = int(known["step"]) if known else 0
            elements = [
                Element(value=value, gradient=gradient, first=first, second=second, steps=steps)
                for value, gradient, first, second in numbers
            ]
            self._drawn.append((name, own, places, elements))

    def findings(self, settings: OptimizerSection, *, rate: float, norm: float) -> Iterator[Finding]:
        """Yields a finding for each drawn element. Call it after the step. `norm` is that of all gradients before they
        were clipped."""
        for name, own, places, elements in self._drawn:
            for element, value in zip(elements, own[places].double().tolist(), strict=True):
                expected = stepped(element, settings, rate=rate, norm=norm)
                yield Finding(
                    check="optimizer",
                    ratio=difference(element, expected, value, rate=rate),
                    words=(
                        f"AdamW's step gave an element of {name} the value {value:.9g} (before: {element.value:.9g}), "
                        f"and its formula gives {expected:.9g}"
                    ),
                )


_MOMENTS = ("exp_avg", "exp_avg_sq")


def frozen_tensors(
    model: torch.nn.Module,
    state: Mapping[Any, Mapping[str, Any]],
    same: Sequence[str],
    learner: LearnerSection,
    *,
    train_calls: int,
) -> list[Finding]:
    """Returns a finding for each tensor in `same`, whose bits a training step did not change, except for tensors that
    have made fewer optimizer steps than others, because they had no gradient in some updates. A finding has failed if
    the moments of an element and the learning rate predict a change above the rounding of its value. Returns none for
    an optimizer of the user's own, whose state predicts nothing."""
    findings, settings = list[Finding](), learner.optimizer
    if settings.own is not None:
        return findings
    rate = rate_of_step(settings, step=train_calls, total_steps=learner.total_steps)
    newest = max((int(known["step"]) for known in state.values() if known), default=0)
    for name, parameter in model.named_parameters():
        plain = name.replace(_CHECKPOINT_PREFIX, "")
        known = state.get(parameter, {})
        # the optimizer leaves out a tensor without a gradient, as that of an expert without tokens
        if plain not in same or not known or int(known["step"]) < newest:
            continue
        (first_decay, second_decay), steps = settings.betas, int(known["step"])
        first = _own(known["exp_avg"]).double() / (1 - first_decay**steps)
        second = _own(known["exp_avg_sq"]).double() / (1 - second_decay**steps)
        predicted = (rate * first / (second.sqrt() + settings.eps)).abs()
        roundings = predicted / (2**-23 * _own(parameter.detach()).double().abs().clamp(min=2**-126))
        moved = int((roundings > 1).sum())
        findings.append(
            Finding(
                check="frozen",
                ratio=float("inf") if moved else 0.0,
                words=f"no bit of {plain} changed, although its moments predict a change of {moved} elements",
            )
        )
    return findings
