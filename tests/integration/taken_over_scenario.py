"""An engine generates for one run, rests, and generates for the next one. Prints what it has sampled in each as JSON.

Arguments: the path of the model, and the configuration as JSON. One process holds one engine, so this is a program.
"""

import asyncio
import json
import sys
from typing import Any

import torch
from engine_contract import PROMPT
from local_weights import staged
from transformers import AutoModelForCausalLM

from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.errors import RunError
from asyncrl.generation.vllm_engine import VLLMEngine, prepare_environment
from asyncrl.ranks.gather import own_shards, parameter_specs
from asyncrl.weights.manifest import layout
from asyncrl.weights.publisher import snapshot_of

PROMPTS = [PROMPT * 10, PROMPT * 12, PROMPT]
"""The first two have a whole block of the KV cache in common, so one of them reads the cache of the other."""


class Model:
    def __init__(self, path: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def published(self, version: Version, *, scale: float) -> Any:
        """Returns the publication of the model with weights times `scale`."""
        entries = layout(parameter_specs(self._model, dtype=torch.float32))
        before = [parameter.detach().clone() for parameter in self._model.parameters()]
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.mul_(scale)
            publication = staged(snapshot_of(own_shards(self._model, rank=0), entries, bucket_bytes=2**18), version)
            for parameter, value in zip(self._model.parameters(), before, strict=True):
                parameter.copy_(value)
        return publication


async def sampled(engine: VLLMEngine) -> dict[str, Any]:
    """Samples and scores. Returns all results, and the prompt tokens that were counted. The last sample has no seed. It
    is alone, because the samples of one batch share random numbers, and which ones meet depends on the time."""
    found = []
    for prompt, n, seed in (*((prompt, 4, 5) for prompt in PROMPTS), (PROMPT, 1, None)):
        completions = await engine.generate(prompt, n=n, seed=seed, temperature=1.0, max_tokens=12)
        found += [(each.token_ids, each.logprobs, sorted(set(map(str, each.versions)))) for each in completions]
    return {"samples": found, "scores": await engine.score(PROMPTS[0]), "counted": list(engine.prompt_tokens)}


async def refused(call: Any) -> str:
    try:
        await call
    except RunError as error:
        return str(error)
    return ""


async def main(model_path: str, config: Config) -> dict[str, Any]:
    prepare_environment(config)
    model, own = Model(model_path), Version(1, 1)
    engine = await VLLMEngine.start(config, model_path=model_path, name="a", load_weights=False)
    answer: dict[str, Any] = {"pids": [sorted(engine.processes.started)]}
    try:
        await engine.load(*model.published(own, scale=1.0))
        answer["first"] = await sampled(engine)
        for step in (2, 3):  # the second of them is prepared while the engine decodes
            await engine.load(*model.published(Version(1, step), scale=1.0 + step / 8))
            await sampled(engine)
        busy = asyncio.create_task(sampled(engine))
        await asyncio.sleep(0)
        while not engine._running:
            await asyncio.sleep(0)
        answer["with requests"] = await refused(engine.rest())
        await busy
        await engine.rest()
        answer["label at rest"] = await engine._llm.get_weight_version()
        other = config.model_copy(
            update={"generator": config.generator.model_copy(update={"max_concurrent_groups": 9})}
        )
        answer["other settings"] = await refused(engine.taken_over(other, model_path=model_path, name="a"))
        engine = await engine.taken_over(config, model_path=model_path, name="a")
        answer["pids"].append(sorted(engine.processes.started))
        answer["version"] = engine.weights.version
        publication = model.published(own, scale=1.0)
        await engine.load(*publication)
        read = await engine.read_back(*publication)
        answer["differing"], answer["alike"] = sorted(read.differing), len(read.alike)
        answer["second"] = await sampled(engine)
        await engine.weights.begin(Version(1, 2))
        answer["torn"] = await refused(engine.rest())
    finally:
        await engine.shutdown()
    return answer


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1], Config.model_validate_json(sys.argv[2])))))
