"""Records small runs for the audit, by the real loop, coordinator, checkpoints and run directory. The model is a fake:
one tensor, to which a step adds the step's number and the sum of its tokens."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from learner_scenes import TASKS, BufferRows, FakeTrainer, Scene, ids_of, meta_of, rows_of, skipped, trained
from safetensors.torch import load_file, save_file

from asyncrl.algorithms.interfaces import LossFunction
from asyncrl.buffer.records import CommitOutcome, FailedTicket, Failure
from asyncrl.checkpoints.run import RunParts, read_snapshot
from asyncrl.common.roles import Role
from asyncrl.common.version import Version
from asyncrl.complete_directory import COMPLETE
from asyncrl.config.load import shared_config
from asyncrl.config.schema import OnDeadline
from asyncrl.coordinator.registry import Deployment
from asyncrl.coordinator.status import Restored
from asyncrl.data.specs import trained_mask
from asyncrl.data_plane.interfaces import KVBatchMeta
from asyncrl.data_plane.rows import TRAIN_PARTITION, Rows
from asyncrl.data_plane.sample_ids import group_of
from asyncrl.deployment.run_dir import RunDir
from asyncrl.errors import FailureClass
from asyncrl.learner.audit_records import Began, Machine, PublishedVersion, framed, read_records, records_path
from asyncrl.learner.loop import LearnerLoop
from asyncrl.learner.penalty_control import first_loss
from asyncrl.learner.recording import StepEnd, StepRecorder
from asyncrl.learner.records import RunInfo, StepRecord, read_lines
from asyncrl.learner.sample_records import Texts
from asyncrl.learner.saving import Checkpoints, KeptSteps
from asyncrl.learner.step import Stages
from asyncrl.learner.trained_prompts import TrainedPrompts
from asyncrl.ranks.batching import staleness_counts, without_stale
from asyncrl.ranks.digest import KINDS, XXH3, tensor_digest
from asyncrl.ranks.named_rows import LIMIT, MASKS_STALE
from asyncrl.witness.judge import Request

FAILED_GROUP = 5
"""A group whose reward fails in every run."""
MASKED_GROUP = 4
"""A group in which the reward of the first sample fails in every run."""
STATE = Path("state") / "shard-00001-model-00001-of-00001.safetensors"


class Killed(Exception):
    """Ends a run at a step, as if the process had been killed then: nothing is saved and no state is recorded."""


class AuditedTrainer(FakeTrainer):
    """A trainer with weights: it reports their digests of a kind and the ages of its tokens, and saves and loads
    them."""

    def __init__(self, scene: "AuditedRun", *, kind: str) -> None:
        super().__init__(scene.clock)
        self.kind, self.has_loaded = kind, False
        self.weights = torch.arange(12, dtype=torch.float32).reshape(4, 3)
        self.killed_at: int | None = None
        self.skips_at: int | None = None

    def digest(self, kind: str | None = None) -> int:
        return tensor_digest("w", self.weights, kind=kind or self.kind)

    def train_from_meta(
        self,
        meta: KVBatchMeta,
        loss_fn: LossFunction,
        eval_mode: bool = False,
        *,
        gbs: int | None = None,
        witness: Request | None = None,
    ) -> dict[str, Any]:
        step = meta.extra_info["step"]
        self.asked.append((step, list(dict.fromkeys(map(group_of, meta.sample_ids)))))
        self._clock.now_s += 1.0
        if step == self.killed_at:
            raise Killed
        if step == self.skips_at:
            self.skips_at = None
            return {"report": skipped()}
        columns = ["input_ids", "weight_versions", "token_mask", "sample_mask"]
        tags = meta.tags or []
        limits, masks = [each[LIMIT] for each in tags], [each.get(MASKS_STALE, False) for each in tags]
        rows = without_stale(self.client.get_data(meta, columns), step=step, limits=limits, masks=masks)
        before, ages = self.digest(), staleness_counts(rows, step=step)
        others = {kind: self.digest(kind) for kind in KINDS if self.has_loaded and kind != self.kind}
        self.has_loaded = False
        self.weights = self.weights + step + rows["input_ids"].sum()
        counts = tuple(ages.get(age, 0) for age in range(max(ages) + 1))
        report = trained(
            loss=step / 7, token_staleness=counts, trained_tokens=sum(counts), on_policy_tokens=counts[0],
            weights_before=before, weights_after=self.digest(), weights_before_by_kind=others, digest_kind=self.kind,
            trained_samples=int(trained_mask(rows).any(dim=1).sum()),
        )  # fmt: skip
        return {"report": report}

    # The parts of a policy that a checkpoint uses.

    def stage_checkpoint(self) -> None:
        self.staged = self.weights.clone()

    def write_checkpoint(self, weights_path: Path, optimizer_path: Path | None = None) -> None:
        (weights_path / STATE).parent.mkdir(parents=True)
        save_file({"w": self.staged}, weights_path / STATE)
        (weights_path / COMPLETE).touch()

    def save_checkpoint(self, weights_path: Path, optimizer_path: Path | None = None) -> None:
        self.stage_checkpoint()
        self.write_checkpoint(weights_path, optimizer_path)

    def write_hf(self, weights_path: Path, path: Path) -> None:
        path.mkdir()
        (path / "config.json").write_text("{}")

    def load_checkpoint(self, weights_path: Path, optimizer_path: Path) -> None:
        self.weights, self.has_loaded = load_file(weights_path / STATE)["w"], True


class AuditedRun(Scene):
    """One start of the run `audited` in `folder`: a new one, or one that is resumed."""

    def __init__(
        self,
        folder: Path,
        *,
        max_staleness: int = 1,
        keep_weights: bool = False,
        on_deadline: OnDeadline = "wait",
        resample: bool = False,
        name: str = "audited",
        total_steps: int = 6,
        kind: str = XXH3,
    ) -> None:
        run = {"dir": str(folder), "name": name}
        learner = {"total_steps": total_steps, "groups_logged": 0}
        super().__init__(
            run=run,
            learner=learner,
            checkpoint={"every_steps": 2, "keep": 9},
            eval={"prompts": 0},
            staleness={"max_versions": max_staleness, "on_deadline": on_deadline},
            audit={"keep_weights": "all" if keep_weights else "none"},
            algorithm={"zero_variance": "resample" if resample else "keep"},
        )
        self.trainer: AuditedTrainer = AuditedTrainer(self, kind=kind)
        self.run_dir = RunDir.create(self.config)
        packages = {"torch": "2"}
        self.contents: dict[Version, str] = {}
        self.publish_weights = self.publisher.publish
        self.publisher.publish = self.publish  # type: ignore[method-assign]
        self.parts = RunParts(
            config=self.config,
            policy=self.trainer,
            critic=None,
            rows=Rows(self.config, client=self.trainer.client),
            lineage=self.run_dir.lineage,
            nonce=self.run_dir.nonce,
            packages=packages,
        )
        machine = Machine(processor="abacus", ranks=1, threads=1, packages=packages)
        settings = dict(shared_config(self.config))
        self.prompts = TrainedPrompts(TASKS)
        self.append_audit = self.run_dir.begin_audit(
            Began(lineage=self.run_dir.lineage, settings=settings, machine=machine, prompts=self.prompts.frequencies)
        )

    async def start(self) -> None:
        """Attaches the learner, and restores the checkpoint of a run that is resumed."""
        learner = Deployment(id="learner", role=Role.LEARNER, host="here", pid=1)
        resumed, restored, before = self.run_dir.resumed, None, None
        if resumed is not None:
            restored = Restored(snapshot=read_snapshot(resumed.path), lineage=self.run_dir.lineage)
            before = read_lines(self.run_dir.path / "steps.jsonl", StepRecord)[-1]
        lineage = await self.coordinator.attach(learner, shared=shared_config(self.config), restored=restored)
        assert lineage == self.run_dir.lineage
        if resumed is not None:
            self.parts.load(resumed.path)
        self.checkpoints = Checkpoints(
            self.config.checkpoint,
            folder=self.run_dir.checkpoints,
            run=self.parts,
            sync_records=self.run_dir.sync,
            metrics=self.metrics,
            restored_step=resumed.step if resumed else 0,
            clock=self.clock,
        )
        stages = Stages(
            config=self.config,
            policy=self.trainer,
            critic=None,
            states=self.states,
            loss=first_loss(self.config, before),
            clock=self.clock,
        )
        recorder = StepRecorder(
            metrics=self.metrics, elapsed_s=self.clock, state_seconds=self.states.seconds, before=before
        )
        self.loop = LearnerLoop(
            config=self.config,
            incarnation=lineage.incarnation,
            coordinator=self.client,
            stages=stages,
            step_end=StepEnd(
                stages=stages,
                rows=self.parts.rows,
                incarnation=lineage.incarnation,
                coordinator=self.client,
                checkpoints=self.checkpoints,
                recorder=recorder,
                sinks=[self.run_dir],
                append_audit=self.append_audit,
                texts=Texts(tokens=lambda ids: "", answer=lambda ids, part: ""),
            ),
            publisher=self.publisher,
            heldout=self.heldout,
            checkpoints=self.checkpoints,
            prompts=self.prompts,
            kept=KeptSteps(self.run_dir.path) if self.config.audit.keep_weights == "all" else None,
        )

    async def publish(self, version: Version) -> None:
        """Notes the digest of the weights that a publication begins with."""
        self.contents[version] = f"{self.trainer.digest(XXH3):x}"
        await self.publish_weights(version)

    async def deliver(self, version: Version, *, replica: str = "a") -> None:
        self.append_audit(PublishedVersion(version, self.contents[version]))
        await super().deliver(version, replica=replica)

    async def generate(self, wait_s: float) -> None:
        """Like a scene's, but rewards of `FAILED_GROUP` and `MASKED_GROUP` fail."""
        await self.publisher.settle()
        for ticket in await self.tickets():
            if ticket.group == FAILED_GROUP:
                failure = Failure(failure_class=FailureClass.DATA, reason="reward_raised", message="a bug")
                failed = FailedTicket(key=ticket.key, incarnation=ticket.version.incarnation, failure=failure)
                await self.coordinator.fail([failed])
                continue
            self.trainer.client.put_samples(ids_of([ticket.key]), TRAIN_PARTITION, fields=rows_of(ticket))
            meta = meta_of(ticket)
            if ticket.group == MASKED_GROUP:
                meta = msgspec.structs.replace(meta, rewards=(None, *meta.rewards[1:]))
            filtered = len(set(meta.known_rewards)) == 1 and self.config.most_resamples > 0
            meta = msgspec.structs.replace(meta, equal=filtered)
            outcome = CommitOutcome.FILTERED if filtered else CommitOutcome.ACCEPTED
            assert await self.coordinator.commit([meta]) == [outcome]
            if filtered:
                await BufferRows(self.trainer.client).clear([ticket.key])


