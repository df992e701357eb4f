"""Plants faults in the weights of a real engine, and shows which check of `weights.parity_*` finds each.

    python benchmarks/parity_faults.py models/SmolLM2-135M-Instruct
    python benchmarks/parity_faults.py models/SmolLM2-135M-Instruct --lora
    python benchmarks/parity_faults.py models/SmolLM2-135M-Instruct --qwen2
    python benchmarks/parity_faults.py models/SmolLM2-135M-Instruct --healthy 1000

A rank of the learner and a vLLM engine hold the same weights. First both are healthy, which gives the units. Then the
learner trains some steps, and the engine gets its weights: healthy, or with a fault, such as layers that stayed as they
were. After each, the script does what a run does: it reads live parameters back, scores the probe, and compares the
log-probs of tokens that the engine samples. It prints the judged numbers as shares of their limits: above 1 the check
finds the fault.

The columns: live parameters that differ; the probe; the size of the differences of sampled tokens; their mean
importance weight; what the probe and the sampled tokens say if this is the first update; the mean difference of the
probe, and mean, root mean square and largest difference of the sampled tokens, nats.

--qwen2 makes a model of Qwen2's form with 24 layers, random weights and random biases. --healthy N plants nothing: it
loads N updates with two short samples each, and counts those that a check refuses. Every twentieth update is a training
step. In the others each weight moves by the learning rate, up or down at random, as in AdamW's first step.
"""

import argparse
import asyncio
import dataclasses
import math
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from torch.distributed.tensor import DTensor

from asyncrl.algorithms.interfaces import LossInputType, LossType, masked_mean
from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.data import BatchedDataDict
from asyncrl.data.tokenizer import encode_prompt, load_tokenizer
from asyncrl.generation.vllm_engine import VLLMEngine, prepare_environment
from asyncrl.policy.lm_policy import Policy
from asyncrl.policy.worker import PolicyWorker
from asyncrl.weights.manifest import Manifest, Probe, layout
from asyncrl.weights.parity import POOLED_TOKENS, Differences, ParityJudge, ParityLimits
from asyncrl.weights.publisher import snapshot_of
from asyncrl.weights.staging import StagedWeights

Weights = dict[str, torch.Tensor]

EXAMPLES = "3 + 4 = 7\n11 + 6 = 17\n8 + 8 = 16\n"
PROBE_TASKS, PROMPTS, SAMPLES, NEW_TOKENS = 4, 24, 4, 24
COLUMNS = ("live", "probe", "size", "importance", "first", "probe nats", "mean nats", "rms nats", "max nats")
RARE_NATS, TOO_HIGH_NATS = -5.0, 3.0
TRAINED_EVERY = 20


class NegativeLogLikelihood:
    """The loss of supervised training. It moves the weights as a run does."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGPROB

    def __call__(
        self, *, next_token_logprobs: Any, data: Any, global_valid_seqs: Any, global_valid_toks: Any
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        mask = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)
        return -masked_mean(next_token_logprobs, mask, global_normalization_factor=global_valid_toks), {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Judges:
    """The judges of a replica's probe and of the learner's steps."""

    probe: ParityJudge
    steps: ParityJudge

    @classmethod
    def of(cls, config: Config) -> "Judges":
        limits = ParityLimits.of(config)
        return cls(probe=ParityJudge(limits), steps=ParityJudge(limits, least_tokens=POOLED_TOKENS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the checks say: the number of live parameters that differ, and judged numbers as shares of their limits.
    `first` is that of a first update, which has no unit yet."""

    differing: int
    probe: float
    size: float
    importance: float
    first: float


