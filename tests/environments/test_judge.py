"""The built-in judge asks an OpenAI-compatible server. The server of these tests is a real one, in this process."""

import asyncio
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest.mock import patch

import pytest

from asyncrl.config.schema import EnvironmentSection
from asyncrl.data.prompts import Task
from asyncrl.environments.scoring import Scorer
from asyncrl.environments.scoring_messages import Components
from asyncrl.environments.secrets import Secrets
from asyncrl.environments.verifiers import JUDGE_FORM, JudgeRefused, judge, retry_pause_s
from asyncrl.errors import DataError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

TASK = Task(question="2+2=", prompt="2+2=", answer="4", metadata={})


class Server(ThreadingHTTPServer):
    """Answers with `answers`, one after the other; a number is the status of a failed request."""

    answers: list[str | int]
    seen: list[dict[str, Any]]
    finish_reason: str | None = "stop"
    headers_of_failure: Mapping[str, str] = {}


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append(body | {"key": self.headers["Authorization"]})
        answer = self.server.answers.pop(0) if len(self.server.answers) > 1 else self.server.answers[0]
        message = {"role": "assistant", "content": answer}
        reply = {
            "id": "1",
            "object": "chat.completion",
            "created": 0,
            "model": "m",
            "choices": [{"index": 0, "message": message, "finish_reason": self.server.finish_reason}],
        }
        self.send_response(answer if isinstance(answer, int) else 200)
        if isinstance(answer, int):
            for name, value in self.server.headers_of_failure.items():
                self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(("127.0.0.1", 0), Handler)
    made.answers, made.seen = ["It is right.\nScore: 1"], []
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()


def url_of(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_port}/v1"


def asked(server: Server, completion: str = "4", **options: Any) -> float:
    return asyncio.run(judge(TASK, completion, **({"url": url_of(server), "model": "m"} | options)))


@pytest.mark.parametrize("answer", ["It is right.\nScore: 0.25", "**Score:** 0.25\n"])
def test_the_reward_is_the_score_on_the_last_line(answer: str, server: Server) -> None:
    server.answers = [answer]
    assert asked(server) == 0.25


@pytest.mark.parametrize("reason", ["length", "content_filter", "tool_calls", None])
def test_an_answer_that_was_cut_has_no_score(reason: str | None, server: Server) -> None:
    server.answers, server.finish_reason = ["I say\nScore: 1"], reason
    with pytest.raises(ValueError, match=r"was cut \(finish_reason: .*ends with .*max_tokens = 64"):
        asked(server, max_tokens=64)


def test_the_question_the_answer_and_the_completion_are_in_the_request_also_with_braces(server: Server) -> None:
    asked(server, completion="a {completion} with {braces}", prompt="{question}|{answer}|{completion}|{other}")
    [request] = server.seen
    [message] = request["messages"]
    assert message["content"] == "2+2=|4|a {completion} with {braces}|{other}" + JUDGE_FORM
    assert request["model"] == "m"


def test_the_url_may_come_from_an_environment_variable(server: Server) -> None:
    with patch.dict(os.environ, {"JUDGE_URL": url_of(server)}):
        assert asked(server, url="", url_variable="JUDGE_URL") == 1.0
    for options in ({"url": ""}, {"url_variable": "JUDGE_URL"}):
        with pytest.raises(ValueError, match="set one of them"):
            asked(server, **options)


def test_the_other_keys_of_a_row_are_fields_of_the_prompt_and_json_is_not(server: Server) -> None:
    task = Task(question="2+2=", prompt="2+2=", answer="4", metadata={"topic": "sums", "level": 3, "question": "no"})
    prompt = '{topic} {level} {question} {score} {"score": 1} {completion}'
    asyncio.run(judge(task, "5", prompt=prompt, url=url_of(server), model="m"))
    [message] = server.seen[0]["messages"]
    assert message["content"].startswith('sums 3 2+2= {score} {"score": 1} 5')


def test_an_answer_without_a_score_is_an_error_of_the_reward(server: Server) -> None:
    server.answers = ["I cannot say: 17 of 20"]
    with pytest.raises(ValueError, match=r"has no score.*17 of 20"):
        asked(server)


@pytest.mark.parametrize(
    ("status", "advice"),
    [(401, "key_variable"), (403, "key_variable"), (404, "usually ends with /v1, and model"), (422, "its options")],
)
def test_a_refused_request_names_the_address_and_what_to_check(status: int, advice: str, server: Server) -> None:
    server.answers = [status]
    with pytest.raises(
        JudgeRefused, match=rf"the judge at {url_of(server)}/ refuses the request: .*{status}.*{advice}"
    ):
        asked(server)
    assert len(server.seen) == 1


