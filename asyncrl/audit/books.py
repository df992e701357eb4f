"""Checks 1 to 3 of the audit: each prompt has exactly one end or is still open, the counts of the ledger add up, and
no trained token is of lost or too old weights."""

import io
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import xxhash

from asyncrl.audit.history import Counterexample, History
from asyncrl.buffer.ledger import OPEN_FATES, REISSUED_FATES, Amount, EndedGroup, Fate, LedgerEntry
from asyncrl.common.version import Version
from asyncrl.errors import RunError
from asyncrl.learner.audit_records import TrainedGroup, TrainedStep
from asyncrl.learner.records import EvalRecord, StepRecord, read_lines
from asyncrl.run_files import opened

MOST_FILTERED = 10**6
"""Largest accepted number of filtered samples in a step's record. No run has so many, and the check makes a list of
their rewards, so a damaged number would fill the memory."""


def exactly_once(history: History) -> str:
    """Check 1: every prompt that was issued (given to a generator) has exactly one fate, such as trained or failed, or
    is still open.

    The n-th prompt in the order of the run is group n. The learner and the buffer recorded the trained groups
    independently; both lists must agree. No prompt was trained more often in an epoch than it is in the data.
    """
    size = history.settings["learner.group_size"]
    fates: dict[int, str] = {}
    reissued: dict[int, int] = {}
    for step in history.steps:
        for group in step.groups:
            _check_group(group, step=step, size=size, reissued=reissued)
        settled = sorted(ended.group for ended in step.ledger.ended if ended.fate is Fate.TRAINED)
        trained = sorted(group.group for group in step.groups)
        repeated = [group for group, times in Counter(trained).items() if times > 1]
        if repeated:
            raise Counterexample(f"step {step.step} trained group {repeated[0]} more than once")
        for group in step.groups:
            _settle(fates, group.group, f"trained by step {step.step}")
        if settled != trained:
            raise Counterexample(
                f"step {step.step} trained the groups {trained}, but the buffer counted {settled} as trained"
            )
        _settle_ended(fates, reissued, step.ledger.ended)
        _check_all_there(fates, step.ledger, moment=f"after step {step.step}")
    if history.end is not None:
        _settle_ended(fates, reissued, history.end.ledger.ended)
        _check_all_there(fates, history.end.ledger, moment="at the end of the run")
    last = history.last_ledger
    return (
        f"{len(history.steps)} steps trained {sum(len(step.groups) for step in history.steps)} of {last.prompts} "
        f"prompts, each once; {len(fates) - sum(len(step.groups) for step in history.steps)} ended otherwise, "
        f"{len(last.open)} are open; {len(history.lost)} lost steps do not count; {_distinct_prompts(history)}"
    )


def _distinct_prompts(history: History) -> str:
    """Returns in words how many different prompts were trained, or that they were not recorded. Raises Counterexample
    if a prompt was trained more often in an epoch than it is in the data, or is of a part without data.

    An epoch has each row of the data once. So at most as many prompts may be trained t times or more in an epoch as the
    data have in t rows or more. In a mixture, each block of W groups has w groups of a part with the weight w, where W
    is the sum of the weights. If an epoch of a part ends inside of a block, the part's groups of this block are left
    out, because they may be of either epoch.
    """
    weights = {part["name"]: part["weight"] for part in _mixture(history)} or {"": 1}
    data = history.began[max(history.began)].prompts
    groups = [group for step in history.steps for group in step.groups if group.prompt is not None]
    if not groups or not data:
        return "the prompts of the trained groups were not recorded"
    of_epochs: dict[tuple[str, int], dict[int | None, list[int]]] = {}
    for group in groups:
        rows = sum(times * prompts for times, prompts in data.get(group.part, {}).items())
        if not rows or group.part not in weights:
            raise Counterexample(f"group {group.group} is of the part {group.part!r}, of which the data have no row")
        before = group.group // sum(weights.values()) * weights[group.part]
        if before // rows == (epoch := (before + weights[group.part] - 1) // rows):
            of_epochs.setdefault((group.part, epoch), {}).setdefault(group.prompt, []).append(group.group)
    for (part, epoch), by_prompt in of_epochs.items():
        _check_repetitions([*by_prompt.values()], data[part], epoch=f"epoch {epoch}{f' of {part}' if part else ''}")
    trained = len({(group.part, group.prompt) for group in groups})
    there = sum(sum(prompts.values()) for prompts in data.values())
    return f"the trained groups had {trained} different prompts, of {there} in the data"


