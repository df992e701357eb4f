"""Records that the buffer and its callers exchange: tickets, group metadata and leases.

They are frozen msgspec structs without tensors. This module imports neither torch nor ray nor vllm. The rows of a group
are in the data plane under the group's key (`<group>.<attempt>`), the row of a sample under `<group>.<attempt>_g<i>`.

Records of which the buffer has many have `gc=False`: they are never part of a cycle of references, so Python's garbage
collector need not look at them. Without this, the collector took 40 % of the buffer's
time with 100,000 groups.
"""

from enum import StrEnum
from itertools import takewhile

import msgspec

from asyncrl.common.version import Lineage, Version
from asyncrl.data.prompts import Task
from asyncrl.errors import FailureClass, RolloutError


class Refusal(StrEnum):
    """The reason why a reserve got fewer tickets than it requested.

    STALENESS: more groups at the replica's version could be too old when they are trained (rule (1) of `staleness.py`).
    CAPACITY: the buffer is full. NO_PROMPTS: the prompts have run out. NO_STEPS: the groups in flight already fill
    every step up to `total_steps`. PAUSED: admission is paused. TOO_MANY_FAILURES: the run is about to end, because
    `generator.max_data_failures` groups failed as DATA without a committed group in between. OLD_INCARNATION: the
    learner's weights are not made from the replica's version (`asyncrl.common.version`). UNHEALTHY: the replica gets no
    tickets for a while, because rollouts on it failed as INFRA in a row, or because it sends no heartbeats.
    QUARANTINED: it gets no tickets any more, and must end.
    """

    STALENESS = "staleness"
    CAPACITY = "capacity"
    NO_PROMPTS = "no_prompts"
    NO_STEPS = "no_steps"
    PAUSED = "paused"
    TOO_MANY_FAILURES = "too_many_failures"
    OLD_INCARNATION = "old_incarnation"
    UNHEALTHY = "unhealthy"
    QUARANTINED = "quarantined"


class Prefix(msgspec.Struct, frozen=True, kw_only=True):
    """A partial generation of a group, whose tokens are in the data plane (`asyncrl.generation.prefixes`).

    `attempt` is the attempt that stored it. `tokens` is the number of completion tokens of all samples; an earlier
    attempt generated `continued_tokens` of them. `versions` are the versions that generated the tokens. The store may
    have more tokens than this record says, because the attempt may have ended before it could report them.
    """

    attempt: int
    tokens: int
    versions: tuple[Version, ...]
    continued_tokens: int = 0

    @property
    def oldest(self) -> int:
        """The smallest step of a version that generated a token."""
        return min(version.step for version in self.versions)


NO_TASK = Task(question="", answer="")
"""Stands for the task of a ticket or a prompt in a snapshot. Group n has the n-th prompt of the run, so a restored
buffer gets the task from the data. Tasks would be most of the bytes of a snapshot."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An attempt at a group: the fields that a ticket shares with a prompt that waits for a ticket.

    `seed` is a multiple of the group size, because vLLM gives sample i the seed + i. `prefix` is the partial generation
    of an earlier attempt with which this one begins. `failed_on` has the actor of each earlier attempt that failed,
    expired, or began again as a straggler. An attempt that ended for another reason, such as a restart of the run, is
    not among them.
    """

    group: int
    attempt: int
    task: Task
    seed: int
    failed_on: tuple[str, ...] = ()
    prefix: Prefix | None = None


class Ticket(Attempt, frozen=True, kw_only=True, gc=False):
    """Permission to generate one group. One actor of a replica holds it until commit, failure or expiry.

    `replica` is the name of this actor, not of its replica. The field keeps its name, because checkpoints have it.
    `version` is the actor's version at the reserve. `deadline` is the last step that may train the group: `oldest` +
    `max_staleness_versions` at the time of the reserve.
    """

    version: Version
    max_staleness_versions: int
    replica: str

    @property
    def key(self) -> str:
        return f"{self.group}.{self.attempt}"

    @property
    def oldest(self) -> int:
        """The smallest step of a version that may generate a token of the group, or has generated one."""
        return oldest_step(self.version, self.prefix)

    @property
    def deadline(self) -> int:
        return self.oldest + self.max_staleness_versions


def oldest_step(version: Version, prefix: Prefix | None) -> int:
    """Returns the smallest step of a version that generates a token of a group, if a replica at `version` continues
    `prefix`; without a prefix, the step of `version`.

    The replica may be older than the tokens of the prefix, because another replica generated them.
    """
    return version.step if prefix is None else min(version.step, prefix.oldest)


class WaitingPrompt(Attempt, frozen=True, kw_only=True, gc=False):
    """A prompt that waits for an attempt, ahead of all new prompts. If `issued` is True, the ledger already counts its
    group as reserved."""

    issued: bool


