"""Two machines on this one, made of Linux namespaces.

Each machine has its own network, host name, processes, /tmp and /dev/shm. Its host name resolves to its address in the
network that joins the machines, as in many clouds. The machines share the CPUs, the Python environment, and the folders
that the caller names. Only root can make them.

    first ── first-port ── bridge ── second-port ── second          the bridge is in a network namespace of its own

The processes of a machine have other pids inside of it than outside. A `Command` has the pids of outside.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).parents[2]
NAMES = ("first", "second")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PROGRAMS = ("unshare", "nsenter", "ip", "mount", "setsid", "bash")
UNSHARE = ("unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child")
START_S = 60.0
"""Time limit until a machine is up, and until a command has begun."""
POLL_S = 0.2

_INIT = r"""
set -euo pipefail
name=$1 own=$2
shift 2
mount --make-rprivate /
mount -t proc proc /proc
hostname "$name"
mount --bind "$own/hosts" /etc/hosts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
shared=()
for folder in "$@"; do exec {number}< "$folder"; shared+=("$number"); done
mount --bind "$own/tmp" /tmp
for folder in "$@"; do
  mkdir -p "$folder"
  mount --no-canonicalize --bind "/proc/self/fd/${shared[0]}" "$folder"
  shared=("${shared[@]:1}")
done
ip link set lo up
echo up
while read -r _; do :; done
"""
"""The first process of a machine. A folder that is shared stays visible when /tmp is replaced: the mount names it by an
open file. The process reaps orphans, as bash does, and ends when its input is closed. All processes of the machine end
with it."""


def why_not() -> str | None:
    """Returns why no such machines can be made here; None if they can."""
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        return f"{', '.join(missing)} not installed: apt-get install util-linux iproute2"
    if os.geteuid() != 0:
        return "only root can make network and mount namespaces"
    tried = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, check=False, timeout=60)
    return f"this machine allows no namespaces: {tried.stderr.strip()}" if tried.returncode else None


class Command:
    """A command in a machine. It leads a session and a process group; `log` has its output."""

    def __init__(self, words: Sequence[str], *, log: Path, environment: dict[str, str]) -> None:
        self.log = log
        with log.open("ab") as file:
            self._entering = psutil.Popen(
                words, stdout=file, stderr=subprocess.STDOUT, cwd=REPOSITORY, env=environment, start_new_session=True
            )
        wait_for(lambda: self._entering.children() or self._entering.poll() is not None, START_S, f"{words} to begin")
        [self.process] = self._entering.children() or [self._entering]

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def returncode(self) -> int | None:
        """Returns the exit code; None while the command runs."""
        found: int | None = self._entering.poll()
        return found

    def wait(self, limit_s: float) -> int:
        """Returns the exit code. Raises TimeoutError, with the last lines of the output, after `limit_s`."""
        try:
            return int(self._entering.wait(limit_s))
        except psutil.TimeoutExpired:
            raise TimeoutError(f"still running after {limit_s:g} s:\n{self.output()[-4000:]}") from None

    def wait_for(self, condition: Callable[[], object], limit_s: float, what: str) -> None:
        """Polls until `condition()` is true. Raises AssertionError if the command ends before."""

        def holds() -> bool:
            found = bool(condition())
            ended = None if found else self.returncode()
            assert ended is None, f"ended with {ended} before {what}:\n{self.output()[-4000:]}"
            return found

        wait_for(holds, limit_s, f"{what} ({self.log})")

    def family(self) -> list[psutil.Process]:
        """Returns the command's process and all processes that it has started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [self.process, *self.process.children(recursive=True)]
        return []

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


