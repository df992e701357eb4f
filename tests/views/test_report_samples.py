"""The report's section of samples: what a reader can open, and how large it gets."""

from pathlib import Path

import msgspec
import pytest
from html_page import Page
from made_up_run import make_step
from written_runs import write_run

from asyncrl.learner.records import SampleRecord
from asyncrl.views.report import read_run, report_html
from asyncrl.views.report_samples import (
    GROUPS_SHOWN,
    OPEN_TOKENS,
    SAMPLES_SHOWN,
    STEPS_SHOWN,
    TOKENS_SHOWN,
    ShownSamples,
    Token,
    shown_samples,
    some_samples,
)

pytestmark = pytest.mark.slow

SAMPLE = SampleRecord(
    step=7,
    group=3,
    prompt="2+2=",
    rendered_prompt="<user>2+2=<bot>",
    completion="four",
    tokens=("fo", "u", "r", "<end>"),
    answer="4",
    reward=0.75,
    components={"right": 1.0, "style": None},
    advantage=-0.5,
    version_spans=((5, 1), (7, 3)),
    trained_spans=((False, 1), (True, 3)),
    staleness_versions=2,
    truncated=False,
    generation_logprobs=(-0.5, -0.5, -0.5, -0.5),
    prev_logprobs=(-0.55, -0.9, -1.2, -3.0),
)


def shown(samples: list[SampleRecord]) -> ShownSamples:
    found = shown_samples({7: samples}, recorded_steps=1)
    assert found is not None
    return found


def long_sample(tokens: int, **changed: object) -> SampleRecord:
    spans = {"version_spans": ((7, tokens),), "trained_spans": ((True, tokens),)}
    without = {"generation_logprobs": None, "prev_logprobs": None}
    made = {"tokens": tuple(f"{number} " for number in range(tokens))} | spans | without | changed
    return msgspec.structs.replace(SAMPLE, **made)


def test_a_token_has_the_bands_of_its_age_its_difference_and_its_mask() -> None:
    [step] = shown([SAMPLE]).steps
    [group] = step.groups
    [sample] = group.samples
    assert [*sample.begin, *sample.end] == [
        Token(text="fo", css="age-2 mask-1"),
        Token(text="u", css="difference-1", title="+0.40 nats"),
        Token(text="r", css="difference-2", title="+0.70 nats"),
        Token(text="<end>", css="difference-3", title="+2.50 nats"),
    ]
    assert (group.prompt, group.answer, step.reward) == ("<user>2+2=<bot>", "4", 0.75)


def test_tokens_that_were_read_have_neither_an_age_nor_a_difference() -> None:
    trained = ((True, 1), (False, 2), (True, 1))
    episode = msgspec.structs.replace(
        SAMPLE, turns=((0, 1), (2, 1)), version_spans=((5, 1), (7, 1)), trained_spans=trained
    )
    [sample] = shown([episode]).steps[0].groups[0].samples
    assert [*sample.begin, *sample.end] == [
        Token(text="fo", css="age-2"),
        Token(text="u", css="read mask-1", begins=True),
        Token(text="r", css="read mask-1"),
        Token(text="<end>", css="difference-3", title="+2.50 nats", begins=True),
    ]


def test_what_was_not_recorded_cannot_be_chosen() -> None:
    without = msgspec.structs.replace(SAMPLE, prev_logprobs=None, trained_spans=())
    found = shown([without])
    assert found.recorded == {"age"}
    assert found.steps[0].groups[0].samples[0].begin[1].css == "difference-none mask-none"
    assert shown([SAMPLE]).recorded == {"age", "difference", "mask"}
    assert shown_samples({}, recorded_steps=0) is None


def test_a_long_completion_is_shown_with_its_beginning_and_its_end() -> None:
    [sample] = shown([long_sample(TOKENS_SHOWN + 100)]).steps[0].groups[0].samples
    assert (len(sample.begin), sample.left_out, len(sample.end)) == (TOKENS_SHOWN // 2, 100, TOKENS_SHOWN // 2)
    assert sample.end[0].text == f"{TOKENS_SHOWN // 2 + 100} "
    assert sample.end[-1].text == f"{TOKENS_SHOWN + 99} "


def test_short_samples_are_open_and_of_long_ones_only_the_first() -> None:
    short = shown([long_sample(OPEN_TOKENS // 2)] * 2).steps[0].groups[0].samples
    long = shown([long_sample(OPEN_TOKENS // 2 + number) for number in (0, 1)]).steps[0].groups[0].samples
    assert [sample.is_open for sample in short] == [True, True]
    assert [sample.is_open for sample in long] == [True, False]


def test_a_long_run_with_long_completions_stays_small_and_says_what_is_left_out(tmp_path: Path) -> None:
    path = write_run(tmp_path, [make_step(step) for step in range(14)])
    for step in range(14):
        samples = [
            long_sample(500, step=step, group=group, rendered_prompt="x" * 12_000, version_spans=((step, 500),))
            for group in range(GROUPS_SHOWN + 1)
            for _ in range(SAMPLES_SHOWN + 3)
        ]
        lines = b"".join(msgspec.json.encode(sample) + b"\n" for sample in samples)
        (path / "samples" / f"step-{step}.jsonl").write_bytes(lines)
    found, recorded = some_samples(path)
    assert recorded == 14
    assert (len(found), min(found), max(found)) == (STEPS_SHOWN, 0, 13)
    page = report_html(read_run(path))
    words = " ".join(Page(page).text.split())
    assert len(page) < 3_000_000
    assert f"{STEPS_SHOWN} of the 14 steps with logged samples, evenly spaced, so that the page stays small." in words
    assert "3 more samples of this group are not shown." in words
    assert "1 more logged groups of this step are not shown." in words
    assert "tokens left out" in words


def test_the_report_shows_rewards_by_component_the_prompt_and_the_versions(tmp_path: Path) -> None:
    path = write_run(tmp_path, [make_step(0)])
    (path / "samples" / "step-0.jsonl").write_bytes(msgspec.json.encode(SAMPLE) + b"\n")
    page = Page(report_html(read_run(path)))
    words = " ".join(page.text.split())
    assert "reward 0.75 · right 1 · style none · advantage -0.5 · 5 × 1, 7 × 3 (2 old)" in words
    assert "<user>2+2=<bot>" in page.text
    assert "All 1 steps with logged samples." in words
    assert [value for name, value in page.attributes if name == "value"] == ["age", "difference", "mask"]
    assert ("disabled", None) not in page.attributes
