"""Calls of the user's own code by `asyncrl config check`: rewards on a row, advantages and loss on a small batch.

A misspelled attribute, a column that does not exist, or a result of a wrong shape would otherwise end the run after the
engines have started.
"""

import os
from collections.abc import Iterator
from functools import partial

import torch

from asyncrl.algorithms.advantages import Samples, compute_advantages, resolve_estimator
from asyncrl.algorithms.baselines import reward_kl
from asyncrl.algorithms.diagnostics import MetricSums
from asyncrl.algorithms.interfaces import LossInputType, input_type_of, of_outputs
from asyncrl.algorithms.loss import build_loss
from asyncrl.algorithms.presets import advantage_of
from asyncrl.cli.terminal import say
from asyncrl.config.import_path import is_import_path
from asyncrl.config.schema import Config, EnvironmentSection
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.prompts import Task
from asyncrl.data.specs import GENERATED_FIELDS
from asyncrl.environments.scoring_messages import Group
from asyncrl.environments.scoring_process import started
from asyncrl.environments.secrets import read_secrets
from asyncrl.errors import AsyncRLError, CallRefused, ConfigError, DataError
from asyncrl.policy.step_loss import with_statistics
from asyncrl.ranks.loss_pass import outcome_of
from asyncrl.ranks.plan import CURRENT, PlannedUpdate, plan_of, required_columns

_TOKENS, _VOCABULARY = 6, 11
"""Width of a row and size of the vocabulary in the small batch."""


def own_rewards(section: EnvironmentSection) -> EnvironmentSection | None:
    """Returns a copy of the section that has only the rewards that are the user's own functions, and no tools. Returns
    None if there is no such reward, or if an agent returns the reward. The judge and other built-in rewards are left
    out, because they may send requests."""
    own = [term for term in section.rewards if _is_own(term.fn)]
    named = section.reward or section.name
    if section.agent is not None or not (own if section.rewards else _is_own(named)):
        return None
    return section.model_copy(update={"rewards": own, "tools": [], "mcp_servers": []})


def _is_own(name: str) -> bool:
    return is_import_path(name) and not name.startswith("asyncrl.")


def call_reward(section: EnvironmentSection, task: Task) -> None:
    """Calls the user's reward in a scoring process, with the task's own answer as the completion. Raises ConfigError if
    the reward fails. Calls nothing if the user's environment turns out to run agents."""
    with started(section, secrets=read_secrets(section, os.environ), output=partial(say, err=True)) as process:
        if process.form.agent:
            return
        [result] = process.score([Group(task=task, completions=(task.answer,))])
    failed = result if isinstance(result, DataError) else result[0]
    if isinstance(failed, DataError):
        row = f"row {task.row}" if task.row else "the first task"
        raise ConfigError(f"{failed}. It was called with {row} and the answer {task.answer[:60]!r} as the completion")


def call_advantage(config: Config) -> None:
    """Computes the advantages of two groups with unequal rewards. Raises ConfigError if the estimator fails, or if its
    result is not one finite number for each sample."""
    size = config.learner.group_size
    rewards_N = (torch.arange(2 * size) % 2).float()
    names = [term.name for term in config.environment.rewards]
    samples = Samples(
        rewards_N=rewards_N,
        group_ids_N=torch.arange(2).repeat_interleave(size),
        completion_tokens_N=torch.arange(1, 2 * size + 1),
        components=dict.fromkeys(names, rewards_N) or None,
    )
    try:
        compute_advantages(resolve_estimator(advantage_of(config.algorithm)), samples)
    except AsyncRLError as error:
        raise ConfigError(f"{error}. It was called with two groups of {size} samples with rewards 0 and 1") from error


