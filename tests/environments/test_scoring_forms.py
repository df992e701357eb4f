"""Rewards of each form in real scoring processes: time limits, secrets, and printed lines."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from scoring_processes import pids

from asyncrl.config.schema import EnvironmentSection
from asyncrl.data.prompts import Task
from asyncrl.environments.reward_function import Form
from asyncrl.environments.scores import Score
from asyncrl.environments.scoring import Scorer
from asyncrl.environments.scoring_child import LINES_A_SECOND, ScoringChild
from asyncrl.environments.scoring_messages import Group, RewardFailure
from asyncrl.environments.scoring_process import GIVEN_UP_AFTER, ScoringProcess
from asyncrl.environments.secrets import Secrets
from asyncrl.errors import ConfigError, DataError

pytestmark = pytest.mark.integration

TASK = Task(question="q", prompt="q", answer="8")
KEY = "sk-live-0123456789"


class Lines:
    """Collects the lines that a scorer passes on from its threads."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._more = threading.Condition()

    def __call__(self, line: str) -> None:
        with self._more:
            self.seen.append(line)
            self._more.notify_all()

    def wait_for(self, count: int) -> list[str]:
        with self._more:
            assert self._more.wait_for(lambda: len(self.seen) >= count, 60), self.seen
            return self.seen


@contextlib.asynccontextmanager
async def scoring(
    reward: str | None,
    *,
    timeout_s: float = 60.0,
    workers: int = 1,
    on_error: str = "mask",
    secrets: Sequence[str] = (),
    given: Secrets | None = None,
    **options: Any,
) -> AsyncIterator[Scorer]:
    section = {"reward": f"judges:{reward}"} if reward else {"name": "judges:Riddles"}
    environment = EnvironmentSection(
        **section, score_timeout_s=timeout_s, score_workers=workers, on_error=on_error, secrets=list(secrets),  # type: ignore[arg-type]
    )  # fmt: skip
    scorer = Scorer(environment, secrets=given, **options)
    try:
        await scorer.start()
        yield scorer
    finally:
        await scorer.close()


def failures(scores: Sequence[Score]) -> list[DataError]:
    return [score for score in scores if isinstance(score, DataError)]


async def failure_of(scorer: Scorer, *completions: str) -> DataError:
    """Returns the only failure in a group, all of whose other completions must have a reward."""
    [failure] = failures(await scorer.score(TASK, completions))
    return failure


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def judge_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", KEY)


@pytest.mark.asyncio
async def test_the_limit_of_a_plain_reward_begins_anew_with_each_completion() -> None:
    async with scoring("each", timeout_s=2.0) as scorer:
        [pid] = pids(scorer)
        assert await scorer.score(TASK, ["0.6"] * 4) == [pid] * 4, "2.4 s in total, within 2 s for each"
        failure = await failure_of(scorer, "0.1", "600", "0.1")
        assert (failure.reason, failure.completion) == (RewardFailure.TIMEOUT, "600")


@pytest.mark.asyncio
async def test_the_limit_of_a_batched_reward_is_that_of_all_its_completions() -> None:
    async with scoring("batch", timeout_s=1.0) as scorer:
        assert await scorer.score(TASK, ["2", "0", "0", "0"]) == [4.0] * 4
        first, second = failures(await scorer.score(TASK, ["600", "0"]))
        assert str(first) == str(second), "the call failed for both"
        assert (first.reason, first.completion) == (RewardFailure.TIMEOUT, "")
        assert str(first).endswith("environment.score_timeout_s = 1 s × 2 completions = 2 s; raise it")
        assert (await failure_of(scorer, "600")).completion == "600"


@pytest.mark.asyncio
async def test_completions_of_an_async_reward_are_scored_at_once_in_one_process() -> None:
    async with scoring("together", workers=2) as scorer:
        assert await scorer.score(TASK, [str(n) for n in range(8)]) == [float(n) for n in range(8)]
    async with scoring("batch_async") as scorer:
        assert await scorer.score(TASK, ["a", "b"]) == [2.0, 2.0]


@pytest.mark.asyncio
async def test_groups_of_an_async_reward_that_wait_in_line_are_scored_at_once_in_one_process() -> None:
    async with scoring("waits") as scorer, asyncio.timeout(40):  # scored one by one, they would take 100 s
        assert await asyncio.gather(*[scorer.score(TASK, ["1"]) for _ in range(100)]) == [[1.0]] * 100


@pytest.mark.asyncio
async def test_groups_of_a_fast_reward_that_wait_in_line_are_sent_in_one_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, sizes = threading.Event(), list[int]()
    receive, score = ScoringChild.receive, ScoringProcess.score

    def gated(*args: Any, **options: Any) -> Any:
        assert gate.wait(60)
        return receive(*args, **options)

    def counted(process: ScoringProcess, groups: Sequence[Group]) -> list[list[Score] | DataError]:
        sizes.append(len(groups))
        return score(process, groups)

    async with scoring("each") as scorer:
        monkeypatch.setattr(ScoringChild, "receive", gated)
        monkeypatch.setattr(ScoringProcess, "score", counted)
        for _ in range(20):  # a measurement of the first group may be slow on a busy machine
            if max(sizes, default=0) > 1:
                break
            gate.clear()
            scores = [asyncio.ensure_future(scorer.score(TASK, ["0"])) for _ in range(20)]
            while scorer._line.qsize() < 19:
                await asyncio.sleep(0)
            gate.set()
            assert await asyncio.gather(*scores) == [[float(pids(scorer)[0])]] * 20
    assert max(sizes) > 1


