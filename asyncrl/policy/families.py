"""Which models are trained and served correctly, by the `model_type` of their config.json. Does not import torch.

Each entry of `FAMILIES` comes from two comparisons in float32: log-probs of padded and of packed rows with those of
each row alone by transformers' eager attention, and log-probs of vLLM's engine after weight updates with the learner's.
tests/families repeats the first comparison, and docs/models.md shows the table.

A family without an entry is not refused for that. For its models, the ranks compare rows at their start
(`asyncrl.ranks.start_check`), and a replica compares its first weights with the learner's.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError

_ATTENTION_KINDS = frozenset({"full_attention", "sliding_attention", "attention"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The limits of models of one `model_type`. Each text is the reason of a refusal; an empty one refuses nothing."""

    learner: str = ""
    """Why these models cannot be trained."""
    packed: str = ""
    """Why rows cannot be packed."""
    packed_window: str = ""
    """Why packed rows may not be longer than `sliding_window`."""
    engine: str = ""
    """Why no engine can serve these models."""
    engine_on_cpus: str = ""
    """Why no engine on CPUs can serve these models."""
    mixed_windows: str = ""
    """Why no engine can serve those of these models in which only some layers have an attention window."""
    caps: Mapping[str, float] = field(default_factory=dict)
    """Keys of config.json that cap scores or logits, with the family's defaults. A cap that is not null is refused."""
    kinds: frozenset[str] = frozenset()
    """Kinds of layers in `layer_types` that were compared, beside attention with and without a window."""
    tied: bool = False
    """Whether head and embeddings are one matrix if `tie_word_embeddings` is not in config.json."""


_QUANTIZED = ("quantization_config", "compression_config")
"""Keys of config.json for quantized weights. The package compressed-tensors wrote the second one in its first versions.
"""

_OWN_ATTENTION = "it has an attention of its own, which cannot keep packed rows apart"
_MIXERS = "it has layers other than attention, which mix the tokens of packed rows"
_NO_SDPA = (
    "transformers has no attention for it that trains padded rows (sdpa), and its own attention cannot keep packed "
    "rows apart"
)
_SINKS = "its attention has sinks, which neither packed rows nor transformers' sdpa support"
_SCALED = "it scales its logits after the output head, and log-probs are computed from the head"
_BIASED = "its output head has a bias, and log-probs are computed from the head's weight alone"
_MULTIMODAL = "it is multimodal, and asyncrl trains text models"
_BUFFERS = "some of its numbers are buffers, which are neither published to engines nor exported"
_NAMES = "its experts have other names in vLLM than in the learner"
_EXPERTS = "vLLM does not pack updated experts on CPUs, so its log-probs would be wrong after the first update"
_CHUNKED_PREFILL = "vLLM's prefix cache of such models needs chunked prefill, which is off on CPUs"
_FAR = "vLLM's log-probs are not those of transformers, even from the original files"
_VLLM_LACKS = "vLLM has no model for it"
_VLLM_FAILS = "vLLM cannot load weight updates of it"

_RIGHT = Family()
_TIED = Family(tied=True)
_MOE = Family(engine_on_cpus=_EXPERTS)
_RECURRENT = Family(packed=_MIXERS, engine_on_cpus=_CHUNKED_PREFILL, kinds=frozenset({"linear_attention", "conv"}))
_UNTRAINED = Family(learner=_SCALED)
_WITHOUT_SDPA = Family(learner=_NO_SDPA)
_WITHOUT_TEXT = Family(learner=_MULTIMODAL)
_FINAL, _SCORES = "final_logit_softcapping", "attn_logit_softcapping"

