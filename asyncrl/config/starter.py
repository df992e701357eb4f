"""Writes a first configuration for a model and a dataset, with a comment that explains each number.

`asyncrl init` measures the facts about model and dataset and calls `starter_yaml`. This module imports neither torch
nor transformers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from asyncrl.config.load import dump_yaml
from asyncrl.config.schema import RaySection
from asyncrl.config.text_templates import TEMPLATES
from asyncrl.errors import ConfigError

TOKENS_PER_PASS_CPU = 8192
"""Tokens in one packed pass on a CPU. It takes some hundred MB of activations for a few million parameters."""
TOKENS_PER_PASS_GPU = 16384
"""Tokens in one packed pass on a GPU."""
ROWS_MIB = 256
"""Room for rows in Ray's object store, in addition to the weights, MiB."""
ANSWER_FACTOR = 4
"""A completion may be this many times as long as the longest reference answer, unless the user gives
--completion-tokens."""
SMALL_MODEL = 20_000_000
"""Parameters up to which a model is trained with a large learning rate. The quickstart's model has 0.5 million."""
SHORTEST_COMPLETION = 16
"""Smallest limit for completions that is chosen without --completion-tokens, tokens. If the model has no room for it,
the longest answer must have room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNumbers:
    """The number of ranks of the learner, and the settings that keep the ranks within the memory of their GPUs.
    `learner_gib` is the memory that a rank is expected to need. `fits` is False if no settings were found with which
    the ranks fit; then the settings are those that need the least memory."""

    ranks: int
    gradient_sync: Literal["update", "micro_batch"]
    activation_checkpointing: bool
    micro_batch_tokens: int
    learner_gib: float
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts that `asyncrl init` found about the model and the dataset.

    Lengths are in tokens of the model's tokenizer. Prompts are measured with the chat template, if it is applied.
    `data` are the keys of the section `data` that say what is read. `completion_tokens` is the user's option
    --completion-tokens. `longest_model` is the model's maximum sequence length in tokens, `parameters` its number of
    parameters; both are None if the model's files do not give them. `gpu_gib` is the memory of a GPU. `numbers` is
    None without GPUs, and if the model's shapes or the memory are not known. `conversations` is whether rows have
    messages, which have no prompt template. `offers_system_prompt` is whether a chat model gets no system prompt yet.
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
    gpu_gib: float = 0.0
    numbers: GpuNumbers | None = None
    conversations: bool = False
    offers_system_prompt: bool = False


def starter_yaml(facts: Facts) -> str:
    """Returns a configuration as YAML text with comments, made from the template `starter.yaml.j2`.

    The object store holds up to three versions of the weights while a version is published. Raises ConfigError if the
    model's maximum sequence length leaves too little room for completions after the longest prompt (`_lengths`).
    """
    prompt, completion = _lengths(facts)
    bytes_per_parameter = 2 if facts.gpus else 4
    version_mib = math.ceil((facts.parameters or 0) * bytes_per_parameter / 2**20)
    return TEMPLATES.get_template("config/starter.yaml.j2").render(
        facts=facts,
        data=dump_yaml(dict(facts.data)).removesuffix("\n"),
        prompt=prompt,
        completion=completion,
        groups=32 if facts.gpus else 8,
        numbers=facts.numbers,
        ranks=facts.numbers.ranks if facts.numbers else 1,
        tokens_per_pass=facts.numbers.micro_batch_tokens
        if facts.numbers
        else max(TOKENS_PER_PASS_GPU if facts.gpus else TOKENS_PER_PASS_CPU, prompt + completion),
        is_small=facts.parameters is not None and facts.parameters <= SMALL_MODEL,
        version_mib=version_mib,
        object_store_mib=3 * version_mib + ROWS_MIB,
        default_object_store_mib=RaySection().object_store_mb,
    )


def _lengths(facts: Facts) -> tuple[int, int]:
    """Returns the maximum lengths of prompts and of completions, tokens. If both do not fit into the model's maximum
    sequence length, completions get what the longest prompt leaves. Raises ConfigError instead if the user gave
    --completion-tokens, or if this room is less than both `SHORTEST_COMPLETION` and the longest answer."""
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
            + (f"set --completion-tokens to at most {left}" if left > 0 else "shorten the prompts")
        )
    return facts.longest_prompt, left


def _up_to_multiple(number: int, unit: int) -> int:
    return math.ceil(number / unit) * unit
