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
    """Returns the number of failures by reason, the most frequent first, with the tools or the types of errors of which
    they are: `tool_failed 65 calls (price 60, stock 5), reward_raised 20 rollouts and 31 single completions (ValueError
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
    """Returns the number of groups by failure reason, the most frequent first. Groups that were retried do not
    count."""
    groups: Counter[str] = Counter()
    for count in counts:
        groups[count.first.reason] += count.groups
    return {reason: number for reason, number in groups.most_common() if number}
