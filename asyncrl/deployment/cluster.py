"""Ray: joining or starting a cluster, and the run's detached actors that every deployment shares.

Buffer and weight store are made by whichever deployment comes first and ended by the last that leaves. Every
placement has a deadline: on a cluster without room Ray would wait for ever without a word.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray._private import services
from ray.exceptions import RayError

from asyncrl.buffer.actor import BufferActor, BufferClient
from asyncrl.buffer.membership import Deployment, Role
from asyncrl.config.load import shared_config
from asyncrl.config.schema import Config
from asyncrl.data.prompts import Task
from asyncrl.data_plane.calls import finished, room
from asyncrl.data_plane.clients import GroupRows
from asyncrl.data_plane.partition_actor import PARTITIONS
from asyncrl.data_plane.row_store import STORE_PREFIX
from asyncrl.deployment.ray_access import (
    LOOPBACK,
    check_own_address,
    is_token_refused,
    loopback_stays_loopback,
    require_token,
    warn_of_open_cluster,
)
from asyncrl.errors import PlacementError, RunError
from asyncrl.weights.store import WeightClient, WeightStore

logger = logging.getLogger(__name__)

BUFFER, WEIGHTS = "buffer", "weights"
DETACHED_PREFIXES = (BUFFER, WEIGHTS, STORE_PREFIX, PARTITIONS)
ACTOR_CONCURRENCY = 10_000
STATUS_TIMEOUT_S = 10.0
STARTS = 3
WORKER_NICENESS = 0
"""A Ray of our own adds this to the niceness of its workers. Ray's default is 15: beside two busy programs on two
cores, ranks and engines then get less than a tenth of the CPU."""
PROBE_TIMEOUT_S = 5.0


def start_local(config: Config, *, generators: int = 1) -> str:
    """Starts a Ray of our own in this process's care, sized for the config; its address. Ends with the process, and
    with nothing else: a signal to this process's group, such as `timeout` sends, does not reach it. Only this machine
    reaches it, with a token."""
    require_token()
    logical_cpus = generators * config.generator.replicas * config.generator.cpus
    logical_cpus += config.learner.ranks * config.learner.cpus
    if config.critic is not None:
        logical_cpus += config.critic.ranks * config.critic.cpus
    with _sigterm_stays_ours(), _children_in_sessions_of_their_own(), loopback_stays_loopback():
        context = _started(
            num_cpus=max(1, round(logical_cpus + 0.5)),
            namespace=config.run.name,
            object_store_memory=config.ray.object_store_mb * 2**20,
        )
    address = str(context.address_info["address"])
    check_own_address(address)
    return address


def _started(**options: Any) -> Any:
    """What `ray.init` returns for a Ray of our own. RunError when it does not start in `STARTS` attempts.

    Ray gives its node manager 30 s to register, and has no setting for it. On a busy machine the first attempt may take
    longer; the next one finds its files in memory.
    """
    for left in reversed(range(STARTS)):
        before = psutil.Process().children(recursive=True)
        try:
            return ray.init(
                address="local",  # never whatever cluster happens to run here
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.WARNING,
                configure_logging=False,
                _node_ip_address=LOOPBACK,
                _system_config={"worker_niceness": WORKER_NICENESS},
                **options,
            )
        except Exception as error:  # Ray's own class for it is Exception
            if "timed out during startup" not in str(error):
                raise
            # nothing else starts processes meanwhile; Ray itself ends these only with this process
            for process in set(psutil.Process().children(recursive=True)) - set(before):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            logger.warning("Ray did not start within its own limit of 30 s; attempts left: %d", left)
    raise RunError(
        f"Ray did not start in {STARTS} attempts of 30 s each: this machine is too busy; end other programs, or name a "
        "running cluster in ray.address"
    )


def session_folder() -> str:
    """The folder of the Ray that this process has started: its daemons and workers write their output there."""
    node: Any = ray._private.worker._global_node
    return str(node.get_session_dir_path())


def join(address: str, *, namespace: str) -> None:
    """Joins a running cluster. RunError says how to start one.

    At an address where nobody listens, `ray.init` goes on trying for minutes, deaf to signals: a connection of our own
    tells at once.
    """
    try:
        _knock(address)
        with _sigterm_stays_ours(), loopback_stays_loopback():
            ray.init(
                address=address,
                namespace=namespace,
                log_to_driver=False,
                logging_level=logging.WARNING,
                configure_logging=False,
            )
    except (ConnectionError, RuntimeError, ValueError) as error:
        if is_token_refused(error):
            raise RunError(
                f"the Ray cluster at ray.address = {address!r} refuses our token; set RAY_AUTH_TOKEN to the cluster's, "
                "or RAY_AUTH_TOKEN_PATH to a file that holds it (on its head: `ray get-auth-token`)"
            ) from error
        raise RunError(
            f"no Ray cluster answers at ray.address = {address!r} ({str(error).splitlines()[0]}); start one with "
            "`RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 ray start --head --num-cpus=4`, which this machine alone "
            "reaches, or use `asyncrl up`"
        ) from error
    warn_of_open_cluster(address)


def _knock(address: str) -> None:
    """ConnectionError when nobody listens at a HOST:PORT, or at the one that Ray takes for `auto`, which may be that of
    a cluster that has died; what else Ray takes for an address is for Ray to judge."""
    if address == "auto":
        with contextlib.suppress(ConnectionError):  # there is none: Ray says so at once
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
    """`ray.init` installs a SIGTERM handler of its own, which ends all of Ray and then the process: no clean end."""
    ours = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(ours):  # whoever asked for none keeps Ray's
            signal.signal(signal.SIGTERM, ours)
            signal.siginterrupt(signal.SIGTERM, False)


_own_session = False


def _leave_session() -> None:
    if _own_session:
        os.setsid()


os.register_at_fork(after_in_child=_leave_session)  # cannot be taken back, hence the switch


@contextlib.contextmanager
def _children_in_sessions_of_their_own() -> Iterator[None]:
    """Ray has no option for it: its daemons would take a signal to our process group for themselves, and without them
    no clean end is possible. They are started with a `preexec_fn`, so that Python runs what is registered at fork, and
    die with this process by Ray's own care (PR_SET_PDEATHSIG)."""
    global _own_session
    _own_session = True
    try:
        yield
    finally:
        _own_session = False