async def record(
    folder: Path,
    *,
    killed_at: int | None = None,
    skips_at: int | None = None,
    max_staleness: int = 1,
    keep_weights: bool = False,
    resample: bool = False,
    kind: str = XXH3,
) -> Path:
    """Runs or resumes the run in `folder`, until its last step or until `killed_at`. Returns its directory."""
    run = AuditedRun(folder, max_staleness=max_staleness, keep_weights=keep_weights, resample=resample, kind=kind)
    run.trainer.killed_at, run.trainer.skips_at = killed_at, skips_at
    await run.start()
    with contextlib.suppress(Killed), run.run_dir:
        await run.run()
        run.run_dir.stopped("done")  # a finished run would not be resumed
    run.folder.cleanup()
    return run.run_dir.path


async def record_killed_run(folder: Path, *, keep_weights: bool = False, kinds: tuple[str, str] = (XXH3, XXH3)) -> Path:
    """Records a run of six steps that is killed at step 3 and resumed from step 2. It skips one step. Its two starts
    have digests of these `kinds`."""
    await record(folder, killed_at=3, skips_at=1, keep_weights=keep_weights, kind=kinds[0])
    return await record(folder, keep_weights=keep_weights, kind=kinds[1])


def changed(directory: Path, incarnation: int, change: Callable[[list[Any]], None]) -> None:
    """Writes the records of an incarnation again after `change` has changed their list."""
    path = records_path(directory, incarnation)
    read = read_records(path)
    assert read.began is not None
    change(read.records)
    path.write_bytes(b"".join(framed(each) for each in [read.began, *read.records]))


def state(directory: Path, name: str) -> None:
    """Writes this state of the run into its run.json."""
    info = msgspec.json.decode((directory / "run.json").read_bytes(), type=RunInfo)
    (directory / "run.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(info, state=name)))
