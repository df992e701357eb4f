"""The tokenizer that learner and generators share, and its fingerprint for the comparison at start-up."""

from collections.abc import Sequence
from typing import Any, Literal

import xxhash

from asyncrl.errors import RunError


def load_tokenizer(model_path: str, *, chat: Literal["auto", "off"] = "auto") -> Any:
    """Loads the model's tokenizer. `chat` is `data.chat`: `off` removes the chat template. Local directories are read
    without a request to a hub. Raises RunError when there is no tokenizer."""
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
    return tokenizer


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Returns the vocabulary's size and a hash of vocabulary and end-of-sequence token, e.g. `97:3f…`. Tokenizers with
    equal fingerprints give every id the same meaning."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    digest = xxhash.xxh3_64_hexdigest(repr((vocabulary, tokenizer.eos_token_id)).encode())
    return f"{len(vocabulary)}:{digest}"


def encode_prompt(tokenizer: Any, prompt: str) -> list[int]:
    """Returns the token ids of a prompt, with the tokenizer's chat template if it has one."""
    [ids] = encode_prompts(tokenizer, [prompt])
    return ids


def encode_prompts(tokenizer: Any, prompts: Sequence[str]) -> list[list[int]]:
    """Runs `encode_prompt` for each prompt, in one call, which takes a fast tokenizer half the time."""
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
    """Returns how many tokens of a prompt the chat template adds; 0 without a template."""
    if not getattr(tokenizer, "chat_template", None):
        return 0
    return len(encode_prompt(tokenizer, prompt)) - len(tokenizer([prompt], add_special_tokens=False)["input_ids"][0])


MAX_SHOWN_CHARS = 300
"""Longest text of a prompt that is printed when a run starts."""


def shown_prompt(tokenizer: Any, prompt: str) -> str:
    """Returns one line that shows a prompt as the model gets it, and whether a chat template was applied."""

    ids = encode_prompt(tokenizer, prompt)
    text = repr(str(tokenizer.decode(ids, skip_special_tokens=False)))
    if len(text) > MAX_SHOWN_CHARS:
        text = f"{text[:MAX_SHOWN_CHARS]}…"
    how = "in the model's chat template" if getattr(tokenizer, "chat_template", None) else "without a chat template"
    return f"first prompt, {how}, {len(ids)} tokens: {text}"
