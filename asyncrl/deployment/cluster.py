"""Ray: joining or starting a cluster, and the run's detached actors that every deployment shares.

The first deployment of a run creates the coordinator and the weight store. The last deployment that leaves ends them.
Every placement has a deadline, because on a cluster without room Ray waits forever and reports nothing.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil
import ray
from ray._private import services
from ray.exceptions import RayError

from asyncrl.common.lineage import Lineage
from asyncrl.common.names import COORDINATOR, WEIGHTS
from asyncrl.common.roles import Role, RunState
from asyncrl.config.load import shared_config
from asyncrl.config.schema import Config
from asyncrl.coordinator.actor import CoordinatorActor
from asyncrl.coordinator.client import CoordinatorClient
from asyncrl.coordinator.coordinator import Coordinator
from asyncrl.coordinator.registry import Deployment, Registry
from asyncrl.coordinator.snapshot import Restored
from asyncrl.data.prompts import Task
from asyncrl.data_plane.calls import finished, room
from asyncrl.data_plane.partition_actor import PARTITIONS
from asyncrl.data_plane.row_store import STORE_PREFIX
from asyncrl.deployment.ray_access import (
    LOOPBACK,
    check_own_address,
    is_token_refused,
    loopback_stays_loopback,
    warn_of_open_cluster,
)
from asyncrl.deployment.ray_token import require_token
from asyncrl.errors import Fenced, PlacementError, RunEnded, RunError, RunLocked
from asyncrl.weights.store import WeightClient, WeightStore

logger = logging.getLogger(__name__)

DETACHED_PREFIXES = (COORDINATOR, WEIGHTS, STORE_PREFIX, PARTITIONS)
ACTOR_CONCURRENCY = 10_000
"""Maximum number of concurrent calls of an actor. It is large because calls that wait, e.g. for a ticket, count too."""
STATUS_TIMEOUT_S = 10.0
"""Deadline of a call to the coordinator from a command such as `status`, seconds."""
END_S = 30.0
"""Time that the deployments of a run have to leave after `asyncrl down`, seconds."""
Started = TypeVar("Started")

LOCKED_POLL_S = 0.5
"""Time between two questions whether the run's earlier learner counts as gone, seconds."""
STARTS = 3
"""Number of attempts to start a local Ray cluster."""
WORKER_NICENESS = 0
"""Niceness that a local Ray cluster adds to its workers. With Ray's default of 15, ranks and engines get less than a
tenth of the CPU if two other programs are busy on two cores."""
PROBE_TIMEOUT_S = 5.0
"""Deadline of the connection that tests whether a process listens at an address, seconds."""


def start_local(config: Config, *, generators: int = 1) -> str:
    """Starts a local Ray cluster that is large enough for the config. Returns its address.

    The cluster ends only with this process. A signal to the process group, such as `timeout` sends, does not reach
    it. Only processes on this machine that have the token can connect to it.
    """
    require_token()
    logical_cpus = generators * config.generator.replicas * config.generator.cpus
    logical_cpus += config.learner.ranks * config.learner.cpus
    if config.critic is not None:
        logical_cpus += config.critic.ranks * config.critic.cpus
    with _children_in_sessions_of_their_own():
        context: Any = patiently(
            lambda: _connect(
                address="local",  # start a new cluster, even if another one runs on this machine
                num_cpus=max(1, round(logical_cpus + 0.5)),
                include_dashboard=False,
                namespace=config.run.name,
                object_store_memory=config.ray.object_store_mb * 2**20,
                _node_ip_address=LOOPBACK,
                _system_config={"worker_niceness": WORKER_NICENESS},
            )
        )
    address = str(context.address_info["address"])
    check_own_address(address)
    return address


def _connect(**options: Any) -> Any:
    """Calls `ray.init` with `options`, and with the settings that starting and joining a cluster share."""
    with _sigterm_stays_ours(), loopback_stays_loopback():
        return ray.init(log_to_driver=False, logging_level=logging.WARNING, configure_logging=False, **options)


