"""A configuration is found by its path or as a recipe by name, and finds its data and modules from any folder."""

import importlib
from pathlib import Path

import pytest

from asyncrl import recipes
from asyncrl.cli.preflight import user_modules
from asyncrl.common.roles import Role
from asyncrl.config.import_path import resolve
from asyncrl.config.load import dump_config, load_config
from asyncrl.config.parts import all_configs
from asyncrl.config.recipes import description, files_beside, recipe_file, recipe_names
from asyncrl.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes an empty folder the working directory, and returns it."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def refused(*layers: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(layers)
    return str(caught.value)


def test_the_names_are_the_files_of_the_repository() -> None:
    assert sorted(recipe_names()) == sorted(
        str(file.relative_to(CONFIGS).with_suffix("")) for file in CONFIGS.rglob("*.yaml")
    )


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_is_loaded_by_its_name_in_any_folder_with_its_data_and_its_modules(name: str) -> None:
    config = load_config([name])
    assert config.run.name == load_config([CONFIGS / f"{name}.yaml"]).run.name
    for part in all_configs(config).values():
        named = part.data.path
        beside = named is not None and (CONFIGS / named.name).is_file()
        assert not beside or (named.is_absolute() and named.is_file())
        assert part.data.dataset != "jsonl" or beside
    for key, path in user_modules(config, tuple(Role)).items():
        assert callable(resolve(path, key=key))


def test_a_module_of_a_recipe_is_the_one_in_its_folder_and_found_again_by_the_saved_configuration(
    elsewhere: Path,
) -> None:
    config = load_config(["own_task"])
    assert (config.environment.reward, config.data.dataset) == (
        "asyncrl.recipes.own_task:reward",
        "asyncrl.recipes.own_task:questions",
    )
    assert Path(importlib.import_module("asyncrl.recipes.own_task").__file__ or "").parent == recipes.RECIPES
    (elsewhere / "config.yaml").write_text(dump_config(config))
    assert load_config([elsewhere / "config.yaml"]) == config


def test_a_module_below_a_folder_of_recipes_has_the_path_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipes, "RECIPES", tmp_path)
    (tmp_path / "games").mkdir()
    (tmp_path / "games" / "mine.yaml").write_text("environment: {tools: ['dice:roll', 'other:roll']}\n")
    (tmp_path / "games" / "dice.py").touch()
    assert load_config(["mine"]).environment.tools == ["asyncrl.recipes.games.dice:roll", "other:roll"]


def test_a_recipe_by_its_path_names_modules_that_the_user_puts_on_the_search_path() -> None:
    assert load_config([CONFIGS / "own_task.yaml"]).environment.reward == "own_task:reward"


