"""Rules for `generator.engine_args`, vLLM's own engine arguments, and for `generator.tool_parser`.

asyncrl refuses names that vLLM does not have, arguments that it sets itself, and arguments with which one of its
guarantees would not hold. All others are passed on to vLLM, which checks their values when it starts.
"""

import ast
import difflib
import functools
from collections.abc import Iterator

from asyncrl.config.import_path import suggest
from asyncrl.config.schema import Config
from asyncrl.vllm_internals import installed, source

_KEY = "generator.engine_args"

_OWN_KEYS = {
    "dtype": "model.dtype",
    "enforce_eager": "generator.enforce_eager",
    "gpu_memory_utilization": "generator.gpu_memory_utilization",
    "kv_cache_memory_bytes": "generator.kv_cache_gib",
    "max_model_len": "model.max_length",
    "max_num_seqs": "generator.max_concurrent_groups, which has learner.group_size sequences for each group",
    "model": "model.path",
    "seed": "run.seed",
    "tensor_parallel_size": "generator.tensor_parallel_size",
}
"""Maps each engine argument that asyncrl sets from the configuration to the key from which it follows."""

_REASONS = {
    "the engine must read the same model and the same tokenizer as the learner, from model.path": """
        code_revision config_format convert hf_config_path hf_overrides model_class_overrides model_weights revision
        runner skip_tokenizer_init tokenizer tokenizer_mode tokenizer_revision""",
    "the learner does not run code that comes with a model, so such a model cannot be trained": "trust_remote_code",
    "the configuration is written to files and trackers; set the environment variable HF_TOKEN instead": "hf_token",
    "asyncrl sets it so that it can load the policy's weights": """
        enable_sleep_mode load_format weight_transfer_config worker_cls worker_extension_cls""",
    "an update has plain weights of model.dtype, which a quantized engine could not load": """
        allow_deprecated_quantization quantization quantization_config""",
    "an update writes the weights to the place where the engine computes with them": """
        cpu_offload_gb cpu_offload_params offload_backend offload_group_size offload_num_in_group offload_params
        offload_prefetch_step""",
    "experts would move between processes, and an update would miss them": """
        elastic_ep_max_dp_size enable_elastic_ep enable_eplb eplb_config expert_placement_strategy""",
    "the log-probs must be those of the distribution that was sampled; asyncrl sets it": """
        logprobs_mode max_logprobs return_sampling_mask""",
    "the draft model would keep its first weights, and asyncrl does not check the log-probs of drafted tokens": """
        spec_method spec_model spec_tokens speculative_config""",
    "it changes the distribution that is sampled, and the learner would compute other log-probs": """
        diffusion_config logits_processors watermark_config""",
    "the ends of completions come from the model, and the settings of sampling from `generator`": """
        generation_config override_generation_config""",
    "a weight update uses the prefix cache: it computes running sequences again. The samples of a group share their "
    "prompt through it": "enable_prefix_caching",
    "keys and values that older weights have computed would come back after a weight update": """
        ec_transfer_config kv_events_config kv_offloading_backend kv_offloading_size kv_transfer_config""",
    "the log-probs of prompts would be wrong, and with them the check of every weight update": """
        kv_sharing_fast_prefill""",
    "asyncrl places an engine's processes on one node, and ends them together; for more engines there is "
    "generator.replicas": """
        data_parallel_address data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb
        data_parallel_multi_port_external_lb data_parallel_rank data_parallel_rpc_port data_parallel_size
        data_parallel_size_local data_parallel_start_rank device_ids distributed_executor_backend
        enable_fault_tolerance fault_tolerance_config master_addr master_port nnodes node_rank pipeline_parallel_size
        prefill_context_parallel_size ray_workers_use_nsight""",
    "weight updates rely on vLLM's own scheduler": "scheduler_cls",
    "vLLM would refuse requests of a replica; generator.max_concurrent_groups limits them": """
        max_num_queued_reqs max_num_queued_tokens""",
    "asyncrl reads vLLM's log and its metrics, in the form that they have by default": """
        disable_log_stats log_config_file log_level logging_config""",
    "adapters are set in the section model.lora": """
        default_mm_loras enable_lora enable_mixed_moe_lora_format enable_moe_shared_loras enable_tower_connector_lora
        fully_sharded_loras lora_dtype lora_target_modules max_cpu_loras max_lora_cls_labels max_lora_rank max_loras
        specialize_active_lora""",
}
"""Maps the reason of a refusal to the arguments that are refused for it."""

