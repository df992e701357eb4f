"""The delta of a bucket between two steps: its size, and the speed of its encoder and decoder, which run on the CPU.

The weights are normal with standard deviation 0.02, in float32, and travel in bfloat16. A step is one of AdamW after
some steps with random gradients. Real gradients may change another share of the weights.
"""

from collections.abc import Iterator

import numpy as np
import torch

from asyncrl.weights.delta import decode, encode
from asyncrl.weights.manifest import Bytes
from gpu.rows import GB, CheckFailed, Row, best_s
from gpu.sizes import Size

STEPS_BEFORE = 4
LEARNING_RATES = (1e-6, 5e-6, 2e-5)


def deltas(size: Size) -> Iterator[Row]:
    """Encodes one step of a bucket for several learning rates."""
    cpu = torch.device("cpu")
    for learning_rate in LEARNING_RATES:
        base, new = _two_versions(size, learning_rate=learning_rate)
        delta = encode(base, new)
        if not np.array_equal(decode(base, delta), new):
            raise CheckFailed(f"the decoded delta of the rate {learning_rate} differs from the new bytes")
        encode_s = best_s(lambda: encode(base, new), device=cpu, rounds=size.rounds)  # noqa: B023
        decode_s = best_s(lambda: decode(base, delta), device=cpu, rounds=size.rounds)  # noqa: B023
        yield Row(
            f"bucket of {base.nbytes / 2**20:.0f} MiB, learning rate {learning_rate}",
            f"{(base.view('u2') != new.view('u2')).mean():.2%} of the elements change, {delta.nbytes / new.nbytes:.2%} "
            f"of the bytes travel; encoded with {new.nbytes / encode_s / GB:.2f} GB/s of the bucket's bytes, decoded "
            f"with {new.nbytes / decode_s / GB:.2f} GB/s",
        )


def _two_versions(size: Size, *, learning_rate: float) -> tuple[Bytes, Bytes]:
    """Returns the bytes of a bucket before and after a step."""
    device = torch.device(size.device)
    generator = torch.Generator(device).manual_seed(0)
    weights = torch.randn(size.bucket_bytes // 2, device=device, generator=generator).mul_(0.02).requires_grad_()
    optimizer = torch.optim.AdamW([weights], lr=learning_rate, weight_decay=0.0)

    def step() -> None:
        weights.grad = torch.randn(weights.shape, device=device, generator=generator)
        optimizer.step()

    for _ in range(STEPS_BEFORE):
        step()
    base = _sent(weights)
    step()
    return base, _sent(weights)


def _sent(weights: torch.Tensor) -> Bytes:
    sent: Bytes = weights.detach().bfloat16().view(torch.uint8).cpu().numpy()
    return sent
