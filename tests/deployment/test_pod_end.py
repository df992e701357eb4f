"""A pod's preStop command stops the job, restarts the run, or drains the replicas of its node, and waits for their
end."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.job_submission import JobStatus

from asyncrl.deployment import pod_end
from asyncrl.errors import CallTimeout
from asyncrl.generation.actor import GeneratorActor
from asyncrl.ranks.actor import RankActor


class Jobs:
    """Ray's API for jobs. A job that is stopped goes on for `saving` questions, in which a learner saves."""

    def __init__(self, statuses: dict[str | None, JobStatus], *, saving: int = 0) -> None:
        self.statuses, self.saving = statuses, saving
        self.stopped: list[str] = []

    def list_jobs(self) -> list[Any]:
        return [SimpleNamespace(submission_id=job, status=status) for job, status in self.statuses.items()]

    def stop_job(self, job: str) -> None:
        self.stopped.append(job)

    def get_job_status(self, job: str) -> JobStatus:
        if job in self.stopped and self.saving == 0:
            return JobStatus.STOPPED
        self.saving -= job in self.stopped
        return self.statuses[job]


def test_the_command_waits_until_the_running_job_has_ended_and_leaves_ended_ones_alone() -> None:
    # A driver that was not submitted as a job has no submission id.
    jobs = Jobs({"now": JobStatus.RUNNING, "before": JobStatus.FAILED, None: JobStatus.RUNNING}, saving=3)
    slept: list[float] = []
    assert pod_end.stop_jobs(jobs, sleep=slept.append) == ["now"]  # type: ignore[arg-type]
    assert jobs.stopped == ["now"]
    assert len(slept) == 3


def row(
    name: str, *, kind: str = "GeneratorActor", node: str = "n1", state: str = "ALIVE", job: str = "01000000"
) -> dict[str, Any]:
    return {"Name": name, "ActorClassName": kind, "State": state, "Address": {"NodeID": node}, "JobID": job}


def test_the_replicas_of_the_node_are_drained_and_the_command_waits_for_their_actors() -> None:
    table = {
        "1": row("here"), "2": row("ended", state="DEAD"), "3": row("there", node="n2"), "4": row("other", kind="Rank"),
    }  # fmt: skip
    drained: list[str] = []
    slept: list[float] = []

    def actor(name: str) -> Any:
        return SimpleNamespace(drain=SimpleNamespace(remote=lambda: drained.append(name)))

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            table["1"] = row("here", state="DEAD")
            table["5"] = row("here again")  # its deployment has started it again, before the node was closed

    assert pod_end.drain_replicas("n1", table=lambda: table, actor=actor, sleep=sleep) == ["here"]
    assert drained == ["here"]
    assert len(slept) == 2


NAMESPACES = {"01000000": "math", "02000000": "code", "03000000": "elsewhere"}


def test_the_runs_of_the_node_are_asked_to_restart_and_the_command_waits_for_their_ranks() -> None:
    table = {
        "1": row("", kind="RankActor"), "2": row("", kind="RankActor", node="n2", job="03000000"),
        "3": row("", kind="RankActor", job="02000000"), "4": row("", kind="JobSupervisor", job="03000000"),
    }  # fmt: skip
    asked: list[str] = []
    slept: list[float] = []

    def ask(run: str) -> None:
        asked.append(run)
        if asked == ["code", "math"]:
            raise CallTimeout("its buffer is busy")

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            table["1"] = table["3"] = row("", kind="RankActor", state="DEAD")

    ended = pod_end.restart_runs("n1", table=lambda: table, namespaces=lambda: NAMESPACES, ask=ask, sleep=sleep)
    assert ended == ["code", "math"]
    assert asked == ["code", "math", "math"]
    assert len(slept) == 3


def test_the_classes_in_rays_table_have_the_names_of_the_actors() -> None:
    assert (RankActor.__name__, GeneratorActor.__name__) == (pod_end.RANK, pod_end.REPLICA)


def test_a_pod_of_the_learner_without_ranks_restarts_no_run() -> None:
    table = {
        "1": row("", kind="RankActor", node="n2"), "2": row("", kind="RankActor", state="DEAD"), "3": row("other"),
    }  # fmt: skip
    asked: list[str] = []
    assert pod_end.restart_runs("n1", table=lambda: table, namespaces=lambda: NAMESPACES, ask=asked.append) == []
    assert asked == []


@pytest.mark.parametrize("arguments", [["job"], ["learner"], ["replicas"]])
def test_a_pod_whose_cluster_has_ended_already_ends_at_once(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gone(*_: object, **__: object) -> None:
        raise ConnectionError("no head")

    monkeypatch.setattr(pod_end, "JobSubmissionClient", gone)
    monkeypatch.setattr(pod_end.ray, "init", gone)
    assert pod_end.main(arguments) == 0
    assert "nothing was drained" in capsys.readouterr().err


def test_the_job_is_stopped_at_the_head_that_kuberay_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def client(address: str) -> Jobs:
        asked.append(address)
        return Jobs({})

    monkeypatch.setattr(pod_end, "JobSubmissionClient", client)
    monkeypatch.setenv("FQ_RAY_IP", "quick-head-svc.asyncrl.svc.cluster.local")
    assert pod_end.main(["job"]) == 0
    monkeypatch.delenv("FQ_RAY_IP")
    assert pod_end.main(["job"]) == 0
    assert asked == ["http://quick-head-svc.asyncrl.svc.cluster.local:8265", "http://127.0.0.1:8265"]
    assert capsys.readouterr().out == "pod_end: ended nothing\n" * 2


def test_other_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert pod_end.main([]) == 2
    assert "use `job`, `learner` or `replicas`" in capsys.readouterr().err
