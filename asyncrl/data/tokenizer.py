"""The tokenizer that learner and generators share, and its fingerprint for the comparison at start-up."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import xxhash

from asyncrl.errors import ConfigError, DatasetError, RunError

# Conversations: prompts of several messages, for models with a chat template.

Message = dict[str, str]
"""One message of a conversation, with the keys `role` (`system`, `user` or `assistant`) and `content`, a text."""

ROLES = ("system", "user", "assistant")
_MORE_CONTENT = ("tool_calls", "function_call", "tool_call_id", "tools", "images", "image", "videos", "audio")
"""Keys of a message that chat templates would write into the prompt, but which asyncrl does not pass to them. A message
with one of them is refused. Keys with reasoning are not in this list, because templates leave out the reasoning of
earlier turns anyway."""


def checked_messages(value: Iterable[object]) -> tuple[Message, ...]:
    """Returns the messages of a conversation with their `role` and `content` only.

    Raises ValueError, which says what is wrong: no message, another role, content that is not a text, content under
    further keys, or a system message at the end.
    """
    messages = tuple(_checked(message, number) for number, message in enumerate(value, start=1))
    if not messages:
        raise ValueError("is empty")
    if messages[-1]["role"] == "system":
        raise ValueError("ends with the system's message; a prompt ends with a message of the user")
    return messages


def _checked(message: object, number: int) -> Message:
    if not isinstance(message, Mapping):
        raise ValueError(f"has a {type(message).__name__} as message {number}, not an object with `role` and `content`")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise ValueError(f"has the role {role!r} in message {number}; known roles are {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise ValueError(f"has content of type {type(content).__name__} in message {number}; only texts can be used")
    if more := [key for key in _MORE_CONTENT if message.get(key)]:
        raise ValueError(
            f"has {', '.join(more)} in message {number}, which would be left out: only `role` and `content` are used; "
            "write it into the content as the model's chat template does, or remove the key"
        )
    return {"role": str(role), "content": content}


def asked(prompt: str | Sequence[Message]) -> list[Message]:
    """Returns a prompt as messages. A text becomes one message of the user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def as_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Returns a conversation for people to read: the text of its only message, or all messages with their roles.

    >>> as_text([{"role": "user", "content": "2+2="}])
    '2+2='
    >>> as_text([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2="}])
    'system: Be brief.\\nuser: 2+2='
    """
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


Input = str | Sequence[Message]
"""A prompt: a text, or the messages of a conversation."""
Tools = Sequence[Mapping[str, Any]]
"""Descriptions of tools, as OpenAI's chat interface has them."""
EXAMPLE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}},
}
"""Stands for tools whose descriptions are not known yet, when a chat template is checked before a run."""


def load_tokenizer(model_path: str, *, chat: str = "auto", chat_options: Mapping[str, Any] = {}) -> Any:
    """Loads the model's tokenizer. `chat` is `data.chat`: `off` removes the chat template. `chat_options` are variables
    of the template. Local directories are read without a request to a hub. Raises RunError when there is no tokenizer,
    and ConfigError when it does not have the template `chat`, or when its template leaves out messages that are texts.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise RunError(
            f"model.path = {model_path}: cannot load a tokenizer ({str(error).splitlines()[0]}); set model.path to a "
            "directory or a hub model that has one"
        ) from error
    tokenizer.chat_template = chosen_template(tokenizer.chat_template, chat=chat, options=chat_options)
    if _leaves_texts_out(tokenizer):
        raise ConfigError(
            f"model.path = {model_path}: its chat template leaves out messages that are texts, as templates for images "
            "do; set data.chat to off, or use a text model"
        )
    return tokenizer


def _leaves_texts_out(tokenizer: Any) -> bool:
    if not tokenizer.chat_template:
        return False
    try:
        one, other = (encode_prompt(tokenizer, text) for text in ("b", "d"))
    except Exception:  # a template that refuses this conversation may take others
        return False
    return one == other


DEFAULT_TEMPLATE = "default"
"""Name of the template that is used unless another one is chosen. A tokenizer with a single template has only this."""


def chosen_template(
    found: str | Mapping[str, str] | None, *, chat: str, options: Mapping[str, Any]
) -> str | dict[str, str] | None:
    """Returns the chat template to use, or several by name; None for no template. `found` is what the tokenizer has, a
    template or several by name. Each returned template begins by setting the variables `options`.

    `chat` is `data.chat`. With `auto`, several templates stay: transformers then takes `tool_use` for conversations
    with tools if there is one, else `default`. Raises ConfigError if there is no template with the name `chat`, or no
    default.

    >>> chosen_template({"default": "a", "rag": "b"}, chat="rag", options={})
    'b'
    """
    if chat == "off" or (chat == "auto" and not found):
        return None
    templates = found if isinstance(found, Mapping) else {DEFAULT_TEMPLATE: found} if found else {}
    if (name := DEFAULT_TEMPLATE if chat == "auto" else chat) not in templates:
        there = f"only the templates {', '.join(sorted(templates))}" if templates else "no template"
        raise ConfigError(
            f"data.chat = {chat}: needs the chat template {name!r}, but the model's tokenizer has {there}; set "
            f"data.chat to {' or '.join([*sorted(templates), 'off'])}"
        )
    if chat != "auto" or isinstance(found, str):
        return with_options(templates[name], options)
    return {each: with_options(template, options) for each, template in templates.items()}


def with_options(template: str, options: Mapping[str, Any]) -> str:
    """Returns a chat template that begins by setting its variables `options`, such as `enable_thinking: false`.

    >>> with_options("{{ messages[0].content }}", {"enable_thinking": False})
    '{% set enable_thinking = False %}\\n{{ messages[0].content }}'
    """
    # Jinja reads literals of Python. As transformers configures it, it removes the newline after a block.
    return "".join(f"{{% set {name} = {value!r} %}}\n" for name, value in options.items()) + template


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Returns the vocabulary's size and a hash of vocabulary and end-of-sequence token, e.g. `97:3f…`. Tokenizers with
    equal fingerprints give every id the same meaning."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    digest = xxhash.xxh3_64_hexdigest(repr((vocabulary, tokenizer.eos_token_id)).encode())
    return f"{len(vocabulary)}:{digest}"


def encode_prompt(tokenizer: Any, prompt: Input, *, tools: Tools = ()) -> list[int]:
    """Returns the token ids of a prompt, with the tokenizer's chat template if it has one."""
    [ids] = encode_prompts(tokenizer, [prompt], tools=tools)
    return ids


