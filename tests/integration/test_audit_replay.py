"""The audit computes the kept steps of a run again, on real ranks, and finds what no other check can find.

The run is recorded from the stages of the learner's loop on two ranks, with digests of the kind for GPUs. The test
plays the replica: the ranks score its tokens under the weights of their versions. One group of each step is one version
old. In one group, a reward failed.
"""

import asyncio
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from audited_run import changed
from learner_scenes import meta_of, rows_of
from local_ray import local_ray
from tiny_groups import make_config, make_model

from asyncrl.audit.audit import checked
from asyncrl.audit.chain import saved_digest
from asyncrl.audit.history import Outcome, Verdict, read_history
from asyncrl.audit.replay import steps_replay
from asyncrl.audit.witnessed import steps_witnessed
from asyncrl.buffer.ledger import Amount, LedgerEntry
from asyncrl.buffer.records import Lease, LeasedGroup, Ticket, VersionSpan
from asyncrl.common.version import Lineage, Version
from asyncrl.config.load import dump_config, shared_config
from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.prompts import Task
from asyncrl.data.row_checksums import row_checksums
from asyncrl.data_plane.codec import PAD_VALUES
from asyncrl.data_plane.rows import TRAIN_PARTITION
from asyncrl.deployment.run_dir import processor, provenance
from asyncrl.learner.audit_records import Began, Machine, TrainedStep, framed, records_path
from asyncrl.learner.penalty_control import first_loss
from asyncrl.learner.recording import trained_step
from asyncrl.learner.saving import KeptSteps, kept_columns
from asyncrl.learner.step import Stages, step_meta
from asyncrl.metrics.catalogue import LEARNER_STATES
from asyncrl.metrics.states import StateClock
from asyncrl.policy.tq_policy import TQPolicy
from asyncrl.ranks.digest import MULTILINEAR

pytestmark = pytest.mark.integration

STEPS = 3
MASKED_GROUP = 2
"""A group in which the reward of the first sample, which has one token, failed."""
NO_LEDGER = LedgerEntry(prompts=0, open=(), ended=(), issued=Amount(), fates={})


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    model = make_model(tmp_path_factory.mktemp("model") / "model")
    made = make_config(ranks=2, groups_per_step=2, group_size=2, updates_per_step=1, cpus=0.5)
    sections = {
        "model": made.model.model_copy(update={"path": str(model)}),
        "audit": made.audit.model_copy(update={"keep_weights": "all"}),
        "learner": made.learner.model_copy(update={"weights_digest": MULTILINEAR}),
    }
    return made.model_copy(update=sections)