def test_the_last_part_of_a_name_is_enough_if_it_is_the_only_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert recipe_file("calculator") == recipe_file("agents/calculator") == recipes.RECIPES / "agents/calculator.yaml"
    monkeypatch.setattr(recipes, "RECIPES", tmp_path)
    for name in ("a/both", "b/both", "b/top", "top"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").touch()
    assert recipe_file("both") is None
    assert recipe_file("top") == tmp_path / "top.yaml"


def test_an_existing_file_has_precedence_over_a_recipe_but_a_folder_has_not(elsewhere: Path) -> None:
    (elsewhere / "quickstart").write_text("run: {name: mine}\n")
    (elsewhere / "ppo").mkdir()
    assert load_config(["quickstart"]).run.name == "mine"
    assert load_config(["ppo"]).run.name == "ppo"


def test_a_name_that_is_neither_file_nor_recipe_is_answered_with_a_similar_recipe(elsewhere: Path) -> None:
    assert refused("quickstrt") == (
        "quickstrt: there is no such file, and there is no recipe 'quickstrt'; `asyncrl recipes` lists all; did you "
        "mean 'quickstart'?"
    )
    assert refused("calculater").endswith("did you mean 'calculator'?")
    (elsewhere / "folder").mkdir()
    assert refused("folder") == "folder: is a directory; name a file with -c"


def test_a_missing_file_with_the_name_of_a_recipe_is_answered_with_the_recipe() -> None:
    missing = "no such file; name an existing file with -c"
    assert refused("configs/ppo.yaml") == f"configs/ppo.yaml: {missing}; `-c ppo` is the recipe of this name"
    assert refused("mine.yaml") == f"mine.yaml: {missing}"


def test_a_recipe_without_its_option_is_answered_with_the_option() -> None:
    with pytest.raises(ConfigError, match=r"'quickstart' is the name of a recipe, .* did you mean `-c quickstart`"):
        load_config([], ["quickstart"])


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """Returns a configuration in a folder of its own, with all datasets in one file beside it."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "a.jsonl").touch()
    file = folder / "mine.yaml"
    of_part = "{name: one, data: {dataset: jsonl, path: a.jsonl}}"
    file.write_text(
        f"data: {{dataset: jsonl, path: a.jsonl, mixture: [{of_part}]}}\n"
        "eval: {sets: {hard: {data: {dataset: jsonl, path: a.jsonl}}}}\n"
    )
    return file


def paths(*layers: object, overrides: tuple[str, ...] = ()) -> list[Path | None]:
    config = load_config(layers, overrides)  # type: ignore[arg-type]
    return [config.data.path, config.data.mixture[0].data.path, config.eval.sets["hard"].data.path]  # type: ignore[union-attr]


def test_each_path_of_data_is_found_beside_the_file_that_sets_it(mine: Path) -> None:
    assert paths(mine) == [mine.parent / "a.jsonl"] * 3


def test_a_path_from_the_working_directory_has_precedence(mine: Path, elsewhere: Path) -> None:
    (elsewhere / "a.jsonl").touch()
    assert paths(mine) == [Path("a.jsonl")] * 3


def test_a_path_that_is_nowhere_and_a_path_that_another_layer_sets_stay_as_they_are(mine: Path) -> None:
    assert paths(mine, overrides=("data.path=a.jsonl",))[0] == Path("a.jsonl")
    assert paths(mine, {"data.path": "a.jsonl"})[0] == Path("a.jsonl")
    (mine.parent / "a.jsonl").unlink()
    assert paths(mine) == [Path("a.jsonl")] * 3


@pytest.mark.parametrize("text", [
    "data: 3", "data: {path: 3}", "data: {mixture: 3}", "data: {mixture: [3]}", "data: {mixture: [{data: 3}]}",
    "eval: 3", "eval: {sets: 3}", "eval: {sets: {a: 3}}", "eval: {sets: {a: {data: 3}}}",
])  # fmt: skip
def test_other_values_in_the_place_of_datasets_are_left_to_the_validation(text: str, elsewhere: Path) -> None:
    (elsewhere / "wrong.yaml").write_text(f"{text}\n")
    assert "(in wrong.yaml): must be " in refused("wrong.yaml")


def test_a_description_is_the_first_sentence_over_its_lines(tmp_path: Path) -> None:
    recipe = tmp_path / "a.yaml"
    recipe.write_text("# Qwen2.5 0.5B learns\n# two tasks. More.\n#\n#   asyncrl up\nrun: {} # no. not this\n")
    assert description(recipe) == "Qwen2.5 0.5B learns two tasks."
    recipe.write_text("run: {}\n")
    assert description(recipe) == ""


def test_the_files_of_a_recipe_are_those_that_its_text_names(tmp_path: Path) -> None:
    for name in ("a.csv", "b.csv", "my-a.csv", "c.py", "d.yaml"):
        (tmp_path / name).touch()
    recipe = tmp_path / "r.yaml"
    recipe.write_text("# the functions are in c.py; see d.yaml, b.csvs, elsewhere/b.csv\ndata: {path: a.csv}\n")
    assert [file.name for file in files_beside(recipe)] == ["a.csv", "c.py"]
