"""The files that a run writes: its description, one record per step and evaluation, samples, and the summary.

- `run.json` has a `RunInfo`: the process of the run and its state.
- `data.json` has a `DataRecord`: the numbers of prompts, and of rows that are left out.
- `steps.jsonl` has one `StepRecord` per step, one JSON object per line.
- `evals.jsonl` has one `EvalRecord` per held-out evaluation.
- `samples/step-N.jsonl` has a few `SampleRecord`s of step N.
- `summary.json` has a `Summary`, computed from the records at the end of the run.

Seconds are monotonic seconds since the start of the run. Numbers that are not finite are written as null, because JSON
cannot express them. A killed writer can leave a last line without its newline; readers ignore such a line.
"""

import contextlib
import math
import os
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import msgspec

from asyncrl.buffer.records import FailureCount
from asyncrl.common.concern import Concern
from asyncrl.common.device_time import DeviceTime, PoolCost
from asyncrl.common.version import Version
from asyncrl.config.load import load_config
from asyncrl.config.schema import HELDOUT, Config
from asyncrl.errors import FileRefused, RunError
from asyncrl.metrics.numbers import TRACKERS, tracker_name
from asyncrl.run_files import FILE_BYTES, RECORD_BYTES, UNREADABLE, opened, read

# The numbers of a held-out evaluation: the mean reward with its error, and pass@k.


def mean_and_error(rewards: Sequence[Sequence[float]]) -> tuple[float | None, float | None]:
    """Returns the mean reward over prompts, and its standard error over prompts, from the rewards of each prompt's
    samples. None for both without prompts. The error is None for one prompt."""
    means = [statistics.fmean(of_prompt) for of_prompt in rewards]
    if not means:
        return None, None
    error = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
    return sum(means) / len(means), error


def pass_at(rewards: Sequence[Sequence[float]], *, pass_reward: float) -> dict[int, float]:
    """Returns the mean pass@k over prompts, by k: for k = 1, 2, 4, … up to the smallest number of samples of a prompt,
    and for that number itself.

    A sample passes with a reward of at least `pass_reward`. With n samples of which c pass, pass@k is
    1 − C(n − c, k) / C(n, k), the unbiased estimate of Chen et al. 2021 (arXiv:2107.03374, eq. 1).

    >>> pass_at([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]], pass_reward=1.0)
    {1: 0.125, 2: 0.25, 4: 0.5}
    """
    most = min(map(len, rewards), default=0)
    ks = sorted({*(2**power for power in range(most.bit_length()) if 2**power <= most), most} - {0})
    passed = [(len(of_prompt), sum(reward >= pass_reward for reward in of_prompt)) for of_prompt in rewards]
    return {k: statistics.fmean(1 - math.comb(n - c, k) / math.comb(n, k) for n, c in passed) for k in ks}


DATA = "data.json"
"""Name of the file in a run's directory that has the `DataRecord`."""


class DataRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The prompts of a run: `data.json`. `training`, `heldout` and `sets` count the prompts that are trained, held out,
    and in each set of `eval.sets`. `left_out` counts the dataset rows that are in none of these: the first key is the
    section of the dataset, such as `data` or `data.mixture.sums`, the second the reason
    (`asyncrl.data.left_out.REASONS`). `hidden_tags` lists tags, such as `<think>`, that a reward never finds in its
    text, because they are special tokens or end the prompt (`asyncrl.data.answer_text`). It is empty if no reward of
    the run can look for tags."""

    training: int
    heldout: int
    sets: dict[str, int]
    left_out: dict[str, dict[str, int]]
    hidden_tags: tuple[str, ...] = ()


class Resumption(msgspec.Struct, frozen=True, kw_only=True):
    """A restart of a run: when, after which step, and the number of the incarnation that began."""

    at: str
    step: int
    incarnation: int

    @property
    def unix_time_s(self) -> float:
        """The time of the restart."""
        return datetime.fromisoformat(self.at).timestamp()


class ForkPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint with whose weights a run began (`asyncrl fork`): the name, the nonce and the absolute directory of
    the other run, and the version of the weights."""

    run: str
    nonce: str
    directory: str
    version: Version

    def __str__(self) -> str:
        return f"step-{self.version.step} of run {self.run} ({self.directory})"


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a run: `run.json`. Times are ISO 8601 in UTC.

    `nonce` distinguishes this run from other runs of the same name.

    `state` is `stopped` when the run was asked to end before its last step. It is `died` when the run's process ended
    without writing a final state; another process then wrote this state, and `finished` is the time of the last record.
    `boot` is the id of the boot of `host` in which the process started, if the system shows it.
    `directory` is the id of the run's directory on `host` (`directory_id`); a copy of the directory has another id.
    `ray_session` is the folder of the Ray instance that the run's process started, and `ray_since` the time of its
    start; None when the run used a running Ray. In a sweep, the process may have started Ray for an earlier run.
    `shared_memory` lists the files in /dev/shm that the run's engines use. A killed engine leaves them there.
    `started` is the first start of the run, `resumed` has its restarts in order. `finished` is the time of its end.
    `exit_reason` says why it ended, or, until it has ended, which request asked it to end.
    `forked_from` is the checkpoint of another run with whose weights this run began; None if it began with the model at
    `model.path`.
    `versions` has the versions of asyncrl, torch, transformers and vLLM at the last start. All deployments of the run
    have versions with the same first two parts.
    """

    name: str
    state: Literal["running", "finished", "stopped", "failed", "died"]
    pid: int
    host: str
    started: str
    nonce: str
    boot: str | None = None
    directory: str | None = None
    ray_address: str | None = None
    ray_session: str | None = None
    ray_since: str | None = None
    shared_memory: list[str] = []
    resumed: list[Resumption] = []
    forked_from: ForkPoint | None = None
    versions: dict[str, str] = {}
    finished: str | None = None
    exit_reason: str | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a time that is not in ISO 8601 or has no Unix time, or for a pid that no process can
        have. msgspec turns it into a ValidationError when it decodes the file."""
        for time in (self.started, self.finished, self.ray_since, *(each.at for each in self.resumed)):
            if time is not None:
                datetime.fromisoformat(time).timestamp()  # raises ValueError for the year 1
        if not 0 < self.pid < 2**31:
            raise ValueError(f"pid {self.pid} is not the number of a process")

    def wall_s(self, now_unix_s: float) -> float:
        """Returns the seconds from the first start of the run until its end; until `now_unix_s` if it has not ended."""
        end_s = now_unix_s if self.finished is None else datetime.fromisoformat(self.finished).timestamp()
        return max(0.0, end_s - datetime.fromisoformat(self.started).timestamp())


LOST_STEPS = "lost-steps.jsonl"
"""File in a run's directory with the records of lost steps: the run went back to an earlier checkpoint, and the steps
after it were trained again."""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One step, recorded right after its ack, or after it was skipped because a loss or a gradient was not finite.

    A skipped step (`trained` is false) did not change the policy's weights. Its counts of trained samples and tokens
    are 0, its histograms are empty, and its measurements are null where they are not finite. The next record has the
    same `step`.

    `group_staleness` and `token_staleness` map a staleness in versions to the number of trained groups or tokens.
    `learner_state_s` and `generator_state_s` are total seconds by state since the run started. In a resumed run, they
    include the seconds of earlier processes up to the checkpoint; of generators that went on while the learner was
    started again, they include all seconds. The generators' seconds are averaged over the replicas.
    `generated_samples`, `generated_tokens`, `weight_updates` (of all replicas) and `mid_sequence_updates` (of the
    trained groups) are totals since the start of the run too. `ledger_groups` maps each fate to its number of groups.
    `diagnostics` has, by name, the numbers that are not fields of the record: of the step report, the loss, the critic,
    the witness, parity, agents and the samples.

    `device_time` has the device-seconds of each pool since the run began (`asyncrl.learner.costs`); empty if an earlier
    version of asyncrl wrote this record, or an earlier record of the run.

    `reward_components` has the mean of each component of the rewards, without its weight, if the rewards have
    components.

    `witness` says with what the witness's checks `advantages` and `coefficients` compared the step's numbers, if the
    step had these checks: `formula`, or the user's own function and how it was called.

    `reward_parts` has the mean reward of each part of a mixture in the step, including filtered groups, and
    `part_groups` the number of trained groups of each part.

    `asyncrl.metrics.numbers` declares the other numbers: their units, their meanings, and where they are shown.
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
    oldest_replica_version: int | None
    weight_updates: int
    mid_sequence_updates: int
    diagnostics: dict[str, float | None]
    reward_components: dict[str, float] = {}
    reward_parts: dict[str, float] = {}
    part_groups: dict[str, int] = {}
    witness: dict[str, str] = {}
    device_time: tuple[DeviceTime, ...] = ()

    @property
    def version_after(self) -> int:
        """The learner's version after this step. A skipped step does not change the version."""
        return self.step + self.trained

    def numbers(self, before: "StepRecord | None") -> dict[str, float | None]:
        """Returns the step's numbers for an experiment tracker, by name. The part of a name before the slash is the
        section in which the tracker shows the number.

        Speeds and seconds by state are computed from the difference to `before`, the previous record. The first record
        has no previous record, so it has no such numbers.
        """
        ages = [age for age, tokens in self.token_staleness.items() if tokens]
        own = set(self.__struct_fields__)
        return {
            "staleness/max_versions": max(ages, default=None),
            **{tracker: getattr(self, name) for name, tracker in TRACKERS.items() if name in own},
            **{f"reward/component_{name}": value for name, value in self.reward_components.items()},
            **{f"reward/part_{name}": value for name, value in self.reward_parts.items()},
            **({} if before is None else self._since(before)),
            # a user's loss may have a metric with the name of a field, which must keep its own name in the tracker
            **{
                f"diagnostics/{name}" if name in own else tracker_name(name): value
                for name, value in self.diagnostics.items()
            },
        }

    @property
    def kl_nats(self) -> dict[str, float]:
        """The KL between the trained policy and another one, which the β of a penalty may follow. The keys are the
        names of the other policy, `reference` and `behaviour`, as in `StepReport.kl_nats`."""
        names = {"reference": "kl_to_reference_nats", "behaviour": "kl_to_behaviour_nats"}
        if not (self.trained and self.trained_tokens):
            return {}
        return {policy: value for policy, name in names.items() if (value := self.number(name)) is not None}

    @property
    def witness_ratio(self) -> float | None:
        """The largest difference that the witness found in this step, as a share of what is accepted; None if the
        record has no number of the witness."""
        numbers = self.diagnostics.items()
        return largest([value for name, value in numbers if name.startswith("witness_") and name.endswith("_ratio")])

    def number(self, name: str) -> float | None:
        """Returns a number of `asyncrl.metrics.numbers` by its name; None if it was not measured."""
        value: float | None = getattr(self, name) if name in self.__struct_fields__ else self.diagnostics.get(name)
        return value

    def _since(self, before: "StepRecord") -> dict[str, float | None]:
        """Returns the speeds since `before`, and the seconds by state of the learner and the generators since then."""
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


class EvalRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One held-out evaluation. `version` is the number of steps that trained the evaluated weights.

    `prompts` is the number of prompts with a reward, `failed` the number of prompts whose rollout failed. `reward_mean`
    is the mean over the prompts with a reward; it is null when all rollouts failed. `reward_stderr` is its standard
    error over the prompts. With several `samples` of a prompt, `pass_at` has the mean pass@k over the prompts, by k.
    `name` is the held-out set. `due` is the step after which the evaluation was due; null if it equals `version`. They
    differ if the replica had loaded newer weights before the evaluation began. `asked` is the number of prompts that
    were evaluated; None if an earlier version of asyncrl wrote the record. `non_greedy_tokens` is the number of tokens
    that were not the most probable ones, which must be 0 if `samples` is 1; None if `samples` is larger, without an
    answer, or if an earlier version wrote the record.

    Four fields are means over the prompts with a reward; they are empty or None without such a prompt, or if an earlier
    version wrote the record. `reward_components` has the components of the reward by name, without their weights.
    `completion_tokens_mean` is the number of sampled tokens of a completion. `truncated_ratio` is the share of
    completions that were cut at their length limit. `turns_mean` is the number of calls of an agent in an episode; None
    without agents.
    """

    name: str = HELDOUT
    version: int
    due: int | None = None
    wall_s: float
    asked: int | None = None
    prompts: int
    failed: int = 0
    reward_mean: float | None
    reward_stderr: float | None = None
    samples: int = 1
    pass_at: dict[int, float] = {}
    non_greedy_tokens: int | None = None
    reward_components: dict[str, float] = {}
    completion_tokens_mean: float | None = None
    truncated_ratio: float | None = None
    turns_mean: float | None = None

    def numbers(self) -> dict[str, float]:
        """Returns those numbers of the evaluation that were measured, by name, for trackers and views. `mean` is the
        mean reward."""
        found = {
            "mean": self.reward_mean,
            **{f"pass_at_{k}": value for k, value in self.pass_at.items()},
            **{f"component_{name}": value for name, value in self.reward_components.items()},
            "completion_tokens_mean": self.completion_tokens_mean,
            "truncated_ratio": self.truncated_ratio,
            "turns_mean": self.turns_mean,
        }
        return {name: value for name, value in found.items() if value is not None}

    @property
    def step(self) -> int:
        """The step after which the evaluation was due. The evaluation belongs to the checkpoint of this step."""
        return self.version if self.due is None else self.due

    @property
    def covers(self) -> bool:
        """Whether at least nine of ten prompts got a reward. A mean over fewer prompts may be of easy prompts only."""
        return self.failed <= (self.prompts + self.failed) / 10


class SampleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout in full, as it was trained at `step`.

    `row` is the number of the task's row in its dataset, and `part` the name of its part of `data.mixture`.
    `metadata` has the other data of the task, which the reward function received with the question and the answer.
    `scored` is the text that the reward function of an episode with tools received: the last answer, with any calls of
    tools in it. It is None for other samples: for a single answer, the reward function received `completion`, and an
    agent that the user wrote computes the reward itself. `rendered_prompt` is the prompt as the model received it, with
    special tokens and the chat template. `components` has the components of the reward by name, if it has any. `tokens`
    has the text of each completion token. `version_spans` has pairs (step of the weights, number of completion tokens
    that these weights generated), in the order of the tokens, without the tokens that the model read (from a tool or
    a user). `turns` has pairs (number of tokens that were read, number of tokens that were then sampled) of the
    completion; empty if all of it was sampled. `forks` has, for each branch of the episode after the first one, the
    index of its first completion token. `trained_spans`
    has pairs (whether the loss includes these tokens, number of completion tokens) in the order of the tokens.
    `staleness_versions` is the staleness of the oldest token at `step`. With `learner.logprobs_logged`,
    `generation_logprobs` has the engine's log-prob of each completion token, in nats. `prev_logprobs` then has the
    log-probs of the policy before the step, if the objective reads them.
    """

    step: int
    group: int
    row: int = 0
    part: str = ""
    prompt: str
    metadata: dict[str, Any] = {}
    rendered_prompt: str
    completion: str
    scored: str | None = None
    tokens: tuple[str, ...] = ()
    answer: str
    reward: float | None
    components: dict[str, float | None] = {}
    advantage: float | None
    version_spans: tuple[tuple[int, int], ...]
    turns: tuple[tuple[int, int], ...] = ()
    forks: tuple[int, ...] = ()
    trained_spans: tuple[tuple[bool, int], ...] = ()
    staleness_versions: int
    truncated: bool
    generation_logprobs: tuple[float, ...] | None = None
    prev_logprobs: tuple[float, ...] | None = None


