"""Import paths: `package.module:callable`, with which the config names code of the user, such as a reward or a loss.

A module is imported only when its path is resolved. If this fails, a ConfigError names the key and the value.
Callables of Python's standard library are refused, under any name: with the options or the arguments that a config or a
model gives them, many of them run commands or remove files.
"""

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from asyncrl.errors import ConfigError, Terminated
from asyncrl.user_code import USER_FOLDERS, describe_error

OF_SEVERAL_TURNS = ("guess_the_number", "calculator", "key_value_store", "verifiers", "openenv")
"""Built-in environments of several turns."""
ADAMW = "adamw"
"""The built-in optimizer."""
BUILT_IN_NAMES: Mapping[str, Sequence[str]] = {
    "data.dataset": ("environment", "jsonl", "hf"),
    "environment.name": ("reasoning_gym", "math", *OF_SEVERAL_TURNS),
    "environment.reward": ("exact_match", "math_verify"),
    "environment.rewards": ("exact_match", "math_verify", "regex", "length", "judge"),
    "learner.optimizer.name": (ADAMW,),
    "critic.optimizer.name": (ADAMW,),
}
"""Built-in names that a key accepts instead of an import path."""

REWARDS_WITH_OPTIONS: Mapping[str, str] = {
    "regex": '{pattern: "[0-9]+", whole: true}',
    "length": "{free_chars: 1500, buffer_chars: 1000}",
    "judge": '{url: "http://HOST:8000/v1", model: NAME}',
}
"""Built-in rewards that cannot be called without options, with examples of these."""

