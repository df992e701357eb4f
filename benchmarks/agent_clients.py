"""Trains the agents of configs/agents, which use unmodified client packages, and checks every row that was trained.

    python benchmarks/agent_clients.py openai_client openai_agents langgraph_agent    # some minutes each on two cores
    python benchmarks/agent_clients.py verifiers openenv
    python benchmarks/agent_clients.py --write                    # writes the table of all into docs/agents.md

Each run has twenty steps of the recipe of the calculator, or of `guess_the_number` for OpenEnv. It is checked as the
runs of `agents.py` are: row by row, and with `asyncrl audit`. The numbers of turns, tool calls, failed samples and
forks are those of Prometheus in the last second of the run.

The packages that asyncrl does not install are put into a folder of their own below `.bench`, together with those of
their requirements that our environment lacks or has in another version. Only the processes of the client's run search
this folder. `verifiers` and `openenv` have environments of their own instead. verifiers plays the taskset `sums_v1.py`
with its harness `null`, which starts a program for each answer. openenv plays `guess_env.py`, with a server for each
scoring process.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import yaml
from agents import checked_rows
from prometheus_client.parser import text_string_to_metric_families
from report_page import REPOSITORY, busy_percent, provenance, write_section

from asyncrl.config.load import load_config

NAME = "agent_clients.py"
RESULTS = Path(__file__).with_suffix(".jsonl")
AGENTS = REPOSITORY / "configs" / "agents"
FOLDER = REPOSITORY / ".bench" / "clients"
PACKAGES = {
    "openai_client": ("openai>=3",),
    "openai_agents": ("openai-agents==0.24.*",),
    "langgraph_agent": ("langgraph==1.2.*", "langchain-openai==1.7.*"),
    "verifiers": ("verifiers==0.4.*", "uv"),
    "openenv": ("openenv==0.10.*",),
}
"""The packages of each agent, by its module in configs/agents. verifiers runs the programs of harnesses with uv."""
OWN_INTERPRETER = ("verifiers", "openenv")
"""Packages that cannot be installed beside asyncrl."""
GAMES = {"openenv": "guess_the_number"}
"""The game whose recipe and model a client uses, if it is not the calculator."""
SETTINGS = (
    "learner.total_steps=20", "learner.groups_per_step=4", "learner.group_size=4",
    "model.max_length=512",  # the packages describe the calculator with up to 210 tokens
    "environment.score_timeout_s=60", "eval.every_steps=20", "eval.prompts=4",
    "audit.keep_weights=all", "checkpoint.every_steps=0",
)  # fmt: skip
OWN_SETTINGS = {
    "verifiers": (
        "environment.score_workers=2", "generator.max_concurrent_groups=2", "learner.groups_per_step=1",
        "eval.every_steps=0", "eval.prompts=2", "environment.score_timeout_s=240", "generator.rollout_timeout_s=280",
    ),
    "openenv": ("environment.score_workers=2", "generator.max_concurrent_groups=2"),
}  # fmt: skip
"""Each process of these packages takes seconds to start, and each program of verifiers' harness takes about two."""
COMMAND_TIMEOUT_S = 280
COUNTERS = {
    "asyncrl_agent_turns_count": "episodes",
    "asyncrl_agent_turns_sum": "turns",
    "asyncrl_agent_tool_calls_total": "tool calls",
    "asyncrl_reward_failures_total": "failed",
    "asyncrl_agent_forks_total": "forks",
}


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A run of one client. `packages` has the versions of its packages, and `replay` is what the audit says about the
    trained tokens."""

    client: str
    packages: dict[str, str]
    provenance: str
    steps: int
    seconds: float
    episodes: int
    turns: int
    tool_calls: int
    failed: dict[str, int]
    forks: dict[str, int]
    rows: int
    parity_nats: float
    replay: str


def installed(client: str) -> Path:
    """Returns the folder with the packages of a client that our environment lacks, and fills it if it is not there. For
    a package with an interpreter of its own, it is that of an environment."""
    folder, packages = FOLDER / client, PACKAGES[client]
    made = folder / "made.txt"
    if made.exists() and made.read_text() == "\n".join(packages):
        return folder
    if client in OWN_INTERPRETER:
        venv.create(folder, clear=True, with_pip=True)
        own = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *packages]
        subprocess.run(own, check=True, stdout=sys.stderr)
        made.write_text("\n".join(packages))
        return folder
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    with tempfile.NamedTemporaryFile() as report:
        dry = [*pip, "--dry-run", "--report", report.name, *packages]
        subprocess.run(dry, check=True, stdout=sys.stderr)
        lacking = [each["metadata"] for each in json.loads(Path(report.name).read_bytes())["install"]]
    folder.mkdir(parents=True, exist_ok=True)
    if lacking:
        names = [f"{each['name']}=={each['version']}" for each in lacking]
        target = [*pip, "--no-deps", "--upgrade", "--target", str(folder), *names]
        subprocess.run(target, check=True, stdout=sys.stderr)
    made.write_text("\n".join(packages))
    return folder


def versions(client: str, *, folder: Path) -> dict[str, str]:
    """Returns the versions of a client's packages in its folder, or else in our environment."""
    found = {}
    search_path = [str(folder), *map(str, folder.glob("lib/python*/site-packages")), *sys.path]
    for package in PACKAGES[client]:
        [name] = re.findall(r"^[\w-]+", package)
        places = importlib.metadata.distributions(name=name, path=search_path)
        found[name] = next(iter(places)).version
    return found


