"""Starts engines without Ray. Ends another child of this process beside each one, and then kills one of the engine's
own processes. Each argument after the model is the number of workers, a comma, and the number of the process to kill:
0 is the engine's core, the next ones are its workers.

Prints as JSON, for each engine: the names of its processes, whether the end of the other child was taken for its own
end, which process was killed, the cause that the engine gives, and the seconds until it gave it.
"""

import asyncio
import json
import signal
import subprocess
import sys
import time

import psutil
from conftest import small_config

from asyncrl.generation.vllm_engine import VLLMEngine, prepare_environment

WAIT_S = 1.0
"""Seconds in which the end of a process would be noticed."""


async def killed(model_path: str, *, workers: int, victim: int) -> dict[str, object]:
    config = small_config(model_path, f"generator.tensor_parallel_size={workers}")
    prepare_environment(config)
    other = await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", "input()", stdin=subprocess.PIPE)
    engine = await VLLMEngine.start(config, model_path=model_path, load_weights=False)
    processes = [psutil.Process(pid) for pid in engine.processes.started]
    names = [process.name() for process in processes]
    died = asyncio.create_task(engine.died())
    other.kill()
    await other.wait()
    await asyncio.wait([died], timeout=WAIT_S)
    mistaken = died.done()
    killed_at_s = time.monotonic()
    processes[victim].send_signal(signal.SIGKILL)
    cause = await asyncio.wait_for(died, 60)
    noticed_s = time.monotonic() - killed_at_s
    await engine.shutdown()
    return {
        "names": names,
        "mistaken": mistaken,
        "victim": processes[victim].pid,
        "cause": cause,
        "noticed_s": noticed_s,
        "left": [process.pid for process in psutil.wait_procs(processes, timeout=60)[1]],
    }


async def main(model_path: str, *cases: str) -> None:
    for case in cases:
        workers, victim = map(int, case.split(","))
        print(json.dumps(await killed(model_path, workers=workers, victim=victim)), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
