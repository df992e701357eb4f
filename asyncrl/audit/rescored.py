"""Computes the rewards of some samples again, for check 6 of the audit: from the texts that the run kept in `samples/`,
by the reward that the configuration names."""

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from asyncrl.audit.history import History, NotPossible
from asyncrl.audit.kept_batches import changed_settings
from asyncrl.config.named_code import untrusted
from asyncrl.config.parts import part_configs
from asyncrl.config.schema import Config
from asyncrl.data.prompts import Task
from asyncrl.environments.scores import Score
from asyncrl.environments.scoring_messages import Components, Group
from asyncrl.environments.scoring_process import started
from asyncrl.environments.secrets import read_secrets
from asyncrl.errors import AsyncRLError, DataError
from asyncrl.learner.audit_records import TrainedGroup
from asyncrl.learner.records import SampleRecord, read_lines

MOST_GROUPS = 64
"""Largest number of groups that are scored again. They are spread over the run."""


def reward_differences(history: History, config: Config) -> Iterator[tuple[float | None, str]]:
    """Scores the samples of at most `MOST_GROUPS` groups again. Yields for each of them the difference of the reward
    from the recorded one, and in words which reward it is. The difference is None if a reward fails now, or failed in
    the run, but not both, because the machines may differ in speed and memory.

    Raises NotPossible with the reason if the rewards cannot be computed from the texts in `samples/`, if a restart
    changed their settings, or if they are those of the user's own code, of a judge or of another server, which may give
    another number each time.
    """
    if untrusted(config, sections=("environment", "data")):
        raise NotPossible("the configuration names code, programs or servers for the rewards")
    for key, *_ in changed_settings(history, ("environment.", "data.")):  # the values may be private: not shown
        raise NotPossible(f"{key} was changed when the run was resumed")
    parts = part_configs(config)
    if any(part.environment.agent is not None or part.environment.has_tools for part in parts.values()):
        raise NotPossible("the rewards are those of episodes with several turns")
    found = list(_logged_groups(history))
    if not found:
        raise NotPossible("the run did not keep all texts of any group in samples/ (learner.groups_logged)")
    chosen = found
    if len(found) > MOST_GROUPS:
        chosen = [found[place * len(found) // MOST_GROUPS] for place in range(MOST_GROUPS)]
    by_part: dict[str, list[tuple[int, TrainedGroup, Sequence[SampleRecord]]]] = defaultdict(list)
    for each in chosen:
        by_part[each[2][0].part].append(each)
    for name, groups in by_part.items():
        if name not in parts:
            raise NotPossible(f"samples/ names the part {name!r}, but data.mixture has no such part")
        yield from _of_part(parts[name], groups)


def _logged_groups(history: History) -> Iterator[tuple[int, TrainedGroup, Sequence[SampleRecord]]]:
    """Yields each group of which all texts are kept: its step, its record and its texts. Raises NotPossible for prompts
    in a chat template, because a reward may read how the template begins the answer, which is not recorded."""
    for step in history.steps:
        texts: Mapping[int, list[SampleRecord]] = defaultdict(list)
        path = history.directory / "samples" / f"step-{step.step}.jsonl"
        for record in read_lines(path, SampleRecord, inside=history.directory):
            if not record.rendered_prompt.endswith(record.prompt):
                raise NotPossible("the prompts have a chat template, and how it begins an answer is not recorded")
            texts[record.group].append(record)
        for group in step.groups:
            if len(own := texts.get(group.group, [])) == len(group.samples):
                yield step.step, group, own


def _of_part(
    config: Config, groups: Sequence[tuple[int, TrainedGroup, Sequence[SampleRecord]]]
) -> Iterator[tuple[float | None, str]]:
    section = config.environment
    try:
        secrets = read_secrets(section, os.environ)
        with started(section, secrets=secrets, output=lambda text: None) as process:
            if process.form.agent:
                raise NotPossible("the rewards are those of episodes with several turns")
            for step, group, records in groups:
                first = records[0]
                task = Task(
                    question=first.prompt, prompt=first.prompt, answer=first.answer, metadata=first.metadata,
                    row=first.row, part=first.part,
                )  # fmt: skip
                [scores] = process.score([Group(task=task, completions=tuple(each.completion for each in records))])
                if not isinstance(scores, list):
                    raise NotPossible(str(scores))
                for place, (sample, score) in enumerate(zip(group.samples, scores, strict=True)):
                    again = _reward(score)
                    where = f"sample {place} of group {group.group} in step {step} has the reward {sample.reward}"
                    apart = _apart(sample.reward, again, on_error=section.on_error)
                    yield apart, f"{where}, and its text gets {again}"
    except NotPossible:
        raise
    except (AsyncRLError, OSError) as error:  # another user may not be able to start a process of this Python
        raise NotPossible(f"the rewards cannot be computed here: {error}") from error


def _reward(score: Score) -> float | None:
    """Returns the reward in a score; None if the reward failed."""
    if isinstance(score, DataError):
        return None
    return score.total if isinstance(score, Components) else score


def _apart(recorded: float | None, again: float | None, *, on_error: str) -> float | None:
    """Returns the difference between the recorded reward and the one that was computed again; None if one of them
    failed and the other did not. With `environment.on_error: zero` a failed reward was recorded as 0, so a recorded 0
    may be a failed one."""
    may_have_failed = recorded is None or (on_error == "zero" and recorded == 0)
    if again is None:
        return 0.0 if may_have_failed else None
    if recorded is None or (may_have_failed and again != recorded):
        return None
    return abs(recorded - again)
