"""Samples long sequences from an engine while it loads one adapter after the other, and scores every token again under
the adapter of its version.

Prints as JSON what it found. The process holds one engine, and no Ray.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from local_weights import staged
from transformers import AutoModelForCausalLM

from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.errors import WeightError
from asyncrl.generation.interfaces import Completion, PartialCompletion, Sampled
from asyncrl.generation.vllm_engine import VLLMEngine, prepare_environment
from asyncrl.policy.adapter import with_adapter
from asyncrl.ranks.gather import own_shards, parameter_specs
from asyncrl.weights.manifest import Manifest, layout
from asyncrl.weights.publisher import snapshot_of
from asyncrl.weights.staging import StagedWeights

PROMPTS = [[7, 8, 9, 10], [11, 12, 13], [20, 21, 22, 23, 24]]
MAX_TOKENS = 50
SWAPS = 24
SWAP_EVERY_S = 0.15
GROUPS = 12
"""Groups that run at the same time. Each begins again when it has ended, until the last swap."""
SLOW_REQUESTS = 24
"""Requests that run at the same time, so that each of them lasts longer than several swaps."""


class Trainer:
    """The learner's copy of the model, and every adapter that it has published."""

    def __init__(self, config: Config) -> None:
        assert config.model.lora is not None
        model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32).eval()
        self.model: Any = with_adapter(model, config.model.lora, seed=3)
        self._generator = torch.Generator().manual_seed(7)
        self._published: dict[Version, dict[str, torch.Tensor]] = {}

    def _adapter(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in self.model.named_parameters() if value.requires_grad}

    @torch.no_grad()
    def publication(self, version: Version, *, change: bool = True) -> tuple[Manifest, StagedWeights]:
        for parameter in self._adapter().values():
            parameter.add_(torch.randn(parameter.shape, generator=self._generator) * 0.1 * change)
        self._published[version] = {name: value.detach().clone() for name, value in self._adapter().items()}
        entries = layout(parameter_specs(self.model, dtype=torch.float32))
        return staged(snapshot_of(own_shards(self.model, rank=0), entries, bucket_bytes=2**14), version)

    @torch.no_grad()
    def apart_nats(self, prompt: list[int], completion: Completion, version: Version) -> float:
        """Returns the largest difference between the completion's log-probs and those under the adapter `version`."""
        for name, value in self._adapter().items():
            value.copy_(self._published[version][name])
        tokens = prompt + completion.token_ids
        logits = self.model(input_ids=torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1]
        ours = logits.log_softmax(-1)[range(len(completion.token_ids)), completion.token_ids]
        return float((ours - torch.tensor(completion.logprobs)).abs().max())


def adapters(engine: VLLMEngine) -> Any:
    """Returns the adapters that the engine has."""
    found = engine._adapters
    assert found is not None
    return found


async def sampled_while_swapping(engine: VLLMEngine, trainer: Trainer) -> dict[str, Any]:
    swapping = True
    finished: list[tuple[list[int], Completion]] = []
    held: dict[int, Any] = {}
    """The adapter of each group that runs."""

    async def group(number: int) -> None:
        prompt, tokens = PROMPTS[number % len(PROMPTS)], MAX_TOKENS - number
        while swapping:
            held[number] = adapters(engine).newest
            found = await engine.generate(prompt, n=2, seed=None, temperature=1.0, max_tokens=tokens)
            finished.extend((prompt, completion) for completion in found)

    groups = [asyncio.create_task(group(number)) for number in range(GROUPS)]
    pauses = []
    not_held = 0
    before: set[str] = set()
    for step in range(1, SWAPS + 1):
        await asyncio.sleep(SWAP_EVERY_S)
        in_use = {adapter.name for adapter in held.values()}
        times = await engine.load(*trainer.publication(Version(1, step)))
        pauses.append(times.pause_s)
        # A directory stays until the load after the one that drops its adapter.
        not_held = max(not_held, len(list(adapters(engine).folder.iterdir())) - len(in_use | before))
        before = in_use
    swapping = False
    await asyncio.gather(*groups)
    right, other = [], []
    for prompt, completion in finished:
        [version] = {*completion.versions}
        right.append(trainer.apart_nats(prompt, completion, version))
        neighbour = Version(1, version.step + 1 if version.step < SWAPS else version.step - 1)
        other.append(trainer.apart_nats(prompt, completion, neighbour))
    return {
        "completions": len(finished),
        "tokens": sum(len(completion.token_ids) for _, completion in finished),
        "versions": len({completion.versions[0] for _, completion in finished}),
        "apart_nats": max(right),
        "least_apart_from_another_version_nats": min(other),
        "longest_pause_s": max(pauses),
        "most_folders_of_no_running_group": not_held,
    }


