"""The agent of test_mixture_run.py: each task is answered with one of two unmodified packages."""

import importlib

from asyncrl import Session, Task


def client_of(answer: str) -> str:
    """Returns the module in configs/agents that answers a task."""
    return ("openai_client", "langgraph_agent")[int(answer) % 2]


async def run(session: Session, task: Task) -> float:
    """Answers one question. Returns 1 if the answer is right. To a third of the questions it first gets an answer
    without the tool, which is a branch of its own."""
    if int(task.answer) % 3 == 1:
        await session.chat([{"role": "user", "content": task.question}])
    reward: float = await importlib.import_module(client_of(task.answer)).run(session, task)
    return reward
