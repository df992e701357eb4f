"""Rules that involve several fields: each value is valid by itself, but the run would fail with the combination.

A rule yields one message for each violation. The violations of all rules are reported in one error. A warning describes
a configuration that can run, but probably not as the user expects. This module does not import the packages that the
configuration names (torch, vLLM, Ray). The rules about the objective are in `asyncrl.algorithms.checks`.
"""

import operator
import re
from collections.abc import Callable, Iterator
from typing import Any

from asyncrl.config.engine_args import engine_args_violations, tool_parser_violations
from asyncrl.config.gpu_shares import share_violations, share_warnings
from asyncrl.config.import_path import BUILT_IN_NAMES, malformed
from asyncrl.config.schema import WATCHED_DEADLINE, Config, GeneratorSection, marked
from asyncrl.config.task_checks import agent_warnings, eval_violations, task_violations
from asyncrl.errors import ConfigError

BYTES_PER_TOKEN = 24
"""Bytes of a row for each token: token id and weight version (int64), behaviour log-prob and mask (float32)."""
BYTES_PER_SUPPORT_TOKEN = 4
"""Bytes of a row for each token of a token's support (`generator.top_k`): its id, int32."""
BYTES_PER_BRANCH_ID = 4
"""Bytes of a row for each token with `environment.max_branches` above 1: the number of its branch, int32."""
BYTES_PER_ROW = 8
"""Bytes of a row in addition to its tokens: the length, int64."""

# The ids of the Hugging Face Hub: `name` or `owner/name`. No owner on the Hub has the name `models`, so a path that
# begins with `models/` is a folder. The pattern deliberately does not look at the disk: a tiny model that was once
# built under the name of a Hub model must not be mistaken for that model.
_HUB_ID = re.compile(r"(?!models/)\w[\w.-]*(/\w[\w.-]*)?")


_TOGETHER = ", the limit of prompt and completion together; lower it, or raise model.max_length"
_STALL = "; otherwise the run ends before that deadline passes and its error names the cause; raise it, or lower "
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

_RELATIONS = {
    ">=": ("at least", operator.ge),
    ">": ("above", operator.gt),
    "<=": ("at most", operator.le),
    "<": ("below", operator.lt),
}


def check_config(config: Config) -> list[str]:
    """Returns warnings about a configuration that can run.

    Raises ConfigError if the configuration cannot run; its message has one line for each violation. The rules about
    the objective are in `asyncrl.algorithms.checks`.
    """
    violations = [violation for rule in _RULES for violation in rule(config)]
    if violations:
        raise ConfigError("\n".join(violations))
    return list(_warnings(config))


def worst_case_group_bytes(config: Config) -> int:
    """Returns the size of the rows of the largest possible group, bytes.

    A reserve books this size, because the real size of the group is known only when it is committed.
    """
    return config.learner.group_size * (row_tokens(config) * bytes_per_token(config) + BYTES_PER_ROW)


def row_tokens(config: Config) -> int:
    """Returns the number of tokens of the longest possible row: those of all branches of an episode."""
    return config.model.max_length * config.most_branches


def bytes_per_token(config: Config) -> int:
    """Returns the bytes of a row for each token. All tokens of a row take the same: those of the prompt too."""
    of_branches = BYTES_PER_BRANCH_ID if config.most_branches > 1 else 0
    return BYTES_PER_TOKEN + of_branches + (config.generator.top_k or 0) * BYTES_PER_SUPPORT_TOKEN


def _staleness(config: Config) -> Iterator[str]:
    most = config.staleness.max_versions + 1
    if config.weights.publish_every_steps > most:
        yield (
            f"weights.publish_every_steps = {config.weights.publish_every_steps}: must be at most "
            f"staleness.max_versions + 1 = {most}; otherwise generators and learner wait for each other forever; lower "
            "it, or raise staleness.max_versions"
        )


def _on_deadline(config: Config) -> Iterator[str]:
    """A step takes B groups. A straggler can only be in its way if the buffer may hold more groups than that."""
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


def _limits(config: Config) -> Iterator[str]:
    for rule, advice in _LIMITS.items():
        key, sign, limit = rule.split()
        value, bound = _value(config, key), _value(config, limit)
        words, holds = _RELATIONS[sign]
        if value is not None and bound is not None and not holds(value, bound):
            yield f"{key} = {_text(value)}: must be {words} {limit} = {_text(bound)}{advice}"


def _buffer(config: Config) -> Iterator[str]:
    step_groups = config.learner.groups_per_step
    step_bytes = step_groups * worst_case_group_bytes(config)
    if config.buffer.capacity_bytes < step_bytes:
        yield (
            f"buffer.capacity_bytes = {config.buffer.capacity_bytes}: must be at least the largest size of one step, "
            f"{step_bytes} = learner.groups_per_step {step_groups} × learner.group_size {config.learner.group_size} × "
            f"({row_tokens(config)} tokens × {bytes_per_token(config)} + {BYTES_PER_ROW}) bytes, with rows of "
            f"{_row_tokens_text(config)} tokens; raise it"
            f"{', or lower generator.top_k' if config.has_supports else ''}{_or_fewer_branches(config)}"
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
    yield from filters_without_top_k(generator)


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


_RULES: tuple[Callable[[Config], Iterator[str]], ...] = (
    _names,
    task_violations,
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
    engine_args_violations,
    tool_parser_violations,
    share_violations,
    eval_violations,
)


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
    yield from share_warnings(config)
    yield from agent_warnings(config)


def _value(config: Config, key: str) -> Any:
    """Returns the value of a dotted key; None if the key, or a section on the way to it, is unset."""
    found: Any = config
    for name in key.split("."):
        found = None if found is None else getattr(found, name)
    return found


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else f"{value}"
