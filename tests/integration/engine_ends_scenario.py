"""Starts engines without Ray, one after the other, and ends each one in another way. Updates their weights before, over
two transports. Each argument after the model is the number of workers, a comma, and the number of the engine's process
to kill: 0 is the engine's core, the next ones are its workers. Another child of this process ends beside each one of
these engines. The last engine has two workers, and this process then waits until it is killed.

Prints as JSON, for each engine: the names of its processes, and the differences between the log-probs of engine and
trainer after each update. For an engine that loses a process: whether the end of the other child was taken for its own
end, the cause that the engine gives, and the processes that are left. For the last engine: its processes, and all
processes of this one.
"""

import asyncio
import json
import signal
import subprocess
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

WAIT_S = 1.0
"""Seconds in which the end of a process would be noticed."""


async def started(model_path: str, *, workers: int) -> VLLMEngine:
    config = small_config(model_path, f"generator.tensor_parallel_size={workers}")
    prepare_environment(config)
    return await VLLMEngine.start(config, model_path=model_path, load_weights=False)


async def updated(engine: VLLMEngine, model_path: str) -> dict[str, object]:
    """Loads two versions, each over another transport."""
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
    return {"apart_nats": apart_nats, "versions": versions}


async def killed(model_path: str, *, workers: int, victim: int) -> dict[str, object]:
    other = await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", "input()", stdin=subprocess.PIPE)
    engine = await started(model_path, workers=workers)
    processes = [psutil.Process(pid) for pid in engine.processes.started]
    names = [process.name() for process in processes]
    found = await updated(engine, model_path)
    died = asyncio.create_task(engine.died())
    other.kill()
    await other.wait()
    await asyncio.wait([died], timeout=WAIT_S)
    mistaken = died.done()
    processes[victim].send_signal(signal.SIGKILL)
    cause = await asyncio.wait_for(died, 60)
    await engine.shutdown()
    left = [process.pid for process in psutil.wait_procs(processes, timeout=60)[1]]
    return found | {"names": names, "mistaken": mistaken, "cause": cause, "left": left}


async def main(model_path: str, *cases: str) -> None:
    for case in cases:
        workers, victim = map(int, case.split(","))
        print(json.dumps(await killed(model_path, workers=workers, victim=victim)), flush=True)
    engine = await started(model_path, workers=2)
    names = [psutil.Process(pid).name() for pid in engine.processes.started]
    found = {"names": names} | await updated(engine, model_path)
    everything = [process.pid for process in psutil.Process().children(recursive=True)]
    print(json.dumps(found | {"engine": list(engine.processes.started), "everything": everything}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
