"""Measures tokens per second of one learner rank for each `learner.batching`, on rows whose lengths have a long tail.

    python benchmarks/packing.py
    python benchmarks/packing.py --width 512 --layers 8 --rows 256 --longest 2048

It measures forward and backward passes of log-probs. The rows are divided into micro-batches as in the learner, each
with at most the same number of tokens including padding. The way "in order" keeps the caller's order and pads to the
longest of all rows, as a loop without batching would. Lengths are lognormal, like those of completions of reasoning
models: most rows are short, and a few reach the limit. In each round, all ways are measured in turn; a ratio compares
the best rounds of two ways.
"""

import argparse
import time
from collections.abc import Callable

import torch
from row_lengths import long_tailed
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl.config.schema import LearnerSection
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.policy.logprobs import model_logprobs
from asyncrl.ranks.model_rows import ModelRows
from asyncrl.ranks.packed import ATTENTION
from asyncrl.ranks.plan import BatchingPlan

VOCABULARY = 4096


def ways(batch: BatchedDataDict, *, budget: int, longest: int) -> dict[str, list[BatchedDataDict]]:
    """Returns the micro-batches of each way. Each has at most `budget` tokens, including padding."""
    rows = budget // longest
    learner = {"micro_batch_size": rows, "micro_batch_tokens": budget}
    cut = {
        name: BatchingPlan.of(LearnerSection.model_validate({"batching": name, **learner})).micro_batches(batch)
        for name in ("padded", "dynamic", "packed")
    }
    return {"in order": [batch.slice(start, start + rows) for start in range(0, batch.size, rows)], **cut}


def small_model(*, width: int, layers: int, heads: int, key_heads: int) -> Qwen3ForCausalLM:
    """Returns a Qwen3 with random weights."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=key_heads,
            head_dim=width // heads,
        )
    )


def measured(work: Callable[[], None]) -> float:
    """Returns the seconds that `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--longest", type=int, default=512, help="tokens of the longest row")
    parser.add_argument("--budget", type=int, default=4096, help="largest number of tokens in a micro-batch")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    heads = arguments.width // 64
    model = small_model(width=arguments.width, layers=arguments.layers, heads=heads, key_heads=heads)
    lengths_B = long_tailed(arguments.rows, longest=arguments.longest)
    batch = BatchedDataDict(
        input_ids=torch.randint(VOCABULARY, (arguments.rows, arguments.longest)), input_lengths=lengths_B
    )
    cuts = ways(batch, budget=arguments.budget, longest=arguments.longest)
    tokens = int(lengths_B.sum())

    def run(name: str, parts: list[BatchedDataDict]) -> None:
        model.set_attn_implementation(ATTENTION if name == "packed" else "sdpa")
        for part in parts:
            rows = ModelRows.of(part, packed=name == "packed")
            logprobs_BT, *_ = model_logprobs(model, rows, temperature=1.0, with_entropy=False)
            logprobs_BT.sum().backward()
        model.zero_grad()

    best = dict.fromkeys(cuts, float("inf"))
    for _ in range(arguments.rounds):
        for name, parts in cuts.items():
            best[name] = min(best[name], measured(lambda name=name, parts=parts: run(name, parts)))  # type: ignore[misc]
    print(f"{arguments.rows} rows, {tokens} tokens, median {int(lengths_B.median())}, longest {int(lengths_B.max())}")
    print(f"{'':10} {'passes':>7} {'computed':>9} {'tokens/s':>9} {'ratio':>6}")
    for name, parts in cuts.items():
        computed = tokens if name == "packed" else sum(part["input_ids"].numel() for part in parts)
        speed = tokens / best[name]
        print(f"{name:10} {len(parts):7} {computed:9} {speed:9.0f} {best['in order'] / best[name]:6.2f}")


if __name__ == "__main__":
    main()
