"""`asyncrl generator`: starts a generator deployment of a run on a running Ray cluster.

All output goes to the log on stderr, so that progress and errors have one format. If the run's directory is on this
machine, the log is also written into that directory as soon as the run has admitted the deployment.
"""

import contextlib
import logging
import os
import signal
import socket
from functools import partial

import typer

from asyncrl.cli.options import Address, AllowPublic, ConfigFiles, Overrides, ray_address
from asyncrl.cli.preflight import prepared
from asyncrl.cli.restarts import starts_no_other
from asyncrl.cli.start import run_generators
from asyncrl.common.roles import Role, RunState
from asyncrl.deployment.launch import log_to, run_until_done
from asyncrl.errors import PREEMPTED
from asyncrl.log_files import LogFile, logs_folder
from asyncrl.shown_text import describe_process

logger = logging.getLogger(__name__)


def generator(
    files: ConfigFiles, overrides: Overrides, address: Address = None, allow_public: AllowPublic = False
) -> None:
    """Add generators to a run on a running Ray cluster, before or after the learner starts.

    A run may have several generator deployments, which can join and leave at any time. Each may have its own number of
    replicas, memory and GPUs (the keys with a star in docs/configuration.md). The command ends with the run. It ends
    cleanly on SIGTERM, on Ctrl-C, or when the terminal is closed. If a process that it needs has died, it ends with
    exit code 75: start it again. Exit code 76 means that SIGTERM ended this command or the run's learner: start both
    again to continue. With generator.wait_for_learner_s, the command first waits so long for the next learner.

    \b
      asyncrl head      -c quickstart          # one terminal
      asyncrl learner   -c quickstart          # another
      asyncrl generator -c quickstart          # another, or several
    """
    config, prompts = prepared(files, overrides, roles=[Role.GENERATOR], allow_public=allow_public)

    signals: list[signal.Signals] = []

    def asked(number: signal.Signals) -> None:
        starts_no_other()
        signals.append(number)

    describe_process(run=config.run.name, role="generator")
    log = logs_folder(config.run.dir / config.run.name) / f"generator-{socket.gethostname()}-{os.getpid()}.log"
    form = config.run.log_format
    with log_to(None, form=form), contextlib.ExitStack() as after:
        run = partial(
            run_generators,
            config,
            address=ray_address(config, address),
            prompts=prompts,
            admitted=lambda: after.enter_context(LogFile(log, form=form)),
        )
        state = run_until_done(run, asked=asked)
        logger.info("generators ended")
    if state is RunState.PREEMPTED or (state is None and signal.SIGTERM in signals):
        raise typer.Exit(PREEMPTED)