_SPLIT = "vLLM's CPU worker ends when the prefill of a seeded request is split in two"
_ON_CPUS = dict.fromkeys(("enable_chunked_prefill", "long_prefill_token_threshold", "max_num_scheduled_tokens"), _SPLIT)
"""Arguments that are refused on CPUs only, with the reason."""

REFUSED = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""Maps each argument that is refused on CPUs and GPUs to the reason. It does not contain the arguments of `_OWN_KEYS`,
which are refused too."""


_PARSERS = "_TOOL_PARSERS_TO_REGISTER"


def engine_args_violations(config: Config) -> Iterator[str]:
    """Yields a message for each argument in `generator.engine_args` that is refused."""
    generator = config.generator
    known = engine_arg_names() if generator.engine_args else frozenset()
    for name in generator.engine_args:
        if name in _OWN_KEYS:
            yield f"{_KEY}.{name}: asyncrl sets it; remove it and set {_OWN_KEYS[name]}"
        elif name in REFUSED:
            yield f"{_KEY}.{name}: is refused, because {REFUSED[name]}; remove it"
        elif name in _ON_CPUS and generator.gpus == 0:
            yield f"{_KEY}.{name}: is refused on CPUs, because {_ON_CPUS[name]}; remove it"
        elif known and name not in known:
            hint = suggest(name, sorted(known)) or "; remove it"
            yield f"{_KEY}.{name}: vLLM has no engine argument of this name{hint}"


def tool_parser_violations(config: Config) -> Iterator[str]:
    """Yields a line if the installed vLLM has no tool parser `generator.tool_parser`, with the names that it has, the
    most similar ones first."""
    name, known = config.generator.tool_parser, tool_parser_names()
    if name is None or not known or name in known:
        return
    closest_first = difflib.get_close_matches(name, sorted(known), n=len(known), cutoff=0.0)
    yield f"generator.tool_parser = {name}: vLLM has no such tool parser; set one of {', '.join(closest_first)}"


@functools.cache
def tool_parser_names() -> frozenset[str]:
    """Returns the names of the tool parsers of the installed vLLM; none if vLLM is not installed or has another
    structure. They are read from vLLM's source, because the import of vLLM takes many seconds."""
    folder = installed()
    lines = ast.parse(source(folder, "vllm.tool_parsers")).body if folder is not None else []
    tables = [line.value for line in lines if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == _PARSERS]
    keys = [key for table in tables if isinstance(table, ast.Dict) for key in table.keys]
    return frozenset(str(key.value) for key in keys if isinstance(key, ast.Constant))


@functools.cache
def engine_arg_names() -> frozenset[str]:
    """Returns the names of the engine arguments of the installed vLLM; none if vLLM is not installed or has another
    structure.

    They are read from vLLM's source, because the import of vLLM takes many seconds.
    """
    folder = installed()
    return frozenset() if folder is None else frozenset(_fields(ast.parse(source(folder, "vllm.engine.arg_utils"))))


def _fields(module: ast.Module) -> Iterator[str]:
    names = ("EngineArgs", "AsyncEngineArgs")
    classes = [found for found in module.body if isinstance(found, ast.ClassDef) and found.name in names]
    for line in (line for found in classes for line in found.body if isinstance(line, ast.AnnAssign)):
        if isinstance(line.target, ast.Name) and not line.target.id.startswith("_"):
            yield line.target.id
