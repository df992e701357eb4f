"""`asyncrl audit RUN`: checks from a run's files that nothing was lost, repeated or exchanged."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from asyncrl.cli.options import RunOrMirror, Trust, check_writable, recorded_run
from asyncrl.cli.terminal import say
from asyncrl.deployment.fetching import MirroredRun, is_url
from asyncrl.learner.audit_records import AUDIT

WitnessSteps = Annotated[
    int,
    typer.Option(
        "--witness-steps",
        min=0,
        metavar="K",
        help="Also compute K training steps a second time, by a plain path (other, simpler code), from the weights and "
        "batches that the run kept (audit.keep_weights: all). Half of the K steps are the first ones of the run; for "
        "these, the new weights are computed too. The others are spread up to the run's end. 5 is a good start. Writes "
        "a certificate.",
    ),
]
Certificate = Annotated[
    Path | None,
    typer.Option(
        "--certificate",
        metavar="PATH",
        help="Write what was checked and found to this file, as JSON. Default with --witness-steps: "
        "audit/certificate.json in the run's directory; of a mirror, certificate.json in the working directory.",
    ),
]


def audit(
    run: RunOrMirror, trust: Trust = False, witness_steps: WitnessSteps = 0, certificate: Certificate = None
) -> None:
    """Check from the files of a run that nothing was lost, repeated or exchanged. Restarts of the run are included.

    Each check prints one line. A failed check prints its first counterexample. The exit code is 1 if a check failed, or
    if check 6 was asked for and is not possible.
    The run may still be running: it is checked up to its last record. RUN may be the URL of a mirror (run.mirror): its
    records and all of its checkpoints are fetched into a temporary folder.

    \b
    1 exactly once   every issued prompt was trained once, or its record says why not
    2 ledger         groups, samples and tokens add up after every step, over all restarts
    3 versions       no trained token is of lost weights, or older than its limit
    4 weights        every step started from the weights that the step before it made, and
                     publications and checkpoints have these weights
    5 replay         each step computed again gives the same bits, and every token has its log-prob;
                     only for runs with audit.keep_weights: all, on the model of CPU that trained them.
                   A loss or an advantage of your own is imported for it, only with --trust
    6 witness        only with --witness-steps K: counts, rewards, log-probs, advantages, gradients and
                     new weights of K steps are those of a second, plain computation, which shares with
                     the learner only what reads configuration and files; on any machine, for runs with
                     audit.keep_weights: all. Learning rates are compared in all steps
    """
    from asyncrl.deployment.local_clusters import use_ray_token

    use_ray_token(own=True)  # before `_audit` imports ray, which check 5 may start
    if certificate is None and witness_steps and is_url(run):
        certificate = Path("certificate.json")
    if certificate is not None:
        check_writable("--certificate", certificate)
    with recorded_run(run, _fetch) as directory:
        _audit(directory, trust=trust, witness_steps=witness_steps, path=certificate)


def _fetch(mirror: MirroredRun) -> None:
    mirror.checkpoints()  # first, so that the records, which are fetched later, have each step up to a checkpoint
    mirror.records(AUDIT)


def _audit(directory: Path, *, trust: bool, witness_steps: int, path: Path | None) -> None:
    """Prints the outcomes of the checks, and writes the certificate to `path`. If `path` is None, writes it to its
    default path, and only if there are steps to witness. Exits with 1 if a check failed, or if check 6 was not
    possible."""
    from asyncrl.audit.audit import outcomes_of
    from asyncrl.audit.certificate import certificate, certificate_path
    from asyncrl.audit.history import Verdict, read_history

    history, outcomes = read_history(directory), []
    if history.forked_from is not None:
        say(f"fork: the run began with the weights of {history.forked_from}; audit that run for the steps before them")
    for outcome in outcomes_of(
        history, trust=trust, witness_steps=witness_steps, progress=lambda text: say(text, err=True)
    ):
        say(str(outcome))
        outcomes.append(outcome)
    if witness_steps or path is not None:
        _write(path or certificate_path(history), certificate(history, outcomes))
    # check 6 is only made if it was asked for
    asked_in_vain = any(each.name.startswith("6") and each.verdict is Verdict.NOT_POSSIBLE for each in outcomes)
    if asked_in_vain or any(each.verdict is Verdict.FAILED for each in outcomes):
        raise typer.Exit(1)


def _write(path: Path, content: bytes) -> None:
    """Writes the certificate to `path`. If this fails, prints a note: the result of the audit does not change."""
    from asyncrl.atomic_write import write_atomically

    try:
        write_atomically(path, content)
    except OSError as error:
        say(
            f"there is no certificate, because {path} cannot be written ({error.strerror or error}): name another "
            f"place, e.g. --certificate {Path(tempfile.gettempdir()) / path.name}",
            label="note:",
            color="yellow",
            err=True,
        )
    else:
        say(f"certificate: {path}")