def _check_repetitions(trained: list[list[int]], data: Mapping[int, int], *, epoch: str) -> None:
    """Raises Counterexample if, for any t, more prompts were trained t times or more in an epoch than the data have in
    t rows or more. `trained` has the groups of each prompt, and `data` maps a number of rows to the number of prompts
    that have so many."""
    most = max(trained, key=len)
    for times in range(1, len(most) + 1):
        found = sum(len(groups) >= times for groups in trained)
        there = sum(prompts for rows, prompts in data.items() if rows >= times)
        if found > there:
            raise Counterexample(
                f"{epoch} trained {found} prompts {times} times or more, but the data have {there} prompts in {times} "
                f"rows or more; the groups {', '.join(map(str, most[:8]))} have the same prompt"
            )


def _mixture(history: History) -> list[dict[str, Any]]:
    """Returns the parts of `data.mixture` with their weights; an empty list without a mixture."""
    found: list[dict[str, Any]] = history.settings.get("data.mixture", [])  # type: ignore[assignment]
    return found


def _check_group(group: TrainedGroup, *, step: TrainedStep, size: object, reissued: dict[int, int]) -> None:
    if len(group.samples) != size:
        raise Counterexample(
            f"step {step.step} trained {len(group.samples)} samples of group {group.group}, but learner.group_size is "
            f"{size}"
        )
    if group.attempt <= reissued.get(group.group, -1):
        raise Counterexample(
            f"step {step.step} trained attempt {group.attempt} at group {group.group}, but the rows of this attempt "
            "or of a later one were lost or given up before"
        )


def _settle_ended(fates: dict[int, str], reissued: dict[int, int], ended: Iterable[EndedGroup]) -> None:
    for each in ended:
        if each.fate in REISSUED_FATES:
            reissued[each.group] = each.attempt
        elif each.fate is not Fate.TRAINED:
            _settle(fates, each.group, each.fate.value)


def _settle(fates: dict[int, str], group: int, fate: str) -> None:
    if (before := fates.setdefault(group, fate)) is not fate:
        raise Counterexample(f"group {group} has two fates: {before}, and {fate}")


def _check_all_there(fates: dict[int, str], entry: LedgerEntry, *, moment: str) -> None:
    both = [group for group in entry.open if group in fates]
    if both:
        raise Counterexample(f"group {both[0]} was {fates[both[0]]}, but {moment} the buffer lists it as open")
    if len(fates) + len(entry.open) == entry.prompts:
        return
    known = fates.keys() | set(entry.open)
    missing = next((group for group in range(entry.prompts) if group not in known), None)
    if missing is None:
        raise Counterexample(
            f"{moment} {entry.prompts} prompts were issued, but group {max(known)}, which is none of them, has a fate "
            "or is open"
        )
    raise Counterexample(
        f"{moment} group {missing} has no fate: it was not trained, it did not end otherwise, and it is not open"
    )


def ledger_closes(history: History) -> str:
    """Check 2: after every step, the amounts of all fates in the ledger add up to what was issued, in groups, samples
    and tokens. The amount of each final fate equals the sum over the groups that ended with it so far. The step's line
    in steps.jsonl is the one that was written, and has the numbers of the step's record (rewards, loss, gradient norm,
    tokens). The run's own second computation of some steps (the witness) found no difference above its tolerance. Each
    evaluation has a reward or a failure for each of its prompts, and is greedy if it has one completion of each
    prompt."""
    path = history.directory / "steps.jsonl"
    records = read_lines(path, StepRecord)
    lines: dict[int, tuple[StepRecord, int]] = {}
    with opened(path) if records else io.BytesIO() as file:
        for record, line in zip(records, file, strict=False):  # a live run may have written more lines
            if record.trained:
                lines[record.step] = record, xxhash.xxh3_64_intdigest(line.removesuffix(b"\n"))
    sums: dict[Fate, Amount] = {}
    for step in history.steps:
        tokens = {ended.group: ended for ended in step.ledger.ended if ended.fate is Fate.TRAINED}
        for group in step.groups:
            counted = tokens.get(group.group)
            own = (len(group.samples), sum(sample.tokens for sample in group.samples))
            if counted is None or (counted.samples, counted.tokens) != own:
                raise Counterexample(
                    f"step {step.step} trained group {group.group} with {own[0]} samples and {own[1]} tokens, but the "
                    f"ledger counted {_in_words(counted)}"
                )
        _add(sums, step.ledger, moment=f"after step {step.step}")
        _check_line(step, lines.get(step.step), trained=sums[Fate.TRAINED].groups)
    if history.end is not None:
        _add(sums, history.end.ledger, moment="at the end of the run")
    evaluations = _checked_evaluations(history)
    issued = history.last_ledger.issued
    return (
        f"{issued.groups} groups, {issued.samples} samples and {issued.tokens} tokens were issued in "
        f"{history.lineage.incarnation} incarnations, and each has one fate{evaluations}"
    )


