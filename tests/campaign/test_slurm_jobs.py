"""Submits deploy/slurm/asyncrl.sbatch to a real Slurm of two nodes, with a small run of the quickstart.

Only the end of a run writes a checkpoint here (`checkpoint.every_steps` is larger than the number of steps that are
trained), except when a node is lost. So a resumed run has all steps only if its end was normal.
"""

import json
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import NODES, SlurmCluster, address, wait_for, why_not

from asyncrl.checkpoints.directory import CHECKPOINTS, complete_steps

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "deploy" / "slurm" / "asyncrl.sbatch"
SETTINGS = (
    "generator.kv_cache_gib=0.25",
    "learner.groups_per_step=8",
    "learner.group_size=4",
    "learner.total_steps=1000000",
    "checkpoint.every_steps=1000000",
)
TINY = "model.tiny.warmup_steps=20"
TRAINS_S = 900.0
"""Time limit until a job has trained its first steps; a failing test waits that long."""
ENDS_S = 300.0
"""Time limit until a job has ended."""
STEPS = 3
"""Steps that a job trains before the test goes on."""

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]


class Jobs:
    """Jobs of one run in a cluster, and the run's directory."""

    def __init__(self, cluster: SlurmCluster, folder: Path, *, model: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.run = folder / "runs" / "quickstart"
        self.model = model
        self.submitted: list[str] = []

    def submit(self, *settings: str) -> str:
        """Submits the script, with `settings` after `SETTINGS`. Returns the job's number."""
        job = self.cluster.call(
            "sbatch", "--parsable", "--nodes=2", "--time=60", f"--chdir={self.folder}", f"--output={self.output}",
            f"--export=ALL,HEAD_IP={address()},PYTHONPATH={REPOSITORY},OMP_NUM_THREADS=1",
            str(SCRIPT), "-c", str(REPOSITORY / "configs" / "quickstart.yaml"), f"model.path={self.model}", TINY,
            f"run.dir={self.run.parent}", *SETTINGS, *settings,
        )  # fmt: skip
        self.submitted.append(job)
        return job

    def folders(self) -> list[Path]:
        """Returns the folders of the Rays of all jobs."""
        return [folder for job in self.submitted for folder in Path("/tmp").glob(f"asyncrl-{job}-*")]

    @property
    def output(self) -> Path:
        return self.folder / "output"

    def steps(self) -> int:
        """Returns the number of steps that the run's records have."""
        path = self.run / "steps.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def info(self) -> dict[str, object]:
        """Returns run.json of the run; an empty dict while it does not exist."""
        path = self.run / "run.json"
        found: dict[str, object] = json.loads(path.read_bytes()) if path.exists() else {}
        return found

    def wait_for_steps(self, job: str, steps: int) -> None:
        """Waits until the run has trained `steps` steps. Fails if the job ends before."""

        def trained() -> bool:
            assert self.state(job) in {"PENDING", "RUNNING"}, self.output.read_text()
            return self.steps() >= steps

        wait_for(trained, TRAINS_S, f"step {steps} ({self.output})")

    def state(self, job: str) -> str:
        return self.cluster.job(job)["JobState"]

    def wait_for_state(self, job: str, state: str) -> None:
        wait_for(lambda: self.state(job) == state, ENDS_S, f"job {job} to be {state} ({self.output})")

    def assert_saved(self) -> None:
        """Asserts that the run ended normally, and that its newest checkpoint has all of its steps."""
        assert self.info()["state"] == "stopped", self.output.read_text()
        assert complete_steps(self.run / CHECKPOINTS)[-1] == self.steps()
        assert not (self.run / "lost-steps.jsonl").exists()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "speller"
    words = ["-m", "asyncrl", "model", "-c", "quickstart", f"model.path={path}", TINY]
    subprocess.run([sys.executable, *words], check=True, cwd=REPOSITORY)
    return path


@pytest.fixture
def jobs(cluster: SlurmCluster, model: Path, tmp_path: Path) -> Iterator[Jobs]:
    jobs = Jobs(cluster, tmp_path, model=model)
    yield jobs
    jobs.cluster.end_jobs()


def test_the_time_limit_loses_no_step_and_the_job_resumes(jobs: Jobs) -> None:
    job = jobs.submit()
    jobs.wait_for_steps(job, STEPS)
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in jobs.folders()] == [0o700] * 2
    # Slurm sends --signal=B:USR1@300 when less than 300 s are left.
    ran_minutes = jobs.cluster.ran_s(job) // 60
    jobs.cluster.call("scontrol", "update", f"JobId={job}", f"TimeLimit={ran_minutes + 5}")
    jobs.wait_for_state(job, "PENDING")
    assert "the time limit is near (USR1)" in jobs.output.read_text()
    jobs.assert_saved()
    assert jobs.folders() == []
    before = jobs.steps()

    # Slurm has revoked the credentials that the job got until the second of its requeue: a start in it fails.
    jobs.cluster.call("scontrol", "update", f"JobId={job}", "StartTime=now+5", "TimeLimit=60")
    jobs.wait_for_steps(job, before + STEPS)
    assert jobs.info()["resumed"]
    jobs.cluster.call("scancel", "--batch", "--signal=TERM", job)
    jobs.wait_for_state(job, "COMPLETED")
    assert jobs.cluster.job(job)["Restarts"] == "1"
    jobs.assert_saved()
    assert jobs.folders() == []


