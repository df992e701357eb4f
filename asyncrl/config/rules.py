"""The rules of the configuration: each value is valid by itself, but the run would fail with the combination.

A rule yields one message for each violation: the key and its value, the reason, and what to do. The violations of all
rules are reported in one error. A warning describes a configuration that can run, but probably not as the user expects.

Two more modules have rules: `asyncrl.config.engine_args` for vLLM's own arguments, and `asyncrl.algorithms.checks` for
the objective. `asyncrl.cli.preflight` checks what depends on the machine. This module does not import the packages that
the configuration names (torch, vLLM, Ray).
"""

import ipaddress
import math
import operator
import re
import socket
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from asyncrl.config.engine_args import engine_args_violations, tool_parser_violations
from asyncrl.config.import_path import BUILT_IN_NAMES, is_import_path, malformed
from asyncrl.config.parts import all_configs, key_of, part_configs
from asyncrl.config.row_bytes import BYTES_PER_ROW, bytes_per_token, row_tokens, worst_case_group_bytes
from asyncrl.config.schema import (
    HELDOUT,
    NODE,
    WATCHED_DEADLINE,
    WIDTH_KEYS,
    Config,
    DatasetSection,
    GeneratorSection,
    OptimizerSection,
    ScoringSection,
    marked,
)
from asyncrl.errors import ConfigError

_TOGETHER = ", the limit of prompt and completion together; lower it, or raise model.max_length"
_STALL = "; otherwise the run ends before that deadline passes, and no error names the cause; raise it, or lower "
_LIMITS = {
    "buffer.capacity_groups >= learner.groups_per_step": ", the groups of one step; raise it, or leave it unset",
    "learner.optimizer.warmup_steps <= learner.total_steps": "; lower it",
    "critic.optimizer.warmup_steps <= learner.total_steps": "; lower it",
    "critic.warmup_steps < learner.total_steps": "; otherwise the policy is never trained; lower it",
    "generator.max_completion_tokens < model.max_length": _TOGETHER,
    "data.max_prompt_tokens < model.max_length": _TOGETHER,
    **{f"run.stall_timeout_s > {deadline}": f"{_STALL}{deadline}" for deadline in marked(WATCHED_DEADLINE)},
    "generator.min_replicas <= generator.replicas": "; lower it",
}
"""Maps a relation between two keys to the end of the message about its violation: the reason, and what to do. A
relation holds if one of the keys is unset or in a section that is unset."""

_LIMITS_OF_PARTS = {
    "environment.score_timeout_s < generator.rollout_timeout_s": ", which includes scoring; lower it, or raise "
    "generator.rollout_timeout_s",
}
"""A table like `_LIMITS`, for keys that each part of `data.mixture` and each set of `eval.sets` may set itself."""

_RELATIONS = {
    ">=": ("at least", operator.ge),
    ">": ("above", operator.gt),
    "<=": ("at most", operator.le),
    "<": ("below", operator.lt),
}


def check_config(config: Config) -> list[str]:
    """Returns warnings about a configuration that can run.

    Raises ConfigError if the configuration cannot run; its message has one line for each violation.
    """
    violations = [violation for rule in _RULES for violation in rule(config)]
    if violations:
        raise ConfigError("\n".join(violations))
    return list(_warnings(config))


def _compared(config: Config, limits: Mapping[str, str]) -> Iterator[str]:
    """Yields the violations of relations between two keys. `limits` is a table like `_LIMITS`."""
    for rule, advice in limits.items():
        key, sign, limit = rule.split()
        value, bound = _value(config, key), _value(config, limit)
        words, holds = _RELATIONS[sign]
        if value is not None and bound is not None and not holds(value, bound):
            yield f"{key} = {_text(value)}: must be {words} {limit} = {_text(bound)}{advice}"


def _value(config: Config, key: str) -> Any:
    """Returns the value of a dotted key; None if the key, or a section on the way to it, is unset."""
    found: Any = config
    for name in key.split("."):
        found = None if found is None else getattr(found, name)
    return found


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else f"{value}"


def _limits(config: Config) -> Iterator[str]:
    return _compared(config, _LIMITS)


def _staleness(config: Config) -> Iterator[str]:
    most = config.staleness.max_versions + 1
    if config.weights.publish_every_steps > most:
        yield (
            f"weights.publish_every_steps = {config.weights.publish_every_steps}: must be at most "
            f"staleness.max_versions + 1 = {most}; otherwise generators and learner wait for each other forever; lower "
            "it, or raise staleness.max_versions"
        )


