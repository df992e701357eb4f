"""Sends a run's numbers to experiment trackers (TensorBoard, Weights & Biases, MLflow, trackio), through accelerate.

A tracker only gets copies of records in the run directory, so a failing tracker loses nothing. The trackers run in one
thread. A tracker that fails is reported once and gets no more numbers. At the end of the run, the trackers get
`CLOSE_S` seconds to send the rest. The thread is a daemon, because Python waits at exit for all other threads, also for
a tracker that hangs.

`trackers.json` in the run's directory has the run of each tracker and the last step that it got. It is written when a
tracker has started, and after each step. A learner that resumes the run continues the same runs of the trackers, and
each step appears once:

- TensorBoard hides the steps that are trained again, and shows the new ones (`purge_step`).
- The other trackers cannot take numbers back. They keep those that they have, and get the steps after them.
- If the run went back to an earlier checkpoint than its newest, they get a new run, whose name has the incarnation.
"""

import logging
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, NamedTuple

import msgspec

from asyncrl.atomic_write import write_atomically
from asyncrl.run_files import UNREADABLE, read

logger = logging.getLogger(__name__)

CLOSE_S = 30.0
TRACKERS = "trackers.json"
"""File of the runs of the trackers, in the run's directory."""
PURGES = "tensorboard"
"""The tracker that can hide the numbers of lost steps."""

Settings = Mapping[str, str | int | float]
Cell = str | int | float | None


class Going(NamedTuple):
    """Where a resumed run continues: after `step` steps, as incarnation `incarnation`.

    `went_back` is the last incarnation that began with an earlier checkpoint than the newest one; 0 if there is none.
    """

    step: int
    incarnation: int
    went_back: int


class TrackerRun(msgspec.Struct, frozen=True, kw_only=True):
    """The run of one tracker: its id and its name in the tracker, the newest incarnation that started the tracker, and
    the last step that the tracker got (`sent`)."""

    id: str
    name: str
    incarnation: int
    sent: int = -1


def accelerate_classes() -> Mapping[str, Callable[..., Any]]:
    """Returns accelerate's classes of trackers by name."""
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    # accelerate's trackers ask PartialState whether this is the main process. With `cpu=True` it does not initialise a
    # GPU.
    PartialState(cpu=True)
    classes: Mapping[str, Callable[..., Any]] = LOGGER_TYPE_TO_CLASS
    return classes


class Trackers:
    """Sends numbers to the trackers called `names`, as the run `run` of the experiment `project`.

    `settings` is the run's configuration by dotted key. `folder` is the run's directory: trackers that write files
    write them there. `going` is None for a new run. `classes` returns the classes of the trackers by name; the thread
    of the trackers calls it. At the end, the trackers get `close_s` seconds to send the rest.

    >>> trackers = Trackers([], project="asyncrl", run="quickstart", folder=Path("runs/quickstart"), settings={})
    >>> trackers.log(1, {"reward/mean": 0.5, "staleness/parity_nats": None})
    >>> trackers.close()
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        project: str,
        run: str,
        folder: Path,
        settings: Settings,
        going: Going | None = None,
        classes: Callable[[], Mapping[str, Callable[..., Any]]] = accelerate_classes,
        close_s: float = CLOSE_S,
    ) -> None:
        self._classes = classes
        self._close_s = close_s
        self._names = tuple(names)
        self._folder = folder
        self._going = going
        self._runs = _known_runs(folder) if going is not None else {}
        self._has = {name: known.sent for name, known in self._runs.items() if name != PURGES}
        """The last step that each tracker had from earlier incarnations, and that it cannot take back."""
        self._live: dict[str, Any] = {}
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        """The work of the thread, in order; None ends the thread."""
        self._given_up = Event()
        # There is one thread, because numbers must arrive in order, and because MLflow's active run belongs to a
        # thread.
        self._thread = Thread(target=self._run, name="trackers", daemon=True)
        self._thread.start()
        for name in names:
            start = partial(self._start, name, project=project, run=run, folder=folder, settings=settings)
            self._work.put(start)

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        """Queues the numbers of one step, without those that are None or not finite. Does not block."""
        if not self._names:
            return
        known = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
        self._work.put(lambda: self._log(step, known))

    def log_samples(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Queues a table with rollouts of one step. Does not block."""
        if self._names and rows:
            self._work.put(lambda: self._each(partial(_log_table, step=step, columns=columns, rows=rows), step=step))

    def close(self) -> None:
        """Ends the trackers, and waits at most `close_s` seconds until they have sent everything."""
        self._work.put(lambda: self._each(lambda _, tracker: tracker.finish()))
        self._work.put(None)
        self._thread.join(self._close_s)
        if self._thread.is_alive():
            self._given_up.set()
            logger.warning(
                "the trackers did not send all numbers within %g s of the run's end, and are stopped; all numbers are "
                "in the run directory",
                self._close_s,
            )

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (do := self._work.get()) is not None and not self._given_up.is_set():
            do()

    def _start(self, name: str, *, project: str, run: str, folder: Path, settings: Settings) -> None:
        try:
            classes = self._classes()
            known, named = self._continued(name, run=run)
            arguments = _arguments(name, project=project, run=named, folder=folder, known=known, going=self._going)
            tracker: Any = classes[name](**arguments)
            tracker.start()
            # In a resumed run, MLflow would refuse changed parameters, and TensorBoard would show a second set of them.
            if known is None or name not in ("mlflow", "tensorboard"):
                tracker.store_init_configuration(dict(settings))
            self._live[name] = tracker
            sent = -1 if known is None else known.sent
            incarnation = 1 if self._going is None else self._going.incarnation
            tracker_id = known.id if known is not None else _id_of(name, tracker, arguments)
            self._runs[name] = TrackerRun(id=tracker_id, name=named, incarnation=incarnation, sent=sent)
            self._write()
        except Exception as error:
            _report(f"the tracker {name} did not start, and the run continues without it", error)

    def _continued(self, name: str, *, run: str) -> tuple[TrackerRun | None, str]:
        """Returns (the tracker's run that the resumed run continues, or None for a new one; the name of this run)."""
        known, going = self._runs.get(name), self._going
        if known is not None and going is not None and known.incarnation < going.went_back and name != PURGES:
            del self._has[name]
            return None, f"{run}-{going.incarnation}"
        return known, run if known is None else known.name

    def _log(self, step: int, known: Mapping[str, float]) -> None:
        self._each(lambda _, tracker: tracker.log(known, step=step), step=step)
        self._runs = {
            name: msgspec.structs.replace(run, sent=max(run.sent, step)) if name in self._live else run
            for name, run in self._runs.items()
        }
        self._write()

    def _write(self) -> None:
        try:
            write_atomically(self._folder / TRACKERS, msgspec.json.encode(self._runs))
        except OSError as error:
            logger.info("%s was not written: %s", self._folder / TRACKERS, error)

    def _each(self, act: Callable[[str, Any], None], *, step: int | None = None) -> None:
        """Calls `act` for each tracker. With `step`, leaves out those that have the numbers of this step."""
        for name, tracker in list(self._live.items()):
            if step is not None and step <= self._has.get(name, -1):
                continue
            try:
                act(name, tracker)
            except Exception as error:
                del self._live[name]
                _report(f"the tracker {name} failed and gets no more numbers of this run", error)


