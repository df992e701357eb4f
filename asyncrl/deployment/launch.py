"""Code that the commands `up`, `learner` and `generator` share: preparing a run, its log, and signals.

The first SIGTERM, SIGINT or SIGHUP asks for a clean end. A second SIGTERM or SIGINT ends the process at once.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.config.schema import Config
from asyncrl.data.prompts import Task
from asyncrl.deployment.run_dir import RunDir
from asyncrl.environments.prompt_lengths import fitting
from asyncrl.views.report import write_report

logger = logging.getLogger(__name__)

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
INTERRUPTED = 130
"""Exit code of a process that a second signal ends (128 + SIGINT)."""
AT_ONCE_S = 2.0
"""Time that a second signal leaves for the last actions before the process exits, seconds."""

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """The tasks of a run: for training, and held out for evaluation."""

    train: Sequence[Task]
    heldout: Sequence[Task]


async def load_prompts(config: Config, loaded: Prompts | None = None) -> Prompts:
    """Returns the tasks of the config, which are the same in every deployment of a run.

    They are `loaded`, or they are built in a thread.
    """

    def build() -> Prompts:
        from asyncrl.environments.interfaces import build_tasks

        train, heldout = build_tasks(config)
        return Prompts(train=train, heldout=heldout)

    return await asyncio.to_thread(build) if loaded is None else loaded


async def fitting_prompts(config: Config, prompts: Prompts, *, tokenizer: Any) -> Prompts:
    """Returns the prompts that fit `data.max_prompt_tokens`. They are measured in a thread.

    Raises DatasetError for a prompt that does not fit, unless `data.on_bad_row` is `skip`.
    """

    def look() -> Prompts:
        train = fitting(prompts.train, config=config, tokenizer=tokenizer)
        return Prompts(train=train, heldout=fitting(prompts.heldout, config=config, tokenizer=tokenizer))

    return await asyncio.to_thread(look)


def _for_workers(model: str) -> str:
    """Returns the absolute path if `model` is a folder, else `model`.

    The processes of a Ray cluster run in the folder in which the cluster was started, so a relative path is wrong
    there.
    """
    return os.path.abspath(model) if os.path.isdir(model) else model


async def described_model(config: Config, prompts: "asyncio.Task[Prompts]") -> str:
    """Returns the path of the model for the engines.

    For a tiny model, config and tokenizer are enough and are written first. Engines get the weights from the learner.
    """
    if config.model.tiny is None:
        return _for_workers(config.model.path)
    # Wait for the thread that builds the prompts: two threads that import at the same time may see half-initialised
    # modules.
    await prompts

    def describe() -> str:
        from asyncrl.demo.tiny_model import ensure_description

        return _for_workers(ensure_description(config))

    return await asyncio.to_thread(describe)


async def ready_model(
    config: Config, prompts: "asyncio.Task[Prompts]", described: "asyncio.Task[str]", *, report: Callable[[str], None]
) -> str:
    """Returns the path of the model. Builds the tiny model first if the config describes one that does not exist."""
    path, tasks = await described, await prompts
    if config.model.tiny is None:
        return path

    def build() -> str:
        from asyncrl.demo.tiny_model import ensure_model

        return _for_workers(ensure_model(config, tasks=(tasks.train, tasks.heldout), report=report))

    return await asyncio.to_thread(build)


class _Stderr(logging.Handler):
    """Writes to the current `sys.stderr`. The live view replaces `sys.stderr`, so that lines appear above the view."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


@contextlib.contextmanager
def log_to(path: Path | None) -> Iterator[None]:
    """Writes all log records of the block to `path`, and warnings also to stderr. Without a path, all go to stderr.

    An error that leaves the block is written to `path` with its traceback. The command prints it on stderr.
    """
    handlers: list[logging.Handler] = [_Stderr()]
    if path is not None:
        handlers[0].setLevel(logging.WARNING)
        handlers.append(logging.FileHandler(path))
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    for handler in handlers:
        handler.setFormatter(logging.Formatter(LOG_FORMAT))
        root.addHandler(handler)
    try:
        yield
    except Exception as error:
        if path is not None:
            handlers[0].setLevel(logging.CRITICAL + 1)
            logger.error("ended by an error", exc_info=error)
        raise
    finally:
        for handler in handlers:
            root.removeHandler(handler)
            try:
                handler.close()
            except OSError as error:  # the disk is full; this must not hide the error that ended the run
                logger.error("the log %s is incomplete: %s", path, error)


@contextlib.contextmanager
def recorded_run(config: Config, *, role: str) -> Iterator[RunDir]:
    """Takes the run's directory for this process and logs to it. Writes the report when the block ends in any way.

    Raises RunLocked if another process holds the directory.
    """
    run_dir = RunDir.create(config)
    try:
        with run_dir, log_to(run_dir.log_path(role, 0)):
            yield run_dir
    finally:
        try:
            write_report(run_dir.path)  # after the block, so that run.json records how the run ended
        except Exception as error:  # an error in the report must not hide the outcome of the run
            logger.error("the report of %s was not written: %s: %s", run_dir.path, type(error).__name__, error)
            logger.info("the report of %s was not written", run_dir.path, exc_info=error)


def use_ray_token(*, own: bool = False) -> None:
    """Makes Ray use the user's token, if there is one. Call it before ray is imported.

    Ray uses the token by itself for the address `auto`, but not for other addresses. `own` is for a cluster that this
    process starts. Its token is created if there is none. Ray would use it without this function too, but would print
    a hint on how to turn tokens off.
    """
    default = Path.home() / ".ray" / "auth_token"
    known = any(name in os.environ for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if own or known or default.is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def run_until_done(
    main: Callable[[asyncio.Event], Awaitable[Result]],
    *,
    asked: Callable[[], None] = lambda: None,
    at_once: Sequence[Callable[[], None]] = (),
) -> Result:
    """Runs `main(stop)` and returns its result. The first SIGTERM, SIGINT or SIGHUP calls `asked` and sets `stop`.

    A second SIGTERM or SIGINT calls each function of `at_once` and then exits the process. A closed terminal sends
    SIGHUP. It never counts as the second signal, because the kernel and the shell may both send one. If the process was
    started with SIGHUP ignored (`nohup`), SIGHUP stays ignored.
    """

    async def supervised() -> Result:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        seen: list[signal.Signals] = []

        def on_signal(number: signal.Signals) -> None:
            if number != signal.SIGHUP:
                seen.append(number)
            if len(seen) > 1:
                _end_at_once(at_once)
            if not stop.is_set():
                logger.warning("ending cleanly; a second signal ends the process at once")
                asked()
                stop.set()

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, on_signal, number)
        return await main(stop)

    return asyncio.run(supervised())


def _end_at_once(at_once: Sequence[Callable[[], None]]) -> None:
    # The process must also exit if a disk or a terminal blocks the functions below.
    timer = threading.Timer(AT_ONCE_S, os._exit, [INTERRUPTED])
    timer.daemon = True
    timer.start()
    try:
        logger.warning("second signal: the process exits now")
        for last_move in at_once:
            last_move()
    finally:
        os._exit(INTERRUPTED)
