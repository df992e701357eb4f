"""Key names of other libraries. The error for an unknown key suggests the key of asyncrl with the same meaning."""

from collections.abc import Iterator, Mapping, Sequence

_PENALTY = "a penalty is part of the objective, e.g. `algorithm.overrides: {penalties: [{kind: k3, beta: 0.01}]}`"
_GROUPS = "the number of prompts in a step; learner.group_size is the number of samples of a prompt"

ALIASES: Mapping[str, tuple[str, ...]] = {
    "model.path": ("model_name_or_path", "model_name", "model_id", "pretrained_model_name_or_path"),
    "model.max_length": ("max_model_len", "max_seq_len", "max_seq_length", "seq_len", "context_length"),
    "model.dtype": ("bf16", "fp16", "torch_dtype"),
    "model.lora.rank": ("lora_rank", "lora_r"),
    "model.lora.alpha": ("lora_alpha",),
    "model.lora.target_modules": ("lora_target_modules",),
    "data.path": ("train_files", "train_file", "dataset_path"),
    "data.dataset": ("dataset_name", "train_dataset"),
    "data.epochs": ("num_epochs", "num_train_epochs", "total_epochs"),
    "data.max_prompt_tokens": ("max_prompt_length", "prompt_length"),
    "data.chat": ("chat_template", "apply_chat_template"),
    "environment.reward": ("reward_fn", "reward_func", "reward_funcs", "reward_function"),
    "generator.max_completion_tokens": (
        "max_new_tokens",
        "max_tokens",
        "max_completion_length",
        "max_response_length",
        "response_length",
    ),
    "generator.tensor_parallel_size": ("tp", "tp_size", "tensor_parallel"),
    "generator.gpus": ("num_gpus", "n_gpus", "gpus_per_node", "n_gpus_per_node"),
    "learner.gpus": ("num_gpus", "n_gpus", "gpus_per_node", "n_gpus_per_node"),
    "learner.total_steps": ("max_steps", "num_steps", "num_train_steps", "total_training_steps"),
    "learner.groups_per_step": ("batch_size", "train_batch_size", "rollout_batch_size", "global_batch_size"),
    "learner.group_size": (
        "n",
        "rollout_n",
        "num_generations",
        "num_return_sequences",
        "samples_per_prompt",
        "rollouts_per_example",
    ),
    "learner.micro_batch_size": ("per_device_train_batch_size", "micro_batch_size_per_gpu", "mbs"),
    "learner.activation_checkpointing": ("gradient_checkpointing",),
    "learner.optimizer.learning_rate": ("lr",),
    "learner.optimizer.schedule": ("lr_scheduler", "lr_scheduler_type", "lr_schedule"),
    "learner.optimizer.warmup_steps": ("num_warmup_steps", "lr_warmup_steps", "warmup_ratio"),
    "learner.optimizer.max_grad_norm": ("grad_clip", "clip_grad", "gradient_clipping"),
    "algorithm.overrides": ("beta", "kl_coef", "kl_loss_coef", "init_kl_coef", "kl_beta"),
    "staleness.max_versions": ("max_staleness", "max_async_level", "async_level", "max_off_policy_steps"),
    "checkpoint.every_steps": ("save_steps", "save_freq", "save_interval"),
    "metrics.trackers": ("report_to", "logger", "loggers"),
    "run.name": ("run_name", "experiment_name"),
    "run.dir": ("output_dir", "default_local_dir"),
}
"""Maps a key of asyncrl to its names in other libraries."""

REMARKS: Mapping[str, str] = {"algorithm.overrides": _PENALTY, "learner.groups_per_step": _GROUPS}
"""Maps a key of asyncrl to a remark that a user of another library needs to set it."""

_LORA = "use the section model.lora, which has rank, alpha and target_modules; another kind of adapter is not supported"
NOT_SUPPORTED: Mapping[str, str] = {
    **dict.fromkeys(("peft", "peft_config", "use_peft", "lora_config"), _LORA),
    "qlora": "weights are not quantized; model.lora trains an adapter of the weights in model.dtype",
}
"""Maps names of features that asyncrl does not have, or has in another form, to the message for them."""


def known_elsewhere(path: Sequence[str], value: object) -> str | None:
    """Returns advice for the unknown key at `path` if another library uses its name; else None.

    If `value` is a mapping, the keys inside it are looked up too, so that a section of another library (such as
    `trainer`) gets advice for each known key in it.
    """
    found = list(dict.fromkeys(_answers(path, value)))
    return "; ".join(found) or None


def _answers(path: Sequence[str], value: object) -> Iterator[str]:
    *section, name = path
    if name in NOT_SUPPORTED:
        yield NOT_SUPPORTED[name]
        return
    keys = [key for key, names in ALIASES.items() if name in names]
    if keys:
        beside = [key for key in keys if section and key.startswith(f"{section[0]}.")]
        chosen = beside or keys
        remarks = [f" ({REMARKS[key]})" for key in chosen if key in REMARKS]
        yield f"use {' or '.join(chosen)} instead of {name}{''.join(remarks)}"
    elif isinstance(value, Mapping):
        for below, inner in value.items():
            yield from _answers([*path, str(below)], inner)
