"""Checks of each step after its training: the engine's log-probs are those of the learner, a second computation (the
witness) agrees, the published weights change, and the loss is finite."""

import logging
from collections.abc import Sequence

from asyncrl.buffer.records import Lease
from asyncrl.config.schema import Config
from asyncrl.errors import NonFiniteError, ParityError, WitnessFailed
from asyncrl.learner.recording import StepRecorder
from asyncrl.learner.trained_prompts import TrainedPrompts
from asyncrl.learner.witnessed_step import ExpectedBeta, counts_of_step, rate_of_lease
from asyncrl.metrics.numbers import LEAST_PUBLISHED_BITS
from asyncrl.ranks.report import StepReport
from asyncrl.weights.parity import POOLED_TOKENS, ParityJudge, ParityLimits
from asyncrl.witness.judge import Finding, worst

logger = logging.getLogger(__name__)


class StepChecks:
    """Checks each step. It counts the steps in a row that the policy or the critic skipped. `recorder` has the metrics,
    and the last record before the run was resumed. `prompts` counts how often each prompt was trained."""

    def __init__(self, *, config: Config, recorder: StepRecorder, prompts: TrainedPrompts) -> None:
        self._config = config
        self._metrics = recorder.metrics
        self._beta = ExpectedBeta(config, recorder.before)
        self._prompts = prompts
        limits = ParityLimits.of(config, temperature=config.generator.temperature)
        self._judge = ParityJudge(limits, least_tokens=POOLED_TOKENS)
        self._nonfinite_in_a_row = 0
        self._said_few_bits = False

    def parity(self, report: StepReport, *, step: int) -> float | None:
        """Compares the learner's and the engine's log-probs of on-policy tokens, which must agree.

        Each difference is divided by its limit (`weights.parity_*`). Returns the largest of these ratios; None if the
        step has no on-policy token. If it is above 1, raises ParityError or logs an error, as
        `weights.on_parity_failure` says.
        """
        differences = report.on_policy_differences
        if not differences.tokens:
            return None
        verdict = self._judge.judge(differences)
        self._metrics.parity(differences.max_nats, ratio=verdict.ratio)
        if verdict.ratio <= 1.0:
            return verdict.ratio
        message = (
            f"step {step}: the learner's log-probs of on-policy tokens are not the engine's: {verdict.words}. The "
            "generators sample from other weights or with other numerics than the learner: check the dtype and the "
            "engine options, or raise the limits"
        )
        if self._config.weights.on_parity_failure == "stop":
            raise ParityError(message)
        logger.error("%s", message)
        return verdict.ratio

    def witness(self, reports: Sequence[StepReport | None], lease: Lease) -> dict[str, Finding]:
        """Compares the counts of trained samples and tokens with the lease, the learning rate with the schedule, the β
        of a penalty with the KL of the steps before, and the prompts with the data. Returns the worst finding of each
        check of the witness, from these comparisons and from those of the ranks in `reports`.

        If a check has failed, raises WitnessFailed or logs an error, as `witness.on_failure` says.
        """
        found = [finding for report in reports if report is not None for finding in report.findings.values()]
        policy = reports[0]
        if policy is not None and not policy.skipped:
            found.append(counts_of_step(lease, policy, config=self._config))
            found.append(rate_of_lease(lease, policy, config=self._config))
            more = (self._beta.finding(lease, policy), self._prompts.finding(lease))
            found += [finding for finding in more if finding is not None]
        by_check = worst(found)
        for finding in by_check.values():
            if finding.failed:
                if self._config.witness.on_failure == "stop":
                    raise WitnessFailed(f"step {lease.step}: {finding.message}")
                logger.error("step %d: %s", lease.step, finding.message)
        return by_check

    def published(self, ratio: float | None, report: StepReport, *, step: int) -> None:
        """Logs a warning, once after each start of the learner, if the bits of almost no published element have changed
        although the optimizer moved the weights. `ratio` is the share of the elements whose bits have changed; None if
        the step published nothing. A step whose scheduled learning rate is below half of the configured one gives no
        warning."""
        optimizer, moved = self._config.learner.optimizer, report.weights_before != report.weights_after
        full_rate = report.learning_rate >= optimizer.learning_rate / 2
        if ratio is None or ratio >= LEAST_PUBLISHED_BITS or self._said_few_bits or not (moved and full_rate):
            return
        self._said_few_bits = True
        logger.warning(
            "step %d: %.3g %% of the published weights have other bits than before, although the optimizer moved the "
            "weights: most changes are smaller than the precision of model.dtype = %s, so engines sample from almost "
            "the same weights. The learner keeps the changes. Raise learner.optimizer.learning_rate (%g), or publish "
            "less often (weights.publish_every_steps = %d)%s",
            step,
            100 * ratio,
            self._config.model.dtype,
            optimizer.learning_rate,
            self._config.weights.publish_every_steps,
            "" if self._config.model.dtype == "float32" else ", or set model.dtype: float32",
        )

    def nonfinite(self, reports: Sequence[StepReport | None], lease: Lease) -> None:
        """Raises NonFiniteError after `learner.max_nonfinite_steps` steps in a row that policy or critic skipped,
        because a loss or a gradient was not finite (F21 in docs/faults.md)."""
        skipped = any(report is not None and report.skipped for report in reports)
        self._nonfinite_in_a_row = self._nonfinite_in_a_row + 1 if skipped else 0
        limit = self._config.learner.max_nonfinite_steps
        if self._nonfinite_in_a_row >= limit:
            raise NonFiniteError(
                f"{limit} steps in a row (learner.max_nonfinite_steps) had a loss or gradient that is not finite. "
                f"The last one had groups {names_of(lease, most=8)}. Lower the learning rate, or look at the "
                "rewards and samples of these groups"
            )


def names_of(lease: Lease, *, most: int | None = None) -> str:
    """Returns the keys of the first `most` groups of a lease, or of all groups, separated by commas."""
    return ", ".join(group.meta.key for group in lease.groups[:most])
