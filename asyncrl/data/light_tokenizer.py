"""A tokenizer from a model's files without transformers, whose import loads torch and takes seconds.

It serves to measure prompts while a run starts. It adds no special tokens of its own, so it never counts more tokens
than the model's real tokenizer, which decides where this matters.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from asyncrl.data.tokenizer import with_options

MOST_SPECIAL_TOKENS = 2
"""Special tokens that transformers may add to a prompt without a chat template although tokenizer.json does not: one at
the beginning and one at the end (`add_bos_token` and `add_eos_token`)."""


class LightTokenizer:
    """Has the methods of a tokenizer that `encode_prompts` calls."""

    def __init__(self, core: Any, *, template: Any, names: Mapping[str, Any]) -> None:
        self._core = core
        self._names = names
        self.chat_template = template
        self.added_at_most = 0 if template else max(MOST_SPECIAL_TOKENS, core.num_special_tokens_to_add(False))
        """Number of tokens that the real tokenizer may add to those that this one counts. A chat template has all of
        its special tokens."""

    def __call__(self, texts: Sequence[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
        encoded = self._core.encode_batch(list(texts), add_special_tokens=False)
        return {"input_ids": [each.ids for each in encoded]}

    def text_of(self, token: int) -> str:
        """Returns the text of an id of the vocabulary."""
        return str(self._core.id_to_token(token))

    def apply_chat_template(self, conversations: Sequence[list[dict[str, str]]], **_: bool) -> list[list[int]]:
        """Returns the token ids of each conversation, up to the beginning of the model's answer."""
        texts = [
            self.chat_template.render(messages=messages, add_generation_prompt=True, **self._names)
            for messages in conversations
        ]
        return self(texts, add_special_tokens=False)["input_ids"]


def light_tokenizer(
    path: Path, *, chat: Literal["auto", "off"], chat_options: Mapping[str, Any] = {}
) -> LightTokenizer | None:
    """Loads the tokenizer of the model in the directory `path`. Returns None if only transformers can load it."""
    from tokenizers import Tokenizer

    if not (path / "tokenizer.json").is_file():
        return None
    settings = _settings(path)
    source = _template(path, settings)
    if source is not None and not isinstance(source, str):
        return None  # several named templates: transformers has the rules for choosing one
    core = Tokenizer.from_file(str(path / "tokenizer.json"))
    core.no_truncation()
    core.no_padding()
    names = {key: _text(value) for key, value in settings.items() if key.endswith("_token") and value is not None}
    if not source or chat == "off":
        return LightTokenizer(core, template=None, names=names)
    try:
        tokenizer = LightTokenizer(core, template=_compiled(with_options(source, chat_options)), names=names)
        tokenizer.apply_chat_template([[{"role": "user", "content": "x"}]])
    except Exception:  # only transformers can render a template that needs more than these names
        return None
    return tokenizer


def cached_files(model: str) -> Path | None:
    """Returns the folder with the files of a model of the Hugging Face Hub; None if they are not in the local cache."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def _settings(path: Path) -> dict[str, Any]:
    file = path / "tokenizer_config.json"
    found = json.loads(file.read_bytes()) if file.is_file() else {}
    return found if isinstance(found, dict) else {}


def _template(path: Path, settings: Mapping[str, Any]) -> Any:
    file = path / "chat_template.jinja"
    return file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")


def _text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, Mapping) else str(token)


def _compiled(source: str) -> Any:
    """Compiles a chat template as transformers does. It is foreign code, so it runs in a sandbox."""

    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    return environment.from_string(source)
