"""Answers orders in another interpreter than asyncrl's. It uses nothing of asyncrl.

    python own_interpreter_main.py PART OPTIONS [ORDER]

PART is a file with a class `Part`. OPTIONS are its keyword arguments as JSON. Its method `serving` returns an async
context manager, and its method `answer` is a coroutine function that takes an order and returns the answer. Each line
of the input is an order as a JSON object, and each line of the output is the answer to the order with the same `id`. If
`answer` raises an error, the answer has it as `error`. An order `{"what": "stop", "of": N}` cancels the order with the
id N, which then gets no answer. The program ends when its input ends, or after ORDER, if there is one.
"""

import asyncio
import importlib.util
import json
import os
import sys
from typing import Any, TextIO


class Orders:
    """The orders that a part answers. `answers` is the stream to which the answers are written."""

    def __init__(self, part: Any, *, answers: TextIO) -> None:
        self._part = part
        self._answers = answers
        self._running: dict[int, asyncio.Task[None]] = {}

    async def follow(self) -> None:
        """Follows the orders of the input until it ends, and then cancels those that still run."""
        async with self._part.serving():
            while line := await asyncio.to_thread(sys.stdin.readline):
                order = json.loads(line)
                if order["what"] != "stop":
                    self._running[order["id"]] = asyncio.create_task(self._answer(order))
                elif order["of"] in self._running:
                    self._running[order["of"]].cancel()
            running = list(self._running.values())
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def follow_one(self, order: dict[str, Any]) -> None:
        """Follows one order."""
        async with self._part.serving():
            await self._answer(order)

    async def _answer(self, order: dict[str, Any]) -> None:
        number = order["id"]
        try:
            self._write({"id": number, **await self._part.answer(order)})
        except Exception as error:
            self._write({"id": number, "error": f"{type(error).__name__}: {error}"})
        finally:
            self._running.pop(number, None)

    def _write(self, answer: dict[str, Any]) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()


def main() -> None:
    # The part may print. Its output must not be read as an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    path, options, *order = sys.argv[1:]
    spec = importlib.util.spec_from_file_location("part", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    orders = Orders(module.Part(**json.loads(options)), answers=answers)
    asyncio.run(orders.follow_one(json.loads(order[0])) if order else orders.follow())


if __name__ == "__main__":
    main()