@dataclass(frozen=True, kw_only=True)
class RunHandles:
    """The run's shared actors, and this deployment's membership in the run."""

    deployment: Deployment
    buffer: BufferClient
    weights: WeightClient
    nonce: str


def deployment_id(role: Role) -> str:
    """A name of its own for a deployment."""
    return f"{role.value}-{secrets.token_hex(3)}"


async def check_admission(config: Config, *, role: Role) -> None:
    """Raises what `enter_run` would raise if the run is there already, before anything is started for a deployment that
    the run would not take."""
    try:
        buffer: Any = ray.get_actor(BUFFER, namespace=config.run.name)
    except ValueError:
        return
    answer = buffer.check.remote(_member(deployment_id(role), role), shared_config(config))
    await placed(answer, config=config, what="the buffer", cpus=0)


async def enter_run(config: Config, *, role: Role, deployment: str, tasks: Sequence[Task]) -> RunHandles:
    """Makes or finds the run's actors and attaches to it.

    RunMismatch names the config key that differs from the run's; RunLocked the learner that is there already.
    """
    namespace, timeout_s = config.run.name, config.buffer.call_timeout_s
    options = {"namespace": namespace, "lifetime": "detached", "get_if_exists": True, "num_cpus": 0}
    options["max_concurrency"] = ACTOR_CONCURRENCY
    buffer_handle: Any = (
        ray.remote(BufferActor)
        .options(name=BUFFER, **options)
        .remote(config=config, tasks=ray.put(list(tasks)), nonce=secrets.token_hex(8), rows=GroupRows(config))
    )
    weights_handle = ray.remote(WeightStore).options(name=WEIGHTS, **options).remote()
    buffer = BufferClient(buffer_handle, timeout_s=timeout_s)
    member = _member(deployment, role)
    nonce = await placed(buffer_handle.start.remote(), config=config, what="the buffer", cpus=0)
    await buffer.call("attach", member, shared_config(config))
    return RunHandles(
        deployment=member,
        buffer=buffer,
        weights=WeightClient(weights_handle, timeout_s=timeout_s),
        nonce=nonce,
    )


def _member(deployment: str, role: Role) -> Deployment:
    return Deployment(id=deployment, role=role, host=socket.gethostname(), pid=os.getpid())


async def ray_nodes(*, timeout_s: float) -> list[dict[str, Any]]:
    """The cluster's nodes as Ray lists them, dead ones among them. RunError or TimeoutError when it does not."""
    try:
        return await asyncio.wait_for(asyncio.to_thread(ray.nodes), timeout_s)
    except (RayError, RuntimeError) as error:
        raise RunError(f"Ray does not list its nodes: {error}") from error


def find_run(name: str) -> BufferClient:
    """The buffer of a run on the cluster that was joined. RunError when there is no such run."""
    try:
        return BufferClient(ray.get_actor(BUFFER, namespace=name), timeout_s=STATUS_TIMEOUT_S)
    except ValueError:
        runs = sorted(e["namespace"] for e in ray.util.list_named_actors(all_namespaces=True) if e["name"] == BUFFER)
        raise RunError(f"no run {name!r} on this cluster; there is {', '.join(runs) or 'none'}") from None


async def leave_run(handles: RunHandles, *, namespace: str) -> None:
    """Detaches; the last deployment that leaves ends the run's detached actors."""
    left = await handles.buffer.call("detach", handles.deployment.id)
    if left == 0:
        end_actors(namespace)


async def keep_attached(handles: RunHandles, *, every_s: float) -> None:
    """Tells the buffer that this deployment lives, until cancelled. A call that fails is logged and made again: what a
    dead buffer means is for those to say who need an answer of it."""
    while True:
        try:
            await handles.buffer.call("keep", handles.deployment.id)
        except (RunError, TimeoutError) as error:
            logger.warning("the buffer did not hear that %s lives: %s", handles.deployment.id, error)
        await asyncio.sleep(every_s)


def end_actors(namespace: str) -> list[str]:
    """Kills the run's detached actors; their names."""
    names = [
        entry["name"]
        for entry in ray.util.list_named_actors(all_namespaces=True)
        if entry["namespace"] == namespace and entry["name"].startswith(DETACHED_PREFIXES)
    ]
    for name in names:
        try:
            ray.kill(ray.get_actor(name, namespace=namespace), no_restart=True)
        except ValueError:
            logger.debug("actor %s was gone already", name)
    return names


async def placed(
    ref: Any, *, config: Config, what: str, cpus: float, gpus: float = 0.0, node_labels: Mapping[str, str] = {}
) -> Any:
    """First answer of a new actor. PlacementError says what it needs when Ray does not place it in time."""
    timeout_s = config.ray.placement_timeout_s
    try:
        return await finished(ref, timeout_s=timeout_s, what=what)
    except TimeoutError:
        raise PlacementError(
            f"Ray did not place {what} within ray.placement_timeout_s = {timeout_s:g} s: it asks for {cpus:g} CPUs "
            f"and {gpus:g} GPUs{room(('CPU', 'GPU'), node_labels=node_labels, section='generator')}"
        ) from None
