"""The run's detached actors, which all of its deployments share: how a deployment enters the run and leaves it.

The first deployment of a run creates the coordinator and the weight store, on the learner's node or on Ray's head
(`control_placement`). The last deployment that leaves ends them.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from asyncrl.common.names import COORDINATOR, WEIGHTS
from asyncrl.common.roles import Role, RunState
from asyncrl.common.version import Lineage
from asyncrl.config.load import shared_config
from asyncrl.config.schema import Config
from asyncrl.coordinator.client import CoordinatorActor, CoordinatorClient
from asyncrl.coordinator.coordinator import Coordinator
from asyncrl.coordinator.registry import OVER, Attachment, Deployment, Registry
from asyncrl.coordinator.status import Restored
from asyncrl.data.prompts import Task, prompt_data
from asyncrl.data_plane.calls import control_placement, detached, head_node, named_actor, node_of
from asyncrl.data_plane.interfaces import DataPlaneClient
from asyncrl.data_plane.row_store import PARTITIONS, STORE_PREFIX
from asyncrl.data_plane.rows import TRAIN_PARTITION, open_client
from asyncrl.deployment.cluster import placed, ray_nodes
from asyncrl.deployment.run_dir import joint_versions
from asyncrl.errors import ActorGone, AnotherRun, CallTimeout, Fenced, RunEnded, RunError, RunLocked
from asyncrl.log_files import logs_folder
from asyncrl.weights.store import WeightClient, WeightStore

logger = logging.getLogger(__name__)

DETACHED_PREFIXES = (COORDINATOR, WEIGHTS, STORE_PREFIX, PARTITIONS)
ACTOR_CONCURRENCY = 10_000
"""Maximum number of concurrent calls of an actor. It is large because calls that wait, e.g. for a ticket, count too."""
STATUS_TIMEOUT_S = 10.0
"""Deadline of a call to the coordinator from a command such as `status`, seconds."""
END_S = 30.0
"""Time that the deployments of a run have to leave after `asyncrl down`, and its actors to end, seconds."""
POLL_S = 0.2
"""Time between two questions whether deployments have left or actors have ended, seconds."""
LOCKED_POLL_S = 0.5
"""Time between two questions whether the run's earlier learner counts as gone, seconds."""


@dataclass(frozen=True, kw_only=True)
class RunHandles:
    """Handles of the run's shared actors, and this deployment's entry in the run.

    `lineage` has the incarnations of the run's learner when this deployment entered.
    """

    deployment: Deployment
    lineage: Lineage
    coordinator: CoordinatorClient
    weights: WeightClient


def new_deployment(role: Role, *, nonce: str = "", replicas: int = 0) -> Deployment:
    """Returns a deployment of this process with a new, unique id. A learner has the `nonce` of its run. `replicas` is
    the number of replicas with which a generator deployment starts."""
    return Deployment(
        id=f"{role.value}-{secrets.token_hex(3)}",
        role=role,
        host=socket.gethostname(),
        pid=os.getpid(),
        nonce=nonce,
        replicas=replicas,
        versions=joint_versions(),
    )


async def check_admission(
    config: Config,
    *,
    role: Role,
    restores: str | None = None,
    patience_s: float = 0.0,
    poll_s: float = LOCKED_POLL_S,
) -> None:
    """Raises the error of `enter_run` if the run exists and would refuse this deployment. Its prompts are not compared
    yet. `restores` is the nonce of the run of which a learner restores a checkpoint; None if it restores none.

    The commands call it first, so that nothing is started for a deployment that the run refuses. While the error is
    RunLocked, because the run still has a learner or is ending, waits up to `patience_s` seconds and asks every
    `poll_s` seconds: a learner that was killed counts as gone only after `buffer.heartbeat_timeout_s`.
    """
    handle = named_actor(COORDINATOR, namespace=config.run.name)
    if handle is None:
        return
    coordinator = await _coordinator(handle, config)
    deployment, deadline_s = new_deployment(role, nonce=restores or ""), time.monotonic() + patience_s
    shared = shared_config(config)
    while True:
        try:
            await coordinator.call(Coordinator.check_attach, deployment, shared=shared, restores=restores is not None)
            return
        except RunLocked:
            if time.monotonic() >= deadline_s:
                raise
        await asyncio.sleep(poll_s)


