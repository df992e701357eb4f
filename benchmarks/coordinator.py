"""Measures the coordinator at the scale of 1,000 replicas and 100,000 groups.

    python benchmarks/coordinator.py --write

- A commit while 1,000 generators wait for a ticket, and while one waits. With no free slot it must wake none of them.
- The brief status, the endpoints and a heartbeat, with 100,000 groups at 1,000 replicas and with 100 groups at one.
- Groups through the replay buffer alone, from reserve to ack, with 10 and with 10,000 outstanding groups.
- Groups through a real coordinator actor, from reserve to ack. One process plays eight generators and the learner.

All times are CPU times of one thread, except for the groups per second through the actor. Bytes are those of the answer
as Ray sends it. Ratios compare measurements of one run. `--write` puts the table into docs/benchmarks.md.
"""

import argparse
import asyncio
import gc
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import psutil
import ray
from ray import cloudpickle
from report_page import busy_percent, provenance, write_section

from asyncrl.buffer.records import CommitOutcome, GroupMeta, HeldReport, Lease, Ticket, VersionSpan
from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.buffer.staleness import limits_of
from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.coordinator.client import CoordinatorActor, CoordinatorClient
from asyncrl.coordinator.coordinator import Coordinator
from asyncrl.coordinator.registry import ReplicaReport
from asyncrl.data.prompts import PromptSource, Task
from asyncrl.generation.generator import HeldTickets
from asyncrl.metrics.catalogue import GENERATOR_STATES

GROUP_SIZE = 8
NOW = Version(1, 0)
TASKS = [Task(question=f"{n} + 2", prompt=f"{n} + 2 =", answer=str(n + 2)) for n in range(1000)]
WAIT_S = 3600.0
REPLICAS_OF_DEPLOYMENT = 8
GENERATORS = 8
"""Generators that the driver of the actor plays. Each calls with `BATCH` groups at once."""
BATCH = 128


def config_of(*, groups_per_step: int, max_staleness_versions: int) -> Config:
    """Returns a run that never ends, with room for what its staleness limit admits."""
    learner = {"groups_per_step": groups_per_step, "group_size": GROUP_SIZE, "total_steps": 10**9}
    staleness = {"max_versions": max_staleness_versions}
    return Config.model_validate({"learner": learner, "staleness": staleness, "buffer": {"capacity_bytes": 10**15}})


class NoRows:
    """A row client of a run in which no row is stored."""

    async def clear(self, keys: Sequence[str]) -> None:
        pass

    async def keys(self) -> list[str]:
        return []


def coordinator_of(config: Config) -> Coordinator:
    return Coordinator(config=config, tasks=TASKS, rows=NoRows())


def finished(ticket: Ticket) -> GroupMeta:
    spans = (VersionSpan(ticket.version.incarnation, ticket.version.step, 16),)
    return GroupMeta(
        group=ticket.group,
        attempt=ticket.attempt,
        incarnation=ticket.version.incarnation,
        replica=ticket.replica,
        row_bytes=1000,
        prompt_tokens=8,
        completion_tokens=(16,) * GROUP_SIZE,
        rewards=(1.0,) * GROUP_SIZE,
        truncated=(False,) * GROUP_SIZE,
        oldest=ticket.version.step,
        newest=ticket.version.step,
        version_spans=(spans,) * GROUP_SIZE,
        row_checksums=tuple(range(2**62, 2**62 + GROUP_SIZE)),
    )


def report_of(replica: str) -> ReplicaReport:
    return ReplicaReport(
        actor=replica,
        deployment="generator-0a1b2c",
        metrics_address="127.0.0.1:40000",
        state_seconds=dict.fromkeys(GENERATOR_STATES, 1234.5),
        slots=100,
        running_groups=100,
        samples=10**6,
        completion_tokens=10**9,
        weight_updates=1000,
        parity_max_nats=1e-5,
    )


