"""Makes the report's section of samples: a reader opens a step and a sample, and chooses what colours its tokens.

A report must stay small enough for a browser, however long the run and its completions are. It has therefore at most
`STEPS_SHOWN` steps, `GROUPS_SHOWN` groups of a step, `SAMPLES_SHOWN` samples of a group, and `TOKENS_SHOWN` tokens of
all samples together. A longer text is shown with its beginning and its end. `asyncrl samples` shows everything.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.learner.records import SampleRecord, mean
from asyncrl.views.samples import (
    COLOR_BY,
    DIFFERENCES,
    ColorBy,
    bands_of,
    differences,
    samples_of_step,
    steps_with_samples,
    were_read,
)

STEPS_SHOWN = 12
GROUPS_SHOWN = 2
SAMPLES_SHOWN = 16
TOKENS_SHOWN = 50_000
"""Largest number of tokens of all samples together. A token takes about 20 bytes of the page."""
CHARACTERS_SHOWN = 480_000
"""Largest number of characters of all prompts and answers together."""
TEXT_CHARACTERS = 20_000
"""Largest number of characters of one prompt or answer."""
OPEN_TOKENS = 1_000
"""All samples of a group are open at first if they have at most this many tokens together; else only the first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token of a completion. `css` has the classes of its bands. `title` is its log-prob difference, unless that is
    within the first band. `begins` is whether the token before was sampled and this one was read, or the reverse."""

    text: str
    css: str = ""
    title: str = ""
    begins: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSample:
    """A sample with the tokens before and after those that are left out."""

    record: SampleRecord
    begin: Sequence[Token]
    left_out: int
    end: Sequence[Token]
    is_open: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownGroup:
    """A group with its prompt, as the model got it. `more` is the number of samples that are left out."""

    number: int
    prompt: str
    answer: str
    samples: Sequence[ShownSample]
    more: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownStep:
    """A step. `reward` is the mean of its logged samples, `more` the number of logged groups that are left out."""

    step: int
    reward: float | None
    groups: Sequence[ShownGroup]
    more: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSamples:
    """The samples in a report. `recorded_steps` is the number of steps with samples in the run's directory. `recorded`
    has the properties by which tokens can be coloured: those with which at least one shown sample was recorded."""

    steps: Sequence[ShownStep]
    recorded_steps: int
    recorded: frozenset[ColorBy]


def some_samples(folder: Path) -> tuple[dict[int, list[SampleRecord]], int]:
    """Returns the samples of at most `STEPS_SHOWN` steps of a run directory, evenly spaced from the first to the last,
    by step; and the number of steps with samples."""
    steps = steps_with_samples(folder)
    last = len(steps) - 1
    places = sorted({round(index * last / (STEPS_SHOWN - 1)) for index in range(STEPS_SHOWN)}) if steps else []
    return {steps[place]: samples_of_step(folder, steps[place]) for place in places}, len(steps)


def shown_samples(samples: Mapping[int, Sequence[SampleRecord]], *, recorded_steps: int) -> ShownSamples | None:
    """Returns the section for these samples by step; None without samples."""
    groups = {step: _by_group(found) for step, found in samples.items() if found}
    if not groups:
        return None
    chosen = [group[:SAMPLES_SHOWN] for of_step in groups.values() for group in of_step[:GROUPS_SHOWN]]
    tokens = TOKENS_SHOWN // sum(map(len, chosen))
    characters = min(TEXT_CHARACTERS, CHARACTERS_SHOWN // (2 * len(chosen)))
    return ShownSamples(
        steps=[
            ShownStep(
                step=step,
                reward=mean([sample.reward for sample in samples[step]]),
                groups=[_group(group, tokens=tokens, characters=characters) for group in of_step[:GROUPS_SHOWN]],
                more=len(of_step[GROUPS_SHOWN:]),
            )
            for step, of_step in groups.items()
        ],
        recorded_steps=recorded_steps,
        recorded=frozenset(
            by for by in COLOR_BY if any(bands_of(sample, by) is not None for group in chosen for sample in group)
        ),
    )


def _by_group(samples: Sequence[SampleRecord]) -> list[list[SampleRecord]]:
    groups: dict[int, list[SampleRecord]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    return list(groups.values())


def _group(samples: Sequence[SampleRecord], *, tokens: int, characters: int) -> ShownGroup:
    shown = samples[:SAMPLES_SHOWN]
    short = sum(len(sample.tokens) for sample in shown) <= OPEN_TOKENS
    return ShownGroup(
        number=samples[0].group,
        prompt=shortened(samples[0].rendered_prompt, characters),
        answer=shortened(samples[0].answer, characters),
        samples=[_sample(sample, most=tokens, is_open=short or sample is shown[0]) for sample in shown],
        more=len(samples) - len(shown),
    )


def _sample(sample: SampleRecord, *, most: int, is_open: bool) -> ShownSample:
    tokens = _tokens(sample)
    left_out = max(0, len(tokens) - most)
    half = (len(tokens) - left_out + 1) // 2
    begin, end = tokens[:half], tokens[half + left_out :]
    return ShownSample(record=sample, begin=begin, left_out=left_out, end=end, is_open=is_open)


def _tokens(sample: SampleRecord) -> list[Token]:
    """Returns the tokens of a completion. A CSS class such as `age-2` is the band of a token. Tokens of the first band
    have no class, because most tokens are in it. `age-none` means that the sample was recorded without the ages. Tokens
    that were read have the class `read`."""
    if not sample.tokens:
        return [Token(text=shortened(sample.completion), css=" ".join(f"{by}-none" for by in COLOR_BY))]
    bands = {by: bands_of(sample, by) for by in COLOR_BY}
    nats = differences(sample) or [0.0] * len(sample.tokens)
    read = were_read(sample)
    tokens = []
    for place, text in enumerate(sample.tokens):
        classes = ["read"] if read[place] else []
        classes += [
            f"{by}-{'none' if of_tokens is None else of_tokens[place]}"
            for by, of_tokens in bands.items()
            if of_tokens is None or of_tokens[place]
        ]
        title = f"{nats[place]:+.2f} nats" if abs(nats[place]) >= DIFFERENCES[0] and not read[place] else ""
        begins = place > 0 and read[place] != read[place - 1]
        tokens.append(Token(text=text, css=" ".join(classes), title=title, begins=begins))
    return tokens


def shortened(text: str, most: int = TEXT_CHARACTERS) -> str:
    """Returns a text of at most about `most` characters: its beginning and its end, and how many are left out between.

    >>> shortened("abcdefgh", 4)
    'ab … (4 characters left out) … gh'
    """
    left_out = len(text) - most
    if left_out <= 0:
        return text
    begin = most - most // 2
    return f"{text[:begin]} … ({left_out:,} characters left out) … {text[begin + left_out :]}"
