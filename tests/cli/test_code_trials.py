"""`asyncrl config check` calls the user's reward on a row, and advantages and loss on a small batch."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from asyncrl.cli.main import app

pytestmark = pytest.mark.slow

REWARDS = """
def rows():
    for number in range(4):
        yield {"prompt": f"{number}+1=", "answer": str(number + 1), "level": number}


def reward(task, completion):
    return float(completion == task.answer)


async def awaited(task, completions):
    return [float(completion == task.answer) for completion in completions]


def misspelled(task, completion):
    return float(completion == task.anwser)  # raises: anwser


def of_metadata(task, completions):
    return [task.metadata["levle"] for _ in completions]  # raises: levle


def double(number: int) -> int:
    '''Doubles a number.'''
    return 2 * number


def a_text(task, completion):
    return "right"
"""
"""Without torch: a scoring process imports this module anew for each test, and torch would take seconds of each."""
LEARNING = """
import torch


class Loss:
    input_type = "logprob"

    def __call__(self, data, global_valid_seqs, global_valid_toks, next_token_logprobs):
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        loss = -(data["advantages"][:, 1:] * next_token_logprobs * mask).sum() / global_valid_toks
        return loss, {"size": float(mask.sum() / global_valid_toks)}


class Logits(Loss):
    input_type = "logit"

    def __call__(self, next_token_logits, data, global_valid_seqs, global_valid_toks):
        logprobs = next_token_logits.log_softmax(-1)[:, :-1].gather(-1, data["input_ids"][:, 1:, None]).squeeze(-1)
        return super().__call__(data, global_valid_seqs, global_valid_toks, logprobs)


class Grouped(Loss):
    columns = ("rewards", "group_ids", "prev_logprobs")

    def __call__(self, data, **given):
        assert len(data["rewards"]) == len(data["group_ids"]) == len(data["prev_logprobs"])
        return super().__call__(data, **given)


class Unknown(Loss):
    columns = ("foo", "advantages", "generation_logprob")


class Reference(Loss):
    columns = ("reference_policy_logprobs",)


class Undeclared(Loss):
    def __call__(self, data, **given):
        return super().__call__(data, **given)[0] + data["bar"].sum(), {}  # raises: bar


class NoMetrics(Loss):
    def __call__(self, data, **given):
        return super().__call__(data, **given)[0]


class Vector(Loss):
    def __call__(self, data, **given):
        return given["next_token_logprobs"], {}


class Maskless(Loss):
    def __call__(self, data, global_valid_seqs, global_valid_toks, next_token_logprobs):
        return -next_token_logprobs.sum() / global_valid_toks, {}


class MasklessLogits(Logits):
    def __call__(self, data, next_token_logits, **given):
        loss, metrics = super().__call__(data=data, next_token_logits=next_token_logits, **given)
        return loss + next_token_logits[:, -1].sum(), metrics


def centred(rewards, group_ids):
    return rewards - rewards.mean()


def by_length(samples, scale):
    return samples.rewards_N * scale / samples.completion_tokens_N


def one_less(rewards, group_ids):
    return rewards[1:] - rewards.mean()


def a_list(rewards, group_ids):
    return [0.0] * len(rewards)


def not_finite(rewards, group_ids):
    return rewards / (rewards - rewards)


def raises(rewards, group_ids):
    return rewards - rewards.maen()  # raises: maen
"""
OWN = {"rewards": "code_trials_rewards", "learning": "code_trials_learning"}
"""The names of the user's modules."""
CODE = {OWN["rewards"]: REWARDS, OWN["learning"]: LEARNING}


@pytest.fixture(autouse=True)
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, code in CODE.items():
        (tmp_path / f"{name}.py").write_text(code)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)


def check(*overrides: str) -> tuple[int, str]:
    """Returns the exit code and the output of `asyncrl config check`."""
    rows = [f"data.dataset={OWN['rewards']}:rows", "data.prompt_template='{question}'"]
    done = CliRunner().invoke(app, ["config", "check", "-c", "quickstart", *rows, *overrides])
    return done.exit_code, done.output


GOOD = [
    "environment.reward={rewards}:reward",
    "environment.reward={rewards}:awaited",
    "algorithm.loss={learning}:Loss",
    "algorithm.loss={learning}:Logits",
    "algorithm.loss={learning}:Grouped",
    "algorithm.advantage={learning}:centred",
    "algorithm.advantage={{name: '{learning}:by_length', scale: 2}}",
]


@pytest.mark.parametrize("override", GOOD)
def test_code_that_works_is_accepted(override: str) -> None:
    code, output = check(override.format(**OWN), "algorithm.overrides={}")
    assert code == 0, output


