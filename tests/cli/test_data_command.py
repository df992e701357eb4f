"""`asyncrl data show` prints prompts token by token, and tells the tokens that are trained from the others."""

import json
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