FAMILIES: Mapping[str, Family] = {
    # -- the attention that most models of transformers share ----------------------------------------------------
    **dict.fromkeys(("llama", "qwen3", "mistral", "ministral3", "phi3", "glm4", "exaone4"), _RIGHT),
    **dict.fromkeys(("gemma", "gemma3_text", "ernie4_5", "gpt2", "opt"), _TIED),
    **dict.fromkeys(("olmo", "olmo2", "olmo3", "gpt_neox", "ministral", "arcee", "helium", "seed_oss"), _RIGHT),
    **dict.fromkeys(("smollm3", "starcoder2", "gpt_bigcode"), _TIED),
    "hunyuan_v1_dense": _RIGHT,
    "qwen2": Family(mixed_windows="vLLM refuses a window in some of its layers only"),
    "gemma4_text": Family(engine=_BUFFERS, tied=True),
    "apertus": Family(engine=_BUFFERS),
    # -- heads that scale, cap or shift their logits -------------------------------------------------------------
    **dict.fromkeys(("cohere", "granite", "granitemoe", "falcon_h1", "granitemoehybrid", "minicpm3"), _UNTRAINED),
    **dict.fromkeys(("phi", "gptj"), Family(learner=_BIASED)),
    "cohere2": Family(learner=_SCALED, engine=_FAR),
    "recurrent_gemma": Family(learner=_SCALED),
    "nanochat": Family(caps={_FINAL: 15.0}),
    **dict.fromkeys(("gemma2", "vaultgemma"), Family(caps={_FINAL: 30.0, _SCORES: 50.0}, tied=True)),
    "gemma3n_text": Family(caps={_FINAL: 30.0}, engine=_FAR, tied=True),
    # -- attention of their own ----------------------------------------------------------------------------------
    **dict.fromkeys(("stablelm", "nemotron"), Family(packed=_OWN_ATTENTION)),
    "falcon": Family(packed=_OWN_ATTENTION, tied=True),
    "llama4_text": Family(engine_on_cpus=_EXPERTS, kinds=frozenset({"chunked_attention"})),
    **dict.fromkeys(("bloom", "mpt", "gpt_neox_japanese", "openai-gpt", "xglm"), _WITHOUT_SDPA),
    **dict.fromkeys(("mamba", "falcon_mamba", "mamba2"), _WITHOUT_SDPA),
    "gpt_oss": Family(learner=_SINKS),
    # -- mixture of experts --------------------------------------------------------------------------------------
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "olmoe", "flex_olmo", "hunyuan_v1_moe"), _MOE),
    **dict.fromkeys(("dots1", "glm4_moe"), Family(engine=_BUFFERS)),
    "mixtral": Family(engine=_NAMES),
    "deepseek_v2": Family(engine=_NAMES),
    "deepseek_v3": Family(engine=_BUFFERS),
    **dict.fromkeys(("ernie4_5_moe", "minimax_m2"), Family(engine=_VLLM_FAILS)),
    "phimoe": Family(packed_window="its attention has no window when rows are packed", engine=_VLLM_FAILS),
    # -- layers other than attention -----------------------------------------------------------------------------
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear"), _RECURRENT),
    **dict.fromkeys(("lfm2", "nemotron_h", "zamba2"), _RECURRENT),
    "lfm2_moe": Family(packed=_MIXERS, engine=_BUFFERS, kinds=frozenset({"conv"})),
    "olmo_hybrid": Family(packed=_MIXERS, engine=_VLLM_FAILS, kinds=frozenset({"linear_attention"})),
    "minimax": Family(packed=_MIXERS, engine=_VLLM_LACKS, kinds=frozenset({"linear_attention"})),
    **dict.fromkeys(("bamba", "jamba"), Family(packed=_MIXERS, engine=_VLLM_FAILS)),
    # -- images and text -----------------------------------------------------------------------------------------
    **dict.fromkeys(("gemma3", "gemma4", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "mistral3"), _WITHOUT_TEXT),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), _WITHOUT_TEXT),
}
"""The limits of the models of each `model_type` that was compared."""

Json = Mapping[str, Any]


def check_family(model: Json, config: Config, *, path: str) -> None:
    """Raises ConfigError if the learner's ranks cannot train the model at `path`, or would compute wrong log-probs for
    it. `model` is its config.json."""
    if problems := list(dict.fromkeys(_learner_problems(model, config))):
        raise ConfigError("\n".join(f"model.path = {path}: {problem}" for problem in problems))


def family_problems(model: Json, config: Config) -> tuple[list[str], list[str]]:
    """Returns (problems, warnings) of a run with the model of this config.json, for learner and engines. A problem
    refuses the run. If there are problems, no warnings are returned."""
    path = f"model.path = {config.model.path}"
    problems = [*_learner_problems(model, config), *_engine_problems(model, config)]
    warnings = [] if problems else _unknown(model)
    return [f"{path}: {each}" for each in dict.fromkeys(problems)], [f"{path}: {each}" for each in warnings]


def is_tied(model: Json) -> bool:
    """Returns whether head and embeddings are one matrix, by this config.json or else by the family's default."""
    named = [section["tie_word_embeddings"] for section in _sections(model) if "tie_word_embeddings" in section]
    return bool(named[0]) if named else _family(model).tied


def _learner_problems(model: Json, config: Config) -> Iterator[str]:
    name, family, packed = _name(model), _family(model), config.learner.batching == "packed"
    outer = str(model.get("model_type"))
    if key := next((key for key in _QUANTIZED if any(section.get(key) for section in _sections(model))), None):
        yield (
            f"its weights are quantized ({key} in config.json), and the learner trains plain weights; "
            "name the release of this model in bfloat16"
        )
    if model.get("auto_map") and outer not in FAMILIES and not _in_transformers(outer):
        yield (
            f"transformers has no model_type {outer!r}, and asyncrl does not run code that comes with a model "
            "(auto_map in config.json); choose a model of a family that transformers has"
        )
    if family.learner:
        yield f"models of the family {name} cannot be trained: {family.learner}; choose another model"
    for key, default in family.caps.items():
        if (cap := _value(model, key, default)) is not None:
            yield (
                f"models of the family {name} cannot be trained with {key} = {cap}: neither log-probs that are "
                "computed from the output head nor transformers' sdpa have such a cap; choose another model"
            )
    if packed and family.packed:
        yield (
            f"models of the family {name} cannot be trained with learner.batching = packed: {family.packed}; set "
            "learner.batching to dynamic"
        )
    yield from _long_rows(model, config)


