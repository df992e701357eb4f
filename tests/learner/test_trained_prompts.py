"""In one epoch, a prompt is trained at most as often as the data have it. A repetition is named, and nothing else."""

import random
from typing import Any

import msgspec
import pytest
from learner_scenes import TASKS, Scene, meta_of

from asyncrl.buffer.records import Lease, LeasedGroup, Ticket
from asyncrl.common.version import Version
from asyncrl.data.prompts import PromptSource, Task
from asyncrl.data.row_checksums import prompt_checksum
from asyncrl.errors import WitnessFailed
from asyncrl.learner.trained_prompts import TrainedPrompts
from asyncrl.witness.judge import Finding


def lease_of(tasks: dict[int, Task]) -> Lease:
    """Returns a lease of groups by their numbers, each with the prompt of its task."""
    metas = [
        msgspec.structs.replace(
            meta_of(
                Ticket(
                    group=number, attempt=0, task=task, seed=0, version=Version(1, 0), max_staleness_versions=1,
                    replica="a",
                )
            ),
            part=task.part,
        )
        for number, task in tasks.items()
    ]  # fmt: skip
    groups = [
        LeasedGroup(meta=meta, deadline=1, max_staleness_versions=1, reserved_step=0, ready_step=0) for meta in metas
    ]
    return Lease(incarnation=1, step=0, groups=tuple(groups))


def tasks_of(part: str, count: int, *, different: int) -> list[Task]:
    return [
        Task(question=f"{part}{n}", prompt=f"{part}{n % different}", answer=str(n), part=part, row=n + 1)
        for n in range(count)
    ]


def found(prompts: TrainedPrompts, tasks: dict[int, Task]) -> Finding:
    finding = prompts.finding(lease_of(tasks))
    assert finding is not None
    return finding


@pytest.mark.parametrize(
    ("parts", "weights"),
    [
        ({"": (7, 7)}, {}),
        ({"": (40, 9)}, {}),
        ({"": (1, 1)}, {}),
        ({"a": (30, 30), "b": (11, 5)}, {"a": 3, "b": 1}),
        ({"a": (2, 2), "b": (50, 50)}, {"a": 5, "b": 2}),
    ],
)
@pytest.mark.parametrize("lost", [0.0, 0.3])
def test_the_prompts_of_a_source_pass_in_any_order_with_any_group_lost(
    parts: dict[str, tuple[int, int]], weights: dict[str, int], lost: float
) -> None:
    tasks = [task for name, (count, different) in parts.items() for task in tasks_of(name, count, different=different)]
    source = PromptSource(tasks, seed=3, weights=weights or None)
    prompts, draw = TrainedPrompts(tasks, weights=weights), random.Random(4)
    issued = {number: source.task(number) for number in range(400) if draw.random() >= lost}
    order = sorted(issued, key=lambda number: number + draw.randrange(40))
    findings = [
        found(prompts, {number: issued[number] for number in order[at : at + 8]}) for at in range(0, len(order), 8)
    ]
    assert not any(finding.ratio for finding in findings)
    rows = {
        name: sum(times * prompts for times, prompts in found.items()) for name, found in prompts.frequencies.items()
    }
    assert {name: (rows[name], sum(found.values())) for name, found in prompts.frequencies.items()} == parts


def test_a_prompt_that_is_trained_more_often_than_the_data_have_it_is_named() -> None:
    tasks = tasks_of("", 6, different=4)  # the rows 1 and 5, and 2 and 6, have the same prompt
    prompts = TrainedPrompts(tasks)
    assert found(prompts, {0: tasks[0], 1: tasks[4], 2: tasks[2]}).ratio == 0
    assert found(prompts, {6: tasks[2], 7: tasks[0]}).ratio == 0, "they are of the next epoch"
    again = found(prompts, {3: tasks[2]})
    assert again.ratio == 2
    assert again.words == (
        "group 3 was trained with the prompt '2' (row 3). It is number 2 of epoch 0 with this prompt, and the data "
        "have the prompt once"
    )
    assert found(prompts, {5: tasks[0]}).ratio == 1.5


