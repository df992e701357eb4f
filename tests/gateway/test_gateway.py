"""The gateway: what an agent's calls return, what the engine is asked, and which calls are refused."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from session_settings import session_settings

from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.demo.chat_tokenizer import END, build_chat_tokenizer
from asyncrl.environments.agents import Session
from asyncrl.errors import DataError, InfraError
from asyncrl.gateway import calls as module
from asyncrl.gateway.conversations import Conversation
from asyncrl.gateway.gateway import MAX_TOOL_FAILURES, Answered, Asked, Gateway
from asyncrl.gateway.rendering import Renderer
from asyncrl.gateway.server import GatewayServer
from asyncrl.generation.interfaces import Completion
from asyncrl.generation.prefixes import seed_of

TOKENIZER = build_chat_tokenizer(max_length=4096)
END_ID = TOKENIZER.convert_tokens_to_ids(END)
TOOL = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}
BAD_TOOLS: list[Any] = [
    *(5, None, "calculator", [], {}, {"a": 1}, {"type": "function"}, {"function": {}}, {"function": "calculator"}),
    *({"type": "web_search"}, {"type": "function", "function": None}, {"type": 5, "function": {"name": "f"}}),
    *({"function": {"name": 5}}, {"function": {"name": ""}}, {"function": {"name": "f" * 1025}}),
    *({"function": {"name": "f", "parameters": value}} for value in ([], "object", 5)),
    *({"function": {"name": "f", "description": 5}}, {"function": {"name": "f", "strict": "yes"}}),
]
CONFIG = Config.model_validate({"model": {"max_length": 512}})
CALL = {"id": "call-1", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "1"}'}}
HELLO = [{"role": "user", "content": "hello"}]

pytestmark = pytest.mark.asyncio


class Engine:
    """Answers the n-th call with `answer n`, and records what it was asked. Waits for `go`. With tools it calls one."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.go = asyncio.Event()
        self.go.set()
        self.error: Exception | None = None
        self.ended = 0

    async def sample(self, asked: Asked) -> Answered:
        self.asked.append(asked)
        text = f"answer {len(self.asked)}"
        try:
            await self.go.wait()
        finally:
            self.ended += 1
        if self.error is not None:
            raise self.error
        token_ids = [*TOKENIZER(text)["input_ids"], END_ID]
        count = len(token_ids)
        completion = Completion(
            token_ids=token_ids, logprobs=[-0.5] * count, versions=[Version(1, 0)] * count, text=text, truncated=False
        )
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if asked.tools:
            message |= {"content": None, "tool_calls": [CALL]}
        return completion, message


class Served:
    """A gateway with a session, and a client with its key."""

    def __init__(
        self, *, turns: int = 8, branches: int = 8, length: int = 400, renderer: Renderer | None = None
    ) -> None:
        self.engine = Engine()
        self.gateway = Gateway(renderer=renderer or Renderer(TOKENIZER), sample=self.engine.sample, model="run")
        limits = {"max_calls": turns, "max_branches": branches, "max_length": length}
        self.settings = session_settings(seed=98, child=2, temperature=0.7, **limits)
        self.id, self.access = self.open()
        transport = httpx.ASGITransport(app=self.gateway.app)
        self.client = httpx.AsyncClient(transport=transport, base_url=self.access.base_url)

    def open(self) -> tuple[str, Session]:
        return self.gateway.open(self.settings, url="http://gateway")

    async def post(self, path: str = "/chat/completions", *, key: str | None = None, **options: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.access.api_key if key is None else key}"} | options.pop(
            "headers", {}
        )
        return await self.client.post(f"{self.access.base_url}{path}", headers=headers, **options)

    async def say(self, messages: list[dict[str, Any]], **body: Any) -> dict[str, Any]:
        response = await self.post(json={"messages": messages, **body})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer


@pytest.fixture
def served() -> Served:
    return Served()


