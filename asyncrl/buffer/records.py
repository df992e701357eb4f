"""What travels between the buffer and its callers: versions, tickets, group metadata, leases.

Frozen msgspec structs without tensors; nothing here imports torch, ray or vllm. A group's bulk rows live in the
row store under its key (`<group>.<attempt>`), a sample's under `<group>.<attempt>_g<i>`.
"""

from enum import StrEnum

import msgspec

from asyncrl.data.prompts import Task
from asyncrl.errors import FailureClass, RolloutError

MAX_FAILURE_CHARS = 1000
"""Longest text of a failure that is kept, each of message, prompt and completion."""


class Version(msgspec.Struct, frozen=True, order=True):
    """Weights' version: (incarnation, step). Written `2.140`; ordered by incarnation, then step."""

    incarnation: int
    step: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.step}"

    @classmethod
    def parse(cls, label: str) -> "Version":
        """Inverse of `str`. ValueError on anything else, such as vLLM's initial label `default`."""
        incarnation, dot, step = label.partition(".")
        if not (dot and incarnation.isdecimal() and step.isdecimal()):
            raise ValueError(f"{label!r} is not a weight version like '1.140'")
        return cls(int(incarnation), int(step))

    @property
    def words(self) -> str:
        """For people: the step; the incarnation only of a learner that was started again.

        >>> Version(1, 140).words, Version(2, 140).words
        ('step 140', 'step 140 of incarnation 2')
        """
        return f"step {self.step}" + (f" of incarnation {self.incarnation}" if self.incarnation > 1 else "")


class Refusal(StrEnum):
    """Why a reserve got fewer tickets than it asked for. NO_PROMPTS: the source is exhausted. NO_STEPS: the groups in
    flight already fill every step up to `total_steps`. TOO_MANY_FAILURES: the run is about to end, because
    `generator.max_data_failures` groups failed in a row."""

    STALENESS = "staleness"
    CAPACITY = "capacity"
    NO_PROMPTS = "no_prompts"
    NO_STEPS = "no_steps"
    PAUSED = "paused"
    TOO_MANY_FAILURES = "too_many_failures"
    OLD_INCARNATION = "old_incarnation"


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """The right to generate one group, held by one replica until commit, fail or expiry.

    `seed` is a multiple of the group size: vLLM gives child i seed + i. `deadline` is the last step that may train
    the group: reserve's version + `max_staleness_versions` at that time.
    """

    group: int
    attempt: int
    task: Task
    seed: int
    version: Version
    max_staleness_versions: int
    replica: str

    @property
    def key(self) -> str:
        return f"{self.group}.{self.attempt}"

    @property
    def deadline(self) -> int:
        return self.version.step + self.max_staleness_versions


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """Tickets, and what stopped the buffer from giving more (None: all that were asked for)."""

    tickets: tuple[Ticket, ...]
    refusal: Refusal | None


class GroupMeta(msgspec.Struct, frozen=True, kw_only=True):
    """What the control plane knows of a finished group: no tokens, no tensors.

    `oldest` and `newest` are the steps of the smallest and largest version that produced one of its tokens.
    Tuples have one entry a sample. `row_bytes` is the size of its rows in the data plane.
    """

    group: int
    attempt: int
    incarnation: int
    replica: str
    row_bytes: int
    prompt_tokens: int
    completion_tokens: tuple[int, ...]
    rewards: tuple[float, ...]
    truncated: tuple[bool, ...]
    oldest: int
    newest: int
    mid_sequence_updates: int = 0

    @property
    def key(self) -> str:
        return f"{self.group}.{self.attempt}"

    @property
    def generated_tokens(self) -> int:
        return sum(self.completion_tokens)


