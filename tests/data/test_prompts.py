from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.data.left_out import LeftOutRow
from asyncrl.data.prompts import (
    PromptCursor,
    PromptSource,
    Task,
    apply_template,
    format_prompt,
    in_conversation,
    prompt_data,
    split,
    without_repeated,
)
from asyncrl.data.tokenizer import as_text
from asyncrl.errors import ConfigError, DatasetError, RunMismatch


def make_tasks(count: int) -> list[Task]:
    return [Task(question=f"q{i}", prompt=f"q{i}", answer=f"a{i}") for i in range(count)]


def test_template_sees_the_question_and_scalar_metadata() -> None:
    task = Task(question="spell: abc", prompt="", answer="cba", metadata={"word": "abc", "level": 2, "nested": [1]})
    assert format_prompt("{question}|{word}|{level}|{{}}", task) == "spell: abc|abc|2|{}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{wrod}>", r"\{wrod\}.*did you mean \{word\}"),
        (
            "{nested}",
            r"which this config sets.*\{nested\}.*a task has \{question\}, \{word\} .*`prompt` of a JSONL row",
        ),
        ("{word.__class__}", r"\{word\.__class__\}"),
        ("{word[0]}", "which a task lacks"),
        ("{answer}", "which a task lacks"),
        ("{}", "which a task lacks"),
        ("{word", "malformed"),
        ("{word:d}", "cannot format"),
    ],
)
def test_template_that_cannot_be_filled_names_the_field_and_the_key(template: str, message: str) -> None:
    task = Task(question="q", prompt="q", answer="a", metadata={"word": "abc", "nested": [1]})
    with pytest.raises(ConfigError, match=message) as caught:
        apply_template(template, [task])
    assert "data.prompt_template" in str(caught.value)


def test_split_keeps_each_task_and_each_question_on_one_side() -> None:
    tasks = make_tasks(2000)
    train, heldout = split(tasks + tasks[::-1], 0.1)
    assert sorted(task.question for task in train + heldout) == sorted(task.question for task in tasks * 2)
    assert not {task.question for task in train} & {task.question for task in heldout}
    assert 280 < len(heldout) < 520


def test_split_depends_on_the_question_alone() -> None:
    tasks = make_tasks(500)
    heldout = {task.question for task in split(tasks, 0.2)[1]}
    elsewhere = [Task(question=t.question, prompt="other", answer="other") for t in reversed(tasks[100:])]
    assert {task.question for task in split(elsewhere, 0.2)[1]} == heldout & {task.question for task in elsewhere}


def test_a_prompt_that_is_held_out_for_one_question_is_not_issued_for_another() -> None:
    tasks = [Task(question=f"q{i}", prompt=f"{i % 50}>", answer="") for i in range(200)]
    train, heldout = split(tasks, 0.2)
    assert train
    assert heldout
    assert not {task.prompt for task in train} & {task.prompt for task in heldout}


WHITE_SPACE = {
    "a newline at the end": lambda text: f"{text}\n",
    "spaces before it": lambda text: f"  {text}",
    "a tab and a no-break space": lambda text: f"\t{text}\u00a0",
}


@pytest.mark.parametrize("kind", WHITE_SPACE)
@pytest.mark.parametrize("messages", [False, True], ids=["text", "messages"])
def test_a_held_out_prompt_is_not_trained_with_white_space_around_it(kind: str, messages: bool) -> None:
    plain = [Task(question=f"q{i}", prompt=f"q{i}", answer="") for i in range(200)]
    other = []
    for task in plain:
        text = WHITE_SPACE[kind](task.prompt)
        said = ({"role": "user", "content": text},) if messages else ()
        other.append(Task(question=text, prompt=text, messages=said, answer=""))
    train, heldout = split([*plain, *other], 0.2)
    assert len(heldout) > 40
    assert not {task.prompt.strip() for task in train} & {task.prompt.strip() for task in heldout}
    assert len(train) + len(heldout) == 400, "both are on one side"