def refused(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


async def test_the_tokens_of_two_turns_are_one_episode(served: Served) -> None:
    first = (await served.say(HELLO))["choices"][0]["message"]
    answer = await served.say([*HELLO, first, {"role": "user", "content": "more"}], return_token_ids=True)
    ended = await served.gateway.close(served.id)
    [episode] = ended.episodes
    tokens = [token for node in episode.nodes for token in node.token_ids]
    assert served.engine.asked[1].token_ids == answer["prompt_token_ids"]
    assert tokens == [*answer["prompt_token_ids"], *answer["choices"][0]["token_ids"]]
    assert TOKENIZER.decode(tokens) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nanswer 1<|im_end|>\n"
        "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\nanswer 2<|im_end|>"
    )
    assert [node.sampled for node in episode.nodes] == [False, True, False, True]
    assert (ended.calls, ended.forks, ended.error) == (2, {}, None)


@pytest.mark.parametrize(
    ("tool", "error", "message"),
    [
        ("price", "ValueError", "no (shop.py:3)"),
        ("p" * 500, "E" * 500, "m" * 5000),
        ("\ud800", "", "\ud800\n"),
    ],
    ids=["short", "long", "surrogates"],
)
async def test_failed_calls_of_tools_are_in_the_ended_session(
    served: Served, monkeypatch: pytest.MonkeyPatch, tool: str, error: str, message: str
) -> None:
    monkeypatch.setattr("asyncrl.environments.agents._client", lambda: served.client)
    await served.access.tool_failed(tool, error=error, message=message)
    await served.access.begin()
    for _ in range(MAX_TOOL_FAILURES + 1):
        await served.access.tool_failed(tool, error=error, message=message)
    failures = (await served.gateway.close(served.id)).tool_failures
    assert len(failures) == MAX_TOOL_FAILURES, "an agent that began again is counted once, and memory is bounded"
    [(name, kind, text)] = {(each.tool, each.error, each.message) for each in failures}
    assert (name[:5], kind[:5], text[:5]) == (
        tool[:5].replace("\ud800", "\\ud80"), error[:5], message[:5].replace("\ud800\n", "\\ud80")
    )  # fmt: skip
    assert (len(name) <= 100, len(kind) <= 100, len(text) <= 1001) == (True, True, True)


async def test_the_runs_sampling_settings_apply_whatever_the_agent_asks_for(served: Served) -> None:
    await served.say(HELLO, temperature=0, seed=1, max_tokens=1000, stop="\n", top_p=0.1)
    await served.say([*HELLO, {"role": "user", "content": "other"}], max_completion_tokens=3)
    first, second = served.engine.asked
    assert (first.temperature, first.seed, first.max_tokens, first.stop) == (0.7, 100, 16, ("\n",))
    assert (second.seed, second.max_tokens) == (seed_of(98, 2, 1), 3)


async def test_an_answer_gets_no_more_tokens_than_the_sequence_has_room_for() -> None:
    length = len(Renderer(TOKENIZER).first(HELLO, []))
    served = Served(length=length + 5)
    await served.say(HELLO)
    assert served.engine.asked[0].max_tokens == 5
    served = Served(length=length)
    assert refused(await served.post(json={"messages": HELLO})) == (400, "context_length_exceeded")
    ended = await served.gateway.close(served.id)
    assert "model.max_length" in ended.limit
    assert ended.episodes == ()


async def test_calls_that_are_too_long_count_and_are_not_kept() -> None:
    served = Served(turns=2, length=60)
    answer = (await served.say(HELLO))["choices"][0]["message"]
    long = [*HELLO, answer, {"role": "user", "content": "x" * 200}]
    assert refused(await served.post(json={"messages": long})) == (400, "context_length_exceeded")
    assert refused(await served.post(json={"messages": long})) == (400, "max_turns")
    headers = {"x-stainless-retry-count": "1"}
    assert refused(await served.post(json={"messages": long}, headers=headers)) == (400, "max_turns")
    ended = await served.gateway.close(served.id)
    assert (ended.calls, len(ended.episodes), len(served.engine.asked)) == (2, 1, 1)


