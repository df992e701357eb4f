"""Starts an engine without Ray, updates its weights over two transports, and waits until it is killed.

Prints as JSON the difference between the log-probs of engine and trainer after each update, and the pids of the
engine's processes and of all processes that were started.
"""

import asyncio
import json
import sys
import tempfile
from pathlib import Path

import psutil
import torch
from conftest import small_config
from local_weights import delivered
from test_vllm_engine import Trainer, compared

from asyncrl.common.version import Version
from asyncrl.generation.vllm_engine import VLLMEngine, prepare_environment
from asyncrl.ranks.gather import own_shards, parameter_specs
from asyncrl.weights.manifest import layout
from asyncrl.weights.transports.filesystem import FilesystemTransport
from asyncrl.weights.transports.ipc import SharedSnapshotTransport


async def wait(model_path: str, workers: int) -> None:
    config = small_config(model_path, f"generator.tensor_parallel_size={workers}")
    prepare_environment(config)
    engine = await VLLMEngine.start(config, model_path=model_path, load_weights=False)
    trainer, apart_nats, versions = Trainer(model_path), [], []
    entries = layout(parameter_specs(trainer.model, dtype=torch.float32))
    with tempfile.TemporaryDirectory() as folder:
        transports = (SharedSnapshotTransport(), FilesystemTransport(Path(folder)))
        for step, transport in enumerate(transports, start=1):
            trainer.change()
            shards = own_shards(trainer.model, rank=0)
            await engine.load(*await delivered(shards, entries, Version(1, step), transport))
            apart, completion = await compared(engine, trainer, seed=step)
            apart_nats.append(apart)
            versions.append(sorted({str(version) for version in completion.versions}))
    everything = [process.pid for process in psutil.Process().children(recursive=True)]
    own = list(engine.processes.started)
    found = {"apart_nats": apart_nats, "versions": versions, "engine": own, "everything": everything}
    print(json.dumps(found), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(wait(sys.argv[1], int(sys.argv[2])))