@pytest.fixture(scope="module")
def run(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records the run, and returns its directory."""
    directory = tmp_path_factory.mktemp("run")
    (directory / "config.yaml").write_text(dump_config(config))
    machine = Machine(processor=processor(), ranks=2, threads=config.learner.threads, packages=provenance())
    records: list[Any] = [Began(lineage=Lineage(), settings=dict(shared_config(config)), machine=machine)]
    with local_ray(cpus=2, namespace=config.run.name):
        policy = TQPolicy(config, model_path=config.model.path, dp_cfg=config.data_plane)
        try:
            policy.start()
            policy.prepare_step(4, 2)
            kept = KeptSteps(directory)
            kept.keep_model(Path(config.model.path), with_weights=False)
            records += recorded_steps(policy, config, kept)
        finally:
            policy.shutdown()
    path = records_path(directory, 1)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"".join(map(framed, records)))
    return directory


def recorded_steps(policy: TQPolicy, config: Config, kept: KeptSteps) -> list[TrainedStep]:
    states = StateClock(states=LEARNER_STATES, initial="other", started_s=time.monotonic())
    stages = Stages(config=config, policy=policy, critic=None, states=states, loss=first_loss(config))
    policy.save_checkpoint(kept.weights_path(Version(1, 0)))
    steps: list[TrainedStep] = []
    waiting = [generated(policy, group=0, step=0)]
    for step in range(STEPS):
        # the group that waits is trained with a new one, and another one of this version waits for the next step
        fresh = [generated(policy, group=2 * step + place, step=step) for place in (1, 2)]
        groups, waiting = [*waiting, fresh[0]], [fresh[1]]
        lease = Lease(incarnation=1, step=step, groups=tuple(group for group, _ in groups))
        meta, samples = step_meta(lease), stages.prepare(lease)
        rows = BatchedDataDict.from_batches([rows for _, rows in groups], pad_value_dict=dict(PAD_VALUES))
        policy.dp_client.put_samples(meta.sample_ids, TRAIN_PARTITION, fields=rows)
        report, _ = asyncio.run(stages.train(meta, samples, step=step))
        columns = kept_columns(with_logprobs=stages.writes_logprobs, extra=())
        rows = policy.read_from_dataplane(meta.subset(range(meta.size)), select_fields=columns)
        record = trained_step(lease, samples=samples, report=report, ledger=NO_LEDGER, line=b"")
        kept.write_batch(lease, rows)
        policy.save_checkpoint(kept.weights_path(record.made))
        policy.finish_step(meta)
        steps.append(record)
    return steps


def generated(policy: TQPolicy, *, group: int, step: int) -> tuple[LeasedGroup, BatchedDataDict]:
    """Returns a group of the weights that the policy has now, which are those of `step`."""
    ticket = Ticket(
        group=group, attempt=0, task=Task(question="q", prompt="q", answer="a"), seed=0, version=Version(1, step),
        max_staleness_versions=2, replica="a",
    )  # fmt: skip
    rows = rows_of(ticket)
    rows["input_ids"][:, 3:] += group * (rows["token_mask"][:, 3:] > 0)
    rows["generation_logprobs"] = policy.get_logprobs(rows)["logprobs"] * rows["token_mask"]
    meta = msgspec.structs.replace(meta_of(ticket), row_checksums=tuple(row_checksums(rows)))
    if group == MASKED_GROUP:
        meta = msgspec.structs.replace(meta, rewards=(None, *meta.rewards[1:]))
    leased = LeasedGroup(
        meta=meta, deadline=ticket.deadline, max_staleness_versions=2, reserved_step=step,
        ready_step=step,
    )  # fmt: skip
    return leased, rows


def test_saved_shards_of_two_ranks_have_the_digest_that_the_ranks_measured(run: Path) -> None:
    weights = {version: digests[MULTILINEAR] for version, digests in read_history(run).weights().items()}
    kept = KeptSteps(run)
    assert kept.versions() == [Version(1, step) for step in range(STEPS + 1)]
    assert {version: saved_digest(kept.weights_path(version), MULTILINEAR) for version in kept.versions()} == weights
    assert len(set(weights.values())) == STEPS + 1


def audited(directory: Path) -> Outcome:
    return checked("5", steps_replay, read_history(directory))


@pytest.mark.campaign
def test_the_steps_of_a_run_are_computed_again_bit_by_bit(run: Path) -> None:
    outcome = audited(run)
    assert outcome.verdict is Verdict.PASSED, outcome.detail
    assert outcome.detail.startswith(f"{STEPS} steps computed again")
    assert f"{STEPS * 6 - 1} tokens were scored again" in outcome.detail, "the masked token was not trained"


def test_the_steps_of_the_ranks_are_those_of_a_plain_computation(run: Path) -> None:
    check = partial(steps_witnessed, steps=STEPS, progress=lambda text: None)
    outcome = checked("6", check, read_history(run))
    assert outcome.verdict is Verdict.PASSED, outcome.detail
    found = outcome.witnessed
    assert found is not None
    assert found.optimizer_steps == (0, 1, 2)
    numbers = {each.check: each.number for each in found.comparisons}
    assert numbers["counts"] == STEPS * 6 - 1, "the masked token was not trained"
    assert numbers["gradient"] == STEPS


def test_a_version_whose_weights_did_not_sample_the_token_is_found(run: Path) -> None:
    """The recorded version is an ancestor and young enough, and the step itself is computed as before: only the
    log-probs show that other weights sampled these tokens. The change is undone."""
    path = records_path(run, 1)
    before = path.read_bytes()

    def edit(records: list[Any]) -> None:
        first, *others = records[2].groups
        sample = msgspec.structs.replace(first.samples[0], spans=(VersionSpan(1, 2, 1),))
        assert first.samples[0].spans == (VersionSpan(1, 1, 1),)
        first = msgspec.structs.replace(first, samples=(sample, *first.samples[1:]))
        records[2] = msgspec.structs.replace(records[2], groups=(first, *others))

    changed(run, 1, edit)
    outcome = audited(run)
    path.write_bytes(before)
    assert outcome.verdict is Verdict.FAILED, outcome.detail
    assert "has tokens of version 1.2 whose sampling log-probs differ" in outcome.detail