def _on_deadline(config: Config) -> Iterator[str]:
    """Yields the settings with which `staleness.on_deadline` would have no effect. A step takes B groups
    (`learner.groups_per_step`), so a straggler can only block a step if the buffer may hold more than B groups."""
    policy, step_groups = config.staleness.on_deadline, config.learner.groups_per_step
    if policy == "wait":
        return
    use_wait = "; raise it, or set staleness.on_deadline: wait"
    if config.staleness.max_versions == 0:
        yield (
            f"staleness.on_deadline = {policy}: has no effect with staleness.max_versions = 0, because each step then "
            "needs exactly the groups that are in flight; raise staleness.max_versions, or set staleness.on_deadline: "
            "wait"
        )
    if config.buffer.capacity_groups == step_groups:
        yield (
            f"buffer.capacity_groups = {step_groups}: must be above learner.groups_per_step = {step_groups} with "
            f"staleness.on_deadline = {policy}, which has no effect if the buffer holds only the groups of one step"
            f"{use_wait}"
        )
    if policy == "requeue" and config.buffer.max_attempts == 1:
        yield (
            "buffer.max_attempts = 1: must be at least 2 with staleness.on_deadline = requeue, because a group at its "
            f"last attempt is not started again{use_wait}"
        )


def _buffer(config: Config) -> Iterator[str]:
    step_groups = config.learner.groups_per_step
    step_bytes = step_groups * worst_case_group_bytes(config)
    if config.buffer.capacity_bytes < step_bytes:
        yield (
            f"buffer.capacity_bytes = {config.buffer.capacity_bytes}: must be at least the largest size of one step, "
            f"{step_bytes} = learner.groups_per_step {step_groups} × learner.group_size {config.learner.group_size} × "
            f"({row_tokens(config)} tokens × {bytes_per_token(config)} + {BYTES_PER_ROW}) bytes, with rows of "
            f"{_row_tokens_text(config)} tokens; raise it"
            f"{_or_narrower_rows(config)}{_or_fewer_branches(config)}"
        )


def _step_shape(config: Config) -> Iterator[str]:
    learner = config.learner
    groups, updates = learner.groups_per_step, learner.updates_per_step
    for name, pool in config.rank_pools().items():
        unit = pool.ranks * updates
        if groups % unit:
            yield (
                f"learner.groups_per_step = {groups}: must be a multiple of {name}.ranks × learner.updates_per_step = "
                f"{pool.ranks} × {updates} = {unit}, so that every rank has an equal share of every update; set it to "
                f"{-(-groups // unit) * unit}"
            )
    if learner.batching != "packed" and config.most_branches > 1:
        yield (
            f"learner.batching = {learner.batching}: must be packed with environment.max_branches = "
            f"{config.most_branches}, because padded passes would compute each branch of a row as long as the longest "
            "one; set it to packed, or set environment.max_branches to 1"
        )
    if learner.batching != "padded" and learner.micro_batch_tokens < row_tokens(config):
        product = f" = {row_tokens(config)}" if config.most_branches > 1 else ""
        yield (
            f"learner.micro_batch_tokens = {learner.micro_batch_tokens}: must be at least {_row_tokens_text(config)}"
            f"{product} with learner.batching = {learner.batching}, so that the longest row fits into one pass; raise "
            f"it{_or_fewer_branches(config)}"
        )


def _or_narrower_rows(config: Config) -> str:
    keys = dict.fromkeys(WIDTH_KEYS[name] for name in config.widths)
    return "".join(f", or lower generator.{key}" for key in keys)


def _or_fewer_branches(config: Config) -> str:
    return ", or lower environment.max_branches" if config.most_branches > 1 else ""


def _row_tokens_text(config: Config) -> str:
    of_branches = f" × environment.max_branches = {config.most_branches}" if config.most_branches > 1 else ""
    return f"model.max_length = {config.model.max_length}{of_branches}"


def _sharding(config: Config) -> Iterator[str]:
    learner = config.learner
    shards = learner.ranks if learner.shards is None else learner.shards
    if learner.ranks % shards or shards == 1 < learner.ranks:
        fits = [n for n in range(2, learner.ranks + 1) if learner.ranks % n == 0] or [1]
        yield (
            f"learner.shards = {shards}: must divide learner.ranks = {learner.ranks} and be at least 2; set it to "
            f"{' or '.join(map(str, fits))}, or leave it unset"
        )
    if (
        learner.mixed_precision == "bf16"
        and config.model.dtype == "float32"
        and config.weights.parity_tolerance_nats is None
    ):
        yield (
            "learner.mixed_precision = bf16: the engine computes in model.dtype = float32, and its log-probs differ "
            "from the learner's by more than the tolerance for float32, 1e-4 nats; set model.dtype to bfloat16, or "
            "set weights.parity_tolerance_nats to a difference that you accept"
        )


