import subprocess
import sys

import msgspec
import pytest
from reasoning_gym.factory import DATASETS

from asyncrl.data.prompts import Task
from asyncrl.environments.reasoning_gym import ReasoningGym
from asyncrl.environments.reasoning_gym_tasks import task_names
from asyncrl.errors import ConfigError

pytestmark = pytest.mark.slow


def spelling(*, exact: bool = True) -> ReasoningGym:
    return ReasoningGym("spell_backward", size=20, task_options={"min_word_len": 4, "max_word_len": 4}, exact=exact)


def test_tasks_carry_question_answer_and_the_word() -> None:
    for task in spelling().tasks(0):
        word = task.metadata["word"]
        assert len(word) == 4
        assert task.answer == word[::-1]
        assert task.prompt == task.question
        assert word in task.question


def test_tasks_survive_json_and_score_themselves() -> None:
    environment = spelling()
    for task in environment.tasks(3):
        carried = msgspec.json.decode(msgspec.json.encode(task), type=Task)
        assert carried == task
        assert environment.score(carried, f" {task.answer}\n") == 1.0


@pytest.mark.fault("F24")
def test_an_empty_completion_earns_nothing() -> None:
    [task, *_] = spelling().tasks(0)
    assert spelling().score(task, "") == 0.0


def test_exact_gives_no_credit_for_single_letters_and_partial_credit_is_the_librarys() -> None:
    task = Task(question="q", prompt="q", answer="dcba", metadata={"word": "abcd"})
    assert spelling().score(task, "dcbx") == 0.0
    assert spelling().score(task, "dcbaa") == 0.0
    assert spelling(exact=False).score(task, "dcbx") == 0.75


def test_equal_seeds_draw_equal_tasks_and_neighbouring_seeds_do_not_overlap() -> None:
    def words(seed: int) -> list[str]:
        return [task.metadata["word"] for task in spelling().tasks(seed)]

    assert words(1) == words(1)
    # The library draws entry i of seed s from seed s + i. Used directly, seeds 0 and 1 would share all words but one.
    assert words(0)[1:] != words(1)[:-1]
    assert len(set(words(0)) & set(words(1))) < 5


@pytest.mark.parametrize(
    ("task", "options", "key", "message"),
    [
        ("spell_backwards", {}, "environment.options.task", "did you mean 'spell_backward'"),
        (
            "spell_backward",
            {"min_len": 3},
            "environment.options.task_options",
            "spell_backward has no option 'min_len'; it has min_word_len, .*; did you mean 'min_word_len'",
        ),
        ("spell_backward", {"min_word_len": 0}, "environment.options.task_options", "must be positive"),
        ("spell_backward", {"seed": 3}, "environment.options.task_options", r"run\.seed"),
    ],
)
@pytest.mark.fault("F28")
def test_options_that_the_library_refuses_name_key_and_reason(
    task: str, options: dict[str, int], key: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        ReasoningGym(task, task_options=options)
    assert key in str(caught.value)


def test_the_librarys_task_names_are_read_from_its_source_without_importing_it() -> None:
    assert task_names() == set(DATASETS)
    code = "import sys; from asyncrl.environments.reasoning_gym_tasks import task_names as read\n"
    code += "assert read(); print('reasoning_gym' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


@pytest.mark.fault("F28")
def test_a_size_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="size"):
        ReasoningGym("spell_backward", size=0)


def test_a_task_whose_metadata_json_cannot_carry_is_refused_before_its_rewards_are_all_wrong() -> None:
    with pytest.raises(
        ConfigError, match="arc_agi is not supported, because its scoring needs metadata that JSON cannot represent"
    ):
        ReasoningGym("arc_agi", size=1).tasks(0)


def test_a_task_without_one_answer_is_scored_by_the_library() -> None:
    [task] = ReasoningGym("graph_color", size=1).tasks(0)
    assert task.answer == ""
    assert ReasoningGym("graph_color", size=1).score(task, "{}") == 0.0
