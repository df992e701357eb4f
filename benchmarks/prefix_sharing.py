"""Measures how much faster packed rows are if the rows of a group compute their prompt once.

    python benchmarks/prefix_sharing.py
    python benchmarks/prefix_sharing.py --prompt 7 --answer 5 --groups 48 --width 64 --heads 2 --rounds 15

It measures forward and backward passes of log-probs and entropies of one micro-batch. "alone" has the same rows, except
that each row has another first token, so no row shares anything. In each round, both are measured in turn; the
ratio compares their best rounds. Answers have 1 to 2 · `--answer` − 1 tokens.
"""

import argparse
import time

import torch
from packing import VOCABULARY, small_model

from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.policy.logprobs import model_logprobs
from asyncrl.ranks.model_rows import ModelRows
from asyncrl.ranks.packed import ATTENTION, PackedRows


def rows(*, groups: int, group_size: int, prompt: int, answer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the tokens of all rows, padded on the right, and their lengths."""
    prompts = torch.randint(VOCABULARY, (groups, prompt)).repeat_interleave(group_size, dim=0)
    answers = torch.randint(VOCABULARY, (len(prompts), 2 * answer - 1))
    return torch.cat((prompts, answers), dim=1), prompt + torch.randint(1, 2 * answer, (len(prompts),))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--answer", type=int, default=64, help="mean number of tokens of an answer")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    heads = arguments.heads
    model = small_model(width=arguments.width, layers=arguments.layers, heads=heads, key_heads=heads // 2)
    model.set_attn_implementation(ATTENTION)
    shared_BS, lengths_B = rows(
        groups=arguments.groups, group_size=arguments.group_size, prompt=arguments.prompt, answer=arguments.answer
    )
    alone_BS = shared_BS.clone()
    alone_BS[:, 0] = torch.randperm(VOCABULARY)[: len(alone_BS)]
    ways = {"alone": alone_BS, "shared": shared_BS}
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(arguments.rounds):
        for name, tokens_BS in ways.items():
            start = time.perf_counter()
            packed = ModelRows.of(BatchedDataDict(input_ids=tokens_BS, input_lengths=lengths_B), packed=True)
            logprobs_BT, _, _ = model_logprobs(model, packed, temperature=1.0, with_entropy=True)
            logprobs_BT.sum().backward()
            best[name] = min(best[name], time.perf_counter() - start)
            model.zero_grad()
    print(f"{len(shared_BS)} rows, {int(lengths_B.sum())} tokens")
    print(f"{'':7} {'computed':>9} {'s':>7} {'ratio':>6}")
    for name, tokens_BS in ways.items():
        computed = PackedRows.of(tokens_BS, lengths_B=lengths_B).input_ids_1N.numel()
        print(f"{name:7} {computed:9} {best[name]:7.3f} {best['alone'] / best[name]:6.2f}")


if __name__ == "__main__":
    main()