class RunTotals(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a run that are known only at its end.

    `wall_s` is the time since the start of the first learner, seconds, without the time between two learners, and
    without the time from the checkpoint to the end of a learner that died, whose steps do not count.
    `rows_outstanding` is the number of rows that are still in the data plane; it should be 0 unless the run ended
    before its last step.
    `parity_max_nats` is the largest difference between the learner's and an engine's log-probs that was found when a
    replica verified new weights. `groups_failed` has, by reason, the number of discarded groups whose last attempt
    failed, or expired (`expired`). Of the stored tokens of attempts that ended before a commit
    (`generator.persist_every_tokens`), `tokens_continued` counts those that a later attempt continued, and
    `tokens_dropped` the others. `tokens_thrown_away` counts the other tokens of attempts that ended before their group
    was finished, for example by `staleness.on_deadline: requeue`, as their replicas last reported them.
    `generated_tokens` does not include them. `stop_reason` says why the run ended before `learner.total_steps`; it is
    None unless `run.stop_when` ended it.
    """

    wall_s: float
    generated_tokens: int
    groups_discarded: int
    groups_failed: dict[str, int]
    ledger_closed: bool
    rows_outstanding: int
    weight_updates: int
    mid_sequence_updates: int
    parity_max_nats: float | None
    tokens_continued: int = 0
    tokens_dropped: int = 0
    tokens_thrown_away: int = 0
    stop_reason: str | None = None


class HeldoutEnds(msgspec.Struct, frozen=True, kw_only=True):
    """The rewards of the first and the last evaluation on a held-out set; `last` is None if there was only one.
    `first_step` and `last_step` are the numbers of steps that trained the evaluated weights. The other fields are of
    the newest evaluation, also if it is the only one: `prompts` and `failed` count the prompts with and without a
    reward, and `numbers` has the other measured numbers, by the names of `EvalRecord.numbers`."""

    first: float | None = None
    last: float | None = None
    first_step: int | None = None
    last_step: int | None = None
    prompts: int = 0
    failed: int = 0
    numbers: dict[str, float] = {}

    @property
    def newest_step(self) -> int | None:
        """The number of steps that trained the weights of the newest evaluation; None without an evaluation."""
        return self.first_step if self.last_step is None else self.last_step


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """A health note: a fault of a run that its records show (`asyncrl.views.health`).

    `number` is what was measured, `fact` says it in words, and `since_step` is the step since which it holds; None if
    it does not belong to a step. `causes` are the likely causes, the first one most likely, with the setting to change.
    `look` is the command that shows more. `consequences` are the facts of other faults that this one explains.
    """

    concern: Concern
    number: float
    fact: str
    since_step: int | None = None
    causes: tuple[str, ...] = ()
    look: str
    consequences: tuple[str, ...] = ()

    @property
    def since(self) -> str:
        """The step since which the fact holds, as the end of a sentence; empty if it does not belong to a step."""
        return "" if self.since_step is None else f", since step {self.since_step}"

    @property
    def sentence(self) -> str:
        """All of the note as text.

        >>> note = Note(concern=Concern.CUT, number=0.9, fact="90 % are cut", since_step=3, causes=("a", "b"), look="x")
        >>> note.sentence
        '90 % are cut, since step 3. Likely causes: (1) a; (2) b. Look: x'
        """
        numbered = [f"({number}) {cause}" for number, cause in enumerate(self.causes, start=1)]
        causes = f"Likely causes: {'; '.join(numbered)}" if len(numbered) > 1 else "".join(self.causes)
        parts = [f"{self.fact}{self.since}", causes[:1].upper() + causes[1:]]
        if self.consequences:
            parts.append(f"It explains: {'; '.join(self.consequences)}")
        return ". ".join([*filter(None, parts), f"Look: {self.look}"])


class Summary(RunTotals, frozen=True, kw_only=True):
    """A run in some thirty numbers: `summary.json`. Numbers over the steps cover trained steps only, not skipped steps.

    Besides its own numbers, it has those of `RunTotals`. `time_to_first_step_s` is the time from the start of the run
    to the end of its first step. `heldout_first` and `heldout_last` are the rewards of the first and last evaluation;
    `heldout_last` is None when there was only one. `heldout_first_step` and `heldout_last_step` are the numbers of
    steps that trained the evaluated weights; a run that was stopped may have trained more steps after its last
    evaluation. `heldout_prompts` and `heldout_failed` count the prompts of the last evaluation with and without a
    reward, and `heldout_numbers` has its other numbers, as in `HeldoutEnds`. `reward_first` and `reward_last` are means
    over the first and last 5 % of steps, at least 1 and at most 10 steps. `samples_per_s` is the rate of trained
    samples between the end of the first and the end of the last step, without the starts of a restarted run. The busy
    ratios are measured over the same time: the learner's is the share of time in which it neither waited for groups nor
    was in the state `other`, the generators' is the share of the state `generating`. `restarts` is the number of times
    that the run was resumed, and `lost_steps` the number of steps that were trained again, because the run went back.
    `parity_max_nats` is the largest difference of log-probs over all probes and all trained on-policy tokens.
    `ess_ratio_mean` and `ess_ratio_lowest` are over the steps with an effective sample size. `heldout_sets` has the
    results of the evaluations for each named held-out set (`eval.sets`). `witnessed_steps` is the number of steps of
    which the witness computed a group a second time, and `witness_failures` the number of steps, of all steps, in which
    it found a larger difference than is accepted. `notes` are the health notes at the end of the run.
    `effective_training_time_ratio` is the share of the wall time since the first start in which the steps were trained
    (`asyncrl.learner.training_time`); None if an earlier version wrote the summary. `costs` has the device-seconds of
    each pool up to the end of the last step; empty if they are not known.
    """

    steps: int
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
    ess_ratio_mean: float | None
    ess_ratio_lowest: float | None
    generator_busy_ratio: float
    learner_busy_ratio: float
    trained_tokens: int
    restarts: int
    lost_steps: int
    heldout_sets: dict[str, HeldoutEnds] = {}
    witnessed_steps: int = 0
    witness_failures: int = 0
    notes: tuple[Note, ...] = ()
    heldout_first_step: int | None = None
    heldout_last_step: int | None = None
    heldout_numbers: dict[str, float] = {}
    effective_training_time_ratio: float | None = None
    costs: tuple[PoolCost, ...] = ()

    def heldout_ends(self) -> dict[str, HeldoutEnds]:
        """Returns the first and the last evaluation of each held-out set by name, beginning with the set that every run
        has (`HELDOUT`)."""
        own = HeldoutEnds(
            first=self.heldout_first,
            last=self.heldout_last,
            first_step=self.heldout_first_step,
            last_step=self.heldout_last_step,
            prompts=self.heldout_prompts,
            failed=self.heldout_failed,
            numbers=self.heldout_numbers,
        )
        return {HELDOUT: own, **self.heldout_sets}


# Reads the records of a run that may still write them: `run.json`, `config.yaml` and the JSON lines files.
#
# The run may be of another person, so `asyncrl.run_files` refuses links, files that are not regular, and files that are
# too large.

Line = TypeVar("Line", bound=msgspec.Struct)


class GrowingLines(Generic[Line]):
    """The records of a JSON lines file to which a run may still append. `inside` is the run's directory; default: the
    folder of the file."""

    def __init__(self, path: Path, kind: type[Line], *, inside: Path | None = None) -> None:
        self._path = path
        self._kind = kind
        self._inside = inside
        self._decoder = msgspec.json.Decoder(kind)
        self._read_bytes = 0
        self._records: list[Line] = []

    def read(self) -> Sequence[Line]:
        """Returns all records so far; none when the file does not exist. Reads only the lines that are new.

        Ignores a last line without a newline. Raises RunError with the line number when a line is not a record or has
        more than `RECORD_BYTES`, and RunError when the file cannot be opened or has more than `FILE_BYTES`.
        """
        try:
            file = opened(self._path, inside=self._inside)
        except FileNotFoundError:
            return self._records
        except FileRefused:
            raise
        except OSError as error:
            raise RunError(f"{self._path} cannot be read ({error}): check its permissions") from error
        with file:
            if (size := os.fstat(file.fileno()).st_size) > FILE_BYTES:
                raise FileRefused(
                    f"{self._path} has {size:,} bytes, and at most {FILE_BYTES:,} are read: it has the records of many "
                    "runs, or was not written by asyncrl"
                )
            file.seek(self._read_bytes)
            while (line := file.readline(RECORD_BYTES + 1)).endswith(b"\n"):
                self._records.append(self._decoded(line))
                self._read_bytes += len(line)
        if len(line) > RECORD_BYTES:
            raise self._unusable(f"has more than {RECORD_BYTES:,} bytes")
        return self._records

    def _decoded(self, line: bytes) -> Line:
        try:
            return self._decoder.decode(line)
        except UNREADABLE as error:
            raise self._unusable(f"is not a {self._kind.__name__}: {error}") from error

    def _unusable(self, problem: str) -> RunError:
        return RunError(
            f"{self._path}, line {len(self._records) + 1} {problem}. The file was edited or written by another version "
            "of asyncrl: repair or delete the line"
        )


def read_lines(path: Path, kind: type[Line], *, inside: Path | None = None) -> list[Line]:
    """Returns the records of a JSON lines file, as `GrowingLines.read` does."""
    return list(GrowingLines(path, kind, inside=inside).read())


def read_info(run_dir: Path) -> RunInfo:
    """Returns `run.json` of a run directory. Raises RunError if there is none, or if it cannot be read."""
    path = run_dir / "run.json"
    try:
        return msgspec.json.decode(read(path), type=RunInfo)
    except UNREADABLE as error:
        raise RunError(
            f"cannot read {path}: {error}. The run writes this file when it starts: check the directory, and that this "
            "version of asyncrl wrote it"
        ) from error


def saved_config(run_dir: Path) -> Path:
    """Returns the file with the configuration of a run. Raises RunError if `run_dir` has none, or if it is refused."""
    saved = run_dir / "config.yaml"
    try:
        opened(saved).close()
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(f"{run_dir} is not the directory of a run: it has no config.yaml") from None
    except FileRefused:
        raise
    except OSError as error:
        raise RunError(f"{saved} cannot be read ({error}): check its permissions") from error
    return saved


def read_config(run_dir: Path) -> Config:
    """Returns the configuration of a run. Raises the errors of `saved_config`, and ConfigError for values that this
    version of asyncrl does not accept."""
    return load_config([saved_config(run_dir)], [])


def known_info(run_dir: Path) -> RunInfo | None:
    """Returns `run.json` of a run directory. None if it does not exist or cannot be read, for example because another
    version of asyncrl wrote it."""
    with contextlib.suppress(RunError):
        return read_info(run_dir)
    return None


def known_data(run_dir: Path) -> DataRecord | None:
    """Returns `data.json` of a run directory; None if there is none, or if it cannot be read."""
    try:
        return msgspec.json.decode(read(run_dir / DATA), type=DataRecord)
    except UNREADABLE:
        return None


# Failed rollouts and rewards in words, for logs, errors and views.


def first_failure(count: FailureCount) -> str:
    """Returns the message, prompt and completion of the first failure of `count`, in up to three lines."""
    failure = count.first
    lines = [f"first failure of {failure.subject}: {failure.message}"]
    lines += [f"  prompt: {failure.prompt!r}"] if failure.prompt else []
    lines += [f"  completion: {failure.completion!r}"] if failure.completion else []
    return "\n".join(lines)


def in_words(counts: Sequence[FailureCount]) -> str:
    """Returns the number of failures by reason, the most frequent first, with the tools that failed or the types of the
    errors: `tool_failed 65 calls (price 60, stock 5), reward_raised 20 rollouts and 31 single completions (ValueError
    48, KeyError 3), reward_timeout 3 rollouts`. Single completions are those whose reward failed in groups that were
    committed."""
    of_reason: dict[str, list[FailureCount]] = {}
    for count in counts:
        of_reason.setdefault(count.first.reason, []).append(count)
    totals = Counter({reason: sum(each.failures for each in found) for reason, found in of_reason.items()})
    return ", ".join(f"{reason} {_number(of_reason[reason])}" for reason, _ in totals.most_common())


def _number(counts: Sequence[FailureCount]) -> str:
    amounts = {
        "rollout": sum(count.rollouts for count in counts),
        "single completion": sum(count.samples for count in counts),
        "call": sum(count.tool_calls for count in counts),
    }
    words = " and ".join(f"{number} {what}{'s' * (number > 1)}" for what, number in amounts.items() if number)
    kinds: Counter[str] = Counter()
    for count in counts:
        kinds[count.first.tool or count.first.error or "others"] += count.failures
    by_kind = ", ".join(f"{kind} {number}" for kind, number in kinds.most_common())
    return words if set(kinds) == {"others"} else f"{words} ({by_kind})"


def groups_by_reason(counts: Sequence[FailureCount]) -> dict[str, int]:
    """Returns the number of groups that ended with a failure, by its reason, the most frequent first. A failure after
    which the group was tried again does not count."""
    groups: Counter[str] = Counter()
    for count in counts:
        groups[count.first.reason] += count.groups
    return {reason: number for reason, number in groups.most_common() if number}


# Where the records of a run go while it trains: its files, the learner's memory, trackers, and a caller's own code.


class RecordSink:
    """Gets each record of a run right after it was made, in order. The learner calls its sinks one after the other, in
    the thread of its event loop, so a sink must not block for long, and must not raise. A sink overrides the methods of
    the records that it wants."""

    def append_step(self, record: StepRecord) -> None:
        """Gets the record of a step that was trained or skipped."""

    def append_eval(self, record: EvalRecord) -> None:
        """Gets the record of a held-out evaluation."""

    def write_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        """Gets the logged samples of a trained step. It is not called for a step without logged samples."""


# Numbers over many records of a run: its summary, and the numbers that views show over several steps.


def build_summary(
    records: Sequence[StepRecord],
    evals: Sequence[EvalRecord],
    totals: RunTotals,
    *,
    staleness_limit: int,
    restarts: int = 0,
    lost: Sequence[StepRecord] = (),
    notes: Sequence[Note] = (),
    effective_training_time_ratio: float | None = None,
    costs: Sequence[PoolCost] = (),
) -> Summary:
    """Returns the summary of a run that was resumed `restarts` times. `lost` are the records of the file `LOST_STEPS`,
    and `notes` the health notes. Raises RunError when no step was trained."""
    steps = [record for record in records if record.trained]
    if not steps:
        raise RunError("there is no summary, because the run trained no step: look at its logs for the cause")
    window = edge_window(len(steps))
    parity_max_nats = largest([totals.parity_max_nats, *(record.parity_nats for record in steps)])
    learner_shares = state_shares(steps, "learner_state_s")
    ess_mean, ess_lowest = ess_of_steps(steps)
    ends = heldout_ends(evals)
    own = ends.pop(HELDOUT, HeldoutEnds())
    return Summary(
        **msgspec.structs.asdict(totals) | {"parity_max_nats": parity_max_nats},
        steps=len(steps),
        time_to_first_step_s=steps[0].wall_s,
        samples_per_s=_samples_per_s(steps),
        reward_first=mean([record.reward_mean for record in steps[:window]]),
        reward_last=mean([record.reward_mean for record in steps[-window:]]),
        heldout_first=own.first,
        heldout_last=own.last,
        heldout_first_step=own.first_step,
        heldout_last_step=own.last_step,
        heldout_numbers=own.numbers,
        heldout_prompts=own.prompts,
        heldout_failed=own.failed,
        heldout_sets=ends,
        staleness_limit=staleness_limit,
        max_group_staleness=max(max(record.group_staleness, default=0) for record in steps),
        max_token_staleness=max(max(record.token_staleness, default=0) for record in steps),
        ess_ratio_mean=ess_mean,
        ess_ratio_lowest=ess_lowest,
        generator_busy_ratio=state_shares(steps, "generator_state_s").get("generating", 0.0),
        learner_busy_ratio=sum(
            share for state, share in learner_shares.items() if state not in ("waiting_for_groups", "other")
        ),
        trained_tokens=sum(record.trained_tokens for record in steps),
        restarts=restarts,
        lost_steps=sum(record.trained for record in lost),
        witnessed_steps=sum("witness_s" in record.diagnostics for record in steps),
        witness_failures=sum((record.witness_ratio or 0.0) > 1 for record in steps),
        notes=tuple(notes),
        effective_training_time_ratio=effective_training_time_ratio,
        costs=tuple(costs),
    )


def heldout_ends(evals: Sequence[EvalRecord]) -> dict[str, HeldoutEnds]:
    """Returns the first and the last evaluation of each held-out set, by name."""
    found: dict[str, HeldoutEnds] = {}
    for name in dict.fromkeys(record.name for record in evals):
        of_set = [record for record in evals if record.name == name]
        found[name] = HeldoutEnds(
            first=of_set[0].reward_mean,
            last=of_set[-1].reward_mean if len(of_set) > 1 else None,
            first_step=of_set[0].version,
            last_step=of_set[-1].version if len(of_set) > 1 else None,
            prompts=of_set[-1].prompts,
            failed=of_set[-1].failed,
            numbers={name: value for name, value in of_set[-1].numbers().items() if name != "mean"},
        )
    return found


def best_first(evals: Sequence[EvalRecord], steps: Collection[int], *, name: str = HELDOUT) -> list[EvalRecord]:
    """Returns the evaluations on the set `name` that belong to the checkpoints after `steps`, the best one first.

    A checkpoint without an evaluation is left out, and so is an evaluation in which too many prompts got no reward
    (`EvalRecord.covers`). If a step was evaluated twice, the later evaluation counts. Of evaluations with equal
    rewards, the one of the newer checkpoint comes first.
    """
    found = {each.step: each for each in evals if each.name == name and each.step in steps}
    rewarded = [
        (each.reward_mean, each.step) for each in found.values() if each.reward_mean is not None and each.covers
    ]
    return [found[step] for _, step in sorted(rewarded, reverse=True)]


def ess_of_steps(records: Sequence[StepRecord]) -> tuple[float | None, float | None]:
    """Returns the mean and the lowest effective sample size (`ess_ratio`) of the trained steps; None if none has one.

    docs/tuning-staleness.md has limits for these two numbers.
    """
    sizes = _present([record.ess_ratio for record in records if record.trained])
    return mean(sizes), min(sizes, default=None)


def edge_window(steps: int) -> int:
    """Returns over how many steps `reward_first` and `reward_last` are averaged: 5 %, at least 1, at most 10."""
    return min(10, max(1, steps // 20))


def state_shares(steps: Sequence[StepRecord], field: str) -> dict[str, float]:
    """Returns the shares of time by state between the first and the last of `steps`. The shares add up to 1.

    `field` is `learner_state_s` or `generator_state_s`. With one step, the shares cover the time before it, too. The
    state `starting` is left out: a restarted run would otherwise look slower than it was. Returns an empty dict when
    there is no step, or when no time has passed.
    """
    if not steps:
        return {}
    end: dict[str, float] = getattr(steps[-1], field)
    start: dict[str, float] = getattr(steps[0], field) if len(steps) > 1 else {}
    return shares_of({state: max(0.0, total - start.get(state, 0.0)) for state, total in end.items()})


def shares_of(seconds: Mapping[str, float]) -> dict[str, float]:
    """Returns each state's share of the seconds without those of the state `starting`; empty if no such time has
    passed."""
    started = {state: part for state, part in seconds.items() if state != "starting"}
    total = sum(started.values())
    return {state: part / total for state, part in started.items()} if total > 0 else {}


def running_s(steps: Sequence[StepRecord], until: StepRecord | None = None) -> float:
    """Returns the seconds from the end of the first of `steps` to the end of `until`, by default the last one, in which
    the run was not starting (again)."""
    first, last = steps[0], until or steps[-1]
    starting_s = last.learner_state_s.get("starting", 0.0) - first.learner_state_s.get("starting", 0.0)
    return last.wall_s - first.wall_s - starting_s


def _samples_per_s(steps: Sequence[StepRecord]) -> float:
    """Returns trained samples per second of the time in which the run was not starting.

    The first step's samples and the time until its end are left out, because this time contains the start of the run.
    For a run with one step, it is the samples of this step divided by all of its time, with the start of the run.
    """
    if len(steps) == 1:
        return steps[0].trained_samples / max(steps[0].wall_s, 1e-9)
    samples = sum(record.trained_samples for record in steps[1:])
    return samples / max(running_s(steps), 1e-9)


def mean(values: Sequence[float | None]) -> float | None:
    """Returns the mean of the finite values; None when there are none."""
    present = _present(values)
    return sum(present) / len(present) if present else None


def largest(values: Sequence[float | None]) -> float | None:
    """Returns the largest finite value; None when there is none."""
    return max(_present(values), default=None)


def _present(values: Sequence[float | None]) -> list[float]:
    """Returns the finite values. A record in memory may have NaN where its file has null."""
    return [value for value in values if value is not None and math.isfinite(value)]