async def test_a_session_has_a_limit_of_calls() -> None:
    served = Served(turns=1)
    answer = (await served.say(HELLO))["choices"][0]["message"]
    again = [*HELLO, answer, {"role": "user", "content": "more"}]
    assert refused(await served.post(json={"messages": again})) == (400, "max_turns")
    ended = await served.gateway.close(served.id)
    assert "environment.max_turns" in ended.limit
    assert len(ended.episodes) == 1


async def test_a_session_has_a_limit_of_branches() -> None:
    served = Served(branches=2)
    answer = (await served.say(HELLO))["choices"][0]["message"]
    other = [{"role": "user", "content": "another beginning"}]
    await served.say(other)
    assert refused(await served.post(json={"messages": HELLO})) == (400, "max_branches")
    await served.say([*HELLO, answer, {"role": "user", "content": "more"}])  # this continues a branch
    ended = await served.gateway.close(served.id)
    assert "(resampled)" in ended.limit
    assert "environment.max_branches" in ended.limit
    assert len(ended.episodes) == 2


async def test_a_retry_gets_the_recorded_reply_and_another_call_gets_a_new_one(served: Served) -> None:
    first = await served.say(HELLO)
    retried = await served.post(json={"messages": HELLO}, headers={"x-stainless-retry-count": "1"})
    assert retried.json()["choices"] == first["choices"]
    by_key = [await served.post(json={"messages": HELLO}, headers={"Idempotency-Key": "k"}) for _ in range(2)]
    assert by_key[0].json()["choices"] == by_key[1].json()["choices"] != first["choices"]
    ended = await served.gateway.close(served.id)
    assert (ended.calls, ended.forks) == (2, {"resampled": 1})


async def test_a_call_goes_on_when_its_client_gives_up_and_a_retry_gets_the_reply(served: Served) -> None:
    served.engine.go.clear()
    call = asyncio.create_task(served.post(json={"messages": HELLO}))
    while not served.engine.asked:
        await asyncio.sleep(0.01)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    retry = asyncio.create_task(served.post(json={"messages": HELLO}, headers={"x-stainless-retry-count": "1"}))
    await asyncio.sleep(0.05)  # the retry arrives
    served.engine.go.set()
    assert (await retry).json()["choices"][0]["message"]["content"] == "answer 1"
    assert len(served.engine.asked) == 1


async def test_the_end_of_a_session_ends_its_calls(served: Served) -> None:
    served.engine.go.clear()
    call = asyncio.create_task(served.post(json={"messages": HELLO}))
    while not served.engine.asked:
        await asyncio.sleep(0.01)
    ended = await served.gateway.close(served.id)
    assert (ended.episodes, served.engine.ended) == ((), 1)
    assert (await call).status_code == 503
    assert refused(await served.post(json={"messages": HELLO})) == (401, "no_session")


async def test_a_failure_of_the_engine_is_kept_for_the_rollout(served: Served) -> None:
    served.engine.error = InfraError("the engine failed", reason="engine")
    assert refused(await served.post(json={"messages": HELLO})) == (503, "engine_failed")
    assert (await served.gateway.close(served.id)).error is served.engine.error


async def test_a_call_that_the_engine_refuses_is_the_agents_own_failure(served: Served) -> None:
    served.engine.error = DataError("token id 999 is not in the vocabulary", reason="prompt_refused")
    response = await served.post(json={"messages": HELLO})
    assert refused(response) == (400, "prompt_refused")
    assert "token id 999" in response.text
    assert (await served.gateway.close(served.id)).error is None


async def test_begin_forgets_the_calls_of_an_earlier_attempt(served: Served) -> None:
    await served.say(HELLO)
    begin = served.access.base_url.removesuffix("/v1") + "/begin"
    response = await served.client.post(begin, headers={"Authorization": f"Bearer {served.access.api_key}"}, json={})
    assert response.status_code == 200
    await served.say(HELLO)
    ended = await served.gateway.close(served.id)
    assert (ended.calls, ended.forks, len(ended.episodes)) == (1, {}, 1)
    assert [asked.begun for asked in served.engine.asked] == [0, 1]


