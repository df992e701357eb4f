"""Reads the tokens that vLLM has sampled so far, while requests run, and joins them to those of an earlier attempt.

vLLM returns an output only when all completions of a request have ended: an output for each token would cost a copy of
all tokens and a wake-up of the event loop. Before that, tokens are read from the output processor of `AsyncLLM`, which
runs in this process. It updates a request's tokens, log-probs and versions in one go between two turns of the event
loop, so a reader always finds as many log-probs and versions as tokens.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncrl.common.version import Version
from asyncrl.config.rules import filters_without_top_k
from asyncrl.config.schema import GeneratorSection
from asyncrl.data.specs import NO_TOKEN, SUPPORT, TOP_LOGPROBS
from asyncrl.errors import ConfigError, DataError, InfraError
from asyncrl.generation.interfaces import PartialCompletion, WideColumns, concatenated

_ENDS = ("stop", "length")
"""vLLM's finish reasons of a completion that can be trained: at an end or stop string, and at the length limit."""


@dataclass(slots=True)
class Child:
    """One completion: the prefix with which it began, its request with the child's index in it, and the request's
    output for it when the request has ended. `sampled` is the number of its request's tokens that was read last. A
    completion whose prefix is finished has no request. `version` is the version of the request's adapter: with an
    adapter, all tokens of a request have this version, and vLLM's own labels of versions are not used. `widths` are
    those of the run (`Config.widths`), or empty if the request does not sample with them.

    `so_far` and `ended` raise DataError if a token lacks its log-prob or its version, or with `generator.top_k` its
    support.
    """

    prefix: PartialCompletion
    request_id: str = ""
    index: int = 0
    output: Any = None
    sampled: int = 0
    version: Version | None = None
    widths: Mapping[str, int] = field(default_factory=dict)

    def so_far(self, state: Any) -> PartialCompletion:
        """Returns the completion while its request runs: its prefix, and the rest from the state of the request."""
        tokens, logprobs = state.detokenizer.output_token_ids, state.logprobs_processor.logprobs
        return self._continued(tokens, logprobs, state.weight_version_starts)

    def ended(self, output: Any) -> PartialCompletion:
        """Returns the completion after its request has ended: its prefix, and the rest from vLLM's final `output`. It
        is not `finished` if vLLM ended it for another reason than `_ENDS`, so that another attempt continues it."""
        starts = [(span.version, span.start) for span in output.weight_versions or []]
        return self._continued(output.token_ids, output.logprobs, starts, reason=output.finish_reason)

    def _continued(
        self, token_ids: Sequence[int], logprobs: Any, starts: Sequence[tuple[str, int]], *, reason: str | None = None
    ) -> PartialCompletion:
        # For each token, the flat lists have an entry of the sampled token, and then those of the most probable ones,
        # as many as the request has asked for.
        each = max(1, len(logprobs.token_ids) // max(1, len(token_ids)))
        if logprobs.token_ids[::each] != list(token_ids):
            raise DataError("vLLM returned log-probs of other tokens than the sampled ones", reason="logprobs")
        return PartialCompletion(
            token_ids=[*self.prefix.token_ids, *token_ids],
            logprobs=[*self.prefix.logprobs, *logprobs.logprobs[::each]],
            versions=[*self.prefix.versions, *_versions(starts, len(token_ids), version=self.version)],
            finished=reason in _ENDS,
            truncated=reason == "length",
            wide=concatenated([self.prefix.wide, wide_columns(token_ids, logprobs, widths=self.widths)]),
        )


@dataclass(frozen=True, slots=True)
class SampledByVLLM:
    """What vLLM has sampled so far of the completions `children` of one call. Implements the protocol `Sampled`."""

    llm: Any
    children: Sequence[Child]

    @property
    def lengths(self) -> list[int]:
        for child in self.children:
            state, output = self._look(child)
            if output is not None:
                child.sampled = len(output.token_ids)
            elif state is not None:
                child.sampled = len(state.detokenizer.output_token_ids)
        return [len(child.prefix.token_ids) + child.sampled for child in self.children]

    def partial(self) -> list[PartialCompletion] | None:
        samples: list[PartialCompletion] = []
        for child in self.children:
            state, output = self._look(child)
            if child.prefix.finished:
                samples.append(child.prefix)
            elif output is not None:
                samples.append(child.ended(output))
            elif state is not None:
                samples.append(child.so_far(state))
            else:
                return None
        return samples

    def _look(self, child: Child) -> tuple[Any, Any]:
        """Returns (state, output) of one completion of a request: vLLM's state while it runs, its output when it has
        ended. Both are None if vLLM does not know the request yet, or if the completion has just ended and its output
        is on the way."""
        if child.output is not None:
            return None, child.output
        processor = self.llm.output_processor
        names = processor.external_req_ids.get(child.request_id, ())
        states = [state for name in names if (state := processor.request_states.get(name)) is not None]
        for state in states:
            if state.request_index == child.index:
                return state, None
        # A request that samples several completions keeps the outputs of those that have ended.
        parents = [state.parent_req for state in states if state.parent_req is not None]
        return None, parents[0].output_aggregator[child.index] if parents else None


def check_end(finish_reason: str | None) -> None:
    """Raises an error unless this finish reason of vLLM is one of `_ENDS`, those of completions that can be trained.

    Raises InfraError if the completion was aborted or the engine failed, because another attempt may succeed. Raises
    DataError for every other reason, such as `repetition`: another attempt would end in the same way.
    """
    if finish_reason == "abort":
        raise InfraError("the request was aborted", reason="aborted")
    if finish_reason == "error":
        raise InfraError("vLLM ended a completion with an internal error; see the replica's log", reason="engine")
    if finish_reason not in _ENDS:
        raise DataError(
            f"vLLM ended a completion with the finish reason {finish_reason!r}, but only {' and '.join(_ENDS)} are "
            "ends that can be trained; use the version of vLLM in pyproject.toml",
            reason="finish_reason",
        )


def _versions(starts: Sequence[tuple[str, int]], tokens: int, *, version: Version | None) -> list[Version]:
    """Returns the version of each token. `starts` has a pair (label of the version, index of the first token) for each
    span of tokens of one version. With an adapter, each token has the adapter's `version`."""
    if version is not None:
        return [version] * tokens
    if not tokens:
        return []  # without a token, vLLM has no span
    if not starts or starts[0][1] != 0:
        raise DataError(
            f"vLLM did not label the first of {tokens} tokens with a weight version", reason="version_spans"
        )
    versions: list[Version] = []
    for (label, start), end in zip(starts, [*(start for _, start in starts[1:]), tokens], strict=True):
        versions += [Version.parse(label)] * (end - start)
    return versions


def until_stop(
    sample: PartialCompletion, stops: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> PartialCompletion:
    """Returns a finished completion up to the token that completes the first stop string; all of it if it has none.

    vLLM looks for stop strings in the text of its own request only. A stop string that begins in the prefix and ends
    after it is found here.
    """

    def has_stop(tokens: int) -> bool:
        text = decode(sample.token_ids[:tokens])
        return any(stop in text for stop in stops)

    tokens = len(sample.token_ids)
    if not has_stop(tokens):
        return sample
    first = bisect_left(range(tokens), True, key=has_stop)
    return sample.part(0, first, finished=True)


def non_greedy_tokens(output: Any) -> int:
    """Returns how many tokens of an output of vLLM were not the most probable ones. Its request has asked for the
    log-prob of at least one most probable token beside that of the sampled one. Returns 0 if `output` is None.

    vLLM's `rank` does not tell: it also counts the tokens with exactly the log-prob of the sampled one, so it is 2 if
    the two largest logits are equal. A greedy token has the largest logit, and equal logits have equal log-probs: vLLM
    computes them in float32, in the same way for each token of a row. They are those of the masked logits, so filters
    such as `top_k` do not matter.
    """
    if output is None or not output.token_ids:
        return 0
    logprobs_TK = np.array(output.logprobs.logprobs).reshape(len(output.token_ids), -1)
    return int((logprobs_TK[:, 0] < logprobs_TK[:, 1]).sum())


# The columns with several numbers for each token: the most likely tokens with their log-probs (`generator.logprobs`),
# and with `generator.top_k` the support, the tokens among which the token was sampled.
#
# vLLM masks the logits of all other tokens before it samples. In the mode `processed_logprobs`, its log-probs are those
# of the masked logits. So the tokens of the support are those with a finite log-prob, and the log-probs of the `top_k`
# most probable tokens show them. This holds for vLLM's runners on CPUs and on GPUs. Sampling masks
# (`return_sampling_mask`) are not used: they exist on GPUs only, and with them vLLM refuses greedy requests and those
# of the parity probe.
#
# If several tokens at the boundary have exactly the same logit, vLLM keeps all of them, and samples among more than
# `top_k` tokens. The support that is found then lacks tokens. `wide_columns` notices it, because the probabilities do
# not add up to 1, and raises DataError.

LOST_NATS = 1e-5
"""Probability that a support may lack, nats: −log of the sum of its probabilities. Rounding in float32 causes up to
some 1e-6."""


def sampling_parameters(generator: GeneratorSection, *, vocabulary: int) -> dict[str, Any]:
    """Returns the fields of vLLM's `SamplingParams` for `generator.top_k`, with `top_p` and `min_p`, and for
    `generator.logprobs`; none without them. `vocabulary` is the number of tokens of the model, the most log-probs that
    vLLM can return. Raises ConfigError for `top_p` or `min_p` without `top_k`. A run refuses these before it starts,
    but a loop of the user's own only here."""
    if problems := list(filters_without_top_k(generator)):
        raise ConfigError("\n".join(problems))
    listed = max(generator.top_k or 0, generator.logprobs or 0)
    fields: dict[str, Any] = {"logprobs": min(listed, vocabulary)} if listed else {}
    if generator.top_k is None:
        return fields
    return {"top_k": generator.top_k, "top_p": generator.top_p, "min_p": generator.min_p, **fields}


def wide_columns(token_ids: Sequence[int], logprobs: Any, *, widths: Mapping[str, int]) -> WideColumns:
    """Returns the columns of `widths` for sampled tokens, each [tokens, its width]. `logprobs` is vLLM's
    `FlatLogprobs`. It has for each sampled token its own entry, and then those of the most probable tokens, the most
    probable one first, as many for each. No column has the tokens whose log-prob is −inf, which the filters remove.

    Raises DataError if a support is not whole: if it lacks the sampled token, or if its probabilities do not add up
    to 1.
    """
    if not widths:
        return {}
    shape = (len(token_ids), -1) if token_ids else (0, 1)
    ids_TK = np.array(logprobs.token_ids, dtype=np.int32).reshape(shape)[:, 1:]
    logprobs_TK = np.array(logprobs.logprobs, dtype=np.float32).reshape(shape)[:, 1:]
    inside_TK = np.isfinite(logprobs_TK)
    columns: dict[str, npt.NDArray[Any]] = {}
    for name, width in widths.items():
        values_TK, fill = (logprobs_TK, 0) if name == TOP_LOGPROBS else (ids_TK, NO_TOKEN)
        columns[name] = np.full((len(token_ids), width), fill, dtype=values_TK.dtype)
        listed = columns[name][:, : values_TK.shape[1]]
        listed[:] = np.where(inside_TK, values_TK, fill)[:, :width]
    if SUPPORT in widths:
        found_T = (columns[SUPPORT] == np.array(token_ids, dtype=np.int32)[:, None]).any(axis=1)
        mass_T = np.exp(logprobs_TK[:, : widths[SUPPORT]], dtype=np.float64).sum(axis=1)
        if not (found_T & (mass_T >= math.exp(-LOST_NATS))).all():
            raise DataError(
                f"vLLM sampled a token among more than generator.top_k = {widths[SUPPORT]} tokens, because several "
                "have exactly the same logit. The learner would compute other log-probs, so the group is not trained. "
                "If this happens often, set another generator.top_k",
                reason="support",
            )
    return columns
