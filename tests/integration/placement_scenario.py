"""Starts a Ray of two nodes on this machine, which differ in labels and GPUs, and prints the placements as JSON.

It is a separate process because it has its own Ray. The GPUs are only resources that Ray counts; no GPU is used. The
replicas' processes have no engine, whose import takes ten seconds of a core for each.
"""

import asyncio
import json
import secrets
import threading
import time
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.util import placement_group_table

from asyncrl.colocated.generation import VLLMGeneration
from asyncrl.config.schema import Config
from asyncrl.data_plane.calls import has_process
from asyncrl.deployment import pool as pools
from asyncrl.deployment.cluster import start_node
from asyncrl.deployment.pool import ReplicaActor
from asyncrl.errors import ActorGone, PlacementError
from asyncrl.policy.worker import PolicyWorker
from asyncrl.ranks.group import place_ranks

CONFIG = {
    "run": {"name": "placement"},
    "generator": {"cpus": 0.1, "gpus": 0.5, "node_labels": {"pool": "gen"}},
    "learner": {"cpus": 0.1, "ranks": 2, "node_labels": {"pool": "learn"}},
    "ray": {"placement_timeout_s": 600.0},
}

SOON = {"ray": {"placement_timeout_s": 3.0}}
"""For placements that cannot succeed. A placement that can succeed may take longer on a busy machine."""


STARTS = 3


class NoEngine:
    """The actor of a replica, which only has to be placed."""

    def __init__(self, **arguments: Any) -> None:
        pass


class LongImport:
    """An actor whose constructor does not return, like that of a replica that imports vLLM from a cold disk."""

    def __init__(self) -> None:
        threading.Event().wait()


def known_processes() -> dict[str, bool]:
    """Returns whether Ray's table has a process of an actor in its constructor, and of one for which there is no room.
    Waits for the first."""
    importing = ray.remote(LongImport).options(num_cpus=0).remote()
    nowhere = ray.remote(NoEngine).options(num_cpus=9).remote()
    deadline_s = time.monotonic() + 240
    while not has_process(importing) and time.monotonic() < deadline_s:
        time.sleep(0.1)  # polls another process
    found = {"importing": has_process(importing), "nowhere": has_process(nowhere)}
    for handle in (importing, nowhere):
        ray.kill(handle)
    return found


def node_of(handle: Any) -> str:
    return str(ray.get(handle.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()), timeout=240))


def gpus_of(handle: Any) -> list[int]:
    return [int(gpu) for gpu in ray.get(handle.__ray_call__.remote(lambda _: ray.get_gpu_ids()), timeout=240)]


def ranks(config: Config) -> list[str]:
    """Starts the ranks of a group, returns their nodes, and ends the ranks."""
    placed_ranks = place_ranks(PolicyWorker, config)
    try:
        return sorted(placement_group_table(placed_ranks.placement)["bundles_to_node_id"].values())
    finally:
        placed_ranks.kill()
        placed_ranks.release()


async def replicas(config: Config, count: int) -> list[ReplicaActor]:
    """Starts the actors of replicas. On a busy machine, Ray may end a new process that starts too slowly. A run starts
    such a replica again; this does too."""
    for left in reversed(range(STARTS)):
        names = [f"generator-{secrets.token_hex(3)}" for _ in range(count)]
        actors = [ReplicaActor(config, replica=name, name=name, deployment="d") for name in names]
        try:
            for actor in actors:
                await actor.placed()
            break
        except ActorGone:
            for actor in actors:
                actor.kill()
            if not left:
                raise
    return actors


def error_of(config: Config, what: str) -> str:
    try:
        if what == "ranks":
            ranks(config)
        elif what == "engines":
            VLLMGeneration(config, model_path="").start()
        else:
            asyncio.run(replicas(config, 1))
    except PlacementError as error:
        return str(error)
    return ""


def scenario() -> dict[str, Any]:
    pools.GeneratorActor = NoEngine  # type: ignore[misc, assignment]
    head = {"num_cpus": 1, "labels": {"pool": "learn"}}
    cluster = start_node(lambda: Cluster(initialize_head=True, head_node_args=head))
    start_node(lambda: cluster.add_node(num_cpus=1, num_gpus=1, labels={"pool": "gen"}))
    ray.init(address=cluster.address, namespace="placement", log_to_driver=False)
    try:
        cluster.wait_for_nodes()
        names = {node["NodeID"]: node["Labels"].get("pool", "") for node in ray.nodes()}
        config = Config.model_validate(CONFIG)
        swapped = Config.model_validate(CONFIG | {"learner": CONFIG["learner"] | {"node_labels": {"pool": "gen"}}})
        full = Config.model_validate(CONFIG | SOON)
        nowhere = Config.model_validate(
            CONFIG | SOON | {"learner": CONFIG["learner"] | {"node_labels": {"pool": "none"}}}
        )
        elsewhere = CONFIG["generator"] | {"gpus": 0.0, "node_labels": {"pool": "none"}}
        unlabelled = Config.model_validate(CONFIG | SOON | {"generator": elsewhere})
        pair = asyncio.run(replicas(config, 2))
        found = {
            "ranks": [names[node] for node in ranks(config)],
            "swapped ranks": [names[node] for node in ranks(swapped)],
            "replicas": [names[node_of(replica.handle)] for replica in pair],
            "gpus": [gpus_of(replica.handle) for replica in pair],
            "no such label": error_of(nowhere, "ranks"),
            "no node for engines": error_of(unlabelled, "engines"),
            "no GPU left": error_of(full, "replica"),
            "processes": known_processes(),
        }
        for replica in pair:
            replica.kill()
        return found
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    print(json.dumps(scenario()))
