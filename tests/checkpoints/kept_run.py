"""Writes `kept_run/` beside this file: the records and the checkpoint of a tiny run, about 20 kB.

    PYTHONPATH=tests/buffer:tests/data_plane:tests/views python tests/checkpoints/kept_run.py

The files are committed. `test_kept_run.py` reads them, and compares them with what asyncrl writes now. Write them again
only with another `asyncrl.checkpoints.directory.SCHEMA`, and with a line in docs/compatibility.md.
"""

import shutil
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from buffer_scenes import Scene
from made_up_run import TOTALS, make_step
from memory_client import MemoryClient
from torch.distributed.fsdp import fully_shard

import asyncrl
from asyncrl.buffer.records import Failure
from asyncrl.checkpoints.directory import CHECKPOINTS, folder_of
from asyncrl.checkpoints.run import RunParts
from asyncrl.common.version import Lineage
from asyncrl.config.schema import Config, OptimizerSection
from asyncrl.coordinator.status import RunSnapshot
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.prompts import PromptCursor
from asyncrl.data_plane.rows import TRAIN_PARTITION, Rows
from asyncrl.data_plane.sample_ids import samples_of
from asyncrl.errors import FailureClass
from asyncrl.learner.records import EvalRecord, RunInfo, SampleRecord, build_summary
from asyncrl.policy.tq_policy import STEP_FIELDS
from asyncrl.ranks.optimizer import adamw
from asyncrl.ranks.sharded_checkpoint import ShardedState

KEPT = Path(__file__).parent / "kept_run"
NONCE = "0123456789abcdef"
SETTINGS = {"run": {"name": "kept"}, "learner": {"groups_per_step": 1, "group_size": 2}}
CONFIG = Config.model_validate(SETTINGS)
ROWS = BatchedDataDict(
    input_ids=torch.tensor([[1, 2], [3, 4]]),
    input_lengths=torch.tensor([2, 2]),
    weight_versions=torch.zeros(2, 2, dtype=torch.long),
    generation_logprobs=torch.tensor([[0.0, -0.5], [0.0, -0.25]]),
    token_mask=torch.tensor([[0.0, 1.0], [0.0, 1.0]]),
)


class TinyRank:
    """The only rank of a policy with a tiny model, in this process. It needs a process group of one rank."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(3, 2)
        fully_shard(self.model)
        self.optimizer = adamw(self.model, OptimizerSection(), device=torch.device("cpu"))
        self._state = ShardedState(
            self.model, self.optimizer, group=dist.new_group(backend="gloo"), saving=dist.new_group(backend="gloo")
        )
        self.train_calls: int | None = None

    def trained(self) -> "TinyRank":
        """Makes one update, and sets the weights to known numbers."""
        self.model(torch.ones(1, 3)).sum().backward()
        self.optimizer.step()
        with torch.no_grad():
            for parameter in self.model.parameters():
                shard = parameter.to_local()  # type: ignore[attr-defined]
                shard.copy_(torch.arange(shard.numel()).reshape(shard.shape) / 8)
        self.train_calls = 1
        return self

    def tensors(self) -> list[torch.Tensor]:
        """Returns the weights, then the moments of the optimizer."""
        moments = [self.optimizer.state[each] for each in self.model.parameters()]
        found = [*self.model.parameters(), *(each[name] for each in moments for name in ("exp_avg", "exp_avg_sq"))]
        return [tensor.full_tensor().detach() for tensor in found]  # type: ignore[attr-defined]

    def stage_checkpoint(self) -> None:
        assert self.train_calls is not None
        self._state.stage(train_calls=self.train_calls, optimizer=True)

    def write_checkpoint(self, weights_path: Path, optimizer_path: Path) -> None:
        self._state.write(weights_path=weights_path, optimizer_path=optimizer_path)

    def prepare_step(self, samples: int, group_size: int) -> None:
        """Ranks prepare their data plane here; this one has none."""

    def load_checkpoint(self, weights_path: Path, optimizer_path: Path) -> None:
        self.train_calls = self._state.load(weights_path=weights_path, optimizer_path=optimizer_path)


def parts(rank: TinyRank) -> RunParts:
    """Returns the parts of the run, with an empty data plane."""
    client = MemoryClient()
    client.register_partition(TRAIN_PARTITION, STEP_FIELDS, 8, ["train"], 2)
    return RunParts(
        config=CONFIG,
        policy=rank,  # type: ignore[arg-type]
        critic=None,
        rows=Rows(CONFIG, client=client),
        lineage=Lineage(),
        nonce=NONCE,
        packages={"asyncrl": asyncrl.__version__},
    )


def snapshot() -> RunSnapshot:
    """Returns a snapshot after one step, with a ready group, a reserved one, a waiting prompt and a failure."""
    scene = Scene(eta=2, per_step=1)
    scene.commit(*scene.reserve(1))
    scene.train()
    ready, failed, _ = scene.reserve(3)
    scene.commit(ready)
    failure = Failure(failure_class=FailureClass.INFRA, reason="engine_died", message="the engine has ended")
    scene.buffer.fail(failed.key, incarnation=failed.version.incarnation, failure=failure)
    return RunSnapshot(buffer=scene.buffer.snapshot(), prompts=PromptCursor(issued=4, fingerprint="abc"))


def write_checkpoint(path: Path) -> None:
    """Writes the checkpoint of the run to `path`."""
    taken, run = snapshot(), parts(TinyRank().trained())
    [ready] = [group.ticket.key for group in taken.buffer.open if group.meta is not None]
    run.rows.client.put_samples(samples_of(ready, count=2), TRAIN_PARTITION, fields=ROWS)
    run.stage()
    run.write(path, taken, hf=False)


def write_records(directory: Path) -> None:
    """Writes the records of the run."""
    steps, evals = [make_step(0)], [EvalRecord(version=0, wall_s=9.0, prompts=8, reward_mean=0.25)]
    info = RunInfo(
        name="kept",
        state="stopped",
        pid=1,
        host="host",
        started="2026-11-30T00:00:00+00:00",
        finished="2026-11-30T00:01:00+00:00",
        nonce=NONCE,
        versions={"asyncrl": asyncrl.__version__},
    )
    sample = SampleRecord(
        step=0,
        group=0,
        prompt="cat",
        rendered_prompt="cat",
        completion="tac",
        answer="tac",
        reward=1.0,
        advantage=0.5,
        version_spans=((0, 1),),
        staleness_versions=0,
        truncated=False,
    )
    files = {
        "config.yaml": b"run: {name: kept}\nlearner: {groups_per_step: 1, group_size: 2}\n",
        "run.json": msgspec.json.encode(info),
        "steps.jsonl": msgspec.json.encode(steps[0]),
        "evals.jsonl": msgspec.json.encode(evals[0]),
        "samples/step-0.jsonl": msgspec.json.encode(sample),
        "failures.json": b"[]",
        "summary.json": msgspec.json.encode(build_summary(steps, evals, TOTALS, staleness_limit=2)),
    }
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.rstrip() + b"\n")


if __name__ == "__main__":
    shutil.rmtree(KEPT, ignore_errors=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    write_records(KEPT)
    write_checkpoint(folder_of(KEPT / CHECKPOINTS, 1))
    dist.destroy_process_group()