def cpu_us(work: Callable[[], object], *, times: int) -> float:
    """Returns the CPU time of one call, the best of three measurements, in µs."""
    best = float("inf")
    for _ in range(3):
        began_s = time.process_time()
        for _ in range(times):
            work()
        best = min(best, time.process_time() - began_s)
    return best / times * 1e6


def wire_bytes(answer: object) -> int:
    """Returns the size of an answer as Ray sends it."""
    return len(cloudpickle.dumps(answer, protocol=5))


async def commit_us(*, waiting: int, commits: int) -> float:
    """Returns the CPU time of a commit, with all that it wakes, while `waiting` generators wait and no slot is free."""
    coordinator = coordinator_of(config_of(groups_per_step=commits, max_staleness_versions=0))
    metas = [finished(ticket) for ticket in (await coordinator.reserve("busy", NOW, commits, wait_s=0.0)).tickets]
    calls = [asyncio.create_task(coordinator.reserve(f"waits-{n}", NOW, 1, wait_s=WAIT_S)) for n in range(waiting)]
    await asyncio.sleep(0)
    began_s = time.process_time()
    for meta in metas:
        assert await coordinator.commit([meta]) == [CommitOutcome.ACCEPTED]
        await asyncio.sleep(0)  # the calls that the commit has woken
        await asyncio.sleep(0)
    cpu_s = time.process_time() - began_s
    assert not any(call.done() for call in calls)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    return cpu_s / commits * 1e6


