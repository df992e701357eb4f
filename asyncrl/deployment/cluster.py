"""Ray: starting a cluster or joining one, and placing actors in it.

Every placement has a deadline, because on a cluster without room Ray waits forever and reports nothing.

Every process that can connect to a Ray cluster can run code on it. So a cluster that this process starts listens only
on this machine and requires a token.

`ray.init` starts the cluster. Meanwhile this module changes two constants and three methods of Ray, because neither
public way gives such a cluster (Ray 2.60):

- The command `ray start --block` takes 11 s instead of 5 s on two busy cores. It always starts the API server at port
  8265 and the client server at port 10001, so a machine has room for one. It also writes its address to the file in
  which other programs look for `auto`, and a driver still cannot join it at 127.0.0.1.
- Environment variables can set the two constants, but Ray reads them when it is imported. A program with a loop of its
  own may have imported Ray before it calls `start_local`.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil
import ray
from ray._private import ray_constants
from ray._private.node import Node
from ray.exceptions import RayError

from asyncrl.config.schema import Config
from asyncrl.data_plane.calls import finished, has_process, room
from asyncrl.deployment.local_clusters import (
    check_token_file,
    cluster_of,
    noted_address,
    own_clusters,
    require_token,
    started_for,
)
from asyncrl.deployment.temporary_folders import make_private_folder, private_folder, temporary_folder_problems
from asyncrl.errors import CallTimeout, ClusterUnreachable, PlacementError, RunError

logger = logging.getLogger(__name__)

Started = TypeVar("Started")

LOOPBACK = "127.0.0.1"
STARTS = 3
"""Number of attempts to start a local Ray cluster."""
WORKER_NICENESS = 0
"""Niceness that a local Ray cluster adds to its workers. With Ray's default of 15, ranks and engines get less than a
tenth of the CPU if two other programs are busy on two cores."""
_UNUSED_DAEMONS = ("start_api_server", "start_monitor", "start_log_monitor")
"""Methods of Ray's Node that start daemons which a cluster of one run does not use."""
_OF_ANOTHER_CLUSTER = ("RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_RUNTIME_ENV_HOOK", "RAY_REDIS_ADDRESS")
"""Variables with which a process inherits settings of the cluster that it runs in, e.g. after `ray job submit`. A
local cluster must not get them: its workers are in the same environment as this process, and the files and the store
that the variables name belong to the other cluster."""
_RAY_PACKAGE = os.path.dirname(ray.__file__)
PROBE_TIMEOUT_S = 5.0
"""Deadline of the connection that tests whether a process listens at an address, seconds."""


class LocalRay(NamedTuple):
    """A cluster that this process has started. Its daemons and workers write their output to `session_folder`. None of
    them is older than `since` (ISO 8601 in UTC)."""

    address: str
    session_folder: str
    since: str


def start_local(config: Config, *, generators: int = 1, command: str = "up") -> str:
    """Starts a local Ray cluster that is large enough for the config. Returns its address.

    `generators` is the number of generator deployments that the cluster has room for. `command` names the command that
    starts it. The processes of other commands find the cluster of a `head` (`local_clusters`).

    The cluster ends only with this process. A signal to the process group, such as `timeout` sends, does not reach
    it. Only processes on this machine that have the token can connect to it. Raises RunError if Ray does not start, if
    there is no folder for its files, or if no private token can be required.
    """
    return start(config, generators=generators, command=command).address


