"""vLLM can serve a model that training exported: from the Hugging Face directory, its log-probs agree to 1e-4 nats.

The directory has several files of weights, which the ranks share."""

import asyncio
import json
import multiprocessing
import pickle
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pytest
import torch
from rounding import SMOOTH_OPTIMIZER, assert_within, weight_spread
from safetensors import safe_open
from tiny_groups import STEP, make_batch
from torch.distributed import FileStore
from transformers import AutoModelForCausalLM

from asyncrl import complete_directory
from asyncrl.algorithms.loss import build_loss
from asyncrl.complete_directory import complete
from asyncrl.config.schema import Config
from asyncrl.errors import CheckpointError
from asyncrl.generation.vllm_engine import VLLMEngine, prepare_environment
from asyncrl.policy import export
from asyncrl.policy.worker import PolicyWorker

pytestmark = pytest.mark.integration

PARITY_NATS = 1e-4
TRAIN_STEPS = 3
ENGINE_S = 600.0
WORLDS = (1, 2)
FILE_BYTES = 2**19
SEQUENCES = [[40, 41, 42, 43, 44, 45, 46], [50, 41, 40], [7 * i % 50 for i in range(1, 40)]]


def train_and_export(rank: int, world_size: int, folder: Path, config: Config) -> None:
    """Trains a few steps and exports the model. Returns the log-probs that the ranks compute with the exported
    weights."""
    optimizer = config.learner.optimizer.model_copy(update=SMOOTH_OPTIMIZER | {"learning_rate": 1e-3})
    config = config.model_copy(update={"learner": config.learner.model_copy(update={"optimizer": optimizer})})
    store = FileStore(str(folder / f"store-{world_size}"), world_size)
    policy = PolicyWorker(model_path=config.model.path, config=config, rank=rank, world_size=world_size, store=store)
    export.FILE_BYTES = FILE_BYTES
    before = policy.probe(SEQUENCES)
    shard = make_batch().shard_by_batch_size(world_size)[rank]
    for _ in range(TRAIN_STEPS):
        record = policy.train(shard, build_loss(config), rows_per_update=shard.size, step=STEP)
        assert [outcome.finite for outcome in record.outcomes] == [True]
    path = folder / f"hf-{world_size}"
    found: dict[str, Any] = {"left": []}
    for what in ("unwritten", "unfinished"):
        found[what] = error_of(policy, path, last_file=what == "unfinished")
        if rank == 0:  # it removes the files of both
            found["left"] += [left.name for left in folder.glob(f"{path.name}*")]
    save_hf(policy, path)
    first = complete(path)[1].save_id
    with mock.patch.object(export, "write_tensors", wraps=export.write_tensors) as written:
        save_hf(policy, path)
    found["files"] = [call.args[1].name for call in written.call_args_list]
    found |= {"replaced": complete(path)[1].save_id != first, "unwritten again": error_of(policy, path)}
    foreign = folder / f"foreign-{world_size}"
    foreign.mkdir(exist_ok=True)
    (foreign / "thesis.txt").touch()
    with pytest.raises(CheckpointError, match=r"exists, but it is not a checkpoint, because it has no file COMPLETE"):
        save_hf(policy, foreign)
    found |= {"before": before, "after": policy.probe(SEQUENCES)}
    (folder / f"probe-{world_size}-{rank}.pkl").write_bytes(pickle.dumps(found))
    policy.close()


def save_hf(policy: PolicyWorker, path: Path) -> None:
    policy.stage_checkpoint(optimizer=False)
    policy.write_hf(None, path)


def error_of(policy: PolicyWorker, path: Path, *, last_file: bool = False) -> str:
    """Returns the error of every rank if there is no disk space for the tensors, or for the file that is written
    last."""
    write_atomically = complete_directory.write_atomically

    def disk_full(what: object, file: Any, **options: Any) -> None:
        file.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    def full_at_the_end(file: Path, data: bytes) -> None:
        if file.parent == complete_directory.unfinished(path):
            raise OSError(28, "No space left on device")
        write_atomically(file, data)

    broken = (
        mock.patch.object(complete_directory, "write_atomically", full_at_the_end)
        if last_file
        else mock.patch.object(export, "write_tensors", disk_full)
    )
    with broken, pytest.raises(CheckpointError) as raised:
        save_hf(policy, path)
    return str(raised.value)


def score_with_vllm(path: str, config: Config, answers: Connection) -> None:
    """Sends the temperature-1 log-probs of `SEQUENCES` by an engine that is started from `path`.

    It runs in a separate process, because vLLM can have only one engine in a process."""

    async def scores() -> list[list[float]]:
        engine = await VLLMEngine.start(config, model_path=path)
        try:
            return [await engine.score(tokens) for tokens in SEQUENCES]
        finally:
            await engine.shutdown()

    prepare_environment(config)
    answers.send(asyncio.run(scores()))