async def at_scale(*, groups: int, replicas: int) -> dict[str, float]:
    """Returns CPU times (µs) and sizes (bytes) of the calls that are made often, with so many groups and replicas. A
    third of the groups is ready."""
    coordinator = coordinator_of(config_of(groups_per_step=groups, max_staleness_versions=0))
    each = groups // replicas
    held: dict[str, HeldTickets] = {}
    for number in range(replicas):
        name = f"generator-{number:06x}"
        tickets = (await coordinator.reserve(name, NOW, each, wait_s=0.0)).tickets
        assert len(tickets) == each
        ready = tickets[: each // 3]
        await coordinator.commit([finished(ticket) for ticket in ready])
        held[name] = HeldTickets(first_number=1)
        held[name].add(tickets[len(ready) :])
        for _ in range(2):
            await beat(coordinator, name, held[name])
        assert held[name].report().tokens == {}
    name, tickets_of = next(iter(held.items()))

    def heartbeat(change: Callable[[HeldTickets], None]) -> Callable[[], None]:
        def call() -> None:
            change(tickets_of)
            step(beat(coordinator, name, tickets_of))

        return call

    sampled = itertools.count(1)

    def all_sampled(tickets: HeldTickets) -> None:
        tokens = next(sampled)
        for key in tickets:
            tickets.progressed(key, tokens)

    serial, own = coordinator.registry.endpoints_since(0).serial, list(held)[:REPLICAS_OF_DEPLOYMENT]
    times = 200
    return {
        "brief status": cpu_us(lambda: cloudpickle.dumps(coordinator.brief_status(), protocol=5), times=times),
        "brief status, bytes": wire_bytes(coordinator.brief_status()),
        "whole status": cpu_us(lambda: cloudpickle.dumps(coordinator.status(), protocol=5), times=3),
        "whole status, bytes": wire_bytes(coordinator.status()),
        "own replicas": cpu_us(lambda: cloudpickle.dumps(coordinator.own_replicas("d", own), protocol=5), times=times),
        "own replicas, bytes": wire_bytes(coordinator.own_replicas("d", own)),
        "endpoints, bytes": wire_bytes(coordinator.registry.endpoints_since(serial)),
        "account": cpu_us(lambda: coordinator.buffer.account, times=times),
        "recount": cpu_us(coordinator.buffer.recount, times=1),
        "metrics": cpu_us(coordinator._record, times=10),
        "heartbeat": cpu_us(heartbeat(lambda _: None), times=times),
        "heartbeat, all sampled": cpu_us(heartbeat(all_sampled), times=times),
        "heartbeat, complete": cpu_us(heartbeat(HeldTickets.report_all), times=times),
    }


async def beat(coordinator: Coordinator, name: str, tickets: HeldTickets) -> None:
    held = tickets.report()
    renewal = await coordinator.heartbeat(name, NOW, 0, held, report_of(name))
    tickets.answered(held)
    if renewal.report_all:
        tickets.report_all()


def step(coroutine: Any) -> None:
    """Runs a coroutine that does not wait."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise RuntimeError("the call waits")


def buffer_groups_per_s(*, outstanding: int, groups: int) -> float:
    """Returns the groups per second of CPU time of a buffer alone while `outstanding` groups are outstanding between
    two steps."""
    staleness = 4
    config = config_of(groups_per_step=outstanding // staleness, max_staleness_versions=staleness)
    prompts = PromptSource(TASKS, seed=0)
    buffer = ReplayBuffer(limits=limits_of(config), prompts=prompts, clock=time.monotonic)
    held: deque[Ticket] = deque()

    def reserve_one() -> None:
        held.extend(buffer.reserve("generator", version=buffer.version, count=1).tickets)

    while len(held) < outstanding:
        reserve_one()
    groups_per_step = config.learner.groups_per_step
    steps = max(1, groups // groups_per_step)
    began_s = time.process_time()
    for _ in range(steps):
        for _ in range(groups_per_step):
            reserve_one()
            assert buffer.commit(finished(held.popleft())) is CommitOutcome.ACCEPTED
        lease = buffer.lease()
        assert isinstance(lease, Lease), lease
        buffer.ack(lease.incarnation, lease.step)
    return steps * groups_per_step / (time.process_time() - began_s)


class Driver:
    """Plays generators and the learner of one coordinator, which is reached with `client`."""

    def __init__(self, client: CoordinatorClient) -> None:
        self._client = client
        self._version = NOW
        self._names = [f"generator-{n}" for n in range(GENERATORS)]
        self._heartbeats = itertools.count(1)
        self.acked = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Calls until the block ends. Raises the error of a call then."""
        works = [self._learn(), self._beat(), *map(self._generate, self._names)]
        tasks = [asyncio.create_task(work) for work in works]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            for error in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(error, Exception):
                    raise error

    async def _beat(self) -> None:
        while True:
            await asyncio.gather(*map(self._load, self._names))
            await asyncio.sleep(1.0)

    async def _generate(self, name: str) -> None:
        while True:
            reservation = await self._client.call(Coordinator.reserve, name, self._version, BATCH, wait_s=20.0)
            if reservation.tickets:
                await self._client.call(Coordinator.commit, [finished(ticket) for ticket in reservation.tickets])

    async def _learn(self) -> None:
        while True:
            lease = await self._client.call(Coordinator.lease, 1, wait_s=20.0)
            if isinstance(lease, Lease):
                acked = await self._client.call(Coordinator.ack, lease.incarnation, lease.step)
                self._version = acked.status.version
                self.acked += len(lease.groups)
                await asyncio.gather(*map(self._load, self._names))

    async def _load(self, name: str) -> None:
        """The generator reports that it has loaded the newest version. It names no tickets, because it commits each at
        once."""
        held = HeldReport(number=next(self._heartbeats), complete=False, tokens={})
        await self._client.call(Coordinator.heartbeat, name, self._version, 0, held, report_of(name))


def actor_groups_per_s(*, seconds: float) -> tuple[float, float, float]:
    """Returns the groups per second through a coordinator actor, and the CPU time of a group in the actor and in the
    driver, µs."""
    config = config_of(groups_per_step=512, max_staleness_versions=4)
    ray.init(address="local", num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False)
    try:
        actor = ray.remote(CoordinatorActor).options(num_cpus=0, max_concurrency=1000)
        handle = actor.remote(config=config, tasks=ray.put(TASKS))
        process = psutil.Process(ray.get(handle.__ray_call__.remote(lambda _: psutil.Process().pid), timeout=60))
        driver = Driver(CoordinatorClient.over_ray(handle, timeout_s=60.0))

        async def measured() -> tuple[float, float, float]:
            async with driver.running():
                await asyncio.sleep(seconds / 4)
                acked, actor_s, own_s = driver.acked, cpu_of(process), time.process_time()
                began_s = time.perf_counter()
                await asyncio.sleep(seconds)
                passed_s, groups = time.perf_counter() - began_s, driver.acked - acked
                actor_us = (cpu_of(process) - actor_s) / groups * 1e6
                return groups / passed_s, actor_us, (time.process_time() - own_s) / groups * 1e6

        return asyncio.run(measured())
    finally:
        ray.shutdown()


def cpu_of(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def table(*, groups: int, replicas: int, waiting: int, commits: int, seconds: float) -> list[str]:
    """Measures everything and returns the table as lines of Markdown."""
    commit = {number: asyncio.run(commit_us(waiting=number, commits=commits)) for number in (1, waiting)}
    few, many = (
        asyncio.run(at_scale(groups=number, replicas=count))
        for number, count in ((groups // replicas, 1), (groups, replicas))
    )
    gc.collect()
    at_few, at_many = (
        max(buffer_groups_per_s(outstanding=number, groups=commits) for _ in range(3))
        for number in (10, max(40, groups // 10))
    )
    through, actor_us, driver_us = actor_groups_per_s(seconds=seconds)

    def compared(name: str, unit: str = "µs") -> str:
        return f"{many[name]:,.0f} {unit} ({few[name]:,.0f})"

    rows = [
        ("CPU time of a commit", "≤ 100 µs", f"{commit[waiting]:.0f} µs ({commit[1]:.0f} with one that waits)"),
        ("brief status: CPU time with its encoding", "≤ 1,000 µs", compared("brief status")),
        ("brief status: size of a poll", "≤ 4,096 bytes", compared("brief status, bytes", "bytes")),
        ("endpoints without a change: size of a poll", "≤ 4,096 bytes", compared("endpoints, bytes", "bytes")),
        ("a deployment's poll of its 8 replicas: CPU time with its encoding", "", compared("own replicas")),
        ("a deployment's poll of its 8 replicas: size", "", compared("own replicas, bytes", "bytes")),
        ("groups per second through the actor, from reserve to ack", "≥ 5,000", f"{through:,.0f}"),
        ("CPU time of a group in the actor, in its driver", "", f"{actor_us:.0f} µs, {driver_us:.0f} µs"),
        (
            "groups per second of CPU time of the buffer alone",
            "",
            f"{at_many:,.0f} ({at_few:,.0f} with 10 outstanding groups)",
        ),
        ("heartbeat without a change", "", compared("heartbeat")),
        ("heartbeat after all rollouts have sampled tokens", "", compared("heartbeat, all sampled")),
        ("heartbeat that names all tickets", "", compared("heartbeat, complete")),
        ("metrics of the buffer, once a second", "", compared("metrics")),
        ("account of the ledger, and its recount", "", f"{compared('account')}, {compared('recount')}"),
        ("whole status, for commands: CPU time with its encoding", "", compared("whole status")),
        ("whole status, for commands: size", "", compared("whole status, bytes", "bytes")),
    ]
    return ["| measured | goal | reached |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=100_000)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--commits", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=20.0, help="of calls through the actor")
    parser.add_argument("--write", action="store_true", help="write the table into docs/benchmarks.md")
    arguments = parser.parse_args()
    busy = busy_percent()
    measured = table(
        groups=arguments.groups,
        replicas=arguments.replicas,
        waiting=arguments.waiting,
        commits=arguments.commits,
        seconds=arguments.seconds,
    )
    lines = [provenance("coordinator.py", busy_percent=busy), "", *measured]
    print("\n".join(lines))
    if arguments.write:
        write_section("coordinator.py", lines)


if __name__ == "__main__":
    main()