def patiently(start: Callable[[], Started]) -> Started:
    """Starts a Ray node with `start` and returns its result. Raises RunError after `STARTS` failed attempts.

    Ray's node manager must register within 30 s, and Ray has no setting for this limit. On a busy machine the first
    attempt may take longer. The next attempt is faster, because its files are in the page cache.
    """
    for left in reversed(range(STARTS)):
        before = psutil.Process().children(recursive=True)
        try:
            return start()
        except Exception as error:  # Ray raises a plain Exception
            if "timed out during startup" not in str(error):
                raise
            # Ray ends its processes only when this process ends. No other thread starts processes at this time.
            for process in set(psutil.Process().children(recursive=True)) - set(before):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            logger.warning("Ray did not start within its limit of 30 s; attempts left: %d", left)
    raise RunError(
        f"Ray did not start in {STARTS} attempts of 30 s each, because this machine is too busy; end other programs, "
        "or set ray.address to a running cluster"
    )


def session_folder() -> str:
    """Returns the session folder of the Ray that this process started. Its daemons and workers write their output
    there."""
    node: Any = ray._private.worker._global_node
    return str(node.get_session_dir_path())


def join(address: str, *, namespace: str) -> None:
    """Joins a running cluster. Raises RunError, which says how to start one, if no cluster answers.

    If no process listens at the address, `ray.init` tries for minutes and ignores signals. So this function first opens
    a connection itself, which fails at once.
    """
    try:
        _knock(address)
        _connect(address=address, namespace=namespace)
    except (ConnectionError, RuntimeError, ValueError) as error:
        if is_token_refused(error):
            raise RunError(
                f"the Ray cluster at ray.address = {address!r} refuses our token; set RAY_AUTH_TOKEN to the token of "
                "the cluster, or RAY_AUTH_TOKEN_PATH to a file that holds it (`ray get-auth-token` prints it on the "
                "cluster's head)"
            ) from error
        raise RunError(
            f"no Ray cluster answers at ray.address = {address!r} ({str(error).splitlines()[0]}); start one with "
            "`asyncrl head -c FILE` (only this machine can reach it), or use `asyncrl up`"
        ) from error
    warn_of_open_cluster(address)


def _knock(address: str) -> None:
    """Raises ConnectionError if no process listens at `address`.

    `address` is HOST:PORT, or `auto`, for which Ray may find the address of a cluster that has died. Any other form is
    left to Ray.
    """
    if address == "auto":
        with contextlib.suppress(ConnectionError):  # no cluster was found; `ray.init` then reports this at once
            address = services.get_ray_address_from_environment(address, None)
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(str(error)) from error


@contextlib.contextmanager
def _sigterm_stays_ours() -> Iterator[None]:
    """Keeps this process's SIGTERM handler while the block calls `ray.init`.

    `ray.init` installs its own handler, which ends all of Ray and then the process, so a clean end is not possible. In
    a thread other than the main thread, it installs none and logs a warning, which the block hides.
    """
    ours, log = signal.getsignal(signal.SIGTERM), logging.getLogger("ray._private.worker")
    log.addFilter(_is_not_about_sigterm)
    try:
        yield
    finally:
        log.removeFilter(_is_not_about_sigterm)
        # a process without its own handler keeps Ray's
        if callable(ours) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, ours)
            signal.siginterrupt(signal.SIGTERM, False)


def _is_not_about_sigterm(record: logging.LogRecord) -> bool:
    return "SIGTERM" not in record.getMessage()


_own_session = False


def _leave_session() -> None:
    if _own_session:
        os.setsid()


# A function that is registered at fork cannot be removed again. So it is always registered, and `_own_session` switches
# it on.
os.register_at_fork(after_in_child=_leave_session)


@contextlib.contextmanager
def _children_in_sessions_of_their_own() -> Iterator[None]:
    """Starts the child processes of the block in their own sessions.

    A signal to our process group would otherwise end Ray's daemons, and without them a clean end is not possible. Ray
    has no option for this. Ray starts its daemons with a `preexec_fn`, so Python runs the function that is registered
    at fork. The daemons still die with this process, because Ray sets PR_SET_PDEATHSIG.
    """
    global _own_session
    _own_session = True
    try:
        yield
    finally:
        _own_session = False


@dataclass(frozen=True, kw_only=True)
class RunHandles:
    """Handles of the run's shared actors, and this deployment's entry in the run.

    `lineage` has the incarnations of the run's learner when this deployment entered.
    """

    deployment: Deployment
    lineage: Lineage
    coordinator: CoordinatorClient
    weights: WeightClient


