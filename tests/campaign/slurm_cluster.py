"""A Slurm cluster of two nodes on this machine, made of Debian's packages `slurm-wlm` and `munge`.

munged, slurmctld and two slurmd are child processes of the test, in the foreground. All of their files are in one
folder, and their ports are free ports, so a Slurm that is installed on this machine is not touched. The two nodes share
this machine's address, processes and files.
"""

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue")
NODES = ("n1", "n2")
START_S = 60.0
"""Time limit until both nodes are idle."""
END_S = 60.0
"""Time limit until a daemon has ended after TERM, and until the processes of a job have ended."""
KILL_WAIT_S = 10
"""Slurm's KillWait: the time between its TERM and its KILL, seconds."""

_CONFIG = """\
ClusterName=asyncrl
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
MpiDefault=none
KillWait={kill_wait_s}
ReturnToService=2
FirstJobId={first_job}
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=4000
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=4000
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Returns why a cluster cannot be started on this machine; None if it can."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    missing = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    if missing:
        return f"{', '.join(missing)} not installed: apt-get install --no-install-recommends slurm-wlm munge"
    if address() is None:
        return "this machine has no address except the loopback's"
    return None


def address() -> str | None:
    """Returns this machine's first IPv4 address that is not of the loopback; None if there is none."""
    found = [each for addresses in psutil.net_if_addrs().values() for each in addresses]
    usable = [each.address for each in found if each.family == socket.AF_INET and not each.address.startswith("127.")]
    return usable[0] if usable else None


class SlurmCluster:
    """A running cluster. `environment` is for commands of Slurm, and `call` runs one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            # The first folder has the commands `asyncrl` and `ray`.
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin",
        }
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def call(self, *words: str) -> str:
        """Runs a command of Slurm. Returns its output. Raises CalledProcessError if it failed."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, check=True, timeout=60)
        return done.stdout.strip()

    def start(self, name: str, *words: str) -> None:
        """Starts a daemon, whose output goes to a file in the folder."""
        with open(self.folder / f"{name}.out", "ab") as out:
            self.daemons[name] = subprocess.Popen(words, env=self.environment, stdout=out, stderr=out)

    def start_node(self, node: str) -> None:
        self.start(node, "slurmd", "-D", "-N", node)

    def lose_node(self, node: str) -> None:
        """Kills a node's daemon and the processes of jobs on the node. Sets the node down, which Slurm itself does only
        after `SlurmdTimeout`."""
        self.daemons[node].kill()
        self.daemons[node].wait()
        for process in self.processes(on=node):
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.call("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")

    def job(self, job: str) -> dict[str, str]:
        """Returns the fields of `scontrol show job`."""
        words = self.call("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def ran_s(self, job: str) -> int:
        """Returns for how long the job has run, seconds."""
        hours, minutes, seconds = self.job(job)["RunTime"].split(":")
        return (int(hours) * 60 + int(minutes)) * 60 + int(seconds)

    def wait_for_end(self, job: str) -> None:
        """Waits until no process of the job is left, so that its nodes are idle."""
        wait_for(lambda: not self.call("squeue", "--noheader", f"--jobs={job}"), END_S, f"job {job} to end")

    def end_jobs(self) -> None:
        """Kills all jobs, and waits until their nodes are idle."""
        jobs = self.call("squeue", "--noheader", "--format=%i").split()
        if jobs:
            self.call("scancel", *jobs)
        wait_for(self._all_idle, END_S, "the jobs to end")

    def __enter__(self) -> "SlurmCluster":
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir(mode=0o700)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        user = psutil.Process().username()
        (self.folder / "slurm.conf").write_text(
            _CONFIG.format(
                folder=self.folder, host=socket.gethostname(), user=user, ports=_free_ports(3), nodes=NODES,
                kill_wait_s=KILL_WAIT_S, first_job=random.randint(1000, 20_000),
            )
        )  # fmt: skip
        with contextlib.ExitStack() as undo:
            undo.callback(self._end)
            self.start(
                "munged", "munged", "--foreground", "--force", f"--key-file={key}",
                f"--socket={self.folder}/munge.socket", f"--pid-file={self.folder}/munged.pid",
                f"--log-file={self.folder}/munged.log", f"--seed-file={self.folder}/munged.seed",
            )  # fmt: skip
            wait_for((self.folder / "munge.socket").exists, START_S, "munged to listen")
            self.start("slurmctld", "slurmctld", "-D", "-c", "-f", self.environment["SLURM_CONF"])
            for node in NODES:
                self.start_node(node)
            wait_for(self._all_idle, START_S, f"both nodes to be idle ({self.folder}/*.log)")
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _all_idle(self) -> bool:
        with contextlib.suppress(subprocess.CalledProcessError):
            return self.call("sinfo", "--noheader", "--Node", "--format=%T").split() == ["idle"] * len(NODES)
        return False

    def _end(self) -> None:
        """Ends the daemons, and kills the processes of jobs that are left."""
        for name in reversed(self.daemons):
            self.daemons[name].terminate()
        for daemon in self.daemons.values():
            try:
                daemon.wait(END_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def processes(self, *, on: str | None = None) -> Iterator[psutil.Process]:
        """Yields the processes of this cluster: those with its SLURM_CONF in their environment. With `on`, yields those
        of jobs on this node."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                variables = process.environ()
                of_node = on is None or variables.get("SLURMD_NODENAME") == on
                if of_node and variables.get("SLURM_CONF") == self.environment["SLURM_CONF"]:
                    yield process


def wait_for(condition: Callable[[], object], limit_s: float, what: str) -> None:
    """Polls until `condition` is true. Raises TimeoutError after `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"waited {limit_s:g} s for {what}")
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as open_sockets:
        sockets = [open_sockets.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