def command(*arguments: str, environment: Mapping[str, str], log: Path, run: Path | None = None) -> Counter[str]:
    """Runs an asyncrl command, which writes into `log`. Returns the last counts that a `run` served, by the names of
    `COUNTERS` and reasons. Raises RuntimeError with the end of the log if the command fails or takes too long."""
    counts: Counter[str] = Counter()
    ends_s = time.monotonic() + COMMAND_TIMEOUT_S
    with log.open("wb") as file:
        words = [sys.executable, "-m", "asyncrl", *arguments]
        process = subprocess.Popen(words, cwd=REPOSITORY, stdout=file, stderr=subprocess.STDOUT, env=environment)
        while process.poll() is None and time.monotonic() < ends_s:
            counts = (served(run) if run is not None else None) or counts
            time.sleep(1)
        if process.poll() is None:
            process.terminate()
    if process.wait() != 0:
        said = log.read_text(errors="replace")[-4000:]
        raise RuntimeError(f"asyncrl {' '.join(arguments)} ended with {process.returncode}:\n{said}")
    return counts


def served(run: Path) -> Counter[str]:
    """Returns the present counts of a run, over all of its processes; none if they cannot be read."""
    counts: Counter[str] = Counter()
    with contextlib.suppress(OSError, ValueError):
        for target in json.loads((run / "metrics" / "targets.json").read_bytes()):
            for address in target["targets"]:
                with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as response:
                    text = response.read().decode()
                for family in text_string_to_metric_families(text):
                    for sample in family.samples:
                        if (name := COUNTERS.get(sample.name)) is not None:
                            counts[f"{name} {sample.labels.get('reason', '')}".strip()] += int(sample.value)
    return counts


def own_recipe(client: str, *, packages: Path, folder: Path) -> tuple[Path, list[str]]:
    """Returns the recipe of a client, and the settings that name its agent or environment. The recipe of a package with
    an interpreter of its own has the options of its environment instead of those of the game."""
    game = AGENTS / f"{game_of(client)}.yaml"
    if client not in OWN_INTERPRETER:
        return game, [f"environment.agent={client}:run"]
    benchmarks, options = REPOSITORY / "benchmarks", {"python": str(packages / "bin" / "python")}
    if client == "verifiers":
        agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
        options |= {
            "search_path": [str(benchmarks / "tasksets")],
            "env": {"taskset": {"id": "sums-v1"}, "agent": agent},
        }
    else:
        options |= {
            "search_path": [str(benchmarks / "environments")],
            "command": ["uvicorn", "guess_env:app", "--port", "{port}", "--log-level", "warning"],
        }
    recipe = yaml.safe_load(game.read_text())
    recipe["environment"]["options"] = options
    path = folder / f"{client}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path, [f"environment.name={client}", *OWN_SETTINGS[client]]


def game_of(client: str) -> str:
    """Returns the game whose recipe and model a client uses."""
    return GAMES.get(client, "calculator")