@pytest.mark.parametrize("path", ["/chat/completions", "/completions"])
async def test_a_call_whose_agent_begins_again_at_the_moment_of_its_answer_is_refused(
    served: Served, path: str
) -> None:
    served.engine.go.clear()
    body = {"messages": HELLO, "prompt": "hello"}
    call = asyncio.create_task(served.post(path, json=body))
    while not served.engine.asked:
        await asyncio.sleep(0)
    served.engine.go.set()
    while served.gateway._sessions[served.id].calls:
        await asyncio.sleep(0)
    session = served.gateway._sessions[served.id]
    session.conversation = Conversation(served.gateway._renderer, session.settings)  # as `begin` does
    assert refused(await call) == (503, "begun_again")


async def test_a_retry_of_a_call_that_failed_is_sampled_although_an_equal_call_was_answered(served: Served) -> None:
    served.engine.error = InfraError("the engine failed", reason="engine")
    body = {"prompt": "one:"}
    assert refused(await served.post("/completions", json=body)) == (503, "engine_failed")
    served.engine.error = None
    texts = [
        (await served.post("/completions", json=body, headers={"x-stainless-retry-count": retry})).json()["choices"][0][
            "text"
        ]
        for retry in ("0", "1", "1")
    ]
    assert texts == ["answer 2", "answer 3", "answer 2"]
    assert (await served.gateway.close(served.id)).error is None


