"""Plays conversations of five turns with the chat templates of TRL's wheel, and shows which of them stay one branch.

    python benchmarks/chat_templates.py

pip downloads the wheel into a temporary folder. Templates that are made for training are left out. Each template gets a
byte-level tokenizer whose control tokens are those in its text. A conversation has five answers of the model; with
tools, the model calls one in the first, second and fourth answer. An agent sends the whole history with each call, as
clients do. A line says that the conversation stayed one branch, or in how many calls it began another one, and why.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from asyncrl.common.version import Version
from asyncrl.data.turn_ends import REFUSALS
from asyncrl.errors import ConfigError, DataError
from asyncrl.gateway.conversations import Conversation, SessionSettings
from asyncrl.gateway.rendering import Renderer
from asyncrl.generation.interfaces import Completion

WHEEL = "trl==1.16.0"
TOOL = {
    "type": "function",
    "function": {"name": "lookup", "description": "Looks up.", "parameters": {"type": "object", "properties": {}}},
}
CONTROL = re.compile(
    r"<[|｜][^<>{}'\"\\ ]{1,40}[|｜]>|</?(?:s|bos|eos|start_of_turn|end_of_turn|turn\|)>|<\|?turn\|?>"
    r"|<end_of_utterance>|\[/?[A-Z_]{3,24}\]"
)
ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|END_OF_TURN_TOKEN|>", "</s>")
ENDS += ("<｜end▁of▁sentence｜>", "<|end_of_text|>", "<|endoftext|>", "<eos>", "<|user|>")
MORE_ENDS = {
    "glm4moe": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    **dict.fromkeys(
        ("diffusion_gemma", "gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5"),
        ("<eos>", "<turn|>", "<|tool_response>"),
    ),
    "gptoss": ("<|return|>", "<|endoftext|>", "<|call|>"),
}
"""Ends in the generation_config.json of models that have more than one."""
SETTINGS = SessionSettings(
    seed=None, child=0, temperature=1.0, max_calls=100, max_branches=100, max_length=10**6, answer_tokens=64
)


def templates() -> Iterator[tuple[str, str]]:
    """Yields the name and the text of each template."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, WHEEL]
        subprocess.run(command, check=True, timeout=300)
        [wheel] = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name in sorted(archive.namelist()):
                if name.endswith(".jinja") and not name.endswith("_training.jinja"):
                    yield Path(name).stem, archive.read(name).decode()


def tokenizer_of(template: str, *, folder: Path | None = None, ends: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Returns a byte-level tokenizer with the control tokens of the template. Its `eos_token` is the first of `ENDS` in
    the template. With `ends`, it is in a folder with a generation_config.json that names them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    end = next((each for each in ENDS if each in template), "<|endoftext|>")
    control = sorted({*CONTROL.findall(template), end, "<s>", *ends})
    core.add_special_tokens([AddedToken(each, special=True) for each in control])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=end, bos_token="<s>")
    tokenizer.chat_template = template
    if folder is not None and ends:
        found = {"eos_token_id": tokenizer.convert_tokens_to_ids(list(ends))}
        (folder / "generation_config.json").write_text(json.dumps(found))
        tokenizer.name_or_path = str(folder)
    return tokenizer


def played(tokenizer: PreTrainedTokenizerFast, *, tools: bool) -> list[str]:
    """Plays a conversation. Returns why calls began a branch, one text for each. Raises the errors of the template."""
    renderer = Renderer(tokenizer)
    if tools:
        renderer.check_tools("q", model="models/own", key="environment.tools")
    conversation = Conversation(renderer, SETTINGS)
    shown = (TOOL,) if tools else ()
    history: list[Mapping[str, Any]] = [{"role": "user", "content": "What is it?"}]
    forks = []
    for number in range(5):
        turn = conversation.call(history, tools=shown)
        if turn.fork is not None:
            forks.append(f"{turn.fork} ({turn.why})" if turn.why else str(turn.fork))
        answer = {"role": "assistant", "content": f"Answer {number}."}
        text = str(answer["content"])
        if tools and number in (0, 1, 3):
            call = {"name": "lookup", "arguments": json.dumps({"n": number})}
            answer = {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": f"call0000{number}", "type": "function", "function": call}],
            }
            text = f"call {number}"
        end = renderer.end_of(called="tool_calls" in answer)
        ids = [*renderer.encoded(text, first_token=False), end]
        got = Completion(
            token_ids=ids, logprobs=[-1.0] * len(ids), versions=[Version(1, 0)] * len(ids), text=text, truncated=False
        )
        read = tokenizer.decode(turn.token_ids)
        lost = [str(message["content"]) for message in history if (message["content"] or "") not in read]
        if lost:
            forks.append(f"the model does not read {lost[0]!r}")
        conversation.answered(turn, got, answer)
        turn.delivered = True
        follow: dict[str, Any] = {"role": "user", "content": f"And {number}?"}
        if "tool_calls" in answer:
            follow = {
                "role": "tool",
                "name": "lookup",
                "content": f"Result {number}.",
                "tool_call_id": f"call0000{number}",
            }
        history = [*history, answer, follow]
    return forks


def outcome(tokenizer: PreTrainedTokenizerFast, *, tools: bool) -> str:
    """Returns what happened in a conversation, in words."""
    try:
        forks = played(tokenizer, tools=tools)
    except ConfigError as error:
        return f"refused: {str(error).partition(':')[2].strip()}"
    except DataError as error:
        return f"refused: {error}"
    except REFUSALS as error:
        return f"the template refuses it: {type(error).__name__}: {str(error).splitlines()[0]}"
    counts = Counter(forks)
    return "one branch" if not forks else ", ".join(f"{reason} in {count} calls" for reason, count in counts.items())


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("| template | end of a turn | without tools | with tools |\n|---|---|---|---|")
    for name, template in templates():
        with tempfile.TemporaryDirectory() as folder:
            tokenizer = tokenizer_of(template, folder=Path(folder), ends=MORE_ENDS.get(name, ()))
            words = [outcome(tokenizer, tools=tools) for tools in (False, True)]
            try:
                end = tokenizer.decode([Renderer(tokenizer).end])
            except ConfigError:
                end = ""
        print(f"| {name} | `{end}` | {words[0]} | {words[1]} |", flush=True)


if __name__ == "__main__":
    main()
