"""Writes a first configuration for a model and a dataset, with a comment that explains each number.

`asyncrl init` measures the facts about model and dataset and calls `starter_yaml`. This module imports neither torch
nor transformers.
"""

import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.config.plain_yaml import dump_yaml
from asyncrl.config.schema import RaySection
from asyncrl.errors import ConfigError

GROUP_SIZE = 8
TOKENS_PER_PASS_CPU = 8192
"""Tokens in one packed pass on a CPU. It takes some hundred MB of activations for a few million parameters."""
TOKENS_PER_PASS_GPU = 16384
"""Tokens in one packed pass on a GPU."""
ROWS_MIB = 256
"""Room for rows in Ray's object store, in addition to the weights, MiB."""
ANSWER_FACTOR = 4
"""Ratio of the longest completion to the longest reference answer, unless the user gives --completion-tokens."""
SMALL_MODEL = 20_000_000
"""Parameters up to which a model is trained with a large learning rate. The quickstart's model has 0.5 million."""
EVAL_EVERY_STEPS = 20
SHORTEST_COMPLETION = 16
"""Smallest limit for completions that is chosen without --completion-tokens, tokens. If the model has no room for it,
the longest answer must have room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts that `asyncrl init` found about the model and the dataset.

    Lengths are in tokens of the model's tokenizer. Prompts are measured with the chat template, if it is applied.
    `data` are the keys of the section `data` that say what is read. `completion_tokens` is the user's option
    --completion-tokens. `longest_model` is the model's maximum sequence length in tokens, `parameters` its number of
    parameters; both are None if the model's files do not give them.
    """

    name: str
    model: str
    data: Mapping[str, Any]
    reward: str
    prompts: int
    longest_prompt: int
    longest_answer: int
    completion_tokens: int | None
    longest_model: int | None
    parameters: int | None
    gpus: int


def starter_yaml(facts: Facts) -> str:
    """Returns a configuration as YAML text with comments.

    Raises ConfigError if prompts and completions together are longer than the model's maximum sequence length.
    """
    prompt, completion = _lengths(facts)
    on_gpu = facts.gpus > 0
    groups = 32 if on_gpu else 8
    lines = [
        f"# Written by `asyncrl init` for {facts.model} and {facts.prompts} prompts. You may change every number.",
        "# `asyncrl config check` finds numbers that do not fit together. docs/configuration.md explains each key.",
        "run:",
        f"  name: {_text(facts.name)}",
        "model:",
        f"  path: {_text(facts.model)}",
        f"  dtype: {'bfloat16' if on_gpu else 'float32'}",
        f"  max_length: {prompt + completion} # prompt and completion: {prompt} + {completion}",
        "data:",
        *_block(facts.data),
        '  prompt_template: "{question}" # makes the prompt; the other columns of a row are fields too',
        f"  max_prompt_tokens: {prompt} # the longest prompt has {facts.longest_prompt}",
        "environment:",
        f"  reward: {_text(facts.reward)} # or your own package.module:function of (task, completion)",
        *_generator(facts, completion=completion, groups=groups),
        *_learner(facts, length=prompt + completion, groups=groups),
        "staleness:",
        f"  max_versions: {1 if facts.gpus == 1 else 2} # maximum age of training data in versions; 0 is on-policy and "
        "slower",
        "eval:",
        f"  every_steps: {EVAL_EVERY_STEPS} # evaluates held-out prompts while the run trains",
        *_ray(facts, bytes_per_parameter=2 if on_gpu else 4),
    ]
    return "\n".join(lines) + "\n"


