"""Every prompt is measured once in tokens. A prompt that does not fit is named by its row, or skipped and counted."""

import logging
from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.data.prompts import Task
from asyncrl.environments.prompt_lengths import fitting, longest_prompt_tokens
from asyncrl.errors import DatasetError


class LetterTokenizer:
    """Makes each letter a token. A chat template adds two tokens to a prompt."""

    def __init__(self, *, chat_template: str | None = None) -> None:
        self.chat_template = chat_template

    def __call__(self, texts: list[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}

    def apply_chat_template(self, conversations: list[list[dict[str, str]]], **_: bool) -> list[list[int]]:
        return [[0, *(ord(letter) for letter in turns[0]["content"]), 1] for turns in conversations]


def tasks_of(*prompts: str) -> list[Task]:
    return [Task(question=prompt, prompt=prompt, answer="", row=row) for row, prompt in enumerate(prompts, start=1)]


def settings(**data: Any) -> Config:
    return Config.model_validate({"data": {"max_prompt_tokens": 4} | data, "model": {"max_length": 16}})


def test_the_longest_prompt_leaves_room_for_one_token() -> None:
    assert longest_prompt_tokens(settings(max_prompt_tokens=15)) == 15
    assert longest_prompt_tokens(settings(max_prompt_tokens=16)) == 15


def test_prompts_that_all_fit_are_kept_in_their_order() -> None:
    tasks = tasks_of("a", "abcd", "ab", "abc", "b")
    assert fitting(tasks, config=settings(), tokenizer=LetterTokenizer(), at_once=2) == tasks
    assert fitting([], config=settings(), tokenizer=LetterTokenizer()) == []


@pytest.mark.parametrize(("prompt", "tokens"), [("abcde", 5), ("", 0)])
@pytest.mark.fault("F33")
def test_a_prompt_of_too_many_tokens_or_none_is_refused_with_row_limit_and_knob(prompt: str, tokens: int) -> None:
    tasks = tasks_of("a", "ab", "abc", prompt, "b", "abcdefgh")
    message = (
        rf"environment, row 4: the prompt '{prompt}' has {tokens} tokens, but must have 1 to 4 "
        r"\(data\.max_prompt_tokens = 4, model\.max_length = 16\); it is the first of 2 that do not fit, among "
        r"6 prompts\. .*data\.on_bad_row: skip"
    )
    with pytest.raises(DatasetError, match=message):
        fitting(tasks, config=settings(), tokenizer=LetterTokenizer(), at_once=2)


@pytest.mark.fault("F33")
def test_a_jsonl_prompt_is_refused_with_its_file() -> None:
    config = settings(dataset="jsonl", path="rows.jsonl")
    with pytest.raises(DatasetError, match=r"rows\.jsonl, row 1: "):
        fitting(tasks_of("abcde"), config=config, tokenizer=LetterTokenizer())


@pytest.mark.fault("F33")
def test_prompts_that_do_not_fit_are_skipped_by_config_and_the_log_counts_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tasks = tasks_of("abcde", "ab", "abcdef")
    with caplog.at_level(logging.WARNING):
        assert fitting(tasks, config=settings(on_bad_row="skip"), tokenizer=LetterTokenizer()) == [tasks[1]]
    assert "first of 2 that do not fit, among 3 prompts" in caplog.text


class Light(LetterTokenizer):
    """Counts one token too few for each prompt, as a LightTokenizer may."""

    added_at_most = 2

    def __call__(self, texts: list[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [ids[1:] for ids in super().__call__(texts, add_special_tokens=False)["input_ids"]]}


@pytest.mark.fault("F33")
def test_prompts_about_which_a_light_tokenizer_leaves_a_doubt_are_measured_by_the_real_one() -> None:
    measured: list[str] = []

    class Real(LetterTokenizer):
        def __call__(self, texts: list[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
            measured.extend(texts)
            return super().__call__(texts, add_special_tokens=True)

    tasks = tasks_of("abc", "abcd", "abcde", "abcdef", "a")
    config = settings(on_bad_row="skip")
    assert fitting(tasks, config=config, tokenizer=Light(), exact=Real, at_once=3) == [tasks[0], tasks[1], tasks[4]]
    assert measured == ["abcd", "abcde", "a"], "without a doubt, 'abc' fits and 'abcdef' does not"


@pytest.mark.fault("F33")
def test_a_dataset_without_a_prompt_that_fits_is_refused_whatever_the_config_says() -> None:
    with pytest.raises(DatasetError, match="No prompt fits"):
        fitting(tasks_of("abcde"), config=settings(on_bad_row="skip"), tokenizer=LetterTokenizer())


def test_what_the_chat_template_adds_is_counted() -> None:
    chat = LetterTokenizer(chat_template="…")
    assert fitting(tasks_of("ab"), config=settings(), tokenizer=chat) == tasks_of("ab")
    with pytest.raises(DatasetError, match="has 5 tokens"):
        fitting(tasks_of("abc"), config=settings(), tokenizer=chat)
