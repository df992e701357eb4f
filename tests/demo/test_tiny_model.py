import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from asyncrl.config.load import load_config
from asyncrl.config.schema import Config, TinyModelSection
from asyncrl.data.prompts import Task
from asyncrl.demo.directory import TINY_RECIPE
from asyncrl.demo.tiny_model import (
    CHARACTERS,
    build_tokenizer,
    ensure_description,
    ensure_model,
    greedy_accuracy,
)
from asyncrl.errors import DatasetError

pytestmark = pytest.mark.slow

TASKS = [Task(question=word, prompt=f"{word}>", answer=word[::-1]) for word in ("abc", "ab", "cab", "abba", "c")]
TOKENIZER = build_tokenizer(max_length=16)


def silent(line: str) -> None:
    pass


def small(**changes: Any) -> TinyModelSection:
    return TinyModelSection(**{"hidden_size": 32, "layers": 1, "heads": 1, "warmup_steps": 3} | changes)


def build(path: Path, section: TinyModelSection, *, tasks: list[Task] = TASKS) -> Path:
    ensure_model(config(path, section), tasks=(tasks, ()), report=silent)
    return path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has nearly learned its five tasks."""
    section = small(warmup_steps=150, warmup_batch_size=16, warmup_learning_rate=1e-2, warmup_accuracy=0.6)
    return build(tmp_path_factory.mktemp("models") / "learned", section)


@given(text=st.text(alphabet=CHARACTERS, max_size=40))
def test_every_character_is_one_token_and_decoding_gives_the_text_back(text: str) -> None:
    tokens = TOKENIZER.encode(text)
    assert len(tokens) == len(text)
    assert TOKENIZER.decode(tokens) == text
    assert TOKENIZER.decode([*tokens, TOKENIZER.eos_token_id], skip_special_tokens=True) == text


def test_a_character_without_a_token_raises_instead_of_vanishing() -> None:
    with pytest.raises(Exception, match="UNK"):
        TOKENIZER.encode("é")


def test_the_directory_is_an_ordinary_hugging_face_model(built: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(built)
    assert tokenizer.encode("a b>\n") == TOKENIZER.encode("a b>\n")
    assert tokenizer.decode(tokenizer.encode("a  b ,c 's")) == "a  b ,c 's"
    assert (tokenizer.pad_token, tokenizer.eos_token, tokenizer.bos_token) == ("<pad>", "<eos>", None)
    assert tokenizer.chat_template is None
    model = AutoModelForCausalLM.from_pretrained(built)
    assert model.dtype == torch.float32
    assert model.config.model_type == "qwen3"
    assert model.config.tie_word_embeddings
    assert model.config.head_dim >= 32
    generation = GenerationConfig.from_pretrained(built)
    assert (generation.eos_token_id, generation.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert (model.config.eos_token_id, model.config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert list(built.glob("*.safetensors"))
    assert not [file for file in built.parent.iterdir() if file != built]


def test_default_recipe_is_below_two_million_parameters(tmp_path: Path) -> None:
    lines: list[str] = []
    section = TinyModelSection(warmup_steps=0)
    ensure_model(config(tmp_path / "m", section), tasks=(TASKS, ()), report=lines.append)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert model.num_parameters() < 2_000_000
    assert f"{model.num_parameters() / 1e6:.2f}M parameters" in lines[0]


def test_greedy_accuracy_is_what_greedy_generation_gives(built: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(built)
    right = 0
    tasks = [*TASKS, Task(question="x", prompt="zz>", answer="a"), Task(question="y", prompt="abc>", answer="cb")]
    for task in tasks:
        prompt = torch.tensor([TOKENIZER.encode(task.prompt)])
        completion = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=8)
        tokens = completion[0, prompt.shape[1] :].tolist()
        right += tokens[: len(task.answer) + 1] == [*TOKENIZER.encode(task.answer), TOKENIZER.eos_token_id]
    assert 0 < right < len(tasks)
    assert greedy_accuracy(model, TOKENIZER, tasks=tasks) == right / len(tasks)


def test_equal_recipes_give_equal_weights_and_another_seed_gives_others(tmp_path: Path) -> None:
    torch.manual_seed(1)
    first = (build(tmp_path / "a", small()) / "model.safetensors").read_bytes()
    torch.manual_seed(2)
    assert (build(tmp_path / "b", small()) / "model.safetensors").read_bytes() == first
    assert (build(tmp_path / "c", small(seed=1)) / "model.safetensors").read_bytes() != first


def test_building_leaves_the_processs_random_numbers_and_threads_alone(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build(tmp_path / "m", small())
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads


def test_warm_up_ends_at_its_accuracy_and_says_so(tmp_path: Path) -> None:
    lines: list[str] = []
    section = small(warmup_steps=400, warmup_batch_size=16, warmup_learning_rate=1e-2, warmup_accuracy=0.5)
    ensure_model(config(tmp_path / "m", section), tasks=(TASKS, TASKS), report=lines.append)
    steps = [int(line.split("step ")[1].split(",")[0]) for line in lines if "step" in line]
    assert steps[-1] < 400
    assert any("held-out accuracy" in line for line in lines)


def test_a_share_of_the_examples_is_shown_the_wrong_way_and_the_model_imitates_the_larger_part(
    tmp_path: Path,
) -> None:
    tasks = [Task(question=word, prompt=f"{word}>", answer=word[::-1]) for word in ("abc", "ab", "cab", "bca", "ca")]
    settings = {"warmup_steps": 120, "warmup_batch_size": 16, "warmup_learning_rate": 1e-2, "warmup_accuracy": 0.99}
    path = build(tmp_path / "m", small(**settings, warmup_wrong_fraction=0.9), tasks=tasks)
    model = AutoModelForCausalLM.from_pretrained(path)
    forward = [Task(question=task.question, prompt=task.prompt, answer=task.question) for task in tasks]
    assert greedy_accuracy(model, TOKENIZER, tasks=forward) > greedy_accuracy(model, TOKENIZER, tasks=tasks)


def test_without_warm_up_steps_no_tasks_are_needed_and_with_them_they_are(tmp_path: Path) -> None:
    build(tmp_path / "m", small(warmup_steps=0), tasks=[])
    with pytest.raises(DatasetError, match="training tasks"):
        build(tmp_path / "n", small(), tasks=[])


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Task(question="q", prompt="naïve>", answer="x"), "characters.*ï"),
        (Task(question="q", prompt="a" * 10, answer="b" * 6), r"17 tokens.*model\.max_length = 16"),
    ],
)
@pytest.mark.fault("F24")
def test_a_task_that_the_model_cannot_hold_is_refused_and_nothing_is_left(
    tmp_path: Path, task: Task, message: str
) -> None:
    with pytest.raises(DatasetError, match=message):
        build(tmp_path / "m", small(), tasks=[*TASKS, task])
    assert not list(tmp_path.iterdir())


def test_a_build_that_fails_in_the_middle_leaves_the_old_model_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build(tmp_path / "m", small())
    before = (path / "model.safetensors").read_bytes()

    def full_disk(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", full_disk)
    with pytest.raises(OSError, match="No space"):
        build(path, small(seed=1))
    assert (path / "model.safetensors").read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def tasks_for_config() -> list[Task]:
    return TASKS


def config(path: Path, section: TinyModelSection | None) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(path), "max_length": 16, "tiny": section and section.model_dump()},
            "data": {"dataset": "test_tiny_model:tasks_for_config", "prompt_template": "{question}>"},
        }
    )


def test_a_missing_model_is_built_once_and_again_when_its_recipe_changes(tmp_path: Path) -> None:
    path = tmp_path / "models" / "tiny"
    lines: list[str] = []
    assert ensure_model(config(path, small()), report=lines.append) == str(path)
    first = (path / "model.safetensors").stat().st_ino
    ensure_model(config(path, small()), report=pytest.fail)
    assert (path / "model.safetensors").stat().st_ino == first
    ensure_model(config(path, small(warmup_steps=4)), report=lines.append)
    assert (path / "model.safetensors").stat().st_ino != first
    assert sum("written to" in line for line in lines) == 2
    anew = [line for line in lines if "the recipe has changed, so the model is built again" in line]
    assert len(anew) == 1, "only for the second build"
    assert list(path.parent.iterdir()) == [path]


def test_the_seed_of_a_run_does_not_change_the_model_although_it_changes_the_environment_s_tasks(
    tmp_path: Path,
) -> None:
    """The seeds of a sweep begin with the same model; with the seed of `model.tiny`, the model is another one."""
    quickstart = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
    given = [f"model.path={tmp_path / 'm'}", "model.tiny.warmup_steps=1", "environment.options.size=20"]
    ensure_model(load_config([quickstart], given), report=silent)
    recipe = (tmp_path / "m" / TINY_RECIPE).read_text()
    ensure_model(load_config([quickstart], [*given, "run.seed=1"]), report=pytest.fail)
    ensure_model(load_config([quickstart], [*given, "run.seed=1", "model.tiny.seed=1"]), report=silent)
    assert (tmp_path / "m" / TINY_RECIPE).read_text() != recipe


def test_config_and_tokenizer_are_there_before_the_weights_and_change_with_the_recipe(tmp_path: Path) -> None:
    path = tmp_path / "models" / "tiny"
    assert ensure_description(config(path, small())) == str(path)
    assert AutoTokenizer.from_pretrained(path).encode("ab") == TOKENIZER.encode("ab")
    described = {file.name: file.read_bytes() for file in path.iterdir() if file.name != TINY_RECIPE}
    ensure_model(config(path, small()), report=silent)
    complete = {file.name: file.read_bytes() for file in path.iterdir() if file.name != TINY_RECIPE}
    assert complete.pop("model.safetensors")
    assert complete == described, "an engine that began before the model was built fits the next run"
    weights = path / "model.safetensors"
    whole = weights.stat().st_ino
    ensure_description(config(path, small()))
    assert weights.stat().st_ino == whole, "with an equal description, nothing is changed, and the weights stay"
    ensure_description(config(path, small(hidden_size=64)))
    assert AutoConfig.from_pretrained(path).hidden_size == 64
    assert not weights.exists(), "weights of another shape are removed"
    assert list(path.parent.iterdir()) == [path]
    lines: list[str] = []
    ensure_model(config(path, small(hidden_size=64)), report=lines.append)
    assert "the recipe has changed, so the model is built again" in lines[0], "also if the description was there first"


def test_a_description_never_touches_a_model_of_another_make(tmp_path: Path) -> None:
    (tmp_path / "theirs.txt").write_text("mine")
    assert ensure_description(config(tmp_path, small())) == str(tmp_path)
    assert ensure_description(config(Path("some/model"), None)) == "some/model"
    assert [file.name for file in tmp_path.iterdir()] == ["theirs.txt"]


@pytest.mark.parametrize("recipe", ["", "null", "[]"])
def test_an_unreadable_recipe_is_built_anew(tmp_path: Path, recipe: str) -> None:
    path = build(tmp_path / "m", small())
    (path / TINY_RECIPE).write_text(recipe)
    ensure_model(config(path, small()), report=silent)
    assert json.loads((path / TINY_RECIPE).read_text())["fingerprint"]


def test_a_directory_of_another_make_is_used_as_it_is_and_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "theirs.txt").write_text("mine")
    assert ensure_model(config(tmp_path, small()), report=pytest.fail) == str(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["theirs.txt"]


def test_without_a_tiny_section_the_path_may_be_a_hub_id() -> None:
    assert ensure_model(config(Path("some/model"), None), report=pytest.fail) == "some/model"


def test_of_two_builders_the_later_finds_the_earliers_equal_model_and_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m"
    save = AutoModelForCausalLM.from_pretrained(build(tmp_path / "other", small())).__class__.save_pretrained

    def save_and_be_overtaken(model: Any, folder: Path) -> None:
        save(model, folder)
        if not path.exists():
            monkeypatch.undo()
            build(path, small())
            monkeypatch.setattr("os.rename", refuse_once(path))

    def refuse_once(target: Path) -> Any:
        import os

        rename = os.rename

        def renamed(source: Path, destination: Path) -> None:
            if source == target:
                raise FileNotFoundError  # a builder sees this if it looked before the other builder had finished
            rename(source, destination)

        return renamed

    monkeypatch.setattr("transformers.Qwen3ForCausalLM.save_pretrained", save_and_be_overtaken)
    build(path, small())
    assert (path / "model.safetensors").exists()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m", "other"]


@pytest.mark.integration
def test_the_quickstarts_recipe_leaves_reinforcement_learning_more_than_half_to_do(tmp_path: Path) -> None:
    lines: list[str] = []
    quickstart = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
    ensure_model(load_config([quickstart], [f"model.path={tmp_path / 'm'}"]), report=lines.append)
    [accuracy] = [float(line.split("accuracy ")[1].split()[0]) for line in lines if "held-out" in line]
    assert accuracy <= 0.45