def line_of(mark: str) -> str:
    [found] = [
        f"{name}.py:{number})"
        for name, code in CODE.items()
        for number, line in enumerate(code.splitlines(), 1)
        if line.endswith(f"# raises: {mark}")
    ]
    return found


BAD = {
    "environment.reward={rewards}:misspelled": [
        "AttributeError",
        "'anwser'",
        line_of("anwser"),
        "row 1",
        "answer '1'",
    ],
    "environment.reward={rewards}:of_metadata": ["KeyError: 'levle'", line_of("levle"), "row 1"],
    "environment.reward={rewards}:a_text": ["a_text", "a reward is a number"],
    "algorithm.loss={learning}:Unknown": [
        "reads the columns foo, generation_logprob, which the rows of this run do not have"
    ],
    "algorithm.loss={learning}:Reference": ["reads the columns reference_policy_logprobs"],
    "algorithm.loss={learning}:Undeclared": ["'bar'", line_of("bar"), "batch of two rows"],
    "algorithm.loss={learning}:NoMetrics": ["must return (scalar, metrics), but this one returned a Tensor"],
    "algorithm.loss={learning}:Vector": ["must return a scalar tensor and a dict, but this one returned shape [2, 5]"],
    "algorithm.loss={learning}:Maskless": ["a token that token_mask leaves out is 0.167, but must be 0"],
    "algorithm.loss={learning}:MasklessLogits": ["a token that token_mask leaves out is 1, but must be 0"],
    "algorithm.advantage={learning}:one_less": ["one finite number for each reward", "two groups of"],
    "algorithm.advantage={learning}:a_list": ["returned a list; it must return a tensor"],
    "algorithm.advantage={learning}:not_finite": ["of the values are not finite"],
    "algorithm.advantage={learning}:raises": ["'maen'", line_of("maen")],
}


@pytest.mark.parametrize("override", BAD)
def test_code_that_fails_is_refused_with_the_errors_line(override: str) -> None:
    code, output = check(override.format(**OWN), "algorithm.overrides={}")
    assert code == 2, output
    [line] = [line for line in output.splitlines() if line.startswith("error:")]
    for part in BAD[override]:
        assert part in line


BESIDE_OTHERS: dict[str, tuple[list[str], str]] = {
    "a built-in reward": (
        ["environment.rewards=[{{name: a, fn: exact_match}}, {{name: b, fn: '{rewards}:misspelled'}}]"],
        "environment.rewards: b raised AttributeError",
    ),
    "a judge": (
        [
            "environment.rewards=[{{name: a, fn: judge, options: {{url: 'http://127.0.0.1:9/v1', model: m}}}}, "
            "{{name: b, fn: '{rewards}:misspelled'}}]"
        ],
        "environment.rewards: b raised AttributeError",
    ),
    "tools": (
        [
            "environment.reward={rewards}:misspelled",
            "environment.tools=['{rewards}:double']",
            "generator.tool_parser=hermes",
            "model.tiny.chat=true",
        ],
        "environment.reward = {rewards}:misspelled raised AttributeError",
    ),
    "a held-out set": (
        ["environment.reward=exact_match", "eval.sets={{hard: {{environment: {{reward: '{rewards}:misspelled'}}}}}}"],
        "error: eval.sets.hard: environment.reward = {rewards}:misspelled raised AttributeError",
    ),
}


@pytest.mark.parametrize("kind", BESIDE_OTHERS)
def test_an_own_reward_is_called_beside_other_settings_too(kind: str) -> None:
    overrides, words = BESIDE_OTHERS[kind]
    code, output = check(*(override.format(**OWN) for override in overrides))
    assert code == 2, output
    assert words.format(**OWN) in output
    assert line_of("anwser") in output


def test_all_failures_are_shown_at_once() -> None:
    code, output = check(
        "environment.reward={rewards}:misspelled".format(**OWN),
        "algorithm.loss={learning}:Unknown".format(**OWN),
        "algorithm.advantage={learning}:one_less".format(**OWN),
        "algorithm.overrides={}",
    )
    assert code == 2
    assert len([line for line in output.splitlines() if line.startswith("error:")]) == 3, output


def test_the_summary_says_what_will_run() -> None:
    code, output = check("learner.total_steps=37", "staleness.max_versions=3", "learner.group_size=4")
    assert code == 0, output
    lines = output.splitlines()
    first = lines.index("ok") + 1
    assert lines[first].startswith(f"  trains models/tiny-speller on {OWN['rewards']}:rows: 37 steps of ")
    assert "prompts × 4 completions" in lines[first]
    assert "at most 3 steps old" in lines[first + 1]
    assert lines[first + 2].endswith("is written to runs/quickstart")
