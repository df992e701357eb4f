"""A taskset of the package verifiers for agent_clients.py: questions of arithmetic, answered without a tool."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class Sums(vf.Taskset[SumTask]):
    def load(self):
        for first in range(2, 21):
            for second in range(2, 21):
                data = SumData(prompt=f"What is {first} + {second}?", answer=str(first + second))
                yield SumTask(data, self.config.task)


__all__ = ["Sums"]
