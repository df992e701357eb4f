"""Measures how many groups per second the replay buffer processes, and whether this depends on the number of groups in
it.

    python benchmarks/buffer_throughput.py

Groups are reserved and committed one by one, as generators do, and are leased and acked step by step. A fixed number of
groups stays outstanding; η is the same in all measurements. The claim is the ratio: with a thousand times as many
groups, the buffer processes about as many groups per second, because every call takes O(log n) per group.
"""

import time
from collections import deque

from asyncrl.buffer.records import CommitOutcome, GroupMeta, Lease, Ticket
from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.buffer.staleness import Limits
from asyncrl.data.prompts import Task

MAX_STALENESS_VERSIONS = 4
GROUP_SIZE = 8
GROUPS_MEASURED = 10_000
REPEATS = 5


class SameTask:
    """An endless source of prompts that takes no time, so that only the buffer is measured."""

    task = Task(question="2 + 2", prompt="2 + 2 =", answer="4")

    def next(self) -> Task:
        return self.task


def finished(ticket: Ticket) -> GroupMeta:
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
    )


def groups_per_second(outstanding: int) -> float:
    """Returns the number of groups per second while `outstanding` groups are outstanding between two steps."""
    groups_per_step = outstanding // MAX_STALENESS_VERSIONS
    capacity_groups = outstanding + groups_per_step
    buffer = ReplayBuffer(
        limits=Limits(
            max_staleness_versions=MAX_STALENESS_VERSIONS,
            groups_per_step=groups_per_step,
            group_size=GROUP_SIZE,
            capacity_groups=capacity_groups,
            capacity_bytes=capacity_groups * 10_000,
            worst_group_bytes=10_000,
            total_steps=10**9,
            max_attempts=3,
            heartbeat_timeout_s=60.0,
        ),
        prompts=SameTask(),
        clock=time.monotonic,
    )
    held: deque[Ticket] = deque()

    def reserve_one() -> None:
        held.extend(buffer.tickets.reserve("generator", version=buffer.version, count=1).tickets)

    while len(held) < outstanding:
        reserve_one()
    steps = max(1, GROUPS_MEASURED // groups_per_step)
    started_s = time.perf_counter()
    for _ in range(steps):
        for _ in range(groups_per_step):
            reserve_one()
            assert buffer.tickets.commit(finished(held.popleft())) is CommitOutcome.ACCEPTED
        lease = buffer.leases.lease()
        assert isinstance(lease, Lease), lease
        buffer.leases.ack(lease.incarnation, lease.step)
    return steps * groups_per_step / (time.perf_counter() - started_s)


def main() -> None:
    few, many = 10, 10_000
    # The two measurements alternate, and the best of each counts: other work on the machine can only slow a run down.
    runs = [(groups_per_second(few), groups_per_second(many)) for _ in range(REPEATS)]
    at_few, at_many = (max(column) for column in zip(*runs, strict=True))
    print(f"{few:>6} groups outstanding: {at_few:>8.0f} groups/s reserved, committed, leased and acked")
    print(f"{many:>6} groups outstanding: {at_many:>8.0f} groups/s reserved, committed, leased and acked")
    print(f"ratio {at_many / at_few:.2f}")


if __name__ == "__main__":
    main()
