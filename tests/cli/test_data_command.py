"""`asyncrl data show` prints prompts token by token, and tells the tokens that are trained from the others."""

import json
import re
from pathlib import Path

import pytest
from transformers import Qwen3Config
from typer.testing import CliRunner

from asyncrl.cli.data import answered, described
from asyncrl.cli.main import app
from asyncrl.config.load import load_config
from asyncrl.data.prompts import Task
from asyncrl.data.tokenizer import encode_prompt, load_tokenizer
from asyncrl.demo.tiny_model import build_tokenizer, ensure_description

pytestmark = pytest.mark.slow
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% if quiet %}!{% endif %}{% endif %}"
)
CHAT = Task(
    question="2+2=",
    messages=({"role": "system", "content": "Hi"}, {"role": "user", "content": "2+2="}),
    answer="4",
    metadata={"level": 1},
    row=3,
)


def model(folder: Path, *, template: str | None) -> Path:
    """Writes what a model's folder has beside its weights, and an empty file of weights."""
    tokenizer = build_tokenizer(max_length=64)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    Qwen3Config(vocab_size=len(tokenizer), max_position_embeddings=64).save_pretrained(folder)
    (folder / "model.safetensors").touch()
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model(tmp_path / "model", template=TEMPLATE)


def test_special_tokens_and_template_closers_are_not_trained_but_the_sampled_end_of_a_turn_is(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    head, read, sampled, closing, answer, metadata = described(CHAT, tokenizer)
    assert head == "row 3: 19 tokens, 13 of them from the chat template"
    assert read == "  read, not trained:  " + "|".join(
        [*"<s>Hi", "[<eos>]", r"\n", *"<u>2+2=", "[<eos>]", r"\n", *"<a>"]
    )
    assert sampled == "  sampled, trained:   4|[<eos>]"
    assert closing == r"  added, not trained: \n"
    assert answer == "  answer: '4'"
    assert metadata == '  metadata: {"level": 1}'


def test_without_a_template_the_end_of_sequence_ends_the_answer(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder), chat="off")
    task = Task(question="2+2=", prompt="2+2=", answer="4", row=1)
    assert answered(task, encode_prompt(tokenizer, "2+2="), tokenizer) == ([*tokenizer("4").input_ids, 1], [])
    assert [*described(Task(question="a", prompt="a", answer="", row=1), tokenizer)][-1] == "  no reference answer"


def test_variables_of_the_template_are_set(folder: Path) -> None:
    quiet = load_tokenizer(str(folder), chat_options={"quiet": True})
    loud = load_tokenizer(str(folder), chat_options={"quiet": False})
    assert len(encode_prompt(quiet, "a")) == len(encode_prompt(loud, "a")) + 1


def test_the_command_shows_prompts_of_a_file(folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(50)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sets = [f"model.path={folder}", "data.dataset=jsonl", f"data.path={tmp_path / 'rows.jsonl'}"]
    options = ["environment.reward=exact_match", "data.system_prompt=Hi", f"run.dir={tmp_path}"]
    result = CliRunner().invoke(app, ["data", "show", "-n", "2", *sets, *options])
    assert result.exit_code == 0, result.output
    assert result.output.count("read, not trained") == 2
    assert "<|s|>|H|i|[<eos>]" in result.output
    assert "held out for evaluation" in result.output


def test_a_system_prompt_is_refused_without_a_template(tmp_path: Path) -> None:
    model(tmp_path / "plain", template=None)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}')
    sets = [f"model.path={tmp_path / 'plain'}", "data.dataset=jsonl", f"data.path={tmp_path / 'rows.jsonl'}"]
    more = ["environment.reward=exact_match", "data.system_prompt=Hi", "data.heldout_fraction=0", "eval.prompts=0"]
    result = CliRunner().invoke(app, ["data", "show", *sets, *more, f"run.dir={tmp_path}"])
    assert result.exit_code == 1
    assert "the model's tokenizer has no chat template" in result.output


def test_a_tiny_model_keeps_its_weights_when_its_prompts_are_shown_with_other_lengths(tmp_path: Path) -> None:
    path = [f"model.path={tmp_path / 'tiny'}", "environment.options.size=50", "model.tiny.layers=1"]
    ensure_description(load_config([QUICKSTART], path))
    (tmp_path / "tiny" / "model.safetensors").write_bytes(b"weights")
    before = {file.name: file.read_bytes() for file in (tmp_path / "tiny").iterdir()}
    shown = CliRunner().invoke(app, ["data", "show", "-c", str(QUICKSTART), *path, "model.max_length=20", "-n", "1"])
    assert shown.exit_code == 0, shown.output
    assert {file.name: file.read_bytes() for file in (tmp_path / "tiny").iterdir()} == before


@pytest.mark.parametrize("more", [[], ["--heldout"], ["--row", "2"]], ids=["training", "heldout", "row"])
def test_the_prompts_of_a_tiny_chat_model_that_is_not_built_are_shown_with_their_answers(
    more: list[str], tmp_path: Path
) -> None:
    recipe = QUICKSTART.with_name("tiny_chat.yaml")
    sets = [f"model.path={tmp_path / 'tiny'}", "model.tiny={chat: true}", f"run.dir={tmp_path / 'runs'}"]
    shown = CliRunner().invoke(app, ["data", "show", "-c", str(recipe), *sets, *more])
    assert shown.exit_code == 0, shown.output
    assert "[<|im_end|>]" in shown.output.partition("sampled, trained:")[2].splitlines()[0]
    assert not (tmp_path / "tiny").exists()


