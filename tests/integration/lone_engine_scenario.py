"""Starts an engine, prints the pids of all processes that the engine started, and waits until it is killed."""

import asyncio
import json
import sys

import psutil
from conftest import small_config

from asyncrl.generation.vllm_engine import VLLMEngine, prepare_environment


async def wait(model_path: str, workers: int) -> None:
    config = small_config(model_path, f"generator.tensor_parallel_size={workers}")
    prepare_environment(config)
    engine = await VLLMEngine.start(config, model_path=model_path, load_weights=False)
    everything = [process.pid for process in psutil.Process().children(recursive=True)]
    print(json.dumps({"engine": engine.processes.pids, "everything": everything}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(wait(sys.argv[1], int(sys.argv[2])))
