"""Records of failures that the buffer and its callers exchange. They are frozen msgspec structs, like `records.py`."""

import msgspec

from asyncrl.errors import FailureClass, RolloutError

MAX_FAILURE_CHARS = 1000
"""Maximum length of each text of a failure (message, prompt, completion). Longer texts are cut."""

TOOL_FAILED = "tool_failed"
"""The reason of failed calls of tools."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The failure of one rollout. Texts have at most `MAX_FAILURE_CHARS` characters.

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
        """Whether the reward failed; otherwise the generation failed."""
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
    """Failures of one class and reason.

    `rollouts` is the number of failed rollouts, with those of held-out evaluations. `groups` is the number of groups
    that ended with such a failure. The two differ because a group is tried again after an INFRA failure, and because
    rollouts of held-out evaluations belong to no group. `samples` is the number of completions whose reward failed, but
    whose group was committed (`environment.on_error`). `tool_calls` is the number of failed calls of a tool in such
    groups.
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
    """The DATA failures since the last group that was committed: the number of groups, the first and the last one."""

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