class HeldReport(msgspec.Struct, frozen=True, kw_only=True):
    """The tickets that an actor holds, as far as the buffer does not know them yet. A part of each heartbeat.

    `number` is larger in each heartbeat than in the one before, also after a restart of the replica's process. `tokens`
    has the new tickets, and those whose number of tokens has changed since the last heartbeat that was answered. It
    maps the key of a ticket to the number of completion tokens that all samples of the group have so far. The number is
    0 while the rollout waits for its start. The engine reports it from time to time, so it may be a few tokens behind.
    `prefixes` has, by key, the partial generations that attempts have stored since then. If `complete`, `tokens` has
    all tickets that the actor holds.
    """

    number: int
    complete: bool
    tokens: dict[str, int]
    prefixes: dict[str, Prefix] = {}


class Renewal(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a heartbeat.

    `ended` are the named tickets that have ended without a commit. No commit of them can be accepted, so the actor need
    not generate them any longer. With `report_all`, the next heartbeat must be complete: the buffer has ended a ticket
    of the actor, or does not know which tickets the actor holds. With `must_end`, the actor must end, because it is
    quarantined or was replaced. All of its tickets have ended, and it gets no more.
    """

    ended: tuple[str, ...] = ()
    report_all: bool = False
    must_end: bool = False


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a reserve: the tickets, and the reason why there are not more (None: all requested were issued)."""

    tickets: tuple[Ticket, ...]
    refusal: Refusal | None


class VersionSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A run of tokens that one version of the weights generated."""

    incarnation: int
    step: int
    tokens: int


class GroupMeta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Metadata of a finished group for the control plane. It has no tokens and no tensors.

    `replica` is the name of the actor that generated the group, as in its ticket, and `incarnation` that of the
    ticket's version.

    `oldest` and `newest` are the steps of the oldest and newest version that generated a token of the group, and
    `mid_sequence_updates` is the number of changes of the version within a sample, summed over the samples. Tuples
    have one entry for each sample; a reward is None if it failed and its sample is left out. `version_spans` has runs
    of completion tokens with equal versions, in order. `row_bytes` is the size of the group's rows in the data plane,
    bytes. A row has `prompt_tokens`, which all samples share, `completion_tokens`, which were sampled, and
    `read_tokens`, which the sample read in between, such as the output of a tool; `read_tokens` is empty if no sample
    read any. `components` has the components of the rewards by name, None for a reward that failed; it is empty if the
    rewards have none. `equal` is whether the rewards that the advantage estimator compares are all equal; it is
    computed only with `zero_variance: resample`. `part` is the part of a mixture that the task belongs to.
    `continued_tokens` is the number of completion tokens that the attempt took from the prefix of its ticket. `stored`
    is the last partial generation that the attempt has stored. `row_checksums` identify the rows for the audit, and
    `prompt` is the checksum of the prompt that the replica got, None if it computed none
    (`asyncrl.data.row_checksums`). `turns` has the calls of the model by each sample's agent; it is empty without
    agents. `tool_calls` is the number of the model's tool calls, of which `failed_tool_calls` failed.
    """

    group: int
    attempt: int
    incarnation: int
    replica: str
    row_bytes: int
    prompt_tokens: int
    completion_tokens: tuple[int, ...]
    read_tokens: tuple[int, ...] = ()
    rewards: tuple[float | None, ...]
    components: dict[str, tuple[float | None, ...]] = {}
    part: str = ""
    truncated: tuple[bool, ...]
    equal: bool = False
    oldest: int
    newest: int
    mid_sequence_updates: int = 0
    continued_tokens: int = 0
    stored: Prefix | None = None
    version_spans: tuple[tuple[VersionSpan, ...], ...] = ()
    row_checksums: tuple[int, ...] = ()
    prompt: int | None = None
    turns: tuple[int, ...] = ()
    tool_calls: int = 0
    failed_tool_calls: int = 0

    @property
    def key(self) -> str:
        return f"{self.group}.{self.attempt}"

    @property
    def generated_tokens(self) -> int:
        return sum(self.completion_tokens)

    @property
    def row_tokens(self) -> list[int]:
        """The number of tokens of each sample's row."""
        read = self.read_tokens or (0,) * len(self.completion_tokens)
        return [self.prompt_tokens + sum(parts) for parts in zip(self.completion_tokens, read, strict=True)]

    @property
    def known_rewards(self) -> list[float]:
        """The rewards of the samples that are not left out."""
        return [reward for reward in self.rewards if reward is not None]

    @property
    def versions(self) -> set[Version]:
        """The versions of the weights that generated the group's tokens."""
        return {Version(span.incarnation, span.step) for spans in self.version_spans for span in spans}

    def surviving_tokens(self, lineage: Lineage) -> int:
        """Returns the number of tokens of each sample before its first token of a dead version (one from which the
        weights of `lineage` are not made), summed over the samples."""
        alive = (
            takewhile(lambda span: lineage.has(Version(span.incarnation, span.step)), spans)
            for spans in self.version_spans
        )
        return sum(span.tokens for spans in alive for span in spans)


class OpenGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group that holds a slot, as a snapshot has it: reserved if `meta` is None, otherwise ready. `deadline` is the
    deadline of the ticket, or later. The ticket's task is `NO_TASK`. `prefix` is the partial generation of a reserved
    group that is stored."""

    ticket: Ticket
    reserved_step: int
    ready_step: int
    meta: GroupMeta | None
    deadline: int
    prefix: Prefix | None = None


class CommitOutcome(StrEnum):
    """The result of a commit. ACCEPTED and FILTERED change the groups. The other results are only counted, except that
    OLD_INCARNATION also ends the attempt if weights that the learner has lost generated some of its tokens.

    FILTERED: all rewards of the group are equal, so it is not trained, and another prompt takes its slot
    (`algorithm.zero_variance: resample`). LATE: the ticket has ended before, for example by expiry. UNKNOWN: there was
    no such ticket, or the buffer has forgotten it (`LAST_ATTEMPTS`). OLD_INCARNATION: weights that the learner has lost
    generated some of the tokens, so the group is generated again; or there was no such incarnation of the learner. For
    these four outcomes, the caller must clear the rows that it stored. DUPLICATE: this attempt is committed already,
    because the call was repeated; its rows must stay.
    """

    ACCEPTED = "accepted"
    FILTERED = "filtered"
    DUPLICATE = "duplicate"
    LATE = "late"
    UNKNOWN = "unknown"
    OLD_INCARNATION = "old_incarnation"


class LeasedGroup(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A group in a lease: its metadata and its limits. Training needs no text of it.

    `deadline` is the last step that may train it, `max_staleness_versions` the η of its ticket. If `extended`, the
    deadline is later than that of the ticket (`staleness.on_deadline: mask`): tokens older than η are then masked from
    the loss.

    `reserved_step` and `ready_step` are the learner's step at the reserve and at the commit. `ready_step − meta.oldest`
    is the staleness that the group got in flight, `lease.step − ready_step` the staleness that it got in the buffer.
    """

    meta: GroupMeta
    deadline: int
    max_staleness_versions: int
    reserved_step: int
    ready_step: int
    extended: bool = False

    def stale_tokens(self, step: int) -> tuple[int, ...]:
        """Returns the number of tokens of each sample that `step` must not train, because they are older than η. Only
        an extended group has any."""
        if not self.extended:
            return (0,) * len(self.meta.completion_tokens)
        oldest = step - self.max_staleness_versions
        return tuple(sum(span.tokens for span in spans if span.step < oldest) for spans in self.meta.version_spans)


class FilteredGroup(msgspec.Struct, frozen=True, array_like=True):
    """A group that was not trained because the advantage estimator finds all of its rewards equal. `reward` is the mean
    of the rewards before penalties. `samples` is their number, `part` the part of the group's task."""

    reward: float
    samples: int
    part: str = ""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """The groups of one step, earliest deadline first, ties in prompt order.

    `filtered` are the groups that were filtered since the lease before: their rewards count in the step's mean reward.

    A lease ends by ack, skip or give-back. It never ends by time. `logged_tasks` are the tasks of the first groups, for
    the log of samples (`learner.groups_logged`). The tasks of the other groups are left out, because a long prompt
    takes more bytes than all metadata of its group.
    """

    incarnation: int
    step: int
    groups: tuple[LeasedGroup, ...]
    filtered: tuple[FilteredGroup, ...] = ()
    logged_tasks: tuple[Task, ...] = ()


class LeaseWait(StrEnum):
    """The reason why there is no lease now.

    NOT_ENOUGH_READY: fewer groups are ready than a step needs. STRAGGLER: groups with an early deadline are not ready.
    A lease without them would make them too old (rule (2) of `staleness.py`), and `staleness.on_deadline` cannot help.
    FINISHED: the run has no more steps. TOO_MANY_FAILURES: there will be no more leases, for the reason given in
    `Refusal`.
    """

    NOT_ENOUGH_READY = "not_enough_ready"
    STRAGGLER = "straggler"
    FINISHED = "finished"
    TOO_MANY_FAILURES = "too_many_failures"


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of the buffer: the number of groups in each state, unless the name has another unit.

    `waiting` counts the prompts that wait for their next attempt, ahead of all new prompts, and hold no slot.
    `oldest_group_age_s` is the time since the reserve of the group that has held a slot for longest, or since the
    restore of the snapshot in which it was ready. `lease_wait` is the answer to the last lease call; None if that call
    got a lease, or before the first one.
    """

    reserved: int
    ready: int
    leased: int
    waiting: int
    booked_bytes: int
    oldest_group_age_s: float
    lease_wait: LeaseWait | None


# Records of failures that the buffer and its callers exchange. They are frozen msgspec structs, like those above.

MAX_FAILURE_CHARS = 1000
"""Maximum length of each text of a failure (message, prompt, completion). Longer texts are cut."""

TOOL_FAILED = "tool_failed"
"""The reason of failed calls of tools."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The failure of a rollout, of the reward of one completion, or of a call of a tool. Texts have at most
    `MAX_FAILURE_CHARS` characters.

    `prompt` is empty if the failure does not belong to one prompt. `completion` is empty if it does not belong to one
    completion. `tool` is the name of the tool whose call failed. `error` is the type of the error that a tool or a
    reward raised. Both are empty for other failures.
    """

    failure_class: FailureClass
    reason: str
    message: str = ""
    prompt: str = ""
    completion: str = ""
    tool: str = ""
    error: str = ""

    @classmethod
    def of(cls, error: RolloutError, *, prompt: str = "") -> "Failure":
        """Returns the failure of a rollout of `prompt` that raised `error`."""
        return cls(
            failure_class=error.failure_class,
            reason=error.reason,
            message=cut_text(str(error)),
            prompt=cut_text(prompt),
            completion=cut_text(error.completion),
            error=error.error,
        )

    @property
    def label(self) -> str:
        """`<class>/<reason>`, from a bounded set, with `/<tool>` and `/<error>` if the failure has them."""
        return "/".join(filter(None, (self.failure_class.value, self.reason, self.tool, self.error)))

    @property
    def of_reward(self) -> bool:
        """Whether a reward failed; otherwise the generation or a call of a tool failed."""
        return self.reason.startswith("reward_")

    @property
    def subject(self) -> str:
        """Names the tool that failed, or the reason with the type of the error."""
        if self.tool:
            return f"tool {self.tool}"
        return f"{self.reason} ({self.error})" if self.error else self.reason

    @property
    def of_tool(self) -> bool:
        """Whether a call of a tool failed. The model read the error, and its episode went on."""
        return self.reason == TOOL_FAILED

    @property
    def words(self) -> str:
        """The cause in one line.

        >>> Failure(failure_class=FailureClass.DATA, reason="reward_raised", message="reward = tasks:judge raised "
        ...     "KeyError: 'KEY' (tasks.py:30)", prompt="0+3=", completion="4").words
        "reward = tasks:judge raised KeyError: 'KEY' (tasks.py:30) for prompt '0+3=' and completion '4'"
        """
        cause = self.message or self.label
        if self.prompt:
            cause += f" for prompt {self.prompt!r}"
        return cause + (f" and completion {self.completion!r}" if self.completion else "")


class FailedTicket(msgspec.Struct, frozen=True, kw_only=True):
    """A ticket whose rollout failed, and the failure."""

    key: str
    incarnation: int
    failure: Failure


class FailureCount(msgspec.Struct, frozen=True, kw_only=True):
    """Failures of the same class, reason, tool and type of error (the last two are empty if the failures have none).
    `first` is the first of them.

    `rollouts` is the number of failed rollouts, with those of held-out evaluations. `groups` is the number of groups
    that ended with such a failure. The two differ because a group is tried again after an INFRA failure, and because
    rollouts of held-out evaluations belong to no group. `samples` is the number of completions whose reward failed, but
    whose group was committed (`environment.on_error`). `tool_calls` is the number of failed calls of a tool in
    committed groups.
    """

    rollouts: int = 0
    groups: int = 0
    samples: int = 0
    tool_calls: int = 0
    first: Failure

    @property
    def failures(self) -> int:
        """The number of failures: rollouts, single completions, and calls of tools."""
        return self.rollouts + self.samples + self.tool_calls


class FailureStreak(msgspec.Struct, frozen=True, kw_only=True):
    """The failures of class DATA since the last group that was committed: the number of failed groups, and the first
    and the last failure."""

    groups: int
    first: Failure
    last: Failure


def cut_text(text: str) -> str:
    """Returns at most `MAX_FAILURE_CHARS` characters of `text`, with `…` if it was cut.

    Lone surrogates are replaced, because they cannot be encoded as UTF-8.

    >>> cut_text("x" * 1001) == "x" * 1000 + "…", cut_text("a\\ud800")
    (True, 'a?')
    """
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= MAX_FAILURE_CHARS else f"{text[:MAX_FAILURE_CHARS]}…"
