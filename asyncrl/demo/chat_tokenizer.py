"""The tokenizer of a tiny chat model: byte-level BPE, and a chat template with turns and tools as Qwen's models have.

Its merges are learned from `TEXT`, so every process builds the same tokenizer without a dataset. Any text can be
encoded, because all bytes are in the vocabulary.
"""

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Texts that are one token each. The tokens are not special, so that they stay in the text of an answer, where a tool
parser reads them."""
VOCABULARY = 512

TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{% endif %}
{{- 'Tools:' }}
{%- for tool in tools %}{{- '\\n' + tool | tojson }}{% endfor %}
{{- '\\nCall: <tool_call>{"name": NAME, "arguments": {...}}</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function or call %}
{{- '<tool_call>' + {'name': function.name, 'arguments': function.arguments} | tojson + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>' + message.content + '</tool_response><|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think></think>' }}{% endif %}
{%- endif %}
"""

TEXT = """\
system user assistant tool. You are a helpful assistant. Answer the question with a number only. Think step by step.
What is 12 + 7? What is 30 - 18? What is 6 * 9? The answer is 42. Spell the word backward. Write the letters in order.
Sort the words. How many letters are in the word? Which is larger? Guess the number. It is higher. It is lower. Right.
{"name": "calculator", "arguments": {"expression": "2 * (3 + 4)"}} {"name": "lookup", "arguments": {"key": "color"}}
{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object", "properties": {"expression":
{"type": "string"}}}}} Tools: Call: {"name": NAME, "arguments": {...}}
yes no true false first second third last next before after every other more less than left right open close read write
"""


def build_chat_tokenizer(*, max_length: int) -> PreTrainedTokenizerFast:
    """Returns the tokenizer. `END` ends a turn, and is the end of sequence that the model samples."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TAGS),
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(TEXT.splitlines(), trainer=trainer)
    core.add_tokens(list(TAGS))
    tokenizer = fast_tokenizer(
        core, max_length=max_length, pad_token=PAD, eos_token=END, additional_special_tokens=[START]
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def fast_tokenizer(core: Tokenizer, *, max_length: int, **special_tokens: Any) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of transformers that pads on the right."""
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core,
        model_max_length=max_length,
        padding_side="right",
        clean_up_tokenization_spaces=False,
        **special_tokens,
    )