def new_deployment(role: Role, *, nonce: str = "") -> Deployment:
    """Returns a deployment of this process with a new, unique id. `nonce` is that of a learner's run."""
    name = f"{role.value}-{secrets.token_hex(3)}"
    return Deployment(id=name, role=role, host=socket.gethostname(), pid=os.getpid(), nonce=nonce)


async def check_admission(config: Config, *, role: Role, restores: str | None = None, patience_s: float = 0.0) -> None:
    """Raises the error of `enter_run` if the run exists and would refuse this deployment. `restores` is the nonce of
    the run of which a learner restores a checkpoint; None if it restores none.

    The commands call it first, so that nothing is started for a deployment that the run refuses. While the run still
    has a learner, waits up to `patience_s` seconds: one that was killed counts as gone only after
    `buffer.heartbeat_timeout_s`.
    """
    try:
        handle: Any = ray.get_actor(COORDINATOR, namespace=config.run.name)
    except ValueError:
        return
    coordinator = await _coordinator(handle, config)
    deployment, deadline_s = new_deployment(role, nonce=restores or ""), time.monotonic() + patience_s
    shared = shared_config(config)
    while True:
        try:
            await coordinator.call(Coordinator.check, deployment, shared=shared, restores=restores is not None)
            return
        except RunLocked:
            if time.monotonic() >= deadline_s:
                raise
        await asyncio.sleep(LOCKED_POLL_S)


async def enter_run(
    config: Config, *, deployment: Deployment, tasks: Sequence[Task], restored: Restored | None = None
) -> RunHandles:
    """Creates or finds the run's actors, and attaches `deployment` to the run. A learner gives what it `restored`.

    Raises RunMismatch, which names a config key whose value differs from the run's. Raises RunLocked, which names the
    learner that the run has already, and LearnerNotRestored for a learner that would continue the run without its
    weights.
    """
    options = {"namespace": config.run.name, "lifetime": "detached", "get_if_exists": True, "num_cpus": 0}
    options["max_concurrency"] = ACTOR_CONCURRENCY
    handle: Any = (
        ray.remote(CoordinatorActor)
        .options(name=COORDINATOR, **options)
        .remote(config=config, tasks=ray.put(list(tasks)))
    )
    weights_handle = ray.remote(WeightStore).options(name=WEIGHTS, **options).remote()
    coordinator = await _coordinator(handle, config)
    await coordinator.call(Coordinator.start)
    try:
        lineage = await coordinator.call(
            Coordinator.attach, deployment, shared=shared_config(config), restored=restored
        )
    except BaseException:  # also a cancellation
        # The coordinator may have admitted it before the error. It would then wait for its heartbeats, and refuse the
        # next learner meanwhile.
        with contextlib.suppress(Exception):
            await _detach(coordinator, deployment, namespace=config.run.name)
        raise
    weights = WeightClient(weights_handle, timeout_s=config.buffer.call_timeout_s)
    return RunHandles(deployment=deployment, lineage=lineage, coordinator=coordinator, weights=weights)


async def _coordinator(handle: Any, config: Config) -> CoordinatorClient:
    """Returns a client of the run's coordinator, once Ray has placed it. Raises PlacementError."""
    await placed(handle.__ray_ready__.remote(), config=config, what="the buffer", cpus=0)
    return CoordinatorClient.over_ray(handle, timeout_s=config.buffer.call_timeout_s)


async def ray_nodes(*, timeout_s: float) -> list[dict[str, Any]]:
    """Returns Ray's list of the cluster's nodes, which includes dead nodes. Raises RunError or TimeoutError."""
    try:
        async with asyncio.timeout(timeout_s):  # `asyncio.wait_for` may lose a cancellation
            return await asyncio.to_thread(ray.nodes)
    except (RayError, RuntimeError) as error:
        raise RunError(f"Ray does not list its nodes: {error}") from error


