"""Loads a loss that the user wrote and that `algorithm.loss` names by import path."""

import inspect
from typing import Any, cast

from asyncrl.algorithms.interfaces import LossFunction, LossInputType, input_type_of, misfit
from asyncrl.config.import_path import resolve
from asyncrl.errors import ConfigError
from asyncrl.user_code import describe_error


def load_loss(path: str) -> LossFunction:
    """Returns the loss at the import path.

    The path must name either a LossFunction, which is callable with arguments, or a class or factory that returns a
    LossFunction and is callable without arguments. Raises ConfigError if it cannot be imported, called without
    arguments, or called as the policy calls a loss.
    """
    found = resolve(path, key="algorithm.loss")
    try:
        loss: Any = found if _is_loss(found) else found()
    except Exception as error:  # a factory that the user wrote may raise anything
        raise ConfigError(
            f"algorithm.loss: {path!r} was called without arguments to make a loss, and it raised "
            f"{describe_error(error)}; fix it, or name a LossFunction"
        ) from error
    if not _is_loss(loss):
        raise ConfigError(
            f"algorithm.loss: {path!r} gives a {type(loss).__name__}, which is not a LossFunction; it must be "
            f"callable with logits or log-probs, data and the global counts (see asyncrl.algorithms.interfaces)"
        )
    if problem := _call_problem(loss):
        raise ConfigError(f"algorithm.loss: {path!r} cannot be called as a loss: {problem}")
    return cast(LossFunction, loss)


def _call_problem(loss: Any) -> str | None:
    """Returns why the loss's signature fits none of the calls that the policy may make, or None if it fits one."""
    try:
        kind = input_type_of(loss)
        signature = inspect.signature(loss)
    except ValueError as error:
        # `input_type` of the loss is unknown: an error. Or the loss is written in C and has no signature: not checked.
        return str(error) if hasattr(loss, "input_type") else None
    counts: dict[str, None] = dict.fromkeys(("global_valid_seqs", "global_valid_toks"))
    logits = (["next_token_logits"], ["logits"], ["next_token_logits", "logits"])
    calls: list[tuple[list[None], dict[str, None]]] = [([], {"data": None, **dict.fromkeys(names)}) for names in logits]
    calls.append(([None, None], {}))
    if kind == LossInputType.LOGPROB:
        calls = [([], {"data": None, "next_token_logprobs": None})]
    problems = [misfit(signature, *values, **keywords, **counts) for values, keywords in calls]
    if None in problems:
        return None
    takes = "data, global_valid_seqs, global_valid_toks, next_token_logprobs"
    if kind == LossInputType.LOGIT:
        takes = "next_token_logits, data, global_valid_seqs, global_valid_toks"
    return f"{problems[-1]}; it must take ({takes}), but its parameters are {signature}"


def _is_loss(value: Any) -> bool:
    if isinstance(value, type) or not callable(value):
        return False
    if hasattr(value, "input_type"):
        return True
    arguments = inspect.signature(value).parameters.values()
    return any(a.default is a.empty and a.kind not in (a.VAR_POSITIONAL, a.VAR_KEYWORD) for a in arguments)
