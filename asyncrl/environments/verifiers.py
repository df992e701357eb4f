"""Built-in rewards, and the environment `math`."""

import asyncio
import itertools
import os
import random
import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Any, NoReturn

from asyncrl.data.prompts import Task
from asyncrl.errors import ConfigError


def exact_match(task: Task, completion: str) -> float:
    """Returns 1.0 if the completion equals the answer. White space at either end of both texts is ignored."""
    return float(completion.strip() == task.answer.strip())


def math_verify(task: Task, completion: str) -> float:
    """Returns 1.0 if the library math-verify finds the completion's last mathematical expression equal to the answer.

    The library's own time limits are off, because they use SIGALRM, which fails outside the main thread and does not
    stop C code. The scoring process has a wall-clock limit instead (`environment.score_timeout_s`). Raises ValueError
    for an answer without an expression, because no completion could ever earn a reward.
    """
    from math_verify import parse, verify  # imported here because it imports sympy, which takes a second

    gold = _parsed_answer(task.answer)
    if not gold:
        raise ValueError(
            f"the answer {task.answer[:80]!r} has no mathematical expression; correct it or use another reward"
        )
    return float(verify(list(gold), parse(completion, parsing_timeout=None), timeout_seconds=None))


@lru_cache(maxsize=256)
def _parsed_answer(answer: str) -> tuple[Any, ...]:
    """Returns the answer's expressions. Bare LaTeX (`\\frac{1}{2}`) gets delimiters, because the library needs them."""
    from math_verify import parse

    delimited = any(mark in answer for mark in ("$", "\\(", "\\[", "\\boxed"))
    return tuple(parse(answer if delimited else f"${answer}$", parsing_timeout=None))


def regex(task: Task, completion: str, *, pattern: str, whole: bool = False, generation_prompt: bool = False) -> float:
    """Returns 1.0 if the regular expression `pattern` matches somewhere in the completion, or with `whole` all of it.
    The dot matches newlines too. With `generation_prompt`, the text begins with `task.generation_prompt`, for templates
    that write `<think>` before an answer."""
    compiled = re.compile(pattern, re.DOTALL)
    text = task.generation_prompt + completion if generation_prompt else completion
    return float((compiled.fullmatch if whole else compiled.search)(text) is not None)


def length(task: Task, completion: str, *, free_chars: int, buffer_chars: int) -> float:
    """Returns 0.0 for a completion of at most `free_chars` characters. Over the next `buffer_chars` it falls linearly
    to −1.0, and is −1.0 for longer ones. DAPO (arXiv:2503.14476) does this with tokens: "soft overlong punishment"."""
    over = len(completion) - free_chars
    return -min(1.0, max(0.0, over / max(1, buffer_chars)))


JUDGE_PROMPT = """\
Question:
{question}

Reference answer:
{answer}

Answer of a student:
{completion}

Is the student's answer right? Think briefly. 0 is wrong, and 1 is right."""

JUDGE_FIELDS = ("question", "answer", "completion")
"""Names that a judge's prompt may have in braces, beside the keys of the task's metadata."""
JUDGE_FIELD = re.compile(r"\{(\w+)\}")

JUDGE_FORM = """\


End your answer with a last line of exactly this form, with a decimal number from 0 to 1 in the place of 0.7:
Score: 0.7"""
"""Follows each prompt of a judge. `judge_score` reads this form."""

_SCORE_LINE = re.compile(
    r"[*_`]*Score[*_`]*:[*_`]*[ \t]*[*_`]*(0\.[0-9]+|1\.0+|[01])\.?[*_`]*[ \t]*", re.IGNORECASE | re.ASCII
)
"""The line with the score, also in bold or as code, and with a full stop."""


