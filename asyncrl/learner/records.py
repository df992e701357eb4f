"""What a run writes down about itself: who runs, what it does, one JSON object a line, and the summary made of that.

`steps.jsonl` has a `StepRecord` a step, `evals.jsonl` an `EvalRecord` a held-out evaluation, `samples/step-N.jsonl`
a few `SampleRecord`s a step. Seconds are monotonic seconds since the run's start. What is not finite is written as
null, which is all that JSON has for it. A last line without its newline is what a killed writer leaves: it is ignored.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from asyncrl.errors import RunError


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`run.json`. Times are ISO 8601 in UTC. `nonce` tells this run from others of its name.

    A run is `stopped` when it was asked to end before its last step. It has `died` when its process went away without
    a word; another process found that out, and `finished` is when the run last wrote a record. `ray_session` is the
    folder of the Ray that the run started, if it did. `shared_memory` are names of files in /dev/shm that the run's
    engines use; a killed engine leaves them there.
    """

    name: str
    state: Literal["running", "finished", "stopped", "failed", "died"]
    pid: int
    host: str
    started: str
    nonce: str
    ray_address: str | None = None
    ray_session: str | None = None
    shared_memory: list[str] = []
    finished: str | None = None
    exit_reason: str | None = None


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One step, right after its ack, or after it was skipped because a loss or a gradient was not finite.

    A skipped step (`trained` is false) changed no weights: nothing of it counts as trained, its histograms are empty,
    and what was measured of it is null where it was not finite. The next record has the same `step`.

    Histograms map a number of versions to so many trained groups or tokens. State seconds are totals since the
    process's start, a generator's averaged over the replicas; so are `generated_samples`, `generated_tokens`,
    `weight_updates` and `mid_sequence_updates`, which are sums over the replicas. `ledger_groups` has every fate's
    groups. `model_flops` are those of the policy's passes, of a skipped step's too, and `mfu_ratio` is their share of
    what the devices could have done in `duration_s`; null where it is not known. `diagnostics` are by name: the step
    report's, the loss's own, and shares of groups whose rewards are equal.

    `reward_std` is the population standard deviation over the step's samples. `zero_variance_ratio` is the share of
    groups whose rewards are all equal: they have no gradient with advantages of groups. `completion_tokens_mean` and
    `_max` count generated tokens of a sample, and `truncated_ratio` is the share of samples that were cut at
    `generator.max_completion_tokens`.
    """

    step: int
    wall_s: float
    duration_s: float
    trained: bool
    reward_mean: float | None
    reward_std: float | None
    reward_min: float | None
    reward_max: float | None
    zero_variance_ratio: float | None
    completion_tokens_mean: float | None
    completion_tokens_max: int
    truncated_ratio: float | None
    loss: float | None
    grad_norm: float | None
    entropy_nats: float | None
    ess_ratio: float | None
    learning_rate: float
    parity_nats: float | None
    group_staleness: dict[int, int]
    token_staleness: dict[int, int]
    trained_samples: int
    trained_tokens: int
    model_flops: int | None
    mfu_ratio: float | None
    generated_samples: int
    generated_tokens: int
    learner_state_s: dict[str, float]
    generator_state_s: dict[str, float]
    buffer_groups: dict[str, int]
    ledger_groups: dict[str, int]
    published_version: int
    oldest_replica_version: int
    weight_updates: int
    mid_sequence_updates: int
    diagnostics: dict[str, float | None]

    @property
    def version_after(self) -> int:
        """The learner's version when this was written: a skipped step leaves it where it was."""
        return self.step + self.trained

    def numbers(self, before: "StepRecord | None") -> dict[str, float | None]:
        """The step for a tracker: one number a name. The part before the slash groups them.

        Speeds and seconds by state are those since `before`, the record before this one. The first record has none.
        """
        ages = [age for age, tokens in self.token_staleness.items() if tokens]
        return {
            "reward/mean": self.reward_mean,
            "reward/std": self.reward_std,
            "reward/min": self.reward_min,
            "reward/max": self.reward_max,
            "reward/zero_variance_ratio": self.zero_variance_ratio,
            "length/completion_tokens_mean": self.completion_tokens_mean,
            "length/completion_tokens_max": self.completion_tokens_max,
            "length/truncated_ratio": self.truncated_ratio,
            "train/loss": self.loss,
            "train/grad_norm": self.grad_norm,
            "train/entropy_nats": self.entropy_nats,
            "train/learning_rate": self.learning_rate,
            "train/tokens": self.trained_tokens,
            "train/samples": self.trained_samples,
            "staleness/max_versions": max(ages, default=None),
            "staleness/ess_ratio": self.ess_ratio,
            "staleness/parity_nats": self.parity_nats,
            "speed/step_duration_s": self.duration_s,
            "speed/model_flops": self.model_flops,
            "speed/mfu_ratio": self.mfu_ratio,
            **({} if before is None else self._since(before)),
            **{f"{_group(name)}/{name}": value for name, value in self.diagnostics.items()},
        }

    def _since(self, before: "StepRecord") -> dict[str, float | None]:
        """Speeds, and each side's seconds by state."""
        span_s = max(self.wall_s - before.wall_s, 1e-9)
        since: dict[str, float | None] = {
            "speed/trained_tokens_per_s": self.trained_tokens / span_s,
            "speed/generated_tokens_per_s": (self.generated_tokens - before.generated_tokens) / span_s,
            "speed/trained_samples_per_s": self.trained_samples / span_s,
        }
        for side, now, then in (
            ("learner", self.learner_state_s, before.learner_state_s),
            ("generator", self.generator_state_s, before.generator_state_s),
        ):
            since |= {f"time/{side}_{state}_s": total - then.get(state, 0.0) for state, total in now.items()}
        return since


