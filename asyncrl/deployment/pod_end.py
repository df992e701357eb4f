"""Drains a pod of a Ray cluster on Kubernetes before the pod ends. The preStop commands of deploy/kuberay call it:

    python -m asyncrl.deployment.pod_end job         in the pods of the head, the driver and the learner
    python -m asyncrl.deployment.pod_end replicas    in the pods of generators

Kubernetes sends SIGTERM to the pod when the command has ended, and kills the pod after its grace period, also if the
command still waits. So this module has no deadlines of its own. It ends at once if the cluster does not answer: the
head has ended then, and nothing is left to drain.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # type: ignore[attr-defined]  # made at import
from ray.exceptions import RayError
from ray.job_submission import JobStatus, JobSubmissionClient

from asyncrl.common.names import REPLICAS
from asyncrl.generation.actor import GeneratorActor

POLL_S = 1.0
"""Time between two questions whether jobs or replicas have ended, seconds."""
Table = Callable[[], Mapping[str, Mapping[str, Any]]]
"""Returns Ray's table of actors, by actor id."""


def stop_jobs(client: JobSubmissionClient, *, sleep: Callable[[float], object] = time.sleep) -> list[str]:
    """Stops all jobs of the cluster, and waits until they have ended. Returns their submission ids.

    Ray sends SIGTERM to a job, and SIGKILL after RAY_JOB_STOP_WAIT_TIME_S seconds. `asyncrl up` saves a checkpoint in
    between. Several pods may stop the same job.
    """
    jobs = [job.submission_id for job in client.list_jobs() if job.submission_id and not job.status.is_terminal()]
    for job in jobs:
        client.stop_job(job)
    while any(not JobStatus(client.get_job_status(job)).is_terminal() for job in jobs):
        sleep(POLL_S)
    return jobs


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
    found = {id: row for id, row in table().items() if _on(row, node)}
    for row in found.values():
        with contextlib.suppress(ValueError):  # it has ended meanwhile
            actor(row["Name"]).drain.remote()
    while any(_on(row, node) for id, row in table().items() if id in found):
        sleep(POLL_S)
    return [row["Name"] for row in found.values()]


def _on(row: Mapping[str, Any], node: str) -> bool:
    """Returns whether the row of Ray's table is a living actor of a replica on the Ray node."""
    return (row["ActorClassName"], row["State"], row["Address"]["NodeID"]) == (GeneratorActor.__name__, "ALIVE", node)


def named_replica(name: str) -> Any:
    """Returns the handle of the actor of a replica of any run."""
    return ray.get_actor(name, namespace=REPLICAS)


def close_node(node: str, address: str) -> None:
    """Makes Ray place no new actors on a Ray node: a replica that is started again must not come back to it."""
    ray._raylet.GcsClient(address=address).drain_node(  # type: ignore[attr-defined]  # a Cython class
        node, DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"), "the pod ends", 0
    )


def main(arguments: list[str]) -> int:
    """Runs the command. Returns its exit code."""
    try:
        if arguments == ["job"]:
            # KubeRay sets FQ_RAY_IP to the host name of the head in the pods of workers.
            ended = stop_jobs(JobSubmissionClient(f"http://{os.environ.get('FQ_RAY_IP', '127.0.0.1')}:8265"))
        elif arguments == ["replicas"]:
            ray.init(address="auto", log_to_driver=False)
            context = ray.get_runtime_context()
            close_node(context.get_node_id(), context.gcs_address)
            ended = drain_replicas(context.get_node_id(), table=ray._private.state.actors, actor=named_replica)
        else:
            print(f"pod_end: unknown arguments {arguments}; use `job` or `replicas`", file=sys.stderr)
            return 2
    except (OSError, RuntimeError, RayError) as error:
        print(f"pod_end: nothing was drained, because Ray does not answer: {error}", file=sys.stderr)
        return 0
    print(f"pod_end: ended {', '.join(ended) or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