def _checked_evaluations(history: History) -> str:
    """Checks evals.jsonl: each evaluation has a reward or a failure for each prompt that it asked. If it had to be
    greedy, each token is the most probable one. Returns in words how many evaluations were checked."""
    try:
        records = read_lines(history.directory / "evals.jsonl", EvalRecord)
    except RunError as error:
        raise Counterexample(str(error)) from error
    checked = [record for record in records if record.asked is not None]
    for record in checked:
        if record.prompts + record.failed != record.asked:
            raise Counterexample(
                f"the evaluation {record.name} of step {record.version} asked {record.asked} prompts, but it has "
                f"{record.prompts} with a reward and {record.failed} that failed"
            )
        if record.non_greedy_tokens:
            raise Counterexample(
                f"the evaluation {record.name} of step {record.version} is not greedy, although it has one completion "
                f"of a prompt: {record.non_greedy_tokens} tokens were not the most probable ones"
            )
    if not checked:
        return ""
    greedy = sum(record.non_greedy_tokens is not None for record in checked)
    return f"; {len(checked)} evaluations have an answer or a failure of each prompt, {greedy} are greedy"


def _in_words(ended: EndedGroup | None) -> str:
    return "no such group" if ended is None else f"{ended.samples} samples and {ended.tokens} tokens"


def _add(sums: dict[Fate, Amount], entry: LedgerEntry, *, moment: str) -> None:
    """Adds the groups that ended to `sums`. Raises Counterexample if the sums are not the ledger's amounts of the final
    fates, or if the amounts of all fates do not add up to what was issued."""
    for ended in entry.ended:
        sums[ended.fate] = sums.get(ended.fate, Amount()) + Amount(1, ended.samples, ended.tokens)
    if (total := sum(entry.fates.values(), start=Amount())) != entry.issued:
        raise Counterexample(f"{moment} the fates add up to {total}, but {entry.issued} was issued")
    for fate in {**sums, **entry.fates}:
        counted, own = entry.fates.get(fate, Amount()), sums.get(fate, Amount())
        if fate not in OPEN_FATES and counted != own:
            raise Counterexample(
                f"{moment} the ledger counts {counted} as {fate.value}, but the groups with this fate add up to {own}"
            )


def _check_line(step: TrainedStep, found: tuple[StepRecord, int] | None, *, trained: int) -> None:
    """Compares the audit's record of a step with the step's line in steps.jsonl: the numbers, and the checksum of the
    line's bytes. Raises Counterexample for a difference, and for one that the run's witness recorded in the line.
    `trained` is the number of groups that were trained up to and in this step."""
    if found is None:
        raise Counterexample(f"steps.jsonl has no line of step {step.step}, which was trained")
    line, checksum = found
    if (most := sum(group.samples for group in step.filtered)) > MOST_FILTERED:
        raise Counterexample(f"step {step.step} filtered {most} samples by its record; no step has so many")
    rewards = [sample.reward for group in step.groups for sample in group.samples if sample.reward is not None]
    rewards += [group.reward for group in step.filtered for _ in range(group.samples)]
    own = {
        "reward_mean": sum(rewards) / len(rewards),
        "reward_std": statistics.pstdev(rewards),
        "reward_min": min(rewards),
        "reward_max": max(rewards),
        "loss": step.loss,
        "grad_norm": step.grad_norm,
        "trained_tokens": sum(step.token_staleness),
    }
    for name, value in own.items():
        if getattr(line, name) != value:
            raise Counterexample(
                f"step {step.step} has {name} {value} by the audit's record, but {getattr(line, name)} in steps.jsonl"
            )
    if (counted := line.ledger_groups.get(Fate.TRAINED.value, 0)) != trained:
        raise Counterexample(f"{trained} groups were trained up to step {step.step}, but steps.jsonl has {counted}")
    if step.line not in (None, checksum):
        raise Counterexample(f"the line of step {step.step} in steps.jsonl is not the one that was written")
    if (ratio := line.witness_ratio) is not None and ratio > 1:
        raise Counterexample(
            f"while the run trained step {step.step}, the witness found {ratio:.3g} times the difference that it "
            "accepts (witness_*_ratio in steps.jsonl): the update is not the one that the configuration describes. The "
            "learner's log says what differs"
        )


