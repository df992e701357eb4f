"""`asyncrl scale`: changes the number of generator replicas of a run while it runs."""

import asyncio
import re
import time
from typing import TYPE_CHECKING, Annotated

import typer

from asyncrl.cli.options import RunningAddress, RunningRun
from asyncrl.cli.status import connecting, joined_run, onlooking
from asyncrl.cli.terminal import say
from asyncrl.errors import ConfigError, RunError

if TYPE_CHECKING:
    from asyncrl.coordinator.client import CoordinatorClient
    from asyncrl.coordinator.status import RunStatus

LOOK_EVERY_S = 1.0


@onlooking()
def scale(
    run: RunningRun,
    size: Annotated[
        str,
        typer.Argument(metavar="generators=N", help="Number of replicas of all generator deployments together."),
    ],
    address: RunningAddress = None,
    wait: Annotated[bool, typer.Option(help="Wait until the pool has the new size. Ctrl-C ends the wait only.")] = True,
) -> None:
    """Change the number of generator replicas of a running run.

    New replicas are started by the deployments that the run has, the smallest deployment first. They need free
    resources on the Ray cluster, and generate as soon as they have loaded the present weights. If there are fewer
    replicas than before, the largest deployment shrinks first. It ends replicas that do not generate, and then its
    youngest ones. These finish their groups first, in at most `generator.rollout_timeout_s`. A run that is restarted
    begins with the number in its configuration again. With `generator.autoscale`, the run changes the number itself,
    and the number given here must be between its limits.
    """
    from asyncrl.deployment.known_runs import named_run

    replicas = _replicas(size)
    directory = named_run(run)
    say(f"{connecting(directory, address)} ...", err=True)
    client = joined_run(directory, address)
    from asyncrl.coordinator.registry import Registry

    because = f"`asyncrl scale` asked for {replicas} {'replica' if replicas == 1 else 'replicas'}"
    wanted = asyncio.run(client.call(Registry.scale, replicas, because=because))
    for deployment, count in wanted.items():
        say(f"{deployment}: {count} {'replica' if count == 1 else 'replicas'}")
    if wait:
        try:
            _wait(client, replicas)
        except KeyboardInterrupt:
            say("the pool goes on to change its size; `asyncrl status` shows it")


def _replicas(size: str) -> int:
    from asyncrl.config.schema import MOST_REPLICAS

    found = re.fullmatch(r"generators=(\d+)", size)
    if found is None:
        raise ConfigError(f"cannot read {size!r}: the size is generators=N with a whole number N, such as generators=4")
    replicas = int(found[1])
    if replicas > MOST_REPLICAS:
        raise ConfigError(f"{size} is too large: a run has at most {MOST_REPLICAS} replicas")
    return replicas


def _wait(client: "CoordinatorClient", replicas: int) -> None:
    """Prints the states of the replicas when they change, until `replicas` of them generate and no other one is left.

    Raises RunError if the run ends meanwhile, or if a replica cannot be started.
    """
    from asyncrl.coordinator.coordinator import Coordinator
    from asyncrl.coordinator.registry import OVER

    shown = ""
    while True:
        status = asyncio.run(client.call(Coordinator.status))
        if status.state in OVER:
            raise RunError(f"the run is {status.state.value}: the size of its pool does not change any more")
        if status.given_up:
            lost = "; ".join(f"{replica}: {why}" for replica, why in status.given_up.items())
            raise RunError(f"the pool does not reach {replicas} replicas: {lost}. Mend the cause, and scale again")
        line, done = _progress(status, replicas)
        if line != shown:
            say(line)
            shown = line
        if done:
            return
        time.sleep(LOOK_EVERY_S)


def _progress(status: "RunStatus", replicas: int) -> tuple[str, bool]:
    """Returns the states of the replicas in words, and whether the pool has its new size."""
    from collections import Counter

    from asyncrl.buffer.fleet import ReplicaState

    states = Counter(view.state for view in status.replicas)
    starting = max(0, replicas - len(status.replicas))
    words = [f"{count} {state.value}" for state, count in states.items()] + (
        [f"{starting} starting"] if starting else []
    )
    causes = [f"{view.replica}: {view.cause}" for view in status.replicas if view.cause and not view.live]
    done = states[ReplicaState.HEALTHY] == replicas == len(status.replicas)
    return "; ".join([f"replicas: {', '.join(words) or 'none'}", *causes]), done
