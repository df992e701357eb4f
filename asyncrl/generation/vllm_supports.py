"""The support of each token that vLLM samples with `generator.top_k`: the tokens among which it was sampled.

vLLM masks the logits of all other tokens before it samples. In the mode `processed_logprobs`, its log-probs are those
of the masked logits. So the tokens of the support are those with a finite log-prob, and no more than `top_k` are needed
to find them. This holds for vLLM's runners on CPUs and on GPUs. Sampling masks (`return_sampling_mask`) are not used:
they exist on GPUs only, and with them vLLM refuses greedy requests and those of the parity probe.

If several tokens at the boundary have exactly the same logit, vLLM keeps all of them, and samples among more than
`top_k` tokens.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncrl.config.checks import filters_without_top_k
from asyncrl.config.schema import GeneratorSection
from asyncrl.data.specs import NO_TOKEN
from asyncrl.errors import ConfigError, DataError
from asyncrl.generation.interfaces import Supports

LOST_NATS = 1e-5
"""Largest accepted error of a log-prob, nats, if a support lacks tokens. Rounding in float32 causes up to some 1e-6."""


def sampling_parameters(generator: GeneratorSection, *, vocabulary: int) -> dict[str, Any]:
    """Returns the fields of vLLM's `SamplingParams` for sampling with `generator.top_k`; none without it.
    `vocabulary` is the number of tokens of the model, the most log-probs that vLLM can return. Raises ConfigError for
    `top_p` or `min_p` without `top_k`, which a run refuses before, and a loop of your own only here."""
    if problems := list(filters_without_top_k(generator)):
        raise ConfigError("\n".join(problems))
    if generator.top_k is None:
        return {}
    return {
        "top_k": generator.top_k,
        "top_p": generator.top_p,
        "min_p": generator.min_p,
        "logprobs": min(generator.top_k, vocabulary),
    }


def supports_of(token_ids: Sequence[int], logprobs: Any, *, top_k: int) -> Supports:
    """Returns the supports [tokens, top_k] of sampled tokens, −1 beyond them, from vLLM's `FlatLogprobs`. It has for
    each token an entry of itself, and then the same number of entries of the most probable tokens.

    Raises DataError if a support is not whole: if it lacks the sampled token, or if its probabilities do not add up
    to 1.
    """
    tokens = len(token_ids)
    supports_TK = np.full((tokens, top_k), NO_TOKEN, dtype=np.int32)
    if not tokens:
        return supports_TK
    ids_TK = np.array(logprobs.token_ids, dtype=np.int32).reshape(tokens, -1)[:, 1:]
    logprobs_TK = np.array(logprobs.logprobs, dtype=np.float64).reshape(tokens, -1)[:, 1:]
    inside_TK = np.isfinite(logprobs_TK)
    supports_TK[:, : ids_TK.shape[1]] = np.where(inside_TK, ids_TK, NO_TOKEN)
    found_T = (supports_TK == np.array(token_ids, dtype=np.int32)[:, None]).any(axis=1)
    mass_T = np.where(inside_TK, np.exp(logprobs_TK), 0.0).sum(axis=1)
    if not (found_T & (mass_T >= math.exp(-LOST_NATS))).all():
        raise DataError(
            f"vLLM sampled a token among more than generator.top_k = {top_k} tokens, because several have exactly the "
            "same logit; the learner would compute other log-probs. Set another generator.top_k",
            reason="support",
        )
    return supports_TK