def _lengths(facts: Facts) -> tuple[int, int]:
    """Returns the maximum lengths of prompts and of completions, tokens."""
    prompt = _up_to_multiple(facts.longest_prompt, 8)
    wanted = facts.completion_tokens or max(SHORTEST_COMPLETION, ANSWER_FACTOR * facts.longest_answer)
    completion = _up_to_multiple(wanted, 8) if facts.completion_tokens is None else wanted
    if facts.longest_model is None or prompt + completion <= facts.longest_model:
        return prompt, completion
    left = facts.longest_model - facts.longest_prompt
    if facts.completion_tokens is not None or left < min(SHORTEST_COMPLETION, facts.longest_answer):
        raise ConfigError(
            f"the longest prompt has {facts.longest_prompt} tokens and a completion may have {wanted}: together "
            f"this is more than {facts.longest_model}, the maximum sequence length of {facts.model}; "
            + (f"set --completion-tokens to at most {left}" if left > 0 else "shorten the prompts"),
            key="model.max_length",
        )
    return facts.longest_prompt, left


def _generator(facts: Facts, *, completion: int, groups: int) -> list[str]:
    lines = ["generator:"]
    if facts.gpus == 1:
        lines += ["  gpus: 0.5", "  gpu_memory_utilization: 0.35 # engine and learner share one GPU"]
    elif facts.gpus > 1:
        lines.append("  gpus: 1")
    if facts.gpus > 2:
        lines.append(f"  replicas: {facts.gpus - 1} # one GPU is left for the learner")
    if facts.gpus > 0:
        lines.append("  enforce_eager: false")
    given = facts.completion_tokens is not None
    longest = f"the longest answer has {facts.longest_answer}; a reasoning model needs more"
    return [
        *lines,
        f"  max_completion_tokens: {completion} # {'set by --completion-tokens' if given else longest}",
        f"  max_concurrent_groups: {groups} # × group_size sequences at once; more than (max_versions + 1) × "
        "groups_per_step have no effect",
    ]


def _learner(facts: Facts, *, length: int, groups: int) -> list[str]:
    on_gpu = facts.gpus > 0
    tokens = max(TOKENS_PER_PASS_GPU if on_gpu else TOKENS_PER_PASS_CPU, length)
    return [
        "learner:",
        *([f"  gpus: {0.5 if facts.gpus == 1 else 1}"] if on_gpu else []),
        "  total_steps: 200",
        f"  groups_per_step: {groups} # prompts in a step",
        f"  group_size: {GROUP_SIZE} # samples of a prompt; a group whose rewards are all equal has no gradient",
        "  batching: packed # no padding, and the samples of a group share their prompt",
        f"  micro_batch_tokens: {tokens} # in one pass; lower it if memory runs out",
        "  optimizer:",
        f"    learning_rate: {_rate(facts)}",
        "    warmup_steps: 10",
        f"    schedule: {'linear' if _is_small(facts) else 'constant'}",
    ]


def _is_small(facts: Facts) -> bool:
    return facts.parameters is not None and facts.parameters <= SMALL_MODEL


def _rate(facts: Facts) -> str:
    """Returns the learning rate with its comment."""
    if _is_small(facts):
        return "5.0e-4 # a tiny model takes a large one, which must fall so that the reward does not wobble at the end"
    return f"{'2.0e-6' if facts.gpus else '1.0e-5'} # raise it if the reward does not change"


def _ray(facts: Facts, *, bytes_per_parameter: int) -> list[str]:
    """Returns the lines of the section `ray`, or none if the default object store is large enough.

    The object store holds up to three versions of the weights while a version is published.
    """
    if facts.parameters is None:
        return []
    version_mib = math.ceil(facts.parameters * bytes_per_parameter / 2**20)
    if 3 * version_mib + ROWS_MIB <= RaySection().object_store_mb:
        return []
    return [
        "ray:",
        f"  object_store_mb: {3 * version_mib + ROWS_MIB} # three versions of {version_mib} MiB each, and the rows",
    ]


def _up_to_multiple(number: int, unit: int) -> int:
    return math.ceil(number / unit) * unit


def _block(section: Mapping[str, Any]) -> list[str]:
    """Returns the lines of a section, indented below its name."""
    return textwrap.indent(dump_yaml(dict(section)), "  ").splitlines()


def _text(value: str) -> str:
    """Returns a string as a YAML scalar, in quotes if YAML needs them."""
    return dump_yaml({"_": value}).partition(": ")[2].strip()