def _log_table(name: str, tracker: Any, *, step: int, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    """Logs a table to a tracker.

    accelerate has no common call for tables. The function uses the tracker's own tables, or Markdown text where the
    tracker has no tables.
    """
    match name:
        case "wandb":
            tracker.log_table("samples", columns=list(columns), data=[list(row) for row in rows], step=step)
        case "trackio":
            import trackio

            table = trackio.Table(columns=list(columns), data=[list(row) for row in rows])
            tracker.log({"samples": table}, step=step)
        case "tensorboard":
            tracker.writer.add_text("samples", _markdown(columns, rows), global_step=step)
        case "mlflow":
            import mlflow

            mlflow.log_text(_markdown(columns, rows), f"samples/step-{step}.md")


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    r"""
    >>> print(_markdown(["prompt", "reward"], [["a|b\nc", 0.5]]))
    | prompt | reward |
    | --- | --- |
    | a\|b\nc | 0.5 |
    """

    def line(cells: Sequence[Cell]) -> str:
        texts = [str(cell).replace("|", "\\|").replace("\n", "\\n") for cell in cells]
        return f"| {' | '.join(texts)} |"

    return "\n".join([line(columns), line(["---"] * len(columns)), *map(line, rows)])


def _report(what: str, error: Exception) -> None:
    """Logs the error as a warning of one line, and the traceback with the level INFO, which only the log file shows."""
    logger.warning("%s: %s: %s", what, type(error).__name__, error)
    logger.info("%s", what, exc_info=error)


def _known_runs(folder: Path) -> dict[str, TrackerRun]:
    """Returns the runs in `trackers.json` by tracker; none if it cannot be read."""
    try:
        return msgspec.json.decode(read(folder / TRACKERS), type=dict[str, TrackerRun])
    except UNREADABLE:
        return {}


def _arguments(
    name: str, *, project: str, run: str, folder: Path, known: TrackerRun | None, going: Going | None
) -> dict[str, Any]:
    """Returns the arguments of accelerate's tracker class. The classes have different names for project and run.

    `known` is the tracker's run that this one continues; None for a new one.
    """
    match name:
        case "tensorboard":
            # The numbers of step n are logged as those of version n + 1.
            purge: dict[str, int] = {} if known is None or going is None else {"purge_step": going.step + 1}
            return {"run_name": run, "logging_dir": folder / "tensorboard", **purge}
        case "mlflow":
            return {"experiment_name": project, "run_name": run, **({"run_id": known.id} if known else {})}
        case "wandb":
            of_run = {"id": known.id if known else secrets.token_hex(8), "resume": "allow"}
            return {"run_name": project, "name": run, "dir": str(folder), **of_run}
        case _:  # trackio; the configuration admits no other name. It finds a run by its name.
            # trackio creates a run when it gets the first numbers. A resumed run may not exist there yet, so "must"
            # would fail.
            return {"run_name": project, "name": run, "resume": "allow" if known else "never"}


def _id_of(name: str, tracker: Any, arguments: Mapping[str, Any]) -> str:
    """Returns the id of the run that a tracker has begun; for trackio its name, for TensorBoard an empty text."""
    return (
        str(tracker.active_run.info.run_id) if name == "mlflow" else str(arguments.get("id", arguments.get("name", "")))
    )
