"""Control tokens in the texts of users are found and named, or refused, and no prompt begins with two BOS."""

import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from asyncrl.config.schema import Config
from asyncrl.data.control_tokens import ControlTokens, with_control_tokens
from asyncrl.data.left_out import LeftOutRow
from asyncrl.data.light_tokenizer import light_tokenizer
from asyncrl.data.prompts import Task
from asyncrl.data.tokenizer import encode_prompt, encode_prompts, load_tokenizer
from asyncrl.demo.chat_tokenizer import build_chat_tokenizer, fast_tokenizer
from asyncrl.environments.prompt_lengths import without_control_tokens
from asyncrl.errors import DatasetError
from asyncrl.gateway.rendering import Renderer

pytestmark = pytest.mark.slow

START, END = "<s>", "</s>"
TURNS = (
    "{{ bos_token }}{% for m in messages %}<turn>{{ m.role }}\n{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<turn>model\n{% endif %}"
)
WITHOUT_START = TURNS.replace("{{ bos_token }}", "")


def with_start(folder: Path, *, template: str | None, adds_start: bool = True) -> Path:
    """Writes a byte-level tokenizer that has BOS and EOS, and a token `<turn>` that is not special."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        special_tokens=[START, END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator(["a"], trainer=trainer)
    core.add_tokens(["<turn>", AddedToken("word", single_word=True), "<think>"])
    if adds_start:
        core.post_processor = processors.TemplateProcessing(single=f"{START} $A", special_tokens=[(START, 0)])
    tokenizer = fast_tokenizer(core, max_length=500, bos_token=START, eos_token=END)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def task(text: str, *, row: int = 1) -> Task:
    return Task(question=text, prompt=text, answer="", row=row)


def rendered(content: str) -> str:
    return f"{START}<turn>user\n{content}{END}<turn>model\n"


BEGUN = {
    f"{START}a": "a",
    f" \n{START}a": "a",
    f"{START}{START}a": "a",
    f"{START} {START} a{END}": f" a{END}",
    rendered("a"): rendered("a").removeprefix(START),
    f"{START} a {START}": f" a {START}",
}
"""Texts that begin with BOS, and each of them without it."""


@pytest.mark.parametrize("template", [None, TURNS, WITHOUT_START], ids=["none", "with BOS", "without BOS"])
@pytest.mark.parametrize("adds_start", [True, False])
@pytest.mark.parametrize("chat", ["auto", "off"])
def test_no_prompt_begins_with_two_starts(chat: str, adds_start: bool, template: str | None, tmp_path: Path) -> None:
    folder = with_start(tmp_path, template=template, adds_start=adds_start)
    tokenizer, light = load_tokenizer(str(folder), chat=chat), light_tokenizer(folder, chat=chat)
    assert light is not None
    start = tokenizer.bos_token_id
    adds = encode_prompt(tokenizer, "a")[0] == start
    assert adds is ((adds_start and not tokenizer.chat_template) or tokenizer.chat_template == TURNS)
    for text, bare in BEGUN.items():
        ids = encode_prompt(tokenizer, text)
        assert ids == encode_prompt(tokenizer, bare if adds else f"{START}{bare}")
        assert ids.count(start) == 1 + bare.count(START)
        assert ids[:2].count(start) <= 1
        assert encode_prompts(light, ["b", text])[1] == ids, "lengths are measured on the same prompt"
    messages = ({"role": "user", "content": f"{START}a"}, {"role": "assistant", "content": "b"})
    if tokenizer.chat_template:
        assert encode_prompt(tokenizer, messages).count(start) == 1
        assert messages[0]["content"] == f"{START}a", "messages are not changed"
        first = Renderer(tokenizer).first([{"role": "user", "content": f"{START}a"}], [])
        assert first == encode_prompt(tokenizer, f"{START}a")


@pytest.mark.parametrize(
    ("text", "token", "of_template"),
    [
        ("What is </s>?", "</s>", True),
        ("<s>old</s> new", "<s>", True),
        ("a<turn>b", "<turn>", True),
        ("the word here", "word", False),
        ("a password", None, False),  # not as a whole word
        ("<think>", None, False),  # neither special nor of the template
        ("<turn", None, False),
    ],
)
def test_control_tokens_are_those_that_the_tokenizer_makes_of_a_text(
    text: str, token: str | None, of_template: bool, tmp_path: Path
) -> None:
    template = TURNS.replace("<turn>model", "<turn>word model")
    folder = with_start(tmp_path, template=template)
    for tokenizer in (load_tokenizer(str(folder)), light_tokenizer(folder, chat="auto")):
        tokens = ControlTokens(tokenizer)
        assert tokens.first_in(task(text)) == token
        chat = Task(question="q", answer="", messages=tuple({"role": "user", "content": each} for each in ("a", text)))
        assert tokens.first_in(chat) == token
        if token is not None and token != "word":
            assert tokens.of_template(token) is of_template


LLAMA_2 = "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
ALPACA = "Below is a task.\n\n{% for m in messages %}### Instruction:\n{{ m.content }}\n\n{% endfor %}### Response:\n"
VICUNA = "A chat of a user and a model. {% for m in messages %}USER: {{ m.content }} {% endfor %}ASSISTANT:"
PLAIN = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}model "


@pytest.mark.parametrize(
    ("template", "text", "words"),
    [
        (LLAMA_2, "[INST] What is 1+1? [/INST]", "[INST]"),
        (LLAMA_2, "[INST] <<SYS>>\nBe short.\n<</SYS>>\n\nHi [/INST]", "[INST]"),
        (LLAMA_2, "What does [INST] mean?", None),
        (ALPACA, "Another text.\n\n### Instruction:\nAdd 1 and 1.\n\n### Response:\n", "### Instruction:"),
        (ALPACA, "### Response:\nwas before\n### Instruction:\n", None),
        (VICUNA, "Our own system prompt. USER: What is 1+1? ASSISTANT:", "USER:"),
        (VICUNA, "Who is the user, and who the assistant?", None),
        (PLAIN, "user 1+1 model", None),  # letters, as in any text
        (TURNS, "user\na\nmodel", None),
        (None, "[INST] a [/INST]", None),
    ],
)
def test_a_prompt_in_a_template_of_plain_words_is_found(
    template: str | None, text: str, words: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = with_start(tmp_path, template=template)
    for tokenizer in (load_tokenizer(str(folder)), light_tokenizer(folder, chat="auto")):
        assert ControlTokens(tokenizer).first_in(task(text)) == words
        assert ControlTokens(tokenizer).first_in(task("What is 1+1?")) is None
    caplog.clear()
    without_control_tokens([task(text)], config=settings(), tokenizer=tokenizer)
    notes = [record.getMessage() for record in caplog.records]
    assert len(notes) == (words is not None)
    assert not notes or "set data.chat: off" in notes[0]


PROMPTS = ["1+1=", "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n", "say <|endoftext|>", "3"]


def settings(**data: Any) -> Config:
    return Config.model_validate({"data": {"dataset": "jsonl", "path": "rows.jsonl"} | data})


def test_a_prompt_that_is_in_the_template_already_is_named_with_its_row_and_token(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = build_chat_tokenizer(max_length=100)
    tasks = [task(prompt, row=row) for row, prompt in enumerate(PROMPTS, start=1)]
    assert without_control_tokens(tasks, config=settings(), tokenizer=tokenizer) == tasks
    [note] = [record.getMessage() for record in caplog.records]
    assert "rows.jsonl, row 2: the prompt '<|im_start|>user" in note
    assert "contains '<|im_start|>'" in note
    assert "the first of 2 such prompts, among 4" in note
    assert "in the template already becomes the text of one turn of the user; set data.chat: off" in note
    caplog.clear()
    without_control_tokens(tasks[2:], config=settings(), tokenizer=tokenizer)
    [note] = [record.getMessage() for record in caplog.records]
    assert "row 3" in note
    assert "template" not in note
    caplog.clear()
    without_control_tokens(tasks[:1], config=settings(), tokenizer=tokenizer)
    assert not caplog.records


def test_control_tokens_may_be_refused_or_their_rows_left_out(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = build_chat_tokenizer(max_length=100)
    tasks = [task(prompt, row=row) for row, prompt in enumerate(PROMPTS, start=1)]
    refusing = settings(control_tokens="refuse")
    with pytest.raises(DatasetError, match=r"row 2: .*'<\|im_start\|>'.*data\.control_tokens: keep, or data\.on_bad"):
        without_control_tokens(tasks, config=refusing, tokenizer=tokenizer)
    skipping = settings(control_tokens="refuse", on_bad_row="skip")
    left_out: list[LeftOutRow] = []
    with caplog.at_level(logging.WARNING):
        kept = without_control_tokens(tasks, config=skipping, tokenizer=tokenizer, left_out=left_out)
    assert [each.row for each in kept] == [1, 4]
    assert [(each.row, each.reason, each.details) for each in left_out] == [
        (2, "control_token", "contains '<|im_start|>'"),
        (3, "control_token", "contains '<|endoftext|>'"),
    ]
    with pytest.raises(DatasetError, match="the first of 2 such prompts, among 2"):
        without_control_tokens(tasks[1:3], config=skipping, tokenizer=tokenizer)


def test_a_tokenizer_without_control_tokens_finds_none(tmp_path: Path) -> None:
    class Plain:
        chat_template = None

    assert with_control_tokens([task("<|im_start|>")], Plain()) == []
