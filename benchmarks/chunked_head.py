"""Compares the chunked output head with full float32 logits in memory and speed, at the vocabulary size of Qwen3.

    python benchmarks/chunked_head.py
    python benchmarks/chunked_head.py --tokens 512 --chunk-logits 4194304 16777216
    python benchmarks/chunked_head.py --threads 1 --dtypes bfloat16

It measures the forward and backward passes of next-token log-probs from hidden states, on the CPU. Each measurement
runs in a separate process. The memory is the peak of this process minus the peak of a process that only has the weight,
the hidden states and the gradients of both. In each round, all paths are measured in turn. The shortest time of each
path counts, because other work on the machine can only slow a measurement down; the speed is the ratio of these times.
The last column is the same ratio of the processor time of all threads, which other work changes little with
`--threads 1`. The path "reports entropy" also computes the entropy, but trains only on the log-probs, as the learner
does.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from asyncrl.policy.logprobs import CHUNK_LOGITS, head_logprobs

TEMPERATURE = 0.7


def full_logprobs(hidden_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    logits_NV = (hidden_ND @ weight_VD.t()).float() / TEMPERATURE
    return logits_NV.gather(1, targets_N.unsqueeze(1)).squeeze(1) - logits_NV.logsumexp(dim=1)


def random_inputs(
    *, dtype: torch.dtype, tokens: int, width: int, vocabulary: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns hidden states [N, D] and the head's weight [V, D], both of which require gradients, and targets [N]."""
    torch.manual_seed(0)
    hidden_ND = torch.randn(tokens, width, device=device).to(dtype).requires_grad_()
    # The weight is drawn in pieces, because float32 values for a whole bfloat16 weight would be the peak.
    weight_VD = torch.empty(vocabulary, width, dtype=dtype, device=device)
    for rows in weight_VD.split(1024):
        rows.copy_(torch.randn(rows.shape, device=device) / width**0.5)
    return hidden_ND, weight_VD.requires_grad_(), torch.randint(vocabulary, (tokens,), device=device)


def logprobs_by(
    path: str, hidden_ND: torch.Tensor, weight_VD: torch.Tensor, *, targets_N: torch.Tensor, chunk_logits: int
) -> torch.Tensor:
    """Returns the log-probs [N] by one of the paths `full`, `chunked` and `entropy`."""
    if path == "full":
        return full_logprobs(hidden_ND, weight_VD, targets_N)
    logprobs_N, *_ = head_logprobs(
        hidden_ND,
        weight_VD,
        targets_N=targets_N,
        temperature=TEMPERATURE,
        with_entropy=path == "entropy",
        chunk_logits=chunk_logits,
    )
    return logprobs_N


def peak_bytes() -> int:
    """Returns the peak memory of this process. ru_maxrss would include the parent's memory at the time of the fork."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def measure(path: str, *, dtype: torch.dtype, tokens: int, width: int, vocabulary: int, chunk_logits: int) -> None:
    """Measures one path and prints a JSON line with the peak bytes, the seconds of forward and backward, and the
    processor seconds of both."""
    hidden_ND, weight_VD, targets_N = random_inputs(
        dtype=dtype, tokens=tokens, width=width, vocabulary=vocabulary, device=torch.device("cpu")
    )
    # This warm-up makes libraries allocate their buffers, so that these are part of every process's memory.
    small_V = torch.randn(512, width, dtype=dtype, requires_grad=True)
    full_logprobs(hidden_ND[:64], small_V, targets_N[:64] % 512).sum().backward()
    hidden_ND.grad = None
    seconds = [0.0, 0.0, 0.0]
    if path == "nothing":
        hidden_ND.grad, weight_VD.grad = torch.ones_like(hidden_ND), torch.ones_like(weight_VD)
    else:
        upstream_N = torch.randn(tokens)
        started, started_processor = time.perf_counter(), time.process_time()
        logprobs_N = logprobs_by(path, hidden_ND, weight_VD, targets_N=targets_N, chunk_logits=chunk_logits)
        between = time.perf_counter()
        logprobs_N.backward(upstream_N)
        seconds = [between - started, time.perf_counter() - between, time.process_time() - started_processor]
    print(json.dumps({"bytes": peak_bytes(), "seconds": seconds}))


def in_child(
    path: str, *, dtype: str, arguments: argparse.Namespace, chunk_logits: int
) -> tuple[int, float, float, float]:
    command = [sys.executable, __file__, "--path", path, "--dtypes", dtype, "--chunk-logits", str(chunk_logits)]
    for name in ("tokens", "width", "vocabulary", "threads"):
        command += [f"--{name}", str(getattr(arguments, name))]
    result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=3600).stdout)
    return result["bytes"], *result["seconds"]


def compare(dtype: str, arguments: argparse.Namespace) -> None:
    paths = [("full", 0)] + [(path, size) for size in arguments.chunk_logits for path in ("chunked", "entropy")]
    base_bytes, *_ = in_child("nothing", dtype=dtype, arguments=arguments, chunk_logits=0)
    rounds = [
        [in_child(path, dtype=dtype, arguments=arguments, chunk_logits=size) for path, size in paths]
        for _ in range(arguments.rounds)
    ]
    print(f"{dtype}: {arguments.tokens} tokens, width {arguments.width}, vocabulary {arguments.vocabulary}")
    columns = f"{'memory':>10} {'of full':>8} {'forward':>9} {'backward':>9} {'both':>9} {'speed':>6} {'processor':>9}"
    print(f"{'':>28} {columns}")
    for index, (path, size) in enumerate(paths):
        runs = [row[index] for row in rounds]
        extra = max(run[0] for run in runs) - base_bytes
        of_full = extra / (max(row[0][0] for row in rounds) - base_bytes)
        forward, backward = (min(run[part] for run in runs) for part in (1, 2))
        both = min(run[1] + run[2] for run in runs)
        speed = min(row[0][1] + row[0][2] for row in rounds) / both
        processor = min(row[0][3] for row in rounds) / min(run[3] for run in runs)
        label = {"full": "full logits", "chunked": f"chunks of {size}", "entropy": "  reports entropy"}[path]
        print(
            f"{label:>28} {extra / 2**20:>6.0f} MiB {of_full:>8.3f} {forward:>7.2f} s {backward:>7.2f} s {both:>7.2f} s"
            f" {speed:>6.2f} {processor:>9.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--chunk-logits", type=int, nargs="+", default=[CHUNK_LOGITS["cpu"]])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--path", choices=["nothing", "full", "chunked", "entropy"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.path is None:
        for dtype in arguments.dtypes:
            compare(dtype, arguments)
    else:
        torch.set_num_threads(arguments.threads)
        measure(
            arguments.path,
            dtype=getattr(torch, arguments.dtypes[0]),
            tokens=arguments.tokens,
            width=arguments.width,
            vocabulary=arguments.vocabulary,
            chunk_logits=arguments.chunk_logits[0],
        )


if __name__ == "__main__":
    main()
