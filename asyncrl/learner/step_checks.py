"""Checks of a trained step: the engine's log-probs are those of the learner, and the loss is finite."""

import logging
from collections.abc import Sequence

from asyncrl.buffer.records import Lease
from asyncrl.config.schema import Config
from asyncrl.errors import NonFiniteError, ParityError
from asyncrl.metrics.recorders import LearnerMetrics
from asyncrl.ranks.report import StepReport
from asyncrl.weights.parity import POOLED_TOKENS, Differences, ParityJudge, ParityLimits

logger = logging.getLogger(__name__)


class StepChecks:
    """Checks each step. It counts the steps in a row that were skipped."""

    def __init__(self, *, config: Config, metrics: LearnerMetrics) -> None:
        self._config = config
        self._metrics = metrics
        limits = ParityLimits.of(config, temperature=config.generator.temperature)
        self._judge = ParityJudge(limits, least_tokens=POOLED_TOKENS)
        self._nonfinite_in_a_row = 0

    def parity(self, report: StepReport, *, step: int) -> float | None:
        """Compares the learner's and the engine's log-probs of on-policy tokens, which must agree.

        Returns how much they differ, as a share of what `weights.parity_*` accept; None if the step has no such token.
        Above 1, raises ParityError or logs an error.
        """
        tokens = report.on_policy_tokens
        differences = Differences(
            tokens=tokens,
            sum_nats=report.on_policy_parity_mean_nats * tokens,
            sum_squares=report.on_policy_parity_mean_square * tokens,
            max_nats=report.on_policy_parity_max_nats,
            weight_excess=report.on_policy_weight_excess * tokens,
            weight_excess_squares=report.on_policy_weight_excess_mean_square * tokens,
        )
        if not tokens:
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

    def nonfinite(self, reports: Sequence[StepReport | None], lease: Lease) -> None:
        """Raises NonFiniteError after `learner.max_nonfinite_steps` steps in a row that policy or critic skipped
        (F21)."""
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
