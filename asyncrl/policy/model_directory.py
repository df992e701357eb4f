"""Reads a model's directory without torch and transformers, before a run starts. Except for `second_head`, this takes
about a tenth of a second.

A directory is refused here only if every later reader would refuse it, too. Questions that its files do not answer,
such as how far scaled positions reach, are left to the engine.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config.schema import Config

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_WEIGHT_FILES = ("*.safetensors", "*.bin")
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_HEADS = ("lm_head.weight", "embed_out.weight")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
MOST_COUNTED = 256
"""Counts in config.json up to this number are accepted without a look at the weights. The largest published models have
126 layers."""
_COUNT = re.compile(r"(layers?|blocks?|depth|labels|dense_replace)$")
"""Ends of those keys of config.json whose value is a number of modules or list entries that transformers makes."""
_CHUNK_BYTES = 2**24
_LONGEST_HEADER = 100_000_000
"""Bytes of the longest header that safetensors accepts."""


def missing_parts(path: Path, *, weights: bool) -> list[str]:
    """Returns the parts of a Hugging Face model that the directory lacks. `weights` says whether weights are needed. Of
    several missing files that the index of the weights names, only the first is returned.

    The engines get their weights from the learner, so a generator's machine needs only config and tokenizer, unless
    the learner sends adapters.
    """
    missing = [] if (path / "config.json").is_file() else ["config.json"]
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        missing.append("a tokenizer (tokenizer.json)")
    if weights and not any(file.is_file() for pattern in _WEIGHT_FILES for file in path.glob(pattern)):
        missing.append("weights (model.safetensors)")
    elif weights and (path / _INDEX).is_file():
        named = set(read_json(path / _INDEX).get("weight_map", {}).values())
        missing += [f"{name}, which {_INDEX} names" for name in sorted(named) if not (path / name).is_file()][:1]
    return missing


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int] | list[Any] = {}


class _TokenizerFile(msgspec.Struct):
    """The part of `tokenizer.json` that is read here."""

    model: _Vocabulary
    added_tokens: list[_AddedToken] = []


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """Sizes of a model, read from its files. A size is None if the files do not give it."""

    vocabulary: int | None
    """Number of tokens for which the model has embeddings."""
    head_size: int | None
    """Width of an attention head."""
    positions: int | None
    """Longest sequence that the model supports, in tokens."""
    tokens: int | None
    """Number of tokens in the tokenizer's vocabulary."""
    added: tuple[str, ...]
    """Tokens that were added to the tokenizer beyond the model's vocabulary. Some published models have such a token
    and never use it: https://github.com/huggingface/transformers/issues/37011"""


def counts_problem(path: Path) -> str | None:
    """Returns why a count in config.json of the model at `path` is refused; None if all fit.

    Libraries make as many modules or names as config.json says, before they look at the weights: 20,000 layers take
    many minutes, and 10^12 layers take all memory. Each layer of a real model has a tensor in the files, so a count
    above `MOST_COUNTED` and above the number of tensors is refused. The number is 0 if the weights are not safetensors
    or cannot be read. Raises OSError or ValueError for a config.json that cannot be read.
    """
    most, name = max(_counts(read_json(path / "config.json")), default=(0, ""))
    if most <= MOST_COUNTED:
        return None
    try:
        tensors = len(_stored_tensors(path))
    except (OSError, ValueError, KeyError, TypeError):
        tensors = 0
    if most <= tensors:
        return None
    return (
        f"{name} in its config.json is {most}, and its weights (*.safetensors) have {tensors} tensors; a number above "
        f"{MOST_COUNTED} must not be larger than the number of tensors: correct config.json, or name another directory"
    )


def _counts(section: dict[str, Any]) -> Iterator[tuple[int, str]]:
    """Yields the numbers in config.json by which libraries make lists of layers or names, with their keys (`_COUNT`),
    in nested sections too."""
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _counts(value)
        elif isinstance(value, int) and _COUNT.search(key):
            yield value, key


def read_model(path: Path) -> ModelFiles:
    """Reads the sizes of the model at `path`. Raises OSError or ValueError for files that cannot be read."""
    config = read_json(path / "config.json")
    vocabulary = _number(config, "vocab_size")
    file = path / "tokenizer.json"
    tokenizer = msgspec.json.decode(file.read_bytes(), type=_TokenizerFile) if file.is_file() else None
    return ModelFiles(
        vocabulary=vocabulary,
        head_size=_head_size(config),
        positions=_positions(config),
        tokens=None if tokenizer is None else _size(tokenizer.model.vocab),
        added=tuple(
            token.content
            for token in ([] if tokenizer is None else tokenizer.added_tokens)
            if vocabulary is not None and token.id >= vocabulary
        ),
    )