def _weights(config: Config) -> Iterator[str]:
    weights = config.weights
    if weights.kv_cache == "keep" and weights.on_parity_failure == "stop":
        yield (
            "weights.on_parity_failure = stop: with weights.kv_cache = keep, tokens after a weight update also depend "
            "on the weights before it, so that their log-probs may differ; set weights.on_parity_failure to alarm, or "
            "weights.kv_cache to recompute"
        )
    if config.model.dtype == "float32":
        for name in ("parity_factor", "parity_mean_nats"):
            if getattr(weights, name) != type(weights).model_fields[name].default:
                yield (
                    f"weights.{name}: is for model.dtype = bfloat16; in float32 the largest difference decides, so set "
                    "weights.parity_tolerance_nats instead"
                )
    elif weights.parity_tolerance_nats is not None:
        yield (
            f"weights.parity_tolerance_nats = {weights.parity_tolerance_nats:g}: is for model.dtype = float32; in "
            "bfloat16 single tokens differ by more than any useful limit, so set weights.parity_factor or "
            "weights.parity_mean_nats instead"
        )
    if weights.delta and config.model.dtype != "bfloat16":
        yield (
            f"weights.delta = true with model.dtype = {config.model.dtype}: every step changes nearly all weights in "
            "this precision, so nothing would be saved; set model.dtype to bfloat16, or weights.delta to false"
        )
    if weights.delta and weights.transport == "ipc":
        yield (
            "weights.delta = true with weights.transport = ipc: replicas read the memory of the ranks, so no bytes "
            "travel; set weights.delta to false, or use object_store or filesystem"
        )
    if weights.delta and weights.transport == "collective":
        yield (
            "weights.delta = true with weights.transport = collective: a broadcast keeps no changes for replicas that "
            "join later; set weights.delta to false, or use object_store or filesystem"
        )
    if weights.delta and weights.bucket_bytes % 2:
        yield f"weights.bucket_bytes = {weights.bucket_bytes}: must be even with weights.delta; add one"
    if weights.folder is not None and weights.transport != "filesystem":
        yield (
            f"weights.folder = {weights.folder}: is used only by weights.transport = filesystem; set that, or leave "
            "weights.folder unset"
        )


def _lora(config: Config) -> Iterator[str]:
    if config.model.lora is None:
        return
    if config.weights.delta:
        yield (
            "weights.delta = true with model.lora: each step changes every weight of an adapter, so nothing would be "
            "saved; set weights.delta to false"
        )
    if config.weights.kv_cache == "keep":
        yield (
            "weights.kv_cache = keep with model.lora: has no effect, because running sequences keep their adapter; set "
            "weights.kv_cache to recompute"
        )
    if config.staleness.on_deadline == "mask":
        yield (
            "staleness.on_deadline = mask with model.lora: a sample keeps its adapter, so all tokens of a late group "
            "would be masked; set staleness.on_deadline to wait, requeue or drop"
        )


# The ids of the Hugging Face Hub: `name` or `owner/name`. No owner on the Hub has the name `models`, so a path that
# begins with `models/` is a folder. The pattern deliberately does not look at the disk: a tiny model that was once
# built under the name of a Hub model must not be mistaken for that model.
_HUB_ID = re.compile(r"(?!models/)\w[\w.-]*(/\w[\w.-]*)?")


def _model(config: Config) -> Iterator[str]:
    path = config.model.path
    if config.model.tiny is not None and _HUB_ID.fullmatch(path):
        yield (
            f"model.path = {path}: may be the id of a model on the Hugging Face Hub, but with model.tiny a tiny model "
            f"would be built in a folder of that name; set model.tiny: null to use the model of the Hub, or set "
            f"model.path: ./{path} to build the tiny model in that folder"
        )


def _audit(config: Config) -> Iterator[str]:
    if config.audit.keep_weights == "none":
        return
    if config.model.dtype != "float32" or config.learner.mixed_precision == "bf16":
        yield (
            "audit.keep_weights = all: needs model.dtype = float32 and no learner.mixed_precision, because sampling "
            "log-probs in bfloat16 cannot be computed again; change these, or set audit.keep_weights to "
            "none"
        )
    if config.weights.kv_cache == "keep":
        yield (
            "audit.keep_weights = all: with weights.kv_cache = keep, a token after a weight update depends also on the "
            "weights before it, so that its log-prob cannot be computed again; set weights.kv_cache to recompute, or "
            "set audit.keep_weights to none"
        )
    if config.critic is not None:
        yield (
            "audit.keep_weights = all: the steps of a run with a critic cannot be computed again; set "
            "audit.keep_weights to none"
        )


def _generator(config: Config) -> Iterator[str]:
    generator, tiny = config.generator, config.model.tiny
    every, parts = generator.persist_every_tokens, generator.tensor_parallel_size
    if every > 0 and config.staleness.max_versions == 0:
        yield (
            f"generator.persist_every_tokens = {every}: must be 0 with staleness.max_versions = 0, which trains the "
            "batches of a sequential loop: a sample that another replica continues is drawn with another seed; set "
            "it to 0, or raise staleness.max_versions"
        )
    if parts > 1 and generator.gpus not in (0, parts):
        yield (
            f"generator.tensor_parallel_size = {parts}: must equal generator.gpus = {generator.gpus:g}, because each "
            "process of the engine needs its own GPU; set both to the same number, or generator.gpus to 0 for CPUs"
        )
    if tiny is not None and tiny.heads % parts:
        yield (
            f"generator.tensor_parallel_size = {parts}: must divide model.tiny.heads = {tiny.heads}, because each "
            "process of the engine has whole attention heads; lower it"
        )
    if generator.wait_for_learner_s > 0 and config.data_plane.backend == "transfer_queue":
        yield (
            f"generator.wait_for_learner_s = {generator.wait_for_learner_s:g}: must be 0 with data_plane.backend = "
            "transfer_queue, because the index of the rows ends with the learner's process; set it to 0, or "
            "data_plane.backend to object_store"
        )
    yield from filters_without_top_k(generator)


