"""The processes that train the runs of a sweep. A process may train several runs, one after the other.

A run goes to the process of a finished run if their settings are equal as far as Ray, engines and the processes of
ranks depend on them (`kept_for`). Otherwise that process ends first, so that its devices are free, and the run gets a
new one. If a process dies while it trains a run that is not its first, or ends this run with an error that a restart
may fix, the run goes to a new process, which resumes it.
"""

import asyncio
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from asyncrl.cli.kept import SOCKET, Ended, Order
from asyncrl.cli.preflight import user_modules
from asyncrl.cli.restarts import RESTART_MENDS
from asyncrl.cli.terminal import say
from asyncrl.common.roles import Role
from asyncrl.common.tasks import cancelled
from asyncrl.config.load import flat_config
from asyncrl.config.parts import all_configs
from asyncrl.config.schema import Config
from asyncrl.errors import INTERRUPTED
from asyncrl.log_files import make_room
from asyncrl.parent_death import die_with

MAY_DIFFER = (
    "algorithm",
    "audit",
    "buffer",
    "checkpoint",
    "eval",
    "learner.groups_per_step",
    "learner.optimizer",
    "learner.total_steps",
    "run.name",
    "run.seed",
    "run.stop_when",
    "staleness",
    "witness",
)
"""Settings, and sections of settings, in which two runs of one process may differ: Ray, an engine and the process of a
rank do not depend on them. Every other setting must be equal."""
END_S = 60.0
"""Longest wait for the end of a process that gets no other run, seconds. Then it is killed."""
LAST_WORDS_S = 1.0
"""Longest wait for the message of a process that has ended, seconds."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def kept_for(config: Config) -> bytes | None:
    """Returns the settings that another run must have too to be trained in the process of this run; None if no other
    run may be trained there.

    A run is trained alone if its process has state that another run would meet: modules of the user, which may change
    meanwhile, trackers, a mirror, the gateway of agents, the index of TransferQueue, or a Ray cluster that it joined.
    """
    alone = (
        config.ray.address is not None
        or config.run.mirror is not None
        or config.data_plane.backend == "transfer_queue"
        or bool(config.metrics.trackers)
        or any(part.environment.plays_agents for part in all_configs(config).values())
        or bool(user_modules(config, {Role.LEARNER}))
    )
    if alone:
        return None
    free = tuple(f"{key}." for key in MAY_DIFFER)
    shared = {key: value for key, value in flat_config(config).items() if not f"{key}.".startswith(free)}
    return msgspec.json.encode(shared, order="deterministic")


class Ending:
    """Whether a signal has asked the sweep to end. The processes that train get the signal too.

    `by` is the first signal. `at_once` says whether a process has ended at once since then, because of a second signal.
    """

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.by: signal.Signals | None = None
        self.at_once = False
        self.processes: set[asyncio.subprocess.Process] = set()

    def ask(self, number: signal.Signals) -> None:
        self.by = self.by or number
        self.asked.set()
        for process in self.processes:
            process.send_signal(number)


@contextmanager
def ended_by_signals(ending: Ending) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    numbers = [number for number in _ENDING if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores SIGHUP
    for number in numbers:
        loop.add_signal_handler(number, ending.ask, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


@dataclass(frozen=True, eq=False)
class TrainingProcess:
    """A process that has begun to train a run, and may train others. `reader` and `writer` are the sweep's end of its
    socket."""

    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def start(cls, command: Sequence[str], *, log: Path) -> "TrainingProcess":
        """Starts the command of a run. The process ends at once if this process is killed."""
        ours, its = socket.socketpair()
        with its, log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=[its.fileno()],
                env=os.environ | {SOCKET: str(its.fileno())}, preexec_fn=partial(die_with, os.getpid()),
            )  # fmt: skip
        return cls(process, *await asyncio.open_unix_connection(sock=ours))

    def give(self, order: Order) -> None:
        self.writer.write(msgspec.json.encode(order) + b"\n")

    async def ended(self) -> Ended | None:
        """Waits until the command of the run has ended. Returns how it ended; None if the process has ended without a
        message about it."""
        line = asyncio.ensure_future(self.reader.readline())
        gone = asyncio.ensure_future(self.process.wait())
        await asyncio.wait([line, gone], return_when=asyncio.FIRST_COMPLETED)
        # A child of the process may keep the socket open, and the line would then never end.
        await asyncio.wait([line], timeout=LAST_WORDS_S)
        await cancelled(line, gone)
        if line.cancelled() or line.exception() is not None or not line.result():
            return None
        return msgspec.json.decode(line.result(), type=Ended)

    async def close(self) -> None:
        """Lets the process end, and waits until it has ended. Kills it if it does not end within `END_S` seconds."""
        self.writer.close()
        try:
            async with asyncio.timeout(END_S):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()


@dataclass
class TrainingProcesses:
    """The processes of a sweep. `_idle` maps each process that waits for a run to the settings that its next run must
    share with the last one (`kept_for`)."""

    ending: Ending
    _idle: dict[TrainingProcess, bytes] = field(default_factory=dict)

    async def train(self, command: Sequence[str], config: Config, *, log: Path) -> int:
        """Trains the run `config` in an idle process if one fits, else in a new process with the command line
        `command`. Returns the exit code of the run's command."""
        log.parent.mkdir(parents=True, exist_ok=True)
        make_room(log)
        wanted = kept_for(config)
        fits = [each for each, shared in self._idle.items() if shared == wanted and each.process.returncode is None]
        fitting = fits[0] if fits else None
        others = [process for process in self._idle if process is not fitting]
        self._idle.clear()  # before the first wait, because several runs may start at the same time
        await asyncio.gather(*(process.close() for process in others))
        if fitting is not None:
            fitting.give(Order(words=[*command[command.index("asyncrl") + 1 :]], log=str(log)))
            ended = await self._trained(fitting, wanted)
            if ended is not None:
                code = ended.code
            else:  # it was killed, or `asyncrl down --now` or a second signal has ended it
                code = INTERRUPTED if await fitting.process.wait() == INTERRUPTED else RESTART_MENDS
            if code != RESTART_MENDS or self.ending.asked.is_set() or config.run.max_restarts == 0:
                return code
            say(f"  the process that trained {config.run.name} after another run has died; a new one continues the run")
        process = await TrainingProcess.start(command, log=log)
        ended = await self._trained(process, wanted)
        return await process.process.wait() if ended is None else ended.code

    async def close(self) -> None:
        """Ends the processes that wait."""
        await asyncio.gather(*(process.close() for process in self._idle))
        self._idle.clear()

    async def _trained(self, process: TrainingProcess, shared: bytes | None) -> Ended | None:
        """Waits until the run of a process has ended. Keeps the process if it waits for another run, and if another run
        may be trained in it. Otherwise ends the process."""
        self.ending.processes.add(process.process)
        if self.ending.asked.is_set():  # the signal came while this process was being started
            process.process.send_signal(signal.SIGTERM)
        try:
            ended = await process.ended()
        finally:
            self.ending.processes.discard(process.process)
        if ended is not None and ended.waits and shared is not None and not self.ending.asked.is_set():
            self._idle[process] = shared
        else:
            await process.close()
        return ended
