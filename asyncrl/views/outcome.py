"""Makes the last lines of a run: its totals, its weights, and the command that continues the training."""

import itertools
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from asyncrl.config.named_code import named_code
from asyncrl.config.schema import HELDOUT, Config
from asyncrl.learner.records import EvalRecord, Summary
from asyncrl.views.health_finds import by_reason
from asyncrl.views.quantities import held_out, held_out_numbers
from asyncrl.views.short_values import LONGEST_NAME


def totals_lines(summary: Summary, *, total_steps: int) -> Iterator[str]:
    """Yields lines about the end of a run: why it stopped early, the held-out rewards, the steps, staleness and dropped
    groups, the effective training time, what the witness found, restarts, and tokens of attempts that ended."""
    if summary.stop_reason is not None:
        yield f"{summary.stop_reason[:1].upper()}{summary.stop_reason[1:]}."
    elif summary.steps < total_steps:
        yield f"Stopped at step {summary.steps} of {total_steps}."
    for name, ends in summary.heldout_ends().items():
        if ends.first is not None:
            got = f", {ends.prompts} of {ends.prompts + ends.failed} prompts" if ends.failed else ""
            of_set = "" if name == HELDOUT else f" of {name}"
            newest = ends.newest_step
            older = (
                "" if newest in (None, summary.steps) else f"; the weights of step {summary.steps} were not evaluated"
            )
            yield f"held-out reward{of_set} {held_out(ends)}{got}{older}"
            if numbers := held_out_numbers(ends):
                yield f"{numbers}{of_set and f' ({name})'}"
    age = summary.max_token_staleness
    yield (
        f"{summary.steps} steps in {summary.wall_s:.0f} s, oldest trained token {age} version{'s' * (age != 1)} old "
        f"(limit {summary.staleness_limit}), {dropped_in_words(summary)}"
    )
    if summary.effective_training_time_ratio is not None:
        yield (
            f"effective training time: {summary.effective_training_time_ratio:.0%} of the time since the first start "
            "of the run"
        )
    if summary.witness_failures:
        yield (
            "NOT verified: the witness found that updates are not those that the configuration describes (number of "
            f"steps: {summary.witness_failures}). The errors in the learner's log say what differs"
        )
    elif summary.witnessed_steps:
        yield (
            f"verified: the witness computed a group a second time (number of steps: {summary.witnessed_steps}), and "
            "agrees"
        )
    if summary.restarts:
        again = f"{summary.lost_steps} steps were lost and trained again" if summary.lost_steps else "no step was lost"
        yield f"resumed {summary.restarts} time{'s' * (summary.restarts > 1)}, {again}"
    if summary.tokens_continued or summary.tokens_dropped:
        yield (
            f"{summary.tokens_continued} stored tokens of replicas that ended were continued, "
            f"{summary.tokens_dropped} dropped"
        )
    if summary.tokens_thrown_away:
        yield f"{summary.tokens_thrown_away} tokens of attempts that began again or failed were thrown away"


def dropped_in_words(summary: Summary) -> str:
    """Returns how many groups were dropped, the reasons, and whether the ledger accounts for all groups."""
    failed = sum(summary.groups_failed.values())
    others = summary.groups_discarded - failed
    parts = []
    if failed:
        of_reward = all(reason.startswith("reward_") for reason in summary.groups_failed)
        what = "the reward" if of_reward else "their rollouts"
        parts.append(f"{failed} groups were dropped because {what} failed ({by_reason(summary.groups_failed)})")
    if others:
        parts.append(f"{others} {'other ' if failed else ''}groups were dropped")
    words = " and ".join(parts) or "no group was dropped"
    closed = (
        "all groups are accounted for"
        if summary.ledger_closed
        else "NOT all groups are accounted for, which is a bug in asyncrl"
    )
    return f"{words}; {closed}"


def weights_lines(weights: Path, *, config: Config) -> list[str]:
    """Returns lines that say where the newest weights of a run are, and how to use them."""
    if config.model.lora is not None:
        run = config.run.dir / config.run.name
        return [
            f"adapter: {weights}",
            f"  use it: {_command(['export', str(run), f'{config.run.name}-model', '--merge'], pythonpath=None)}",
            f'      or  peft.AutoPeftModelForCausalLM.from_pretrained("{weights}")',
        ]
    return [
        f"weights: {weights}",
        f"  use them: vllm serve {weights}",
        f'       or   transformers.AutoModelForCausalLM.from_pretrained("{weights}")',
    ]