def judge_score(answer: str) -> float:
    """Returns the number of the last line that is not blank, which must have the form of `JUDGE_FORM`.

    Raises ValueError for any other line. A fraction, a percentage or a number of another scale is not read, because the
    number that it means would be a guess.

    >>> judge_score("The sum is right.\\nScore: 0.25")
    0.25
    """
    lines = answer.rstrip().splitlines()
    found = _SCORE_LINE.fullmatch(lines[-1].strip()) if lines else None
    if found is None:
        raise ValueError(
            "the judge's answer has no score: its last line must be `Score: ` and a decimal number from 0 to 1, but "
            f"the answer ends with {answer[-200:]!r}; correct the option prompt, or use a model that follows it"
        )
    return float(found[1])


async def judge(
    task: Task,
    completion: str,
    *,
    model: str,
    url: str = "",
    url_variable: str = "",
    prompt: str = JUDGE_PROMPT,
    key_variable: str = "",
    max_tokens: int = 512,
    most_per_s: float = 10.0,
    time_limit_s: float = 9.0,
) -> float:
    """Asks a model behind an OpenAI-compatible `url` (`http://host:8000/v1`), and returns the score on the last line of
    its answer.

    The request is `prompt`, followed by `JUDGE_FORM`, which asks for that line. `prompt` has the fields `{question}`
    (the task's prompt), `{answer}` and `{completion}`, and one for each key of the task's metadata. Other texts in
    braces stay as they are.
    `key_variable` names the environment variable with the key, and `url_variable` the one with the URL, if there is no
    `url`. `environment.secrets` must list them. A scoring process sends at most `most_per_s` requests a second.
    Requests that fail for a temporary reason are repeated for `time_limit_s` seconds. In `environment.rewards`, its
    default is 0.9 of `environment.score_timeout_s`, so that the server's error is known before the scoring is ended.

    Raises ValueError if the answer has no score, if it was cut, or unless exactly one of `url` and `url_variable` is
    set. Raises KeyError if a named variable is not set, TimeoutError at the time limit, and JudgeRefused if the server
    refuses the request.
    """
    if bool(url) == bool(url_variable):
        raise ValueError(
            f"the options of judge have url = {url!r} and url_variable = {url_variable!r}; set one of them"
        )
    client, throttle = _judge_client(url or os.environ[url_variable], key_variable, most_per_s)
    fields = {**task.metadata, "question": task.prompt, "answer": task.answer, "completion": completion}
    # not str.format, which fails at other braces in the template, such as those of JSON
    text = JUDGE_FIELD.sub(lambda found: str(fields.get(found[1], found[0])), prompt) + JUDGE_FORM
    messages = [{"role": "user", "content": text}]
    request = {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0.0}
    reply = await _asked(client, throttle, request, time_limit_s=time_limit_s)
    [choice, *_] = reply.choices
    answer = choice.message.content or ""
    if choice.finish_reason != "stop":
        raise ValueError(
            f"the judge's answer was cut (finish_reason: {choice.finish_reason!r}), so it has no score; it ends with "
            f"{answer[-200:]!r}; raise the option max_tokens = {max_tokens}, or ask for a shorter answer"
        )
    return judge_score(answer)


async def _asked(client: Any, throttle: Any, request: Mapping[str, Any], *, time_limit_s: float) -> Any:
    """Sends a request until it succeeds, and returns the reply.

    Raises TimeoutError after `time_limit_s` seconds, or before if the pause until the next try would last longer than
    the rest of this time. Raises JudgeRefused for a request that would fail again.
    """
    from openai import APIConnectionError, APIStatusError, APITimeoutError

    loop, failed, pause_s = asyncio.get_running_loop(), None, 0.0
    end_s = loop.time() + time_limit_s
    try:
        async with asyncio.timeout_at(end_s):
            for tries in itertools.count():
                try:
                    async with throttle:
                        return await client.chat.completions.create(**request)
                except (APIConnectionError, APIStatusError) as error:
                    status = error.status_code if isinstance(error, APIStatusError) else None
                    if status is not None and status not in _PASSING and status < 500:
                        raise JudgeRefused(_refusal(status, str(error), client)) from None
                    failed = error
                    headers = error.response.headers if isinstance(error, APIStatusError) else {}
                pause_s = retry_pause_s(headers, tries=tries, now_s=time.time())
                if loop.time() + pause_s >= end_s:
                    break
                await asyncio.sleep(pause_s)
    except TimeoutError:
        pass
    what = (
        "it did not answer" if failed is None else f"its last error was: {failed}; the pause after it is {pause_s:g} s"
    )
    unreachable = isinstance(failed, APIConnectionError) and not isinstance(failed, APITimeoutError)
    advice = (
        "check that a server runs there, and that the option url is right"
        if unreachable
        else "raise environment.score_timeout_s (or the option time_limit_s of the judge) and "
        "generator.rollout_timeout_s, or lower the option most_per_s"
    )
    raise TimeoutError(
        f"the judge at {client.base_url} gave no answer within {time_limit_s:g} s: {what}; {advice}"
    ) from failed


