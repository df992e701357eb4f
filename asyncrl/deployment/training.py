"""The training of a run that the learner has entered: starts the ranks, builds the learner's loop, and runs it."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.checkpoints.run import RunParts
from asyncrl.common.tasks import unless_stopped
from asyncrl.config.load import shared_config
from asyncrl.config.schema import HELDOUT, Config
from asyncrl.coordinator.registry import Registry
from asyncrl.data.light_tokenizer import model_folder
from asyncrl.data.tokenizer import load_tokenizer, tokenizer_fingerprint
from asyncrl.data_plane.interfaces import DataPlaneClient
from asyncrl.data_plane.rows import Rows
from asyncrl.deployment.forking import load_fork
from asyncrl.deployment.inputs import Prompts, data_record, lines_on_data, tags_of_rewards
from asyncrl.deployment.learner_log import LearnerLog
from asyncrl.deployment.run_dir import RunDir, processor, provenance
from asyncrl.deployment.screen import LearnerDisplay
from asyncrl.deployment.shared_actors import RunHandles
from asyncrl.learner.audit_records import Began, Machine, PublishedVersion, Record, manifest_digest
from asyncrl.learner.costs import rank_devices
from asyncrl.learner.heldout import HeldoutEvaluation, ReplicaClient
from asyncrl.learner.loop import LearnerLoop
from asyncrl.learner.penalty_control import first_loss
from asyncrl.learner.publication import Publisher, probe_sequences
from asyncrl.learner.recording import StepEnd, StepRecorder
from asyncrl.learner.records import RecordSink, RunTotals
from asyncrl.learner.sample_records import Texts
from asyncrl.learner.saving import Checkpoints, KeptSteps
from asyncrl.learner.step import Stages
from asyncrl.learner.trained_prompts import TrainedPrompts
from asyncrl.metrics.recorders import LearnerMetrics
from asyncrl.metrics.states import StateClock
from asyncrl.policy.tq_policy import TQPolicy
from asyncrl.ranks.group import PlacedRanks, RankGroup
from asyncrl.value.lm_value import critic_config
from asyncrl.value.tq_value import TQValue
from asyncrl.weights.manifest import Manifest, layout
from asyncrl.weights.transports.of_config import transport_of


@dataclass(kw_only=True)
class Training:
    """`run` trains the run once. `sinks` get its records, in this order. `grace_left_s` returns how many seconds an
    evaluation after a request to end may take (`HeldoutEvaluation`). `kept` has the ranks of an earlier run of this
    process, and gets those of this run if `keeps` is True. `new_policy` builds the policy, whose ranks have not started
    yet."""

    config: Config
    run_dir: RunDir
    display: LearnerDisplay
    log: LearnerLog
    sinks: Sequence[RecordSink]
    metrics: LearnerMetrics
    states: StateClock
    grace_left_s: Callable[[], float]
    kept: list[PlacedRanks] = field(default_factory=list)
    new_policy: Callable[..., TQPolicy] = TQPolicy
    checkpoints: Checkpoints | None = field(default=None, init=False)
    """The checkpoints of the run; None until its ranks have started."""
    heldout: HeldoutEvaluation | None = field(default=None, init=False)
    """The evaluations of the run; None until its ranks have started."""
    keeps: bool = field(default=False, init=False)
    """Whether the ranks go into `kept`, because the run has finished."""

    def __post_init__(self) -> None:
        self._transport = transport_of(self.config, nonce=self.run_dir.nonce)

    async def run(
        self,
        handles: RunHandles,
        *,
        client: DataPlaneClient,
        model_path: str,
        prompts: Prompts,
        stop: asyncio.Event,
        ranks: AsyncExitStack,
    ) -> RunTotals:
        """Trains, and reads the rows through `client`. When the stack `ranks` closes, it ends the ranks and deletes the
        weights that they have published. Raises Stopped if `stop` is set before the ranks have started."""
        config, own = self.config, handles.lineage.incarnation
        ranks.push_async_callback(asyncio.to_thread, self._transport.delete, lambda version: version.incarnation == own)
        make_ranks = partial(RankGroup, kept=self.kept)
        policy = self.new_policy(
            config, model_path=model_path, dp_cfg=config.data_plane, dp_client=client, make_ranks=make_ranks
        )
        ranks.push_async_callback(self._end, policy)
        critic: TQValue | None = None
        if config.critic is not None:
            critic = TQValue(critic_config(config), model_path=model_path, make_ranks=make_ranks)
            ranks.push_async_callback(self._end, critic)
        self.display.enter("loading the tokenizer")
        tokenizer = load_tokenizer(model_path, chat=config.data.chat, chat_options=config.data.chat_options)
        fingerprint = tokenizer_fingerprint(tokenizer)
        await handles.coordinator.call(Registry.handshake, who="the learner", fingerprint=fingerprint)
        self._record_data(prompts, tokenizer)
        self.display.enter("starting the learner's ranks")
        await unless_stopped(stop, asyncio.to_thread(policy.start))
        if critic is not None:
            self.display.enter("starting the critic's ranks")
            await unless_stopped(stop, asyncio.to_thread(critic.start))
        rows = Rows(config, client=client)
        return await self._trained(handles, policy, critic, rows, prompts, tokenizer, stop)

    async def _end(self, model: TQPolicy | TQValue) -> None:
        await asyncio.to_thread(model.shutdown, keep=self.keeps)

    def _record_data(self, prompts: Prompts, tokenizer: Any) -> None:
        """Writes data.json, and prints the lines about the data, with the first prompt as the model gets it."""
        record = data_record(prompts, hidden_tags=tags_of_rewards(self.config, tokenizer))
        self.run_dir.write_data(record)
        self.display.hidden_tags = record.hidden_tags
        for line in lines_on_data(record, prompts, config=self.config, tokenizer=tokenizer):
            self.display.screen.report(line)

    async def _trained(
        self,
        handles: RunHandles,
        policy: TQPolicy,
        critic: TQValue | None,
        rows: Rows,
        prompts: Prompts,
        tokenizer: Any,
        stop: asyncio.Event,
    ) -> RunTotals:
        """Restores the checkpoint of a resumed run, or loads the first weights of a fork. Then runs the learner's loop.
        The ranks must have started."""
        config, packages = self.config, provenance()
        parts = RunParts(
            config=config,
            policy=policy,
            critic=critic,
            rows=rows,
            lineage=handles.lineage,
            nonce=self.run_dir.nonce,
            packages=packages,
        )
        if (resumed := self.run_dir.resumed) is not None:
            self.display.enter(f"restoring step {resumed.step}")
            await asyncio.to_thread(parts.load, resumed.path)
        elif (fork := self.run_dir.forked_from) is not None:
            self.display.enter(f"loading {fork}")
            await asyncio.to_thread(load_fork, parts, fork)
        weights = {part.name: part.weight for part in config.data.mixture}
        trained_prompts = await asyncio.to_thread(
            TrainedPrompts, prompts.train, weights=weights, epochs=config.data.epochs
        )
        append_audit = self.run_dir.begin_audit(
            Began(
                lineage=handles.lineage,
                settings=shared_config(config),
                machine=Machine(
                    processor=processor(), ranks=config.learner.ranks, threads=config.learner.threads, packages=packages
                ),
                prompts=trained_prompts.frequencies,
            )
        )
        loop = self._loop(handles, parts, prompts, trained_prompts, tokenizer, append_audit)
        self.display.phase = lambda: loop.phase
        return await loop.run(stop)

    def _loop(
        self,
        handles: RunHandles,
        parts: RunParts,
        prompts: Prompts,
        trained_prompts: TrainedPrompts,
        tokenizer: Any,
        append_audit: Callable[[Record], None],
    ) -> LearnerLoop:
        """Builds the learner's loop from its parts. The ranks must have started."""
        config, policy = self.config, parts.policy
        resumed, before = self.run_dir.resumed, self.log.before
        # The time of a resumed run continues from its last record.
        started_s = self.display.screen.started_s - (before.wall_s if before else 0.0)
        self.heldout = heldout = HeldoutEvaluation(
            config=config,
            tasks={HELDOUT: prompts.heldout, **prompts.sets},
            coordinator=handles.coordinator,
            replicas=ReplicaClient(timeout_s=config.eval.timeout_s),
            sinks=self.sinks,
            metrics=self.metrics,
            started_s=started_s,
            grace_left_s=self.grace_left_s,
        )
        mirror = self.run_dir.mirror

        def stay(steps: Sequence[int]) -> set[int]:
            best = self.log.best_steps(steps, running=lambda: heldout.running_step)
            return best if mirror is None else best | mirror.reading

        self.checkpoints = Checkpoints(
            config.checkpoint,
            folder=self.run_dir.checkpoints,
            run=parts,
            sync_records=self.run_dir.sync,
            metrics=self.metrics,
            restored_step=resumed.step if resumed else 0,
            best=stay,
        )
        incarnation = handles.lineage.incarnation
        loss = first_loss(config, before)
        stages = Stages(config=config, policy=policy, critic=parts.critic, states=self.states, loss=loss)
        step_end = StepEnd(
            stages=stages,
            rows=parts.rows,
            incarnation=incarnation,
            coordinator=handles.coordinator,
            checkpoints=self.checkpoints,
            recorder=StepRecorder(
                metrics=self.metrics,
                elapsed_s=lambda: time.monotonic() - started_s,
                state_seconds=self.states.seconds,
                before=before,
                ranks=rank_devices(config),
                earlier=self.log.earlier_time,
            ),
            sinks=self.sinks,
            append_audit=append_audit,
            texts=Texts.of(tokenizer, config),
        )
        return LearnerLoop(
            config=config,
            incarnation=incarnation,
            coordinator=handles.coordinator,
            stages=stages,
            step_end=step_end,
            publisher=self._publisher(handles, policy, prompts, tokenizer, append_audit),
            heldout=heldout,
            checkpoints=self.checkpoints,
            prompts=trained_prompts,
            kept=self._kept(),
        )

    def _kept(self) -> KeptSteps | None:
        """Returns the store for the weights and batches of each step, from which `asyncrl audit` computes steps again,
        and copies the model's files into it. None unless `audit.keep_weights` is `all`."""
        config = self.config
        if config.audit.keep_weights != "all":
            return None
        kept = KeptSteps(self.run_dir.path)
        source = Path(model_folder(config.model.path, weights=True))
        kept.keep_model(source, with_weights=config.model.lora is not None)
        return kept

    def _publisher(
        self,
        handles: RunHandles,
        policy: TQPolicy,
        prompts: Prompts,
        tokenizer: Any,
        append_audit: Callable[[Record], None],
    ) -> Publisher:
        config = self.config

        def delivered(manifest: Manifest) -> None:
            append_audit(PublishedVersion(manifest.version, manifest_digest(manifest)))

        return Publisher(
            config=config,
            policy=policy,
            entries=layout(policy.weights_metadata()),
            probe_tokens=probe_sequences(tokenizer, prompts.train, max_length=config.model.max_length),
            transport=self._transport,
            coordinator=handles.coordinator,
            weights=handles.weights,
            metrics=self.metrics,
            delivered=delivered,
        )
