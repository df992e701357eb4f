"""What the commands `up`, `learner` and `generator` share: preparing a run, signals, and running deployments.

The first SIGTERM, SIGINT or SIGHUP asks for a clean end; a second SIGTERM or SIGINT ends at once.
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
AT_ONCE_S = 2.0

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """The run's tasks, by use."""

    train: Sequence[Task]
    heldout: Sequence[Task]


async def load_prompts(config: Config, loaded: Prompts | None = None) -> Prompts:
    """Tasks as the config says, made in a thread unless they are `loaded`; the same in every deployment of a run."""

    def build() -> Prompts:
        from asyncrl.environments.interfaces import build_tasks

        train, heldout = build_tasks(config)
        return Prompts(train=train, heldout=heldout)

    return await asyncio.to_thread(build) if loaded is None else loaded


async def fitting_prompts(config: Config, prompts: Prompts, *, tokenizer: Any) -> Prompts:
    """The prompts that the model can take, looked at in a thread. DatasetError as `data.on_bad_row` says."""

    def look() -> Prompts:
        train = fitting(prompts.train, config=config, tokenizer=tokenizer)
        return Prompts(train=train, heldout=fitting(prompts.heldout, config=config, tokenizer=tokenizer))

    return await asyncio.to_thread(look)


def _for_workers(model: str) -> str:
    """A folder by its whole path: the processes of a Ray cluster work where that was started, not where we were."""
    return os.path.abspath(model) if os.path.isdir(model) else model


async def described_model(config: Config, prompts: "asyncio.Task[Prompts]") -> str:
    """Path of the model as engines need it: of a tiny one config and tokenizer, the weights come from the learner."""
    if config.model.tiny is None:
        return _for_workers(config.model.path)
    await prompts  # threads that import at the same time see modules that are half made

    def describe() -> str:
        from asyncrl.policy.tiny_model import ensure_description

        return _for_workers(ensure_description(config))

    return await asyncio.to_thread(describe)


async def ready_model(
    config: Config, prompts: "asyncio.Task[Prompts]", described: "asyncio.Task[str]", *, report: Callable[[str], None]
) -> str:
    """Path of the model, built first when the config describes a tiny one that is missing."""
    path, tasks = await described, await prompts
    if config.model.tiny is None:
        return path

    def build() -> str:
        from asyncrl.policy.tiny_model import ensure_model

        return _for_workers(ensure_model(config, tasks=(tasks.train, tasks.heldout), report=report))

    return await asyncio.to_thread(build)


class _Stderr(logging.Handler):
    """Writes to what `sys.stderr` is at that moment: a live view replaces it, to show lines above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


@contextlib.contextmanager
def log_to(path: Path | None) -> Iterator[None]:
    """Everything that is logged goes to `path`, warnings to stderr as well; without a path, all of it to stderr.

    An error that ends what is logged goes to `path` with its traceback: on stderr it is the command's to say.
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
            except OSError as error:  # the disk is full: what ended the run is not to be hidden by it
                logger.error("the log %s is not whole: %s", path, error)


@contextlib.contextmanager
def recorded_run(config: Config, *, role: str) -> Iterator[RunDir]:
    """The directory of `config.run` and a log in it, for this process; its report when the run ends, however it ends.

    Raises RunLocked when another process has the directory.
    """
    run_dir = RunDir.create(config)
    try:
        with run_dir, log_to(run_dir.log_path(role, 0)):
            yield run_dir
    finally:
        try:
            write_report(run_dir.path)  # once run.json says how the run ended
        except Exception as error:  # whatever it is, the run's own outcome is not to be hidden by it
            logger.error("no report of %s: %s: %s", run_dir.path, type(error).__name__, error)
            logger.info("no report of %s", run_dir.path, exc_info=error)


def use_ray_token(*, own: bool = False) -> None:
    """Joins clusters with the user's Ray token, where there is one; call it before ray is imported.

    Ray does so by itself for `auto`, but not for an address. For one of our `own`, whose token is made when there is
    none, it would, and greet everyone with how to switch it off.
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
    """Runs `main(stop)` with `stop` set by the first SIGTERM, SIGINT or SIGHUP, right after `asked` is called.

    A second SIGTERM or SIGINT ends the process right after each of `at_once` is called. SIGHUP comes when the terminal
    is closed. It never counts as the second signal, because the kernel and the shell may both send one. A process
    that was started with SIGHUP ignored (`nohup`) goes on ignoring it.
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
                logger.warning("ending cleanly; a second signal ends at once")
                asked()
                stop.set()

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, on_signal, number)
        return await main(stop)

    return asyncio.run(supervised())


def _end_at_once(at_once: Sequence[Callable[[], None]]) -> None:
    # A disk or a terminal that does not answer must not keep the process.
    timer = threading.Timer(AT_ONCE_S, os._exit, [INTERRUPTED])
    timer.daemon = True
    timer.start()
    try:
        logger.warning("second signal: ending at once")
        for last_move in at_once:
            last_move()
    finally:
        os._exit(INTERRUPTED)