def measure(client: str, *, overrides: Sequence[str], folder: Path) -> Result:
    """Trains with a client, and checks the rows and the tokens."""
    busy = busy_percent()
    packages, game = installed(client), game_of(client)
    model = FOLDER / f"model-{game}"
    search_path = os.pathsep.join(map(str, (REPOSITORY, AGENTS, packages)))
    environment = os.environ | {"PYTHONPATH": search_path}
    tiny = [f"run.dir={folder / 'runs'}", f"model.path={model}", "model.tiny.chat=true", *SETTINGS, *overrides]
    command("model", "-c", str(AGENTS / f"{game}.yaml"), *tiny, environment=environment, log=folder / "model.log")
    # The model has learned the game. It must not be built again for other tasks.
    recipe, own = own_recipe(client, packages=packages, folder=folder)
    settings = [*tiny, "model.tiny=null", *own]
    run = folder / "runs" / load_config([recipe], settings).run.name
    counts = command("up", "-c", str(recipe), *settings, environment=environment, log=folder / "up.log", run=run)
    print("".join(re.findall(r".*first failure of .*\n", (folder / "up.log").read_text())), file=sys.stderr)
    command("audit", str(run), environment=environment, log=folder / "audit.log")
    audited = (folder / "audit.log").read_text()
    summary = json.loads((run / "summary.json").read_bytes())
    assert summary["ledger_closed"]
    rows, _ = checked_rows(run, model=model, game=game)
    replay = re.search(r"\d+ tokens were scored again.*? nats", audited)
    assert replay is not None, audited
    return Result(
        client=client,
        packages=versions(client, folder=packages),
        provenance=provenance(f"benchmarks/{NAME}", busy_percent=busy),
        steps=summary["steps"],
        seconds=summary["wall_s"],
        episodes=counts["episodes"],
        turns=counts["turns"],
        tool_calls=counts["tool calls"],
        failed=_by_reason(counts, "failed"),
        forks=_by_reason(counts, "forks"),
        rows=rows["rows"],
        parity_nats=summary["parity_max_nats"],
        replay=replay[0],
    )


def _by_reason(counts: Counter[str], name: str) -> dict[str, int]:
    found = {key.removeprefix(f"{name} "): count for key, count in counts.items() if key.startswith(f"{name} ")}
    return {reason: count for reason, count in sorted(found.items()) if count}


def results() -> list[Result]:
    """Returns the newest result of each client."""
    lines = RESULTS.read_bytes().splitlines() if RESULTS.exists() else []
    found = {result.client: result for result in (msgspec.json.decode(line, type=Result) for line in lines)}
    return [found[client] for client in PACKAGES if client in found]


def table(found: Sequence[Result]) -> list[str]:
    """Returns the lines of the section in docs/agents.md."""
    heads = (
        "agent", "packages", "steps, s", "episodes", "turns", "tool calls", "failed samples", "forks", "rows",
        "parity, nats", "scored again",
    )  # fmt: skip
    lines = [*(result.provenance for result in found), ""]
    lines += [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for one in found:
        cells = (
            f"`{one.client}`",
            ", ".join(f"{name} {version}" for name, version in one.packages.items()),
            f"{one.steps}, {one.seconds:.0f}",
            f"{one.episodes:,}",
            f"{one.turns:,}",
            f"{one.tool_calls:,}",
            _in_words(one.failed),
            _in_words(one.forks),
            f"{one.rows:,}",
            f"{one.parity_nats:.1e}",
            one.replay,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _in_words(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in counts.items()) or "0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", help=f"clients to run: {', '.join(PACKAGES)}")
    parser.add_argument(
        "--set", nargs="*", default=[], help="overrides of the configuration, e.g. learner.total_steps=9"
    )
    parser.add_argument("--write", action="store_true", help="write the results into docs/agents.md")
    arguments = parser.parse_args()
    if unknown := set(arguments.clients) - set(PACKAGES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; the clients are {', '.join(PACKAGES)}")
    for client in arguments.clients:
        with tempfile.TemporaryDirectory() as temporary:
            result = measure(client, overrides=arguments.set, folder=Path(temporary))
        print("\n".join(table([result])), flush=True)
        if result.parity_nats > 1e-4:
            raise SystemExit(f"parity of {client}: {result.parity_nats:.1e} nats")
        kept = [each for each in results() if each.client != client]
        RESULTS.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in (*kept, result)))
    if arguments.write:
        write_section(NAME, table(results()), page=REPOSITORY / "docs" / "agents.md")


if __name__ == "__main__":
    main()