def _long_rows(model: Json, config: Config) -> Iterator[str]:
    """Yields a message for each limit of the model that rows of `model.max_length` tokens exceed. Two of
    the limits hold for packed rows only."""
    name, family, longest = _name(model), _family(model), config.model.max_length
    chunk, window = _value(model, "attention_chunk_size"), _value(model, "sliding_window")
    packed = config.learner.batching == "packed"
    if packed and isinstance(chunk, int) and longest > chunk:
        yield (
            f"packed rows of more than {chunk} tokens, the attention_chunk_size in config.json, do not stay apart; "
            f"lower model.max_length = {longest} to {chunk}"
        )
    if packed and family.packed_window and isinstance(window, int) and longest > window:
        yield (
            f"models of the family {name} cannot be trained with learner.batching = packed and rows of more than "
            f"{window} tokens, the sliding_window in config.json: {family.packed_window}; set learner.batching to "
            f"dynamic, or lower model.max_length = {longest} to {window}"
        )
    for kind, original in _rescaled(model):
        if longest > original:
            yield (
                f"its positions are scaled by {kind} (rope_scaling or rope_parameters in config.json): transformers "
                "then looks at the longest row of a pass and vLLM at model.max_length, so log-probs of rows with more "
                f"than {original} tokens differ; lower model.max_length = {longest} to {original}"
            )


def _engine_problems(model: Json, config: Config) -> Iterator[str]:
    name, family = _name(model), _family(model)
    if family.engine:
        yield f"models of the family {name} cannot be served: {family.engine}; choose another model"
    elif family.engine_on_cpus and config.generator.gpus == 0:
        yield (
            f"models of the family {name} cannot be served on CPUs: {family.engine_on_cpus}; generate on a GPU "
            "(generator.gpus), or choose another model"
        )
    if family.mixed_windows and _has_mixed_windows(model):
        yield (
            f"models of the family {name} cannot be served with these windows: {family.mixed_windows}; choose another "
            "model"
        )
    chunk = _value(model, "attention_chunk_size")
    if isinstance(chunk, int) and config.model.max_length > chunk:
        yield (
            f"engines were not compared with the learner for rows of more than {chunk} tokens, the "
            f"attention_chunk_size in config.json; lower model.max_length = {config.model.max_length} to {chunk}"
        )


def _unknown(model: Json) -> list[str]:
    name, outer = _name(model), model.get("model_type")
    if outer not in FAMILIES and outer:
        return [
            f"models of the family {outer} were never compared in asyncrl; the checks at the start of the ranks and of "
            "the replicas decide whether their log-probs are right"
        ]
    kinds = _value(model, "layer_types")
    new = sorted(set(kinds if isinstance(kinds, list) else ()) - _ATTENTION_KINDS - _family(model).kinds, key=str)
    return [
        f"models of the family {name} with layers of the kind {kind} were never compared in asyncrl; the checks at the "
        "start of the ranks and of the replicas decide whether their log-probs are right"
        for kind in new
    ]


def _in_transformers(name: str) -> bool:
    from transformers import CONFIG_MAPPING  # takes seconds, so it is imported only for models that come with code

    return name in CONFIG_MAPPING


def _has_mixed_windows(model: Json) -> bool:
    layers, full = _value(model, "num_hidden_layers"), _value(model, "max_window_layers")
    if not _value(model, "use_sliding_window") or not isinstance(layers, int) or not isinstance(full, int):
        return False
    return 0 < full < layers


def _rescaled(model: Json) -> Iterator[tuple[str, int]]:
    """Yields the kind and the original length of each scaling of positions that depends on the length of rows."""
    for section in _sections(model):
        for rope in _ropes(section):
            kind = str(rope.get("rope_type") or rope.get("type"))
            lengths = [
                each
                for each in (
                    rope.get("original_max_position_embeddings"),
                    section.get("original_max_position_embeddings"),
                    section.get("max_position_embeddings"),
                )
                if isinstance(each, int)
            ]
            if ("dynamic" in kind or kind in ("longrope", "su")) and lengths:
                yield kind, lengths[0]


def _ropes(section: Json) -> Iterator[Json]:
    """Yields the scalings of positions; there may be one for each kind of layer."""
    for key in ("rope_parameters", "rope_scaling"):
        found = section.get(key)
        if isinstance(found, Mapping):
            yield found
            yield from (each for each in found.values() if isinstance(each, Mapping))


def _family(model: Json) -> Family:
    return FAMILIES.get(_name(model), _RIGHT)


def _name(model: Json) -> str:
    """Returns the name of the family: the outer `model_type`, or that of `text_config` if only the latter is in
    `FAMILIES`, as in a wrapper of a known text model."""
    names = [str(section.get("model_type")) for section in _sections(model)]
    return next((name for name in names if name in FAMILIES), names[0])


def _sections(model: Json) -> tuple[Json, ...]:
    inner = model.get("text_config")
    return (model, inner) if isinstance(inner, Mapping) else (model,)


def _value(model: Json, key: str, default: Any = None) -> Any:
    return next((section[key] for section in _sections(model) if key in section), default)
