"""An agent with OpenAI's client: it calls the model, runs the tools that the model asks for, and calls it again.

PYTHONPATH=. asyncrl up -c calculator environment.agent=openai_client:run    # in the folder of this file
"""

from typing import Any

from arithmetic import TOOL, called, reward
from openai import AsyncOpenAI

from asyncrl import Session, Task

CALLS = 3


async def run(session: Session, task: Task) -> float:
    """Answers one question. Returns 1 if the answer is right."""
    messages: list[Any] = [{"role": "user", "content": task.question}]
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, timeout=None) as client:
        for _ in range(CALLS):
            answer = await client.chat.completions.create(model=session.model, messages=messages, tools=[TOOL])
            message = answer.choices[0].message
            if not message.tool_calls:
                return reward(message.content or "", task.answer)
            messages.append(message)
            for call in message.tool_calls:
                result = called(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0