async def test_calls_without_the_key_of_an_open_session_are_refused(served: Served) -> None:
    other_id, other = served.open()
    for key in ("", "wrong", other.api_key):
        assert refused(await served.post(json={"messages": HELLO}, key=key)) == (401, "no_session")
    unknown = served.access.base_url.replace(served.id, "0" * 16)
    headers = {"Authorization": f"Bearer {served.access.api_key}"}
    assert refused(await served.client.get(f"{unknown}/models", headers=headers)) == (401, "no_session")
    await served.gateway.close(other_id)
    assert (await served.client.get(f"{served.access.base_url}/models", headers=headers)).status_code == 200
    assert served.engine.asked == []


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{", (400, "bad_call")),
        (b"[]", (400, "bad_call")),
        (b"\xff" * 10, (400, "bad_call")),
        (b"{}", (400, "bad_call")),
        (b'{"messages": []}', (400, "bad_call")),
        (b'{"messages": ["hello"]}', (400, "bad_call")),
        (b'{"messages": [{"role": "user", "content": 5}]}', (400, "bad_messages")),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', (400, "bad_messages")),
        (b'{"messages": [{"role": "assistant", "tool_calls": [{}]}]}', (400, "bad_messages")),
        (json.dumps({"messages": HELLO, "n": 2}).encode(), (400, "not_supported")),
        (json.dumps({"messages": HELLO, "response_format": {"type": "json_object"}}).encode(), (400, "not_supported")),
        (json.dumps({"messages": HELLO, "max_tokens": "many"}).encode(), (400, "bad_call")),
        (json.dumps({"messages": HELLO, "max_tokens": -1}).encode(), (400, "bad_call")),
        (json.dumps({"messages": HELLO, "stop": 5}).encode(), (400, "bad_call")),
        (json.dumps({"messages": HELLO, "stop": ""}).encode(), (400, "bad_call")),
        (json.dumps({"messages": HELLO, "stop": ["a", ""]}).encode(), (400, "bad_call")),
        (json.dumps({"messages": HELLO, "stop": ["a"] * 17}).encode(), (400, "bad_call")),
        *((json.dumps({"messages": HELLO, "tools": [tool]}).encode(), (400, "bad_call")) for tool in BAD_TOOLS),
        (json.dumps({"messages": HELLO, "tools": {}}).encode(), (400, "bad_call")),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', (400, "bad_call")),
        (json.dumps({"messages": HELLO, "max_completion_tokens": 1.5}).encode(), (400, "bad_call")),
        (json.dumps({"messages": HELLO, "stream": "yes"}).encode(), (400, "bad_call")),
        (json.dumps({"messages": HELLO, "tool_choice": 5}).encode(), (400, "bad_call")),
        (json.dumps({"messages": HELLO, "logit_bias": [5]}).encode(), (400, "bad_call")),
        (b'{"messages": [{"role": "user", "content": ' + b"[" * 10**5 + b"]" * 10**5 + b"}]}", (400, "bad_call")),
        (b" " * (module.MAX_BODY_BYTES + 1), (413, "too_large")),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_unusable_calls_are_refused_and_reach_no_engine(
    served: Served, body: bytes, expected: tuple[int, str]
) -> None:
    assert refused(await served.post(content=body)) == expected
    assert served.engine.asked == []


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, "bad_call"),
        ({"prompt": ""}, "bad_call"),
        ({"prompt": []}, "bad_call"),
        ({"prompt": ["a", "b"]}, "bad_call"),
        ({"prompt": [[1], [2]]}, "bad_call"),
        ({"prompt": [1, "a"]}, "bad_call"),
        ({"prompt": [-1]}, "bad_call"),
        ({"prompt": [2**31]}, "bad_call"),
        ({"prompt": [10**30]}, "bad_call"),
        ({"prompt": {"text": "a"}}, "bad_call"),
        ({"prompt": "a", "n": 2}, "not_supported"),
        ({"prompt": "a", "best_of": 2}, "not_supported"),
        ({"prompt": "a", "echo": True}, "not_supported"),
        ({"prompt": "a", "suffix": "b"}, "not_supported"),
        ({"prompt": "a", "logprobs": 0}, "not_supported"),
        ({"prompt": "a" * 10_000}, "context_length_exceeded"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_unusable_calls_with_a_text_are_refused(served: Served, body: dict[str, Any], expected: str) -> None:
    assert refused(await served.post("/completions", json=body)) == (400, expected)
    assert served.engine.asked == []


async def test_a_text_is_continued_as_one_episode(served: Served) -> None:
    async def complete(prompt: Any, **body: Any) -> dict[str, Any]:
        response = await served.post("/completions", json={"prompt": prompt, **body})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    first = await complete("one:", max_tokens=7, stop="\n", return_token_ids=True)
    [choice] = first["choices"]
    assert (choice["text"], choice["finish_reason"], first["object"]) == ("answer 1", "stop", "text_completion")
    assert choice["prompt_token_ids"] == TOKENIZER("one:")["input_ids"]
    assert (served.engine.asked[0].max_tokens, served.engine.asked[0].stop) == (7, ("\n",))
    second = await complete(["one:answer 1 two:"])
    assert second["choices"][0]["text"] == "answer 2"
    await complete([*choice["prompt_token_ids"], *choice["token_ids"], 5])
    ended = await served.gateway.close(served.id)
    assert ended.forks == {"edited": 1}
    first_branch, second_branch = ended.episodes
    assert [node.sampled for node in first_branch.nodes] == [False, True, False, True]
    assert [node.sampled for node in second_branch.nodes] == [False, False, False, True]


def generate_path(access: Session) -> str:
    return access.base_url.removesuffix("/v1") + "/inference/v1/generate"


async def test_an_agent_that_renders_itself_continues_its_tokens(served: Served) -> None:
    async def generate(token_ids: list[int], **sampling: Any) -> dict[str, Any]:
        body = {"model": "m", "token_ids": token_ids, "sampling_params": {"logprobs": 1, "temperature": 0, **sampling}}
        headers = {"Authorization": f"Bearer {served.access.api_key}"}
        response = await served.client.post(generate_path(served.access), headers=headers, json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    first = await generate([5, 6, 7], max_tokens=9)
    [choice] = first["choices"]
    sampled = choice["token_ids"]
    assert [each["token_id"] for each in choice["logprobs"]["content"]] == sampled
    assert [each["token"] for each in choice["logprobs"]["content"]] == [f"token_id:{token}" for token in sampled]
    assert {each["logprob"] for each in choice["logprobs"]["content"]} == {-0.5}
    assert choice["weight_versions"] == [{"version": "1.0", "start": 0, "end": len(sampled)}]
    assert (served.engine.asked[0].max_tokens, served.engine.asked[0].temperature) == (9, 0.7)
    second = [5, 6, 7, *sampled, 8, 9]
    await generate(second)
    ended = await served.gateway.close(served.id)
    [episode] = ended.episodes
    assert [list(node.token_ids) for node in episode.nodes][:3] == [[5, 6, 7], sampled, [8, 9]]
    assert [node.sampled for node in episode.nodes] == [False, True, False, True]
    assert ended.forks == {}


async def test_tokens_that_do_not_continue_the_last_call_are_a_fork(served: Served) -> None:
    headers = {"Authorization": f"Bearer {served.access.api_key}"}

    async def generate(token_ids: list[int], retry: str = "0") -> list[int]:
        response = await served.client.post(
            generate_path(served.access),
            headers={**headers, "x-stainless-retry-count": retry},
            json={"token_ids": token_ids},
        )
        tokens: list[int] = response.json()["choices"][0]["token_ids"]
        return tokens

    sampled = await generate([5, 6, 7])
    assert await generate([5, 6, 7], retry="1") == sampled
    await generate([5, 6, 7])
    await generate([5, 6, 7, *sampled, 8])
    await generate([5, 6, 7, *sampled, 9])
    await generate([5, 6])
    ended = await served.gateway.close(served.id)
    assert ended.forks == {"resampled": 1, "edited": 2, "compacted": 1}
    trained = [node for episode in ended.episodes for node in episode.nodes if node.sampled]
    assert len(trained) == 5, "each answer is trained once"


# --- with a real server and a real client ------------------------------------------------------------------------


@asynccontextmanager
async def listening(calls: int = 8) -> AsyncIterator[tuple[Engine, Session]]:
    engine = Engine()
    server = GatewayServer(config=CONFIG, renderer=Renderer(TOKENIZER), sample=engine.sample)
    await server.start()
    try:
        [(id, access)] = await server.open([session_settings(max_calls=calls, max_branches=calls, max_length=512)])
        yield engine, access
        await server.close([id])
    finally:
        await server.shutdown()


@pytest_asyncio.fixture
async def client() -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        listening() as (_, access),
        openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0) as client,
    ):
        yield client


