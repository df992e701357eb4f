"""Speed of training steps, and the share of the GPU's peak speed that they reach (MFU).

`asyncrl.policy.flops` counts the operations, and has the peak speeds. Both are without sparsity, and activations are
not computed again.
"""

from collections.abc import Iterator

import torch
from transformers import Qwen2ForCausalLM

from asyncrl.policy.flops import model_cost, peak_flops_per_s
from asyncrl.ranks.packed import ATTENTION
from gpu.models import cast_weights, loss, random_model
from gpu.rows import GIB, Row, best_s
from gpu.sharding import one_rank, shard
from gpu.sizes import ModelShape, Size

STEPS = 5


def utilisation(size: Size) -> Iterator[Row]:
    """Measures forward, backward, clipping and AdamW with equally long rows, which need no padding."""
    device = torch.device(size.device)
    for shape in size.trained:
        model = random_model(shape, device=device)
        cast_weights(model, torch.bfloat16)
        yield _row(model, shape, size=size, way="weights and AdamW in bfloat16, not sharded", attention="sdpa")
        del model
    with one_rank(device):
        # first all rows without packing, so that they are measured even if packing fails
        for attention, rows in (("sdpa", "padded"), (ATTENTION, "packed")):
            way = f"{rows} rows, float32 master weights and AdamW, fully_shard, computes in bfloat16"
            for shape in size.trained:
                model = random_model(shape, device=device)
                shard(model, device=device, compute=torch.bfloat16)
                yield _row(model, shape, size=size, way=way, attention=attention)
                del model


def _row(model: Qwen2ForCausalLM, shape: ModelShape, *, size: Size, way: str, attention: str) -> Row:
    device = torch.device(size.device)
    model.set_attn_implementation(attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=device.type == "cuda")
    tokens_BS = torch.randint(shape.vocabulary, (size.trained_rows, size.trained_tokens), device=device)
    lengths_B = torch.full((size.trained_rows,), size.trained_tokens, device=device) if attention == ATTENTION else None

    def steps() -> None:
        for _ in range(STEPS):
            loss(model, tokens_BS, packed_lengths_B=lengths_B).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    step_s = best_s(steps, device=device, rounds=size.rounds) / STEPS
    cost = model_cost(model.config)
    assert cost is not None, "flops.py counts qwen2"
    rate = cost.flops([size.trained_tokens] * size.trained_rows, backward=True) / step_s
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    peak = peak_flops_per_s(name, dtype=torch.bfloat16)
    share = f"the peak of {name} is not known" if peak is None else f"MFU {rate / peak:.1%}"
    used = f"; {torch.cuda.max_memory_allocated(device) / GIB:.1f} GiB at the peak" if device.type == "cuda" else ""
    parameters = sum(each.numel() for each in model.parameters())
    return Row(
        f"{shape.name} ({parameters / 1e6:,.1f} million parameters), {size.trained_rows} rows of {size.trained_tokens} "
        f"tokens: {way}",
        f"{step_s * 1e3:.1f} ms a step, {tokens_BS.numel() / step_s:,.0f} tokens/s, {rate / 1e12:.3g} TFLOP/s, "
        f"{share}{used}",
    )
