"""Measures what a checkpoint costs the learner's steps: the time for which training waits, and the slowdown of the
steps that run while the files are written.

    python benchmarks/checkpoint_cost.py [--ranks 2] [--rounds 9]

The script starts the ranks of a Qwen3 with about 100 million parameters in float32, and makes one AdamW step, after
which the optimizer has its state. Each round then measures, in this order:

- `memcpy`: every rank copies as many bytes as its checkpoint has from one block of memory to another, all ranks at the
  same time. Both blocks are in use from the first round on. The time is that of the slowest rank.
- `stage`: the call for which training waits, as the learner makes it. The first one also gets memory from the system.
- `alone`: training steps while nothing is written.
- `beside`: training steps while the copies are written to a disk, and how long the writing takes.

The claim is that the median of `stage` is at most three times the median of `memcpy`. The ratio of steps beside a write
and alone depends on the number of free cores, because the ranks' threads for writing use a core, too.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ray
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from asyncrl.algorithms.interfaces import LossFunction
from asyncrl.algorithms.loss import build_loss
from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.policy.lm_policy import Policy
from asyncrl.policy.worker import PolicyWorker

MIB = 2**20
VOCABULARY = 32_000
ROWS, TOKENS = 2, 16


def make_model(path: Path) -> int:
    """Writes a model with random weights and a tokenizer. Returns the number of parameters."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=768,
        intermediate_size=2304,
        num_hidden_layers=10,
        num_attention_heads=12,
        num_key_value_heads=6,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=128,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="a").save_pretrained(path)
    return sum(parameter.numel() for parameter in model.parameters())


def rows() -> BatchedDataDict:
    """Returns random rows, with log-probs that are roughly those of a random model."""
    ids_BS = torch.randint(VOCABULARY, (ROWS, TOKENS), generator=torch.manual_seed(0))
    mask_BS = torch.ones(ROWS, TOKENS)
    mask_BS[:, 0] = 0.0
    logprobs_BS = -torch.log(torch.tensor(float(VOCABULARY))) * mask_BS
    return BatchedDataDict(
        input_ids=ids_BS,
        input_lengths=torch.full((ROWS,), TOKENS),
        token_mask=mask_BS,
        sample_mask=torch.ones(ROWS),
        generation_logprobs=logprobs_BS,
        prev_logprobs=logprobs_BS,
        advantages=torch.randn(ROWS, 1).expand(ROWS, TOKENS).contiguous() * mask_BS,
    )


def memcpy(worker: PolicyWorker) -> tuple[int, float]:
    """Copies as many bytes as this rank's checkpoint has. Returns the bytes and the seconds."""
    copies = (worker._state._weight_copies, worker._state._moment_copies)
    nbytes = sum(copy.nbytes for each in copies for copy in each._copies.values())
    blocks = getattr(worker, "blocks", None)
    if blocks is None:
        blocks = worker.blocks = (torch.ones(nbytes // 4), torch.ones(nbytes // 4))  # type: ignore[attr-defined]
    worker.gather(None)  # the ranks begin together
    started_s = time.perf_counter()
    blocks[1].copy_(blocks[0])
    return nbytes, time.perf_counter() - started_s


def timed(call: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s


def steps_beside(train: Callable[[], object], write: Callable[[], object]) -> tuple[list[float], float]:
    """Returns the seconds of the steps that ran while `write` ran, and the seconds of `write`."""
    with ThreadPoolExecutor(1) as saving:
        writing = saving.submit(timed, write)
        steps = [timed(train)]
        while not writing.done():
            steps.append(timed(train))
    return steps, writing.result()


def measure(policy: Policy, loss: LossFunction, folder: Path, *, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each part, one for each round; of the steps, one for each step."""
    data = rows()
    measured: dict[str, list[float]] = {name: [] for name in ("memcpy", "stage", "alone", "beside", "write")}

    def train() -> object:
        return policy.train(data, loss, gbs=ROWS)

    train()
    print(f"stage, the first time: {timed(policy.stage_checkpoint):.3f} s")
    ranks = policy.ranks.call(memcpy)
    print(f"copied by each rank: {', '.join(f'{nbytes / MIB:.0f} MiB' for nbytes, _ in ranks)}")
    for number in range(rounds):
        measured["memcpy"].append(max(seconds for _, seconds in policy.ranks.call(memcpy)))
        measured["stage"].append(timed(policy.stage_checkpoint))
        measured["alone"] += [timed(train) for _ in range(3)]
        path = folder / str(number)
        steps, write_s = steps_beside(train, lambda at=path: policy.write_checkpoint(at / "weights", at / "optimizer"))  # type: ignore[misc]
        measured["beside"] += steps
        measured["write"].append(write_s)
        shutil.rmtree(path)
        newest = {name: f"{seconds[-1]:.3f}" for name, seconds in measured.items()}
        print(f"round {number}: {newest}, {len(steps)} steps beside", flush=True)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="checkpoint-cost-") as name:
        folder = Path(name)
        parameters = make_model(folder / "model")
        print(f"{parameters / 1e6:.0f} million parameters, {arguments.ranks} ranks, AdamW, float32")
        config = Config.model_validate({"learner": {"ranks": arguments.ranks, "collective_timeout_s": 300.0}})
        ray.init("local", num_cpus=arguments.ranks, include_dashboard=False, log_to_driver=False)
        policy = Policy(config, model_path=str(folder / "model"))
        try:
            policy.start()
            measured = measure(policy, build_loss(config), folder, rounds=arguments.rounds)
        finally:
            policy.shutdown()
            ray.shutdown()
    median = {part: statistics.median(seconds) for part, seconds in measured.items()}
    for part, seconds in measured.items():
        print(f"{part}: median {median[part]:.3f} s, {min(seconds):.3f} to {max(seconds):.3f} s, {len(seconds)} times")
    print(f"stage / memcpy: {median['stage'] / median['memcpy']:.2f}")
    print(f"step beside a write / step alone: {median['beside'] / median['alone']:.2f}")


if __name__ == "__main__":
    main()
