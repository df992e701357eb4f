"""A tokenizer from a model's files counts as transformers does, except for the special tokens that transformers
adds."""

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.data.light_tokenizer import light_tokenizer
from asyncrl.data.tokenizer import encode_prompts, load_tokenizer
from asyncrl.data.turn_ends import engine_ends, template_end
from asyncrl.demo.tiny_model import build_tokenizer
from asyncrl.errors import ConfigError

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
    light = light_tokenizer(folder, chat=chat)
    assert light is not None
    expected = encode_prompts(load_tokenizer(str(folder), chat=chat), PROMPTS)
    assert encode_prompts(light, PROMPTS) == expected
    assert (len(expected[0]) == len(PROMPTS[0])) is (chat == "off")


@pytest.mark.parametrize("prompted", [True, False])
def test_a_conversation_has_the_same_ids_and_ends_as_in_transformers(prompted: bool, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(
        TEMPLATE.replace("<bot>", "{% if add_generation_prompt %}<bot>{% endif %}")
    )
    light, exact = light_tokenizer(folder, chat="auto"), load_tokenizer(str(folder))
    assert light is not None
    turns = [{"role": role, "content": f"{role}s text"} for role in ("system", "user", "assistant", "user")]
    expected = exact.apply_chat_template(turns, add_generation_prompt=prompted, tokenize=True, return_dict=False)
    assert light.apply_chat_template(turns, add_generation_prompt=prompted) == expected
    assert (engine_ends(light), template_end(light)) == (engine_ends(exact), template_end(exact))


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


DEFAULT = "{% for m in messages %}<{{ m.role[0] }}{{ style }}>{{ m.content }}{% endfor %}<{{ depth }}>"
OTHERS = {
    "rag": "{{ depth }}:{{ messages[-1].content }}",
    "tool_use": "{{ [style, depth] | tojson(indent=1) }}{{ messages | length }}{{ messages[0].content }}",
    "strict": "{% if tools is not none or documents is not none %}?{% endif %}{{ style is none }}{{ depth }}"
    "{{ messages[0].content }}",
}
OPTIONS = [
    {"style": "short", "depth": 2},
    {"style": None, "depth": [1, {"a": True}]},
    {"style": 'it\'s "quoted" \\ {{ x }}', "depth": -0.5},
]


def named(folder: Path, templates: dict[str, str], *, form: str) -> Path:
    """Replaces the template of the tokenizer in `folder` by several ones, in one of the two forms of files."""
    tokenizer = build_tokenizer(max_length=16)
    tokenizer.chat_template = templates
    (folder / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(folder, save_jinja_files=form == "files")
    return folder


@pytest.mark.parametrize("form", ["files", "list"])
@pytest.mark.parametrize("options", OPTIONS, ids=["texts", "null and nested", "quotes"])
def test_named_templates_are_applied_with_their_variables_as_in_transformers(
    options: dict[str, Any], form: str, folder: Path
) -> None:
    named(folder, {"default": DEFAULT, **OTHERS}, form=form)
    seen = []
    for chat in ("auto", "default", *OTHERS):
        light = light_tokenizer(folder, chat=chat, chat_options=options)
        real = load_tokenizer(str(folder), chat=chat, chat_options=options)
        assert light is not None
        expected = encode_prompts(real, PROMPTS)
        assert encode_prompts(light, PROMPTS) == expected, chat
        other = load_tokenizer(str(folder), chat=chat, chat_options={"style": "z", "depth": 99})
        assert encode_prompts(other, PROMPTS) != expected, f"the variables have no effect in {chat}"
        seen.append(expected)
    assert seen[0] == seen[1]
    assert len({str(each) for each in seen}) == 1 + len(OTHERS)


def test_conversations_with_tools_still_have_a_template_of_their_own(folder: Path) -> None:
    named(
        folder,
        {name: f"{name[0]}{{{{ style }}}}{{{{ messages[0].content }}}}" for name in ("default", "tool_use")},
        form="files",
    )
    tokenizer = load_tokenizer(str(folder), chat_options={"style": 7})
    asked = [{"role": "user", "content": "a"}]
    assert tokenizer.apply_chat_template(asked, tokenize=False) == "d7a"
    assert tokenizer.apply_chat_template(asked, tools=[{"type": "function"}], tokenize=False) == "t7a"


TOOL = {"type": "function", "function": {"name": "nine", "description": "<a> & b", "parameters": {"type": "object"}}}
WITH_TOOLS = {
    "as JSON": {"default": "{{ tools | tojson if tools }}{{ messages[0].content }}"},
    "by name": {"default": "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{{ messages[0].content }}"},
    "indented": {
        "default": "{% if tools is not none %}{{ tools | tojson(indent=2) }}{% endif %}{{ messages[0].content }}"
    },
    "a template of its own": {
        "default": "d{{ messages[0].content }}",
        "tool_use": "t{{ tools[0].function.description }}{{ messages[0].content }}",
    },
}


@pytest.mark.parametrize("kind", WITH_TOOLS)
def test_tools_are_written_as_in_transformers(kind: str, folder: Path) -> None:
    named(folder, WITH_TOOLS[kind], form="files")
    light, real = light_tokenizer(folder, chat="auto", tools=[TOOL]), load_tokenizer(str(folder))
    assert light is not None
    for tools in ([TOOL], [TOOL, TOOL], []):
        assert encode_prompts(light, PROMPTS, tools=tools) == encode_prompts(real, PROMPTS, tools=tools)
    assert encode_prompts(light, PROMPTS, tools=[TOOL]) != encode_prompts(light, PROMPTS)


def test_a_template_that_only_transformers_can_render_with_tools_is_left_to_it(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% if tools %}{{ strftime_now('%Y') }}{% endif %}")
    assert light_tokenizer(folder, chat="auto", tools=[TOOL]) is None
    assert light_tokenizer(folder, chat="auto") is not None


@pytest.mark.parametrize(
    ("templates", "chat", "words"),
    [
        (
            {"default": DEFAULT, **OTHERS},
            "offf",
            "'offf', but the model's tokenizer has only the templates default, rag",
        ),
        ({"rag": "a", "tool_use": "b"}, "auto", "'default'.*only the templates rag, tool_use; set data.chat to rag or"),
        ({"default": DEFAULT}, "rag", "'rag'.*only the templates default; set data.chat to default or off"),
        ({}, "rag", "'rag'.*has no template; set data.chat to off"),
    ],
    ids=["misspelled", "no default", "only one", "none"],
)
def test_a_template_that_the_tokenizer_does_not_have_is_refused_with_those_that_it_has(
    templates: dict[str, str], chat: str, words: str, folder: Path
) -> None:
    named(folder, templates, form="files")
    for load in (lambda: light_tokenizer(folder, chat=chat), lambda: load_tokenizer(str(folder), chat=chat)):
        with pytest.raises(ConfigError, match=rf"data.chat = {chat}: needs the chat template {words}"):
            load()
