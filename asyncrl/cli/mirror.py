"""`asyncrl mirror RUN [URL]`: sends what the mirror of an ended run lacks."""

import dataclasses
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from asyncrl.checkpoints.directory import CHECKPOINTS, folders, verified
from asyncrl.cli.options import RecordedRun, Trust, check_url
from asyncrl.cli.terminal import say, sigterm_exits
from asyncrl.common.version import Lineage
from asyncrl.complete_directory import COMPLETE
from asyncrl.deployment.fetching import has_more_steps, later_checkpoint
from asyncrl.deployment.known_runs import existing_run
from asyncrl.deployment.mirror import OWNER, Mirror, Owner, Store, most_bytes, url_problem
from asyncrl.deployment.resuming import known_lineage
from asyncrl.deployment.run_dir import OF_TRACKERS, held
from asyncrl.errors import AsyncRLError, ConfigError, FileRefused, RunError
from asyncrl.learner.records import read_config, read_info
from asyncrl.run_files import check_plain
from asyncrl.shown_text import redacted

LARGE_BYTES = 2**26
"""Size from which on a file gets a line of its own when it was sent."""


@dataclasses.dataclass
class _Progress:
    """Counts what was sent, and prints a line for each large file."""

    files: int = 0
    nbytes: int = 0

    def add(self, name: str, nbytes: int) -> None:
        self.files, self.nbytes = self.files + 1, self.nbytes + nbytes
        if nbytes >= LARGE_BYTES:
            say(f"  {name} ({nbytes / 2**20:,.1f} MiB)", err=True)


def mirror(
    run: RecordedRun,
    url: Annotated[
        str | None,
        typer.Argument(metavar="[URL]", help="URL of the mirror. Default, with --trust: the run's run.mirror."),
    ] = None,
    trust: Trust = False,
) -> None:
    """Send what the mirror of an ended run lacks, e.g. because the storage did not answer at its end.

    The command sends the records and the complete checkpoints of the run's directory that are not in the mirror yet,
    after it has compared the checkpoints with their checksums. It prints what it has sent. If something fails, it
    prints what is missing and exits with 1: give the command again. With another URL than run.mirror, it makes a mirror
    at that URL. The command refuses a run that lives, because this run sends to its mirror itself. It also refuses a
    mirror of another run, and a mirror that is ahead of the directory, because the directory may be an old copy.

    Without a URL, --trust is needed: the directory may come from elsewhere, and the URL in its configuration would get
    the whole run.

    \b
      asyncrl mirror quickstart s3://bucket/quickstart
    """
    directory = existing_run(run)
    info, config = read_info(directory), read_config(directory)
    target = _target(url, config.run.mirror, trust=trust)
    progress = _Progress()
    with sigterm_exits(), held(directory):
        check_plain(directory, except_for=OF_TRACKERS)
        try:
            store = Store(target)
            _check_not_ahead(store, directory, nonce=info.nonce)
            sending = Mirror(
                store,
                directory,
                nonce=info.nonce,
                lineage=known_lineage(directory) or Lineage(),
                keep=config.checkpoint,
                sent=progress.add,
            )
        except AsyncRLError:
            raise
        except Exception as error:  # each storage of fsspec raises errors of its own
            raise _not_sent(target, error) from error
        _check_content(directory, sending.records())
        _send(sending, target, progress)
    say(f"{target} has everything of the run in {directory}")


def _target(url: str | None, of_run: str | None, *, trust: bool) -> str:
    """Returns the URL to which the run is sent. Raises ConfigError if there is none, if it is not the URL of a storage,
    or if only the run's configuration names it and `trust` is False."""
    if url is None and of_run is not None and not trust:
        raise ConfigError(
            f"run.mirror = {of_run}: only the run's configuration names this URL, which would get the whole run; name "
            "it in the command, or add --trust"
        )
    if (target := url or of_run) is None:
        raise ConfigError("the run has no run.mirror: name the URL of a folder, such as s3://bucket/quickstart")
    check_url(target)
    if problem := url_problem(target):
        raise ConfigError(problem)
    return target


def _check_not_ahead(store: Store, directory: Path, *, nonce: str) -> None:
    """Raises ConfigError if the mirror is of another run, or has more of this run than the directory. The lock of the
    directory is not enough: if the directory is a copy, the run may live although the copy is not locked."""
    owner = store.read(OWNER)
    if owner is not None and msgspec.json.decode(owner, type=Owner).nonce != nonce:
        raise ConfigError(
            f"{store.url}: another run, which may still live, is mirrored there; name another URL, or delete the files "
            "there if that run is not needed"
        )
    step = later_checkpoint(store, directory)
    if step is not None or has_more_steps(store, directory):
        more = "more steps" if step is None else f"a checkpoint of step {step}, which is later"
        raise ConfigError(
            f"{store.url} is ahead of {directory}: it has {more}. The directory may be an old copy of a run that goes "
            "on elsewhere, so nothing was sent. Use the run's own directory, or name another URL. If it is the run's "
            "own directory after a crash of the machine, continue the run first (asyncrl resume)"
        )


def _check_content(directory: Path, records: list[str]) -> None:
    """Raises FileRefused for a record that is larger than commands read, and the errors of `verified` for a damaged
    checkpoint."""
    for name in records:
        if (size := (directory / name).lstat().st_size) > (most := most_bytes(name)):
            raise FileRefused(f"{directory / name} has {size:,} bytes, and at most {most:,} are read: it is not sent")
    for path in folders(directory / CHECKPOINTS).values():
        if (path / COMPLETE).exists():
            verified(path)


def _send(sending: Mirror, url: str, progress: _Progress) -> None:
    try:
        sending.pass_once()
    except AsyncRLError:
        raise
    except Exception as error:
        missing = sending.missing() if sending.found else ""
        raise _not_sent(url, error, missing=missing) from error
    finally:
        say(f"sent {progress.files:,} files ({progress.nbytes / 2**20:,.1f} MiB) to {url}")


def _not_sent(url: str, error: Exception, *, missing: str = "") -> RunError:
    lacks = f"{url} may lack {missing}" if missing else f"{url} cannot be used"
    return RunError(
        f"{lacks}, because {type(error).__name__}: {redacted(str(error))}. Check the URL, the keys for the storage and "
        "their rights, and give this command again: it sends only what is missing"
    )
