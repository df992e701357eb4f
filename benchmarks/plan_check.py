"""Compares the memory that `asyncrl doctor --plan` computes with that of real runs.

    python benchmarks/plan_check.py --write
    python benchmarks/plan_check.py --size 30M

For each size of model the script starts a short run of `asyncrl up` on CPUs, with two ranks and one engine, and reads
the memory of each process twice a second until the run has ended. It takes the largest values. The memory of a process
is its PSS: memory that several processes map counts in parts. Ray's object store is counted apart.

A process needs much memory without any model. So the script also makes a run with a model of a few thousand
parameters. `growth` is the difference to that run: what the model itself needs. `--write` puts the table into
docs/benchmarks.md.
"""

import argparse
import ctypes
import json
import multiprocessing
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import psutil
from measured_run import REPOSITORY, MeasuredRun
from report_page import busy_percent, provenance, write_section

from asyncrl.cli.plan import specs_of
from asyncrl.config.load import load_config
from asyncrl.demo.tiny_model import build_tokenizer
from asyncrl.deployment.memory_plan import GIB, KEPT, PROCESS, RAY_BYTES, STORED, Hardware, plan

BENCHMARK = "plan_check.py"
CONFIG = "quickstart.yaml"
MIB = 2**20
BASELINE = "nothing"
MAX_LENGTH = 16
STEPS = 8
RUN_S = 420.0
EVERY_S = 0.5
OVERRIDES = [
    f"model.max_length={MAX_LENGTH}",
    "environment.reward=rewards:by_checksum",
    "learner.ranks=2",
    "learner.groups_per_step=4",
    "learner.group_size=4",
    "learner.micro_batch_tokens=32",  # several micro-batches in an update, so that gradients are kept between them
    "generator.max_concurrent_groups=4",
    "generator.kv_cache_gib=0.25",
    "staleness.max_versions=1",
    "checkpoint.every_steps=2",
    "eval.prompts=0",
    "ray.object_store_mb=2000",
]
OBJECT_STORE, OTHERS, LIVE = "object store", "other processes", "rank, allocated"
STAGED, REPLICAS = "staged weights", "replica"
PLACES = {"rank of the learner": ("rank",), REPLICAS: ("engine", "generator", "scoring")}
"""The roles of processes at each place of the plan."""


class Size(NamedTuple):
    """The shape of a Qwen3."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int


SIZES = {
    BASELINE: Size(98, 32, 32, 1, 1, 1, 32),
    "0.6M": Size(98, 128, 512, 2, 4, 4, 32),
    "30M": Size(98, 640, 640, 10, 10, 10, 64),
    "95M": Size(32_000, 768, 2304, 10, 12, 6, 64),
}


TWO_REPLICAS = "30M, 2 replicas"
RUNS = {size: (size, []) for size in SIZES} | {TWO_REPLICAS: ("30M", ["generator.replicas=2"])}
"""The model of each run, and further overrides."""


def make_model(size: Size, path: Path) -> int:
    """Writes a model with random weights, whose tokenizer is that of the quickstart. Returns its parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = build_tokenizer(max_length=MAX_LENGTH)
    described = Qwen3Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(described)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return sum(parameter.numel() for parameter in model.parameters())


class Pss(NamedTuple):
    """The PSS of a process in bytes: `own` without Ray's object store, and its part of the `store`. `staged` has the
    size of each block of staged weights that it maps, by the block's number."""

    own: int
    store: int
    staged: dict[str, int]