def find_run(name: str) -> CoordinatorClient:
    """Returns a client of the coordinator of a run on the joined cluster. Raises RunError if there is no such run."""
    try:
        handle = ray.get_actor(COORDINATOR, namespace=name)
    except ValueError:
        runs = sorted(
            e["namespace"] for e in ray.util.list_named_actors(all_namespaces=True) if e["name"] == COORDINATOR
        )
        raise RunError(
            f"there is no run {name!r} on this cluster; existing runs: {', '.join(runs) or 'none'}"
        ) from None
    return CoordinatorClient.over_ray(handle, timeout_s=STATUS_TIMEOUT_S)


async def leave_run(handles: RunHandles, *, namespace: str) -> None:
    """Detaches this deployment from the run. The last deployment that leaves ends the run's detached actors.

    Raises nothing: the deployment ends in any case, and its own error is more important.
    """
    with contextlib.suppress(Exception):
        await _detach(handles.coordinator, handles.deployment, namespace=namespace)


async def _detach(coordinator: CoordinatorClient, deployment: Deployment, *, namespace: str) -> None:
    if await coordinator.call(Registry.detach, deployment.id):
        end_actors(namespace)


async def keep_attached(
    handles: RunHandles, *, every_s: float, state_seconds: Callable[[], Mapping[str, float]] = dict
) -> None:
    """Sends the coordinator a heartbeat of this deployment every `every_s` seconds, until it is cancelled.

    A learner sends its seconds by state with it. A failed heartbeat is logged and sent again: if the coordinator is
    dead, the calls that need an answer from it raise the error. Raises Fenced if another learner has replaced this one,
    and RunEnded if `asyncrl down` ended the run.
    """
    while True:
        try:
            kept = await handles.coordinator.call(Registry.keep, handles.deployment.id, state_seconds=state_seconds())
        except RunEnded:
            raise
        except (RunError, TimeoutError) as error:
            logger.warning("the heartbeat of %s did not reach the buffer: %s", handles.deployment.id, error)
        else:
            if not kept:  # only a learner can be replaced
                raise Fenced(
                    f"this learner (incarnation {handles.lineage.incarnation}) was silent for longer than "
                    "buffer.heartbeat_timeout_s, and another learner has taken over; this learner ends"
                )
        await asyncio.sleep(every_s)


def end_run(name: str) -> list[str]:
    """Ends the run `name` on the joined cluster for good. Returns the names of its shared actors.

    First the run's deployments hear that it has ended, so that none of them starts again. They get `END_S` seconds to
    leave. The last one that leaves ends the actors; those that are left are killed.
    """
    names = _shared_actors(name)
    with contextlib.suppress(RunError):  # there is no such run, or its buffer is dead already
        run = find_run(name)
        asyncio.run(run.call(Registry.set_state, RunState.FAILED, "`asyncrl down` ended the run"))
        deadline_s = time.monotonic() + END_S
        while asyncio.run(run.call(Coordinator.status)).deployments and time.monotonic() < deadline_s:
            time.sleep(0.2)  # polls other processes
    end_actors(name)
    return names


def end_actors(namespace: str) -> None:
    """Kills the run's shared actors."""
    for name in _shared_actors(namespace):
        try:
            ray.kill(ray.get_actor(name, namespace=namespace), no_restart=True)
        except ValueError:
            logger.debug("actor %s had already ended", name)


def _shared_actors(namespace: str) -> list[str]:
    """Returns the names of the run's detached actors, which all deployments share."""
    return [
        entry["name"]
        for entry in ray.util.list_named_actors(all_namespaces=True)
        if entry["namespace"] == namespace and entry["name"].startswith(DETACHED_PREFIXES)
    ]


async def placed(
    ref: Any, *, config: Config, what: str, cpus: float, gpus: float = 0.0, node_labels: Mapping[str, str] = {}
) -> Any:
    """Returns the first answer of a new actor.

    Raises PlacementError, which says what the actor needs, if Ray does not place it within `ray.placement_timeout_s`.
    """
    timeout_s = config.ray.placement_timeout_s
    try:
        return await finished(ref, timeout_s=timeout_s, what=what)
    except TimeoutError:
        raise PlacementError(
            f"Ray did not place {what} within ray.placement_timeout_s = {timeout_s:g} s: it asks for {cpus:g} CPUs "
            f"and {gpus:g} GPUs{room(('CPU', 'GPU'), node_labels=node_labels, section='generator')}"
        ) from None