@pytest.mark.parametrize("content", ["2+2=", "a\nb", " x ", "user: y"])
def test_a_text_and_a_message_with_it_are_one_prompt(content: str) -> None:
    text = Task(question=content, prompt=content, answer="4", row=1)
    message = Task(
        question=content, prompt=content, messages=({"role": "user", "content": content},), answer="4", row=2
    )
    assert without_repeated([text, message]) == ([text], [LeftOutRow(2, "duplicate", "is equal to row 1")])
    system = ({"role": "system", "content": "s"}, *message.messages)
    other = msgspec.structs.replace(message, messages=system, prompt=as_text(system))
    assert without_repeated([text, other]) == ([text, other], [])


def test_split_keeps_the_order() -> None:
    tasks = [Task(question=q, prompt=q, answer=str(i)) for i, q in enumerate("abcab")]
    train, heldout = split(tasks, 0.0)
    assert [(t.question, t.answer) for t in train] == [("a", "0"), ("b", "1"), ("c", "2"), ("a", "3"), ("b", "4")]
    assert heldout == []


@given(count=st.integers(1, 70), seed=st.integers(0, 2**32))
def test_every_epoch_issues_each_task_exactly_once(count: int, seed: int) -> None:
    tasks = make_tasks(count)
    source = PromptSource(tasks, seed=seed, shuffle=True, epochs=3)
    issued = [source.next() for _ in range(3 * count)]
    assert [source.task(number) for number in range(3 * count)] == issued
    for epoch in range(3):
        in_epoch = issued[epoch * count : (epoch + 1) * count]
        assert sorted(t.question for t in in_epoch if t) == sorted(t.question for t in tasks)
    assert source.next() is None
    assert source.next() is None


@given(count=st.integers(1, 40), before=st.integers(0, 100), seed=st.integers(0, 9), shuffle=st.booleans())
def test_a_restored_source_goes_on_exactly_where_the_cursor_was_taken(
    count: int, before: int, seed: int, shuffle: bool
) -> None:
    source = PromptSource(make_tasks(count), seed=seed, shuffle=shuffle, epochs=3)
    for _ in range(before):
        source.next()
    cursor = msgspec.json.decode(msgspec.json.encode(source.state()), type=PromptCursor)
    restored = PromptSource(make_tasks(count), seed=seed, shuffle=shuffle, epochs=3)
    restored.restore(cursor)
    assert [restored.next() for _ in range(2 * count)] == [source.next() for _ in range(2 * count)]


def test_order_is_decided_by_the_seed_and_differs_between_epochs_and_seeds() -> None:
    def order(seed: int, *, skip: int = 0) -> list[Task | None]:
        source = PromptSource(make_tasks(100), seed=seed)
        return [source.next() for _ in range(skip + 100)][skip:]

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1) != order(1, skip=100)
    assert order(1) != make_tasks(100)


def test_without_shuffle_the_order_is_the_files() -> None:
    source = PromptSource(make_tasks(5), seed=7, shuffle=False, epochs=1)
    assert [source.next() for _ in range(6)] == [*make_tasks(5), None]


@pytest.mark.fault("F8")
def test_a_cursor_of_another_dataset_is_refused() -> None:
    cursor = PromptSource(make_tasks(5), seed=0).state()
    with pytest.raises(DatasetError, match="not those of this dataset"):
        PromptSource(make_tasks(6), seed=0).restore(cursor)
    with pytest.raises(DatasetError, match="is negative"):
        PromptSource(make_tasks(5), seed=0).restore(msgspec.structs.replace(cursor, issued=-1))


