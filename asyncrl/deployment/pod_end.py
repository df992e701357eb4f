"""Drains a pod of a Ray cluster on Kubernetes before the pod ends. The preStop commands of deploy/kuberay call it:

    python -m asyncrl.deployment.pod_end job         in the pods of the head and the driver
    python -m asyncrl.deployment.pod_end learner     in the pods of the learner
    python -m asyncrl.deployment.pod_end replicas    in the pods of generators

Kubernetes sends SIGTERM to the pod when the command has ended, and kills the pod after its grace period, also if the
command still waits. So this module has no deadlines of its own. It ends at once if the cluster does not answer: the
head has ended then, and nothing is left to drain.
"""

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import ray
from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # type: ignore[attr-defined]  # made at import
from ray.exceptions import RayError
from ray.job_submission import JobStatus, JobSubmissionClient

from asyncrl.common.names import REPLICAS
from asyncrl.deployment.shared_actors import ask_to_end
from asyncrl.errors import CallTimeout

RANK, REPLICA = "RankActor", "GeneratorActor"
"""Names of the classes of actors in Ray's table. Their modules are not imported, because the imports of torch and vLLM
would take seconds of the pod's grace period."""
POLL_S = 1.0
"""Time between two questions whether jobs or replicas have ended, seconds."""
Table = Callable[[], Mapping[str, Mapping[str, Any]]]
"""Returns Ray's table of actors, by actor id."""


def stop_jobs(client: JobSubmissionClient, *, sleep: Callable[[float], object] = time.sleep) -> list[str]:
    """Stops the submitted jobs of the cluster that have not ended, and waits until they have. Returns their submission
    ids.

    Ray sends SIGTERM to a job, and SIGKILL after RAY_JOB_STOP_WAIT_TIME_S seconds. `asyncrl up` saves a checkpoint in
    between. Several pods may stop the same job, which does no harm.
    """
    jobs = [job.submission_id for job in client.list_jobs() if job.submission_id and not job.status.is_terminal()]
    for job in jobs:
        client.stop_job(job)
    while any(not JobStatus(client.get_job_status(job)).is_terminal() for job in jobs):
        sleep(POLL_S)
    return jobs


def restart_runs(
    node: str,
    *,
    table: Table,
    namespaces: Callable[[], Mapping[str, str]],
    ask: Callable[[str], object],
    sleep: Callable[[float], object] = time.sleep,
) -> list[str]:
    """Asks the learner of each run with ranks on a Ray node to save its weights and to start again, and waits until
    these ranks have ended. Returns the names of the runs.

    `ask` returns when the learner of a run has left, and raises CallTimeout if the run does not answer. `table` returns
    Ray's table of actors, `namespaces` the namespace of each of Ray's jobs, which is the name of the job's run. The row
    of an actor has its job, but no namespace.
    """
    ranks = {id: row["JobID"] for id, row in table().items() if row["ActorClassName"] == RANK and _on(row, node)}
    if not ranks:
        return []
    known = namespaces()
    runs = sorted({known[job] for job in ranks.values()})
    for run in runs:
        while True:
            # The run's buffer may be busy: a timeout does not show whether the run has received the request.
            with contextlib.suppress(CallTimeout):
                ask(run)
                break
            sleep(POLL_S)
    while any(_on(row, node) for id, row in table().items() if id in ranks):
        sleep(POLL_S)
    return runs


def drain_replicas(
    node: str,
    *,
    table: Table,
    actor: Callable[[str], Any],
    sleep: Callable[[float], object] = time.sleep,
) -> list[str]:
    """Drains the replicas on a Ray node, and waits until their actors have ended. Returns the names of the actors.

    `table` returns Ray's table of actors, `actor` the handle of an actor by its name. A replica that is drained
    finishes its groups. Then its deployment ends its actor, and starts the replica on another node.
    """
    replicas = {id: row for id, row in table().items() if row["ActorClassName"] == REPLICA}
    found = {id: row for id, row in replicas.items() if _on(row, node)}
    for row in found.values():
        with contextlib.suppress(ValueError):  # the actor has ended meanwhile
            actor(row["Name"]).drain.remote()
    while any(_on(row, node) for id, row in table().items() if id in found):
        sleep(POLL_S)
    return [row["Name"] for row in found.values()]


def _on(row: Mapping[str, Any], node: str) -> bool:
    """Returns whether the row of Ray's table is a living actor on the Ray node."""
    return (row["State"], row["Address"]["NodeID"]) == ("ALIVE", node)


def named_replica(name: str) -> Any:
    """Returns the handle of the actor of a replica of any run."""
    return ray.get_actor(name, namespace=REPLICAS)


def close_own_node() -> str:
    """Joins the cluster, and makes Ray place no new actors on the node of this pod: restarted actors must not be placed
    on it. Returns the id of the node."""
    ray.init(address="auto", log_to_driver=False)
    node = str(ray.get_runtime_context().get_node_id())
    _gcs().drain_node(node, DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"), "the pod ends", 0)
    return node


def job_namespaces() -> dict[str, str]:
    """Returns the namespace of each job of the joined cluster, by the job's id."""
    jobs = _gcs().get_all_job_info(skip_submission_job_info_field=True, skip_is_running_tasks_field=True)
    return {job.hex(): info.config.ray_namespace for job, info in jobs.items()}


def _gcs() -> Any:
    """Returns a client of the joined cluster's head."""
    return ray._raylet.GcsClient(  # type: ignore[attr-defined]  # a Cython class
        address=ray.get_runtime_context().gcs_address
    )


def main(arguments: list[str]) -> int:
    """Runs the command. Returns its exit code."""
    try:
        if arguments == ["job"]:
            # KubeRay sets FQ_RAY_IP to the host name of the head in the pods of workers.
            ended = stop_jobs(JobSubmissionClient(f"http://{os.environ.get('FQ_RAY_IP', '127.0.0.1')}:8265"))
        elif arguments == ["learner"]:
            ask = partial(ask_to_end, grace_s=math.inf, restart=True)
            ended = restart_runs(close_own_node(), table=ray._private.state.actors, namespaces=job_namespaces, ask=ask)
        elif arguments == ["replicas"]:
            ended = drain_replicas(close_own_node(), table=ray._private.state.actors, actor=named_replica)
        else:
            print(f"pod_end: unknown arguments {arguments}; use `job`, `learner` or `replicas`", file=sys.stderr)
            return 2
    except (OSError, RuntimeError, RayError) as error:
        print(f"pod_end: nothing was drained, because Ray does not answer: {error}", file=sys.stderr)
        return 0
    print(f"pod_end: ended {', '.join(ended) or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
