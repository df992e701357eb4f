"""Evaluates every query with promtool for two runs with two replicas each, so that ambiguous joins are found.

With one run and one replica, no join is ambiguous. Comparisons in rules are evaluated with `bool`, which keeps all
series: without it, a comparison can drop the series that make a join ambiguous before Prometheus joins them.
"""

import json
import re
import shutil
import subprocess
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from queries import Question, concrete, panel_questions, parsed, rule_questions, selectors

from asyncrl.metrics.catalogue import CATALOGUE, Kind, Metric, Role

RUNS = ("one", "two")
REPLICAS = {Role.LEARNER: ("learner",), Role.BUFFER: ("buffer",), Role.GENERATOR: ("generator-0", "generator-1")}
NODES = {"learner": "a1", "buffer": "a1", "generator-0": "a1", "generator-1": "b2"}
"""The node of each process, and so the label `node` of its series."""
OPEN_VALUES = ("x", "y")
SCRAPES = 300
"""Number of scrapes, one every 7 s: more than half an hour."""
AT = "31m"
OTHERS = {
    "vllm:num_requests_running": ("engine", ("0",)),
    "vllm:num_requests_waiting": ("engine", ("0",)),
    "vllm:kv_cache_usage_perc": ("engine", ("0",)),
    "vllm:num_preemptions_total": ("engine", ("0",)),
    "vllm:prefix_cache_hits_total": ("engine", ("0",)),
    "vllm:prefix_cache_queries_total": ("engine", ("0",)),
}
RAYS = (
    ("ray_object_store_memory", {"Location": "SPILLED"}),
    ("ray_object_store_memory", {"Location": "MMAP_SHM"}),
    ("ray_memory_manager_worker_eviction_total", {"Name": "w", "Type": "task"}),
    ("ray_memory_manager_worker_eviction_total", {"Name": "w", "Type": "actor"}),
)

GPUS = ("DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_XID_ERRORS")


class Answer(NamedTuple):
    """promtool's answer to a query: an error, or the labels of each series."""

    error: str
    series: list[dict[str, str]]


def test_every_panel_answers_for_one_of_two_runs_with_all_of_its_replicas(tmp_path: Path) -> None:
    questions = [
        Question(asked_by, concrete(expr, run="one", interval="1m", step_range="5m"))
        for asked_by, expr in panel_questions()
    ]
    answers = answered(tmp_path, [question.expr for question in questions])
    for question, answer in zip(questions, answers, strict=True):
        assert not answer.error, question
        assert answer.series, question
        assert all(labels.get("run", "one") == "one" for labels in answer.series), question
        check_replicas(answer, question)


def test_the_gpus_are_those_of_the_nodes_of_the_runs_ray(tmp_path: Path) -> None:
    queries = [concrete(expr, run="one", interval="1m") for _, expr in panel_questions() if "DCGM" in expr]
    assert len(queries) == len(GPUS)
    for answer in answered(tmp_path, queries):
        shown = sorted((labels["node"], labels["gpu"]) for labels in answer.series)
        assert shown == [("a1", "0"), ("a1", "1"), ("b2", "0"), ("b2", "1"), ("pod-of-ray-1", "5")], answer


def test_every_rule_answers_for_both_runs_and_all_replicas(tmp_path: Path) -> None:
    questions = [
        Question(asked_by, re.sub(r" ([<>]=?) ", r" \1 bool ", " ".join(expr.split())))
        for asked_by, expr in rule_questions()
    ]
    answers = answered(tmp_path, [question.expr for question in questions])
    for question, answer in zip(questions, answers, strict=True):
        assert not answer.error, question
        of_ray = any((selector.name or "").startswith("ray_") for selector in selectors(parsed(question.expr)))
        assert {labels.get("run", "") for labels in answer.series} == ({"", *RUNS} if of_ray else set(RUNS)), question
        check_replicas(answer, question)


def check_replicas(answer: Answer, question: Question) -> None:
    """Checks that an answer with a label `replica` has both generators of each run in it."""
    shown = {(labels.get("run", ""), labels["replica"]) for labels in answer.series if "replica" in labels}
    generators = set(REPLICAS[Role.GENERATOR])
    for run in {run for run, replica in shown if replica in generators}:
        assert generators <= {replica for of, replica in shown if of == run}, question