def test_a_prompt_that_the_data_do_not_have_is_named() -> None:
    prompts = TrainedPrompts(tasks_of("", 6, different=6))
    other = found(prompts, {1: Task(question="", prompt="other", answer="")})
    assert other.ratio == float("inf")
    assert "group 1 was trained with a prompt that the training data do not have" in other.message


def test_the_parts_of_a_mixture_are_counted_apart() -> None:
    weights = {"a": 2, "b": 1}
    tasks = [
        *tasks_of("a", 10, different=10),
        *(msgspec.structs.replace(t, part="b") for t in tasks_of("a", 10, different=10)),
    ]
    prompts = TrainedPrompts(tasks, weights=weights)
    assert found(prompts, {0: tasks[0], 2: tasks[10]}).ratio == 0, "the other part has the same prompt"
    assert found(prompts, {3: tasks[0]}).ratio == 2
    assert found(prompts, {5: tasks[10]}).ratio == 2


def test_old_epochs_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.learner.trained_prompts.REMEMBERED_GROUPS", 4)
    tasks = tasks_of("", 4, different=4)
    prompts = TrainedPrompts(tasks)
    assert found(prompts, {0: tasks[0]}).ratio == 0
    assert found(prompts, {7: tasks[1]}).ratio == 0
    assert found(prompts, {1: tasks[0]}).ratio == 2, "the epoch of group 0 is counted"
    assert found(prompts, {12: tasks[0]}).ratio == 0
    assert found(prompts, {2: tasks[0]}).ratio == 0, "and it was forgotten"


def test_a_repetition_is_named_also_if_the_step_forgets_its_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.learner.trained_prompts.REMEMBERED_GROUPS", 4)
    tasks = tasks_of("", 4, different=4)
    prompts = TrainedPrompts(tasks)
    assert found(prompts, {0: tasks[0]}).ratio == 0
    again = found(prompts, {1: tasks[0], 12: tasks[1]})
    assert again.ratio == 2
    assert "group 1 was trained with the prompt '0' (row 1). It is number 2 of epoch 0" in again.words


def test_groups_without_a_checksum_are_not_counted() -> None:
    [group] = lease_of({0: TASKS[0]}).groups
    bare = msgspec.structs.replace(group, meta=msgspec.structs.replace(group.meta, prompt=None))
    assert TrainedPrompts(TASKS).finding(Lease(incarnation=1, step=0, groups=(bare,))) is None


@pytest.mark.asyncio
@pytest.mark.parametrize("on_failure", ["stop", "warn"])
async def test_a_run_whose_steps_get_the_same_prompts_is_told(
    on_failure: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(PromptSource, "task", lambda self, number, task=PromptSource.task: task(self, number % 2))
    scene = Scene(witness={"every_steps": 0, "on_failure": on_failure}, learner={"total_steps": 3})
    words = "step 1: .*check `prompts` found: group 2 was trained with the prompt 'q"
    if on_failure == "stop":
        with pytest.raises(WitnessFailed, match=words):
            await scene.run()
        return
    await scene.run()
    assert "The witness's check `prompts` found: group 2 was trained with the prompt 'q" in caplog.text
    assert [step.diagnostics["witness_prompts_ratio"] for step in scene.log.steps] == [0.0, 2.0, 3.0]


@pytest.mark.asyncio
async def test_the_prompts_of_a_healthy_run_are_counted_in_each_step() -> None:
    scene = Scene(witness={"every_steps": 0}, learner={"total_steps": 3})
    await scene.run()
    assert [step.diagnostics["witness_prompts_ratio"] for step in scene.log.steps] == [0.0] * 3


def test_the_checksum_of_a_conversation_does_not_depend_on_the_order_of_its_keys() -> None:
    one: Any = ({"role": "user", "content": "2+2="},)
    assert prompt_checksum(one) == prompt_checksum(({"content": "2+2=", "role": "user"},))
    assert prompt_checksum(one) != prompt_checksum("2+2=")


def test_no_epoch_follows_the_last_one() -> None:
    tasks = tasks_of("", 4, different=4)
    prompts = TrainedPrompts(tasks, epochs=2)
    assert not found(prompts, {number: tasks[number % 4] for number in range(8)}).failed
    finding = found(prompts, {8: tasks[0]})
    assert finding.failed
    assert finding.words == "group 8 was trained in epoch 2, and data.epochs = 2"