async def enter_run(
    config: Config, *, deployment: Deployment, tasks: Sequence[Task], restored: Restored | None = None
) -> RunHandles:
    """Creates or finds the run's actors, and attaches `deployment` to the run. A learner that resumes a run gives the
    buffer's snapshot of its checkpoint as `restored`.

    Raises RunMismatch, which names a config key whose value differs from the run's, a package with another version, or
    the first of `tasks` that differs from the run's prompts. Raises RunLocked if the run has a learner already, which
    the error names, or is ending. Raises LearnerNotRestored for a learner that would continue the run without its
    weights, or after its end.
    """
    source = f"{_source(config)} on {deployment.host}"
    prompts = await asyncio.to_thread(prompt_data, tasks, source=source)
    placement = await asyncio.to_thread(control_placement, config, here=deployment.role is Role.LEARNER)
    options = {"namespace": config.run.name, "max_concurrency": ACTOR_CONCURRENCY, **placement}
    logs = logs_folder(config.run.dir / config.run.name)
    handle = detached(CoordinatorActor, config, ray.put(list(tasks)), logs, name=COORDINATOR, **options)
    weights_handle = detached(WeightStore, name=WEIGHTS, **options)
    coordinator = await _coordinator(handle, config)
    await asyncio.to_thread(_log_node, handle)
    await coordinator.call(Coordinator.start)
    try:
        lineage = await coordinator.call(
            Coordinator.attach, deployment, shared=shared_config(config), prompts=prompts, restored=restored
        )
    except BaseException:  # also a cancellation
        # The coordinator may have admitted the deployment before the error. It would then wait for the deployment's
        # heartbeats, and refuse the next learner meanwhile.
        await leave_run(coordinator, deployment, namespace=config.run.name)
        raise
    weights = WeightClient(
        weights_handle, timeout_s=config.buffer.call_timeout_s, patience_s=config.run.stall_timeout_s
    )
    return RunHandles(deployment=deployment, lineage=lineage, coordinator=coordinator, weights=weights)


def _log_node(coordinator: Any) -> None:
    """Logs on which of several nodes the coordinator is, because the run ends with this node."""
    nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]
    if len(nodes) > 1 and (place := node_of(coordinator)) in nodes:
        name = f"{nodes[place]['NodeManagerHostname']} ({nodes[place]['NodeManagerAddress']})"
        head = ", Ray's head" if place == head_node() else ""
        logger.info("the run's buffer is on the node %s%s; the run ends with it", name, head)


def _source(config: Config) -> str:
    """Returns the setting that names the source of the prompts."""
    data = config.data
    if data.mixture:
        return "data.mixture"
    if data.dataset == "environment":
        return f"environment.name = {config.environment.name}"
    return f"data.path = {data.path}" if data.path is not None else f"data.dataset = {data.dataset}"


async def open_data_plane(config: Config, *, deployment: Deployment, restores: bool) -> DataPlaneClient:
    """Opens the data plane of the run for a learner, before it enters the run. The learner must use this client only:
    if the index of the data plane dies from now on, the calls of this client fail, and another client would begin a new
    index unnoticed.

    If the index has died and the buffer has not, the buffer's groups have lost their rows, and the generators can store
    no others. A learner that `restores` a checkpoint then ends the run's shared actors, and begins with the buffer of
    its checkpoint. The generators end, as when the buffer dies. Raises the errors of `Coordinator.check_attach` if the
    run would refuse the learner.
    """
    client = await asyncio.to_thread(open_client, config, here=True)
    if not restores or await _has_partition(config, deployment, client):
        return client
    logger.warning(
        "the index of the data plane has died, so the rows of all groups in the buffer are lost: the run goes on with "
        "the buffer of the checkpoint, and its generators end; start them again"
    )
    client.close()
    await _gone(end_actors(config.run.name), namespace=config.run.name)
    return await asyncio.to_thread(open_client, config, here=True)


@dataclass(frozen=True, kw_only=True)
class JoinedCluster:
    """The calls by which a deployment uses the cluster that its process has joined: it opens the run's data plane,
    enters the run, and lists Ray's nodes."""

    open_data_plane: Callable[..., Awaitable[DataPlaneClient]] = open_data_plane
    enter_run: Callable[..., Awaitable[RunHandles]] = enter_run
    nodes: Callable[..., Awaitable[list[dict[str, Any]]]] = ray_nodes