async def test_the_openai_client_runs_a_conversation(client: openai.AsyncOpenAI) -> None:
    [model] = [model.id async for model in client.models.list()]
    messages: list[Any] = [*HELLO]
    first = await client.chat.completions.create(model=model, messages=messages)
    messages += [first.choices[0].message, {"role": "user", "content": "more"}]
    second = await client.chat.completions.create(model=model, messages=messages)
    assert [each.choices[0].message.content for each in (first, second)] == ["answer 1", "answer 2"]
    assert second.choices[0].finish_reason == "stop"
    assert second.usage is not None
    assert second.usage.prompt_tokens > first.usage.total_tokens  # type: ignore[union-attr]


@pytest.mark.parametrize("error", [IndexError, ZeroDivisionError, AssertionError, OSError, RecursionError, Exception])
async def test_any_error_of_a_template_refuses_the_call(error: type[Exception]) -> None:
    class Failing(Renderer):
        def first(self, *_: Any, **__: Any) -> Any:
            raise error("of the template")

    served = Served(renderer=Failing(TOKENIZER))
    assert refused(await served.post(json={"messages": HELLO})) == (400, "bad_messages")
    assert served.engine.asked == []


@pytest.mark.parametrize("tools", [
    [TOOL],
    [TOOL, {**TOOL, "function": {**TOOL["function"], "name": "other"}}],
    [{"type": "function", "function": {"name": "without_parameters"}}],
], ids=["one", "two", "without parameters"])  # fmt: skip
async def test_tools_that_the_template_does_not_write_refuse_the_call(
    tools: list[dict[str, Any]],
) -> None:
    without_tools = build_chat_tokenizer(max_length=4096)
    without_tools.chat_template = without_tools.chat_template.replace("tools", "none")
    served = Served(renderer=Renderer(without_tools))
    assert refused(await served.post(json={"messages": HELLO, "tools": tools})) == (400, "tools_ignored")
    assert served.engine.asked == []
    assert await served.say(HELLO)