def start(config: Config, *, generators: int = 1, command: str = "up") -> LocalRay:
    """Starts a local Ray cluster, as `start_local` describes. Returns its address and the folder of its session."""
    if problems := temporary_folder_problems(vllm=False):
        raise RunError("\n".join(map(str, problems)))
    require_token()
    since = datetime.now(UTC).isoformat(timespec="seconds")
    folder = make_private_folder()
    logical_cpus = generators * config.generator.replicas * config.generator.cpus
    logical_cpus += sum(pool.ranks * pool.cpus for pool in config.rank_pools().values())
    with (
        _children_in_sessions_of_their_own(),
        without_unused_daemons(),
        _without_outer_cluster(),
        started_for(command, config.run.dir / config.run.name),
    ):
        context: Any = start_node(
            lambda: _connect(
                address="local",  # start a new cluster, even if another one runs on this machine
                num_cpus=max(1, round(logical_cpus + 0.5)),
                include_dashboard=False,
                namespace=config.run.name,
                object_store_memory=config.ray.object_store_mb * 2**20,
                _node_ip_address=LOOPBACK,
                _temp_dir=str(folder / "ray"),
                _system_config={"worker_niceness": WORKER_NICENESS},
            )
        )
    found = context.address_info
    local = LocalRay(str(found["address"]), str(found["session_dir"]), since)
    check_own_address(local.address)
    return local


def check_own_address(address: str) -> None:
    """Checks that the Ray that was just started listens at 127.0.0.1. If not, ends it and raises RunError."""
    if address.rpartition(":")[0] != LOOPBACK:
        ray.shutdown()
        raise RunError(
            f"Ray was asked to listen at {LOOPBACK} but listens at {address}: this release of Ray ({ray.__version__}) "
            "is open to the network; install the release that constraints-cpu.txt names"
        )


def _connect(**options: Any) -> Any:
    """Calls `ray.init` with `options`, and with the settings that starting and joining a cluster share. Two of Ray's
    constants are False meanwhile:

    - ENABLE_RAY_CLUSTER: on systems where Ray supports clusters of several machines, it replaces 127.0.0.1 by the
      machine's external address. The daemons of Ray would then listen on every network, and a Ray at 127.0.0.1 could
      not be joined.
    - RAY_ENABLE_UV_RUN_RUNTIME_ENV: if the driver was started with `uv run`, Ray starts each worker with `uv run` too,
      in a new environment with a copy of the working directory, which takes minutes and may lack asyncrl.
    """
    constants = _changed(ray_constants, ENABLE_RAY_CLUSTER=False, RAY_ENABLE_UV_RUN_RUNTIME_ENV=False)
    with _sigterm_stays_ours(), constants:
        return ray.init(log_to_driver=False, logging_level=logging.WARNING, configure_logging=False, **options)