ROWS = {
    "csv": "question,answer,level\n1+1=,02,3\n2+2=,4,\n1+1=,02,3\n3+3=<eos>,6,1\n,7,1\n" + "9" * 70 + ",1,1\n",
    "jsonl": "\n".join(
        [
            '{"question": "1+1=", "answer": "02", "level": "3"}',
            '{"question": "2+2=", "answer": 4, "level": null}',
            '{"question": "1+1=", "answer": "02", "level": "3"}',
            '{"question": "3+3=<eos>", "answer": "6", "level": "1"}',
            '{"question": null, "answer": "7", "level": "1"}',
            json.dumps({"question": "9" * 70, "answer": "1", "level": "1"}),
        ]
    ),
    "json": json.dumps(
        [
            {"question": "1+1=", "answer": "02", "level": "3"},
            {"question": "2+2=", "answer": "4", "level": None},
            {"question": "1+1=", "answer": "02", "level": "3"},
            {"question": "3+3=<eos>", "answer": "6", "level": "1"},
            {"question": None, "answer": "7", "level": "1"},
            {"question": "9" * 70, "answer": "1", "level": "1"},
        ]
    ),
}


def shown(folder: Path, kind: str, *options: str) -> str:
    path = folder.parent / f"rows.{kind}"
    path.write_text(ROWS[kind])
    sets = [
        f"model.path={folder}",
        f"data.dataset={'jsonl' if kind == 'jsonl' else 'hf'}",
        f"data.path={path}",
        "data.columns={prompt: question}",
        "data.on_bad_row=skip",
        "data.heldout_fraction=0",
        "eval.prompts=0",
        "environment.reward=exact_match",
        f"run.dir={folder.parent}",
    ]
    result = CliRunner().invoke(app, ["data", "show", *options, *sets])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("kind", ROWS)
def test_rows_that_are_left_out_are_counted_by_reason_with_the_first_of_each(folder: Path, kind: str) -> None:
    output = shown(folder, kind)
    assert "3 prompts for training, 0 held out" in output
    assert "data: 3 rows left out" in output
    assert "  1 duplicate: its prompt, answer and metadata are those of an earlier row (first: row 3)" in output
    assert "  1 missing_key: the row has no prompt" in output
    assert "(first: row 5)" in output
    assert "  1 prompt_length: its prompt has no token or too many (first: row 6)" in output
    assert "note: its own text contains '<eos>', which the model reads as a control token" in output


@pytest.mark.parametrize("kind", ROWS)
def test_a_row_is_shown_as_in_the_file_with_its_tokens_and_what_the_reward_gets(folder: Path, kind: str) -> None:
    output = shown(folder, kind, "--row", "1")
    assert f"rows.{kind}" in output
    assert "row 1, as it was read:\n  question: '1+1=' (text)\n  answer: '02' (text)\n  level: '3' (text)\n" in output
    assert "data, row 1: used for training" in output
    tokenizer = load_tokenizer(str(folder))
    ids = encode_prompt(tokenizer, "1+1=")
    listed = [line.split()[0] for line in output.partition("(id, token):\n")[2].splitlines()[: len(ids)]]
    assert listed == [str(each) for each in ids]
    assert f"{tokenizer.eos_token_id:>7}  [<eos>]" in output
    wanted = (
        "  the reward gets:\n    question: '1+1=' (text)\n    answer: '02' (text)\n    metadata.level: '3' (text)\n"
    )
    assert wanted in output
    given = "integer" if kind == "jsonl" else "text"
    assert f"answer: {4 if kind == 'jsonl' else repr('4')} ({given})" in shown(folder, kind, "--row", "2")
    assert "    metadata.level: None (null)" in shown(folder, kind, "--row", "2")


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (3, "left out, duplicate: it is equal to row 1"),
        (5, "left out, missing_key: it has the key 'question', but its value is null"),
        (6, "left out, prompt_length: it has 78 tokens, but must have 1 to 48"),
    ],
)
@pytest.mark.parametrize("kind", ROWS)
def test_a_row_that_is_left_out_is_shown_with_the_reason(folder: Path, kind: str, row: int, why: str) -> None:
    output = shown(folder, kind, "--row", str(row))
    assert why in output
    assert "the reward gets" not in output


def test_a_row_that_does_not_exist_and_prompts_that_a_run_would_refuse_are_named(folder: Path, tmp_path: Path) -> None:
    shown(folder, "csv")
    sets = [f"model.path={folder}", "data.dataset=hf", f"data.path={tmp_path / 'rows.csv'}", f"run.dir={tmp_path}"]
    more = ["data.columns={prompt: question}", "environment.reward=exact_match", "eval.prompts=0"]
    result = CliRunner().invoke(app, ["data", "show", "--row", "99", *sets, *more])
    assert result.exit_code == 2
    assert re.search(r"--row 99: .*rows\.csv .*has \d+ rows", " ".join(result.output.split()))
    refused = CliRunner().invoke(app, ["data", "show", "--row", "5", *sets, *more])
    assert refused.exit_code == 1
    assert "question: None (null)" in refused.output, "a row that is refused can be looked at"
    assert "row 5" in refused.output
