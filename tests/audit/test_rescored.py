"""Texts that a run kept are scored again, by the reward that its configuration names."""

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from plain_run import record_plainly

from asyncrl.audit.history import History, NotPossible, read_history
from asyncrl.audit.rescored import reward_differences
from asyncrl.config.schema import Config
from asyncrl.environments.scores import Score
from asyncrl.environments.scoring_messages import Form, Group
from asyncrl.errors import DataError
from asyncrl.learner.records import SampleRecord, read_config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose first group has the rewards 0 and 1."""
    return record_plainly(tmp_path_factory.mktemp("rescored") / "run")


def with_texts(run: Path, folder: Path, completions: tuple[str, ...], *, rendered: str = "<bos>2+2=") -> History:
    """Returns the history of a copy of the run, which has these texts of the first group of step 0."""
    directory = shutil.copytree(run, folder / "copy")
    records = [
        SampleRecord(
            step=0, group=0, prompt="2+2=", rendered_prompt=rendered, completion=completion, answer="4", reward=None,
            advantage=0.0, version_spans=(), staleness_versions=0, truncated=False,
        )
        for completion in completions
    ]  # fmt: skip
    (directory / "samples").mkdir()
    lines = b"".join(msgspec.json.encode(each) + b"\n" for each in records)
    (directory / "samples" / "step-0.jsonl").write_bytes(lines)
    return read_history(directory)


def configured(run: Path, **environment: Any) -> Config:
    config = read_config(run)
    changed = config.environment.model_copy(update={"reward": "exact_match", **environment})
    return config.model_copy(update={"environment": changed})


@pytest.mark.slow
def test_a_reward_of_another_text_is_found(run: Path, tmp_path: Path) -> None:
    (tmp_path / "right").mkdir()
    (tmp_path / "exchanged").mkdir()
    right = with_texts(run, tmp_path / "right", ("5", "4"))
    assert [apart for apart, _ in reward_differences(right, configured(run))] == [0.0, 0.0]
    exchanged = with_texts(run, tmp_path / "exchanged", ("4", "5"))
    assert list(reward_differences(exchanged, configured(run))) == [
        (1.0, "sample 0 of group 0 in step 0 has the reward 0.0, and its text gets 1.0"),
        (1.0, "sample 1 of group 0 in step 0 has the reward 1.0, and its text gets 0.0"),
    ]


def test_rewards_that_cannot_be_computed_again_are_left_out_with_the_reason(run: Path, tmp_path: Path) -> None:
    def why(history: History, config: Config) -> str:
        with pytest.raises(NotPossible) as found:
            list(reward_differences(history, config))
        return str(found.value)

    assert "did not keep all texts of any group" in why(read_history(run), configured(run))
    assert "names code, programs or servers" in why(read_history(run), configured(run, reward="mine:reward"))
    assert "several turns" in why(read_history(run), configured(run, tools=["calculator"]))
    chat = with_texts(run, tmp_path, ("5", "4"), rendered="<user>2+2=<assistant><think>")
    assert "have a chat template" in why(chat, configured(run))


def test_a_user_who_cannot_start_a_scoring_process_reads_why(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> object:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("asyncrl.audit.rescored.started", refused)
    history = with_texts(run, tmp_path, ("5", "4"))
    with pytest.raises(NotPossible, match=r"the rewards cannot be computed here: .*Permission denied"):
        list(reward_differences(history, configured(run)))


class _Scores:
    """A scoring process that answers with these scores."""

    form = Form()

    def __init__(self, scores: Sequence[Score]) -> None:
        self._scores = scores

    def score(self, groups: Sequence[Group]) -> list[list[Score]]:
        return [list(self._scores)]


@pytest.mark.parametrize(
    ("on_error", "recorded", "scores", "expected"),
    [
        ("zero", (0.0, 1.0), (None, 1.0), [0.0, 0.0]),  # it failed both times
        ("zero", (0.0, 1.0), (0.0, None), [0.0, None]),
        ("zero", (0.0, 1.0), (1.0, 0.0), [None, 1.0]),  # the first may have failed in the run
        ("mask", (None, 1.0), (None, 1.0), [0.0, 0.0]),
        ("mask", (None, 1.0), (0.0, None), [None, None]),
        ("mask", (0.0, 1.0), (1.0, 0.0), [1.0, 1.0]),
    ],
)
def test_a_reward_that_fails_on_one_machine_only_is_not_compared(
    on_error: str,
    recorded: tuple[float | None, ...],
    scores: tuple[float | None, ...],
    expected: list[float | None],
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = DataError("took too long", reason="reward_timeout")
    process = _Scores([late if score is None else score for score in scores])
    monkeypatch.setattr("asyncrl.audit.rescored.started", lambda *_, **__: contextlib.nullcontext(process))
    history = with_texts(run, tmp_path, ("5", "4"))
    first, *others = history.steps
    group, *rest = first.groups
    samples = [msgspec.structs.replace(s, reward=r) for s, r in zip(group.samples, recorded, strict=True)]
    changed = msgspec.structs.replace(group, samples=tuple(samples))
    steps = (msgspec.structs.replace(first, groups=(changed, *rest)), *others)
    found = reward_differences(replace(history, steps=steps), configured(run, on_error=on_error))
    assert [apart for apart, _ in found] == expected


@pytest.mark.parametrize("key", ["environment.reward", "data.mixture"])
def test_rewards_of_a_run_that_was_resumed_with_another_environment_are_left_out(
    key: str, run: Path, tmp_path: Path
) -> None:
    history = with_texts(run, tmp_path, ("5", "4"))
    began = history.began[1]
    later = msgspec.structs.replace(began, settings=began.settings | {key: "secret"})
    steps = (history.steps[0], *(msgspec.structs.replace(step, incarnation=2) for step in history.steps[1:]))
    resumed = replace(history, began={1: began, 2: later}, steps=steps)
    with pytest.raises(NotPossible, match=f"^{key} was changed when the run was resumed$"):
        list(reward_differences(resumed, configured(run)))
