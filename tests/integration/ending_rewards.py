"""Rewards whose processes end, for test_scoring_ends.py: scoring processes, their children, an interpreter of its own
with an OpenEnv server, and an MCP server.

The file `ends` gets a line for each end, before it happens. Half of all completions end something.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dense_reward import by_checksum

from asyncrl import Task
from asyncrl.environments.agents import Demonstration

KINDS = ("exits", "late", "memory", "children", "attacks")
"""What a completion does that ends something. The kind follows from the number of its question."""
QUESTIONS = 2000
SHARE = 0.5
"""The share of completions that end something."""

PACKAGE = r'''
import os, random
from types import SimpleNamespace as Made


class GenericEnvClient:
    """A client whose process ends in some of the episodes."""

    def __init__(self, base_url, message_timeout_s):
        pass

    async def reset(self, seed, **arguments):
        return Made(observation={"text": f"Guess {seed % 10}"}, reward=None, done=False)

    async def step(self, action):
        if random.random() < 0.1:
            with open(os.environ["PYTHONPATH"] + "/../ends", "a") as file:
                file.write("interpreter\n")
            os._exit(3)
        return Made(observation={"text": "done"}, reward=random.random(), done=True)

    async def close(self):
        pass
'''
SERVER = r"""
import http.server, json, os, sys, threading


class Schema(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"action": {"required": ["guess"]}}).encode())

    def log_message(self, *_):
        pass


def end():
    with open(sys.argv[2], "a") as file:
        file.write("server\n")
    os._exit(1)


server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Schema)
threading.Timer(0.3, end).start()
server.serve_forever()
"""
TOOL = {
    "type": "function",
    "function": {"name": "die", "description": "Ends.", "parameters": {"type": "object", "properties": {}}},
}
"""The tool of `serve`, as the model reads it."""


def noted(ends: str, kind: str, *, times: int = 1) -> None:
    with open(ends, "a") as file:
        file.write(f"{kind}\n" * times)


def ending(task: Task, completion: str, *, ends: str) -> Any:
    """A reward of which half of the calls end something, run for too long, or attack the generator."""
    kind = KINDS[int(task.question.split()[1]) % len(KINDS)]
    if random.random() < SHARE:
        noted(ends, kind, times=3 if kind == "children" else 1)
        if kind == "exits":
            os._exit(3)
        if kind == "late":
            time.sleep(60)
        if kind == "memory":
            hoard = []
            while True:
                hoard.append(bytearray(16 * 2**20))
        if kind == "attacks":
            from boundary_rewards import BEHAVIOURS

            attack: Any = random.choice(list(BEHAVIOURS.values()))()
            return 0.0 if attack is None else attack
        for _ in range(2):
            if os.fork() == 0:
                signal.raise_signal(signal.SIGKILL)
        subprocess.run([sys.executable, "-S", "-c", "raise SystemExit(2)"], check=False, timeout=60)
    return by_checksum(task, completion)


def questions(start: str) -> Sequence[dict[str, str]]:
    return [{"prompt": f"{start} {number}", "answer": str(number % 10)} for number in range(QUESTIONS)]


class Demonstrations:
    """Shows the model numbers as answers, and a call of the tool as every second answer to a question with a tool."""

    def tasks(self, seed: int) -> Sequence[Task]:
        return [Task(question=row["prompt"], answer=row["answer"]) for row in questions("Number")]

    def score(self, task: Task, completion: str) -> float:
        return by_checksum(task, completion)

    def demonstrations(self, seed: int) -> Sequence[Demonstration]:
        call = '<tool_call>{"name": "die", "arguments": {}}</tool_call>'
        shown = []
        for number, row in enumerate(questions("Number")):
            messages = ({"role": "user", "content": row["prompt"]},)
            shown.append(Demonstration(messages=messages, answer=row["answer"]))
            answer = call if number % 2 else row["answer"]
            shown.append(Demonstration(messages=messages, tools=(TOOL,), answer=answer))
        return shown


def write_openenv(folder: Path) -> dict[str, Any]:
    """Writes a package in place of openenv, and a server that ends after 0.3 s. Returns the options of the
    environment. The ends are noted in `folder / "ends"`."""
    package = folder / "path" / "openenv" / "core"
    package.mkdir(parents=True)
    (package / "generic_client.py").write_text(PACKAGE)
    exceptions = folder / "path" / "websockets"
    exceptions.mkdir()
    (exceptions / "exceptions.py").write_text("class ConnectionClosedOK(Exception):\n    pass\n")
    (folder / "server.py").write_text(SERVER)
    command = [sys.executable, "-S", str(folder / "server.py"), "{port}", str(folder / "ends")]
    return {"python": sys.executable, "command": command, "search_path": [str(folder / "path")], "turns": 1}


def serve(ends: str) -> None:
    """Serves MCP over standard input and output: one tool, which ends the server.

    It does not use the package mcp, whose import takes two seconds.
    """
    described = {"name": "die", "description": "Ends.", "inputSchema": {"type": "object", "properties": {}}}
    for line in sys.stdin:
        message = json.loads(line)
        match message["method"]:
            case "initialize":
                result: dict[str, Any] = {
                    "protocolVersion": message["params"]["protocolVersion"],
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "tests", "version": "1"},
                }
            case "tools/list":
                result = {"tools": [described]}
            case "tools/call":
                noted(ends, "mcp")
                signal.raise_signal(signal.SIGKILL)
            case _ if "id" in message:
                refused = {"code": -32601, "message": "there is no such method"}
                print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "error": refused}), flush=True)
                continue
            case _:
                continue
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