def call_loss(config: Config) -> None:
    """Calls the loss with two rows of random numbers. Raises ConfigError if it reads a column that a run does not have,
    if it fails, or if it ignores the token mask."""
    loss, named = build_loss(config), f"algorithm.loss = {config.algorithm.loss_name}"
    known = set(run_columns(config))
    try:
        needed = required_columns(loss, updates=config.learner.updates_per_step)
    except TypeError as error:
        raise ConfigError(f"{named}: {error}") from error
    if missing := sorted(needed - known):
        raise ConfigError(
            f"{named}: the loss reads the columns {', '.join(missing)}, which the rows of this run do not have; it can "
            f"read {', '.join(sorted(known))}"
        )
    # The rows of a run have the columns `rewards` and `group_ids` only if the loss names them.
    unread = {"rewards", "group_ids"} - needed
    data = BatchedDataDict({name: rows for name, rows in _small_batch().items() if name in known - unread})
    counts = {"global_valid_seqs": torch.tensor(2.0), "global_valid_toks": torch.tensor(6.0)}
    generator = torch.Generator().manual_seed(0)
    outputs = {"next_token_logits": torch.randn(2, _TOKENS, _VOCABULARY, generator=generator)}
    if input_type_of(loss) == LossInputType.LOGPROB:
        outputs = {"next_token_logprobs": -torch.rand(2, _TOKENS - 1, generator=generator)}
    slopes: dict[str, torch.Tensor] = {}

    def measure(found: dict[str, torch.Tensor]) -> MetricSums:
        slopes.update(found)
        return MetricSums()

    try:
        loss = with_statistics(loss, [PlannedUpdate(plan_of(data), [data])], reduce=lambda sums: sums)
    except CallRefused as error:
        raise ConfigError(f"{named}: {error}. It was called with a batch of two rows") from error
    called = of_outputs(loss, outputs, data, counts)
    if (failure := outcome_of(outputs, called, measure=measure).failure) is not None:
        raise ConfigError(f"{named}: {failure}. It was called with a batch of two rows")
    if largest := max(_outside_of_masks(slope, data["token_mask"]) for slope in slopes.values()):
        raise ConfigError(
            f"{named}: its derivative by a token that token_mask leaves out is {largest:.3g}, but must be 0; multiply, "
            "for example, by data['token_mask'][:, 1:]. It was called with a batch of two rows"
        )


def _outside_of_masks(slope: torch.Tensor, mask_BS: torch.Tensor) -> float:
    """Returns the largest absolute value in `slope`, the derivative of a loss by the log-probs [B, S − 1] or the logits
    [B, S, V] of the next tokens, at a token that `mask_BS` leaves out."""
    size = slope.abs() if slope.ndim == 2 else slope.abs().amax(dim=-1)
    inside = torch.zeros_like(size, dtype=torch.bool)
    inside[:, : mask_BS.shape[1] - 1] = mask_BS[:, 1:] > 0
    return float(size.masked_fill(inside, 0.0).max())


def run_columns(config: Config) -> Iterator[str]:
    """Yields the names of the columns that the rows of a run can have when its loss is called."""
    yield from (*GENERATED_FIELDS, *config.extra_columns, "sample_mask", "advantages", "rewards", "group_ids", CURRENT)
    yield "staleness"
    if reward_kl(advantage_of(config.algorithm)) is not None:
        yield "reference_policy_logprobs"


def _small_batch() -> dict[str, torch.Tensor]:
    """Returns two rows with three prompt tokens and three sampled ones. The second row is one token shorter."""
    generator = torch.Generator().manual_seed(1)
    mask_BS = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 0]]).float()

    def logprobs_BS() -> torch.Tensor:
        return -torch.rand(2, _TOKENS, generator=generator) * mask_BS

    return {
        "input_ids": torch.randint(_VOCABULARY, (2, _TOKENS), generator=generator),
        "input_lengths": torch.tensor([6, 5]),
        "token_mask": mask_BS,
        "sample_mask": torch.ones(2),
        "generation_logprobs": logprobs_BS(),
        "prev_logprobs": logprobs_BS(),
        "reference_policy_logprobs": logprobs_BS(),
        "weight_versions": torch.where(mask_BS > 0, 0, -1),
        "staleness": torch.zeros_like(mask_BS),
        "advantages": torch.tensor([[1.0], [-1.0]]) * mask_BS,
        "rewards": torch.tensor([1.0, 0.0]),
        "group_ids": torch.zeros(2, dtype=torch.int64),
        "branch_ids": torch.zeros(2, _TOKENS, dtype=torch.int64),
        "support_ids": torch.zeros(2, _TOKENS, 1, dtype=torch.int32),
        "top_ids": torch.zeros(2, _TOKENS, 2, dtype=torch.int32) + torch.arange(2, dtype=torch.int32),
        "top_logprobs": torch.full((2, _TOKENS, 2), -1.0),
    }
