"""`asyncrl up` with real Ray, vLLM and FSDP2: the guarantees that every run must keep."""

import contextlib
import html
import json
import os
import socket
import string
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import PPO, QUICKSTART, Command, Run, engines_of, in_this_process, small_overrides
from kills import ray_session
from listening_sockets import COLLECTIVES, Listener, documented, listeners
from prometheus_server import PrometheusServer, free_port
from queries import concrete, panel_questions, parsed, rule_questions, selectors

from asyncrl.complete_directory import complete
from asyncrl.config.load import load_config
from asyncrl.environments.interfaces import build_tasks
from asyncrl.metrics.catalogue import Role
from asyncrl.witness.judge import CHECKS

pytestmark = pytest.mark.integration


def summary_of(run: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((run / "summary.json").read_bytes())
    return loaded


def issued_prompts(run: Path) -> list[str]:
    """Returns the prompt of every trained group. `learner.groups_logged` must be at least the groups of a step."""
    lines = [line for file in (run / "samples").glob("step-*.jsonl") for line in file.read_text().splitlines()]
    prompts = {record["group"]: record["prompt"] for record in map(json.loads, lines)}
    return list(prompts.values())


def steps_of(run: Path) -> list[dict[str, Any]]:
    """Returns the records of the run's steps so far."""
    return [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]


IMPORTS = {"PYTHONPATH": os.pathsep.join(sys.path)}
"""Environment with which the command finds the same modules as the test."""
DENSE = "environment.reward=dense_reward:by_checksum"
"""Override for rewards that differ within a group. Without it, the first sentence about the run would warn that all
rewards are equal."""
STEPS = 36
"""Steps of the watched run. They take several windows of ten seconds, the range of the dashboards' rates, also on a
fast machine."""
WARM_UP_STEPS = 4
"""Steps of the watched run in which only the critic learns."""


class WatchedRun(NamedTuple):
    """A run that has ended, and the Prometheus that scraped it. `served` is the learner's answer to `GET /sd`. `second`
    are exit code and output of a second run on the same directory, and `stacks` is the output of `asyncrl stacks`. Both
    commands ran while the run lived. `listening` are its listening sockets after its first step."""

    path: Path
    second: tuple[int, str]
    stacks: str
    listening: set[Listener]
    prometheus: PrometheusServer | None
    served: list[dict[str, Any]]
    since_s: float
    until_s: float


@pytest.fixture(scope="module")
def watched(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedRun]:
    """The asynchronous run with a critic that most tests of this module check. It has the name that the shipped
    configuration of Prometheus contains. If Prometheus is installed, it scrapes the run every second."""
    folder, port = tmp_path_factory.mktemp("watched"), free_port()
    run = folder / "runs" / "quickstart"
    targets = run / "metrics" / "targets.json"
    prometheus = PrometheusServer(folder, learner_port=port) if PrometheusServer.installed() else None
    since_s = time.time()
    same_directory = [
        "up", "-c", str(PPO), f"run.dir={run.parent}", f"run.name={run.name}", *small_overrides(model_path)
    ]  # fmt: skip
    command = Command(
        [
            *same_directory, f"metrics.learner_port={port}",
            f"learner.total_steps={STEPS}", "staleness.max_versions=2", "learner.groups_logged=4",
            "learner.logprobs_logged=true",
            f"checkpoint.every_steps={STEPS // 4}", "checkpoint.keep=2",
            # One group at a time, with long sequences: the learner waits for groups on every machine, so weights arrive
            # in the middle of sequences.
            "generator.max_concurrent_groups=1",
            "generator.max_completion_tokens=50",
            "generator.temperature=2",  # the most that vLLM takes
            "generator.max_starts_per_s=8",
            f"critic.warmup_steps={WARM_UP_STEPS}",
            "metrics.objective_steps_per_hour=1", "metrics.objective_training_ratio=0.01",
            DENSE,
        ],
        log=folder / "command.log", environment=IMPORTS,
    )  # fmt: skip
    served: list[dict[str, Any]] = []
    engines: set[int] = set()
    session = ""

    def all_are_seen() -> bool:
        """Keeps what it has seen once: on a busy machine, the engine may end before the targets agree."""
        nonlocal session
        with contextlib.suppress(RuntimeError):  # this run has not started Ray yet
            session = ray_session(command.process)  # of another attempt, if Ray did not start within its limit
            engines.update(engines_of(session))
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/sd", timeout=60) as response:
                answer = json.loads(response.read())
            roles = {group["labels"]["role"] for group in answer}
            if roles == {"buffer", "generator", "learner", "ray"} and json.loads(targets.read_bytes()) == answer:
                served[:] = answer
        return bool(served and engines)

    try:
        command.wait_for((run / "run.json").exists, timeout_s=600, what="a run that holds its directory")
        second = Command(same_directory, log=folder / "second.log", environment=IMPORTS)
        try:
            refused = second.wait(120), second.output()
        finally:
            second.end()
        command.wait_for(all_are_seen, timeout_s=600, what="an engine, and the same targets in the file and over HTTP")
        stacks = in_this_process("stacks", str(run))
        command.wait_for((run / "steps.jsonl").exists, timeout_s=600, what="a first step")
        targets_of = [group["targets"] for group in served if group["labels"]["role"] != "ray"]
        ports = {int(target.rpartition(":")[2]) for targets in targets_of for target in targets}
        listening = listeners([command.process], metrics=ports)
        assert command.wait(600) == 0, command.output()[-4000:]
        assert not engines_of(session), "an engine outlived its run"
        yield WatchedRun(run, refused, stacks, listening, prometheus, served, since_s, time.time())
    finally:
        command.end()
        if prometheus is not None:
            prometheus.end()


def test_an_asynchronous_run_keeps_its_promises(watched: WatchedRun) -> None:
    run = watched.path
    summary = summary_of(run)
    assert summary["steps"] == STEPS
    assert summary["ledger_closed"] is True
    assert summary["groups_discarded"] == 0
    assert summary["rows_outstanding"] == 0
    assert summary["trained_tokens"] == summary["generated_tokens"] > 0
    assert summary["max_group_staleness"] <= 2
    assert summary["max_token_staleness"] <= summary["max_group_staleness"]
    assert summary["parity_max_nats"] <= 1e-4
    assert summary["mid_sequence_updates"] > 0
    assert summary["weight_updates"] >= 2
    assert summary["heldout_first"] is not None
    assert summary["heldout_last"] is not None
    steps = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    first, last = steps[0], steps[-1]
    train, heldout = build_tasks(load_config([run / "config.yaml"], []))
    issued = issued_prompts(run)
    assert len(issued) == last["ledger_groups"]["trained"] == 4 * STEPS, "samples/ must have every trained group"
    assert set(issued) <= {task.prompt for task in train}
    assert heldout
    assert not set(issued) & {task.prompt for task in heldout}
    for side in ("learner_state_s", "generator_state_s"):
        spent = sum(last[side].values()) - sum(first[side].values())
        assert spent == pytest.approx(last["wall_s"] - first["wall_s"], abs=2.0), side
    assert json.loads((run / "run.json").read_bytes())["state"] == "finished"
    assert "<html" in (run / "report.html").read_text()
    assert {group["labels"]["run"] for group in watched.served} == {"quickstart"}
    left = json.loads((run / "metrics" / "targets.json").read_bytes())
    assert left == [], "a run that ended in order must leave the list, otherwise it would look dead"
    kept = sorted((run / "checkpoints").iterdir())
    assert [path.name for path in kept] == [f"step-{3 * STEPS // 4}", f"step-{STEPS}"]
    for path in kept:
        exported, _ = complete(path / "hf")
        assert {"model.safetensors", "config.json", "tokenizer.json"} <= {file.name for file in exported.iterdir()}


def test_the_stacks_of_all_of_its_processes_are_shown_while_it_lives(watched: WatchedRun) -> None:
    titles = [line for line in watched.stacks.splitlines() if line.startswith("--- ")]
    for part in (
        "-m asyncrl up",
        "RankActor",
        "GeneratorActor",
        "CoordinatorActor",
        "VLLM::EngineCore",
        "scoring_worker",
    ):
        assert any(part in title for title in titles), f"{part} in {titles}"
    assert "run_until_done (asyncrl/deployment/launch.py" in watched.stacks


def test_the_processes_of_a_run_listen_where_the_security_page_says(watched: WatchedRun) -> None:
    """The table has a row for each process that listens, and no other row."""
    assert watched.listening == documented()
    of_the_model = {row.process: row.address for row in watched.listening if row.process in COLLECTIVES}
    assert of_the_model == dict.fromkeys(COLLECTIVES, "127.0.0.1")


SLACK_S = 0.5
"""Largest difference between the kernel's clock, from which the start of a process is computed, and the clock that
Prometheus reads, seconds."""

DOWN = "overview / Processes up / B"
ON_POLICY = "learning / Parity / B"

OF_AGENTS = [
    *[(panel, query) for panel in ("Turns of an episode", "Tools") for query in "AB"],
    *[(panel, "A") for panel in ("Open sessions", "Tool calls", "Oldest session", "Forks")],
]
WITNESSED = {
    check: f"learning / Differences that the witness found / {letter}"
    for check, letter in zip(CHECKS, string.ascii_uppercase, strict=False)
}
OF_GPUS = ("Memory of each GPU", "Busy share of each GPU", "Last XID error of each GPU")
NO_DATA_WHEN_HEALTHY = {
    "overview / Alerts firing / A": "no alert fires",
    DOWN: "no process is down",
    "flow / Failed rollouts / A": "no rollout fails, and a series exists only after its reason has occurred",
    "flow / Failures of replicas / A": "no replica fails",
    "flow / Failures of replicas / B": "no replica fails",
    "flow / Workers ended for memory / A": "Ray creates this series when it ends the first worker",
    "flow / Model FLOPs utilisation / A": "the peak of a CPU is unknown",
    "flow / Model FLOPs utilisation / B": "the peak of a CPU is unknown",
    "flow / Time of a broadcast / A": "weights do not travel by broadcast",
    "flow / Mirror / A": "the run has no mirror",
    **{f"flow / {panel} / {query}": "there are no agents" for panel, query in OF_AGENTS},
    "learning / Reward by component / A": "the reward is one number",
    "learning / Reward by part / A": "there is no mixture",
    **{f"learning / Episodes of agents / {query}": "there are no agents" for query in "ABC"},
    "learning / KL to the reference / A": "the objective does not use the reference",
    "learning / Penalty's β / A": "no penalty of the objective has control",
    WITNESSED["bounds"]: "the objective has no bound that depends on the whole step",
    "learning / Memory of the learner's fullest GPU / A": "the ranks have no GPU",
    **{f"flow / {panel} / A": "there is no GPU" for panel in OF_GPUS},
    "AsyncrlMirrorBehind": "the run has no mirror",
    "AsyncrlWorkerOutOfMemory": "Ray creates this series when it ends the first worker",
}


def test_every_query_of_every_panel_and_rule_finds_data_in_a_real_run(watched: WatchedRun) -> None:
    """In a healthy run the result of an alert rule is empty, but each selector in the rule must find data."""
    prometheus = seen_by(watched)
    empty = set()
    for question in panel_questions():
        query = concrete(question.expr, run=watched.path.name, interval="10s")
        if not prometheus.over(query, since_s=watched.since_s, until_s=watched.until_s):
            empty.add(question.asked_by)
    for question in rule_questions():
        for selector in selectors(parsed(question.expr)):
            if not prometheus.over(str(selector), since_s=watched.since_s, until_s=watched.until_s):
                empty.add(question.asked_by)
    missed = any(value == 0 for line in prometheus.scraped("up", until_s=watched.until_s) for _, value in line.points)
    # On a busy machine a scrape may take longer than its limit of one second. Prometheus then records the process as
    # down. New weights may also come so late that few steps have on-policy tokens, and none at a scrape.
    # A tensor may stay as it was in a step, where its moments predict no change. A short run may have a health note.
    may_be = {WITNESSED["frozen"], "overview / Health notes / B"} | ({DOWN} if missed else set())
    on_policy = [step["diagnostics"]["parity_tokens"] > 0 for step in steps_of(watched.path)]
    if sum(on_policy) < len(on_policy) / 2:
        may_be.add(ON_POLICY)
    assert empty - may_be == set(NO_DATA_WHEN_HEALTHY) - may_be


def test_every_process_is_scraped_once_although_it_is_found_twice(watched: WatchedRun) -> None:
    lines = seen_by(watched).scraped("up", until_s=watched.until_s)
    found = {line.labels["role"]: line for line in lines}
    assert sorted(found) == ["buffer", "generator", "learner", "ray"]
    assert len(lines) == len(found)
    for role, line in found.items():
        assert line.labels["job"] == ("ray" if role == "ray" else "asyncrl")
        assert line.labels["node"] == socket.gethostname()
        moments = [moment for moment, _ in line.points]
        # Prometheus drops the scrapes for which a busy machine has no time, so there can be fewer of them. Two scrapes
        # can be close together after a late one, so their distance shows nothing.
        most = (moments[-1] - moments[0]) / (15 if role == "ray" else 1) + 2
        assert len(moments) <= most, f"{role}: {len(moments)} scrapes where one target has at most {most:.0f}"


def test_prometheus_sees_the_last_values_and_no_target_that_is_listed_and_dead(watched: WatchedRun) -> None:
    prometheus = seen_by(watched)
    summary = summary_of(watched.path)
    for name, last in [("heldout_reward_mean", summary["heldout_last"]), ("policy_version", summary["steps"])]:
        [line] = prometheus.scraped(f"asyncrl_learner_{name}", until_s=watched.until_s)
        assert line.points[-1][1] == pytest.approx(last)
    for line in prometheus.scraped("up", until_s=watched.until_s):
        # The last value of a process that is gone but still listed is "down". A single late scrape on a busy machine
        # does not have this effect.
        assert line.points[-1][1] == 1.0, line.labels


@pytest.mark.parametrize("role", Role)
def test_state_seconds_add_up_to_wall_time(watched: WatchedRun, role: Role) -> None:
    """The sum agrees with the wall time since the start of the process to 1 %, at every scrape.

    A value is read between the time that is recorded for its scrape and the end of the scrape."""

    def at_moments(name: str) -> dict[float, float]:
        lines = seen_by(watched).scraped(f'{name}{{role="{role}"}}', until_s=watched.until_s)
        points = [point for line in lines for point in line.points]
        return {moment: sum(value for at, value in points if at == moment) for moment, _ in points}

    totals = at_moments(f"asyncrl_{role}_state_seconds_total")
    started, took = at_moments("process_start_time_seconds"), at_moments("scrape_duration_seconds")
    assert len(totals) >= 5
    assert totals.keys() == started.keys(), "every scrape must have both series"
    for moment, total in totals.items():
        age_s = moment - started[moment]
        assert 0.99 * age_s - SLACK_S <= total <= 1.01 * (age_s + took[moment]) + SLACK_S, f"{age_s:.1f} s old"


def seen_by(watched: WatchedRun) -> PrometheusServer:
    if watched.prometheus is None:
        pytest.skip("prometheus is not installed: `apt-get install prometheus`, as .ci/run does")
    return watched.prometheus


def test_a_critic_learns_beside_a_policy_that_waits_for_it(watched: WatchedRun) -> None:
    """During the critic's warm-up steps the published weights stay the first ones."""
    steps = steps_of(watched.path)
    first = steps[: 2 * WARM_UP_STEPS]
    assert [step["grad_norm"] == 0 for step in first] == [True] * WARM_UP_STEPS + [False] * WARM_UP_STEPS
    explained = [step["diagnostics"]["explained_variance"] for step in steps]
    assert explained[0] in (0.0, None), "a new critic predicts 0 for every state; None: all returns were equal"
    assert explained[len(first) - 1] != 0.0, "the critic has not learned"
    assert all(0 <= step["diagnostics"]["value_clipped_ratio"] <= 1 for step in steps)


@pytest.mark.fault("F35")
def test_a_second_run_on_the_same_directory_is_refused_at_once_and_the_first_goes_on(watched: WatchedRun) -> None:
    code, output = watched.second
    assert code == 1
    assert f"pid {json.loads((watched.path / 'run.json').read_bytes())['pid']}" in output
    assert summary_of(watched.path)["steps"] == STEPS


@pytest.mark.campaign
def test_a_reward_that_always_raises_ends_the_run_with_its_cause(
    run_command: Run, model_path: str, tmp_path: Path
) -> None:
    (tmp_path / "judges.py").write_text("def judge(task, completion):\n    raise KeyError('JUDGE_API_KEY')\n")
    command = run_command(
        "up", "-c", str(QUICKSTART), f"run.dir={tmp_path}", "run.name=test", *small_overrides(model_path),
        "environment.reward=judges:judge", "eval.prompts=0", "generator.max_data_failures=5",
        PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]),
    )  # fmt: skip
    assert command.wait(600) == 1
    output, run = command.output(), tmp_path / "test"
    first, end = output.index("first failure of reward_raised ("), output.index("error: your reward failed")
    assert first < end
    for part in (output[first:end], output[end:], html.unescape((run / "report.html").read_text())):
        assert "KeyError: 'JUDGE_API_KEY'" in part
        assert "judges.py:2" in part
    assert "failed 5 times in a row (generator.max_data_failures = 5)" in output[end:]
    assert "  completion: " in output[first:end]
    assert "Traceback" not in output
    [count] = json.loads((run / "failures.json").read_bytes())
    assert count["groups"] >= 5
    assert count["first"]["completion"]
