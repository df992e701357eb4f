"""Experiment trackers, through accelerate's: TensorBoard, Weights & Biases, MLflow, trackio.

What must hold: a tracker is a copy of what the run directory records, and never more than that. It is fed from a thread
of its own, one that fails is reported once and left alone, and what it still has to send at the end gets `CLOSE_S`
seconds and no more: the thread is a daemon, for Python's exit would wait for any other, however long it hangs.
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
    """Those called `names`, which follow the run `run` of the experiment `project`; `settings` are its configuration by
    dotted key, `folder` is where files go that belong to the run.

    >>> trackers = Trackers([], project="asyncrl", run="quickstart", folder=Path("runs/quickstart"), settings={})
    >>> trackers.log(1, {"reward/mean": 0.5, "staleness/parity_nats": None})
    >>> trackers.close()
    """

    def __init__(self, names: Sequence[str], *, project: str, run: str, folder: Path, settings: Settings) -> None:
        self._names = tuple(names)
        self._live: dict[str, Any] = {}
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        """What the thread does, in this order; None is the end."""
        self._given_up = Event()
        # a single thread: numbers must arrive in order, and MLflow knows its active run by thread
        self._thread = Thread(target=self._run, name="trackers", daemon=True)
        self._thread.start()
        for name in names:
            start = partial(self._start, name, project=project, run=run, folder=folder, settings=settings)
            self._work.put(start)

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        """Numbers of one step, but for those that are None or not finite. Returns at once."""
        if not self._names:
            return
        known = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
        self._work.put(lambda: self._each(lambda tracker: tracker.log(known, step=step)))

    def log_samples(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """A table of rollouts of one step. Returns at once."""
        if self._names and rows:
            self._work.put(lambda: self._each_by_name(partial(_log_table, step=step, columns=columns, rows=rows)))

    def close(self) -> None:
        """Waits for what is under way, `CLOSE_S` seconds at most."""
        self._work.put(lambda: self._each(lambda tracker: tracker.finish()))
        self._work.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._given_up.set()
            logger.warning("trackers were not done %g s after the end; all numbers are in the run directory", CLOSE_S)

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (do := self._work.get()) is not None and not self._given_up.is_set():
            do()

    def _start(self, name: str, *, project: str, run: str, folder: Path, settings: Settings) -> None:
        try:
            from accelerate import PartialState
            from accelerate.tracking import LOGGER_TYPE_TO_CLASS

            # accelerate's trackers ask who the main process is; nothing here shall touch a GPU to find out
            PartialState(cpu=True)
            tracker: Any = LOGGER_TYPE_TO_CLASS[name](**_arguments(name, project=project, run=run, folder=folder))
            tracker.start()
            tracker.store_init_configuration(dict(settings))
            self._live[name] = tracker
        except Exception as error:
            _report(f"the tracker {name} did not start; the run goes on without it", error)

    def _each(self, act: Callable[[Any], None]) -> None:
        self._each_by_name(lambda _, tracker: act(tracker))

    def _each_by_name(self, act: Callable[[str, Any], None]) -> None:
        for name, tracker in list(self._live.items()):
            try:
                act(name, tracker)
            except Exception as error:
                del self._live[name]
                _report(f"the tracker {name} failed and is fed no more", error)


def _log_table(name: str, tracker: Any, *, step: int, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    """accelerate has no common call for tables: each library's own, and Markdown where there is only text."""
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
    """A line for whoever looks on; the traceback is for the log."""
    logger.warning("%s: %s: %s", what, type(error).__name__, error)
    logger.info("%s", what, exc_info=error)


def _arguments(name: str, *, project: str, run: str, folder: Path) -> dict[str, Any]:
    """What accelerate's tracker of this name wants to know; they call one thing by several names."""
    match name:
        case "tensorboard":
            return {"run_name": run, "logging_dir": folder / "tensorboard"}
        case "wandb":
            return {"run_name": project, "name": run, "dir": str(folder)}
        case "mlflow":
            return {"experiment_name": project, "run_name": run}
        case "trackio":
            return {"run_name": project, "name": run}
        case _:
            raise ValueError(f"no tracker is called {name!r}")