_GROUPS = {
    "kl_to_reference_nats": "train",
    "all_right_ratio": "reward",
    "all_wrong_ratio": "reward",
    "value_loss": "critic",
    "explained_variance": "critic",
    "value_clipped_ratio": "critic",
}


def _group(diagnostic: str) -> str:
    """Where a tracker shows a diagnostic.

    >>> [_group(name) for name in ("value_loss", "abs_log_rho_nats_staleness_1", "clipped_ratio")]
    ['critic', 'staleness', 'diagnostics']
    """
    return _GROUPS.get(diagnostic, "staleness" if "staleness" in diagnostic else "diagnostics")


class EvalRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One held-out evaluation of the weights that `version` steps made. `prompts` is how many got a reward, `failed`
    how many got none; `reward_mean` is null when all failed."""

    version: int
    wall_s: float
    prompts: int
    failed: int = 0
    reward_mean: float | None


class SampleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout in full, as it was trained at `step`. `rendered_prompt` is the prompt as the model got it, with
    special tokens and the chat template.

    `version_spans`: (step of the weights, completion tokens that they produced), in order. `staleness_versions` is the
    age of its oldest token at `step`. With `learner.logprobs_logged`, `generation_logprobs` has the engine's log-prob
    of each completion token, and `prev_logprobs` that of the policy before the step, where the objective reads it.
    """

    step: int
    group: int
    prompt: str
    rendered_prompt: str
    completion: str
    answer: str
    reward: float | None
    advantage: float | None
    version_spans: tuple[tuple[int, int], ...]
    staleness_versions: int
    truncated: bool
    generation_logprobs: tuple[float, ...] | None = None
    prev_logprobs: tuple[float, ...] | None = None


