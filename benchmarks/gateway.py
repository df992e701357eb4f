"""Measures what the gateway of agents costs: tokens per second through it against the same conversations in process,
its own work for a turn, from the second to the last one, and many sessions at once.

    python benchmarks/gateway.py --write

An engine with a random chat model of 3 million parameters answers conversations of 64 turns. Through the gateway, each
turn is a call of `chat/completions` by httpx to the gateway's process, which asks the engine through Ray, as in a run.
In process, the same messages are rendered and given to the engine without a call. Both ways take turns in pairs of
measurements. The work for a turn is measured without sockets and without an engine: the call is read, its messages
become tokens, and the answer is written.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import ray
from report_page import busy_percent, provenance, write_section
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.demo.chat_tokenizer import build_chat_tokenizer
from asyncrl.environments.agents import Session
from asyncrl.gateway.calls import ChatCall
from asyncrl.gateway.conversations import Conversation, SessionSettings
from asyncrl.gateway.gateway import Answered, Asked
from asyncrl.gateway.messages import Message
from asyncrl.gateway.rendering import Renderer
from asyncrl.gateway.server import RemoteGateway
from asyncrl.generation.interfaces import Completion
from asyncrl.generation.vllm_engine import VLLMEngine, prepare_environment

BENCHMARK = "gateway.py"
TURNS, ANSWER_TOKENS, SESSIONS, PAIRS = 64, 16, 8, 3
MANY, RENDERED = 500, 20
MAX_LENGTH = 4096
NAME = "benchmark-engine"


class Engine:
    """The actor of an engine, in the place of a replica."""

    def __init__(self, config: Config, model_path: str) -> None:
        prepare_environment(config)
        self._config = config
        self._path = model_path

    async def start(self) -> None:
        self._engine = await VLLMEngine.start(self._config, model_path=self._path, name=NAME)
        await self._engine.weights.name(Version(1, 0))
        self._renderer = Renderer(load_tokenizer(self._path))

    async def sample(self, asked: Asked) -> Answered:
        """Answers a call of the gateway."""
        [completion] = await self._engine.generate(
            asked.token_ids, n=1, seed=None, temperature=1.0, max_tokens=asked.max_tokens
        )
        return completion, {"role": "assistant", "content": completion.text}

    async def converse(self, sessions: int, turns: int) -> tuple[float, int]:
        """Has conversations in this process. Returns the seconds that they took, and the tokens that were sampled."""
        begun_s = time.perf_counter()
        tokens = await asyncio.gather(*[self._conversation(number, turns) for number in range(sessions)])
        return time.perf_counter() - begun_s, sum(tokens)

    async def _conversation(self, number: int, turns: int) -> int:
        conversation, messages, tokens = Conversation(self._renderer, settings(turns)), [user(number, 0)], 0
        for turn_number in range(turns):
            turn = conversation.call(messages)
            completion, reply = await self.sample(
                Asked(session="", token_ids=turn.token_ids, max_tokens=ANSWER_TOKENS, temperature=1.0, seed=None)
            )
            conversation.answered(turn, completion, reply)
            turn.delivered = True
            tokens += len(completion.token_ids)
            messages += [reply, user(number, turn_number + 1)]
        return tokens


def settings(turns: int) -> SessionSettings:
    """Returns the settings of a session with this number of calls."""
    return SessionSettings(
        seed=None,
        child=0,
        temperature=1.0,
        max_calls=turns,
        max_branches=1,
        max_length=MAX_LENGTH,
        answer_tokens=ANSWER_TOKENS,
    )


def user(number: int, turn: int) -> dict[str, Any]:
    return {"role": "user", "content": f"The number {number} of turn {turn} is higher."}


async def talk(client: httpx.AsyncClient, access: Session, number: int, turns: int) -> tuple[int, list[float]]:
    """Has a conversation through the gateway. Returns the tokens that were sampled, and the seconds of each call."""
    messages, tokens, seconds = [user(number, 0)], 0, []
    headers = {"Authorization": f"Bearer {access.api_key}"}
    for turn in range(turns):
        begun_s = time.perf_counter()
        body = {"messages": messages, "max_tokens": ANSWER_TOKENS}
        response = await client.post(f"{access.base_url}/chat/completions", headers=headers, json=body)
        seconds.append(time.perf_counter() - begun_s)
        assert response.status_code == 200, response.text
        answer = response.json()
        tokens += answer["usage"]["completion_tokens"]
        messages += [answer["choices"][0]["message"], user(number, turn + 1)]
    return tokens, seconds


async def through_gateway(gateway: RemoteGateway, sessions: int, turns: int) -> tuple[float, int, list[list[float]]]:
    """Returns the seconds that all conversations took, the tokens that were sampled, and the seconds of each call."""
    opened = await gateway.open([settings(turns)] * sessions)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:
        begun_s = time.perf_counter()
        made = await asyncio.gather(*[talk(client, access, i, turns) for i, (_, access) in enumerate(opened)])
        took_s = time.perf_counter() - begun_s
    ended = await gateway.close([id for id, _ in opened])
    assert all(len(each.episodes) == 1 and not each.forks for each in ended), "a conversation has branches"
    return took_s, sum(tokens for tokens, _ in made), [seconds for _, seconds in made]


class TimedRenderer(Renderer):
    """A renderer that measures the time of its last call."""

    seconds = 0.0

    def rest(self, messages: Sequence[Message], **of_call: Any) -> list[int] | str:
        begun_s = time.perf_counter()
        rest = super().rest(messages, **of_call)
        self.seconds = time.perf_counter() - begun_s
        return rest


def turn_seconds(folder: Path) -> tuple[list[float], list[float]]:
    """Returns the seconds that the gateway works for each turn of a conversation, and those of them in which it renders
    the new messages, as medians over conversations."""
    tokenizer = load_tokenizer(str(folder))
    renderer = TimedRenderer(tokenizer)
    text = "The answer of the model has the length of a sentence."
    token_ids = [*tokenizer(text)["input_ids"], renderer.end]
    count = len(token_ids)
    completion = Completion(
        token_ids=token_ids, logprobs=[-1.0] * count, versions=[Version(1, 0)] * count, text=text, truncated=False
    )
    reply = {"role": "assistant", "content": text}
    work: list[list[float]] = [[] for _ in range(TURNS)]
    rendering: list[list[float]] = [[] for _ in range(TURNS)]
    for number in range(RENDERED):
        conversation, messages = Conversation(renderer, settings(TURNS)), [user(number, 0)]
        for turn_number in range(TURNS):
            body = json.dumps({"messages": messages}).encode()
            begun_s = time.perf_counter()
            call = msgspec.json.decode(body, type=ChatCall)
            turn = call.turn(conversation, retry=False)
            asked = turn.token_ids
            conversation.answered(turn, completion, reply)
            msgspec.json.encode(call.answer(turn, model="", number=turn_number))
            work[turn_number].append(time.perf_counter() - begun_s)
            rendering[turn_number].append(renderer.seconds)
            assert len(asked) == turn.length
            turn.delivered = True
            messages += [reply, user(number, turn_number + 1)]
    return [statistics.median(each) for each in work], [statistics.median(each) for each in rendering]


def write_model(path: Path, *, hidden_size: int, layers: int) -> None:
    """Writes a chat model with random weights."""
    tokenizer = build_chat_tokenizer(max_length=MAX_LENGTH)
    described = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=hidden_size // 8,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    for part in (Qwen3ForCausalLM(described), tokenizer):  # type: ignore[no-untyped-call]
        part.save_pretrained(path)


async def cpu_seconds(actor: Any) -> float:
    """Returns the CPU time of an actor's process, with all of its threads."""
    seconds: float = await actor.__ray_call__.remote(lambda _: time.process_time())
    return seconds