class Machine:
    """A machine: its host name, its address, the home directory of its user, and the commands that run there."""

    def __init__(self, name: str, address: str, *, folder: Path, shared: Sequence[Path], hosts: str) -> None:
        self.name, self.address, self.home = name, address, folder / "home"
        for each in (self.home, folder / "tmp"):
            each.mkdir(parents=True)
        (folder / "hosts").write_text(hosts)
        words = ["bash", "-c", _INIT, "init", name, str(folder), *map(str, shared)]
        self._unshare = subprocess.Popen([*UNSHARE, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._unshare.stdout is not None
        assert self._unshare.stdout.readline() == b"up\n", f"machine {name} did not start"
        [self._init] = psutil.Process(self._unshare.pid).children()
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_AUTH", "TMP"))}
        self.environment |= {
            "HOME": str(self.home),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(sys.path),
            "RAY_AUTH_MODE": "token",
            "RAY_worker_niceness": "0",  # with 15, Ray's default, ranks and engines wait for other work on the CPUs
        }

    @property
    def pid(self) -> int:
        """The pid of the machine's first process."""
        return int(self._init.pid)

    def start(self, *words: str, log: Path, **environment: str) -> Command:
        """Starts a command in the machine. Its output is appended to `log`."""
        return Command(
            ["nsenter", *self._target(), "setsid", *words], log=log, environment=self.environment | environment
        )

    def call(self, *words: str, limit_s: float = 120.0, **environment: str) -> str:
        """Runs a command in the machine. Returns its output. Raises CalledProcessError if it fails."""
        done = subprocess.run(
            ["nsenter", *self._target(), *words],
            cwd=REPOSITORY,
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=limit_s,
        )
        return done.stdout

    def end(self) -> None:
        """Ends all processes of the machine."""
        assert self._unshare.stdin is not None
        self._unshare.stdin.close()
        try:
            self._unshare.wait(START_S)
        except subprocess.TimeoutExpired:
            self._init.kill()
            self._unshare.wait()

    def _target(self) -> list[str]:
        return [f"--target={self.pid}", "--net", "--mount", "--uts", "--pid", f"--wdns={REPOSITORY}"]


class Switch:
    """The network of the machines: a bridge, with a port for each machine."""

    def __init__(self) -> None:
        words = ["unshare", "--net", "bash", "-c", "echo up; read -r _ || true"]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"up\n"
        self._ip("link", "add", "bridge", "type", "bridge")
        self._ip("link", "set", "bridge", "up")

    def join(self, machine: Machine) -> None:
        """Adds the port of a machine, whose end is its interface eth0."""
        port = f"{machine.name}-port"
        peer = ["peer", "name", "eth0", "netns", str(machine.pid)]
        self._ip("link", "add", port, "type", "veth", *peer)
        self._ip("link", "set", port, "master", "bridge", "up")
        machine.call("ip", "address", "add", f"{machine.address}/24", "dev", "eth0")
        machine.call("ip", "link", "set", "eth0", "up")

    @contextlib.contextmanager
    def without(self, machine: Machine) -> Iterator[None]:
        """No packet reaches or leaves the machine within the block."""
        self._ip("link", "set", f"{machine.name}-port", "down")
        try:
            yield
        finally:
            self._ip("link", "set", f"{machine.name}-port", "up")

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _ip(self, *words: str) -> None:
        subprocess.run(["nsenter", f"--target={self._process.pid}", "--net", "ip", *words], check=True, timeout=60)


@contextlib.contextmanager
def two_machines(folder: Path, *, shared: Sequence[Path]) -> Iterator[tuple[Machine, Machine, Switch]]:
    """Makes the machines, whose own files are in `folder`. They see the repository and the folders `shared` as this
    machine does. All of their processes end with the context."""
    hosts = "127.0.0.1 localhost\n"
    hosts += "".join(f"{address} {name}\n" for name, address in zip(NAMES, ADDRESSES, strict=True))
    with contextlib.ExitStack() as ends:
        switch = Switch()
        ends.callback(switch.end)
        machines = []
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            seen = [REPOSITORY, *shared]
            machines.append(Machine(name, address, folder=folder / name, shared=seen, hosts=hosts))
            ends.callback(machines[-1].end)
            switch.join(machines[-1])
        first, second = machines
        yield first, second, switch


def wait_for(condition: Callable[[], object], limit_s: float, what: str) -> None:
    """Polls until `condition()` is true. Raises TimeoutError after `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"waited {limit_s:g} s for {what}")
        time.sleep(POLL_S)