def _autoscale(config: Config) -> Iterator[str]:
    replicas, limits = config.generator.replicas, config.generator.autoscale
    if limits is None:
        return
    if limits.min > limits.max:
        yield (
            f"generator.autoscale.min = {limits.min}: must be at most generator.autoscale.max = {limits.max}; lower "
            "it, or raise generator.autoscale.max"
        )
    elif replicas > limits.max:
        yield (
            f"generator.replicas = {replicas}: must be at most generator.autoscale.max = {limits.max}, because the "
            "deployment begins with this number; lower it, or raise the limit"
        )


def filters_without_top_k(generator: GeneratorSection) -> Iterator[str]:
    """Yields what is wrong with `generator.top_p` and `generator.min_p` if `generator.top_k` is not set."""
    for key, default in (("top_p", 1.0), ("min_p", 0.0)):
        value = getattr(generator, key)
        if generator.top_k is None and value != default:
            yield (
                f"generator.{key} = {value:g}: needs generator.top_k. The learner computes log-probs over the tokens "
                "among which a token was sampled, and vLLM returns these tokens only if their number is limited; set "
                f"generator.top_k too, or remove generator.{key}"
            )


def _names(config: Config) -> Iterator[str]:
    for key in BUILT_IN_NAMES:
        name = _value(config, key)
        if isinstance(name, str) and (problem := malformed(name, key=key)):
            yield problem


def _optimizers(config: Config) -> Iterator[str]:
    for name, pool in config.rank_pools().items():
        section, key = pool.optimizer, f"{name}.optimizer"
        if section.own is None and section.options:
            yield (
                f"{key}.options = {section.options}: is only for an optimizer that {key}.name gives by import path; "
                f"remove it, and set {', '.join(f'{key}.{each}' for each in _OF_ADAMW)} for AdamW"
            )
        for setting in _OF_ADAMW if section.own is not None else ():
            value, default = getattr(section, setting), OptimizerSection.model_fields[setting].default
            if value != default:
                yield (
                    f"{key}.{setting} = {value}: is a setting of AdamW, and does nothing with {key}.name = "
                    f"{section.name}; remove it (its default is {default}), and give the optimizer its own arguments "
                    f"in {key}.options"
                )


_OF_ADAMW = ("betas", "eps", "weight_decay")
"""Settings of an optimizer that only AdamW has."""


# Datasets, rewards and held-out sets.


def _tasks(config: Config) -> Iterator[str]:
    """Yields the violations of the rules about datasets and rewards, of each part and of each held-out set."""
    names = [part.name for part in config.data.mixture]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"data.mixture: has {names.count(name)} parts with the name {name}; give each its own name"
    for name, part in all_configs(config).items():
        for rule in (_data, _rewards, _judge, _agents, _tools):
            yield from (f"{key_of(name)}{violation}" for violation in rule(part))
        yield from (f"{key_of(name)}{violation}" for violation in _compared(part, _LIMITS_OF_PARTS))
    yield from _unused(config)
    if config.eval.prompts > 0 and not any(part.data.heldout_fraction for part in part_configs(config).values()):
        yield (
            f"eval.prompts = {config.eval.prompts}: needs held-out questions, but data.heldout_fraction = 0 holds out "
            "none; raise data.heldout_fraction, or set eval.prompts to 0"
        )


def _unused(config: Config) -> Iterator[str]:
    """Yields a violation for each setting of `data` and `environment` that has no effect, because every part of the
    mixture has a section of its own."""
    for section, fields, replaced in (
        ("data", DatasetSection.model_fields, [part.data for part in config.data.mixture]),
        ("environment", ScoringSection.model_fields, [part.environment for part in config.data.mixture]),
    ):
        if not replaced or None in replaced:
            continue
        for name, field in fields.items():
            value = getattr(getattr(config, section), name)
            if value != field.get_default(call_default_factory=True):
                yield (
                    f"{section}.{name} = {value}: has no effect, because each part of data.mixture has its own "
                    f"`{section}`; move it into the parts"
                )


