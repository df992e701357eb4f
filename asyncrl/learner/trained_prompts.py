"""Counts the prompts that are trained, and compares them with the data.

Group n of a run has the n-th prompt of the order, and the order has each row of the data once an epoch. So in one epoch
a prompt is trained at most as often as there are rows with it. It is trained less often if some of its groups failed,
or were filtered or dropped. The comparison uses the group's number, the number of rows and the weights of a mixture,
and not the order in which the buffer issues the rows.

The counts begin anew at each start of the learner. So a repetition may be missed in the epoch of the start.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from asyncrl.buffer.records import GroupMeta, Lease
from asyncrl.data.prompts import Task
from asyncrl.data.row_checksums import prompt_checksum
from asyncrl.witness.judge import Finding

REMEMBERED_GROUPS = 100_000
"""The counts of an epoch are deleted when all of its groups are at least this many groups behind the newest trained
group."""


class TrainedPrompts:
    """Counts the trained prompts of each epoch. `tasks` are the training tasks of the run. `weights` are those of the
    parts of a mixture by name; without a mixture, they are empty. `epochs` is `data.epochs`. Takes 16 bytes of
    memory for each task, and 100 for each trained group of the epochs that it remembers."""

    def __init__(self, tasks: Sequence[Task], *, weights: Mapping[str, int] = {}, epochs: int | None = None) -> None:
        self._tasks = tasks
        self._epochs = None if weights else epochs  # the parts of a mixture do not end their epochs at the same group
        self._weights = dict(weights) or {"": 1}
        found: dict[str, list[int]] = {name: [] for name in self._weights}
        for task in tasks:
            found[task.part].append(prompt_checksum(task.input))
        self._data = {name: _Data(np.array(checksums, dtype=np.uint64)) for name, checksums in found.items()}
        self._trained: dict[tuple[str, int], Counter[int]] = {}
        self._newest_group = 0

    @property
    def frequencies(self) -> dict[str, dict[int, int]]:
        """The number of prompts that the data have in one row, in two rows, and so on, by part of the mixture: number
        of rows → number of prompts."""
        return {name: data.frequencies for name, data in self._data.items()}

    def finding(self, lease: Lease) -> Finding | None:
        """Counts the groups of a trained step. Returns a finding about the worst prompt: one that was trained too
        often or after the last epoch, or that the data do not have. The ratio of the finding is 0 if there is no such
        prompt. Returns None if no group has the checksum of its prompt."""
        metas = [group.meta for group in lease.groups if group.meta.prompt is not None]
        if not metas:
            return None
        counted = [self._counted(meta) for meta in metas]
        self._newest_group = max(self._newest_group, *(meta.group for meta in metas))
        self._forget()
        ratio, words = max(counted, key=itemgetter(0))
        return Finding(check="prompts", ratio=ratio, words=words())

    def _counted(self, meta: GroupMeta) -> tuple[float, Callable[[], str]]:
        """Counts a group. Returns how often its prompt was trained in its epoch, divided by the number of rows with
        this prompt. Returns 0 instead if this is at most 1 or if the epoch is not known, and infinity if the data do
        not have the prompt, or if the epoch comes after the last one of `data.epochs`.

        Also returns a function that returns the fault in words. It may have to search all tasks for the prompt, so it
        is called for the worst group of a step only.
        """
        assert meta.prompt is not None
        group, data = meta.group, self._data.get(meta.part)
        if data is None or not (times := data.times(meta.prompt)):
            return math.inf, lambda: f"group {group} was trained with a prompt that the training data do not have"
        epoch = self._epoch(group, meta.part)
        if epoch is None:
            return 0.0, lambda: ""
        if self._epochs is not None and epoch >= self._epochs:
            return math.inf, lambda: f"group {group} was trained in epoch {epoch}, and data.epochs = {self._epochs}"
        counts = self._trained.setdefault((meta.part, epoch), Counter())
        counts[meta.prompt] += 1
        trained = counts[meta.prompt]
        if trained <= times:
            return 0.0, lambda: ""
        rows = "once" if times == 1 else f"{times} times"
        return (
            trained / times,
            lambda: (
                f"group {group} was trained with {self._named(meta)}. It is number {trained} of epoch {epoch} with "
                f"this prompt, and the data have the prompt {rows}"
            ),
        )

    def _epoch(self, group: int, part: str) -> int | None:
        """Returns the epoch of its part to which a group belongs, from 0 on.

        The groups of a mixture come in blocks: a block has as many groups of each part as the part's weight. Returns
        None if an epoch of the part ends within the group's block: the epoch then depends on the order in the block.
        """
        weight, rows = self._weights[part], self._data[part].rows
        block = group // sum(self._weights.values())
        first, last = block * weight, (block + 1) * weight - 1
        return first // rows if first // rows == last // rows else None

    def _forget(self) -> None:
        """Deletes the counts of old epochs (`REMEMBERED_GROUPS`), so that they do not grow with the run."""
        for part, epoch in list(self._trained):
            end = (epoch + 1) * self._data[part].rows * sum(self._weights.values()) / self._weights[part]
            if end < self._newest_group - REMEMBERED_GROUPS:
                del self._trained[part, epoch]

    def _named(self, meta: GroupMeta) -> str:
        of_part = (task for task in self._tasks if task.part == meta.part)
        task = next(task for task in of_part if prompt_checksum(task.input) == meta.prompt)
        return f"the prompt {task.prompt[:60]!r} (row {task.row})"


class _Data:
    """The different prompts of a part by their checksums, and the number of dataset rows that have each prompt."""

    def __init__(self, checksums: npt.NDArray[np.uint64]) -> None:
        self.rows = len(checksums)
        self._checksums, self._times = np.unique(checksums, return_counts=True)

    @property
    def frequencies(self) -> dict[int, int]:
        """The number of prompts that have 1 row, 2 rows, and so on: number of rows → number of prompts."""
        return dict(sorted(Counter(self._times.tolist()).items()))

    def times(self, checksum: int) -> int:
        """Returns the number of dataset rows whose prompt has this checksum."""
        place = int(np.searchsorted(self._checksums, np.uint64(checksum)))
        there = place < len(self._checksums) and int(self._checksums[place]) == checksum
        return int(self._times[place]) if there else 0