def pss(process: psutil.Process) -> Pss:
    """Returns the PSS of a process."""
    own = store = 0
    in_store = False
    staged: dict[str, int] = {}
    for line in Path(f"/proc/{process.pid}/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if name == "Pss:":
            if in_store:
                store += int(rest.split()[0])
            else:
                own += int(rest.split()[0])
        elif not name.endswith(":"):
            in_store = "plasma" in line
            if "memfd:asyncrl-weights" in line:
                first, _, last = name.partition("-")
                staged[line.split()[4]] = int(last, 16) - int(first, 16)
    return Pss(own=1024 * own, store=1024 * store, staged=staged)


def sampled(run: MeasuredRun) -> dict[str, float]:
    """Returns the memory of each place, of the object store, and of all different blocks of staged weights, in bytes.
    Of a place with several processes of one role that the plan counts one by one, it is that of the largest one."""
    by_role: dict[str, list[int]] = defaultdict(list)
    store = 0
    staged: dict[str, int] = {}
    for process, role in run.processes():
        try:
            found = pss(process)
        except (OSError, psutil.Error):
            continue
        by_role[role].append(found.own)
        store += found.store
        if role in PLACES[REPLICAS]:
            staged |= found.staged
    return {
        "rank of the learner": max(by_role["rank"], default=0),
        REPLICAS: sum(sum(by_role[role]) for role in PLACES[REPLICAS]),
        STAGED: sum(staged.values()),
        OBJECT_STORE: store,
        OTHERS: sum(sum(each) for role, each in by_role.items() if not any(role in roles for roles in PLACES.values())),
    }


def measured(folder: Path, model: Path, extra: list[str]) -> dict[str, float]:
    """Returns the largest memory of each place during a run, from its start until it has ended."""
    largest: dict[str, float] = defaultdict(float)
    trains, over = threading.Event(), threading.Event()
    run = MeasuredRun(CONFIG, [*OVERRIDES, f"model.path={model}", *extra], folder=folder, pinned=False)

    def sample() -> None:
        while not over.wait(EVERY_S):
            for place, nbytes in sampled(run).items():
                # A worker of Ray has no role yet while it imports the code of its role.
                if place != OTHERS or trains.is_set():
                    largest[place] = max(largest[place], nbytes)

    sampling = threading.Thread(target=sample)
    sampling.start()
    try:
        run.wait(1, timeout_s=RUN_S)
        trains.set()
        run.wait(STEPS, timeout_s=RUN_S)
    finally:
        run.end()  # with a last checkpoint
        over.set()
        sampling.join()
    return dict(largest)


class Malloc(ctypes.Structure):
    """The result of glibc's `mallinfo2`."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "used_mapped",
            "usmblks",
            "fsmblks",
            "used",
            "free",
            "keepcost",
        )
    ]


def live_rank(rank: int, folder: str, overrides: list[str]) -> None:
    """Runs one rank of a learner through the parts of a run. Writes the bytes that it has allocated at most to a file,
    without those of the imports."""
    import torch
    from torch.distributed import FileStore

    from asyncrl.algorithms.loss import build_loss
    from asyncrl.data.batched_data_dict import BatchedDataDict
    from asyncrl.policy.worker import PolicyWorker
    from asyncrl.weights.manifest import layout

    libc = ctypes.CDLL("libc.so.6")
    libc.mallinfo2.restype = Malloc
    most, over = 0, threading.Event()

    def allocated() -> int:
        found = libc.mallinfo2()
        return int(found.used + found.used_mapped)

    def sample() -> None:
        nonlocal most
        while not over.wait(0.002):
            most = max(most, allocated())

    before = allocated()
    sampling = threading.Thread(target=sample)
    sampling.start()
    config = load_config([REPOSITORY / "configs" / CONFIG], overrides)
    store = FileStore(f"{folder}/ranks", config.learner.ranks)
    worker = PolicyWorker(
        model_path=config.model.path, config=config, rank=rank, world_size=config.learner.ranks, store=store
    )
    rows, tokens = 8, 12
    mask_BS = torch.ones(rows, tokens)
    mask_BS[:, 0] = 0.0
    data = BatchedDataDict(
        input_ids=torch.randint(98, (rows, tokens), generator=torch.manual_seed(rank)),
        input_lengths=torch.full((rows,), tokens),
        token_mask=mask_BS,
        sample_mask=torch.ones(rows),
        generation_logprobs=-4.6 * mask_BS,
        prev_logprobs=-4.6 * mask_BS,
        advantages=torch.randn(rows, 1).expand(rows, tokens).contiguous() * mask_BS,
        weight_versions=torch.zeros(rows, tokens, dtype=torch.int64),
    )
    loss, path = build_loss(config), Path(folder) / "saved"
    for step in range(2):
        worker.train(data, loss, rows_per_update=rows, step=0)
        worker.take_snapshot(layout(worker.weights_metadata()), [], step)
    worker.stage_checkpoint()
    worker.write_checkpoint(path / "weights", path / "optimizer")
    exporting = threading.Thread(target=worker.write_hf, args=(path / "weights", path / "hf"))
    exporting.start()
    worker.train(data, loss, rows_per_update=rows, step=0)
    exporting.join()
    over.set()
    sampling.join()
    worker.close()
    Path(folder, f"live-{rank}").write_text(str(most - before))


def live_bytes(folder: Path, model: Path, extra: list[str]) -> float:
    """Returns the bytes that a rank of the learner has allocated at most."""
    overrides = [*OVERRIDES, f"model.path={model}", *extra]
    ranks = load_config([REPOSITORY / "configs" / CONFIG], overrides).learner.ranks
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=live_rank, args=(rank, str(folder), overrides)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return float(max(int((folder / f"live-{rank}").read_text()) for rank in range(ranks)))


def planned(model: Path, extra: list[str]) -> dict[str, float]:
    """Returns the plan of the same run: the bytes of each place without the process itself, and of each process."""
    config = load_config([REPOSITORY / "configs" / CONFIG], [*OVERRIDES, f"model.path={model}", *extra])
    hardware = Hardware(node_bytes=GIB, gpu_bytes=GIB, gpus_per_node=1, copy_speed=GIB, gpu_copy_speed=GIB)
    lines = plan(config, specs_of(config), hardware, reference=False).lines
    stored = [line.nbytes * config.learner.ranks for line in lines if line.what == STORED]
    counts = dict.fromkeys(PLACES, 1) | {REPLICAS: config.generator.replicas}
    found = {
        place: sum(
            line.nbytes * min(count, line.processes or count)
            for line in lines
            if line.place == place and line.what != STORED
        )
        for place, count in counts.items()
    }
    [staged] = [line.nbytes for line in lines if line.what == STAGED]
    left_out = (PROCESS, KEPT)
    rest = sum(line.nbytes for line in lines if line.place == "rank of the learner" and line.what in left_out)
    live = found["rank of the learner"] - rest
    return found | {STAGED: staged, OBJECT_STORE: sum(stored), OTHERS: RAY_BYTES, LIVE: live}


def measure(name: str, extra: list[str], *, known: dict[str, float] | None) -> dict[str, Any]:
    """Returns the plan of a run and its measurement, unless that is `known`."""
    size, own = RUNS[name]
    extra = [*own, *extra]
    with tempfile.TemporaryDirectory(prefix="plan-check-") as folder:
        model = Path(folder) / "model"
        result = {
            "parameters": make_model(SIZES[size], model),
            "planned": planned(model, extra),
            "measured": known or {LIVE: live_bytes(Path(folder), model, extra)} | measured(Path(folder), model, extra),
        }
    print(f"{name}: {json.dumps(result)}", flush=True)
    return result


COLUMNS = ["model", "place", "planned", "measured", "planned / measured", "planned growth", "measured growth", "ratio"]


def rows(name: str, found: dict[str, Any], baseline: dict[str, Any]) -> Iterator[str]:
    for place, plan_bytes in found["planned"].items():
        real = found["measured"][place]
        growth = plan_bytes - baseline["planned"][place], real - baseline["measured"][place]
        cells = [
            f"{name}, {found['parameters'] / 1e6:.2f} million",
            place,
            f"{plan_bytes / MIB:,.0f}",
            f"{real / MIB:,.0f}",
            f"{plan_bytes / real:.2f}",
            f"{growth[0] / MIB:,.0f}",
            f"{growth[1] / MIB:,.0f}",
            f"{growth[0] / growth[1]:.2f}" if growth[1] > 0 else "",
        ]
        yield f"| {' | '.join(cells)} |"


LEGEND = """\
Memory in MiB. A *rank* is one of two ranks of the learner, *replica* all processes of the replicas with the weights
that they have staged, *staged weights* the memory of these alone, *other processes* the command, Ray's daemons, the
coordinator and the stores of rows and weights, from the first step on. *Growth* is the difference to a run of one
replica with a model of a few thousand parameters. *Allocated* are the bytes that a rank has allocated at most, without
those that it has freed and keeps. These and the staged weights are computed. What a process needs without a model, and
what it keeps, are constants of the plan that were measured in such runs, so their rows show how well one constant fits
all sizes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=[name for name in RUNS if name != BASELINE], action="append")
    parser.add_argument("--write", action="store_true", help="write the table into docs/benchmarks.md")
    parser.add_argument("--results", type=Path, help="file that keeps the measurements, so that sizes can be added")
    parser.add_argument("overrides", nargs="*", help="section.key=value, for all runs")
    arguments = parser.parse_args()
    busy = busy_percent()
    kept = arguments.results
    found: dict[str, Any] = json.loads(kept.read_text()) if kept is not None and kept.exists() else {}
    sizes = arguments.size or [name for name in RUNS if name != BASELINE]
    for name in [BASELINE, *sizes]:
        found[name] = measure(name, arguments.overrides, known=found.get(name, {}).get("measured"))
        if kept is not None:
            kept.write_text(json.dumps(found))
    table = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for name in sizes:
        table += rows(name, found[name], found[BASELINE])
    lines = [provenance(BENCHMARK, busy_percent=busy), "", LEGEND, "", *table]
    print("\n".join(lines))
    if arguments.write:
        write_section(BENCHMARK, lines)


if __name__ == "__main__":
    main()
