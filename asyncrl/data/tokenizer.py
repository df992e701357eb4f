"""The tokenizer that learner and generators share, and its fingerprint for the comparison at start-up."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import xxhash

from asyncrl.data.conversation import Message, asked
from asyncrl.errors import DatasetError, RunError

Input = str | Sequence[Message]
"""A prompt: a text, or the messages of a conversation."""


def load_tokenizer(
    model_path: str, *, chat: Literal["auto", "off"] = "auto", chat_options: Mapping[str, Any] = {}
) -> Any:
    """Loads the model's tokenizer. `chat` is `data.chat`: `off` removes the chat template. `chat_options` are variables
    of the template. Local directories are read without a request to a hub. Raises RunError when there is no
    tokenizer."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path)
    except (OSError, ValueError) as error:
        raise RunError(
            f"model.path = {model_path}: cannot load a tokenizer ({str(error).splitlines()[0]}); set model.path to a "
            "directory or a hub model that has one"
        ) from error
    if chat == "off":
        tokenizer.chat_template = None
    elif isinstance(tokenizer.chat_template, str):
        tokenizer.chat_template = with_options(tokenizer.chat_template, chat_options)
    return tokenizer


def with_options(template: str, options: Mapping[str, Any]) -> str:
    """Returns a chat template that begins by setting its variables `options`, such as `enable_thinking: false`.

    >>> with_options("{{ messages[0].content }}", {"enable_thinking": False})
    '{% set enable_thinking = false %}\\n{{ messages[0].content }}'
    """
    # Jinja reads the literals of JSON, and removes the newline after a block, as transformers sets it up.
    return "".join(f"{{% set {name} = {json.dumps(value)} %}}\n" for name, value in options.items()) + template


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Returns the vocabulary's size and a hash of vocabulary and end-of-sequence token, e.g. `97:3f…`. Tokenizers with
    equal fingerprints give every id the same meaning."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    digest = xxhash.xxh3_64_hexdigest(repr((vocabulary, tokenizer.eos_token_id)).encode())
    return f"{len(vocabulary)}:{digest}"


def encode_prompt(tokenizer: Any, prompt: Input) -> list[int]:
    """Returns the token ids of a prompt, with the tokenizer's chat template if it has one."""
    [ids] = encode_prompts(tokenizer, [prompt])
    return ids


def encode_prompts(tokenizer: Any, prompts: Sequence[Input]) -> list[list[int]]:
    """Runs `encode_prompt` for each prompt, in one call, which takes a fast tokenizer half the time.

    With a chat template, a text becomes the message of a user. Raises DatasetError for messages without a template.
    """
    if not prompts:
        return []
    if getattr(tokenizer, "chat_template", None):
        ids: list[list[int]] = tokenizer.apply_chat_template(
            [asked(each) for each in prompts],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
        return ids
    texts = [each for each in prompts if isinstance(each, str)]
    if len(texts) < len(prompts):
        raise DatasetError(
            "the prompts are conversations, but the model's tokenizer has no chat template, or data.chat: off removes "
            "it; use a chat model, or a dataset whose `prompt` is a text, without data.system_prompt and data.few_shot"
        )
    return list(tokenizer(texts, add_special_tokens=True)["input_ids"])


def template_tokens(tokenizer: Any, prompt: Input) -> int:
    """Returns how many tokens of a prompt the chat template adds; 0 without a template."""
    if not getattr(tokenizer, "chat_template", None):
        return 0
    texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    alone = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return len(encode_prompt(tokenizer, prompt)) - sum(map(len, alone))


MAX_SHOWN_CHARS = 300
"""Longest text of a prompt that is printed when a run starts."""


def shown_prompt(tokenizer: Any, prompt: Input) -> str:
    """Returns one line that shows a prompt as the model gets it, and whether a chat template was applied."""

    ids = encode_prompt(tokenizer, prompt)
    text = repr(str(tokenizer.decode(ids, skip_special_tokens=False)))
    if len(text) > MAX_SHOWN_CHARS:
        text = f"{text[:MAX_SHOWN_CHARS]}…"
    how = "in the model's chat template" if getattr(tokenizer, "chat_template", None) else "without a chat template"
    return f"first prompt, {how}, {len(ids)} tokens: {text}"