def test_a_job_submitted_again_begins_anew_without_a_checkpoint_and_resumes_with_one(jobs: Jobs) -> None:
    job = jobs.submit()
    jobs.wait_for_steps(job, STEPS)
    jobs.cluster.call("scancel", job)  # without a signal, Slurm kills
    jobs.wait_for_state(job, "CANCELLED")
    jobs.cluster.wait_for_end(job)
    assert jobs.folders() == []
    assert jobs.info()["state"] == "running"
    killed = jobs.info()["nonce"]

    job = jobs.submit()
    wait_for(lambda: jobs.info().get("nonce", killed) != killed, TRAINS_S, f"a new run ({jobs.output})")
    assert (jobs.run.parent / "quickstart.1").is_dir()
    jobs.wait_for_steps(job, STEPS)
    jobs.cluster.call("scancel", "--batch", "--signal=TERM", job)
    jobs.wait_for_state(job, "COMPLETED")
    jobs.assert_saved()
    nonce, before = jobs.info()["nonce"], jobs.steps()

    job = jobs.submit()
    jobs.wait_for_steps(job, before + 1)
    assert jobs.info()["nonce"] == nonce
    assert jobs.info()["resumed"]


def test_a_job_that_loses_a_node_is_queued_again_and_goes_on_from_its_newest_checkpoint(jobs: Jobs) -> None:
    job = jobs.submit("checkpoint.every_steps=2")
    jobs.wait_for_steps(job, STEPS)
    wait_for(lambda: complete_steps(jobs.run / CHECKPOINTS), TRAINS_S, f"a checkpoint ({jobs.output})")
    jobs.cluster.lose_node(NODES[1])
    jobs.wait_for_state(job, "PENDING")
    # The folder of the lost node stays on it.
    wait_for(lambda: len(jobs.folders()) == 1, ENDS_S, "the processes of the first node to end")
    shutil.rmtree(jobs.folders()[0])
    saved = complete_steps(jobs.run / CHECKPOINTS)[-1]
    jobs.cluster.start_node(NODES[1])

    jobs.cluster.call("scontrol", "update", f"JobId={job}", "StartTime=now+5")
    wait_for(lambda: jobs.info().get("resumed"), TRAINS_S, f"the job to resume the run ({jobs.output})")
    jobs.wait_for_steps(job, saved + STEPS)
    jobs.cluster.call("scancel", "--batch", "--signal=TERM", job)
    jobs.wait_for_state(job, "COMPLETED")
    [resumed] = json.loads((jobs.run / "run.json").read_bytes())["resumed"]
    assert resumed["step"] == saved
    assert complete_steps(jobs.run / CHECKPOINTS)[-1] == jobs.steps()
    audit = [sys.executable, "-m", "asyncrl", "audit", str(jobs.run)]
    subprocess.run(audit, check=True, cwd=REPOSITORY, timeout=ENDS_S)
