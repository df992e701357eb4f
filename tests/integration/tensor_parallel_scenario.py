"""Runs an engine of two workers, each of which has half of every matrix. It is a separate process with its own engine.

Prints as JSON the difference between the log-probs of engine and trainer after each of two updates, and the number of
the engine's processes.
"""

import asyncio
import json
import sys
from typing import Any

from conftest import small_config
from engine_contract import MAX_TOKENS, PROMPT
from test_vllm_engine import Trainer

from asyncrl.generation.vllm_engine import VLLMEngine, prepare_environment


async def updates(model_path: str) -> dict[str, Any]:
    config = small_config(model_path, "generator.tensor_parallel_size=2")
    prepare_environment(config)
    engine = await VLLMEngine.start(config, model_path=model_path, load_weights=False)
    trainer, apart_nats, versions = Trainer(model_path), [], []
    for step in (1, 2):
        trainer.change()
        await engine.load(*trainer.publication(step))
        [completion] = await engine.generate(PROMPT, n=1, seed=step, temperature=1.0, max_tokens=MAX_TOKENS)
        tokens = PROMPT + completion.token_ids
        expected = trainer.log_probs(tokens)
        scored = await engine.score(tokens)
        pairs = [*zip(scored, expected, strict=True)]
        pairs += zip(completion.logprobs, expected[len(PROMPT) - 1 :], strict=True)
        apart_nats.append(max(abs(ours - theirs) for ours, theirs in pairs))
        versions.append(sorted({str(version) for version in completion.versions}))
    found = {"apart_nats": apart_nats, "versions": versions, "processes": len(engine.processes.pids)}
    await engine.shutdown()
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(updates(sys.argv[1]))))