def _data(config: Config) -> Iterator[str]:
    data = config.data
    if data.dataset == "jsonl" and data.path is None:
        yield "data.dataset = jsonl: needs data.path, the file to read; set data.path"
    if data.dataset == "hf" and data.path is None:
        yield "data.dataset = hf: needs data.path, a dataset's name on the Hub, a file or a folder; set data.path"
    if data.dataset not in ("jsonl", "hf") and data.path is not None:
        yield (
            f"data.path = {data.path}: is read only with data.dataset = jsonl or hf; set data.dataset, or remove "
            "data.path"
        )
    if data.options and data.dataset != "hf" and not is_import_path(data.dataset):
        yield (
            "data.options: is only for data.dataset = hf, and for a dataset given by import path; move options of the "
            "environment to environment.options, or remove data.options"
        )
    for key, default in (("subset", None), ("split", "train")):
        if data.dataset != "hf" and getattr(data, key) != default:
            yield f"data.{key} = {getattr(data, key)}: is only for data.dataset = hf; remove it"
    if data.columns and data.dataset == "environment":
        yield "data.columns: has no effect, because the environment itself makes the tasks; remove it"
    for key in ("system_prompt", "few_shot", "chat_options"):
        if data.chat == "off" and getattr(data, key):
            yield f"data.{key}: needs the model's chat template, which data.chat: off removes; remove one of the two"
    yield from _prompt_template(config.data.prompt_template)


def _evals(config: Config) -> Iterator[str]:
    """Yields the violations of the rules about held-out sets, about the settings that need evaluations
    (`checkpoint.keep_best` and `run.stop_when`), and about `checkpoint.keep_every`."""
    for name, each in config.eval.sets.items():
        key = f"eval.sets.{name}"
        if name == HELDOUT:
            yield f"{key}: is the name of the questions of the run's own dataset that are not trained; rename it"
        if each.data is None and each.environment is None:
            yield f"{key}: would be the set {HELDOUT} again; set its data or its environment, or remove it"
        if config.data.mixture and each.data is None:
            yield f"{key}: needs data of its own, because the run's questions are those of data.mixture; set its data"
        if each.prompts is None and config.eval.prompts == 0:
            yield f"{key}.prompts: is needed, because eval.prompts = 0; set it"
        if each.data is not None and each.data.heldout_fraction != config.data.heldout_fraction:
            yield (
                f"{key}.data.heldout_fraction = {each.data.heldout_fraction}: has no effect, because all questions of "
                "the set that the run does not train are evaluated; remove it"
            )
    yield from _keep_every(config)
    yield from _keep_best(config)
    yield from _stop_when(config)


def _no_evaluations(config: Config, name: str, *, key: str, needed_by: str) -> Iterator[str]:
    """Yields a violation if there is no held-out set `name`, the value of `key`, or if the set has no prompts.
    `needed_by` is the setting that needs its evaluations."""
    sets = config.eval.each_set()
    if name not in sets:
        yield f"{key} = {name}: there is no such held-out set; the sets are {', '.join(sets)}"
    elif sets[name].prompts == 0:
        yield f"{needed_by}: there would be no evaluation, because eval.prompts = 0; raise eval.prompts"


def _stop_when(config: Config) -> Iterator[str]:
    stop, every_steps = config.run.stop_when, config.eval.every_steps
    if stop is None:
        return
    yield from _no_evaluations(config, stop.eval, key="run.stop_when.eval", needed_by="run.stop_when")
    if every_steps == 0:
        yield (
            "run.stop_when: there would be no evaluation during training, because eval.every_steps = 0; set it to a "
            f"number of steps below learner.total_steps = {config.learner.total_steps}"
        )
    elif every_steps >= config.learner.total_steps:
        yield (
            "run.stop_when: there would be no evaluation during training, because eval.every_steps = "
            f"{every_steps} is not below learner.total_steps = {config.learner.total_steps}; lower eval.every_steps"
        )


def _keep_every(config: Config) -> Iterator[str]:
    every, kept = config.checkpoint.every_steps, config.checkpoint.keep_every
    if kept and (every == 0 or kept % every):
        yield (
            f"checkpoint.keep_every = {kept}: is not a multiple of checkpoint.every_steps = {every}, so most of these "
            "steps have no checkpoint; set checkpoint.keep_every to a multiple, or checkpoint.every_steps to a divisor"
        )


def _keep_best(config: Config) -> Iterator[str]:
    checkpoint, evals = config.checkpoint.every_steps, config.eval.every_steps
    if not config.checkpoint.keep_best:
        return
    named = f"checkpoint.keep_best = {config.checkpoint.keep_best}"
    yield from _no_evaluations(config, config.checkpoint.best_eval, key="checkpoint.best_eval", needed_by=named)
    zero = {"eval.every_steps": evals, "checkpoint.every_steps": checkpoint}
    for key in (key for key, value in zero.items() if value == 0):
        yield f"{named}: the checkpoints of a run would have no evaluations, because {key} = 0; set {key}"
    if checkpoint and evals and checkpoint % evals and evals % checkpoint:
        yield (
            f"{named}: most checkpoints would have no evaluation, because neither of checkpoint.every_steps = "
            f"{checkpoint} and eval.every_steps = {evals} is a multiple of the other; set both to the same number"
        )


