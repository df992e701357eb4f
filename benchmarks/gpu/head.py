"""The chunked output head against full logits: speed, memory and error."""

from collections.abc import Iterator

import torch
from chunked_head import full_logprobs, logprobs_by, random_inputs

from gpu.rows import Row, best_s, check, memory
from gpu.sizes import Size


def head(size: Size) -> Iterator[Row]:
    """Measures forward and backward of the log-probs of random hidden states in bfloat16."""
    device, shape = torch.device(size.device), size.head
    hidden_ND, weight_VD, targets_N = random_inputs(
        dtype=torch.bfloat16, tokens=shape.tokens, width=shape.width, vocabulary=shape.vocabulary, device=device
    )
    with torch.no_grad():
        exact_N = full_logprobs(hidden_ND.float(), weight_VD.float(), targets_N)
    paths = [("full", 0)] + [(path, chunk) for chunk in shape.chunk_logits for path in ("chunked", "entropy")]
    full_s = full_error = 0.0
    for path, chunk_logits in paths:

        def run(path: str = path, chunk_logits: int = chunk_logits) -> torch.Tensor:
            hidden_ND.grad = weight_VD.grad = None
            logprobs_N = logprobs_by(path, hidden_ND, weight_VD, targets_N=targets_N, chunk_logits=chunk_logits)
            logprobs_N.sum().backward()  # type: ignore[no-untyped-call]
            return logprobs_N.detach()

        error_N = (run() - exact_N).abs()
        hidden_ND.grad = weight_VD.grad = None
        used = memory(run, device=device)
        seconds = best_s(run, device=device, rounds=size.rounds)
        error = float(error_N.mean())
        if path == "full":
            full_s, full_error = seconds, error
        label = {"full": "full logits", "chunked": f"chunks of {chunk_logits}", "entropy": "the same with the entropy"}
        yield Row(
            f"{label[path]}: {shape.tokens} tokens, width {shape.width}, vocabulary {shape.vocabulary}, bfloat16",
            f"{seconds * 1e3:.1f} ms, {full_s / seconds:.2f} times the speed of full logits; {used}; log-probs differ "
            f"from float32 by at most {float(error_N.max()):.1e} nats, by {error:.1e} on average",
        )
        check(error, at_most=4 * full_error + 1e-4, what=f"the mean error of {label[path]}")
