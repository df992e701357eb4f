"""Finds configuration files: by path, or by the name of a recipe such as `quickstart`.

A file may name other files. A relative `data.path` is a path from the working directory, as everywhere; if nothing has
this path, it is a path from the folder of the file. So a configuration and its data can be used from any folder. For a
recipe that is given by its name, the folder of the recipe is tried first.

A recipe that is given by its name may also name a module beside it, such as `own_task:reward`. Python then imports it
as a module of the package `asyncrl.recipes`, which every process finds, also one that resumes the run later.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncrl import recipes
from asyncrl.config.import_path import malformed, suggest
from asyncrl.errors import ConfigError

_SENTENCE = re.compile(r"(.+?\.)(?:\s|$)")


def recipe_names() -> list[str]:
    """Returns the names of all recipes: the paths of their files without `.yaml`, such as `agents/calculator`."""
    files = [*sorted(recipes.RECIPES.glob("*.yaml")), *sorted(recipes.RECIPES.glob("*/*.yaml"))]
    return [file.relative_to(recipes.RECIPES).with_suffix("").as_posix() for file in files]


def recipe_file(name: str) -> Path | None:
    """Returns the file of the recipe `name`; None if there is none. For a recipe in a folder, such as
    `agents/calculator`, the last part `calculator` is enough if no other recipe ends with it."""
    names = recipe_names()
    found = [each for each in names if each == name] or [each for each in names if each.rpartition("/")[2] == name]
    return recipes.RECIPES / f"{found[0]}.yaml" if len(found) == 1 else None


def known_recipe(name: str) -> Path:
    """Returns the file of the recipe `name`. Raises ConfigError if there is none, with a similar name, or if several
    recipes have this last part."""
    if (file := recipe_file(name)) is not None:
        return file
    names = recipe_names()
    if several := [each for each in names if each.rpartition("/")[2] == name]:
        raise ConfigError(f"several recipes are named {name}: {', '.join(several)}; write one of these names")
    hint = suggest(name, [*names, *(each.rpartition("/")[2] for each in names)])
    raise ConfigError(f"there is no recipe {name!r}; `asyncrl recipes` lists all{hint}")


def config_file(given: Path) -> tuple[Path, bool]:
    """Returns the file that `given` names, and whether `given` is the name of a recipe. An existing file has
    precedence.

    Raises ConfigError if `given` is a relative path without a suffix, and neither exists nor is a recipe. Other files
    may be missing.
    """
    if given.suffix or given.is_file() or given.is_absolute():
        return given, False
    if (file := recipe_file(given.as_posix())) is not None:
        return file, True
    if given.exists():
        return given, False
    try:
        return known_recipe(given.as_posix()), True
    except ConfigError as error:
        raise ConfigError(f"{given}: there is no such file, and {error}") from None


def unread_copies(given: Iterable[object]) -> list[str]:
    """Returns a note for each recipe that is given by its name although the working directory has a file of this name,
    which may be a copy that the user has changed."""
    return [
        f"-c {name} is the recipe that comes with asyncrl; -c {name}.yaml is the file in this folder"
        for name in given
        if isinstance(name, str | Path) and Path(f"{name}.yaml").is_file() and config_file(Path(name))[1]
    ]


def description(recipe: Path) -> str:
    """Returns the first sentence of a recipe, which is in the comment at its top."""
    lines = recipe.read_text(encoding="utf-8").splitlines()
    head = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    text = " ".join(line.lstrip("# ") for line in lines[:head])
    found = _SENTENCE.match(text)
    return found[1] if found is not None else text


def files_beside(recipe: Path) -> list[Path]:
    """Returns the modules and the data of a recipe: the files of its folder whose names are in its text or comments."""
    text = recipe.read_text(encoding="utf-8")
    others = (file for file in sorted(recipe.parent.iterdir()) if file.is_file() and file.suffix != ".yaml")
    return [file for file in others if re.search(rf"(?<![\w/.-]){re.escape(file.name)}(?!\w)", text)]


def find_data(tree: Mapping[str, Any], *, folder: Path, folder_first: bool) -> None:
    """Replaces each relative `data.path` by its path in `folder`, in place, if it exists there. If it exists in the
    working directory too, it is replaced only with `folder_first`."""
    for section in _datasets(tree):
        path = section.get("path")
        if isinstance(path, str) and (folder / path).exists() and (folder_first or not Path(path).exists()):
            section["path"] = str(folder / path)


def with_modules(tree: Any, *, folder: Path) -> Any:
    """Returns the tree of a recipe in `folder` in which an import path to a module of this folder leads into the
    package `asyncrl.recipes`."""
    if isinstance(tree, Mapping):
        return {key: with_modules(value, folder=folder) for key, value in tree.items()}
    if isinstance(tree, list):
        return [with_modules(value, folder=folder) for value in tree]
    if not isinstance(tree, str) or malformed(tree, key="") or not (folder / f"{tree.partition(':')[0]}.py").is_file():
        return tree
    return ".".join([recipes.__name__, *folder.relative_to(recipes.RECIPES).parts, tree])


def _datasets(tree: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the sections `data` of the run, of the parts of its mixture, and of its held-out sets. The tree is not
    validated yet, so values that are not mappings are left out."""
    data, evals = tree.get("data"), tree.get("eval")
    parts = data.get("mixture") if isinstance(data, dict) else None
    sets = evals.get("sets") if isinstance(evals, dict) else None
    of_parts = parts if isinstance(parts, list) else []
    of_sets = list(sets.values()) if isinstance(sets, dict) else []
    below = [each.get("data") for each in [*of_parts, *of_sets] if isinstance(each, dict)]
    yield from (section for section in [data, *below] if isinstance(section, dict))
