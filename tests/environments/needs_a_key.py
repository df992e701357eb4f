"""A module that reads its key while it is imported."""

import os

from asyncrl.data.prompts import Task

KEY = os.environ["JUDGE_API_KEY"]


def judge(task: Task, completion: str) -> float:
    return float(len(KEY))