@pytest.mark.parametrize(
    ("form", "seconds_per_completion", "completions", "more"),
    [
        (Form(), float("inf"), 8, False),
        (Form(), 0.001, 48, True),
        (Form(), 0.001, 51, False),
        (Form(), 0.006, 1, False),
        (Form(batched=True), 0.001, 48, True),
        (Form(asynchronous=True), 1.0, 63, True),
        (Form(asynchronous=True), 0.0, 64, False),
        (Form(asynchronous=True, agent=True), 0.0, 1, False),
    ],
)
def test_a_process_takes_groups_until_their_scoring_would_hold_up_the_first_one(
    form: Form, seconds_per_completion: float, completions: int, *, more: bool
) -> None:
    scorer = Scorer(EnvironmentSection(reward="judges:each"))
    scorer._seconds_per_completion = seconds_per_completion
    assert scorer._takes_more(form, completions) is more


@pytest.mark.asyncio
async def test_of_groups_that_are_sent_together_only_the_one_that_is_not_json_fails() -> None:
    unsendable = Task(question="q", prompt="q", answer="", metadata={"object": object()})
    async with scoring("waits") as scorer:
        first = asyncio.ensure_future(scorer.score(TASK, ["1"]))  # the other groups wait in the queue behind this one
        tasks = [TASK, unsendable, TASK]
        others = [asyncio.ensure_future(scorer.score(task, ["0"])) for task in tasks]
        assert await first == [1.0]
        assert await others[0] == await others[2] == [1.0]
        with pytest.raises(DataError) as caught:
            await others[1]
        assert caught.value.reason == "not_scorable"


async def alone_in_its_loop() -> None:
    async with scoring("blocking", timeout_s=0.5) as scorer:
        assert await scorer.score(TASK, ["a"]) == [1.0]
        failure = await failure_of(scorer, "a", "hang", "b")
        assert (failure.reason, failure.completion) == (RewardFailure.TIMEOUT, "hang")
        assert "it blocked its event loop: use `await` for calls that take time" in str(failure)
        assert await scorer.score(TASK, ["a"]) == [1.0]


async def with_other_groups_in_its_loop() -> None:
    lines = Lines()
    async with scoring("blocking", timeout_s=3.0, output=lines) as scorer:
        first = asyncio.ensure_future(scorer.score(TASK, ["pause"]))
        await asyncio.to_thread(lines.wait_for, 1)  # the other groups then wait in the queue and are sent together
        together = [scorer.score(TASK, ["a", "b"]), scorer.score(TASK, ["c", "hang", "d"])]
        others, with_hang = await asyncio.gather(*together)
        assert await first == others[:1] == [1.0]
        assert (others, with_hang[0], with_hang[2]) == ([1.0, 1.0], 1.0, 1.0)
        assert [each.completion for each in failures(with_hang)] == ["hang"]


async def deaf_to_its_end() -> None:
    async with scoring("stubborn", timeout_s=0.5) as scorer:
        failure = await failure_of(scorer, "a", "hang", "b")
        assert (failure.reason, failure.completion) == (RewardFailure.TIMEOUT, "hang")
        assert "blocked" not in str(failure)
        assert await scorer.score(TASK, ["a"]) == [1.0]


