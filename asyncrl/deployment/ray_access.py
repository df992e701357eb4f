"""Restricts access to Ray, because every process that can connect to a Ray cluster can run code on it.

A Ray cluster that this process starts listens only on this machine and requires a token.
"""

import contextlib
import logging
import os
from collections.abc import Iterator

import ray
from ray._common.utils import reset_ray_address
from ray._private import ray_constants, utils

from asyncrl.errors import RunError

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def loopback_stays_loopback() -> Iterator[None]:
    """Makes `ray.init` use the address 127.0.0.1 unchanged within the block.

    On systems where Ray supports clusters of several machines, Ray replaces 127.0.0.1 by the machine's external
    address. Its daemons would then listen on every network, and a Ray at 127.0.0.1 could not be joined. Ray has no
    option for this on Linux. So this function changes the constant with which Ray turns multi-machine clusters off on
    other systems.
    """
    several_machines = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = several_machines


def check_own_address(address: str) -> None:
    """Checks that the Ray that was just started listens at 127.0.0.1. If not, ends it and raises RunError."""
    if address.rpartition(":")[0] != LOOPBACK:
        ray.shutdown()
        raise RunError(
            f"Ray was asked to listen at {LOOPBACK} but listens at {address}: this release of Ray ({ray.__version__}) "
            "is open to the network; install the release that constraints.txt names"
        )


@contextlib.contextmanager
def advertised(address: str) -> Iterator[None]:
    """Within it, `auto` means the Ray at `address` for every process of this machine, as after `ray start --head`.

    Without the file that Ray reads for this, `auto` means any Ray that runs here.
    """
    utils.write_ray_address(address)
    try:
        yield
    finally:
        if utils.read_ray_address() == address:
            reset_ray_address()


def is_token_refused(error: BaseException) -> bool:
    """Returns whether Ray refused the connection because the token is missing or wrong.

    Ray reports this only in the text of an error in the chain of causes.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ray.exceptions.AuthenticationError) or "InvalidAuthToken" in str(cause):
            return True
        cause = cause.__cause__
    return False


def warn_of_open_cluster(address: str) -> None:
    """Warns that the cluster requires no token. Call it after joining: the cluster accepted us without a token."""
    if os.environ.get("RAY_AUTH_MODE") != "token":
        logger.warning(
            "the Ray cluster at %s requires no token, so every process that can connect to it can run code on it. "
            "Create a token (`ray get-auth-token --generate`), then start the cluster again",
            address,
        )
