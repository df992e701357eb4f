"""Packed attention: log-probs and gradients in bfloat16 against float32 on the CPU, and speed against padded rows.

Legend: B rows, S tokens, T = S − 1, M real tokens that have a log-prob.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace

import torch
from row_lengths import long_tailed
from transformers import Qwen2ForCausalLM

from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.policy.logprobs import model_logprobs
from asyncrl.ranks.model_rows import ModelRows
from asyncrl.ranks.packed import ATTENTION
from gpu.models import cast_weights, random_model
from gpu.rows import Row, best_s, check
from gpu.sizes import AttentionSize, Size

GROUP_SIZE = 4
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def attention(size: Size) -> Iterator[Row]:
    """Measures a model with as many heads of keys as of queries."""
    model = replace(size.attention.model, key_heads=size.attention.model.heads)
    yield from _measured(replace(size.attention, model=model), device=torch.device(size.device), rounds=size.rounds)


def grouped_attention(size: Size) -> Iterator[Row]:
    """Measures a model with fewer heads of keys than of queries, such as Qwen."""
    yield from _measured(size.attention, device=torch.device(size.device), rounds=size.rounds)


def _measured(size: AttentionSize, *, device: torch.device, rounds: int) -> Iterator[Row]:
    yield from _numerics(size, device=device)
    yield from _speed(size, device=device, rounds=rounds)


def _numerics(size: AttentionSize, *, device: torch.device) -> Iterator[Row]:
    reference = random_model(size.model, device=torch.device("cpu"))
    for dtype in (torch.bfloat16, torch.float32):  # bfloat16 can express the weights of all models that are compared
        cast_weights(reference, dtype)
    tokens_BS, lengths_B = _grouped_rows(size)
    expected_M = _forward_backward(reference, tokens_BS, lengths_B, packed=False)
    expected_gradient = _gradient(reference)
    yield Row(
        f"{size.model.name}, {size.model.heads} heads, {size.model.key_heads} of keys",
        f"{len(expected_M)} log-probs of {len(tokens_BS)} rows are compared; {GROUP_SIZE} rows each share a prompt",
    )
    for label, dtype in PRECISIONS.items():
        model = copy.deepcopy(reference).to(device)  # type: ignore[arg-type]
        cast_weights(model, dtype)
        means, gradients = {}, {}
        for way in ("padded", "packed"):
            model.zero_grad()
            found_M = _forward_backward(model, tokens_BS, lengths_B, packed=way == "packed")
            apart_M = (found_M.cpu() - expected_M).abs()
            means[way] = float(apart_M.mean())
            gradients[way] = float((_gradient(model) - expected_gradient).norm() / expected_gradient.norm())
            yield Row(
                f"{way}, {label}, against padded rows in float32 on the CPU",
                f"log-probs differ by at most {float(apart_M.max()):.1e} nats, by {means[way]:.1e} on average; "
                f"the gradient by {gradients[way]:.1e} of its norm",
            )
        check(means["packed"], at_most=2 * means["padded"] + 1e-5, what=f"the mean difference of packed rows, {label},")
        limit = 2 * gradients["padded"] + 1e-5
        check(gradients["packed"], at_most=limit, what=f"the difference of the gradient of packed rows, {label},")


def _grouped_rows(size: AttentionSize) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens [B, S], padded on the right, and lengths [B]. The rows of a group begin with the same prompt."""
    prompts = torch.randint(size.model.vocabulary, (size.groups, size.prompt)).repeat_interleave(GROUP_SIZE, dim=0)
    answers = torch.randint(size.model.vocabulary, (len(prompts), size.answer))
    return torch.cat((prompts, answers), dim=1), size.prompt + torch.randint(1, size.answer + 1, (len(prompts),))


def _forward_backward(
    model: Qwen2ForCausalLM, tokens_BS: torch.Tensor, lengths_B: torch.Tensor, *, packed: bool
) -> torch.Tensor:
    """Returns the log-probs [M], and adds the gradient of their sum to the parameters' gradients."""
    model.set_attn_implementation(ATTENTION if packed else "sdpa")
    tokens_BS, lengths_B = tokens_BS.to(model.device), lengths_B.to(model.device)
    rows = ModelRows.of(BatchedDataDict(input_ids=tokens_BS, input_lengths=lengths_B), packed=packed)
    logprobs_BT, *_ = model_logprobs(model, rows, temperature=1.0, with_entropy=False)
    real_BT = torch.arange(1, tokens_BS.shape[1], device=model.device) < lengths_B.unsqueeze(1)
    (logprobs_BT * real_BT).sum().backward()  # type: ignore[no-untyped-call]
    return logprobs_BT.detach()[real_BT]


def _gradient(model: Qwen2ForCausalLM) -> torch.Tensor:
    """Returns the gradient of all parameters in one float32 vector on the CPU."""
    return torch.cat([each.grad.float().flatten().cpu() for each in model.parameters() if each.grad is not None])


def _speed(size: AttentionSize, *, device: torch.device, rounds: int) -> Iterator[Row]:
    model = random_model(size.model, device=device)
    cast_weights(model, torch.bfloat16)
    lengths_B = long_tailed(size.rows, longest=size.longest)
    tokens_BS = torch.randint(size.model.vocabulary, (size.rows, size.longest))
    speeds = {}
    for way in ("padded", "packed"):
        packed = way == "packed"
        parts = micro_batches(lengths_B, budget=size.budget, padded=not packed)

        def run(parts: list[list[int]] = parts, packed: bool = packed) -> None:
            for rows in parts:
                longest = int(lengths_B[rows].max())
                _forward_backward(model, tokens_BS[rows, :longest], lengths_B[rows], packed=packed)

        speeds[way] = int(lengths_B.sum()) / best_s(run, device=device, rounds=rounds)
        yield Row(
            f"{way}, bfloat16: forward and backward of {size.rows} rows with lengths up to {int(lengths_B.max())}, "
            f"median {int(lengths_B.median())}",
            f"{speeds[way]:,.0f} tokens/s in {len(parts)} passes",
        )
    yield Row(
        "speed of packed rows over padded rows that are sorted by length", f"{speeds['packed'] / speeds['padded']:.2f}"
    )


def micro_batches(lengths_B: torch.Tensor, *, budget: int, padded: bool) -> list[list[int]]:
    """Divides rows into micro-batches of at most `budget` tokens. A longer row has one of its own. Padded rows are
    sorted by length, and their padding counts."""
    lengths = lengths_B.tolist()
    order = sorted(range(len(lengths)), key=lengths.__getitem__) if padded else range(len(lengths))
    parts: list[list[int]] = []
    for row in order:
        together = [*(parts[-1] if parts else []), row]
        tokens = len(together) * lengths[row] if padded else sum(lengths[each] for each in together)
        if parts and tokens <= budget:
            parts[-1] = together
        else:
            parts.append([row])
    return parts