async def kept_by_running_requests(engine: VLLMEngine, trainer: Trainer) -> dict[str, Any]:
    """A request that runs during more swaps than the engine has room for adapters keeps its own to the end. A request
    that continues it has the prefix's version for the prefix, and the new one for the rest."""
    await engine.load(*trainer.publication(Version(1, 100)))
    partial: list[PartialCompletion] = []

    def progressed(sampled: Sampled) -> None:
        partial[:] = sampled.partial() or partial

    arguments: dict[str, Any] = {"n": 1, "seed": None, "temperature": 1.0, "max_tokens": MAX_TOKENS}
    running = [
        asyncio.create_task(engine.generate(PROMPTS[0], on_progress=progressed, **arguments)),
        *(asyncio.create_task(engine.generate(PROMPTS[0], **arguments)) for _ in range(SLOW_REQUESTS)),
    ]
    await asyncio.sleep(0)
    ran = 0
    for step in range(101, 108):
        await engine.load(*trainer.publication(Version(1, step)))
        ran += not all(task.done() for task in running)
    [first], *_ = await asyncio.gather(*running)
    prefix = PartialCompletion(
        token_ids=first.token_ids[:10], logprobs=first.logprobs[:10], versions=first.versions[:10]
    )
    [second] = await engine.generate(PROMPTS[0], prefix=[prefix], **arguments)
    return {
        "swaps_meanwhile": ran,
        "versions": sorted({str(version) for version in first.versions}),
        "versions_of_progress": sorted({str(version) for each in partial for version in each.versions}),
        "apart_nats": trainer.apart_nats(PROMPTS[0], first, Version(1, 100)),
        "continued": [str(version) for version in second.versions],
    }


async def refused(engine: VLLMEngine, trainer: Trainer) -> dict[str, Any]:
    """An adapter that vLLM cannot read is refused, and the one before it stays."""
    await engine.load(*trainer.publication(Version(1, 200)))
    found = adapters(engine)
    wide = found._lora.model_copy(update={"rank": 64})
    with mock.patch.object(found, "_lora", wide):
        try:
            await engine.load(*trainer.publication(Version(1, 201)))
            error = ""
        except WeightError as raised:
            error = str(raised)
    [completion] = await engine.generate(PROMPTS[1], n=1, seed=None, temperature=1.0, max_tokens=MAX_TOKENS)
    return {"error": error, "version": str(completion.versions[0])}


async def run(config: Config) -> None:
    prepare_environment(config)
    engine = await VLLMEngine.start(config, model_path=config.model.path, load_weights=False)
    trainer = Trainer(config)
    try:
        await engine.load(*trainer.publication(Version(1, 0), change=False))
        found = {
            "swapping": await sampled_while_swapping(engine, trainer),
            "running": await kept_by_running_requests(engine, trainer),
            "refused": await refused(engine, trainer),
        }
    finally:
        await engine.shutdown()
    print(json.dumps({**found, "folder": adapters(engine).folder.exists()}), flush=True)


if __name__ == "__main__":
    asyncio.run(run(Config.model_validate_json(Path(sys.argv[1]).read_text())))
