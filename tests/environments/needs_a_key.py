"""A module that reads its key on import."""

import os

from asyncrl.data.prompts import Task

KEY = os.environ["JUDGE_API_KEY"]


def judge(task: Task, completion: str) -> float:
    return float(len(KEY))
