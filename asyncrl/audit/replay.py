"""Check 5 of the audit: computes the steps of a run again, from the weights and batches that it kept.

The audit starts the policy's ranks as a run does. The ranks train each surviving step (one that no restart has undone)
again, from the first one on, through the stages of the learner's loop. Every number must be the recorded one, bit by
bit. Then the ranks load the weights of each version and score the tokens that were sampled with it.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ray
import torch

from asyncrl.algorithms.presets import baseline_of
from asyncrl.audit.chain import check_kind
from asyncrl.audit.history import Counterexample, History, NotPossible
from asyncrl.audit.kept_batches import check_same_settings, kept_batch, kept_steps
from asyncrl.buffer.records import Lease
from asyncrl.common.version import Version
from asyncrl.config.import_path import is_import_path, search_folders
from asyncrl.config.named_code import untrusted
from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.light_tokenizer import cached_files
from asyncrl.data.specs import GENERATED_FIELDS, NO_VERSION, extra_fields
from asyncrl.data_plane.codec import PAD_VALUES
from asyncrl.data_plane.interfaces import KVBatchMeta
from asyncrl.data_plane.rows import TRAIN_PARTITION
from asyncrl.deployment.cluster import start_local
from asyncrl.deployment.local_clusters import AUDIT
from asyncrl.deployment.run_dir import processor, provenance
from asyncrl.errors import RunError
from asyncrl.learner.audit_records import TrainedStep
from asyncrl.learner.penalty_control import first_loss
from asyncrl.learner.records import read_config
from asyncrl.learner.saving import ADDED_COLUMNS, PREV_LOGPROBS, KeptSteps
from asyncrl.learner.step import Stages, step_meta
from asyncrl.metrics.catalogue import LEARNER_STATES
from asyncrl.metrics.states import StateClock
from asyncrl.policy.tq_policy import TQPolicy
from asyncrl.policy.worker import PolicyWorker
from asyncrl.ranks.digest import combined
from asyncrl.ranks.worker import SCORED_COLUMNS
from asyncrl.weights.parity import ParityLimits

_PACKAGES = ("torch", "transformers", "accelerate", "numpy")
"""Packages on whose version the bits of a step depend."""


def steps_replay(history: History, *, trust: bool = False) -> str:
    """Check 5: the kept batches are those that were trained; each step computed again gives the recorded loss, gradient
    norm and weights, and the kept advantages and log-probs, bit by bit; and every trained token has its sampling
    log-prob under the kept weights of its version, within the limit that the run has for the difference of its engines'
    and its learner's log-probs.

    The ranks import the loss, the advantage and the optimizer that the run's config names. If the config names such
    code, the check raises NotPossible without `trust`.
    """
    kept = kept_steps(history)
    config = read_config(history.directory)
    if not trust and (refusal := untrusted(config, sections=("algorithm", "learner.optimizer"))):
        raise NotPossible(refusal)
    named = (config.algorithm.loss_name, baseline_of(config.algorithm), config.learner.optimizer.name)
    search_folders([Path()], [each for each in named if each is not None and is_import_path(each)])
    batches = [kept_batch(kept, step) for step in history.steps]
    _check_same_conditions(history, config)
    if not Path(config.model.path).is_dir() and cached_files(config.model.path) is None:
        raise NotPossible(
            f"model.path = {config.model.path}, from which the run began, is not on this machine, or is relative to "
            "another current folder; check 6 needs only the run's directory (--witness-steps)"
        )
    with _policy(config) as policy:
        if history.forked_from is not None:
            policy.load_checkpoint(kept.weights_path(_kept_start(kept, history.steps[0])))
        _replay(policy, config, history.steps, batches)
        limits = ParityLimits.of(config, temperature=config.generator.temperature)
        differences = _rescore(policy, kept, history.steps, batches, config=config, limits=limits)
    return (
        f"{len(batches)} steps computed again have the recorded loss, gradient norm and weights bit by bit; "
        f"{len(differences)} tokens were scored again under the weights of their versions, with differences of at most "
        f"{max(differences):.2g} nats ({limits.in_words()})"
    )


def _check_same_conditions(history: History, config: Config) -> None:
    """Raises NotPossible if the steps may have other bits when they are computed here: on another processor, by another
    number of ranks or threads, with other packages, or with settings that a restart of the run changed. Also raises it
    for a kind of digest that this version of asyncrl does not have."""
    here, packages = processor(), provenance()
    for incarnation in sorted({step.incarnation for step in history.steps}):
        machine = history.began[incarnation].machine
        if machine.processor != here:
            raise NotPossible(f"the steps were trained on {machine.processor}, and this machine is a {here}")
        if (machine.ranks, machine.threads) != (config.learner.ranks, config.learner.threads):
            raise NotPossible(
                f"the steps were trained by {machine.ranks} ranks with {machine.threads} threads, but config.yaml has "
                f"{config.learner.ranks} ranks with {config.learner.threads} threads now"
            )
        for name in _PACKAGES:
            if machine.packages.get(name) != packages.get(name):
                raise NotPossible(
                    f"the steps were trained with {name} {machine.packages.get(name)}, and {packages.get(name)} is "
                    "installed here"
                )
    check_same_settings(history)
    for kind in {step.digest_kind for step in history.steps}:
        check_kind(kind)


def _kept_start(kept: KeptSteps, first: TrainedStep) -> Version:
    """Returns the version of the kept weights with which a fork began: a run that began with weights of another run,
    not with the model at `model.path`. Raises NotPossible if they were not kept."""
    version = Version(first.incarnation, first.step)
    if version not in kept.versions():
        raise NotPossible(f"the weights of version {version}, with which the fork began, were not kept")
    return version


@contextmanager
def _policy(config: Config) -> Iterator[TQPolicy]:
    """Starts a local Ray cluster and the policy's ranks on it. Stops both at the end of the block. Raises NotPossible
    if Ray cannot start."""
    policy = TQPolicy(config, model_path=config.model.path, dp_cfg=config.data_plane)
    try:
        start_local(config, generators=0, command=AUDIT)
    except RunError as error:
        raise NotPossible(f"Ray, whose processes compute the steps again, cannot start here: {error}") from error
    try:
        policy.start()
        learner = config.learner
        policy.prepare_step(learner.groups_per_step * learner.group_size, learner.group_size)
        yield policy
    finally:
        policy.shutdown()
        ray.shutdown()


def _replay(
    policy: TQPolicy, config: Config, steps: Sequence[TrainedStep], batches: Sequence[tuple[Lease, BatchedDataDict]]
) -> None:
    """Trains the steps again, and compares every result. Raises Counterexample at the first difference, and NotPossible
    if the policy does not have the weights with which the run began."""
    start = combined(policy.ranks.call(PolicyWorker.weights_digest, steps[0].digest_kind))
    if start != steps[0].before:
        raise NotPossible(
            f"the run began with weights of the digest {steps[0].before:016x}, but the model at model.path = "
            f"{config.model.path} has {start:016x} now"
        )
    states = StateClock(states=LEARNER_STATES, initial="other", started_s=time.monotonic())
    stages = Stages(config=config, policy=policy, critic=None, states=states, loss=first_loss(config))
    for step, (lease, rows) in zip(steps, batches, strict=True):
        extra = extra_fields(rows)
        meta, samples = step_meta(lease, extra=extra), stages.prepare(lease)
        masks = [sample.trained for group in step.groups for sample in group.samples]
        if masks != (samples.mask_B > 0).tolist():
            raise Counterexample(f"step {step.step} masks other samples when its filters are applied again")
        generated = {name: rows[name] for name in (*GENERATED_FIELDS, *extra)}
        policy.dp_client.put_samples(meta.sample_ids, TRAIN_PARTITION, fields=BatchedDataDict(generated))
        policy.ranks.call(PolicyWorker.use_digest, step.digest_kind)
        report, _ = asyncio.run(stages.train(meta, samples, step=lease.step))
        results: Mapping[str, tuple[Any, Any]] = {
            "the weights before it": (step.before, report.weights_before),
            "the loss": (step.loss, report.loss),
            "the gradient norm": (step.grad_norm, report.grad_norm),
            "the weights after it": (step.after, report.weights_after),
        }
        _check_columns(step, policy, meta, rows)
        for name, (recorded, found) in results.items():
            if recorded != found:
                raise Counterexample(f"step {step.step} computed again has {name} {found}, but recorded was {recorded}")
        policy.finish_step(meta)


def _check_columns(step: TrainedStep, policy: TQPolicy, meta: KVBatchMeta, rows: BatchedDataDict) -> None:
    """Compares the columns that the repeated step has added to the rows, such as advantages, with those in the kept
    batch. Raises Counterexample if one differs."""
    names = [name for name in (*ADDED_COLUMNS, PREV_LOGPROBS) if name in rows]
    found = policy.read_from_dataplane(meta.subset(range(meta.size)), select_fields=names)
    for name in names:
        if not torch.equal(found[name], rows[name]):
            raise Counterexample(f"step {step.step} computed again has other {name} than the kept batch")


class _Span(NamedTuple):
    """Sampled tokens of one version that follow each other in a row; tokens that the model only read, such as the
    output of a tool, may lie between them. `sample` names the sample in words, and `places` are the tokens' positions
    in the row."""

    sample: str
    row: BatchedDataDict
    places: torch.Tensor


def _rescore(
    policy: TQPolicy,
    kept: KeptSteps,
    steps: Sequence[TrainedStep],
    batches: Sequence[tuple[Lease, BatchedDataDict]],
    *,
    config: Config,
    limits: ParityLimits,
) -> list[float]:
    """Scores every sampled token of the trained samples under the kept weights of its version. Returns the differences
    from the sampling log-probs, nats. Raises Counterexample for a difference above the run's tolerance, and NotPossible
    if the weights of a version were not kept."""
    spans: dict[Version, list[_Span]] = defaultdict(list)
    for step, (_, rows) in zip(steps, batches, strict=True):
        for version, span in token_spans(step, rows):
            spans[version].append(span)
    if missing := sorted(spans.keys() - set(kept.versions())):
        raise NotPossible(f"the weights of version {missing[0]} were not kept")
    found: list[float] = []
    for version in sorted(spans):
        policy.load_checkpoint(kept.weights_path(version))
        own = [span.row for span in spans[version]]
        # copies of the first row, whose results are not read, so that every rank gets the same number of rows
        own += [own[0]] * (-len(own) % config.learner.ranks)
        logprobs_BS = policy.get_logprobs(BatchedDataDict.from_batches(own, pad_value_dict=dict(PAD_VALUES)))[
            "logprobs"
        ]
        for number, (sample, row, places) in enumerate(spans[version]):
            differences = (logprobs_BS[number, places] - row["generation_logprobs"][0, places]).abs().tolist()
            if not all(each <= limits.largest_nats for each in differences):  # also refuses NaN
                raise Counterexample(
                    f"{sample} has tokens of version {version} whose sampling log-probs differ by up to "
                    f"{max(differences):.3g} nats from those under the weights of this version, and "
                    f"{limits.in_words()}"
                )
            found += differences
    return found


def token_spans(step: TrainedStep, rows: BatchedDataDict) -> Iterator[tuple[Version, _Span]]:
    """Yields the spans of the trained samples of a step, each with the version that sampled it."""
    columns = (*SCORED_COLUMNS, "generation_logprobs", *extra_fields(rows))
    scored = BatchedDataDict({name: rows[name] for name in columns})
    samples = [(group.group, place, sample) for group in step.groups for place, sample in enumerate(group.samples)]
    for row, (group, place, sample) in enumerate(samples):
        # Tokens that the model only read, such as the output of a tool, have no version.
        places = (rows["weight_versions"][row] != NO_VERSION).nonzero().flatten()
        for span in sample.spans if sample.trained else ():
            name = f"sample {place} of group {group}, which step {step.step} trained,"
            own, places = places.tensor_split([span.tokens])
            yield Version(span.incarnation, span.step), _Span(name, scored.slice(row, row + 1), own)