@pytest.fixture(scope="module")
def folder(run_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exports of one rank and of two ranks, which trained the session's model at the same time."""
    folder = tmp_path_factory.mktemp("export")
    contexts = [
        torch.multiprocessing.start_processes(
            train_and_export, args=(world, folder, run_config), nprocs=world, join=False, start_method="forkserver"
        )
        for world in WORLDS
    ]
    for context in contexts:
        while not context.join():
            pass
    return folder


def probes(folder: Path, world_size: int) -> list[dict[str, Any]]:
    return [pickle.loads((folder / f"probe-{world_size}-{rank}.pkl").read_bytes()) for rank in range(world_size)]


def apart_nats(found: Any, expected: Any) -> float:
    return max(np.abs(np.asarray(a) - np.asarray(b)).max() for a, b in zip(found, expected, strict=True))


@pytest.mark.campaign
def test_vllm_starts_from_the_export_of_two_ranks_and_gives_their_log_probs(folder: Path, run_config: Config) -> None:
    context = multiprocessing.get_context("forkserver")
    mine, theirs = context.Pipe()
    process = context.Process(target=score_with_vllm, args=(str(folder / "hf-2"), run_config, theirs))
    process.start()
    theirs.close()
    try:
        assert mine.poll(ENGINE_S), "vLLM did not answer"
        scores = mine.recv()
        process.join(120)
        assert process.exitcode == 0
    finally:
        family = psutil.Process(process.pid).children(recursive=True) if process.is_alive() else []
        process.kill()
        for child in family:
            child.kill()
    for found in probes(folder, 2):
        assert apart_nats(scores, found["after"]) < PARITY_NATS
        assert apart_nats(scores, found["before"]) > 100 * PARITY_NATS, "training has not changed the model"


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.fault("F27")
def test_an_export_that_cannot_be_written_fails_on_all_ranks_which_go_on_and_leaves_the_one_before(
    folder: Path, world_size: int
) -> None:
    for found in probes(folder, world_size):
        errors = {found["unwritten"], found["unfinished"], found["unwritten again"]}
        reason = "rank 0: OSError: [Errno 28] No space left on device"
        assert errors == {f"cannot write {folder / f'hf-{world_size}'}: {reason}"}
        assert found["replaced"]
    assert probes(folder, world_size)[0]["left"] == [], "a failed export must leave no files"
    path, _ = complete(folder / f"hf-{world_size}")
    assert path == folder / f"hf-{world_size}"
    assert len({file.stat().st_mode for file in path.iterdir()}) == 1, "the files have different permissions"
    assert (folder / f"foreign-{world_size}" / "thesis.txt").exists()


@pytest.mark.parametrize("world_size", WORLDS)
def test_transformers_loads_the_export_and_gives_the_ranks_log_probs(folder: Path, world_size: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / f"hf-{world_size}", dtype=torch.float32).eval()
    scores = []
    for tokens in SEQUENCES:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens])).logits[0, :-1]
        scores.append(logits.log_softmax(-1)[range(len(tokens) - 1), tokens[1:]].numpy())
    for found in probes(folder, world_size):
        assert apart_nats(scores, found["after"]) < PARITY_NATS


def test_one_rank_and_two_export_the_same_files_and_tensors(folder: Path) -> None:
    one, two = (folder / f"hf-{world}" for world in WORLDS)
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in two.iterdir())
    index = "model.safetensors.index.json"
    assert {"config.json", "generation_config.json", index, "tokenizer.json"} <= {*names}
    configs = [json.loads((path / "config.json").read_text()) for path in (one, two)]
    assert configs[0] == configs[1]
    assert (one / index).read_text() == (two / index).read_text()
    # The learning rate is a tenth of that in `rounding`. The sums of this model have less than four times as many
    # terms, and the bound grows with the square root of the number.
    bound = 0.1 * 2 * weight_spread(TRAIN_STEPS)
    for name, file in json.loads((one / index).read_text())["weight_map"].items():
        with safe_open(one / file, "pt") as first, safe_open(two / file, "pt") as second:
            assert_within(second.get_tensor(name), first.get_tensor(name), bound=bound, name=name)


def test_two_ranks_write_every_second_file_each(folder: Path) -> None:
    files = sorted(path.name for path in (folder / "hf-2").glob("*.safetensors"))
    assert len(files) > 2
    assert [sorted(found["files"]) for found in probes(folder, 2)] == [files[::2], files[1::2]]
    assert sorted(probes(folder, 1)[0]["files"]) == files