JOINED = JoinedCluster()


async def _has_partition(config: Config, learner: Deployment, client: DataPlaneClient) -> bool:
    """Returns False if a learner of the run has registered the training partition, and it is not registered any more.

    A learner registers it before it publishes, and it stays registered as long as the index lives. Another process may
    have started a new index since.
    """
    handle = named_actor(COORDINATOR, namespace=config.run.name)
    if handle is None:
        return True
    coordinator = await _coordinator(handle, config)
    await coordinator.call(Coordinator.check_attach, learner, shared=shared_config(config), restores=True)
    if (await coordinator.call(Coordinator.brief_status)).published is None:
        return True
    try:
        await asyncio.to_thread(client.fields_of, [], TRAIN_PARTITION)
    except KeyError:
        return False
    return True


async def _gone(actors: Mapping[str, object], *, namespace: str) -> None:
    """Waits until none of these actors, given by name and id, is found by its name any more. A new actor may have the
    name by then. Raises ActorGone after `END_S` seconds."""
    deadline_s = time.monotonic() + END_S
    while names := [name for name, actor in actors.items() if _actor_id(name, namespace) == actor]:
        if time.monotonic() > deadline_s:
            raise ActorGone(
                f"the run resumes with new shared actors, but the old ones did not end within {END_S:g} s: "
                f"{', '.join(names)}; resume it again"
            )
        await asyncio.sleep(POLL_S)  # polls other processes


def _actor_id(name: str, namespace: str) -> object:
    """Returns the id of the actor that has this name; None if there is none."""
    actor = named_actor(name, namespace=namespace)
    return None if actor is None else actor._actor_id


async def _coordinator(handle: Any, config: Config) -> CoordinatorClient:
    """Returns a client of the run's coordinator, once Ray has placed it. Raises PlacementError."""
    await placed(handle, config=config, what="the buffer", cpus=0)
    return CoordinatorClient.over_ray(
        handle, timeout_s=config.buffer.call_timeout_s, patience_s=config.run.stall_timeout_s
    )


def find_run(name: str) -> CoordinatorClient:
    """Returns a client of the coordinator of a run on the joined cluster. Raises RunError if there is no such run."""
    handle = named_actor(COORDINATOR, namespace=name)
    if handle is None:
        runs = sorted(
            e["namespace"] for e in ray.util.list_named_actors(all_namespaces=True) if e["name"] == COORDINATOR
        )
        raise RunError(f"there is no run {name!r} on this cluster; existing runs: {', '.join(runs) or 'none'}")
    return CoordinatorClient.over_ray(handle, timeout_s=STATUS_TIMEOUT_S)


async def leave_run(coordinator: CoordinatorClient, deployment: Deployment, *, namespace: str) -> None:
    """Detaches `deployment` from the run. The last deployment that leaves ends the run's detached actors.

    Raises nothing: the deployment ends in any case, and its own error is more important.
    """
    with contextlib.suppress(Exception):
        if await coordinator.call(Registry.detach, deployment.id):
            end_actors(namespace)


async def keep_attached(
    handles: RunHandles,
    *,
    every_s: float,
    state_seconds: Callable[[], Mapping[str, float]] = dict,
    asked_to_end: Callable[[Attachment], None] = lambda _: None,
) -> None:
    """Sends the coordinator a heartbeat of this deployment every `every_s` seconds, until it is cancelled.

    A learner sends its seconds in each state with it. If the answer to a heartbeat says that the learner was asked to
    end or to restart, `asked_to_end` is called with this answer. A failed heartbeat is logged and sent again: if the
    coordinator is dead, the calls that need an answer from it raise the error. Raises Fenced in a learner that another
    learner has replaced, and RunEnded in a learner whose run `asyncrl down` ended.
    """
    while True:
        try:
            attachment = await handles.coordinator.call(
                Registry.keep, handles.deployment.id, state_seconds=state_seconds()
            )
        except RunEnded:
            raise
        except (RunError, TimeoutError) as error:
            logger.warning("the heartbeat of %s did not reach the buffer: %s", handles.deployment.id, error)
        else:
            if attachment in (Attachment.ASKED_TO_END, Attachment.ASKED_TO_RESTART):
                asked_to_end(attachment)
            if attachment is Attachment.GONE:  # only a learner can be replaced
                raise Fenced(
                    f"this learner (incarnation {handles.lineage.incarnation}) was silent for longer than "
                    "buffer.heartbeat_timeout_s, and another learner has taken over; this learner ends"
                )
        await asyncio.sleep(every_s)