@contextlib.contextmanager
def _changed(owner: Any, **values: Any) -> Iterator[None]:
    """Sets attributes of `owner` to other values within the block, and restores them afterwards."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextlib.contextmanager
def _without_outer_cluster() -> Iterator[None]:
    """Removes the variables of `_OF_ANOTHER_CLUSTER` from the environment within the block."""
    hidden = {name: os.environ.pop(name) for name in _OF_ANOTHER_CLUSTER if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def start_node(start: Callable[[], Started]) -> Started:
    """Starts a Ray node with `start` and returns its result.

    Raises RunError after `STARTS` attempts that exceeded Ray's time limit, and at once after any other failure.

    Ray's node manager must register within 30 s, and Ray has no setting for this limit. On a busy machine the first
    attempt may take longer. The next attempt is faster, because its files are in the page cache.
    """
    for left in reversed(range(STARTS)):
        before = psutil.Process().children(recursive=True)
        try:
            return start()
        except Exception as error:  # Ray raises a plain Exception
            if "timed out during startup" not in str(error):
                reason = str(error).strip().partition("\n")[0]
                raise RunError(
                    f"Ray did not start ({type(error).__name__}: {reason}); the logs of its processes are in "
                    f"{private_folder() / 'ray' / 'session_latest' / 'logs'}"
                ) from error
            # Ray would end the processes of the failed attempt only when this process ends, so they are killed here.
            # Other threads, as in a notebook, may start processes at the same time. These are not killed.
            for process in set(psutil.Process().children(recursive=True)) - set(before):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if _is_of_ray(process):
                        process.kill()
            logger.warning("Ray did not start within its limit of 30 s; attempts left: %d", left)
    raise RunError(
        f"Ray did not start in {STARTS} attempts of 30 s each, because this machine is too busy; end other programs, "
        "or set ray.address to a running cluster"
    )


def _is_of_ray(process: psutil.Process) -> bool:
    """Returns whether the process runs a program of the installed package ray, such as the raylet."""
    return any(argument.startswith(f"{_RAY_PACKAGE}{os.sep}") for argument in process.cmdline())


def joined_address() -> str:
    """Returns the address of the cluster that this process has joined, also if it was given as `auto`. Raises RunError
    if it has joined none."""
    if not ray.is_initialized():
        raise RunError("this process has joined no Ray cluster")
    return str(ray.get_runtime_context().gcs_address)  # without a cluster, this call would start one


def join(address: str, *, namespace: str, folder: Path = Path("runs")) -> None:
    """Joins a running cluster.

    `namespace` is the name of the run, `folder` the folder of its directory. `auto` is the cluster of RAY_ADDRESS, else
    the one that this user has started on this machine, for the run if there are several. Raises ClusterUnreachable,
    which says how to start one, if no cluster answers, and RunError if `auto` may be several clusters, if the address
    has a wrong form, if the cluster refuses the token or its files belong to another user, or if other users can read
    the token.

    If no process listens at the address, `ray.init` tries for minutes and ignores signals. So this function first opens
    a connection itself, which fails at once.
    """
    check_token_file()
    try:
        if address == "auto":
            address = _found(namespace, folder=str(folder.resolve()))
        _knock(address)
        _connect(address=address, namespace=namespace)
    except PermissionError as error:
        raise RunError(
            f"this user cannot use the files of the Ray cluster at ray.address = {address!r} ({error}); join it as the "
            "user who started it, or start another cluster with `asyncrl head -c FILE`"
        ) from error
    except (ConnectionError, RuntimeError, ValueError) as error:
        if is_token_refused(error):
            raise RunError(
                f"the Ray cluster at ray.address = {address!r} refuses our token; set RAY_AUTH_TOKEN to the token of "
                "the cluster, or RAY_AUTH_TOKEN_PATH to a file that holds it (`ray get-auth-token` prints it on the "
                "cluster's head)"
            ) from error
        refused = RunError if isinstance(error, ValueError) else ClusterUnreachable
        raise refused(
            f"no Ray cluster answers at ray.address = {address!r} ({str(error).splitlines()[0]}); start one with "
            "`asyncrl head -c FILE` (only this machine can reach it), or use `asyncrl up`. If its head was lost, start "
            "the cluster again, and then this command"
        ) from error
    warn_of_open_cluster(address)


def _found(run: str, *, folder: str) -> str:
    """Returns the address that `auto` means for a run. Raises ConnectionError without a cluster that the run may join,
    and RunError with several.

    Ray itself is not asked for the address `auto`. It could take a cluster of another user of the machine, which would
    get this user's token, because Ray looks at the processes of all users, and at a file in a folder in which all users
    may write.
    """
    if (named := os.environ.get("RAY_ADDRESS", "")) not in ("", "auto"):
        return named
    clusters = own_clusters()
    if (cluster := cluster_of(run, clusters, folder=folder)) is not None:
        if cluster.run not in ("", run):
            logger.warning("no Ray cluster was started for run %s, so the run joins %s", run, cluster)
        return cluster.address
    if clusters:
        raise ConnectionError(
            "each of your clusters on this machine was started by another run for itself, so it cannot be joined"
        )
    if (address := noted_address()) is not None:
        return address
    advice = "To join the cluster of another user, which gets your token then, name it with RAY_ADDRESS or --address"
    raise ConnectionError(f"you have started none on this machine. {advice}")


def _knock(address: str) -> None:
    """Raises ConnectionError if no process listens at `address`.

    An address HOST:PORT may be that of a cluster that has died. An address of another form is not checked, because
    only Ray can resolve it.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(str(error)) from error