def progress(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


async def measured(folder: Path) -> list[str]:
    config = Config.model_validate(
        {
            "run": {"name": "benchmark"},
            "model": {"path": str(folder), "max_length": MAX_LENGTH},
            "generator": {"max_completion_tokens": ANSWER_TOKENS, "kv_cache_gib": 2},
        }
    )
    engine: Any = (
        ray.remote(Engine)
        .options(name=NAME, namespace=config.run.name, num_cpus=1, max_concurrency=2000)
        .remote(config, str(folder))
    )
    await engine.start.remote()
    gateway = RemoteGateway(config=config, model_path=str(folder), replica=NAME)
    await gateway.start()
    progress("engine and gateway have started")
    await engine.converse.remote(2, 4)
    await through_gateway(gateway, 2, 4)
    ratios, rates, calls, used = [], [], [], []
    processes = [gateway._actor, engine]
    for _ in range(PAIRS):
        inside_s, inside_tokens = await engine.converse.remote(SESSIONS, TURNS)
        progress(f"in process: {inside_tokens} tokens in {inside_s:.1f} s")
        before = await asyncio.gather(*map(cpu_seconds, processes))
        took_s, tokens, seconds = await through_gateway(gateway, SESSIONS, TURNS)
        after = await asyncio.gather(*map(cpu_seconds, processes))
        used.append([(b - a) / (SESSIONS * TURNS) for a, b in zip(before, after, strict=True)])
        progress(f"through the gateway: {tokens} tokens in {took_s:.1f} s")
        rates.append((tokens / took_s, inside_tokens / inside_s))
        ratios.append(rates[-1][0] / rates[-1][1])
        calls += [call for each in seconds for call in each]
    begun_s = time.perf_counter()
    _, _, seconds = await through_gateway(gateway, MANY, 2)
    many_s = time.perf_counter() - begun_s
    longest = max(call for each in seconds for call in each)
    of = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    means = [statistics.mean(each) for each in zip(*rates, strict=True)]
    used_ms = [1e3 * statistics.mean(each) for each in zip(*used, strict=True)]
    return [
        f"| tokens per second through the gateway over those in process: {SESSIONS} conversations of {TURNS} turns, "
        f"{ANSWER_TOKENS} tokens each | ≥ 0.9 | {statistics.mean(ratios):.2f} ({of}; {means[0]:,.0f} and "
        f"{means[1]:,.0f} tokens per second; a call takes {statistics.median(calls) * 1e3:.0f} ms) |",
        f"| {MANY} sessions at once, two turns each | no failed call | {2 * MANY} calls answered in {many_s:.0f} s, "
        f"the longest in {longest:.1f} s |",
        f"| CPU time for a call | – | {used_ms[0]:.1f} ms in the gateway, {used_ms[1]:.1f} ms in the process that runs "
        "the engine |",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the table into docs/benchmarks.md")
    arguments = parser.parse_args()
    busy = busy_percent()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), hidden_size=256, layers=4)
        work, rendering = turn_seconds(Path(folder))
        ray.init("local", include_dashboard=False, log_to_driver=False, num_cpus=2)
        try:
            lines = asyncio.run(measured(Path(folder)))
        finally:
            ray.shutdown()
    table = [
        "| measured | goal | reached |",
        "|---|---|---|",
        *lines,
        f"| rendering the new messages of turn {TURNS} over those of turn 2 (medians of {RENDERED} runs) | flat "
        f"| {rendering[-1] / rendering[1]:.2f} ({rendering[-1] * 1e6:.0f} and {rendering[1] * 1e6:.0f} µs) |",
        f"| all work of the gateway for turn {TURNS} over that for turn 2 | – | {work[-1] / work[1]:.2f} "
        f"({work[-1] * 1e6:.0f} and {work[1] * 1e6:.0f} µs) |",
    ]
    print("\n".join(table))
    if arguments.write:
        write_section(BENCHMARK, [provenance(BENCHMARK, busy_percent=busy), "", *table])


if __name__ == "__main__":
    main()
