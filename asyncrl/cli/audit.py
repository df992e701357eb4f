"""`asyncrl audit RUN`: checks from a run's records that every prompt was trained exactly once by known weights."""

import typer

from asyncrl.cli.options import RecordedRun, Trust
from asyncrl.cli.terminal import say
from asyncrl.deployment.known_runs import existing_run


def audit(run: RecordedRun, trust: Trust = False) -> None:
    """Check from the files of a run that nothing was lost, repeated or exchanged. Restarts of the run are included.

    Each check prints one line. A failed check prints its first counterexample. The exit code is 1 if a check failed.
    The run may still be running: it is checked up to its last record.

    \b
    1 exactly once   every issued prompt was trained once, or its record says why not
    2 ledger         groups, samples and tokens add up after every step, over all restarts
    3 versions       no trained token is of lost weights, or older than its limit
    4 weights        every step started from the weights that the step before it made, and
                     publications and checkpoints have these weights
    5 replay         each step computed again gives the same bits, and every token has its log-prob;
                     only for runs with audit.keep_weights: all, on the model of CPU that trained them.
                   A loss or an advantage of your own is imported for it, only with --trust
    """
    from asyncrl.deployment.local_clusters import use_ray_token

    use_ray_token(own=True)  # before the next line imports ray, which check 5 may start
    from asyncrl.audit.audit import audit as outcomes_of
    from asyncrl.audit.history import Verdict

    failed = False
    for outcome in outcomes_of(existing_run(run), trust=trust):
        say(str(outcome))
        failed |= outcome.verdict is Verdict.FAILED
    if failed:
        raise typer.Exit(1)