CHANGED_ANSWER = [*make_tasks(4), msgspec.structs.replace(make_tasks(5)[4], answer="other")]


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (
            CHANGED_ANSWER,
            r"has 5 training prompts, .* the 5 prompts .*: they differ from number 5 on, which is 'q4' in the run \(",
        ),
        (
            make_tasks(4),
            r"has 4 training prompts, .* the 5 prompts .*: they differ from number 5 on, which is 'q4' in the run",
        ),
        (
            make_tasks(6),
            r"has 6 training prompts, .* the 5 prompts .*: they differ from number 6 on\. Use the same data",
        ),
        (make_tasks(5)[::-1], r".*: they differ from number 1 on, which is 'q0' in the run"),
    ],
)
def test_other_prompts_are_refused_with_what_differs(others: list[Task], message: str) -> None:
    source = PromptSource(make_tasks(5), seed=0)
    source.check_same(prompt_data(make_tasks(5), source="here"))
    with pytest.raises(RunMismatch, match=rf"^data\.path = a\.jsonl on h {message}"):
        source.check_same(prompt_data(others, source="data.path = a.jsonl on h"))


def test_an_empty_dataset_is_refused_naming_its_knobs() -> None:
    with pytest.raises(DatasetError, match=r"data\.dataset.*data\.heldout_fraction"):
        PromptSource([], seed=0)


def test_the_systems_message_and_the_examples_come_before_a_question() -> None:
    [task] = in_conversation(
        [Task(question="2+2=", prompt="2+2=", answer="4")],
        system_prompt="Be brief.",
        examples=[{"prompt": "1+1=", "answer": "2"}],
    )
    assert [(each["role"], each["content"]) for each in task.messages] == [
        ("system", "Be brief."),
        ("user", "1+1="),
        ("assistant", "2"),
        ("user", "2+2="),
    ]
    assert task.input == task.messages
    assert task.question == "2+2=", "the same question is held out with any system prompt"
    assert task.prompt == "system: Be brief.\nuser: 1+1=\nassistant: 2\nuser: 2+2="


def test_without_them_a_text_stays_a_text() -> None:
    tasks = make_tasks(1)
    assert in_conversation(tasks, system_prompt=None, examples=[]) == tasks
    assert tasks[0].input == "q0"


def test_a_second_message_of_the_system_is_refused() -> None:
    messages = ({"role": "system", "content": "x"}, {"role": "user", "content": "y"})
    task = Task(question="y", messages=messages, answer="z", row=7)
    with pytest.raises(DatasetError, match=r"row 7 has a message of the system"):
        in_conversation([task], system_prompt="Be brief.", examples=[])


def test_a_template_is_refused_for_messages() -> None:
    task = Task(question="y", messages=({"role": "user", "content": "y"},), answer="z", row=7)
    assert apply_template("{question}", [task]) == [task]
    with pytest.raises(ConfigError, match=r"row 7, which has messages; put the text into data\.system_prompt"):
        apply_template("{question} Think.", [task])


@pytest.mark.parametrize(
    "other",
    [
        {"metadata": {"level": 2}},
        {"metadata": {}},
        {"metadata": {"level": "1"}},
        {"metadata": {"level": 1, "tests": [{"in": None}]}},
        {"messages": ({"role": "user", "content": "q1"},)},
    ],
    ids=["value", "none", "type", "nested", "messages"],
)
@pytest.mark.fault("F25")
def test_datasets_that_differ_in_what_the_reward_gets_have_other_fingerprints(other: dict[str, Any]) -> None:
    tasks = [msgspec.structs.replace(task, metadata={"level": 1}) for task in make_tasks(5)]
    changed = [*tasks]
    changed[1] = msgspec.structs.replace(tasks[1], **other)
    with pytest.raises(RunMismatch, match="differ from number 2 on"):
        PromptSource(tasks, seed=0).check_same(prompt_data(changed, source="other"))
    with pytest.raises(DatasetError, match="are not those of this dataset"):
        PromptSource(changed, seed=0).restore(PromptSource(tasks, seed=0).state())
    turned = [msgspec.structs.replace(task, metadata=dict(reversed(task.metadata.items()))) for task in changed]
    PromptSource(changed, seed=0).check_same(prompt_data(turned, source="other"))
