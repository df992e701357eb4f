"""Writes a first configuration for a model and a dataset: the numbers that depend on each other, each with its reason.

`asyncrl init` measures the facts and calls `starter_yaml`. Nothing here imports torch or transformers.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config.dialect import dump_yaml
from asyncrl.config.schema import RaySection
from asyncrl.errors import ConfigError

GROUP_SIZE = 8
TOKENS_PER_PASS_CPU = 8192
"""Tokens of one padded pass on a CPU: some hundred MB of activations for a model of a few million parameters."""
TOKENS_PER_PASS_GPU = 16384
ROWS_MIB = 256
"""Room for samples in Ray's object store beside the weights."""
ANSWER_FACTOR = 4
"""A completion may be this many times as long as the longest reference answer, unless the user says otherwise."""
SHORTEST_COMPLETION = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What `asyncrl init` found. Lengths are in tokens of the model's tokenizer, prompts as the model gets them.

    `data_path` is set for a JSONL file, `dataset` for an import path. `completion_tokens` is what the user asked for.
    `longest_model` is the model's own limit in tokens, `parameters` its size; None where it does not tell.
    """

    name: str
    model: str
    data_path: Path | None
    dataset: str | None
    reward: str
    prompts: int
    longest_prompt: int
    longest_answer: int
    completion_tokens: int | None
    longest_model: int | None
    parameters: int | None
    gpus: int


def starter_yaml(facts: Facts) -> str:
    """A configuration as YAML text with comments. ConfigError when prompts and completions do not fit the model."""
    prompt = _up_to_multiple(facts.longest_prompt, 8)
    wanted = facts.completion_tokens or max(SHORTEST_COMPLETION, ANSWER_FACTOR * facts.longest_answer)
    completion = _up_to_multiple(wanted, 8) if facts.completion_tokens is None else wanted
    length = prompt + completion
    if facts.longest_model is not None and length > facts.longest_model:
        left = facts.longest_model - facts.longest_prompt
        if facts.completion_tokens is not None or left < SHORTEST_COMPLETION:
            raise ConfigError(
                f"the longest prompt has {facts.longest_prompt} tokens, and a completion may have {wanted}: together "
                f"more than the {facts.longest_model} tokens that {facts.model} takes; "
                + (f"set --completion-tokens to at most {left}" if left > 0 else "shorten the prompts"),
                key="model.max_length",
            )
        prompt, completion, length = facts.longest_prompt, left, facts.longest_model
    on_gpu = facts.gpus > 0
    groups = 32 if on_gpu else 8
    shared = facts.gpus == 1
    versions = 1 if shared else 2
    per_pass = min(groups * GROUP_SIZE, max(1, TOKENS_PER_PASS_CPU // length))
    lines = [
        f"# Written by `asyncrl init` for {facts.model} and {facts.prompts} prompts. Every number may be changed:",
        "# `asyncrl config check` says which of them do not fit together, docs/configuration.md what each means.",
        "run:",
        f"  name: {_text(facts.name)}",
        "model:",
        f"  path: {_text(facts.model)}",
        f"  dtype: {'bfloat16' if on_gpu else 'float32'}",
        f"  max_length: {length} # prompt and completion: {prompt} + {completion}",
        "data:",
        f"  dataset: {_text(facts.dataset or 'jsonl')}",
        *([f"  path: {_text(str(facts.data_path))}"] if facts.data_path is not None else []),
        '  prompt_template: "{question}" # the text that the model gets; a JSONL row\'s other keys are fields, too',
        f"  max_prompt_tokens: {prompt} # the longest of the prompts has {facts.longest_prompt}",
        "environment:",
        f"  reward: {_text(facts.reward)} # or package.module:function, which takes (task, completion)",
        "generator:",
        *(
            [
                f"  gpus: {0.5 if shared else 1}",
                *(["  gpu_memory_utilization: 0.35 # both pools see the same GPU"] if shared else []),
                *([f"  replicas: {facts.gpus - 1} # the learner has the last GPU"] if facts.gpus > 2 else []),
                "  enforce_eager: false",
            ]
            if on_gpu
            else []
        ),
        f"  max_completion_tokens: {completion} # "
        + (
            "as you asked"
            if facts.completion_tokens is not None
            else f"the longest answer has {facts.longest_answer}; a model that reasons needs more"
        ),
        f"  max_concurrent_groups: {groups} # × group_size sequences at once; at most (max_versions + 1) × "
        "groups_per_step are useful",
        "learner:",
        *([f"  gpus: {0.5 if shared else 1}"] if on_gpu else []),
        "  total_steps: 200",
        f"  groups_per_step: {groups} # prompts a step",
        f"  group_size: {GROUP_SIZE} # samples a prompt; with rewards that are all equal a group teaches nothing",
        *(
            [
                "  batching: packed",
                f"  micro_batch_tokens: {max(TOKENS_PER_PASS_GPU, length)} # of one pass; lower it if memory runs out",
            ]
            if on_gpu
            else [f"  micro_batch_size: {per_pass} # sequences of one pass; lower it if memory runs out"]
        ),
        "  optimizer:",
        f"    learning_rate: {'2.0e-6' if on_gpu else '1.0e-5'} # raise it if the reward does not move",
        "    warmup_steps: 10",
        "    schedule: constant",
        "staleness:",
        f"  max_versions: {versions} # samples may be this many steps old; 0 is on-policy and slower",
        *_ray(facts, bytes_per_parameter=2 if on_gpu else 4),
    ]
    return "\n".join(lines) + "\n"


def _ray(facts: Facts, *, bytes_per_parameter: int) -> list[str]:
    """Room for weights: Ray's object store holds three versions while the next one is published."""
    if facts.parameters is None:
        return []
    version_mib = math.ceil(facts.parameters * bytes_per_parameter / 2**20)
    if 3 * version_mib + ROWS_MIB <= RaySection().object_store_mb:
        return []
    return [
        "ray:",
        f"  object_store_mb: {3 * version_mib + ROWS_MIB} # three versions of {version_mib} MiB, and rows",
    ]


def _up_to_multiple(number: int, unit: int) -> int:
    return math.ceil(number / unit) * unit


def _text(value: str) -> str:
    """A scalar as YAML, quoted where it needs quotes."""
    return dump_yaml({"_": value}).partition(": ")[2].strip()
