"""Shows trained samples of a run in a terminal: the episode, its rewards, and its tokens coloured by a property.

`report_samples.py` shows them in the report, with the same bands of colours.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

from rich.text import Text

from asyncrl.config.parts import section_of
from asyncrl.data.left_out import in_words
from asyncrl.errors import RunError
from asyncrl.learner.records import DataRecord, SampleRecord, read_lines
from asyncrl.run_files import names
from asyncrl.shown_text import shown

ColorBy = Literal["age", "difference", "mask"]
COLOR_BY: tuple[ColorBy, ...] = get_args(ColorBy)

DIFFERENCES = (0.1, 0.5, 1.0)
"""Upper bounds of the first bands of the difference of two log-probs, nats. The last band has no bound."""
BANDS: Mapping[ColorBy, tuple[str, ...]] = {
    "age": ("age 0", "1", "2", "3 or more versions"),
    "difference": (*(f"below {bound:g}" for bound in DIFFERENCES), "more nats"),
    "mask": ("trained", "not trained"),
}
"""Names of the bands into which tokens are sorted; each band has a colour."""
SUBJECTS: Mapping[ColorBy, str] = {
    "age": "age in versions",
    "difference": "|log-prob of the engine − of the policy before the step|",
    "mask": "mask of the loss",
}
"""The property of a token that the bands show."""
TERMINAL_COLORS: Mapping[ColorBy, tuple[str, ...]] = {
    "age": ("green", "yellow", "dark_orange", "red"),
    "difference": ("green", "yellow", "dark_orange", "red"),
    "mask": ("green", "bright_black"),
}
"""Colours of the bands in a terminal."""
READ_COLOR = "bright_black"
"""Colour of tokens that were read, in a terminal."""
WORST_OF = 20
"""Number of last steps whose samples are searched for the worst ones."""

_STEP = re.compile(r"step-(\d{1,15})\.jsonl", re.ASCII)


def steps_with_samples(folder: Path) -> list[int]:
    """Returns the steps of a run directory that have a file of samples, in order."""
    found = (_STEP.fullmatch(name) for name in names(folder / "samples", inside=folder))
    return sorted(int(match[1]) for match in found if match is not None)


def samples_of_step(folder: Path, step: int) -> list[SampleRecord]:
    """Returns the samples of a step that has a file of samples, in their order. Raises RunError for a sample whose
    numbers of tokens contradict each other: the views make lists of these lengths, so a wrong one may fill the
    memory."""
    path = folder / "samples" / f"step-{step}.jsonl"
    samples = read_lines(path, SampleRecord, inside=folder)
    for number, sample in enumerate(samples, start=1):
        if (problem := _contradiction(sample)) is not None:
            raise RunError(
                f"{path}, line {number} has {len(sample.tokens)} tokens, but {problem}. The file was edited, or was "
                "not written by asyncrl: repair or delete the line"
            )
    return samples


def _contradiction(sample: SampleRecord) -> str | None:
    """Returns in words which field contradicts the number of a sample's tokens; None if none does, or if no tokens were
    recorded."""
    if not sample.tokens:
        return None
    numbers = {
        "turns": [count for turn in sample.turns for count in turn],
        "trained_spans": [count for _, count in sample.trained_spans],
        "generation_logprobs": [1] * len(sample.generation_logprobs or ()),
        "prev_logprobs": [1] * len(sample.prev_logprobs or ()),
    }
    sampled = sum(count for _, count in sample.turns) if sample.turns else len(sample.tokens)
    wanted = dict.fromkeys(numbers, len(sample.tokens)) | {"version_spans": sampled}
    for name, counts in {**numbers, "version_spans": [count for _, count in sample.version_spans]}.items():
        if counts and (min(counts) < 0 or sum(counts) != wanted[name]):
            return f"{name} has {sum(counts)}" if min(counts) >= 0 else f"{name} has a negative number"
    return None


def samples_of(folder: Path, *, step: int | None, worst: bool) -> list[SampleRecord]:
    """Returns the samples of a step, by default the last one, in their order.

    With `worst`, the lowest reward comes first, and samples without a reward come before it; of equal rewards, the
    newest step comes first. Without `step`, the samples are then those of the last `WORST_OF` steps, because all
    samples of a single step may be good. Raises RunError if there are no samples of the step; it names the first and
    the last step with samples.
    """
    steps = steps_with_samples(folder)
    if not steps:
        raise RunError(f"{folder} has no samples: learner.groups_logged was 0, or no step has ended yet")
    if step is not None and step not in steps:
        raise RunError(f"{folder} has no samples of step {step}; it has some of the steps {steps[0]} to {steps[-1]}")
    chosen = [step] if step is not None else steps[-WORST_OF if worst else -1 :]
    samples = [sample for each in chosen for sample in samples_of_step(folder, each)]
    if worst:
        samples.sort(key=lambda sample: (float("-inf") if sample.reward is None else sample.reward, -sample.step))
    return samples


def bands_of(sample: SampleRecord, by: ColorBy) -> list[int | None] | None:
    """Returns for each completion token the index of its band in `BANDS[by]`; None for a token that was read and has no
    such property. Returns None if the sample was recorded without its tokens, or without the numbers that the bands
    need."""
    if not sample.tokens:
        return None
    match by:
        case "age":
            ages = iter([sample.step - version for version, count in sample.version_spans for _ in range(count)])
            return [None if read else min(next(ages), len(BANDS["age"]) - 1) for read in were_read(sample)]
        case "difference":
            if (found := differences(sample)) is None:
                return None
            bands = [sum(abs(each) >= bound for bound in DIFFERENCES) for each in found]
            return [None if read else band for read, band in zip(were_read(sample), bands, strict=True)]
        case "mask":
            masked: list[int | None] = [
                int(not trained) for trained, count in sample.trained_spans for _ in range(count)
            ]
            return masked or None


def were_read(sample: SampleRecord) -> list[bool]:
    """Returns for each completion token whether the model read it, for example as the answer of a tool. The other
    tokens were sampled."""
    turns = sample.turns or ((0, len(sample.tokens)),)
    return [was_read for read, sampled in turns for was_read in (*[True] * read, *[False] * sampled)]


def differences(sample: SampleRecord) -> list[float] | None:
    """Returns the engine's log-prob of each completion token minus that of the policy before the step, nats. None if
    one of them was not recorded."""
    if sample.generation_logprobs is None or sample.prev_logprobs is None:
        return None
    return [ours - theirs for ours, theirs in zip(sample.generation_logprobs, sample.prev_logprobs, strict=True)]


def data_in_words(data: DataRecord) -> Iterator[Text]:
    """Yields lines about the prompts of a run, and the rows that are left out."""
    yield Text(f"{data.training} prompts for training, {data.heldout} held out for evaluation")
    for section, by_reason in data.left_out.items():
        yield Text(f"{section}: left out {in_words(by_reason)}")


def task_lines(sample: SampleRecord) -> Iterator[Text]:
    """Yields lines that show what the reward function got besides the completion, and the row of the task's
    dataset."""
    place = f"row {sample.row} of {section_of(sample.part)}" if sample.row else "not of a dataset"
    yield Text.assemble(("task        ", "dim"), place)
    for name, value in {"prompt": sample.prompt, "answer": sample.answer}.items():
        yield Text.assemble(("            ", "dim"), shown(f"{name}: {value!r}"))
    if sample.scored is not None:
        yield Text.assemble(("            ", "dim"), shown(f"scored: {sample.scored!r}"))
    for name, value in sample.metadata.items():
        yield Text.assemble(("            ", "dim"), shown(f"metadata.{name}: {value!r} ({type(value).__name__})"))


def shown_sample(sample: SampleRecord, *, by: ColorBy) -> Iterator[Text]:
    """Yields the lines that show a sample, its tokens coloured by the property `by`. Raises RunError if the sample was
    recorded without this property. A sample that was recorded without its tokens is shown without colours."""
    yield Text(", ".join([f"step {sample.step}", f"group {sample.group}", *facts(sample)]), style="bold")
    yield Text.assemble(("prompt      ", "dim"), _plain(sample.rendered_prompt))
    tokens, place = _tokens(sample, by), 0
    for added, sampled in sample.turns or ((0, len(tokens)),):
        end = place + added
        if added:
            origin = "branch      " if place in sample.forks else "read        "
            yield Text.assemble((origin, "dim"), *tokens[place:end])
        yield Text.assemble(("completion  ", "dim"), *tokens[end : end + sampled])
        place = end + sampled
    if sample.tokens and not sample.turns:
        yield Text.assemble(("scored      ", "dim"), _plain(sample.completion))
    if sample.answer:
        yield Text.assemble(("answer      ", "dim"), _plain(sample.answer))
    yield Text.assemble(("tokens      ", "dim"), ages_in_words(sample))


def facts(sample: SampleRecord) -> list[str]:
    """Returns the reward of a sample with its components, its advantage, and whether it was truncated, each as text."""
    reward = "no reward" if sample.reward is None else f"reward {sample.reward:.4g}"
    parts = [f"{name} {'none' if value is None else f'{value:.4g}'}" for name, value in sample.components.items()]
    advantage = "no advantage" if sample.advantage is None else f"advantage {sample.advantage:+.4g}"
    return [reward, *parts, advantage, *(["truncated"] if sample.truncated else [])]


def ages_in_words(sample: SampleRecord) -> str:
    """Returns how many tokens each version of the weights generated, and how old it was at the step."""
    ages = [f"{count} of version {version} (age {sample.step - version})" for version, count in sample.version_spans]
    return ", ".join(ages) or "none"


def legend(by: ColorBy) -> Text:
    """Returns the line that explains the colours of the property `by`."""
    named = zip(BANDS[by], TERMINAL_COLORS[by], strict=True)
    return Text.assemble(f"tokens by {SUBJECTS[by]}: ", *[(f"{name}  ", color) for name, color in named])


def _tokens(sample: SampleRecord, by: ColorBy) -> Sequence[tuple[str, str]]:
    if not sample.tokens:
        return [(_plain(sample.completion), "")]
    bands = bands_of(sample, by)
    if bands is None:
        lacking = {
            "difference": "log-probs of the policy: set learner.logprobs_logged, and use an objective that reads them",
            "mask": "mask: an earlier version of asyncrl wrote them",
        }
        raise RunError(f"the samples have no {lacking[by]}")
    colors = TERMINAL_COLORS[by]
    return [
        (_plain(token), READ_COLOR if band is None else colors[band])
        for token, band in zip(sample.tokens, bands, strict=True)
    ]


def _plain(text: str) -> str:
    """Returns a text in one line: line breaks and control characters are escaped, and the run's secrets are hidden."""
    return shown(repr(text)[1:-1])
