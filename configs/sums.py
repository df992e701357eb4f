"""Questions of the recipes smollm and smollm_gpu: sums of two numbers, which a small chat model often gets wrong."""

from asyncrl.data.prompts import Task

LARGEST = 24


def questions() -> list[Task]:
    """Returns every sum of two numbers from 1 to `LARGEST`."""
    numbers = range(1, LARGEST + 1)
    return [Task(question=f"{a} + {b} =", answer=str(a + b)) for a in numbers for b in numbers]
