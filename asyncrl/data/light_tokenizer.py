"""A tokenizer from a model's files without transformers, whose import loads torch and takes seconds.

It serves to measure prompts when a run starts, and to check prompts, answers and the ends of turns in `asyncrl config
check`. It adds no special tokens of its own, so it never counts more tokens than the model's real tokenizer. When a run
starts and the few missing tokens could matter, the caller asks the real tokenizer.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.data.tokenizer import DEFAULT_TEMPLATE, Tools, chosen_template

TOOL_TEMPLATE = "tool_use"
"""Name of the template that transformers takes for conversations with tools, if there is one."""

MOST_SPECIAL_TOKENS = 2
"""Special tokens that transformers may add to a prompt without a chat template although tokenizer.json does not: one at
the beginning and one at the end (`add_bos_token` and `add_eos_token`)."""


class LightTokenizer:
    """A tokenizer with those methods and attributes of transformers' tokenizers that `encode_prompts` and the module
    `turn_ends` use."""

    all_special_ids: Sequence[int] = ()
    """Empty, because `added_tokens_decoder` has all special tokens."""

    def __init__(
        self, core: Any, *, path: Path, template: Any, names: Mapping[str, Any], tool_template: Any = None
    ) -> None:
        self._core = core
        self._names = names
        self.name_or_path = str(path)
        self.chat_template = template
        self._tool_template = tool_template or template
        self.added_at_most = 0 if template else max(MOST_SPECIAL_TOKENS, core.num_special_tokens_to_add(False))
        """The most tokens that the real tokenizer may add to those that this one counts. It is 0 with a chat template,
        which writes all special tokens itself."""

    def __call__(self, texts: Sequence[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
        encoded = self._core.encode_batch(list(texts), add_special_tokens=False)
        return {"input_ids": [each.ids for each in encoded]}

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """The tokens that were added to the vocabulary learned from text, by their ids. The name is that of
        transformers."""
        found: dict[int, Any] = self._core.get_added_tokens_decoder()
        return found

    @property
    def bos_token(self) -> str | None:
        """The text of the token that begins a sequence; None if the tokenizer has none."""
        return self._names.get("bos_token")

    @property
    def bos_token_id(self) -> int | None:
        """The id of `bos_token`."""
        return None if self.bos_token is None else self._core.token_to_id(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        """The id of the token that ends a sequence; None if the model's files do not name it."""
        token = self._names.get("eos_token")
        return None if token is None else self._core.token_to_id(token)

    def text_of(self, token: int) -> str:
        """Returns the text of an id of the vocabulary."""
        return str(self._core.id_to_token(token))

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids, with special tokens."""
        return str(self._core.decode(list(ids), skip_special_tokens=False))

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        **_: bool,
    ) -> Any:
        """Returns the token ids of a conversation (a list of messages), or of each one in a list of conversations, with
        the beginning of the model's answer if `add_generation_prompt` is true."""
        template = self._tool_template if tools else self.chat_template
        several = not isinstance(conversation[0], Mapping)
        texts = [
            template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._names,
            )
            for messages in (conversation if several else [conversation])
        ]
        ids = self(texts, add_special_tokens=False)["input_ids"]
        return ids if several else ids[0]


def light_tokenizer(
    path: Path, *, chat: str, chat_options: Mapping[str, Any] = {}, tools: Tools = ()
) -> LightTokenizer | None:
    """Loads the tokenizer of the model in the directory `path`. Returns None if only transformers can load this
    tokenizer, or can write the `tools` with its template. Raises ConfigError if it does not have the template
    `chat`."""
    from tokenizers import Tokenizer

    if not (path / "tokenizer.json").is_file():
        return None
    settings = _settings(path)
    chosen = chosen_template(_templates(path, settings), chat=chat, options=chat_options)
    named = chosen if isinstance(chosen, Mapping) else {}
    source = chosen[DEFAULT_TEMPLATE] if isinstance(chosen, Mapping) else chosen
    core = Tokenizer.from_file(str(path / "tokenizer.json"))
    core.no_truncation()
    core.no_padding()
    names = {
        key: _text(value)
        for key, value in settings.items()
        if key.endswith("_token") and isinstance(value, str | Mapping)
    }
    if source is None:
        return LightTokenizer(core, path=path, template=None, names=names)
    try:
        with_tools = _compiled(named[TOOL_TEMPLATE]) if tools and TOOL_TEMPLATE in named else None
        tokenizer = LightTokenizer(core, path=path, template=_compiled(source), names=names, tool_template=with_tools)
        for given in ((), tools):
            tokenizer.apply_chat_template([[{"role": "user", "content": "x"}]], tools=given or None)
    except Exception:  # only transformers can render a template that needs more than these names
        return None
    return tokenizer


def cached_files(model: str) -> Path | None:
    """Returns the folder of a Hub model in the local cache; None if its config.json is not there. Other files may be
    missing."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def _settings(path: Path) -> dict[str, Any]:
    file = path / "tokenizer_config.json"
    found = json.loads(file.read_bytes()) if file.is_file() else {}
    return found if isinstance(found, dict) else {}


def _templates(path: Path, settings: Mapping[str, Any]) -> Any:
    """Returns the chat template, or several by name, from where transformers reads them: files come first."""
    more = sorted((path / "additional_chat_templates").glob("*.jinja"))
    files = {each.name.removesuffix(".jinja"): each for each in more}
    if (default := path / "chat_template.jinja").is_file():
        files = {DEFAULT_TEMPLATE: default} | files
    templates = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    if templates:
        return templates[DEFAULT_TEMPLATE] if [*templates] == [DEFAULT_TEMPLATE] else templates
    found = settings.get("chat_template")
    return {each["name"]: each["template"] for each in found} if isinstance(found, list) else found


def _text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, Mapping) else str(token)


def _as_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Replaces the filter `tojson` of Jinja, which would escape characters of HTML. It has the parameters of the filter
    with which transformers replaces it, in the same order."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _compiled(source: str) -> Any:
    """Compiles a chat template as transformers does. A template is code that comes with a model, so it runs in a
    sandbox."""

    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _as_json
    return environment.from_string(source)


# The files of a model of the Hugging Face Hub, in the cache of this machine.
#
# A process asks the Hub for them once, when it starts, and from then on reads their folder. A request later in the run
# would wait for minutes if the Hub does not answer, and might find another revision.

_DESCRIPTION = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py"]
"""Files of the configuration, of the generation defaults, and of the tokenizer with its templates."""
_WEIGHTS = ["*.safetensors", "pytorch_model*.bin"]
_OTHER_FORMATS = ["*/*.safetensors", "*/*.bin", "consolidated*"]
"""Weights in folders, and in Mistral's own format: copies for other programs."""


def model_folder(model: str, *, weights: bool) -> str:
    """Returns the folder of a model: `model` itself if it is a folder, else its snapshot in the Hub's cache.

    Downloads the files that the cache lacks, those with the weights only if `weights` is true. If the Hub does not
    answer or refuses, returns the snapshot in the cache. If there is none, returns `model`: loading it then raises an
    error with the cause.
    """
    if os.path.isdir(model):
        return model
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    patterns = _DESCRIPTION + (_WEIGHTS if weights else [])
    try:
        return snapshot_download(model, allow_patterns=patterns, ignore_patterns=_OTHER_FORMATS)
    except (OSError, ValueError, HfHubHTTPError):  # no answer or a refusal, and the cache may be incomplete
        return str(cached_files(model) or model)