def is_token_refused(error: BaseException) -> bool:
    """Returns whether Ray refused the connection because the token is missing or wrong.

    Ray reports this with an AuthenticationError, or with the text `InvalidAuthToken` in another error. The error may be
    anywhere in the chain of causes.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ray.exceptions.AuthenticationError) or "InvalidAuthToken" in str(cause):
            return True
        cause = cause.__cause__
    return False


def warn_of_open_cluster(address: str) -> None:
    """Warns if the cluster requires no token. Call it after joining: if RAY_AUTH_MODE is not `token`, the cluster has
    accepted this process without one."""
    if os.environ.get("RAY_AUTH_MODE") != "token":
        logger.warning(
            "the Ray cluster at %s requires no token, so every process that can connect to it can run code on it. "
            "Create a token that only you can read (`umask 077 && ray get-auth-token --generate`), then start the "
            "cluster again",
            address,
        )


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
        # a process that had no handler of its own keeps the handler of Ray
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

    A signal to our process group would otherwise end Ray's daemons too, and without them a run cannot end cleanly. Ray
    has no option for this, and this process cannot leave its group meanwhile, because it may lead its session. Ray
    starts its daemons with a `preexec_fn`, so Python runs the function that is registered at fork. The daemons still
    die with this process, because Ray sets PR_SET_PDEATHSIG.
    """
    global _own_session
    _own_session = True
    try:
        yield
    finally:
        _own_session = False


def without_unused_daemons() -> contextlib.AbstractContextManager[None]:
    """Keeps Ray from starting its dashboard, its autoscaler and its log monitor in the block.

    Ray starts these daemons even if its options turn the dashboard, autoscaling and logs at the driver off. They take
    1.8 s of CPU time at each start, and the end of Ray waits 1 s for the dashboard.
    """
    return _changed(Node, **dict.fromkeys(_UNUSED_DAEMONS, _start_nothing))


def _start_nothing(*_: Any, **__: Any) -> None:
    pass


async def ray_nodes(*, timeout_s: float) -> list[dict[str, Any]]:
    """Returns Ray's list of the cluster's nodes, which includes dead nodes. Raises RunError for an error of Ray, and
    CallTimeout if Ray's head does not answer within `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):  # `asyncio.wait_for` may lose a cancellation
            return await asyncio.to_thread(ray.nodes)
    except TimeoutError:
        raise CallTimeout(
            f"Ray's head did not list its nodes within {timeout_s:g} s; see whether the head runs, and whether this "
            "machine reaches it"
        ) from None
    except (RayError, RuntimeError) as error:
        raise RunError(f"Ray does not list its nodes: {type(error).__name__}: {error}") from error


async def placed(
    handle: Any,
    *,
    config: Config,
    what: str,
    cpus: float,
    gpus: float = 0.0,
    node_labels: Mapping[str, str] = {},
    startup: str = "generator.startup_timeout_s",
) -> None:
    """Waits until the constructor of a new actor has returned.

    Raises PlacementError, which says what the actor needs, if Ray does not place it within `ray.placement_timeout_s`.
    A process that was placed may import its libraries for as long as the setting `startup` allows. After that, raises
    RunError.
    """
    timeout_s = config.ray.placement_timeout_s
    try:
        await finished(handle.__ray_ready__.remote(), timeout_s=timeout_s, what=what)
        return
    except TimeoutError:
        if not has_process(handle):
            raise PlacementError(
                f"Ray did not place {what} within ray.placement_timeout_s = {timeout_s:g} s: it asks for {cpus:g} CPUs "
                f"and {gpus:g} GPUs{room(('CPU', 'GPU'), node_labels=node_labels, section='generator')}"
            ) from None
    # The first import of torch and vLLM reads some gigabytes of small files: minutes on a cold network disk.
    logger.warning("Ray has placed %s, and its process still imports its libraries after %g s", what, timeout_s)
    limit_s: float = attrgetter(startup)(config)
    try:
        await finished(handle.__ray_ready__.remote(), timeout_s=limit_s, what=what)
    except TimeoutError:
        raise RunError(
            f"Ray has placed {what}, but its process did not import its libraries within {startup} = {limit_s:g} s; "
            "the disk with the Python environment may be cold or slow: start again, or raise the limit"
        ) from None
