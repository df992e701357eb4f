"""Check 6 of the audit: computes some trained steps a second time by a plain path (as the run's witness does while it
trains), from the batches and weights that the run kept.

Each row passes alone through a whole model of transformers with the kept weights, and `asyncrl.witness` has the
formulas: no Ray, no shards, no packing. The check uses no code by which the learner computes log-probs, advantages, the
loss, the gradient or new weights, except an optimizer of the user's own. It shares with the run the code that reads the
configuration (`build_loss`, `resolve_advantage`, `sample_axes`), a lease (`completions_of`) and files, and the process
that computes rewards.

The checks of a step, in the order in which a reader should look at them: a later one reads what an earlier one checks.

    counts      samples and tokens
    rewards     of the samples whose texts the run kept, scored again; not only of the chosen steps
    rows        log-probs at the start of the step that the run kept
    sampling    sampling log-probs of the tokens that were sampled with the weights before the step
    kl          recorded KL by which the β of a penalty is set
    advantages  from the rewards
    rate        recorded learning rates; not only of the chosen steps
    penalty     recorded β of the penalty with `control`; not only of the chosen steps
    gradient    norm of the loss's gradient over all rows, with the coefficients of the objective's formula
    optimizer   the new weights, by AdamW from zero moments; for the first steps of the run. An optimizer of the user's
                own is called instead, with whole tensors and no state at first
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
from safetensors import SafetensorError

from asyncrl.algorithms.baselines import DiscountedOutcome, has_token_advantages, resolve_advantage
from asyncrl.algorithms.calibration import needs_calibration
from asyncrl.algorithms.loss import build_loss
from asyncrl.algorithms.presets import advantage_of, own_loss
from asyncrl.audit.comparisons import EQUAL_GRADIENTS, PlainComputation, comparisons
from asyncrl.audit.history import Counterexample, History, NotPossible
from asyncrl.audit.kept_batches import check_same_settings, kept_batch, kept_steps
from asyncrl.audit.plain_bounds import k3_of, with_beta, with_bounds
from asyncrl.audit.plain_model import CPU, Moments, OwnOptimizer, PlainModel, Tensors, norm_of
from asyncrl.audit.rescored import MOST_GROUPS, reward_differences
from asyncrl.audit.trained_rows import TrainedRow, trained_rows
from asyncrl.checkpoints.directory import CHECKPOINTS, HF, complete_steps, folder_of
from asyncrl.common.version import Version
from asyncrl.config.import_path import search_folders
from asyncrl.config.named_code import untrusted
from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.errors import CheckpointError
from asyncrl.learner.audit_records import TrainedStep
from asyncrl.learner.records import StepRecord, read_config, read_lines
from asyncrl.learner.saving import PREV_LOGPROBS, KeptSteps
from asyncrl.learner.witnessed_step import (
    EQUAL_TOKENS,
    ExpectedBeta,
    completions_of,
    controlled_penalty,
    filtered_reward,
    sample_axes,
)
from asyncrl.weights.parity import ParityLimits
from asyncrl.witness.advantages import TokenColumns, of_tokens, unlike, whiten
from asyncrl.witness.judge import EQUAL, ROUNDING_NATS
from asyncrl.witness.objective import Axes, Counts, Derivatives, Sample, derivatives
from asyncrl.witness.optimizer import rate_of_step
from asyncrl.witness.plain_pass import plain_attention, plain_pass
from asyncrl.witness.step import Completion, advantages, counts, trained


def chosen_steps(trained_steps: int, wanted: int) -> tuple[list[int], list[int]]:
    """Returns the indices of steps to compute again: the first ones of a run, for which AdamW's moments are known, and
    others, evenly spread up to the last one. Together they are `wanted` steps, or all.

    >>> chosen_steps(24, 5)
    ([0, 1, 2], [12, 23])
    >>> chosen_steps(3, 5)
    ([0, 1, 2], [])
    """
    first = min(trained_steps, wanted if wanted >= trained_steps else (wanted + 1) // 2)
    others = min(wanted, trained_steps) - first
    return [*range(first)], [first - 1 + (place + 1) * (trained_steps - first) // others for place in range(others)]


def steps_witnessed(
    history: History, *, steps: int, progress: Callable[[str], None], trust: bool = False
) -> PlainComputation:
    """Check 6: computes `steps` of the surviving steps again by a plain path, and compares the numbers with those of
    the run. Raises NotPossible if the run did not keep what this needs or if a restart changed a setting on which the
    numbers depend. Raises Counterexample if a kept batch is not the one that was trained, or if a file is damaged. An
    optimizer that the run's config names is imported only with `trust`."""
    kept, config = kept_steps(history), read_config(history.directory)
    check_same_settings(history)
    first, others = chosen_steps(len(history.steps), steps)
    lines = {each.step: each for each in read_lines(history.directory / "steps.jsonl", StepRecord) if each.trained}
    model = PlainModel(_described(history), lora=config.model.lora)
    witness = _Witness(config=config, kept=kept, model=model, lines=lines, trust=trust)
    if history.forked_from is not None and config.model.lora is None and witness.reads_reference:
        raise NotPossible(
            f"the run began with the weights of {history.forked_from}, and its reference policy is the model at "
            "model.path, whose weights the run did not keep"
        )
    witness.compare_betas(history)
    for done, place in enumerate([*first, *others]):
        step = history.steps[place]
        progress(f"6 witness: computing step {step.step} plainly ({done + 1} of {len(first) + len(others)})")
        witness.witness(step, initial=history.steps[0], consecutive=place in first)
    witness.compare_rates(history)
    progress("6 witness: scoring samples again")
    witness.compare_rewards(history)
    return PlainComputation(
        steps=tuple(history.steps[place].step for place in (*first, *others)),
        optimizer_steps=tuple(witness.optimizer_steps),
        trained_steps=len(history.steps),
        comparisons=tuple(witness.found.values()),
        left_out=witness.left_out_in_words(),
    )