class JudgeRefused(ValueError):
    """The server of a judge refuses a request, and would refuse it again."""


def _refusal(status: int, error: str, client: Any) -> str:
    checks = {
        401: "check the key in the variable that the option key_variable names",
        403: "check the key in the variable that the option key_variable names",
        404: "check the options url, which usually ends with /v1, and model",
    }
    return f"the judge at {client.base_url} refuses the request: {error}; {checks.get(status, 'check its options')}"


_PASSING = (408, 409, 429)
"""Statuses below 500 after which a request is repeated: time limit, conflict, too many requests."""
_LONGEST_PAUSE_S = 8.0
"""Longest pause between two tries if the server does not ask for one."""


def retry_pause_s(headers: Mapping[str, str], *, tries: int, now_s: float) -> float:
    """Returns the seconds until the next try: those for which the server asks (`retry-after-ms`, `retry-after` as
    seconds or as a date). Otherwise 0.5 s, doubled with each try up to `_LONGEST_PAUSE_S`, times a random factor from
    0.5 to 1. `tries` is the number of tries before the one that failed last. `now_s` is Unix time.

    >>> retry_pause_s({"retry-after": "30"}, tries=0, now_s=0.0)
    30.0
    """
    after, after_ms = headers.get("retry-after", ""), headers.get("retry-after-ms", "")
    if _SECONDS.fullmatch(after_ms):
        return float(after_ms) / 1000
    if _SECONDS.fullmatch(after):
        return float(after)
    try:
        return max(0.0, parsedate_to_datetime(after).timestamp() - now_s)
    except ValueError:
        return min(_LONGEST_PAUSE_S, 0.5 * 2.0**tries) * random.uniform(0.5, 1.0)


_SECONDS = re.compile(r"[0-9]+(?:\.[0-9]+)?")


@lru_cache(maxsize=8)
def _judge_client(url: str, key_variable: str, most_per_s: float) -> tuple[Any, Any]:
    """Returns the HTTP client of a judge, and the throttle that limits its calls to `most_per_s` a second. Both live as
    long as the scoring process."""
    from asyncio_throttle.throttler import Throttler
    from openai import AsyncOpenAI

    key = os.environ[key_variable] if key_variable else "none"
    burst = max(1, round(most_per_s))
    client = AsyncOpenAI(base_url=url, api_key=key, max_retries=0)
    return client, Throttler(rate_limit=burst, period=burst / most_per_s)


# Mathematics with reference answers: the tasks come from a dataset, and math-verify scores the completions.


class Math:
    """An environment that scores answers to the prompts of a dataset (`data.dataset`) with math-verify. It has no tasks
    of its own."""

    def tasks(self, seed: int) -> NoReturn:
        raise ConfigError(
            "data.dataset: the math environment has no tasks of its own; set data.dataset: jsonl and data.path"
        )

    def score(self, task: Task, completion: str) -> float:
        """Returns 1.0 if the last mathematical expression of the completion equals the answer, and 0.0 otherwise."""
        return math_verify(task, completion)
