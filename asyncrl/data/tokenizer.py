"""The tokenizer that both pools share, and its fingerprint for the start-up handshake."""

from collections.abc import Sequence
from typing import Any

import xxhash

from asyncrl.errors import RunError


def load_tokenizer(model_path: str) -> Any:
    """The model's tokenizer. Local directories are read without asking a hub. RunError when there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_path)
    except (OSError, ValueError) as error:
        raise RunError(f"model.path = {model_path}: no tokenizer can be had ({str(error).splitlines()[0]})") from error


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Vocabulary size and a hash of vocabulary and end-of-sequence token, e.g. `97:3f…`: equal ids, equal meaning."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    digest = xxhash.xxh3_64_hexdigest(repr((vocabulary, tokenizer.eos_token_id)).encode())
    return f"{len(vocabulary)}:{digest}"


def encode_prompt(tokenizer: Any, prompt: str) -> list[int]:
    """Ids of a prompt: through the model's chat template where it has one, else the text as it is."""
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
