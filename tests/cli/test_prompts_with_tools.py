"""The prompts of runs with tools are checked, measured and shown with the descriptions of the tools."""

import json
import re
import sys
from pathlib import Path

import pytest
from transformers import Qwen3Config
from typer.testing import CliRunner

from asyncrl.cli.main import app
from asyncrl.cli.preflight import look, prepare
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.data.tokenizer import load_tokenizer, shown_prompt
from asyncrl.demo.chat_tokenizer import build_chat_tokenizer
from asyncrl.deployment.inputs import fitting_prompts, read_prompts
from asyncrl.errors import ConfigError, DatasetError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
TOOLS = '''
def lookup(word: str) -> str:
    """Looks up a word."""
    return word


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def long(text: str) -> str:
    """Reads a text, {words}."""
    return text


def reward(task, completion):
    return 1.0
'''.replace("{words}", "and then another one, " * 10)
IGNORES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
SETS = {"one tool": ["lookup"], "two tools": ["lookup", "add"], "a long description": ["long"]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes the description of a chat model, a module of tools, and a dataset."""
    tokenizer = build_chat_tokenizer(max_length=2048)
    tokenizer.save_pretrained(tmp_path / "model")
    Qwen3Config(vocab_size=len(tokenizer), max_position_embeddings=2048).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").touch()
    (tmp_path / "own_tools.py").write_text(TOOLS)
    rows = [json.dumps({"prompt": f"What is {n} + 1?", "answer": str(n + 1)}) for n in range(80)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    monkeypatch.delitem(sys.modules, "own_tools", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def overrides(*names: str) -> list[str]:
    sets = ["model.tiny=null", "model.path=model", "model.max_length=1024", "data.max_prompt_tokens=600"]
    sets += ["data.dataset=jsonl", "data.path=rows.jsonl", "data.prompt_template='{question}'", "data.chat=auto"]
    sets += ["environment.reward=own_tools:reward", "generator.tool_parser=hermes", "environment.max_branches=1"]
    return [*sets, f"environment.tools=[{','.join(f'own_tools:{name}' for name in names)}]"]


def settings(names: list[str], *more: str) -> Config:
    return load_config([QUICKSTART], [*overrides(*names), *more])


def measured(config: Config) -> int:
    prompts = read_prompts(config)
    tokenizer = load_tokenizer("model")
    found = re.search(r", (\d+) tokens", shown_prompt(tokenizer, prompts.train[0].input, tools=prompts.tools[""]))
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize("names", SETS.values(), ids=SETS)
def test_a_prompt_is_measured_with_its_tools_before_the_start(names: list[str], folder: Path) -> None:
    tokens = measured(settings(names))
    assert tokens > 80
    config = settings(names, f"data.max_prompt_tokens={tokens - 10}")
    words = (
        rf"has \d+ tokens \(\d+ of them describe the tools of environment.tools, .*max_prompt_tokens = {tokens - 10}"
    )
    for refusal in (look, prepare):
        with pytest.raises((ConfigError, DatasetError), match=words):
            refusal(config)
    with pytest.raises(DatasetError, match=words):
        fitting_prompts(read_prompts(config), config=config, model="model")
    look(settings(names, f"data.max_prompt_tokens={tokens + 10}"))


@pytest.mark.parametrize("names", SETS.values(), ids=SETS)
def test_a_max_length_that_leaves_no_room_after_the_tools_is_refused(names: list[str], folder: Path) -> None:
    length = measured(settings(names)) - 5
    config = settings(
        names,
        f"model.max_length={length}",
        f"data.max_prompt_tokens={length - 1}",
        "generator.max_completion_tokens=4",
    )
    with pytest.raises(ConfigError, match=rf"describe the tools .*model.max_length = {length}"):
        look(config)


@pytest.mark.parametrize(
    "setting",
    [[], ["environment.tools=[]", "environment.mcp_servers=[{command: [none]}]"], ["data.control_tokens=refuse"]],
    ids=["tools", "servers", "tools with control tokens refused"],
)
def test_a_template_that_ignores_tools_is_refused_by_check_and_before_the_start(
    setting: list[str], folder: Path
) -> None:
    (folder / "model" / "chat_template.jinja").write_text(IGNORES)
    config = settings(["lookup"], *setting)
    words = r"environment\.\w+: the chat template of model.path = model does not write the tools into the prompt"
    for refusal in (look, prepare):
        with pytest.raises(ConfigError, match=words):
            refusal(config)
    with pytest.raises(ConfigError, match=words):  # the model of a Hub may be loaded only now
        fitting_prompts(read_prompts(config), config=config, model="model")


@pytest.mark.parametrize("names", SETS.values(), ids=SETS)
@pytest.mark.parametrize("more", [[], ["--row", "3"]], ids=["prompts", "a row"])
def test_the_command_shows_the_tools_and_no_sampled_answer(names: list[str], more: list[str], folder: Path) -> None:
    result = CliRunner().invoke(app, ["data", "show", "-c", str(QUICKSTART), *more, *overrides(*names)])
    assert result.exit_code == 0, result.output
    shown = re.sub(r"\n +\d+  |\|", "", result.output)
    assert all(f'"name": "{name}"' in shown for name in names)
    assert "sampled, trained" not in result.output
    assert "answer: '" in result.output


def test_tools_of_servers_are_named_as_an_addition(folder: Path) -> None:
    servers = ["environment.tools=[]", "environment.mcp_servers=[{command: [none]}]"]
    result = CliRunner().invoke(app, ["data", "show", "-c", str(QUICKSTART), *overrides(), *servers])
    assert "the prompts below lack the descriptions of their tools" in " ".join(result.output.split())
    assert "sampled, trained" not in result.output