@pytest.mark.asyncio
async def test_an_async_completion_that_blocks_its_loop_or_ignores_its_end_costs_a_process_but_no_other_completion(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The three scorers wait for their time limits at the same time."""
    await asyncio.gather(alone_in_its_loop(), with_other_groups_in_its_loop(), deaf_to_its_end())
    assert caplog.text.count("did not end when it was cancelled") == 2, "it is scored once more"


@pytest.mark.asyncio
async def test_the_score_of_an_environment_may_be_async() -> None:
    async with scoring(None) as scorer:
        assert await scorer.score(TASK, ["abc", ""]) == [3.0, 0.0]
        failure = await failure_of(scorer, "abc", "raise")
        assert str(failure).startswith("environment.name = judges:Riddles raised ValueError: no riddle (")
        assert failure.completion == "raise"


# --- several processes ------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_group_of_slow_completions_is_shared_among_the_processes_and_one_of_fast_ones_is_not() -> None:
    async with scoring("each", workers=2) as scorer:
        shared = await scorer.score(TASK, ["0.3", "0.3", "0.3", "0.3"])
        assert set(shared) == {float(pid) for pid in pids(scorer)}
        together = shared
        for _ in range(1000):  # until the scorer has measured that these completions are fast
            if len(set(together)) == 1:
                break
            together = await scorer.score(TASK, ["0"] * 16)
        assert len(set(together)) == 1


@pytest.mark.asyncio
async def test_a_group_is_not_shared_because_the_replies_of_its_process_are_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine, a round trip takes longer than the scoring of a group."""
    receive = ScoringChild.receive

    def late(*args: Any, **options: Any) -> Any:
        time.sleep(0.2)
        return receive(*args, **options)

    monkeypatch.setattr(ScoringChild, "receive", late)
    async with scoring("each", workers=2) as scorer:
        together: list[Score] = []
        for _ in range(20):
            if len(set(together)) == 1:
                break
            together = await scorer.score(TASK, ["0"] * 16)
        assert len(set(together)) == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("on_error", ["mask", "fail"])
async def test_a_failure_of_a_shared_group_takes_back_what_has_not_begun_only_if_the_group_fails(on_error: str) -> None:
    lines = Lines()
    async with scoring("printed", workers=2, on_error=on_error, output=lines) as scorer:
        failed = failures(await scorer.score(TASK, ["nonsense", *["0.05"] * 50]))
        assert failed[0].completion == "nonsense"
        assert (len(failed) == 1) is (on_error == "mask")
        await scorer.score(TASK, ["0"])  # scored after everything that was in the queue before
    assert (lines.seen.count("0.05") < 25) is (on_error == "fail")


@pytest.mark.asyncio
async def test_a_shared_group_whose_reward_always_hangs_is_given_up() -> None:
    async with scoring("each", workers=2, timeout_s=0.3) as scorer:
        failed = failures(await scorer.score(TASK, ["600"] * 20))
        assert [each.reason for each in failed] == [RewardFailure.TIMEOUT] * 20
        scored = sum(each.completion == "600" for each in failed)
        assert scored <= 2 * GIVEN_UP_AFTER, "each process gives up"


# --- secrets ----------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_secret_reaches_the_reward_and_leaves_it_redacted() -> None:
    lines = Lines()
    given = Secrets({"JUDGE_API_KEY": KEY})
    async with scoring("keyed", secrets=["JUDGE_API_KEY"], given=given, output=lines) as scorer:
        assert await scorer.score(TASK, ["a"]) == [float(len(KEY))]
        failure = await failure_of(scorer, "raise")
        assert "RuntimeError: 401 for <JUDGE_API_KEY> (" in str(failure)
        assert lines.wait_for(4) == ["asking with <JUDGE_API_KEY>", "again with '<JUDGE_API_KEY>'"] * 2


@pytest.mark.usefixtures("judge_key")
@pytest.mark.asyncio
async def test_a_reward_that_lacks_its_key_is_told_to_name_it() -> None:
    async with scoring("keyed") as scorer:
        failure = await failure_of(scorer, "a")
        assert str(failure).startswith("environment.reward = judges:keyed raised KeyError: 'JUDGE_API_KEY' (")
        assert "; add JUDGE_API_KEY to environment.secrets" in str(failure)


@pytest.mark.asyncio
async def test_a_module_that_reads_its_key_when_it_is_imported_gets_the_same_hint() -> None:
    section = EnvironmentSection(reward="needs_a_key:judge", secrets=["JUDGE_API_KEY"])
    scorer = Scorer(section)
    with pytest.raises(ConfigError, match=r"KeyError: 'JUDGE_API_KEY'.*; add JUDGE_API_KEY to environment\.secrets"):
        await scorer.start()
    await scorer.close()
    scorer = Scorer(section, secrets=Secrets({"JUDGE_API_KEY": KEY}))
    try:
        assert await scorer.score(TASK, ["a"]) == [float(len(KEY))]
    finally:
        await scorer.close()


# --- output -----------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_flood_of_output_ends_with_its_limit_and_holds_up_no_other_process() -> None:
    lines = Lines()
    async with scoring("flood", timeout_s=3.0, workers=2, output=lines) as scorer:
        flooding = asyncio.ensure_future(scorer.score(TASK, ["flood"]))
        await asyncio.to_thread(lines.wait_for, 1)
        for n in range(100):
            assert await scorer.score(TASK, ["x" * n]) == [float(n)]
        assert not flooding.done()
        [failure] = failures(await flooding)
        assert "score_timeout_s = 3 s" in str(failure)
    assert len(lines.seen) < 60 * LINES_A_SECOND
    assert any(line.endswith("lines left out") for line in lines.seen)


@pytest.mark.asyncio
async def test_what_cannot_be_encoded_is_printed_in_escapes() -> None:
    lines = Lines()
    async with scoring("prints_surrogates", output=lines) as scorer:
        assert await scorer.score(TASK, ["a"]) == [1.0]
        assert lines.wait_for(1) == ["lone \\udc80 surrogate"]


@pytest.mark.asyncio
async def test_without_a_receiver_the_lines_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "asyncrl.environments.scoring"):
        async with scoring("prints_surrogates") as scorer:
            await scorer.score(TASK, ["a"])
    assert "reward code: lone" in caplog.text