def _prompt_template(template: str) -> Iterator[str]:
    shown = f"data.prompt_template = {template!r}"
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        yield f"{shown}: is not a valid format string ({error}); write {{{{ and }}}} for literal braces"
        return
    unnamed = [name for name in fields if not name.isidentifier()]
    if unnamed:
        yield (
            f"{shown}: {{{unnamed[0]}}} is not the name of a field of a task; write a plain name without dots and "
            "brackets, e.g. {question}"
        )
    elif not fields:
        yield f"{shown}: has no field, so every prompt would be the same; add a field, e.g. {{question}}"


def _agent_warnings(config: Config) -> Iterator[str]:
    """Yields a warning if the agents of a part have too few scoring processes. An environment of the user's own gets no
    warning, because it is not known before it is built whether it runs agents."""
    slots = config.generator.max_concurrent_groups
    for name, part in all_configs(config).items():
        workers = part.environment.score_workers
        if _agent_setting(part) and workers < slots:
            yield (
                f"{key_of(name)}environment.score_workers = {workers}: the agents of a group run in one process, so "
                f"only {workers} of generator.max_concurrent_groups = {slots} groups run at once; raise it to {slots}"
            )


def _agent_setting(config: Config) -> str:
    """Returns the setting that names an agent, `key = value`; empty if there is none."""
    environment = config.environment
    if environment.agent is not None:
        return f"environment.agent = {environment.agent}"
    if environment.has_tools:
        return environment.tools_key
    return f"environment.name = {environment.name}" if environment.plays_agents else ""


def _judge(config: Config) -> Iterator[str]:
    environment = config.environment
    for term in environment.rewards:
        if term.fn != "judge":
            continue
        key, options = f"environment.rewards.{term.name}.options", term.options
        url, url_variable = (str(options.get(name, "")) for name in ("url", "url_variable"))
        if bool(url) == bool(url_variable):
            yield (
                f"{key}: has url = {url!r} and url_variable = {url_variable!r}; set one of them: the address of the "
                "judge, or the environment variable that has it"
            )
        if url and not url.startswith(("http://", "https://")):
            yield f"{key}.url = {url}: is not an address; begin it with http:// or https://, as in http://host:8000/v1"
        for name in ("key_variable", "url_variable"):
            variable = options.get(name)
            if variable and variable not in environment.secrets:
                yield (
                    f"{key}.{name} = {variable}: must be in environment.secrets, because reward code sees no other "
                    "variables; add it there"
                )
        prompt = options.get("prompt")
        if isinstance(prompt, str) and "{completion}" not in prompt:
            yield f"{key}.prompt: has no {{completion}}, so the judge would not see the answer; add it to the prompt"
        limit_s = options.get("time_limit_s")
        if isinstance(limit_s, int | float) and limit_s >= environment.score_timeout_s:
            yield (
                f"{key}.time_limit_s = {limit_s:g}: must be below environment.score_timeout_s = "
                f"{environment.score_timeout_s:g}, which would end the request earlier; lower the first, or raise the "
                "second"
            )


def _agents(config: Config) -> Iterator[str]:
    what = _agent_setting(config)
    if not what:
        return
    if config.environment.agent and (problem := malformed(config.environment.agent, key="environment.agent")):
        yield problem
    if config.data.chat == "off":
        yield f"{what}: its turns need the model's chat template, which data.chat: off removes; remove data.chat"
    if config.model.tiny is not None and not config.model.tiny.chat:
        yield f"{what}: its turns need a model with a chat template; set model.tiny.chat: true"


def _tools(config: Config) -> Iterator[str]:
    environment = config.environment
    if environment.plays_agents and environment.special_tokens != "drop":
        yield (
            f"environment.special_tokens = {environment.special_tokens}: has no effect on episodes of several turns, "
            "whose answers are messages; remove it"
        )
    if not environment.has_tools:
        return
    key = environment.tools_key
    if config.generator.tool_parser is None:
        yield (
            f"{key}: needs generator.tool_parser, the format in which the model writes calls of tools, such as hermes; "
            "without it, calls stay in the text of an answer"
        )
    if environment.agent is not None:
        yield f"{key}: has no effect with environment.agent, which makes its own calls; remove one of the two"
    for path in environment.tools:
        if problem := malformed(path, key="environment.tools"):
            yield problem
    for server in environment.mcp_servers:
        if bool(server.command) == bool(server.url):
            yield (
                f"environment.mcp_servers: a server has command = {server.command} and url = {server.url!r}; set one "
                "of the two"
            )


