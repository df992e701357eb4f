"""Sends a run's numbers to experiment trackers (TensorBoard, Weights & Biases, MLflow, trackio), through accelerate.

A tracker only gets copies of records in the run directory, so a failing tracker loses nothing. The trackers run in one
thread. A tracker that fails is reported once and gets no more numbers. At the end of the run, the trackers get
`CLOSE_S` seconds to send the rest. The thread is a daemon, because Python waits at exit for all other threads, also for
a tracker that hangs.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

logger = logging.getLogger(__name__)

CLOSE_S = 30.0

Settings = Mapping[str, str | int | float]
Cell = str | int | float | None


class Trackers:
    """Sends numbers to the trackers called `names`, as the run `run` of the experiment `project`.

    `settings` is the run's configuration by dotted key. Trackers that write files write them below `folder`.

    >>> trackers = Trackers([], project="asyncrl", run="quickstart", folder=Path("runs/quickstart"), settings={})
    >>> trackers.log(1, {"reward/mean": 0.5, "staleness/parity_nats": None})
    >>> trackers.close()
    """

    def __init__(self, names: Sequence[str], *, project: str, run: str, folder: Path, settings: Settings) -> None:
        self._names = tuple(names)
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
        self._work.put(lambda: self._each(lambda _, tracker: tracker.log(known, step=step)))

    def log_samples(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Queues a table with rollouts of one step. Does not block."""
        if self._names and rows:
            self._work.put(lambda: self._each(partial(_log_table, step=step, columns=columns, rows=rows)))

    def close(self) -> None:
        """Ends the trackers, and waits at most `CLOSE_S` seconds until they have sent everything."""
        self._work.put(lambda: self._each(lambda _, tracker: tracker.finish()))
        self._work.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._given_up.set()
            logger.warning(
                "the trackers did not send all numbers within %g s of the run's end, and are stopped; all numbers are "
                "in the run directory",
                CLOSE_S,
            )

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (do := self._work.get()) is not None and not self._given_up.is_set():
            do()

    def _start(self, name: str, *, project: str, run: str, folder: Path, settings: Settings) -> None:
        try:
            from accelerate import PartialState
            from accelerate.tracking import LOGGER_TYPE_TO_CLASS

            # accelerate's trackers ask PartialState whether this is the main process. With `cpu=True` it does not
            # initialise a GPU.
            PartialState(cpu=True)
            tracker: Any = LOGGER_TYPE_TO_CLASS[name](**_arguments(name, project=project, run=run, folder=folder))
            tracker.start()
            tracker.store_init_configuration(dict(settings))
            self._live[name] = tracker
        except Exception as error:
            _report(f"the tracker {name} did not start, and the run continues without it", error)

    def _each(self, act: Callable[[str, Any], None]) -> None:
        for name, tracker in list(self._live.items()):
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
    """Logs the error as a warning of one line, and its traceback with the level INFO, which only the log file shows."""
    logger.warning("%s: %s: %s", what, type(error).__name__, error)
    logger.info("%s", what, exc_info=error)


def _arguments(name: str, *, project: str, run: str, folder: Path) -> dict[str, Any]:
    """Returns the arguments of accelerate's tracker class. The classes have different names for project and run."""
    match name:
        case "tensorboard":
            return {"run_name": run, "logging_dir": folder / "tensorboard"}
        case "mlflow":
            return {"experiment_name": project, "run_name": run}
        case "wandb":
            return {"run_name": project, "name": run, "dir": str(folder)}
        case _:  # trackio; the configuration admits no other name
            return {"run_name": project, "name": run}
