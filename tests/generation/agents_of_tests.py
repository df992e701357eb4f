"""Agents for tests: polite ones, and ones that fail in every way."""

import asyncio
import contextlib
import os
import time
from typing import Any

from asyncrl.data.prompts import Task
from asyncrl.environments.agents import Session


async def clumsy(session: Session, task: Task) -> float:
    """Asks as many times as the task says, and reports as many failed calls of tools."""
    for number in range(task.metadata["turns"]):
        await session.chat([{"role": "user", "content": f"{number}"}])
    for number in range(task.metadata["failed"]):
        await session.tool_failed("price", error=["KeyError", "NameError"][number % 2], message=f"no ({number})")
    return 1.0


async def polite(session: Session, task: Task) -> dict[str, float]:
    """Talks for as many turns as its task says. Its rewards are the turns and the length of the last answer."""
    messages: list[Any] = [{"role": "user", "content": task.question}]
    reply: dict[str, Any] = {}
    for turn in range(int(task.metadata["turns"])):
        reply = await session.chat(messages)
        messages += [reply, {"role": "user", "content": f"turn {turn}"}]
    return {"turns": float(task.metadata["turns"]), "length": float(len(reply["content"]))}


async def unlucky(session: Session, task: Task) -> Any:
    """Fails as its task says in the sample that gets the answer 1."""
    messages: list[Any] = [{"role": "user", "content": task.question}]
    reply = await session.chat(messages)
    if reply["content"] != "1":
        return 1.0
    match task.metadata["how"]:
        case "raise":
            raise RuntimeError("no luck")
        case "hang":
            await asyncio.sleep(3600)
        case "exit":
            os._exit(3)
        case "text":
            return "text"
        case "fork":
            await session.chat([{"role": "user", "content": "another beginning"}])
        case "talk":
            for turn in range(100):
                messages += [await session.chat(messages), {"role": "user", "content": f"turn {turn}"}]
        case "flood":
            await asyncio.gather(*[session.chat([{"role": "user", "content": f"{n}"}]) for n in range(200)])
    return 1.0


async def undecided(session: Session, task: Task) -> float:
    """Makes two turns, asks the second question in another way, and repeats the first call."""
    first = [{"role": "user", "content": task.question}]
    begun = [*first, await session.chat(first)]
    await session.chat([*begun, {"role": "user", "content": "go on"}])
    await session.chat([*begun, {"role": "user", "content": "go back"}])
    await session.chat(first)
    return 1.0


async def of_tokens(session: Session, task: Task) -> float:
    """Continues tokens twice."""
    begun = [1, 2, 3]
    sampled = await session.generate(begun, max_tokens=5)
    await session.generate([*begun, *sampled, 4], stop=["x"])
    return 1.0


async def too_long(session: Session, task: Task) -> float:
    """Sends more than the model can read, and does not care."""
    with contextlib.suppress(RuntimeError):
        await session.chat([{"role": "user", "content": task.question * 500}])
    return 1.0


def silent(session: Session, task: Task) -> float:
    """Makes no call, and is no coroutine function."""
    del session, task
    time.sleep(0.01)
    return 1.0


def wrong_arguments(session: Session) -> float:
    del session
    return 1.0
