"""Failed rollouts and rewards in words, for logs, errors and views."""

from collections import Counter
from collections.abc import Sequence

from asyncrl.buffer.failure_records import FailureCount


def first_failure(count: FailureCount) -> str:
    """Returns the message, prompt and completion of the first failure of a class and reason."""
    failure = count.first
    lines = [f"first failure of {failure.subject}: {failure.message}"]
    lines += [f"  prompt: {failure.prompt!r}"] if failure.prompt else []
    lines += [f"  completion: {failure.completion!r}"] if failure.completion else []
    return "\n".join(lines)


def in_words(counts: Sequence[FailureCount]) -> str:
    """Returns the number of failures by reason, the most frequent first: `tool_failed 65 calls (price 60, stock 5),
    reward_raised 20 and 31 single completions, reward_timeout 3`. Single completions are those whose reward failed in
    groups that were committed."""
    totals: Counter[str] = Counter()
    samples: Counter[str] = Counter()
    tools: dict[str, Counter[str]] = {}
    for count in counts:
        reason = count.first.reason
        totals[reason] += count.failures
        samples[reason] += count.samples
        if count.tool_calls:
            tools.setdefault(reason, Counter())[count.first.tool or "others"] += count.tool_calls
    return ", ".join(
        f"{reason} {_number(total, samples[reason], tools.get(reason, Counter()))}"
        for reason, total in totals.most_common()
    )


def _number(failures: int, samples: int, tools: Counter[str]) -> str:
    calls = tools.total()
    rollouts = failures - samples - calls
    parts = [str(rollouts)] if rollouts else []
    parts += [f"{samples} single completion{'s' * (samples > 1)}"] if samples else []
    by_tool = ", ".join(f"{tool} {number}" for tool, number in tools.most_common())
    parts += [f"{calls} call{'s' * (calls > 1)} ({by_tool})"] if calls else []
    return " and ".join(parts)


def groups_by_reason(counts: Sequence[FailureCount]) -> dict[str, int]:
    """Returns the number of groups by failure reason, the most frequent first. Groups that were retried do not
    count."""
    groups: Counter[str] = Counter()
    for count in counts:
        groups[count.first.reason] += count.groups
    return {reason: number for reason, number in groups.most_common() if number}