def best_line(checkpoint: Path, record: EvalRecord) -> str:
    """Returns the line that names the checkpoint with the highest held-out reward.

    >>> best_line(Path("checkpoints/step-20"), EvalRecord(version=22, due=20, wall_s=9, prompts=8, reward_mean=0.5))
    'best checkpoint: checkpoints/step-20 (held-out reward 0.500 at step 22)'
    """
    error = "" if record.reward_stderr is None else f" ± {record.reward_stderr:.3f}"
    return f"best checkpoint: {checkpoint} (held-out reward {record.reward_mean:.3f}{error} at step {record.version})"


def lines_to_go_on(
    weights: Path, *, finished: bool, config: Config, again: Sequence[str], pythonpath: str | None = None
) -> list[str]:
    """Returns lines with the command that resumes the run, or, if it has finished, continues training in a new run. An
    adapter is trained further in the same run, because a new run would begin with a new adapter.

    `again` is the command that started the run, without `asyncrl`. `pythonpath` is the value of PYTHONPATH if the run
    needs it for the user's code.
    """
    if not finished:
        return [f"resume the run: {_command(again, pythonpath=pythonpath)}"]
    if config.model.lora is not None:
        more = [
            "resume",
            str(config.run.dir / config.run.name),
            *(["--trust"] if named_code(config) else []),
            f"learner.total_steps={2 * config.learner.total_steps}",
        ]
        return [f"train it further: {_command(more, pythonpath=pythonpath)}"]
    return [
        "  continue training from them in a new run, with a new optimizer and step count:",
        f"    {command_to_go_on(again, config=config, weights=weights, pythonpath=pythonpath)}",
    ]


def command_to_go_on(again: Sequence[str], *, config: Config, weights: Path, pythonpath: str | None = None) -> str:
    """Returns the command that continues training from `weights` in a new run.

    `again` is the command that started the run, without `asyncrl`. The new command has the same options, and another
    name and mirror of the run. `pythonpath` is the PYTHONPATH that the command needs, if it needs one.

    >>> config = Config.model_validate({"run": {"name": "live"}, "model": {"tiny": {}}})
    >>> again = ["up", "-c", "my tasks.yaml", "run.name=live", "model.tiny.warmup_steps=3", "run.seed=7"]
    >>> command_to_go_on(again, config=config, weights=Path("runs/live/step-9/hf"))
    "asyncrl up -c 'my tasks.yaml' run.seed=7 run.name=live-part2 model.path=runs/live/step-9/hf model.tiny=null"
    """
    replaced = ("run.name=", "run.mirror=", "model.path=", "model.tiny=", "model.tiny.")
    name, end = _next_name(config)
    changed = [f"run.name={name}"]
    if (mirror := config.run.mirror) is not None:  # a mirror takes one run only
        changed.append(f"run.mirror={_PART.sub('', mirror.rstrip('/'))}{end}")
    changed.append(f"model.path={weights}")
    if config.model.tiny is not None:
        changed.append("model.tiny=null")
    return _command([*(word for word in again if not word.startswith(replaced)), *changed], pythonpath=pythonpath)


def _command(words: Sequence[str], *, pythonpath: str | None) -> str:
    variables = f"PYTHONPATH={shlex.quote(pythonpath)} " if pythonpath else ""
    return variables + shlex.join(["asyncrl", *words])


_PART = re.compile(r"-part(\d+)$")
"""The end of the name of a run that continues another one."""


def _next_name(config: Config) -> tuple[str, str]:
    """Returns a name for the run that continues this one, and the end of this name: the next `-part2`, `-part3` … for
    which there is no directory. Another number in the name, such as the seed in the name of a sweep's run, stays: the
    name with the next number may be that of another run, also of one that starts later."""
    stem, part = _PART.sub("", config.run.name), _PART.search(config.run.name)
    for each in itertools.count(int(part[1]) + 1 if part else 2):
        end = f"-part{each}"
        name = stem[: LONGEST_NAME - len(end)] + end
        if not (config.run.dir / name).exists():
            return name, end
    raise AssertionError("unreachable: the count has no end")