IMPORT_PATH = re.compile(r"[^\W\d][\w-]*(\.[^\W\d][\w-]*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
"""The form of an import path. Names of modules may have hyphens, because importlib finds files with such names."""


def is_import_path(value: str) -> bool:
    """Returns whether `value` is an import path; otherwise it is a built-in name."""
    return ":" in value


def malformed(value: str, *, key: str) -> str | None:
    """Returns an error if `value` is neither a built-in name of `key` nor written like an import path, or if its module
    is of the standard library; else None. Imports nothing."""
    names = BUILT_IN_NAMES.get(key, ())
    if value in names:
        return None
    if IMPORT_PATH.fullmatch(value):
        module = value.partition(":")[0]
        return _of_python(value, key=key, module=module) if _is_standard(module) else None
    if key == "environment.reward" and value in REWARDS_WITH_OPTIONS:
        return (
            f"{key} = {value}: needs options, so it is an entry of environment.rewards instead: "
            f"{reward_term(value)} (docs/rewards.md)"
        )
    known = f"one of {', '.join(names)}, or " if names else ""
    return f"{key} = {value}: must be {known}an import path like package.module:callable{suggest(value, names)}"


def reward_term(name: str) -> str:
    """Returns an example of `environment.rewards` with the built-in reward `name`, as YAML."""
    return f"rewards: [{{name: {name}, fn: {name}, options: {REWARDS_WITH_OPTIONS[name]}}}]"


def resolve(value: str, *, key: str) -> Callable[..., Any]:
    """Imports the module and returns the callable of `package.module:callable`.

    The part after the colon may have dots, e.g. `module:Class.method`. `key` is the config key that has the value, for
    errors. Raises ConfigError if there is no such module or attribute, if it is not callable, if it is of the standard
    library, or if the import raises.
    """
    if problem := malformed(value, key=key):
        raise ConfigError(problem)
    module_name, _, attributes = value.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except Terminated:  # raised by SIGTERM, and not by the module
        raise
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            raise ConfigError(_not_found(value, key=key, module=missing)) from error
        raise ConfigError(
            f"{key}: {value!r} cannot be imported, because the module raised {describe_error(error)}; fix the module"
        ) from error
    for name in attributes.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            hint = suggest(name, dir(found))
            raise ConfigError(f"{key}: {value!r} names {name!r}, which {module_name} lacks{hint}") from None
        if isinstance(found, ModuleType) and _is_standard(found.__name__):
            raise ConfigError(_of_python(value, key=key, module=found.__name__))
    if not callable(found):
        raise ConfigError(f"{key}: {value!r} is a {type(found).__name__}, not a callable; name a function or a class")
    if standard := next(filter(_is_standard, _modules_of(found)), None):
        raise ConfigError(_of_python(value, key=key, module=standard))
    return found  # type: ignore[no-any-return]


def _is_standard(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names


def _modules_of(found: Any) -> Iterator[str]:
    """Yields the names of the modules in which a callable is defined, and of those in which the function that it wraps,
    or, for a method written in C, its object or class is defined.

    They may be other modules than the one in the import path: a module also has the names that it imports.
    """
    seen: list[Any] = []
    left = [found]
    while left:
        each = left.pop()
        if any(each is other for other in seen):
            continue
        seen.append(each)
        if isinstance(each, partial):
            left.append(each.func)
        elif isinstance(module := getattr(each, "__module__", None), str):
            yield module
            left += [vars(each)["__wrapped__"]] if "__wrapped__" in getattr(each, "__dict__", {}) else []
        elif owners := [getattr(each, name) for name in ("__self__", "__objclass__") if hasattr(each, name)]:
            left.append(owners[0])
        else:
            yield type(each).__module__


def missing_module(value: str, *, key: str) -> str | None:
    """Returns the error of `resolve` for a module that does not exist. Imports nothing.

    None if the module may exist, or if `value` is not written like an import path (`malformed`).

    None does not prove that the module exists: a package may create modules while it is imported, and this function
    cannot see those.
    """
    parts = value.partition(":")[0].split(".")
    if not IMPORT_PATH.fullmatch(value) or not all(part.isidentifier() for part in parts):
        return None
    name = parts[0]
    try:
        spec = importlib.util.find_spec(name)
        for part in parts[1:]:
            if spec is None or f"{name}.{part}" in sys.modules:
                break
            name = f"{name}.{part}"
            spec = PathFinder.find_spec(name, list(spec.submodule_search_locations or ()))
    # ValueError: a module in sys.modules without a spec. KeyError: a namespace package inside a namespace package.
    except (ValueError, KeyError):
        return None
    return _not_found(value, key=key, module=name) if spec is None else None


def search_folders(folders: Iterable[Path], values: Iterable[str]) -> None:
    """Lets Python find the modules of the import paths `values` in these folders, after all other places, in this
    process and in those that it starts. A process that it starts appends the folders to `sys.path` when it imports
    asyncrl. PYTHONPATH would put them before all other places, and the other files of a folder would hide modules of
    Python or of packages.

    A folder is added only if it has a module that no other place has. Imports nothing.
    """
    for folder in map(Path.resolve, folders):
        missing = {value.partition(":")[0].partition(".")[0] for value in values if missing_module(value, key="")}
        if not any(PathFinder.find_spec(name, [str(folder)]) for name in missing):
            continue
        sys.path.append(str(folder))
        os.environ[USER_FOLDERS] = os.pathsep.join(filter(None, [os.environ.get(USER_FOLDERS), str(folder)]))


def _of_python(value: str, *, key: str, module: str) -> str:
    return (
        f"{key}: {value!r} is of Python's own module {module!r}, whose functions are not called with the values of a "
        "config; write a function of your own that calls it, in a module with another name"
    )


def _not_found(value: str, *, key: str, module: str) -> str:
    return (
        f"{key}: {value!r} cannot be imported, there is no module {module!r}; install it, put it beside the "
        "configuration file of a new run or in the working directory, or put its folder on PYTHONPATH"
    )


class OwnCallable(msgspec.Struct, frozen=True, kw_only=True):
    """A callable of the user: its import path, and the keyword arguments that the configuration gives it."""

    path: str
    options: dict[str, Any] = {}


def call_with_options(function: Callable[..., Any], options: Mapping[str, Any], *, key: str) -> Any:
    """Returns `function(**options)`. Raises ConfigError with `key` if the options do not fit the function's signature.

    Errors that the function raises itself pass through unchanged.
    """
    return function(**fitting_options(function, options, key=key))


def fitting_options(
    function: Callable[..., Any],
    options: Mapping[str, Any],
    *,
    key: str,
    name: str = "the callable",
    values: int = 0,
    given: Collection[str] = (),
) -> dict[str, Any]:
    """Returns the options with their values in the types that the function's parameters are annotated with; a list
    becomes a tuple, for example. A value without an annotation, or with one that Pydantic does not know, stays as it
    is.

    The caller itself passes the first `values` positional arguments and the arguments named in `given`. Raises
    ConfigError with `key` for an option that the function does not have, one that is missing, or one of a wrong type.
    `name` stands for the function in these messages.
    """
    signature = _signature(function)
    if signature is None:
        if options:
            raise ConfigError(f"{key}: {name} does not say which options it has; name a function in Python")
        return {}
    parameters = list(signature.parameters.values())
    by_position = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    passed = {*given, *(each.name for each in by_position[:values])}
    known = {
        each.name: each
        for each in parameters
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY) and each.name not in passed
    }
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    for option in options:
        if option not in known and not (takes_any and option not in passed):
            names = ", ".join(known) or "none"
            raise ConfigError(
                f"{key}.{option}: {name} has no such option; its options are {names}{suggest(option, list(known))}"
            )
    missing = [option for option, each in known.items() if each.default is each.empty and option not in options]
    if missing:
        raise ConfigError(
            f"{key}: {name} needs a value for {', '.join(missing)}, which is missing; add {key}.{missing[0]}"
        )
    return {
        option: _typed(value, known[option].annotation, key=f"{key}.{option}", name=name)
        if option in known and not (value is None and known[option].default is None)
        else value
        for option, value in options.items()
    }


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """Returns the signature of a callable; None for some that are written in C. Annotations are types, or texts if a
    name in one of them is unknown when the program runs."""
    try:
        return inspect.signature(function, eval_str=True)
    except Exception:  # evaluating an annotation may raise anything
        with contextlib.suppress(TypeError, ValueError):
            return inspect.signature(function)
        return None


def _typed(value: Any, annotation: Any, *, key: str, name: str) -> Any:
    """Returns `value` in the type `annotation`. The value is validated as JSON: a list may become a tuple and a text a
    path, but a text is not read as a number. Raises ConfigError if the value is not of this type."""
    if annotation is inspect.Parameter.empty or isinstance(annotation, str):
        return value
    # imported here, because objectives import this module, and benchmarks/gpu runs where there is no pydantic
    from pydantic import PydanticUserError, TypeAdapter, ValidationError

    try:
        adapter: TypeAdapter[Any] = TypeAdapter(annotation)
        text = json.dumps(value)
    except (PydanticUserError, TypeError, ValueError):  # Pydantic does not know the type, or JSON cannot have the value
        return value
    try:
        return adapter.validate_json(text, strict=True)
    except PydanticUserError:  # a part of the type has no definition yet
        return value
    except ValidationError as error:
        [first, *_] = error.errors()
        wanted = getattr(annotation, "__name__", None) if isinstance(annotation, type) else str(annotation)
        raise ConfigError(
            f"{key} = {value!r}: {name} annotates it as {wanted}, but this is not one ({first['msg']}); "
            "change the value"
        ) from error


def suggest(name: str, candidates: Sequence[str]) -> str:
    """Returns `; did you mean 'x'?` with the candidate that is most similar to `name`; "" if none is similar."""
    close = difflib.get_close_matches(name, candidates, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
