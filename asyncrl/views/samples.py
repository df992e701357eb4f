"""Shows trained samples of a run in a terminal: the episode, its rewards, and its tokens coloured by a property."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from rich.text import Text

from asyncrl.errors import RunError
from asyncrl.learner.record_lines import read_lines
from asyncrl.learner.records import SampleRecord
from asyncrl.shown_text import shown

ColorBy = Literal["age", "difference"]

AGES = ("green", "yellow", "dark_orange", "red")
"""Colours of tokens that are 0, 1, 2, and 3 or more versions old."""
DIFFERENCES = ((0.1, "green"), (0.5, "yellow"), (1.0, "dark_orange"), (float("inf"), "red"))
"""Upper bounds of the difference of two log-probs in nats, and the colour below each."""


def steps_with_samples(folder: Path) -> list[int]:
    """Returns the steps of a run directory that have a file of samples, in order."""
    names = [path.stem.removeprefix("step-") for path in (folder / "samples").glob("step-*.jsonl")]
    return sorted(int(name) for name in names if name.isdecimal())


def samples_of(folder: Path, *, step: int | None, worst: bool) -> list[SampleRecord]:
    """Returns the samples of a step, by default the last one, in their order, or with `worst` the lowest reward first.

    Samples without a reward come first then. Raises RunError, which names the steps that there are, if this one has
    none.
    """
    steps = steps_with_samples(folder)
    if not steps:
        raise RunError(f"{folder} has no samples: learner.groups_logged was 0, or no step has ended yet")
    if step is not None and step not in steps:
        raise RunError(f"{folder} has no samples of step {step}; it has them of the steps {steps[0]} to {steps[-1]}")
    samples = read_lines(folder / "samples" / f"step-{steps[-1] if step is None else step}.jsonl", SampleRecord)
    if worst:
        samples.sort(key=lambda sample: float("-inf") if sample.reward is None else sample.reward)
    return samples


def shown_sample(sample: SampleRecord, *, by: ColorBy) -> Iterator[Text]:
    """Yields the lines that show a sample."""
    reward = "no reward" if sample.reward is None else f"reward {sample.reward:.4g}"
    parts = [f"{name} {'none' if value is None else f'{value:.4g}'}" for name, value in sample.components.items()]
    advantage = "no advantage" if sample.advantage is None else f"advantage {sample.advantage:+.4g}"
    facts = [f"step {sample.step}", f"group {sample.group}", reward, *parts, advantage]
    if sample.truncated:
        facts.append("truncated")
    yield Text(", ".join(facts), style="bold")
    yield Text.assemble(("prompt      ", "dim"), _plain(sample.rendered_prompt))
    yield Text.assemble(("completion  ", "dim"), *_tokens(sample, by))
    if sample.answer:
        yield Text.assemble(("answer      ", "dim"), _plain(sample.answer))
    ages = [f"{count} of version {version} (age {sample.step - version})" for version, count in sample.version_spans]
    yield Text.assemble(("tokens      ", "dim"), ", ".join(ages) or "none")


def legend(by: ColorBy) -> Text:
    """Returns the line that explains the colours."""
    if by == "age":
        names = ["age 0", "1", "2", "3 or more versions"]
        return Text.assemble(
            "tokens by age: ", *[(f"{name}  ", color) for name, color in zip(names, AGES, strict=True)]
        )
    names = [f"below {bound:g}" for bound, _ in DIFFERENCES[:-1]] + ["more nats"]
    colored = zip(names, (color for _, color in DIFFERENCES), strict=True)
    return Text.assemble(
        "tokens by |log-prob of the engine − of the policy before the step|: ",
        *[(f"{name}  ", color) for name, color in colored],
    )


def _tokens(sample: SampleRecord, by: ColorBy) -> Sequence[tuple[str, str]]:
    if not sample.tokens:
        return [(_plain(sample.completion), "")]
    return list(zip(map(_plain, sample.tokens), _colors(sample, by), strict=True))


def _plain(text: str) -> str:
    """Returns a text in one line, as a terminal may show it."""
    return shown(repr(text)[1:-1])


def _colors(sample: SampleRecord, by: ColorBy) -> list[str]:
    if by == "age":
        # versions only grow along a completion, so the spans in their order are those of its tokens
        ages = [sample.step - version for version, count in sample.version_spans for _ in range(count)]
        return [AGES[min(age, len(AGES) - 1)] for age in ages]
    if sample.generation_logprobs is None or sample.prev_logprobs is None:
        raise RunError(
            "the samples have no log-probs of the policy: set learner.logprobs_logged, and use an objective that reads "
            "them"
        )
    pairs = zip(sample.generation_logprobs, sample.prev_logprobs, strict=True)
    return [next(color for bound, color in DIFFERENCES if abs(ours - theirs) < bound) for ours, theirs in pairs]
