"""`asyncrl samples` shows each token with its age, the rewards by component, and hostile text harmlessly."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.text import Text
from typer.testing import CliRunner
from written_runs import lively_step, write_run

from asyncrl.cli.main import app
from asyncrl.errors import RunError
from asyncrl.learner.records import DataRecord, SampleRecord
from asyncrl.views.samples import legend, samples_of, shown_sample

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
    truncated=True,
    generation_logprobs=(-0.5, -0.5, -0.5, -0.5),
    prev_logprobs=(-0.55, -0.9, -1.2, -3.0),
)


def lines(sample: SampleRecord, **options: Any) -> list[Text]:
    return list(shown_sample(sample, **({"by": "age"} | options)))


def colors(text: Text) -> list[str]:
    return [str(span.style) for span in text.spans][1:]  # the first one is the label's


def test_a_sample_is_shown_with_its_rewards_its_prompt_and_the_versions_of_its_tokens() -> None:
    head, prompt, completion, scored, answer, tokens = (line.plain for line in lines(SAMPLE))
    assert head == "step 7, group 3, reward 0.75, right 1, style none, advantage -0.5, truncated"
    assert prompt.endswith("<user>2+2=<bot>")
    assert completion.endswith("four<end>")
    assert scored.split() == ["scored", "four"]
    assert answer.endswith("4")
    assert tokens.endswith("1 of version 5 (age 2), 3 of version 7 (age 0)")
    without = msgspec.structs.replace(SAMPLE, reward=None, components={}, advantage=None, truncated=False, answer="")
    head, *_, tokens = (line.plain for line in lines(without))
    assert head == "step 7, group 3, no reward, no advantage"


def test_tokens_are_coloured_by_their_age_by_the_difference_of_log_probs_or_by_their_mask() -> None:
    assert colors(lines(SAMPLE)[2]) == ["dark_orange", "green", "green", "green"]
    assert colors(lines(SAMPLE, by="difference")[2]) == ["green", "yellow", "dark_orange", "red"]
    assert colors(lines(SAMPLE, by="mask")[2]) == ["bright_black", "green", "green", "green"]
    old = msgspec.structs.replace(SAMPLE, version_spans=((1, 4),))
    assert colors(lines(old)[2]) == ["red"] * 4
    assert "age 0" in legend("age").plain
    assert "below 0.1" in legend("difference").plain
    assert "not trained" in legend("mask").plain


def test_an_episode_is_shown_by_turns_and_what_was_read_has_no_age() -> None:
    turns = ((0, 1), (2, 1))
    episode = msgspec.structs.replace(SAMPLE, turns=turns, version_spans=((5, 1), (7, 1)))
    shown = lines(episode)
    assert [line.plain.split()[0] for line in shown] == [
        "step",
        "prompt",
        "completion",
        "read",
        "completion",
        "answer",
        "tokens",
    ]
    assert [colors(line) for line in shown[2:5]] == [["dark_orange"], ["bright_black"] * 2, ["green"]]
    assert [line.plain[12:] for line in shown[2:5]] == ["fo", "ur", "<end>"]
    forked = lines(msgspec.structs.replace(episode, forks=(1,)))
    assert [line.plain.split()[0] for line in forked[2:5]] == ["completion", "branch", "completion"]
    assert [line.plain[12:] for line in forked[2:5]] == ["fo", "ur", "<end>"]
    differing = lines(episode, by="difference")
    assert [colors(line) for line in differing[2:5]] == [["green"], ["bright_black"] * 2, ["red"]]


def test_a_difference_needs_the_log_probs_and_a_mask_needs_its_spans() -> None:
    with pytest.raises(RunError, match="no mask: an earlier version of asyncrl wrote them"):
        lines(msgspec.structs.replace(SAMPLE, trained_spans=()), by="mask")
    with pytest.raises(RunError, match=r"set learner\.logprobs_logged"):
        lines(msgspec.structs.replace(SAMPLE, prev_logprobs=None), by="difference")


def written(folder: Path) -> Path:
    path = write_run(folder, [lively_step(step) for step in range(3)])
    low = [msgspec.structs.replace(SAMPLE, reward=reward) for reward in (1.0, None, 0.25)]
    with (path / "samples" / "step-2.jsonl").open("ab") as file:
        file.writelines(msgspec.json.encode(sample) + b"\n" for sample in low)
    return path


def test_the_last_step_is_shown_and_the_worst_come_first_if_asked(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert [sample.reward for sample in samples_of(path, step=None, worst=False)] == [1.0, 1.0, None, 0.25]
    assert [sample.reward for sample in samples_of(path, step=2, worst=True)] == [None, 0.25, 1.0, 1.0]
    assert [sample.step for sample in samples_of(path, step=0, worst=False)] == [0]
    assert [sample.reward for sample in samples_of(path, step=None, worst=True)] == [None, 0.25, 1.0, 1.0, 1.0, 1.0], (
        "without a step, those of earlier steps too"
    )
    with pytest.raises(RunError, match="no samples of step 9; it has some of the steps 0 to 2"):
        samples_of(path, step=9, worst=False)


def test_the_command_prints_samples_and_no_control_characters_of_the_model(tmp_path: Path) -> None:
    path = written(tmp_path)
    result = CliRunner().invoke(app, ["samples", str(path), "--worst", "-n", "1"])
    assert result.exit_code == 0, result.output
    assert "reward" in result.output
    assert result.output.count("group 3") == 1
    hostile = msgspec.structs.replace(SAMPLE, tokens=("\x1b]0;owned\x07", "b", "c", "d"))
    (path / "samples" / "step-9.jsonl").write_bytes(msgspec.json.encode(hostile) + b"\n")
    result = CliRunner().invoke(app, ["samples", str(path)])
    assert "owned" in result.output
    assert "\x1b" not in result.output
    assert CliRunner().invoke(app, ["samples", str(path), "--color", "blue"]).exit_code == 2


@pytest.mark.parametrize(
    ("part", "metadata", "words"),
    [
        ("", {"unit": "07"}, ["row 12 of data", "metadata.unit: '07' (str)"]),
        ("sums", {"level": 7}, ["row 12 of data.mixture.sums", "metadata.level: 7 (int)"]),
        ("eval/hard", {"tests": [{"in": None}]}, ["row 12 of eval.sets.hard", "metadata.tests: [{'in': None}] (list)"]),
        ("", {"\x1b]0;owned\x07": "\x1b]0;owned\x07"}, ["row 12 of data", "owned"]),
    ],
    ids=["text", "number", "list", "hostile"],
)
def test_the_task_of_a_sample_is_shown_with_what_the_reward_got_and_the_rows_that_are_left_out(
    part: str, metadata: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    path = written(tmp_path)
    sample = msgspec.structs.replace(SAMPLE, row=12, part=part, metadata=metadata, scored="so \x1b[2J4")
    (path / "samples" / "step-9.jsonl").write_bytes(msgspec.json.encode(sample) + b"\n")
    record = DataRecord(training=90, heldout=10, sets={"hard": 3}, left_out={"data": {"duplicate": 2, "blank": 1}})
    (path / "data.json").write_bytes(msgspec.json.encode(record))
    short = CliRunner().invoke(app, ["samples", str(path)]).output
    assert "row 12" not in short
    assert "left out" not in short
    result = CliRunner().invoke(app, ["samples", str(path), "--task"])
    assert result.exit_code == 0, result.output
    assert "scored:" not in short
    for each in [
        "scored: 'so ",
        *words,
        "90 prompts for training",
        "data: left out 1 blank, 2 duplicate",
        "data show -c",
        "'2+2='",
    ]:
        assert each in result.output
    assert "\x1b" not in result.output


def test_a_run_without_samples_says_why(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"learner\.groups_logged was 0"):
        samples_of(tmp_path, step=None, worst=False)