def encode_prompts(tokenizer: Any, prompts: Sequence[Input], *, tools: Tools = ()) -> list[list[int]]:
    """Returns the token ids of each prompt. A fast tokenizer needs half the time of separate calls for each prompt.

    With a chat template, a text becomes the message of a user, and the template gets the `tools`; without a template,
    the `tools` are ignored. The token that begins sequences (BOS) is removed from the beginning of a text if the
    template or the tokenizer writes it too. Raises DatasetError for prompts of messages if the tokenizer has no
    template.
    """
    if not prompts:
        return []
    prompts = with_one_start(tokenizer, prompts)
    if getattr(tokenizer, "chat_template", None):
        ids: list[list[int]] = tokenizer.apply_chat_template(
            [asked(each) for each in prompts],
            tools=list(tools) or None,
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


def check_tools_written(tokenizer: Any, prompt: Input, *, tools: Tools, model: str, key: str) -> None:
    """Raises ConfigError if the chat template does not write the `tools` into this prompt. Templates that know no tools
    ignore them without an error.

    `model` is the path of the model, `key` the setting that names the tools. Raises the template's own error if the
    template refuses the prompt.
    """
    if encode_prompt(tokenizer, prompt, tools=tools) == encode_prompt(tokenizer, prompt, tools=renamed(tools)):
        raise ConfigError(
            f"{key}: the chat template of model.path = {model} does not write the tools into the prompt, so the model "
            "would never see them; use a model whose chat template has tools, or write a chat_template.jinja with "
            "tools into a copy of the model's folder (docs/agents.md, chat templates and tools)"
        )


def renamed(tools: Tools) -> list[dict[str, Any]]:
    """Returns the tools with other names. A chat template that writes the same prompt with these as with `tools`
    ignores tools."""
    return [{**tool, "function": {**tool["function"], "name": f"{tool['function']['name']}_2"}} for tool in tools]


def with_one_start(tokenizer: Any, prompts: Sequence[str | Sequence[Mapping[str, Any]]]) -> Sequence[Any]:
    """Returns the prompts with at most one token that begins sequences (BOS) at the beginning of each text, and with
    none if the tokenizer or the chat template writes it at the beginning of each prompt. A prompt with two of them is
    unlike all that a model was trained on."""
    start = getattr(tokenizer, "bos_token", None)
    if not start or not any(_begins(text, start) for prompt in prompts for text in _texts(prompt)):
        return prompts
    if getattr(tokenizer, "chat_template", None):
        [plain] = tokenizer.apply_chat_template(
            [asked("a")], add_generation_prompt=True, tokenize=True, return_dict=False
        )
    else:
        [plain] = tokenizer(["a"], add_special_tokens=True)["input_ids"]
    kept = "" if list(plain[:1]) == [tokenizer.bos_token_id] else start

    def cut(text: Any) -> Any:
        return kept + _without(text, start) if isinstance(text, str) and _begins(text, start) else text

    return [
        cut(prompt) if isinstance(prompt, str) else [{**each, "content": cut(each.get("content"))} for each in prompt]
        for prompt in prompts
    ]


def _texts(prompt: str | Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the texts of a prompt. Messages of agents may have none, or a list of parts instead."""
    contents = [prompt] if isinstance(prompt, str) else [message.get("content") for message in prompt]
    return [text for text in contents if isinstance(text, str)]


def _begins(text: str, start: str) -> bool:
    return text.lstrip().startswith(start)


def _without(text: str, start: str) -> str:
    while _begins(text, start):
        text = text.lstrip().removeprefix(start)
    return text


def template_tokens(tokenizer: Any, prompt: Input) -> int:
    """Returns how many tokens of a prompt the chat template adds; 0 without a template."""
    if not getattr(tokenizer, "chat_template", None):
        return 0
    alone = tokenizer(_texts(prompt), add_special_tokens=False)["input_ids"]
    return len(encode_prompt(tokenizer, prompt)) - sum(map(len, alone))


MAX_SHOWN_CHARS = 300
"""Longest text of a prompt that is printed when a run starts."""


def shown_prompt(tokenizer: Any, prompt: Input, *, tools: Tools = ()) -> str:
    """Returns one line that shows a prompt as the model gets it, and whether a chat template was applied."""

    ids = encode_prompt(tokenizer, prompt, tools=tools)
    text = repr(str(tokenizer.decode(ids, skip_special_tokens=False)))
    if len(text) > MAX_SHOWN_CHARS:
        text = f"{text[:MAX_SHOWN_CHARS]}…"
    how = "in the model's chat template" if getattr(tokenizer, "chat_template", None) else "without a chat template"
    with_tools = f" with {len(tools)} tool{'' if len(tools) == 1 else 's'}" if tools else ""
    return f"first prompt, {how}{with_tools}, {len(ids)} tokens: {text}"
