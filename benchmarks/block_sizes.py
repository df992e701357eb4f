"""Times an engine on a CPU with several sizes of the blocks of its KV cache.

    python benchmarks/block_sizes.py --write
    python benchmarks/block_sizes.py --workload prompts --rounds 9

vLLM shares only whole blocks between the samples of a group. With blocks of 128 tokens, its default on CPUs, a prompt
of 89 tokens is computed again for each sample. Small blocks share more, but attention has more blocks to go through.

With each of two models with random weights, the script starts one engine for each size, and gives all of them the same
requests. In a round, every engine generates once, one after the other, and the order turns from round to round. Times
are CPU seconds of the engine's process, which has one thread, so other work on the machine disturbs them little. They
are relative to those of 128 tokens in the same round.

Workloads: `quickstart`, `answers` and `long` have the models and lengths of those of overlap.py, with prompts of 6
tokens, which no size shares. `prompts` has the model of `long`, prompts of 89 tokens, and answers of at most 4 tokens.
vLLM's attention on CPUs supports multiples of 32 tokens only.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from overlap import WORKLOADS as OF_OVERLAP
from report_page import REPOSITORY, busy_percent, provenance, write_section

from asyncrl.common.version import Version
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.generation.vllm_engine import VLLMEngine, prepare_environment

BENCHMARK = "block_sizes.py"
SIZES = (32, 64, 128)
DEFAULT = 128
"""vLLM's own size on CPUs, to which the others are compared."""
START_TIMEOUT_S = 300.0
MODELS = {
    "tiny": ["model.max_length=136", "generator.max_concurrent_groups=32"],
    "30M": [*OF_OVERLAP["long"], "learner.group_size=8"],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Groups that are generated at once, `times` times in one measurement."""

    model: str
    groups: int
    samples: int
    prompt_tokens: int = 6
    max_tokens: int
    times: int = 1


WORKLOADS = {
    "quickstart": Workload(model="tiny", groups=32, samples=8, max_tokens=6, times=6),
    "answers": Workload(model="tiny", groups=16, samples=8, max_tokens=128),
    "long": Workload(model="30M", groups=4, samples=4, max_tokens=256),
    "prompts": Workload(model="30M", groups=4, samples=8, prompt_tokens=89, max_tokens=4),
}


# -- the process of one engine -----------------------------------------------------------------------------------------


def configured(model: str, *, size: int, path: str) -> Config:
    own = [f"model.path={path}", f"generator.engine_args={{block_size: {size}}}"]
    return load_config([REPOSITORY / "configs" / "quickstart.yaml"], [*MODELS[model], *own])


async def serve(config: Config) -> None:
    """Starts an engine, and measures it once for each line on stdin: the name of a workload, and a seed."""
    from asyncrl.demo.tiny_model import ensure_description

    engine = await VLLMEngine.start(config, model_path=ensure_description(config), load_weights=False)
    try:
        await engine.weights.name(Version(1, 0))
        tell(ready=True)
        for line in sys.stdin:
            name, seed = line.split()
            before, cpu_s = engine.prompt_tokens, engine_cpu_s(engine)
            tokens = [await generate(engine, WORKLOADS[name], seed=int(seed) + i) for i in range(WORKLOADS[name].times)]
            after = engine.prompt_tokens
            cached, prompts = after.cached - before.cached, after.all - before.all
            tell(cpu_s=engine_cpu_s(engine) - cpu_s, tokens=sum(tokens), cached=cached, prompts=prompts)
    finally:
        await engine.shutdown()


async def generate(engine: VLLMEngine, workload: Workload, *, seed: int) -> int:
    """Generates all groups at once. Returns the number of sampled tokens."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(2, 90) for _ in range(workload.prompt_tokens)] for _ in range(workload.groups)]
    groups = (
        engine.generate(
            prompt, n=workload.samples, seed=10_000 * seed + 100 * i, temperature=1.0, max_tokens=workload.max_tokens
        )
        for i, prompt in enumerate(prompts)
    )
    return sum(len(completion.token_ids) for group in await asyncio.gather(*groups) for completion in group)


def engine_cpu_s(engine: VLLMEngine) -> float:
    times = [process.cpu_times() for process in engine._processes]
    return sum(each.user + each.system for each in times)


def tell(**found: Any) -> None:
    print(json.dumps({"found": found}), flush=True)


# -- the measurement ---------------------------------------------------------------------------------------------------


class Engine:
    """An engine in a process of its own, because a process can have one engine only."""

    def __init__(self, model: str, *, size: int, path: Path) -> None:
        command = [sys.executable, __file__, "--serve", model, "--sizes", str(size), "--path", str(path)]
        paths = os.pathsep.join(map(str, [REPOSITORY, REPOSITORY / "benchmarks"]))
        self._process = subprocess.Popen(
            command, cwd=REPOSITORY, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": paths},
        )  # fmt: skip
        self.size = size

    def answer(self) -> dict[str, Any] | None:
        """Returns what the process has found; None if it has ended. vLLM writes other lines."""
        output: IO[str] | None = self._process.stdout
        assert output is not None
        for line in output:
            if line.startswith('{"found"'):
                found: dict[str, Any] = json.loads(line)["found"]
                return found
        return None

    def measure(self, workload: str, seed: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{workload} {seed}\n")
        self._process.stdin.flush()
        found = self.answer()
        if found is None:
            raise RuntimeError(f"the engine with blocks of {self.size} tokens has ended; its error is above")
        return found

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(START_TIMEOUT_S)


def compare(model: str, workloads: list[str], *, sizes: list[int], rounds: int) -> Iterator[str]:
    """Yields the rows of the workloads with this model."""
    with tempfile.TemporaryDirectory() as folder:
        engines = [Engine(model, size=size, path=Path(folder) / str(size)) for size in sizes]
        try:
            for engine in engines:
                if engine.answer() is None:
                    raise RuntimeError(f"the engine with blocks of {engine.size} tokens did not start; see above")
            for name in workloads:
                found: dict[int, list[dict[str, Any]]] = {size: [] for size in sizes}
                for turn in range(rounds + 1):
                    first = turn % len(engines)
                    for engine in [*engines[first:], *engines[:first]]:
                        measured = engine.measure(name, 1 + turn * WORKLOADS[name].times)
                        if turn:  # the first round warms up
                            found[engine.size].append(measured)
                yield from (row(name, size, measured, found[DEFAULT]) for size, measured in found.items())
        finally:
            for engine in engines:
                engine.end()


def row(workload: str, size: int, measured: list[dict[str, Any]], default: list[dict[str, Any]]) -> str:
    ratios = [one["cpu_s"] / other["cpu_s"] for one, other in zip(measured, default, strict=True)]
    seconds = statistics.median(one["cpu_s"] for one in measured)
    cached = sum(one["cached"] for one in measured) / sum(one["prompts"] for one in measured)
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    tokens = statistics.median(one["tokens"] for one in measured)
    return f"| {workload} | {size} | {seconds:.2f} | {spread} | {tokens:.0f} | {cached:.0%} |"


LEGEND = """\
*CPU seconds* is the median of the measurements, and *of 128* the median (smallest to largest) of the ratios to blocks
of 128 tokens in the same round. *Cached* is the share of prompt tokens that came from the prefix cache."""
HEAD = ["| workload | block | CPU seconds | of 128 | sampled tokens | cached |", "|---|---|---|---|---|---|"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=[*WORKLOADS], action="append", help="default: all")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="write the table into docs/benchmarks.md")
    parser.add_argument("--serve", choices=[*MODELS], help=argparse.SUPPRESS)
    parser.add_argument("--path", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        config = configured(arguments.serve, size=arguments.sizes[0], path=arguments.path)
        prepare_environment(config)
        asyncio.run(serve(config))
        return
    rows, busy = [], busy_percent()
    for model in MODELS:
        names = [name for name in arguments.workload or WORKLOADS if WORKLOADS[name].model == model]
        if names:
            for line in compare(model, names, sizes=arguments.sizes, rounds=arguments.rounds):
                rows.append(line)
                print(line, flush=True)
    if arguments.write:
        write_section(BENCHMARK, [provenance(BENCHMARK, busy_percent=busy), "", LEGEND, "", *HEAD, *rows])


if __name__ == "__main__":
    main()
