"""Compares `weights.kv_cache: keep` with `recompute`: the error of log-probs after an update in the middle of
sequences, and the speed of generation.

    python benchmarks/kv_cache.py --write

A small Qwen3 is first trained on long texts: words, each with its reverse. Each update of its weights is one further
step of AdamW. A vLLM engine samples sequences of some hundred tokens, and gets the update in their middle. The script
then computes the log-probs of the sampled tokens with the new weights, as a learner does. The error of a token is the
absolute difference to the log-prob with which the engine has sampled it. With `recompute` this is rounding only.

For the speed, the engine samples a fixed number of sequences, and gets an update every half second. `--write` puts both
tables into docs/weights.md.
"""

import argparse
import asyncio
import contextlib
import copy
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from report_page import REPOSITORY, busy_percent, provenance, write_section
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.demo.tiny_model import build_tokenizer
from asyncrl.generation.interfaces import Completion, Sampled
from asyncrl.generation.vllm_engine import VLLMEngine, prepare_environment
from asyncrl.ranks.gather import own_shards, parameter_specs
from asyncrl.weights.manifest import Manifest, Probe, layout
from asyncrl.weights.publisher import snapshot_of
from asyncrl.weights.staging import StagedWeights

BENCHMARK = "kv_cache.py"
PAGE = REPOSITORY / "docs" / "weights.md"
MAX_LENGTH = 512
PROMPTS, SAMPLES = 4, 8
TOKENS = 400
"""Length of a completion."""
UPDATE_AT = 128
"""Number of tokens of a completion, on average, at which the update comes."""
RATES = (1e-3, 1e-4, 1e-5, 1e-6)
TRAIN_STEPS, ROWS, ROW_TOKENS = 150, 8, 384
SINCE = ((1, 1), (2, 4), (5, 16), (17, 64), (65, 256))
"""First and last token after the update, of each column."""
EVERY_S = 0.5
MODES: tuple[Literal["keep", "recompute"], ...] = ("keep", "recompute")

Tokenizer = Any


def text(draw: random.Random) -> str:
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(3, 6))) for _ in range(60)]
    return "".join(f"{word}>{word[::-1]}\n" for word in words)


