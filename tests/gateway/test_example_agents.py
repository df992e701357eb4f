"""The example agents of configs/agents whose packages are installed, with a real gateway and an engine that follows a
script. benchmarks/agent_clients.py runs all of them."""

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from session_settings import session_settings

from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.data.prompts import Task
from asyncrl.demo.chat_tokenizer import END, build_chat_tokenizer
from asyncrl.environments.agents import Session
from asyncrl.environments.games import CALCULATOR
from asyncrl.gateway.gateway import Answered, Asked, EndedSession
from asyncrl.gateway.rendering import Renderer
from asyncrl.gateway.server import GatewayServer
from asyncrl.generation.interfaces import Completion

EXAMPLES = Path(__file__).parents[2] / "configs" / "agents"
TOKENIZER = build_chat_tokenizer(max_length=1024)
CONFIG = Config.model_validate({"model": {"max_length": 1024}})
TASK = Task(question="What is 6 * 7?", answer="42")

pytestmark = pytest.mark.asyncio


class Engine:
    """Gives the `answers` in turn: texts, or the arguments of a call of the calculator in brackets."""

    def __init__(self, answers: Sequence[str]) -> None:
        self.answers = list(answers)
        self.read = ""

    async def sample(self, asked: Asked) -> Answered:
        assert json.dumps(asked.tools) == json.dumps([CALCULATOR]), "the description that the tiny model knows"
        self.read = TOKENIZER.decode(asked.token_ids)
        text = self.answers.pop(0)
        token_ids = [*TOKENIZER(text)["input_ids"], TOKENIZER.convert_tokens_to_ids(END)]
        count = len(token_ids)
        completion = Completion(
            token_ids=token_ids, logprobs=[-0.5] * count, versions=[Version(1, 0)] * count, text=text, truncated=False
        )
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if text.startswith("["):
            function = {"name": "calculator", "arguments": text[1:-1]}
            call = {"id": f"call-{len(self.answers)}", "type": "function", "function": function}
            message |= {"content": None, "tool_calls": [call]}
        return completion, message


async def played(agent: Any, engine: Engine) -> tuple[float, EndedSession]:
    """Runs an agent in a session of its own. Returns its reward, and what is left of the session."""
    server = GatewayServer(config=CONFIG, renderer=Renderer(TOKENIZER), sample=engine.sample)
    await server.start()
    try:
        [(id, access)] = await server.open(
            [session_settings(max_calls=8, max_branches=1, max_length=CONFIG.model.max_length)]
        )
        session = Session(base_url=access.base_url, api_key=access.api_key, model=access.model)
        reward = await agent(session, TASK)
        [ended] = await server.close([id])
    finally:
        await server.shutdown()
    return reward, ended


def call(expression: str) -> str:
    return f"[{json.dumps({'expression': expression})}]"


RIGHT = [
    (["It is 42."], 1.0, None),
    (["none"], 0.0, None),
    ([call("6 * 7"), "42"], 1.0, "42"),
    ([call("6 * 7"), "41"], 0.0, "42"),
    ([call("6 - 7"), "-1"], 0.0, "-1"),
    ([call("six"), "42"], 1.0, "error: write two numbers"),
    ([call("1 + 1"), call("1 + 2"), call("1 + 3")], 0.0, "3"),
]
WRONG = [
    ("openai_client", ["[{}]", "42"], 1.0, "error: 'expression'"),
    ("openai_client", ['["6 * 7"]', "42"], 1.0, "error: string indices"),
    ("langgraph_agent", ["[{}]", "42"], 1.0, "Error invoking tool"),
]
"""Arguments without the right keys. Each client has its own message for them."""


@pytest.mark.parametrize(
    ("client", "answers", "reward", "result"),
    [*((client, *case) for client in ("openai_client", "langgraph_agent") for case in RIGHT), *WRONG],
)
async def test_each_client_answers_with_the_calculator(
    client: str, answers: list[str], reward: float, result: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for name in ("arithmetic", client):
        monkeypatch.delitem(sys.modules, name, raising=False)
    engine = Engine(answers)
    got, ended = await played(importlib.import_module(client).run, engine)
    assert got == reward
    assert engine.answers == []
    assert (ended.calls, ended.forks, len(ended.episodes)) == (len(answers), {}, 1)
    assert ("<tool_response>" in engine.read) == (result is not None)
    if result is not None:
        assert engine.read.rpartition("<tool_response>")[2].startswith(result)