class CommitOutcome(StrEnum):
    """What a commit did. Everything but ACCEPTED changed nothing, was counted, and asks the caller to clear its rows
    (DUPLICATE excepted: those rows are the winner's)."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    LATE = "late"
    UNKNOWN = "unknown"
    OLD_INCARNATION = "old_incarnation"


class LeasedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group in a lease: its metadata and the limits of its ticket.

    `reserved_step` and `ready_step` are the learner's steps at reserve and at commit: staleness in flight is
    `ready_step − meta.oldest`, in the buffer `lease.step − ready_step`.
    """

    meta: GroupMeta
    task: Task
    deadline: int
    max_staleness_versions: int
    reserved_step: int
    ready_step: int


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """One step's groups, earliest deadline first, ties in prompt order. Ends by ack or give-back, never by time."""

    incarnation: int
    step: int
    groups: tuple[LeasedGroup, ...]


class LeaseWait(StrEnum):
    """Why there is no lease now. TOO_MANY_FAILURES: there will be none any more, as `Refusal` explains."""

    NOT_ENOUGH_READY = "not_enough_ready"
    STRAGGLER = "straggler"
    FINISHED = "finished"
    TOO_MANY_FAILURES = "too_many_failures"


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """What the buffer knows of one replica. `version` None: it has loaded nothing whole.

    `reserved_groups` are the tickets that it holds: rollouts that run, wait for their start, or are yet to be
    committed. `free_slots` are concurrency slots (groups): those without a ticket at its last heartbeat, less what it
    got since.
    `refused_for` is the answer to its last reserve at this version.
    """

    replica: str
    version: Version | None
    free_slots: int
    reserved_groups: int
    live: bool
    silent_s: float
    refused_for: Refusal | None


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """How full the buffer is now. Groups, except where the name has a unit.

    `waiting` prompts stand at the front for their next attempt and hold no slot. `lease_wait` is the answer to the
    last lease call, None when it got one.
    """

    reserved: int
    ready: int
    leased: int
    waiting: int
    booked_bytes: int
    oldest_group_age_s: float
    lease_wait: LeaseWait | None


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why one rollout failed. Texts have at most `MAX_FAILURE_CHARS` characters. `prompt` and `completion` are empty
    when the failure is not of one prompt, or not of one completion."""

    failure_class: FailureClass
    reason: str
    message: str = ""
    prompt: str = ""
    completion: str = ""

    @classmethod
    def of(cls, error: RolloutError, *, prompt: str = "") -> "Failure":
        """The failure of a rollout on `prompt` that raised `error`."""
        return cls(
            failure_class=error.failure_class,
            reason=error.reason,
            message=cut_text(str(error)),
            prompt=cut_text(prompt),
            completion=cut_text(error.completion),
        )

    @property
    def label(self) -> str:
        """`<class>/<reason>`, from a bounded set."""
        return f"{self.failure_class.value}/{self.reason}"

    @property
    def of_reward(self) -> bool:
        """Whether the reward failed, and not the generation."""
        return self.reason.startswith("reward_")

    @property
    def words(self) -> str:
        """The cause on one line.

        >>> Failure(failure_class=FailureClass.DATA, reason="reward_raised", message="reward = tasks:judge raised "
        ...     "KeyError: 'KEY' (tasks.py:30)", prompt="0+3=", completion="4").words
        "reward = tasks:judge raised KeyError: 'KEY' (tasks.py:30) for prompt '0+3=' and completion '4'"
        """
        cause = self.message or self.label
        if self.prompt:
            cause += f" for prompt {self.prompt!r}"
        return cause + (f" and completion {self.completion!r}" if self.completion else "")


class FailureCount(msgspec.Struct, frozen=True, kw_only=True):
    """Failed rollouts of one class and reason: their number with those of held-out evaluations, the number of groups
    that ended with one (an INFRA failure is tried again first), and the first failure."""

    rollouts: int
    groups: int
    first: Failure


class FailureStreak(msgspec.Struct, frozen=True, kw_only=True):
    """DATA failures since the last group that did not fail: their number, the first and the last one."""

    groups: int
    first: Failure
    last: Failure


def cut_text(text: str) -> str:
    """At most `MAX_FAILURE_CHARS` characters and `…`, without lone surrogates, which can be neither written nor sent.

    >>> cut_text("x" * 1001) == "x" * 1000 + "…", cut_text("a\\ud800")
    (True, 'a?')
    """
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= MAX_FAILURE_CHARS else f"{text[:MAX_FAILURE_CHARS]}…"
