"""Starts an engine without Ray, updates its weights twice, and waits until it is killed.

Prints as JSON the difference between the log-probs of engine and trainer after each update, and the pids of the
engine's processes and of all processes that were started.
"""

import asyncio
import json
import sys

import psutil
from conftest import small_config
from engine_contract import MAX_TOKENS, PROMPT
from test_vllm_engine import Trainer

from asyncrl.generation.vllm_engine import VLLMEngine, prepare_environment


async def wait(model_path: str, workers: int) -> None:
    config = small_config(model_path, f"generator.tensor_parallel_size={workers}")
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
    everything = [process.pid for process in psutil.Process().children(recursive=True)]
    found = {"apart_nats": apart_nats, "versions": versions, "engine": engine.processes.pids, "everything": everything}
    print(json.dumps(found), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(wait(sys.argv[1], int(sys.argv[2])))