def _rewards(config: Config) -> Iterator[str]:
    rewards = config.environment.rewards
    if config.environment.agent is not None and (rewards or config.environment.reward is not None):
        yield (
            "environment.agent: returns the reward itself, so environment.reward and environment.rewards have no "
            "effect; remove them"
        )
    if rewards and config.environment.reward is not None:
        yield "environment.reward: has no effect with environment.rewards; add it there, or remove one of the two"
    for term in rewards:
        if problem := malformed(term.fn, key="environment.rewards"):
            yield f"environment.rewards.{term.name}.fn{problem.removeprefix('environment.rewards')}"
    names = [term.name for term in rewards]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"environment.rewards: has {names.count(name)} rewards with the name {name}; give each its own name"


# Processes that share a GPU.
#
# If a pool's `gpus` is below 1, Ray counts a share of a GPU for each process and does nothing else. Ray fills one GPU
# with shares before it uses the next. It does not look at memory, and it does not know that NCCL refuses two ranks of
# one group on the same GPU. So these rules assume that processes share a GPU whenever Ray may place them on the same
# GPU. The exception is two pools whose node labels keep them on different nodes.

# In floating point 1 - 0.8 is less than 0.2, so comparisons need a margin. Ray counts GPUs in steps of 1e-4, so that
# 1e-6 never hides a real difference.
_ROUNDING = 1e-6


def _shares(config: Config) -> Iterator[str]:
    """Yields violations: shares that Ray cannot place, that NCCL refuses, or that need more memory than a GPU has."""
    pools = config.rank_pools()
    for name, gpus in {"generator": config.generator.gpus, **{name: pool.gpus for name, pool in pools.items()}}.items():
        if gpus > 1 and not gpus.is_integer():
            yield (
                f"{name}.gpus = {gpus}: Ray can share one GPU, but above 1 it takes whole GPUs only; set it to "
                f"{int(gpus)} or {int(gpus) + 1}"
            )
    for name, pool in pools.items():
        if (together := min(pool.ranks, _fit(1.0, pool.gpus))) > 1:
            yield (
                f"{name}.gpus = {pool.gpus:g}: lets Ray place {together} of {name}.ranks = {pool.ranks} on one "
                "GPU, but NCCL refuses two ranks of one group on the same GPU; set it to 1, or above 0.5 to share the "
                f"GPU with engines, or set {name}.ranks to 1"
            )
    generator = config.generator
    engines = min(generator.replicas, _fit(1.0, generator.gpus))
    if engines * generator.gpu_memory_utilization > 1 + _ROUNDING:
        yield _too_much(config, engines, beside=(), left=1.0)


def _share_warnings(config: Config) -> Iterator[str]:
    """Yields a warning if engines take more of a GPU's memory than the share that the ranks on it do not use. If this
    holds for several sets of ranks, the warning is about the one with the smallest rest for each engine."""
    generator = config.generator
    pools = {
        name: pool.gpus
        for name, pool in config.rank_pools().items()
        if pool.gpus > 0 and not _apart(pool.node_labels, generator.node_labels)
    }
    found = []
    for beside in (names for count in range(1, len(pools) + 1) for names in combinations(pools, count)):
        left = 1.0 - sum(pools[name] for name in beside)
        engines = min(generator.replicas, _fit(left, generator.gpus))
        if engines and engines * generator.gpu_memory_utilization > left + _ROUNDING:
            found.append((left / engines, _too_much(config, engines, beside=beside, left=left)))
    if found:
        yield min(found)[1]


def _too_much(config: Config, engines: int, *, beside: Sequence[str], left: float) -> str:
    """Returns the message about engines that take more than `left` of the memory of a GPU that they share with one rank
    of each pool in `beside`."""
    generator, pools = config.generator, config.rank_pools()
    taken, most = engines * generator.gpu_memory_utilization, math.floor(left / engines * 100 + _ROUNDING) / 100
    words = "a replica" if engines == 1 else f"{engines} replicas"
    sharing = [f"{words} of generator.gpus = {generator.gpus:g}"]
    sharing += [f"a rank of {name}.gpus = {pools[name].gpus:g}" for name in beside]
    return (
        f"generator.gpu_memory_utilization = {generator.gpu_memory_utilization:g}: {' and '.join(sharing)} may share "
        f"one GPU, and the engines take {taken:g} of its memory: the process that starts last may not find enough; "
        f"lower it to {most:g}, or raise generator.gpus"
    )


def _fit(left: float, gpus: float) -> int:
    """Returns how many processes with `gpus` each fit into `left`, a share of one GPU; 0 for processes on CPUs."""
    return int(max(0.0, left) / gpus + _ROUNDING) if gpus > 0 else 0


def _apart(ours: Mapping[str, str], theirs: Mapping[str, str]) -> bool:
    """Returns whether node labels place two pools on different nodes.

    Values of Ray's label syntax (`in(a,b)`, `!c`) count as different nodes if their texts differ, even if both allow
    a common node. This errs towards accepting, so that no configuration that could run is refused.
    """
    return any(name in theirs and theirs[name] != value for name, value in ours.items())