def answered(folder: Path, queries: list[str]) -> list[Answer]:
    """Returns the answers to the queries, in their order.

    Every test case expects an empty answer. promtool then reports the real answer as a failure.
    """
    path = shutil.which("promtool")
    if path is None:
        pytest.skip("promtool is not installed: `apt-get install prometheus`, as .ci/run does")
    expecting = [{"expr": query, "eval_time": AT, "exp_samples": []} for query in queries]
    tests = {"tests": [{"interval": "7s", "input_series": input_series(), "promql_expr_test": expecting}]}
    (folder / "tests.yml").write_text(yaml.safe_dump(tests))
    done = subprocess.run(
        [path, "test", "rules", "tests.yml"], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip
    said = done.stdout + done.stderr
    errors, got = {}, {}
    for quoted, rest in re.findall(r'expr: ("(?:[^"\\]|\\.)*"), time: [^,\n]*,(.*(?:\n +(?:exp|got):.*)*)', said):
        query = json.loads(quoted)
        if found := re.search(r"\n +got: ?(.*)", rest):
            got[query] = found.group(1)
        else:
            errors[query] = rest.strip()
    return [Answer(errors.get(query, ""), labels_of(got.get(query, ""))) for query in queries]


def labels_of(samples: str) -> list[dict[str, str]]:
    """Returns the labels of samples in promtool's format: `{run="one"} 1E+00, {run="two"} 2E+00`."""
    return [dict(re.findall(r'(\w+)="([^"]*)"', found)) for found in re.findall(r"\{([^{}]*)\} \S", samples)]


def input_series() -> list[dict[str, str]]:
    """Returns the series that the processes of two runs export: counters and buckets rise, gauges are 1, targets are
    down.

    Two Ray nodes are shared by both runs, and Prometheus also finds them without a run.
    """
    series = []
    for run, metric in product(RUNS, CATALOGUE):
        for role in metric.roles:
            for replica, labels in product(REPLICAS[role], combinations(metric)):
                discovered = {"run": run, "role": role.value, "replica": replica, "node": NODES[replica]}
                series += [scraped(name, discovered | more) for name, more in samples_of(metric, labels)]
    for run, replica, (name, (label, values)) in product(RUNS, REPLICAS[Role.GENERATOR], OTHERS.items()):
        discovered = {"run": run, "replica": replica, "node": NODES[replica]}
        series += [scraped(name, discovered | {label: value}) for value in values]
    for run, role in product(RUNS, Role):
        ups = [
            scraped("up", {"run": run, "role": role.value, "replica": replica, "node": NODES[replica]})
            for replica in REPLICAS[role]
        ]
        series += [up | {"values": f"0x{SCRAPES}"} for up in ups]
    firing = {"alertname": "AsyncrlTest", "alertstate": "firing"}
    series += [scraped("ALERTS", firing | {"run": run}) for run in RUNS]
    for (ray, node), (name, labels) in product({"ray-1": "a1", "ray-2": "b2"}.items(), RAYS):
        discovered = {"instance": ray, "role": "ray", "replica": ray, "node": node}
        series += [scraped(name, labels | discovered | {"run": run}) for run in RUNS]
        series += [scraped(name, labels | {"instance": f"pod-of-{ray}", "node": f"pod-of-{ray}"})]
    for name, host, gpu in product(GPUS, ("a1", "b2", "host-of-others"), ("0", "1")):
        series += [scraped(name, {"Hostname": host, "gpu": gpu})]
    for name, pod in product(GPUS, ("pod-of-ray-1", "pod-of-others")):
        series += [scraped(name, {"Hostname": "host-of-pods", "gpu": "5", "pod": pod})]
    return series


def combinations(metric: Metric) -> list[dict[str, str]]:
    """Returns every combination of a metric's label values. Open labels get two values."""
    values = [OPEN_VALUES if found is None else found for found in metric.labels.values()]
    return [dict(zip(metric.labels, chosen, strict=True)) for chosen in product(*values)]


def samples_of(metric: Metric, labels: dict[str, str]) -> list[tuple[str, dict[str, str]]]:
    """Returns the series of one metric with these labels."""
    if metric.kind is not Kind.HISTOGRAM:
        return [(metric.name, labels)]
    buckets = [(f"{metric.name}_bucket", labels | {"le": le}) for le in (*map(str, metric.buckets), "+Inf")]
    return [*buckets, (f"{metric.name}_sum", labels), (f"{metric.name}_count", labels)]


def scraped(name: str, labels: dict[str, str]) -> dict[str, str]:
    rises = name.endswith(("_total", "_bucket", "_sum", "_count"))
    text = ", ".join(f'{label}="{value}"' for label, value in labels.items())
    return {"series": f"{name}{{{text}}}", "values": f"{'0+1' if rises else '1'}x{SCRAPES}"}
