"""The tokenizer's fingerprint, which both pools compare at the start: equal ids must have equal meaning."""

import dataclasses
from pathlib import Path

import pytest

from asyncrl.data.tokenizer import load_tokenizer, shown_prompt, template_tokens, tokenizer_fingerprint
from asyncrl.demo.tiny_model import build_tokenizer
from asyncrl.errors import RunError


@dataclasses.dataclass
class Vocabulary:
    """Has the attributes of a tokenizer that the fingerprint reads."""

    ids: dict[str, int]
    eos_token_id: int | None = 0

    def get_vocab(self) -> dict[str, int]:
        return self.ids


LETTERS = Vocabulary({"<eos>": 0, "a": 1, "b": 2})


@pytest.mark.parametrize(
    "other",
    [
        Vocabulary({"<eos>": 0, "a": 2, "b": 1}),
        Vocabulary({"<eos>": 0, "a": 1, "c": 2}),
        Vocabulary({"<eos>": 0, "a": 1, "b": 2, "c": 3}),
        Vocabulary({"<eos>": 0, "a": 1}),
        dataclasses.replace(LETTERS, eos_token_id=2),
        dataclasses.replace(LETTERS, eos_token_id=None),
    ],
    ids=["swapped ids", "another token", "one more", "one less", "another end", "no end"],
)
@pytest.mark.fault("F25")
def test_another_tokenizer_or_vocabulary_has_another_fingerprint(other: Vocabulary) -> None:
    assert tokenizer_fingerprint(other) != tokenizer_fingerprint(LETTERS)


@pytest.mark.fault("F25")
def test_the_same_vocabulary_in_another_order_has_the_same_fingerprint_and_shows_its_size() -> None:
    reordered = Vocabulary({"b": 2, "<eos>": 0, "a": 1})
    assert tokenizer_fingerprint(reordered) == tokenizer_fingerprint(LETTERS)
    assert tokenizer_fingerprint(LETTERS).startswith("3:")


@pytest.mark.slow
def test_a_prompt_is_shown_as_the_model_gets_it_in_one_line() -> None:
    tokenizer = build_tokenizer(max_length=16)
    assert shown_prompt(tokenizer, "1+1\n=") == "first prompt, without a chat template, 5 tokens: '1+1\\n='"
    assert template_tokens(tokenizer, "1+1") == 0
    tokenizer.chat_template = "<u>{{ messages[0].content }}{{ eos_token }}<b>"
    shown = shown_prompt(tokenizer, "1+1\n=")
    assert shown == "first prompt, in the model's chat template, 12 tokens: '<u>1+1\\n=<eos><b>'"
    assert template_tokens(tokenizer, "1+1\n=") == 7
    assert len(shown_prompt(tokenizer, "1" * 5000)) < 400


@pytest.mark.slow
def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=rf"model\.path = {tmp_path}: cannot load a tokenizer"):
        load_tokenizer(str(tmp_path), chat="auto")