def versions_in_bounds(history: History) -> str:
    """Check 3: every trained token was generated by a version from which the weights of its step are made. When it was
    trained, this version was not older than the limit (η) under which the token's group was issued. The ranks counted
    the same ages. No group was trained after its deadline.

    In a group whose deadline was extended (`staleness.on_deadline: mask`), older tokens were masked: the ranks must not
    have counted them.
    """
    total, oldest, masked = 0, 0, 0
    for step in history.steps:
        ages: Counter[int] = Counter()
        for group in step.groups:
            if step.step > group.deadline:
                raise Counterexample(
                    f"step {step.step} trained group {group.group}, whose deadline was step {group.deadline}"
                )
            limit = group.max_staleness_versions if group.extended else step.step
            ages += Counter({a: tokens for a, tokens in _ages(history, step, group).items() if a <= limit})
            spans = [span for sample in group.samples for span in sample.spans]
            masked += sum(span.tokens for span in spans if step.step - span.step > limit)
        counted = Counter(dict(enumerate(step.token_staleness)))
        _check_ages(step, ages, counted)
        total += counted.total()
        oldest = max([oldest, *(age for age, tokens in counted.items() if tokens)])
    left_out = f"; {masked} older ones were masked (staleness.on_deadline: mask)" if masked else ""
    return (
        f"{total} trained tokens are of versions from which the weights are made; the oldest was {oldest} versions old"
        f"{left_out}"
    )


def _ages(history: History, step: TrainedStep, group: TrainedGroup) -> Counter[int]:
    """Returns the number of tokens in a group's trained samples by age in versions. Tokens that were masked because of
    their age are included. Raises Counterexample for a version that must not be trained, and if a sample's tokens by
    version do not add up."""
    ages: Counter[int] = Counter()
    for place, sample in enumerate(group.samples):
        who = f"step {step.step} trained sample {place} of group {group.group}"
        if sum(span.tokens for span in sample.spans) != sample.tokens:
            raise Counterexample(f"{who} with {sample.tokens} tokens, but the tokens by version are {sample.spans}")
        if not sample.trained:
            continue
        for span in sample.spans:
            version, age = Version(span.incarnation, span.step), step.step - span.step
            if not history.lineage.has(version):
                raise Counterexample(
                    f"{who} with a token of version {version}, which is lost: the run's weights are not made from it"
                )
            if age < 0:
                raise Counterexample(f"{who} with a token of version {version}, which did not exist yet")
            trained = step.token_staleness[age : age + 1] not in ((), (0,))
            if age > group.max_staleness_versions and trained and not group.extended:
                raise Counterexample(
                    f"{who} with a token of version {version}, which was {age} versions old; its ticket allows "
                    f"{group.max_staleness_versions}"
                )
            ages[age] += span.tokens
    return ages


def _check_ages(step: TrainedStep, ages: Counter[int], counted: Counter[int]) -> None:
    """Compares the numbers of trained tokens by age: those that follow from the samples' versions (`ages`), and those
    that the ranks counted (`counted`). Raises Counterexample if they differ.

    The ranks may leave tokens of a sample out, for example those older than η. Then they count fewer tokens in all, and
    only an age of which they counted more tokens is an error."""
    exact = ages.total() == counted.total()
    for age in sorted(ages.keys() | counted.keys()):
        if counted[age] > ages[age] or (exact and counted[age] != ages[age]):
            raise Counterexample(
                f"step {step.step} has {ages[age]} tokens that are {age} versions old by the versions of its samples, "
                f"but the ranks trained {counted[age]}"
            )
