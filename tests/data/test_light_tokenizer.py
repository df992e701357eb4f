"""A tokenizer from a model's files counts as transformers does, except for the special tokens that transformers
adds."""

import json
from pathlib import Path

import pytest

from asyncrl.data.light_tokenizer import light_tokenizer
from asyncrl.data.tokenizer import encode_prompts, load_tokenizer
from asyncrl.demo.tiny_model import build_tokenizer

pytestmark = pytest.mark.slow

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}\n{% endfor %}<bot>"
PROMPTS = ["1+1=", "a longer prompt\nof two lines"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = build_tokenizer(max_length=16)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("chat", ["auto", "off"])
def test_prompts_have_the_same_ids_as_in_transformers(chat: str, folder: Path) -> None:
    light = light_tokenizer(folder, chat=chat)  # type: ignore[arg-type]
    assert light is not None
    expected = encode_prompts(load_tokenizer(str(folder), chat=chat), PROMPTS)  # type: ignore[arg-type]
    assert encode_prompts(light, PROMPTS) == expected
    assert (len(expected[0]) == len(PROMPTS[0])) is (chat == "off")


def test_a_template_in_the_tokenizers_settings_is_read_as_well(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": "<{{ messages[0].content }}>"}))
    light = light_tokenizer(folder, chat="auto")
    assert light is not None
    assert len(encode_prompts(light, ["abc"])[0]) == 5


@pytest.mark.parametrize("source", ["{{ raise_exception('no') }}", "{{ strftime_now('%Y') }}", "{% bad"])
def test_a_template_that_only_transformers_can_render_is_left_to_it(source: str, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(source)
    assert light_tokenizer(folder, chat="auto") is None
    assert light_tokenizer(folder, chat="off") is not None


def test_without_its_file_there_is_none(tmp_path: Path) -> None:
    assert light_tokenizer(tmp_path, chat="auto") is None


def test_an_id_has_a_text(folder: Path) -> None:
    light = light_tokenizer(folder, chat="off")
    assert light is not None
    assert max(encode_prompts(light, ["a~b"])[0]) == 97
    assert light.text_of(97) == "~"