def test_a_request_that_fails_for_a_passing_reason_is_repeated(server: Server) -> None:
    server.answers = [503, 503, "Score: 1"]
    assert asked(server) == 1.0
    assert len(server.seen) == 3


@pytest.mark.parametrize("status", [408, 429, 500, 503, 529])
def test_more_failures_than_three_are_repeated_with_the_pause_that_the_server_asks_for(
    status: int, server: Server
) -> None:
    server.answers, server.headers_of_failure = [*[status] * 6, "Score: 1"], {"retry-after-ms": "40"}
    begun_s = time.monotonic()
    assert asked(server, most_per_s=1000.0) == 1.0
    assert len(server.seen) == 7
    assert time.monotonic() - begun_s >= 6 * 0.04


@pytest.mark.parametrize("headers", [{"retry-after": "3600"}, {"retry-after": "Fri, 01 Jan 2100 00:00:00 GMT"}])
@pytest.mark.parametrize("status", [429, 503])
def test_a_pause_beyond_the_time_limit_ends_the_tries_at_once(
    status: int, headers: Mapping[str, str], server: Server
) -> None:
    server.answers, server.headers_of_failure = [status], headers
    with pytest.raises(TimeoutError, match=f"within 60 s.*{status}.*score_timeout_s.*time_limit_s.*most_per_s"):
        asked(server, time_limit_s=60.0)
    assert len(server.seen) == 1


def test_a_server_that_cannot_be_reached_is_an_error_at_the_time_limit() -> None:
    with pytest.raises(TimeoutError, match=r"at http://127.0.0.1:9/v1/ gave .*: Connection error.*a server runs there"):
        asyncio.run(judge(TASK, "4", url="http://127.0.0.1:9/v1", model="m", time_limit_s=3.0))


@pytest.mark.parametrize(
    ("headers", "pause_s"),
    [
        ({"retry-after": "0"}, 0.0),
        ({"retry-after": "2.5"}, 2.5),
        ({"retry-after": "120"}, 120.0),
        ({"retry-after": "9", "retry-after-ms": "250"}, 0.25),
        ({"retry-after": "Thu, 01 Jan 1970 00:20:00 GMT"}, 200.0),
        ({"retry-after": "Thu, 01 Jan 1970 00:00:01 GMT"}, 0.0),
    ],
)
def test_the_pause_is_what_the_server_asks_for(headers: Mapping[str, str], pause_s: float) -> None:
    assert retry_pause_s(headers, tries=5, now_s=1000.0) == pause_s


@pytest.mark.parametrize("after", ["soon", "-3", "", "nan", "1e9"])
def test_without_a_pause_that_can_be_read_the_pauses_grow_up_to_a_limit(after: str) -> None:
    for tries, most_s in ((0, 0.5), (2, 2.0), (50, 8.0)):
        assert most_s / 2 <= retry_pause_s({"retry-after": after}, tries=tries, now_s=0.0) <= most_s


@pytest.mark.asyncio
@pytest.mark.fault("F19")
async def test_a_judge_beside_another_reward_scores_a_group_in_a_scoring_process_with_its_key(server: Server) -> None:
    options = {"url_variable": "JUDGE_URL", "model": "m", "key_variable": "JUDGE_KEY", "time_limit_s": 1}
    rewards = [{"name": "judge", "fn": "judge", "options": options}, {"name": "right", "fn": "exact_match"}]
    section = EnvironmentSection.model_validate({"rewards": rewards, "secrets": ["JUDGE_URL", "JUDGE_KEY"]})
    scorer = Scorer(section, secrets=Secrets({"JUDGE_URL": url_of(server), "JUDGE_KEY": "hunter22"}))
    try:
        scores = await scorer.score(TASK, ["4", "5"])
        assert scores == [
            Components(total=2.0, parts={"judge": 1.0, "right": 1.0}),
            Components(total=1.0, parts={"judge": 1.0, "right": 0.0}),
        ]
        assert {request["key"] for request in server.seen} == {"Bearer hunter22"}
        server.answers = [500]
        [score] = await scorer.score(TASK, ["4"])
        assert isinstance(score, DataError)
        assert "environment.rewards: judge raised" in str(score)
        assert "hunter22" not in str(score)
    finally:
        await scorer.close()
