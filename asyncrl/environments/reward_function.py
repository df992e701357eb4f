"""Reward functions as users write them. There are four forms, which the function's signature tells apart.

    def reward(task, completion) -> float                  called for one completion after the other
    async def reward(task, completion) -> float            called for all completions of a group at once
    def reward(task, completions) -> list[float]           called once for a group
    async def reward(task, completions) -> list[float]     the same, awaited

In place of a float, a reward may be a dict of components by name. Async calls run in one event loop. An environment's
`score` method may have the same four forms. The name of the second parameter tells whether the function takes one
completion or a group. A function that cannot be called with two arguments is refused before any scoring.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from asyncrl.config.schema import EnvironmentSection
from asyncrl.errors import ConfigError

_TAKEN = "(task, completion) for one completion, or (task, completions) for a whole group"


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """How a reward function is called: with a group or with one completion, and whether the result is awaited. `agent`:
    the function is an agent, which makes its own calls to the model. `tools` are the descriptions of
    `environment.tools`, as the model reads them."""

    batched: bool = False
    asynchronous: bool = False
    agent: bool = False
    tools: tuple[dict[str, Any], ...] = ()

    def calls(self, completions: int) -> list[int]:
        """Returns the number of completions of each call that scores a group of `completions`."""
        return [completions] if self.batched else [1] * completions

    def limit_s(self, timeout_s: float, completions: int) -> float:
        """Returns the limit of one call in seconds. A batched call gets `timeout_s` for each of its completions."""
        return timeout_s * completions if self.batched else timeout_s

    def overran(self, timeout_s: float, completions: int) -> str:
        """Describes a call that exceeded its limit, for an error message."""
        limit = f"took longer than environment.score_timeout_s = {timeout_s:g} s"
        if self.batched:
            total_s = self.limit_s(timeout_s, completions)
            return f"{limit} × {completions} completions = {total_s:g} s; raise it"
        advice = "raise it" if self.asynchronous else "raise it, or make the reward an async or batched function"
        return f"{limit} for one completion; {advice}"


@dataclass(frozen=True, kw_only=True)
class RewardFunction:
    """A function and the form in which it is called. If it returns components of a reward by name, `weights` has their
    weights; a component without one counts with the weight 1."""

    function: Callable[..., Any]
    form: Form
    weights: Mapping[str, float] = field(default_factory=dict)


def subject(section: EnvironmentSection) -> str:
    """Returns the setting that names the reward code. Errors of reward code begin with it, or with the text of `caller`
    or `TermFailed`."""
    if section.agent is not None:
        return f"environment.agent = {section.agent}"
    if section.rewards:
        return f"environment.rewards ({', '.join(term.name for term in section.rewards)})"
    if section.reward is None:
        return f"environment.name = {section.name}"
    return f"environment.reward = {section.reward}"


def caller(section: EnvironmentSection) -> str:
    """Returns what a scoring process calls, for errors of a whole call: the reward code, or the episode in which the
    model calls tools, whose last step is the reward."""
    tools = section.has_tools and section.agent is None
    return f"the episode with {section.tools_key}" if tools else subject(section)


def reward_function(function: Callable[..., Any], *, named: str) -> RewardFunction:
    """Returns `function` with its form. `named` is the setting that names it, `key = value`.

    Raises ConfigError if it is a class, if it cannot be called with a task and a completion, or if its parameters are
    like those of an agent or of a reward for TRL.
    """
    if isinstance(function, type):
        raise ConfigError(f"{named} is a class, and not a function; a reward takes {_TAKEN}")
    asynchronous = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(type(function), "__call__", None)  # noqa: B004 - an instance whose class defines `async def __call__`
    )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some callables written in C have no signature
        return RewardFunction(function=function, form=Form(asynchronous=asynchronous))
    parameters = list(signature.parameters.values())
    key, _, path = named.partition(" = ")
    if _is_trl(parameters):
        raise ConfigError(_trl_message(key, path, signature, asynchronous=asynchronous))
    if parameters and parameters[0].name == "session":
        raise ConfigError(
            f"{named} has the parameters {signature}, like an agent; a reward takes {_TAKEN}. Set environment.agent "
            "instead if it is an agent"
        )
    try:
        signature.bind("task", "completion")
    except TypeError as error:
        raise ConfigError(
            f"{named} has the parameters {signature} and cannot be called with two arguments ({error}); a "
            f"reward takes {_TAKEN}"
        ) from None
    second = parameters[1:2]
    batched = bool(second) and second[0].name == "completions" and second[0].kind is not second[0].VAR_POSITIONAL
    return RewardFunction(function=function, form=Form(batched=batched, asynchronous=asynchronous))


def _is_trl(parameters: list[inspect.Parameter]) -> bool:
    """Detects a reward for TRL, which passes `prompts`, `completions` and the dataset's columns by name."""
    names = [parameter.name for parameter in parameters]
    return "prompts" in names or names[:1] == ["completions"]


def _trl_message(key: str, path: str, signature: inspect.Signature, *, asynchronous: bool) -> str:
    refused = (
        f"{key} = {path} has the parameters {signature}, like a reward for TRL; a reward for asyncrl takes {_TAKEN}"
    )
    if key == "environment.name":
        return refused
    module, _, name = path.partition(":")
    adapter = f"{name.replace('.', '_')}_of_task"
    arguments = ", ".join(f"{key}={value}" for key, value in _trl_arguments(signature).items())
    define, call = ("async def", "await ") if asynchronous else ("def", "")
    return (
        f"{refused}. Add these three lines to module {module} and set {key}: {module}:{adapter}\n"
        f"    {define} {adapter}(task, completions):\n"
        f"        n = len(completions)\n"
        f"        return {call}{name}({arguments})"
    )


def _trl_arguments(signature: inspect.Signature) -> dict[str, str]:
    """Returns the arguments that an adapter passes, as Python expressions by name: prompts, completions, answer, and
    other required parameters."""
    known = {"prompts": "[task.prompt] * n", "completions": "completions", "answer": "[task.answer] * n"}
    arguments: dict[str, str] = {}
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= {key: value for key, value in known.items() if key not in arguments}
        elif parameter.kind is not parameter.VAR_POSITIONAL and (name in known or parameter.default is parameter.empty):
            arguments[name] = known.get(name, f"[task.metadata[{name!r}]] * n")
    return arguments