def check_directory(directory: Path, nonce: str) -> None:
    """Raises AnotherRun if the joined cluster has a run with the name of `directory`, but with another nonce than
    `nonce`, which is the one in the directory's run.json. The directory may come from elsewhere, with the name of a run
    of this user."""
    found = nonce
    with contextlib.suppress(RunError, TimeoutError):  # there is no such run, or its buffer is dead already
        found = asyncio.run(find_run(directory.name).call(Registry.run_nonce)) or nonce
    if found != nonce:
        raise AnotherRun(
            f"the run {directory.name} on this cluster is not the one of {directory}: its nonce is {found!r}, and "
            f"run.json there has {nonce!r}; give the directory of the run, or name its cluster with --address"
        )


def ask_to_end(name: str, *, grace_s: float, restart: bool = False) -> bool:
    """Asks the learner of the run `name` on the joined cluster to end the run, as Ctrl-C does; with `restart`, to start
    again after that. Waits until the learner has left, at most `grace_s` seconds.

    Returns whether the run has no learner now. It is True, too, if there was none, or if there is no such run. Raises
    CallTimeout if the coordinator does not answer.
    """
    deadline_s = time.monotonic() + grace_s
    try:
        run = find_run(name)
        # asked again and again, because a learner that has started again meanwhile has not received the request
        while asyncio.run(run.call(Registry.ask_to_end, restart=restart)):
            if time.monotonic() > deadline_s:
                return False
            time.sleep(POLL_S)  # polls another process
    except CallTimeout:
        raise
    except RunError:  # there is no such run, or its buffer is dead already
        pass
    return True


def end_lost_run(directory: Path, nonce: str) -> None:
    """Ends the shared actors of a run that no learner can continue. For `run.lost_weights = new_run`.

    `directory` is the directory of the run, and `nonce` is in its run.json. Generators of the run end with the exit
    code 75, as when the buffer dies. After this code, the job system that started them may start them again.

    Raises AnotherRun, and ends nothing, if the run on the joined cluster has another nonce. Raises ActorGone if the
    actors do not end within `END_S` seconds.
    """
    check_directory(directory, nonce)
    asyncio.run(_gone(end_actors(directory.name), namespace=directory.name))


def end_run(name: str) -> list[str]:
    """Ends the run `name` on the joined cluster for good. Returns the names of its shared actors.

    First the coordinator gets the state "failed", unless the learner has ended the run, or "stopped" if SIGTERM has
    ended the learner and generators may wait for the next one. The run's deployments read this state, so that none of
    them starts again or waits. They get `END_S` seconds to leave. The last one that leaves ends the actors; then this
    function kills the actors that are left. A learner that is being started again at this moment does not read the
    state, and may begin the run again.
    """
    names = _shared_actors(name)
    with contextlib.suppress(RunError):  # there is no such run, or its buffer is dead already
        run = find_run(name)
        state = asyncio.run(run.call(Coordinator.brief_status)).state
        if state not in OVER or state is RunState.PREEMPTED:
            ended = RunState.STOPPED if state is RunState.PREEMPTED else RunState.FAILED
            asyncio.run(run.call(Registry.set_state, ended, "`asyncrl down` ended the run"))
        deadline_s = time.monotonic() + END_S
        while asyncio.run(run.call(Registry.live)) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)  # polls other processes
    end_actors(name)
    return names


def end_actors(namespace: str) -> dict[str, object]:
    """Kills the run's shared actors. Returns their ids by name."""
    ended = {}
    for name in _shared_actors(namespace):
        if (actor := named_actor(name, namespace=namespace)) is not None:  # it may have ended meanwhile
            ended[name] = actor._actor_id
            ray.kill(actor, no_restart=True)
    return ended


def _shared_actors(namespace: str) -> list[str]:
    """Returns the names of the run's detached actors, which all deployments share."""
    return [
        entry["name"]
        for entry in ray.util.list_named_actors(all_namespaces=True)
        if entry["namespace"] == namespace and entry["name"].startswith(DETACHED_PREFIXES)
    ]