class Trained:
    """A model in training. `model` has the weights before an update."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        torch.manual_seed(0)
        described = Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=32,
            max_position_embeddings=MAX_LENGTH,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            dtype="float32",
        )
        self.model = Qwen3ForCausalLM(described)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0)
        self._tokenizer = tokenizer
        self._draw = random.Random(0)

    def train(self) -> None:
        for step in range(1, TRAIN_STEPS + 1):
            loss = self._step(2e-3 * min(1.0, step / 10))
            if step % 25 == 0:
                print(f"step {step}: {loss:.3f} nats a token", flush=True)

    def updated(self, rate: float) -> Qwen3ForCausalLM:
        """Returns a copy of the model after one more step. The model itself stays as it is."""
        weights, state = copy.deepcopy(self.model.state_dict()), copy.deepcopy(self._optimizer.state_dict())
        self._step(rate)
        found = copy.deepcopy(self.model)
        self.model.load_state_dict(weights)
        self._optimizer.load_state_dict(state)
        return found

    def _step(self, rate: float) -> float:
        rows = [self._tokenizer.encode(text(self._draw))[:ROW_TOKENS] for _ in range(ROWS)]
        tokens_BS = torch.tensor(rows)
        logits_BSV = self.model(input_ids=tokens_BS, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits_BSV.flatten(0, 1), tokens_BS[:, 1:].flatten())
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        return float(loss.detach())


class Updates:
    """Loads models into the engine, each as the next version."""

    def __init__(self, engine: VLLMEngine, config: Config) -> None:
        self._engine = engine
        self._bucket_bytes = config.weights.bucket_bytes
        self._staged = StagedWeights()
        self.version = Version(1, 0)

    async def load(self, model: torch.nn.Module) -> None:
        self.version = Version(1, self.version.step + 1)
        entries, probe = layout(parameter_specs(model, dtype=torch.float32)), Probe(tokens=(), logprobs=())
        snapshot = snapshot_of(own_shards(model, rank=0), entries, bucket_bytes=self._bucket_bytes)
        manifest = Manifest(version=self.version, tensors=entries, buckets=snapshot.described(), probe=probe)
        self._staged.begin(manifest)
        for part, data in zip(self._staged.missing, snapshot.buckets, strict=True):
            self._staged.put(part, data)
        await self._engine.load(manifest, self._staged)


async def sequences(engine: VLLMEngine, prompts: Sequence[list[int]], reached: asyncio.Event | None = None) -> Any:
    """Samples `SAMPLES` completions of each prompt. Returns them by prompt. Sets `reached` at `UPDATE_AT` tokens."""
    tokens = [0] * len(prompts)

    async def one(index: int) -> list[Completion]:
        def progress(sampled: Sampled) -> None:
            tokens[index] = sum(sampled.lengths)
            if reached is not None and sum(tokens) >= len(prompts) * SAMPLES * UPDATE_AT:
                reached.set()

        return await engine.generate(
            prompts[index], n=SAMPLES, seed=None, temperature=1.0, max_tokens=TOKENS, on_progress=progress
        )

    return await asyncio.gather(*(one(index) for index in range(len(prompts))))


@torch.no_grad()
def logprobs(model: torch.nn.Module, prompt: list[int], completion: list[int]) -> torch.Tensor:
    logits_SV = model(input_ids=torch.tensor([[*prompt, *completion]]), use_cache=False).logits[0]
    logprobs_SV = logits_SV[len(prompt) - 1 : -1].log_softmax(-1)
    return logprobs_SV[torch.arange(len(completion)), torch.tensor(completion)]


async def errors(
    engine: VLLMEngine, updates: Updates, *, before: torch.nn.Module, after: torch.nn.Module, prompts: list[list[int]]
) -> dict[str, list[list[float]]]:
    """Returns the errors of tokens after one update, by the columns of `SINCE`; and those that the tokens would have if
    the old weights had sampled them."""
    await updates.load(before)
    reached = asyncio.Event()
    running = asyncio.create_task(sequences(engine, prompts, reached))
    await reached.wait()
    await updates.load(after)
    found: dict[str, list[list[float]]] = {"engine": [[] for _ in SINCE], "old weights": [[] for _ in SINCE]}
    for prompt, completions in zip(prompts, await running, strict=True):
        for completion in completions:
            first = sum(version != updates.version for version in completion.versions)
            new, old = (logprobs(model, prompt, completion.token_ids) for model in (after, before))
            own = torch.tensor(completion.logprobs)
            for column, (begin, end) in enumerate(SINCE):
                part = slice(first + begin - 1, first + end)
                found["engine"][column] += (own[part] - new[part]).abs().tolist()
                found["old weights"][column] += (old[part] - new[part]).abs().tolist()
    return found


async def speed(engine: VLLMEngine, updates: Updates, models: Sequence[torch.nn.Module], prompts: Any) -> float:
    """Returns tokens per second, with updates if there are `models`."""

    over = asyncio.Event()

    async def update() -> None:
        for model in itertools.cycle(models):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), EVERY_S)
            if over.is_set():
                return
            await updates.load(model)

    updating = asyncio.create_task(update())
    started_s = time.perf_counter()
    groups = [completion for _ in range(3) for group in await sequences(engine, prompts) for completion in group]
    seconds = time.perf_counter() - started_s
    over.set()
    await updating
    return sum(len(completion.token_ids) for completion in groups) / seconds


def error_row(rate: float, name: str, columns: list[list[float]]) -> str:
    cells = [f"{statistics.mean(found):.1e} ({max(found):.1e})" if found else "" for found in columns]
    return f"| {rate:.0e} | {name} | {' | '.join(cells)} |"


LEGEND = """\
Mean (largest) error of log-probs in nats, by the number of tokens since the update. *Rate* is the learning rate of the
step. The last row of each rate shows what the error would be if the old weights had sampled the tokens, which is the
staleness of one version."""
SPEED = """\
The same engine makes {none} tokens per second without updates ({rounds} rounds). With an update every {every:g} s it
makes {keep} with `keep` and {recompute} with `recompute`."""


def spread(found: list[float]) -> str:
    return f"{statistics.median(found):,.0f} ({min(found):,.0f} to {max(found):,.0f})"


async def measure(folder: Path, config: Config, *, rounds: int) -> list[str]:
    tokenizer = build_tokenizer(max_length=MAX_LENGTH)
    trained = Trained(tokenizer)
    trained.train()
    trained.model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    draw = random.Random(1)
    prompts = [tokenizer.encode(text(draw))[:8] for _ in range(PROMPTS)]
    engine = await VLLMEngine.start(config, model_path=str(folder), load_weights=False)
    lines = [f"| rate | | {' | '.join(str(b) if b == e else f'{b} to {e}' for b, e in SINCE)} |"]
    lines.append("|" + "---|" * (2 + len(SINCE)))
    speeds: dict[str, list[float]] = {"none": [], "keep": [], "recompute": []}
    try:
        updates = Updates(engine, config)
        for rate in RATES:
            after = trained.updated(rate)
            for mode in MODES:
                engine.weights._clear_cache = mode == "recompute"
                found = await errors(engine, updates, before=trained.model, after=after, prompts=prompts)
                lines.append(error_row(rate, f"`{mode}`", found["engine"]))
                print(lines[-1], flush=True)
            lines.append(error_row(rate, "old weights", found["old weights"]))
        models = [trained.model, trained.updated(RATES[-1])]
        for _ in range(rounds):
            for mode in ("none", *MODES):
                engine.weights._clear_cache = mode == "recompute"
                speeds[mode].append(await speed(engine, updates, [] if mode == "none" else models, prompts))
                print(f"{mode}: {speeds[mode][-1]:.0f} tokens/s", flush=True)
    finally:
        await engine.shutdown()
    shown = {mode: spread(found) for mode, found in speeds.items()}
    return [LEGEND, "", *lines, "", SPEED.format(**shown, every=EVERY_S, rounds=rounds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write the tables into docs/weights.md")
    arguments = parser.parse_args()
    config = Config.model_validate(
        {
            "model": {"max_length": MAX_LENGTH},
            "learner": {"group_size": SAMPLES, "collective_timeout_s": 300.0},
            "generator": {"max_concurrent_groups": PROMPTS, "kv_cache_gib": 0.5, "persist_every_tokens": 2},
        }
    )
    prepare_environment(config)
    torch.set_num_threads(1)
    busy = busy_percent()
    with tempfile.TemporaryDirectory(prefix="kv-cache-") as folder:
        measured = asyncio.run(measure(Path(folder), config, rounds=arguments.rounds))
    lines = [provenance(BENCHMARK, busy_percent=busy), "", *measured]
    print("\n".join(lines))
    if arguments.write:
        write_section(BENCHMARK, lines, page=PAGE)


if __name__ == "__main__":
    main()
