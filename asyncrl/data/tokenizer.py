"""The tokenizer that both pools share, and its fingerprint for the start-up handshake."""

from collections.abc import Sequence
from typing import Any, Literal

import xxhash

from asyncrl.errors import RunError


def load_tokenizer(model_path: str, *, chat: Literal["auto", "off"] = "auto") -> Any:
    """The model's tokenizer. `chat`: as `data.chat`; with `off` it has no chat template. Local directories are read
    without asking a hub. RunError when there is no tokenizer."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path)
    except (OSError, ValueError) as error:
        raise RunError(
            f"model.path = {model_path}: cannot load a tokenizer ({str(error).splitlines()[0]}); name a directory or a "
            "model of the hub that has one"
        ) from error
    if chat == "off":
        tokenizer.chat_template = None
    return tokenizer


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Vocabulary size and a hash of vocabulary and end-of-sequence token, e.g. `97:3f…`: equal ids, equal meaning."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    digest = xxhash.xxh3_64_hexdigest(repr((vocabulary, tokenizer.eos_token_id)).encode())
    return f"{len(vocabulary)}:{digest}"


def encode_prompt(tokenizer: Any, prompt: str) -> list[int]:
    """Ids of a prompt: through the tokenizer's chat template where it has one, else the text as it is."""
    [ids] = encode_prompts(tokenizer, [prompt])
    return ids


def encode_prompts(tokenizer: Any, prompts: Sequence[str]) -> list[list[int]]:
    """`encode_prompt` of each, in one call: a fast tokenizer takes half the time for it."""
    if not prompts:
        return []
    if getattr(tokenizer, "chat_template", None):
        ids: list[list[int]] = tokenizer.apply_chat_template(
            [[{"role": "user", "content": prompt}] for prompt in prompts],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
        return ids
    return list(tokenizer(list(prompts), add_special_tokens=True)["input_ids"])


def template_tokens(tokenizer: Any, prompt: str) -> int:
    """How many of a prompt's tokens the chat template adds; 0 without one."""
    if not getattr(tokenizer, "chat_template", None):
        return 0
    return len(encode_prompt(tokenizer, prompt)) - len(tokenizer([prompt], add_special_tokens=False)["input_ids"][0])


MAX_SHOWN_CHARS = 300
"""Longest text of a prompt that is printed when a run starts."""


def shown_prompt(tokenizer: Any, prompt: str) -> str:
    """One line that shows a prompt as the model gets it, and says whether a chat template was applied."""
    ids = encode_prompt(tokenizer, prompt)
    text = repr(str(tokenizer.decode(ids, skip_special_tokens=False)))
    if len(text) > MAX_SHOWN_CHARS:
        text = f"{text[:MAX_SHOWN_CHARS]}…"
    how = "in the model's chat template" if getattr(tokenizer, "chat_template", None) else "without a chat template"
    return f"first prompt, {how}, {len(ids)} tokens: {text}"