def _described(history: History) -> Path:
    """Returns the folder of the run with the model's `config.json`."""
    folders = [kept_steps(history).model_folder]
    checkpoints = history.directory / CHECKPOINTS
    folders += [folder_of(checkpoints, step) / HF for step in reversed(complete_steps(checkpoints))]
    for folder in folders:
        if (folder / "config.json").is_file():
            return folder
    raise NotPossible(
        f"the run has no config.json of its model in {folders[0]} or in a checkpoint's folder {HF}: it was trained by "
        "an earlier version of asyncrl"
    )


class _Witness:
    """Computes steps again by a plain path, one after the other, the first ones of the run first. `lines` are the
    records of the trained steps in steps.jsonl. `found` has the results of the comparisons by check."""

    def __init__(
        self, *, config: Config, kept: KeptSteps, model: PlainModel, lines: Mapping[int, StepRecord], trust: bool
    ) -> None:
        self.optimizer_steps: list[int] = []
        self._left_out: list[str] = []
        self._config = config
        self._kept = kept
        self._model = model
        self._lines = lines
        self._controlled = controlled_penalty(config)
        self._betas: dict[int, float] = {}
        self._optimizer = self._read_optimizer(trust=trust)
        self._unjudged = 0
        self._unusable = 0
        self._sample_axes = sample_axes(config)
        self._token_rule = _token_rule(config)
        self._has_bounds_of_step = False
        self._objective = self._read_objective()
        tolerance = ParityLimits.of(config, temperature=config.generator.temperature).largest_nats
        equal = EQUAL if self._token_rule is None else EQUAL_TOKENS
        self.found = {
            each.check: each
            for each in comparisons(tolerance_nats=tolerance, equal_advantages=equal, most_groups=MOST_GROUPS)
        }

    @property
    def reads_reference(self) -> bool:
        """Whether the objective or the advantage estimator reads log-probs under the reference policy."""
        kl = self._token_rule is not None and self._token_rule["kl"] is not None
        return kl or _reads_reference(self._objective)

    def left_out_in_words(self) -> tuple[str, ...]:
        """Returns what was not computed again, with the reasons, for the audit's text and certificate."""
        found = list(self._left_out)
        if self._unusable:
            found.append(f"{self._unusable:,} tokens with a number that is not finite, which the ranks left out")
        if self._unjudged:
            count = f"{self._unjudged:,} changes of weights"
            found.append(f"{count} whose gradients are nearly 0 or cancel out, so that rounding decides where they go")
        return tuple(found)

    def _read_optimizer(self, *, trust: bool) -> Moments | OwnOptimizer | None:
        """Returns the optimizer for whole tensors; None for an optimizer of the user's own without `trust`."""
        settings = self._config.learner.optimizer
        if settings.own is None:
            return Moments(settings)
        if not trust and untrusted(self._config, sections=("learner.optimizer",)):
            self._left_out.append(
                f"the optimizer's step, because learner.optimizer.name = {settings.name} is code that the run names, "
                "and it is imported only with --trust"
            )
            return None
        search_folders([Path()], [settings.name])
        return OwnOptimizer(settings)

    def _read_objective(self) -> Axes | None:
        """Returns the axes (the settings) of the objective. Returns None if the witness has no formula for its
        derivatives: for a loss of the user's own, and for bounds that depend on an interpolated policy and on all
        tokens of a step."""
        later = "the gradient and the optimizer's step"
        if own_loss(self._config.algorithm) is not None:
            self._left_out.append(f"{later}, because algorithm.loss is your own code")
            return None
        objective = build_loss(self._config).objective  # type: ignore[attr-defined]
        self._has_bounds_of_step = needs_calibration(objective)
        if self._has_bounds_of_step and objective.proximal == "interpolated":
            self._left_out.append(f"{later}, because bounds of algorithm.loss depend on an interpolated policy")
            return None
        axes: Axes = msgspec.to_builtins(objective)
        return axes

    def witness(self, step: TrainedStep, *, initial: TrainedStep, consecutive: bool) -> None:
        """Computes a step again, and compares its numbers with those of the run. With `consecutive`, all earlier steps
        of the run were computed before, so the optimizer's state is known, and the new weights are compared too.
        `initial` is the run's first step."""
        lease, rows = kept_batch(self._kept, step)
        completions = completions_of(lease)
        kept = trained(completions, axes=self._sample_axes, config=self._config)
        found = trained_rows(step, lease, rows, kept)
        self._unusable += sum(row.unusable for row in found.values())
        self._compare_counts(step, rows, kept, found)
        longest = max((len(each.tokens) for row in found.values() for each in row.sequences), default=0)
        with plain_attention(self._model.network, longest=longest):
            reference = self._reference(found, Version(initial.incarnation, initial.step))
            self._load(Version(step.incarnation, step.step))
            start = {n: self._logprobs(row) for n, row in found.items()}
            self._compare_rows(step, found, start)
            self._compare_kl(step, found, start, reference)
            self._compare_advantages(completions, found, start, reference)
            if self._objective is not None:
                optimizer = self._optimizer if consecutive else None
                self._train(step, completions, kept, found, start, reference, optimizer=optimizer)

    def compare_rewards(self, history: History) -> None:
        """Scores samples whose texts the run kept again, of at most `MOST_GROUPS` groups, and compares the rewards."""
        failed = 0
        try:
            for apart, where in reward_differences(history, self._config):
                if apart is None:
                    failed += 1
                else:
                    self._compare("rewards", 1, apart, where)
        except NotPossible as why:
            self._leave_out(f"the rewards, because {why}")
        if failed:
            self._leave_out(
                f"{failed:,} rewards that failed now or in the run, but not both: time limits depend on the machine"
            )

    def compare_rates(self, history: History) -> None:
        """Compares the recorded learning rates of all surviving steps with the schedule. Steps that the run
        skipped without training are not compared: they advance neither the number of steps nor the schedule."""
        settings, total = self._config.learner.optimizer, self._config.learner.total_steps
        for step in (each.step for each in history.steps if each.step in self._lines):
            found, rate = self._lines[step].learning_rate, rate_of_step(settings, step=step, total_steps=total)
            where = f"step {step} has the learning rate {found:.6g} in steps.jsonl, and its schedule gives {rate:.6g}"
            self._compare("rate", 1, abs(found - rate) / (rate or settings.learning_rate or 1.0), where)

    def compare_betas(self, history: History) -> None:
        """Compares the recorded β of the penalty with `control` in all surviving steps with the β that follows from the
        recorded KL of the steps before. Stores the latter, because the gradients are computed with it."""
        chain = ExpectedBeta(self._config)
        for step in (each.step for each in history.steps if chain.value is not None):
            if (line := self._lines.get(step)) is None:
                raise Counterexample(f"steps.jsonl has no line of step {step}, which was trained")
            expected = self._betas[step] = chain.value or 0.0
            found = line.number("penalty_beta")
            where = f"a penalty of step {step} has β = {found} in steps.jsonl, and the steps before give {expected:.9g}"
            apart = math.inf if found is None else abs(found - expected) / expected
            self._compare("penalty", 1, apart, where)
            # the next β follows from the recorded one, so that only the step with a wrong β differs
            chain.value = expected if found is None else found
            chain.advance(step, line.kl_nats)

    def _load(self, version: Version) -> None:
        if version not in self._kept.versions():
            raise NotPossible(f"the weights of version {version} were not kept")
        path = self._kept.weights_path(version)
        try:
            self._model.load(path)
        except (OSError, KeyError, TypeError, ValueError, SafetensorError, CheckpointError) as error:
            raise Counterexample(f"{path} cannot be read: {type(error).__name__}: {error}") from error

    def _compare(self, check: str, number: int, worst: float, where: str) -> None:
        self.found[check] = self.found[check].plus(number, worst, where)

    # --- log-probs by the plain pass --------------------------------------------------------------------------------

    def _reference(self, rows: Mapping[int, TrainedRow], initial: Version) -> dict[int, list[float]]:
        """Returns the log-probs of rows under the reference: the weights with which the run began. Returns an empty
        mapping if neither the objective nor the advantage estimator reads them."""
        if not self.reads_reference:
            return {}
        self._load(initial)
        with self._model.without_adapter():
            return {n: self._logprobs(row) for n, row in rows.items()}

    def _logprobs(self, row: TrainedRow, slopes: Derivatives | None = None) -> list[float]:
        """Returns the log-probs of the row's trained tokens by plain passes. With `slopes`, the derivatives of the loss
        by these log-probs, by their entropies and by their centering, also adds the row's gradient to the gradients of
        the model."""
        at: dict[int, float] = {}
        by_place = [dict(zip(row.places, each, strict=True)) for each in slopes or ()]
        for sequence in row.sequences:
            places = range(sequence.start + 1, sequence.start + len(sequence.tokens))
            own = plain_pass(
                self._model.network,
                sequence.tokens,
                temperature=self._config.generator.temperature,
                device=CPU,
                supports=sequence.supports,
                slopes=Derivatives(*([at.get(place, 0.0) for place in places] for at in by_place)) if slopes else None,
                axes=self._objective,
                tops=sequence.tops,
            )
            at |= dict(zip(places, own, strict=True))
        return [at[place] for place in row.places]

    # --- the checks -------------------------------------------------------------------------------------------------

    def _compare_counts(
        self, step: TrainedStep, rows: BatchedDataDict, kept: Sequence[bool], found: Mapping[int, TrainedRow]
    ) -> None:
        recorded = [sample.trained for group in step.groups for sample in group.samples]
        masks = (rows["sample_mask"] > 0).tolist()
        samples = {"by the record": sum(recorded), "by the kept masks": sum(masks), "by the rewards": sum(kept)}
        tokens = sum(len(row.places) for row in found.values())
        apart = max(sum(a != b for a, b in zip(kept, own, strict=True)) for own in (recorded, masks))
        apart = max(apart, abs(tokens - sum(step.token_staleness)))
        where = (
            f"step {step.step} trained {sum(step.token_staleness)} tokens by its record, and its filters keep "
            f"{tokens}; the samples are {', '.join(f'{count} {how}' for how, count in samples.items())}"
        )
        self._compare("counts", tokens, float(apart), where)

    def _compare_rows(
        self, step: TrainedStep, rows: Mapping[int, TrainedRow], start: Mapping[int, list[float]]
    ) -> None:
        for n, row in rows.items():
            fresh = [version == step.step for version in row.column("weight_versions")]
            for check, name, picked in (
                ("rows", PREV_LOGPROBS, [True] * len(fresh)),
                ("sampling", "generation_logprobs", fresh),
            ):
                known = row.column(name)
                own = [t for t, is_picked in enumerate(picked) if is_picked and known]
                for t in own:
                    apart = abs(known[t] - start[n][t])
                    where = f"trained token {t} of {row.name} has the log-prob {known[t]:.6f} in the kept batch"
                    self._compare(check, 1, apart, f"{where}, and {start[n][t]:.6f} by the plain pass")

    def _compare_kl(
        self,
        step: TrainedStep,
        rows: Mapping[int, TrainedRow],
        start: Mapping[int, list[float]],
        reference: Mapping[int, list[float]],
    ) -> None:
        """Compares the recorded KL by which the β of a penalty is set: the mean of e^d − 1 − d over all tokens. Here, d
        is the log-prob of the reference minus that at the start of the step, or the latter minus that of the sampler.
        A small difference of a token's log-prob changes the token's term by |e^d − 1| times this difference."""
        if self._controlled is None:
            return
        if self._objective is None or self._objective["proximal"] == "interpolated":
            self._leave_out("the KL by which a penalty is set, because the proximal policy is interpolated")
            return
        of_reference = self._controlled["q"] == "reference"
        apart = [
            (other - own) * (1 if of_reference else -1)
            for n, row in rows.items()
            for own, other in zip(
                start[n], reference[n] if of_reference else row.column("generation_logprobs"), strict=True
            )
        ]
        plain, slope = k3_of(apart)
        found = self._lines[step.step].kl_nats.get(self._controlled["q"], math.nan if apart else 0.0)
        where = f"step {step.step} has the KL {found:.9g} in steps.jsonl, and the plain log-probs give {plain:.9g}"
        self._compare("kl", 1, abs(found - plain) / (slope + self.found["kl"].limit), where)

    def _compare_advantages(
        self,
        completions: Sequence[Completion],
        rows: Mapping[int, TrainedRow],
        start: Mapping[int, list[float]],
        reference: Mapping[int, list[float]],
    ) -> None:
        if self._sample_axes is None:
            self._leave_out("the advantages, because algorithm.advantage is your own code")
            return
        of_samples = advantages(completions, axes=self._sample_axes, config=self._config)
        if self._token_rule is not None:
            self._compare_token_advantages(of_samples, rows, start, reference)
            return
        largest = max((abs(value) for value in of_samples), default=0.0) or 1.0
        for n, row in rows.items():
            own = row.column("advantages")
            if not own:
                continue
            apart = max((abs(value - of_samples[n]) for value in own), default=0.0)
            where = f"{row.name} has the advantage {own[0]:.9g}, and its rewards give {of_samples[n]:.9g}"
            self._compare("advantages", len(own), apart / largest, where)

    def _compare_token_advantages(
        self,
        outcomes: Sequence[float],
        rows: Mapping[int, TrainedRow],
        start: Mapping[int, list[float]],
        reference: Mapping[int, list[float]],
    ) -> None:
        rule = self._token_rule
        assert rule is not None, "the caller checks this"
        if any(row.unusable for row in rows.values()):
            self._leave_out(
                "the advantages of steps with a number that is not finite, because the ranks computed the advantages "
                "before they left the token with this number out"
            )
            return
        if rule["kl"] is not None and len({outcomes[n] for n in rows}) == 1:
            self._leave_out(
                "the advantages of steps whose rewards do not differ, because only the KL is whitened "
                "then, and rounding may decide it"
            )
            return
        expected: list[float] = []
        weights: list[float] = []
        found: list[float] = []
        for n, row in rows.items():
            columns = TokenColumns(policy=start[n], reference=reference.get(n, ()))
            own = of_tokens(rule, outcomes[n], columns)[0]
            expected += own
            weights += [1 / len(own) if rule["whiten"] == "samples" else 1.0] * len(own)
            found += row.column("advantages")
        if rule["whiten"] != "none":
            expected = whiten(rule, expected, weights)
        names = [row.name for row in rows.values()]
        where = (
            f"the advantages of the tokens of {names[0]} and others are not those of {rule['name']}" if names else ""
        )
        self._compare("advantages", len(found), unlike(expected, found, whitened=False), where)

    def _leave_out(self, words: str) -> None:
        if words not in self._left_out:
            self._left_out.append(words)

    # --- the gradient and the optimizer -----------------------------------------------------------------------------

    def _train(
        self,
        step: TrainedStep,
        completions: Sequence[Completion],
        kept: Sequence[bool],
        rows: Mapping[int, TrainedRow],
        start: Mapping[int, list[float]],
        reference: Mapping[int, list[float]],
        *,
        optimizer: Moments | OwnOptimizer | None,
    ) -> None:
        """Computes the updates of a step, and compares the mean norm of their gradients with the recorded one. With an
        `optimizer` that has made all earlier steps, also computes and compares the weights after the step. Without one,
        leaves out a step with several updates."""
        learner = self._config.learner
        updates = 1 if len(kept) % (learner.updates_per_step * learner.ranks) else learner.updates_per_step
        if updates > 1 and optimizer is None:
            after = " after the first steps of the run" if self._optimizer is not None else ""
            self._leave_out(
                f"the gradient and the optimizer's step{after}, because the weights between the {updates} updates of a "
                "step follow from the optimizer's state"
            )
            return
        axes = self._axes_of_step(step, rows, start, reference)
        size = len(kept) // updates
        rate = rate_of_step(learner.optimizer, step=step.step, total_steps=learner.total_steps)
        before = values = self._model.values()
        norms = []
        left = [
            each._replace(stale=each.stale + rows[n].unusable) if n in rows else each
            for n, each in enumerate(completions)
        ]
        for update, of_update in enumerate(counts(left, kept, rows_per_update=size, config=self._config)):
            own = {n: row for n, row in rows.items() if n // size == update and row.places}
            if not own:
                continue
            current = start if not update else {n: self._logprobs(row) for n, row in own.items()}
            samples = {n: self._sample(row, step, start[n], current[n], reference.get(n, ())) for n, row in own.items()}
            recorded = step.grad_norm if updates == 1 else None
            gradient = self._gradient(axes, own, samples, of_update, recorded=recorded)
            norms.append(norm_of(gradient))
            if optimizer is not None:
                values = optimizer.step(values, gradient, rate=rate)
                for name, parameter in self._model.trained.items():
                    parameter.data = values[name].float()
        norm = sum(norms) / max(len(norms), 1)
        apart = abs(norm - step.grad_norm) / (step.grad_norm or 1.0)
        where = (
            f"the gradient of step {step.step} has the recorded norm {step.grad_norm:.9g}, and the plain one {norm:.9g}"
        )
        self._compare("gradient", len(norms), apart, where)
        if optimizer is not None:
            self._compare_changes(step, before, values, optimizer)

    def _sample(
        self,
        row: TrainedRow,
        step: TrainedStep,
        start: Sequence[float],
        current: Sequence[float],
        reference: Sequence[float],
    ) -> Sample:
        return Sample(
            group=row.completion.group,
            reward=filtered_reward(row.completion, self._config),
            weight=1.0,
            token_weights=row.column("token_mask"),
            advantages=row.column("advantages"),
            current=current,
            proximal=start,
            behaviour=row.column("generation_logprobs"),
            reference=reference,
            staleness=[step.step - version for version in row.column("weight_versions")],
        )

    def _axes_of_step(
        self,
        step: TrainedStep,
        rows: Mapping[int, TrainedRow],
        start: Mapping[int, list[float]],
        reference: Mapping[int, list[float]],
    ) -> Axes:
        """Returns the axes of the objective, with the β and the bounds that they have in this step."""
        assert self._objective is not None, "the caller checks this"
        axes = with_beta(self._objective, self._betas.get(step.step))
        if not self._has_bounds_of_step:
            return axes
        samples = [self._sample(row, step, start[n], start[n], reference.get(n, ())) for n, row in rows.items()]
        names = ("advantages", "current", "proximal", "behaviour", "reference")
        tokens = {name: [value for sample in samples for value in getattr(sample, name)] for name in names}
        return with_bounds(axes, tokens)

    def _gradient(
        self,
        axes: Axes,
        rows: Mapping[int, TrainedRow],
        samples: Mapping[int, Sample],
        of_update: Counts,
        *,
        recorded: float | None,
    ) -> Tensors:
        """Returns the gradient of an update. A token may be so near to the edge of a clip that rounding decides on
        which side it is. Then also the gradients of both sides are computed, and the one whose norm is nearest to
        `recorded` is returned; with None, always the gradient of the numbers as they are."""
        tried: list[tuple[float, Tensors]] = []
        seen: list[list[list[float]]] = []
        for apart in (0.0, ROUNDING_NATS, -ROUNDING_NATS):
            slopes = {n: derivatives(axes, sample, of_update, apart_nats=apart) for n, sample in samples.items()}
            numbers = [each.logprobs for each in slopes.values()]
            if any(_are_alike(numbers, before) for before in seen):
                continue
            seen.append(numbers)
            for n, row in rows.items():
                self._logprobs(row, slopes[n])
            gradient = self._model.gradient()
            off = 0.0 if recorded is None else abs(norm_of(gradient) - recorded) / (recorded or 1.0)
            if off <= EQUAL_GRADIENTS:
                return gradient
            tried.append((off, gradient))
        return min(tried, key=lambda each: each[0])[1]

    def _compare_changes(
        self, step: TrainedStep, before: Tensors, expected: Tensors, optimizer: Moments | OwnOptimizer
    ) -> None:
        """Compares the change of each tensor by the plain optimizer (from `before` to `expected`) with its change
        between the kept weights before and after the step."""
        by = "AdamW's formula" if isinstance(optimizer, Moments) else self._config.learner.optimizer.name
        self._load(step.made)
        found = self._model.values()
        self.optimizer_steps.append(step.step)
        for name, value in expected.items():
            judged = ~optimizer.decided_by_rounding(name).expand_as(value)
            by_formula, by_run = (value - before[name]) * judged, (found[name] - before[name]) * judged
            change = float(by_formula.norm())
            rounding = 2**-23 * float(before[name].norm())
            apart = max(float((by_run - by_formula).norm()) - rounding, 0.0)
            where = (
                f"step {step.step} changed {name} by {float(by_run.norm()):.6g} (norm) in the kept weights, and by "
                f"{change:.6g} by {by}"
            )
            worst = apart / change if change else (math.inf if apart else 0.0)
            self._compare("optimizer", int(judged.sum()), worst, where)
            self._unjudged += int((~judged).sum())


def _are_alike(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> bool:
    """Returns whether two lists of coefficients differ by rounding only. If a token were on another side of a bound,
    its coefficients would differ by more."""
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(a, b, strict=True)]
    largest = max((abs(value) for value, _ in pairs), default=0.0)
    return all(abs(a - b) <= 1e-4 * largest for a, b in pairs)


def _reads_reference(objective: Axes | None) -> bool:
    return objective is not None and "reference" in str(objective)


def _token_rule(config: Config) -> Axes | None:
    """Returns the settings (γ, KL, whitening) of an estimator that gives each token its own advantage; None if all
    tokens of a sample have the sample's advantage."""
    axes = resolve_advantage(advantage_of(config.algorithm))
    if not (isinstance(axes, DiscountedOutcome) and has_token_advantages(axes)):
        return None
    found: Axes = msgspec.to_builtins(axes)
    return {**found, "name": "discounted"}