class RunTotals(msgspec.Struct, frozen=True, kw_only=True):
    """What only the end of a run knows. `rows_outstanding` is what the data plane still holds, 0 unless the run was
    stopped; `probe_parity_max_nats` is the worst probe of any replica. `groups_failed` are the discarded groups whose
    rollouts failed, by reason."""

    wall_s: float
    generated_tokens: int
    groups_discarded: int
    groups_failed: dict[str, int]
    ledger_closed: bool
    rows_outstanding: int
    weight_updates: int
    mid_sequence_updates: int
    probe_parity_max_nats: float | None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A run in some twenty numbers: `summary.json`. Steps are trained steps: a skipped one is nothing but time lost.

    `heldout_last` is None when there was one evaluation; the last evaluation gave `heldout_prompts` prompts a reward,
    and `heldout_failed` none. `groups_failed` are the discarded groups whose rollouts failed, by reason. `reward_first`
    and `reward_last` are means over the first and last 5 % of steps, at least 1 and at most 10. `samples_per_s` counts
    trained samples between the first and the last step's end, as do the busy ratios: the learner's is the time that it
    neither waited for groups nor did `other`, the generators' their share of `generating`. `parity_max_nats` is the
    worst over all probes and all on-policy tokens trained.
    """

    steps: int
    wall_s: float
    time_to_first_step_s: float
    samples_per_s: float
    reward_first: float | None
    reward_last: float | None
    heldout_first: float | None
    heldout_last: float | None
    heldout_prompts: int
    heldout_failed: int
    staleness_limit: int
    max_group_staleness: int
    max_token_staleness: int
    groups_discarded: int
    groups_failed: dict[str, int]
    ledger_closed: bool
    rows_outstanding: int
    weight_updates: int
    mid_sequence_updates: int
    parity_max_nats: float | None
    generator_busy_ratio: float
    learner_busy_ratio: float
    generated_tokens: int
    trained_tokens: int


def build_summary(
    records: Sequence[StepRecord], evals: Sequence[EvalRecord], totals: RunTotals, *, staleness_limit: int
) -> Summary:
    """The run's summary. RunError when no step was trained: there is nothing to sum up."""
    steps = [record for record in records if record.trained]
    if not steps:
        raise RunError("no step was trained, so there is no summary; look at the run's logs for what stopped it")
    window = edge_window(len(steps))
    parities = [totals.probe_parity_max_nats, *(record.parity_nats for record in steps)]
    learner_shares = state_shares(steps, "learner_state_s")
    return Summary(
        steps=len(steps),
        wall_s=totals.wall_s,
        time_to_first_step_s=steps[0].wall_s,
        samples_per_s=_samples_per_s(steps),
        reward_first=mean([record.reward_mean for record in steps[:window]]),
        reward_last=mean([record.reward_mean for record in steps[-window:]]),
        heldout_first=evals[0].reward_mean if evals else None,
        heldout_last=evals[-1].reward_mean if len(evals) > 1 else None,
        heldout_prompts=evals[-1].prompts if evals else 0,
        heldout_failed=evals[-1].failed if evals else 0,
        staleness_limit=staleness_limit,
        max_group_staleness=max(max(record.group_staleness, default=0) for record in steps),
        max_token_staleness=max(max(record.token_staleness, default=0) for record in steps),
        groups_discarded=totals.groups_discarded,
        groups_failed=totals.groups_failed,
        ledger_closed=totals.ledger_closed,
        rows_outstanding=totals.rows_outstanding,
        weight_updates=totals.weight_updates,
        mid_sequence_updates=totals.mid_sequence_updates,
        parity_max_nats=max(_present(parities), default=None),
        generator_busy_ratio=state_shares(steps, "generator_state_s").get("generating", 0.0),
        learner_busy_ratio=sum(
            share for state, share in learner_shares.items() if state not in ("waiting_for_groups", "other")
        ),
        generated_tokens=totals.generated_tokens,
        trained_tokens=sum(record.trained_tokens for record in steps),
    )


def edge_window(steps: int) -> int:
    """Steps at either end that a first or last mean is taken over: 5 %, at least 1, at most 10."""
    return min(10, max(1, steps // 20))


def state_shares(steps: Sequence[StepRecord], field: str) -> dict[str, float]:
    """Shares of time by state between the first and the last of `steps`; of one, all but its process's start.

    `field` is `learner_state_s` or `generator_state_s`. Shares add up to 1, or there are none without time.
    """
    if not steps:
        return {}
    end: dict[str, float] = getattr(steps[-1], field)
    start: dict[str, float] = getattr(steps[0], field)
    if len(steps) == 1:
        start = {"starting": end.get("starting", 0.0)}
    seconds = {state: max(0.0, total - start.get(state, 0.0)) for state, total in end.items()}
    whole = sum(seconds.values())
    return {state: part / whole for state, part in seconds.items()} if whole > 0 else {}


def _samples_per_s(steps: Sequence[StepRecord]) -> float:
    """The first step's samples are left out, along with the start-up before them, unless it is the only step."""
    if len(steps) == 1:
        return steps[0].trained_samples / max(steps[0].wall_s, 1e-9)
    samples = sum(record.trained_samples for record in steps[1:])
    return samples / max(steps[-1].wall_s - steps[0].wall_s, 1e-9)


def mean(values: Sequence[float | None]) -> float | None:
    """The mean of those that are numbers; None when there is none."""
    present = _present(values)
    return sum(present) / len(present) if present else None


def _present(values: Sequence[float | None]) -> list[float]:
    """What is a number; a record in memory may hold a NaN where the file has null."""
    return [value for value in values if value is not None and math.isfinite(value)]


Line = TypeVar("Line", bound=msgspec.Struct)


def read_lines(path: Path, kind: type[Line]) -> list[Line]:
    """The records of a JSON lines file; none when there is no file. RunError names the line that is no record."""
    if not path.exists():
        return []
    decoder = msgspec.json.Decoder(kind)
    complete, _, _ = path.read_bytes().rpartition(b"\n")
    records = []
    for number, line in enumerate(complete.splitlines(), start=1):
        try:
            records.append(decoder.decode(line))
        except msgspec.MsgspecError as error:
            raise RunError(f"{path}, line {number} is no {kind.__name__}: {error}") from error
    return records
