"""`asyncrl down`: ends a run, or the remaining processes of a run that was killed."""

from asyncrl.cli.options import RunningAddress, RunningRun, named_address
from asyncrl.cli.terminal import print_warnings, say
from asyncrl.errors import ClusterElsewhere, RunError


def down(run: RunningRun, address: RunningAddress = None) -> None:
    """End a run, or clean up after a run that was killed.

    The run's deployments learn that it has ended, and close. Then its shared actors end. If a run was killed, its
    remaining processes are ended, its files are removed from /dev/shm, and run.json and the report record how it ended.
    Only processes and files on this machine, and since its last boot, are ended and removed. A run that ended by itself
    needs no `down`. A run that is being restarted at this moment may continue: call `down` again.
    """
    from asyncrl.deployment.known_runs import as_it_is, check_there, clear, named_run, own_address
    from asyncrl.deployment.local_clusters import use_ray_token

    directory, named = named_run(run), named_address(address)
    lines = clear(directory)
    info = as_it_is(directory)
    running = info is not None and info.state == "running"
    ray_is_gone = info is not None and not running and info.ray_session is not None
    if named is not None or not ray_is_gone:
        use_ray_token()
        from asyncrl.deployment.cluster import join
        from asyncrl.deployment.shared_actors import check_directory, end_run

        try:
            where = named or own_address(directory, (info and info.ray_address) or "auto")
            join(where, namespace=directory.name, folder=directory.parent)
            if named is None and info is not None:
                check_directory(directory, info.nonce)
            if ended := end_run(directory.name):
                lines.append(f"ended {', '.join(ended)}")
        except ClusterElsewhere as error:
            if running:
                raise
            print_warnings([str(error)])
        except RunError:
            if named is not None or running:
                raise
        if named is None and not lines:
            check_there(directory)
    say("\n".join(lines) or f"run {directory.name} had no processes and no files to remove")