def _warnings(config: Config) -> Iterator[str]:
    admissible = (config.staleness.max_versions + 1) * config.learner.groups_per_step
    capacity = min(config.buffer.capacity_groups or admissible, admissible)
    if config.buffer.capacity_bytes < capacity * worst_case_group_bytes(config):
        yield (
            f"buffer.capacity_bytes = {config.buffer.capacity_bytes} is less than the largest size of all groups that "
            f"the staleness limit admits ({capacity} × {worst_case_group_bytes(config)} bytes): generators may wait "
            "for room in the buffer before they reach that limit"
        )
    slots = config.generator.max_concurrent_groups
    if slots > admissible:
        yield (
            f"generator.max_concurrent_groups = {slots} is more than (staleness.max_versions + 1) × "
            f"learner.groups_per_step = {admissible}, the most groups that the staleness limit admits: a replica can "
            "never use the rest"
        )
    if (scale := config.generator.autoscale) is not None and (scale.max - 1) * slots >= capacity:
        yield (
            f"generator.autoscale.max = {scale.max}: {math.ceil(capacity / slots)} replicas of "
            f"generator.max_concurrent_groups = {slots} take all {capacity} groups that the buffer admits, so the pool "
            "does not grow beyond that number; lower generator.max_concurrent_groups to what keeps an engine busy, or "
            "raise staleness.max_versions"
        )
    if config.data.max_prompt_tokens + config.generator.max_completion_tokens > config.model.max_length:
        yield (
            f"data.max_prompt_tokens {config.data.max_prompt_tokens} + generator.max_completion_tokens "
            f"{config.generator.max_completion_tokens} exceed model.max_length {config.model.max_length}: completions "
            "of the longest prompts are cut before generator.max_completion_tokens"
        )
    if config.model.dtype == "bfloat16" and config.generator.gpus == 0:
        yield (
            "model.dtype = bfloat16 on CPUs is slow, and the log-probs of engine and learner differ more than in "
            "float32"
        )
    for name, pool in config.rank_pools().items():
        if not pool.optimizer.learning_rate:
            yield (
                f"{name}.optimizer.learning_rate = 0: no step changes the weights of the {name}; otherwise the run is "
                "like any other, with steps, versions and checkpoints"
            )
    yield from _share_warnings(config)
    yield from _agent_warnings(config)


_RULES: tuple[Callable[[Config], Iterator[str]], ...] = (
    _names,
    _optimizers,
    _tasks,
    _staleness,
    _on_deadline,
    _buffer,
    _step_shape,
    _sharding,
    _limits,
    _weights,
    _lora,
    _model,
    _audit,
    _generator,
    _autoscale,
    engine_args_violations,
    tool_parser_violations,
    _shares,
    _evals,
)


# The address at which the metrics endpoints listen.
#
# It may be a loopback address, which only this machine can reach. If the user allows it, it may be one address of this
# machine in a network. It may never be the address that means all networks, such as 0.0.0.0.

_ALLOWED = "--allow-public to the command (asyncrl.run has no such option: use `asyncrl up` instead)"

_HOST = re.compile(r"[\w.:%-]+")
"""Characters of addresses and names. `socket.inet_aton` ignores a blank and everything after it: `127.0.0.1 x`."""


def check_metrics_host(config: Config, *, allow_public: bool) -> None:
    """Raises ConfigError if `metrics.host` binds every address, or is neither an address nor a name. Also raises it if
    other machines can reach this host, unless `allow_public` is True (the command's option `--allow-public`)."""
    host = config.metrics.host
    address = _address(host)
    if host not in ("", "*") and not _HOST.fullmatch(host):
        problem = (
            "is neither an address nor the name of a machine; set it to one address without blanks, e.g. 127.0.0.1"
        )
    elif host in ("", "*") or (address is not None and address.is_unspecified):
        problem = (
            "would answer to every network, and is not an address that Prometheus can scrape; set it to 127.0.0.1, or "
            f"add {_ALLOWED}, and set it to an address of one network, or to {NODE} for the Ray address of each process"
        )
    elif allow_public or host == "localhost" or (address is not None and address.is_loopback):
        return
    else:
        problem = (
            f"other machines can reach it, and the endpoints have no password; set it to 127.0.0.1, or add {_ALLOWED} "
            "if that network may read the metrics"
        )
    raise ConfigError(f"metrics.host = {host!r}: {problem}")


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Returns the IP address that `host` writes, also in a short form such as `0`; None for a name and for ""."""
    try:
        address = ipaddress.ip_address(host)
        return getattr(address, "ipv4_mapped", None) or address
    except ValueError:
        pass
    try:
        # Sockets accept forms of 0.0.0.0 that ipaddress does not: 0, 0.0, 0x0.
        return ipaddress.IPv4Address(socket.inet_aton(host))
    except (OSError, ValueError):  # ValueError: a null character
        return None
