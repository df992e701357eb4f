"""A small real run for the campaign: the quickstart's model, which spells words backward, with few and short groups."""

import json
import random
import string
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SETTINGS = (
    "model.max_length=64",
    "generator.kv_cache_gib=0.25",
    "generator.max_concurrent_groups=8",
    "generator.max_completion_tokens=10",
    "learner.groups_per_step=4",
    "learner.group_size=4",
    "learner.total_steps=1000000",
    "learner.optimizer.warmup_steps=0",
    "environment.reward=exact_match",
    "data.dataset=jsonl",  # reading questions is faster than making them
    "eval.prompts=0",
    "run.shutdown_grace_s=60",
)


def model_at(path: Path) -> list[str]:
    """Returns the overrides for a model of the quickstart at `path`, and for its questions, which are beside it."""
    return [f"model.path={path}", "model.tiny.warmup_steps=20", f"data.path={path.with_name('questions.jsonl')}"]


def write_questions(path: Path) -> None:
    """Writes questions of the quickstart: words of four letters, which are to be spelled backward."""
    drawn = random.Random(0)
    words = {"".join(drawn.choices(string.ascii_lowercase, k=4)) for _ in range(4000)}
    rows = ({"prompt": word, "answer": word[::-1], "word": word} for word in sorted(words))
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def made_model(path: Path) -> Path:
    """Builds the model at `path`, and writes its questions beside it. Returns `path`."""
    write_questions(path.with_name("questions.jsonl"))
    words = ["-m", "asyncrl", "model", "-c", "quickstart", *SETTINGS, *model_at(path)]
    subprocess.run([sys.executable, *words], check=True, cwd=REPOSITORY)
    return path