async def test_the_openai_client_calls_tools(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="", messages=HELLO, tools=[TOOL])  # type: ignore[call-overload]
    assert answer.choices[0].finish_reason == "tool_calls"
    [call] = answer.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("calculator", {"expression": "1"})


async def test_the_openai_client_reads_a_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(model="", messages=HELLO, stream=True)  # type: ignore[call-overload]
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "answer 1"
    assert chunks[-1].choices[0].finish_reason == "stop"
    with_usage = await client.chat.completions.create(  # type: ignore[call-overload]
        model="", messages=HELLO, stream=True, stream_options={"include_usage": True}, tools=[TOOL]
    )
    chunks = [chunk async for chunk in with_usage]
    assert chunks[0].choices[0].delta.tool_calls[0].function.name == "calculator"
    assert chunks[-1].usage.completion_tokens > 0


async def test_the_openai_client_completes_a_text(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="", prompt="one:")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("answer 1", "stop")
    stream = await client.completions.create(
        model="", prompt="two:", stream=True, stream_options={"include_usage": True}
    )
    *chunks, end, usage = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "answer 2"
    assert end.choices[0].finish_reason == "stop"
    assert usage.usage is not None
    assert usage.usage.completion_tokens > 0


async def test_the_openai_client_does_not_repeat_a_call_beyond_the_calls_at_once() -> None:
    sent = 0

    async def count(_: httpx.Request) -> None:
        nonlocal sent
        sent += 1

    async with (
        listening(100) as (engine, access),
        openai.AsyncOpenAI(
            base_url=access.base_url,
            api_key=access.api_key,
            http_client=openai.DefaultAsyncHttpxClient(event_hooks={"request": [count]}),
        ) as client,
    ):
        engine.go.clear()
        calls = [
            asyncio.create_task(client.chat.completions.create(model="", messages=HELLO))  # type: ignore[arg-type]
            for _ in range(64)
        ]
        while len(engine.asked) < 64:
            await asyncio.sleep(0.01)
        with pytest.raises(openai.RateLimitError, match="64 calls at once"):
            await client.chat.completions.create(model="", messages=HELLO)  # type: ignore[arg-type]
        engine.go.set()
        await asyncio.gather(*calls)
        assert (len(engine.asked), sent) == (64, 65)


async def test_the_openai_client_reports_a_refusal(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="n = 2 is not supported"):
        await client.chat.completions.create(model="", messages=HELLO, n=2)  # type: ignore[call-overload]


async def test_many_sessions_at_once() -> None:
    engine = Engine()
    server = GatewayServer(config=CONFIG, renderer=Renderer(TOKENIZER), sample=engine.sample)
    await server.start()
    try:
        sessions = await server.open(200 * [session_settings(max_calls=2, max_branches=1, max_length=512)])
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=60, limits=limits) as client:

            async def call(access: Session) -> int:
                headers = {"Authorization": f"Bearer {access.api_key}"}
                body = {"messages": HELLO}
                return (
                    await client.post(f"{access.base_url}/chat/completions", headers=headers, json=body)
                ).status_code

            statuses = await asyncio.gather(*[call(access) for _, access in sessions])
        assert statuses == [200] * 200
        ended = await server.close([id for id, _ in sessions])
        assert all(len(each.episodes) == 1 for each in ended)
    finally:
        await server.shutdown()