def number_of_parameters(path: Path) -> int | None:
    """Returns about how many parameters a model has, by the sizes in its config.json; None if it lacks them.

    It counts the matrices of a decoder with gated layers: attention, layers or experts, embeddings and head. The rest
    is below 1 %. `asyncrl doctor --plan` builds the model and counts exactly, which needs torch and seconds. Raises
    OSError or ValueError for a file that cannot be read.
    """
    config = read_json(path / "config.json")
    hidden, layers = _number(config, "hidden_size", "n_embd"), _number(config, "num_hidden_layers", "n_layer")
    heads, vocabulary = _number(config, "num_attention_heads", "n_head"), _number(config, "vocab_size")
    if not (hidden and layers and heads and vocabulary):
        return None
    key_heads, width = _number(config, "num_key_value_heads") or heads, _head_size(config) or 0
    attention = 2 * hidden * width * (heads + key_heads)
    inner = _number(config, "intermediate_size", "n_inner") or 4 * hidden
    experts = _number(config, "num_experts", "num_local_experts", "n_routed_experts")
    if experts:
        inner = experts * (_number(config, "moe_intermediate_size") or inner)
    tied = any(section.get("tie_word_embeddings") for section in (config, config.get("text_config") or {}))
    return layers * (attention + 3 * hidden * inner) + vocabulary * hidden * (1 if tied else 2)


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in a safetensors file: where its bytes begin, how many there are, and its `form` (dtype, shape)."""

    file: Path
    begin: int
    nbytes: int
    form: tuple[str, tuple[int, ...]]


def second_head(path: Path) -> tuple[str, str] | None:
    """Returns the names of the output head and the embeddings if the files of the model at `path` have both and they
    differ, so that they cannot be one matrix. Returns None for files that are not safetensors or cannot be read: the
    load of the model reports the cause later.

    Reads both tensors until they differ, which takes up to a second for 1 GiB.
    """
    try:
        stored = _stored_tensors(path)
        head = next((name for name in _HEADS if name in stored), None)
        embeddings = next((name for name in stored if name.endswith(_EMBEDDINGS)), None)
        if head is None or embeddings is None or _equal(stored[head], stored[embeddings]):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return head, embeddings


def _stored_tensors(path: Path) -> dict[str, _Stored]:
    """Returns the tensors of the files that transformers loads: one file, or those that an index names."""
    index = path / _INDEX
    names = set(read_json(index)["weight_map"].values()) if index.is_file() else {_WEIGHTS}
    found: dict[str, _Stored] = {}
    for file in (path / name for name in sorted(names)):
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(min(size, _LONGEST_HEADER)))
        if not isinstance(header, dict):
            raise ValueError(f"{file.name} does not begin with a JSON object")
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                form = (entry["dtype"], tuple(entry["shape"]))
                found[name] = _Stored(file, 8 + size + begin, end - begin, form)
    return found


def _equal(one: _Stored, other: _Stored) -> bool:
    if one.form != other.form:
        return False
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.begin)
        second.seek(other.begin)
        for place in range(0, one.nbytes, _CHUNK_BYTES):
            wanted = min(_CHUNK_BYTES, one.nbytes - place)
            if first.read(wanted) != second.read(wanted):
                return False
    return True


CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Widths of attention heads that vLLM 0.32's attention supports on CPUs (`get_supported_head_sizes` of its backend)."""


def model_problems(found: ModelFiles, config: Config) -> list[str]:
    """Returns the reasons why a model of these sizes cannot be used for the run."""
    problems = []
    if found.tokens is not None and found.vocabulary is not None and found.tokens > found.vocabulary:
        problems.append(
            f"model.path = {config.model.path}: the tokenizer has {found.tokens} tokens, but the model's vocabulary "
            f"has only {found.vocabulary}, so the model has no embedding for the others; choose a directory whose "
            "tokenizer belongs to the model"
        )
    if found.positions is not None and config.model.max_length > found.positions:
        problems.append(
            f"model.max_length = {config.model.max_length}: it must be at most {found.positions}, the "
            f"max_position_embeddings of {config.model.path}; lower it"
        )
    if config.generator.gpus == 0 and found.head_size is not None and found.head_size not in CPU_HEAD_SIZES:
        problems.append(
            f"model.path = {config.model.path}: its attention heads have {found.head_size} dimensions, and vLLM on "
            f"CPUs supports only {', '.join(map(str, CPU_HEAD_SIZES))}; choose another model, or generate on a GPU "
            "(generator.gpus)"
        )
    return problems


def _head_size(config: dict[str, Any]) -> int | None:
    explicit = _number(config, "head_dim")
    width, heads = _number(config, "hidden_size", "n_embd"), _number(config, "num_attention_heads", "n_head")
    return explicit or (width // heads if width and heads else None)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises OSError or ValueError for a file that cannot be read."""
    found = json.loads(path.read_bytes())
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} contains a {type(found).__name__}, not a JSON object")
    return found


def _size(vocab: dict[str, int] | list[Any]) -> int:
    return max(vocab.values(), default=-1) + 1 if isinstance(vocab, dict) else len(vocab)


def _positions(config: dict[str, Any]) -> int | None:
    """Returns the longest sequence that the model supports, in tokens. Returns None if config.json does not give it,
    and for scaled positions, because their reach depends on the kind of scaling."""
    sections = (config, config.get("text_config") or {})
    scaling = [section.get(key) for section in sections for key in ("rope_scaling", "rope_parameters")]
    return None if "factor" in json.dumps(scaling) else _number(config, "max_position_embeddings", "n_positions")


def _number(config: dict[str, Any], *names: str) -> int | None:
    for section in (config, config.get("text_config") or {}):
        for name in names:
            if isinstance(section.get(name), int):
                return int(section[name])
    return None
