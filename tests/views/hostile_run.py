"""Writes a run whose texts are hostile wherever a model, a reward, a configuration or a file may have written them."""

import random
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path

import msgspec
from made_up_run import make_step

from asyncrl.buffer.records import Failure, FailureCount
from asyncrl.config.schema import Config
from asyncrl.deployment.run_dir import RunDir
from asyncrl.errors import FailureClass
from asyncrl.learner.records import EvalRecord, RunInfo, SampleRecord

PARTS = (
    *("\x1b[2J", "\x1b]0;title\x07", "\x1b]8;;file:///etc/passwd\x1b\\", "\x1bP+q\x1b\\", "\x9b31m", "\x9d0;t\x9c"),
    *("\r", "\n", "\t", "\x00", "\x07", "\x08" * 9, "\x0b", "\x0c", "\x7f", "\x85", "\u2028", "\u202e", "\u200d"),
    *("[red]", "[/]", "[link=file:///x]", "[bold", "\\[", ":smile:", "{{ 7 * 7 }}", "{% raw %}", "%s", "${HOME}"),
    *("<script>alert(1)</script>", "</script><script>alert(2)</script>", "</title><title>mine</title>"),
    *("<img src=x onerror=alert(3)>", "<svg/onload=alert(4)>", "</pre></details></section><h1>x</h1>"),
    *('" onmouseover="alert(5)', "' autofocus onfocus='alert(6)", "-->", "<!--", "]]>", "&lt;b&gt;", "javascript:"),
    *("<style>*{display:none}</style>", "<base href=//x>", "<meta http-equiv=refresh content=0>", "é", "漢字", "=1+1"),
)


def hostile_texts(count: int, *, seed: int = 0) -> list[str]:
    """Returns different texts of one to five of the parts each."""
    chance, found = random.Random(seed), dict.fromkeys(PARTS)
    while len(found) < count:
        found["".join(chance.choices(PARTS, k=chance.randint(2, 5)))] = None
    return list(found)[:count]


def write_texts_run(folder: Path, texts: Sequence[str], *, name: str) -> Path:
    """Writes a failed run of two steps whose free texts are `texts`, in turn. Returns its path."""
    text = cycle(texts)
    options = {next(text): next(text) for _ in range(20)}
    config = Config.model_validate(
        {
            "run": {"name": name, "dir": str(folder)},
            "environment": {"name": "tasks:Own", "options": options, "reward": f"tasks:{name}"},
            "data": {"dataset": "tasks:rows", "options": {next(text): next(text) for _ in range(20)}},
        }
    )
    run = RunDir.create(config)
    steps = [
        make_step(
            step,
            reward_components={next(text): 0.5 for _ in range(5)},
            reward_parts={next(text): 0.5 for _ in range(5)},
            part_groups={next(text): 1 for _ in range(5)},
            diagnostics={next(text): 0.5 for _ in range(5)},
            learner_state_s={next(text): 1.0 + step for _ in range(4)},
            generator_state_s={next(text): 1.0 + step for _ in range(4)},
            ledger_groups={next(text): 3 for _ in range(4)},
            buffer_groups={next(text): 3 for _ in range(4)},
        )
        for step in range(2)
    ]
    for record in steps:
        run.append_step(record)
        run.write_samples(record.step, [_sample(record.step, group, text) for group in range(8)])
    evals = [EvalRecord(name=next(text), version=version, wall_s=9, prompts=8, reward_mean=0.5) for version in (0, 1)]
    for evaluation in evals:
        run.append_eval(evaluation)
    run.write_failures([FailureCount(rollouts=1, groups=1, samples=1, first=_failure(text)) for _ in range(10)])
    run.close(state="failed", reason=next(text))
    path = run.path / "run.json"
    info = msgspec.json.decode(path.read_bytes(), type=RunInfo)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(info, host=next(text), exit_reason=next(text))))
    return run.path


def _failure(text: Iterator[str]) -> Failure:
    of_class = FailureClass.DATA
    return Failure(
        failure_class=of_class, reason=next(text), message=next(text), prompt=next(text), completion=next(text)
    )


def _sample(step: int, group: int, text: Iterator[str]) -> SampleRecord:
    tokens = tuple(next(text) for _ in range(4))
    return SampleRecord(
        step=step,
        group=group,
        prompt=next(text),
        rendered_prompt=next(text),
        completion="".join(tokens),
        tokens=tokens,
        answer=next(text),
        reward=0.5,
        components={next(text): 0.5 for _ in range(4)},
        advantage=0.5,
        version_spans=((step, 4),),
        trained_spans=((True, 4),),
        staleness_versions=0,
        truncated=False,
    )