class Bench:
    """A learner's rank and an engine. `published` are the learner's weights, in the engine's precision."""

    def __init__(self, config: Config, policy: Policy, engine: VLLMEngine) -> None:
        self.config, self.policy, self.engine = config, policy, engine
        self.entries = layout(policy.weights_metadata())
        tokenizer: Any = load_tokenizer(config.model.path)
        sums = [(f"{EXAMPLES}{a} + {b} =", f" {a + b}") for a in range(1, 19, 2) for b in range(2, 22, 3)]
        self.prompts = [encode_prompt(tokenizer, prompt) for prompt, _ in sums[:PROMPTS]]
        self.rows = [
            (encode_prompt(tokenizer, prompt), encode_prompt(tokenizer, prompt + answer)) for prompt, answer in sums
        ]
        self.probe = [whole for _, whole in self.rows[:PROBE_TASKS]]
        self.judges = Judges.of(config)
        self.loads = 0
        self.published: Weights = {}

    def publish(self) -> None:
        [found] = self.policy.ranks.call(weights_of)
        self.published = found

    def train(self, steps: int, *, first: int = 0, rows: int = 8) -> None:
        pad = max(len(whole) for _, whole in self.rows)
        loss = NegativeLogLikelihood()
        for step in range(first, first + steps):
            chosen = [self.rows[(rows * step + i) % len(self.rows)] for i in range(rows)]
            ids, mask = torch.zeros(rows, pad, dtype=torch.long), torch.zeros(rows, pad)
            for row, (prompt, whole) in enumerate(chosen):
                ids[row, : len(whole)] = torch.tensor(whole)
                mask[row, len(prompt) : len(whole)] = 1.0
            lengths = torch.tensor([len(whole) for _, whole in chosen])
            batch = BatchedDataDict(input_ids=ids, input_lengths=lengths, token_mask=mask, sample_mask=torch.ones(rows))
            self.policy.train(batch, loss, gbs=rows)

    def staged(self, weights: Weights) -> tuple[Manifest, StagedWeights]:
        shards = [(name, 0, weights[name]) for name in weights]
        snapshot = snapshot_of(shards, self.entries, bucket_bytes=self.config.weights.bucket_bytes)
        manifest = Manifest(
            version=Version(1, self.loads),
            tensors=snapshot.entries,
            buckets=snapshot.described(),
            probe=Probe(tokens=(), logprobs=()),
        )
        memory = StagedWeights()
        memory.begin(manifest)
        for part, data in zip(memory.missing, snapshot.buckets, strict=True):
            memory.put(part, data)
        return manifest, memory

    async def load(self, weights: Weights) -> None:
        self.loads += 1
        await self.engine.load(*self.staged(weights))

    async def judged(self, name: str, *, reported: Callable[[float], float] = lambda nats: nats) -> Found:
        """Prints and returns what each check says about the weights that are in the engine. `reported` changes the
        log-probs that the engine reports for its samples."""
        found, probe, sampled, live = await self.checked(reported=reported)
        cells = [
            name,
            f"{found.differing} of {live}",
            *(f"{each:.2f}" for each in (found.probe, found.size, found.importance, found.first)),
            f"{probe.sum_nats / probe.tokens:.4f}",
            f"{sampled.sum_nats / sampled.tokens:.4f}",
            f"{math.sqrt(sampled.sum_squares / sampled.tokens):.4f}",
            f"{sampled.max_nats:.2f}",
        ]
        print("| " + " | ".join(cells) + " |", flush=True)
        return found

    async def checked(
        self,
        *,
        reported: Callable[[float], float] = lambda nats: nats,
        prompts: int = PROMPTS,
        samples: int = SAMPLES,
        tokens: int = NEW_TOKENS,
    ) -> tuple[Found, Differences, Differences, int]:
        """Returns what each check says, the differences of the probe and of sampled tokens, and the number of live
        parameters that were read back."""
        live = await self.engine.read_back(*self.staged(self.published))
        scores = await asyncio.gather(*[self.engine.score(tokens) for tokens in self.probe])
        ours = self.policy.ranks.call(PolicyWorker.probe, self.probe)[0]
        probe = Differences.of(
            abs(engine - learner)
            for row, own in zip(scores, ours, strict=True)
            for engine, learner in zip(row, own, strict=True)
        )
        sampled, first = await self._sampled(reported, self.prompts[:prompts], samples, tokens), Judges.of(self.config)
        of_size = self.judges.steps.judge(dataclasses.replace(sampled, weight_excess=0.0, weight_excess_squares=0.0))
        found = Found(
            differing=len(live.differing),
            probe=self.judges.probe.judge(probe).ratio,
            size=of_size.ratio,
            importance=sampled.weight_ratio(),
            first=max(first.probe.judge(probe).ratio, first.steps.judge(sampled).ratio),
        )
        return found, probe, sampled, len(live.alike | live.differing)

    async def _sampled(
        self, reported: Callable[[float], float], asked: Sequence[list[int]], samples: int, tokens: int
    ) -> Differences:
        """Compares the tokens that the engine samples now for the prompts `asked`."""
        groups = await asyncio.gather(
            *[
                self.engine.generate(prompt, n=samples, seed=1000 * self.loads + i, temperature=1.0, max_tokens=tokens)
                for i, prompt in enumerate(asked)
            ]
        )
        rows = [(prompt, completion) for prompt, group in zip(asked, groups, strict=True) for completion in group]
        width = max(len(prompt) + len(completion.token_ids) for prompt, completion in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        for row, (prompt, completion) in enumerate(rows):
            whole = [*prompt, *completion.token_ids]
            ids[row, : len(whole)] = torch.tensor(whole)
        lengths = torch.tensor([len(prompt) + len(completion.token_ids) for prompt, completion in rows])
        ours_BS = self.policy.get_logprobs(BatchedDataDict(input_ids=ids, input_lengths=lengths))["logprobs"]
        nats: list[float] = []
        for row, (prompt, completion) in enumerate(rows):
            own = ours_BS[row, len(prompt) : len(prompt) + len(completion.token_ids)].tolist()
            nats += [a - reported(b) for a, b in zip(own, completion.logprobs, strict=True)]
        excess = [math.expm1(each) for each in nats]
        return Differences.of(map(abs, nats)) + Differences(
            weight_excess=math.fsum(excess), weight_excess_squares=math.fsum(each * each for each in excess)
        )


def weights_of(worker: PolicyWorker) -> Weights:
    return {name: tensor.clone() for name, tensor in worker.gather_weights()}


def move_weights(worker: PolicyWorker, rate: float, seed: int) -> None:
    """Moves each weight up or down by `rate`, as the first steps of AdamW do."""
    generator = np.random.default_rng(seed)
    with torch.no_grad():
        for parameter in worker.model.parameters():
            own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            drawn = np.frombuffer(generator.bytes(-(-own.numel() // 8)), dtype=np.uint8)
            ups = torch.from_numpy(np.unpackbits(drawn, count=own.numel())).view(own.shape)
            own.add_(ups.to(own.dtype).mul_(2.0).sub_(1.0), alpha=rate)


def mixed(new: Weights, old: Weights, is_old: Callable[[str], bool]) -> Weights:
    return {name: old[name] if is_old(name) else tensor for name, tensor in new.items()}


def layer_of(name: str) -> int:
    parts = name.split(".")
    return int(parts[parts.index("layers") + 1]) if "layers" in parts else -1


def exchanged(weights: Weights, one: int, other: int) -> Weights:
    to = {one: other, other: one}
    return {
        name: weights[name.replace(f"layers.{layer_of(name)}.", f"layers.{to.get(layer_of(name), layer_of(name))}.")]
        for name in weights
    }


def permuted(weights: Weights, part: str) -> Weights:
    name = next(name for name in weights if part in name)
    return weights | {name: weights[name].roll(1, dims=0).contiguous()}


def bucket(names: Iterable[str], weights: Weights, nbytes: int) -> set[str]:
    """Returns the tensors of one bucket in the middle of the model."""
    ordered = list(names)
    found, size = set[str](), 0
    for name in ordered[len(ordered) // 2 :]:
        found.add(name)
        size += weights[name].nbytes
        if size >= nbytes:
            break
    return found


async def with_faults(bench: Bench, steps: int) -> None:
    bench.publish()
    before = bench.published
    await bench.load(before)
    await bench.judged("healthy, version 0")
    await bench.judged("healthy, version 0, again")
    for part in (
        () if bench.config.model.lora else ("layers.3.self_attn.o_proj.weight", "layers.20.mlp.down_proj.weight")
    ):
        await bench.load(permuted(before, part))
        await bench.judged(f"version 0, rows of {part} moved by one")
    started_s = time.monotonic()
    await asyncio.to_thread(bench.train, steps)
    bench.publish()
    after = bench.published
    moved = math.sqrt(sum(float((after[name].float() - before[name].float()).square().sum()) for name in after))
    norm = math.sqrt(sum(float(tensor.float().square().sum()) for tensor in before.values()))
    print(
        f"{steps} steps in {time.monotonic() - started_s:.0f} s moved the weights by {moved / norm:.1e} of their norm"
    )
    await bench.load(after)
    await bench.judged(f"healthy, version {steps}")
    embeddings = {name for name in after if "embed_tokens" in name or "lm_head" in name}
    old_bucket = bucket((name for name in after if name not in embeddings), after, bench.config.weights.bucket_bytes)
    if bench.config.model.lora is not None:
        await bench.load(before)
        await bench.judged("the adapter left out")
        return
    faults: dict[str, Weights] = {
        f"all weights older by {steps} steps": before,
        f"layers 0 to 9 older by {steps} steps": mixed(after, before, lambda name: 0 <= layer_of(name) < 10),
        "layers 4 and 5 exchanged": exchanged(after, 4, 5),
        "rows of a matrix moved by one": permuted(after, "layers.9.self_attn.k_proj.weight"),
        f"one bucket ({len(old_bucket)} tensors) older": mixed(after, before, lambda name: name in old_bucket),
        "the embedding older": mixed(after, before, lambda name: name in embeddings),
    }
    for name, weights in faults.items():
        await bench.load(weights)
        await bench.judged(name)
    await bench.load(after)
    await bench.judged(
        "tokens rarer than e^-5 reported 3 nats too high",
        reported=lambda nats: nats + TOO_HIGH_NATS if nats < RARE_NATS else nats,
    )
    await bench.judged(f"healthy, version {steps}, again")


async def healthy(bench: Bench, updates: int) -> None:
    """Loads healthy updates, and prints how many were refused and the largest share of a limit of each check."""
    largest = dict.fromkeys(("probe", "size", "importance"), 0.0)
    refused, started_s, rate = 0, time.monotonic(), bench.config.learner.optimizer.learning_rate
    for update in range(updates):
        if update % TRAINED_EVERY == 0:
            await asyncio.to_thread(bench.train, 1, first=update, rows=1)
        else:
            bench.policy.ranks.call(move_weights, rate, update)
        bench.publish()
        await bench.load(bench.published)
        found, *_ = await bench.checked(prompts=1, samples=2, tokens=8)
        shares = {name: getattr(found, name) for name in largest}
        largest = {name: max(largest[name], share) for name, share in shares.items()}
        refused += found.differing > 0 or max(shares.values()) > 1.0
        if (update + 1) % 50 == 0 or update + 1 == updates:
            words = ", ".join(f"{name} {share:.2f}" for name, share in largest.items())
            took_s = time.monotonic() - started_s
            print(f"{update + 1} updates in {took_s:.0f} s: {refused} refused; largest shares: {words}", flush=True)


async def without_biases(bench: Bench) -> None:
    bench.publish()
    await bench.load(bench.published)
    await bench.judged("healthy, version 0")
    await bench.judged("healthy, version 0, again")
    for layers, words in ((range(24), "all layers"), (range(1), "layer 0"), (range(23, 24), "layer 23")):
        missing = {
            name: torch.zeros_like(tensor) if name.endswith(".bias") and layer_of(name) in layers else tensor
            for name, tensor in bench.published.items()
        }
        await bench.load(missing)
        await bench.judged(f"biases of {words} missing")


def make_qwen2(folder: Path, tokenizer_of: str) -> str:
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=448, intermediate_size=1216, num_hidden_layers=24,
            num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=2048,
        )
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(0.0, 0.5)
            elif parameter.ndim == 2:
                parameter.mul_(2.0)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def configured(path: str, *, dtype: str = "bfloat16", steps: int = 30, lora: bool = False) -> Config:
    """Returns the configuration of the rank and the engine, with the default limits of `weights.parity_*`."""
    adapter: dict[str, Any] = {"lora": {"rank": 8}} if lora else {}
    return Config.model_validate(
        {
            "model": {"path": path, "dtype": dtype, "max_length": 160} | adapter,
            "generator": {"max_concurrent_groups": PROMPTS, "kv_cache_gib": 1.0},
            "learner": {
                "group_size": SAMPLES, "threads": 2, "batching": "packed", "micro_batch_tokens": 2048,
                "total_steps": steps, "collective_timeout_s": 600.0,
                "optimizer": {"learning_rate": 3e-4 if lora else 3e-5, "warmup_steps": 3},
            },
            "weights": {"load_timeout_s": 300.0},
        }
    )  # fmt: skip


@asynccontextmanager
async def started(config: Config) -> AsyncIterator[Bench]:
    """Starts the rank and the engine. Ray must run, and `prepare_environment` must have been called."""
    policy = Policy(config, model_path=config.model.path)
    policy.start()
    try:
        engine = await VLLMEngine.start(config, model_path=config.model.path)
        try:
            yield Bench(config, policy, engine)
        finally:
            await engine.shutdown()
    finally:
        policy.shutdown()


async def run(config: Config, arguments: argparse.Namespace) -> None:
    async with started(config) as bench:
        if arguments.healthy:
            await healthy(bench, arguments.healthy)
            return
        print("| weights of the engine | " + " | ".join(COLUMNS) + " |\n|" + "---|" * (len(COLUMNS) + 1))
        await (without_biases(bench) if arguments.qwen2 else with_faults(bench, arguments.steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model", help="folder of a model in Hugging Face's form; with --qwen2 only its tokenizer is used"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--healthy", type=int, default=0, metavar="N", help="load N healthy updates, without a fault")
    parser.add_argument("--lora", action="store_true", help="train an adapter, and leave it out")
    parser.add_argument("--qwen2", action="store_true", help="a model of Qwen2's form with biases")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = make_qwen2(Path(folder) / "model", arguments.model) if arguments.qwen2 else arguments.model
        steps = arguments.healthy or arguments.steps
        config = configured(path, dtype=arguments.dtype, steps=steps, lora=arguments.lora)
        prepare_environment(config)
        ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
        try:
            asyncio.run(run(config, arguments))
        finally:
            ray.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
