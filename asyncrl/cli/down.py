"""`asyncrl down`: ends a run, or the remaining processes of a run that was killed."""

import contextlib
import signal
import time
from pathlib import Path
from typing import Annotated

import psutil
import typer

from asyncrl.cli.options import RunningAddress, RunningRun, named_address
from asyncrl.cli.terminal import print_warnings, say
from asyncrl.config.schema import RunSection
from asyncrl.errors import AsyncRLError, ClusterElsewhere, ClusterUnreachable, RunError
from asyncrl.learner.records import known_info, read_config

CLOSE_S = 60.0
"""Time beyond `run.shutdown_grace_s` that `down` waits for the end of a run, seconds."""
KILLED_S = 10.0
"""Longest wait, seconds: for the end of a run after a second signal, before its process is killed, and for the end of
a process that has closed the run's directory."""
POLL_S = 0.2
"""Time between two checks whether the process has closed the run's directory, seconds."""

Now = Annotated[
    bool, typer.Option("--now", help="End the run at once: what it has trained since its newest checkpoint is lost.")
]


def down(run: RunningRun, address: RunningAddress = None, now: Now = False) -> None:
    """End a run, or clean up after a run that was killed.

    A run that lives ends as after Ctrl-C: the learner finishes its step and saves a checkpoint, and the generators
    leave. The command waits for this. With --now the run ends at once. In both cases the command then ends the actors
    of the run on Ray. If a run was killed, the command ends its remaining processes, removes its files from /dev/shm,
    and records in run.json and the report how it ended. For this it looks only at processes and files of this machine,
    and only at those since its last boot. A run that ended by itself needs no `down`. A run that is being restarted at
    this moment may continue: call `down` again.
    """
    from asyncrl.deployment.known_runs import (
        as_it_is,
        check_there,
        clear,
        ended_run,
        named_run,
        own_address,
        process_of,
    )
    from asyncrl.deployment.local_clusters import use_ray_token

    directory, named = named_run(run), named_address(address)
    grace_s = _grace_s(directory)
    if named is None and (process := process_of(directory)) is not None:
        _end_process(directory, process, grace_s=grace_s, now=now)
        lines = [*filter(None, [ended_run(directory)]), *clear(directory)]
    else:
        lines = clear(directory)
    info = as_it_is(directory)
    running = info is not None and info.state == "running"
    ray_is_gone = info is not None and not running and info.ray_session is not None
    still_ending = False
    if named is not None or not ray_is_gone:
        use_ray_token()
        from asyncrl.deployment.cluster import join
        from asyncrl.deployment.shared_actors import ask_to_end, check_directory, end_run

        try:
            where = named or own_address(directory, (info and info.ray_address) or "auto")
            join(where, namespace=directory.name, folder=directory.parent)
            if named is None and info is not None:
                check_directory(directory, info.nonce)
            lives = named is not None or info is None or running
            still_ending = lives and not now and not ask_to_end(directory.name, grace_s=grace_s)
            if not still_ending and (ended := end_run(directory.name)):
                lines.append(f"ended {', '.join(ended)}")
        except ClusterElsewhere as error:
            if running:
                raise
            print_warnings([str(error)])
        except RunError as error:
            if named is not None or running:
                # ClusterUnreachable has the exit code 75, but another call with a wrong address would fail, too.
                raise RunError(str(error)) if isinstance(error, ClusterUnreachable) else error from None
        if still_ending:
            raise _still_ending(directory.name, grace_s)
        if named is None and not lines:
            check_there(directory)
    say("\n".join(lines) or f"run {directory.name} had no processes and no files to remove")


def _grace_s(directory: Path) -> float:
    """Returns how long the command waits for the end of the run, seconds: `run.shutdown_grace_s` and `CLOSE_S`. Takes
    the default of `run.shutdown_grace_s` if the run's configuration cannot be read on this machine."""
    try:
        config = read_config(directory).run
    except (OSError, AsyncRLError):
        config = RunSection()
    return config.shutdown_grace_s + CLOSE_S


def _end_process(directory: Path, process: psutil.Process, *, grace_s: float, now: bool) -> None:
    """Ends a run that lives on this machine by signals to its process, which is killed if `now` is set and signals do
    not help. Waits until the process has closed the run's directory, and then at most `KILLED_S` until it has ended:
    the process may be a notebook, which goes on after its run. Raises RunError if the run has not ended after
    `grace_s`, or belongs to another user."""
    from asyncrl.deployment.known_runs import process_of

    info = known_info(directory)
    try:
        if now or info is None or info.exit_reason is None:  # a run that is ending would take it as a second signal
            process.send_signal(signal.SIGINT)
        if not now:
            say(f"asked run {directory.name} to end: it finishes its step and saves its weights")
        deadline_s = time.monotonic() + (KILLED_S if now else grace_s)
        while process_of(directory) == process:
            if time.monotonic() > deadline_s:
                if not now:
                    raise _still_ending(directory.name, grace_s)
                process.kill()
            time.sleep(POLL_S)  # polls another process
            if now:
                process.send_signal(signal.SIGINT)  # for `SAME_SIGNAL_S` it is no second signal yet
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(KILLED_S)
    except psutil.NoSuchProcess:
        pass
    except psutil.AccessDenied:
        raise RunError(f"run {directory.name} belongs to another user, and only this user can end it") from None


def _still_ending(name: str, grace_s: float) -> RunError:
    return RunError(
        f"run {name} was asked to end, and has not ended after {grace_s:.0f} s: it may still be saving weights. Wait "
        f"and call `asyncrl down {name}` again, or end it at once: asyncrl down {name} --now"
    )
