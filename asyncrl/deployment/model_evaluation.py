"""Evaluates one model on held-out prompts, without a run and without Ray: this process starts the engine and the
scoring processes.

Prompts, rollouts and rewards are those of a run. Each sample has its own seed, which follows from `run.seed`, so that
the same command gives the same answers.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl.buffer.records import Failure
from asyncrl.common.version import Version
from asyncrl.config.parts import all_configs
from asyncrl.config.schema import HELDOUT, Config
from asyncrl.data.prompts import Task
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.deployment.inputs import fitting_prompts, read_prompts
from asyncrl.environments.scoring import PartScorers
from asyncrl.environments.secrets import read_secrets, warn_of_short
from asyncrl.errors import DatasetError, InfraError, RunError
from asyncrl.generation.evaluation import answers_of, mean_numbers, prompts_at_once
from asyncrl.generation.rollout import HeldoutAnswer, Rollouts
from asyncrl.generation.vllm_engine import VLLMEngine
from asyncrl.learner.records import mean_and_error, pass_at

if TYPE_CHECKING:
    from asyncrl.gateway.agent_rollouts import AgentRollouts

LOADED = Version(1, 0)
"""Version under which the engine records the evaluated weights. There is no run, so no learner has numbered them."""

ANSWERS_SHOWN = 3
"""Prompts whose answers are printed when all rewards of a set are 0."""
TEXT_SHOWN = 400
"""Characters of a printed prompt or answer. A longer one is printed with its beginning and its end."""


class AnsweredPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A held-out prompt with its completions, their rewards, and the components of the rewards. If its rollout failed,
    `failure` says why, and there are no rewards."""

    prompt: str
    answer: str
    completions: tuple[str, ...] = ()
    rewards: tuple[float, ...] = ()
    components: tuple[dict[str, float], ...] = ()
    failure: str | None = None


class SetResult(msgspec.Struct, frozen=True, kw_only=True):
    """The evaluation of a model on one held-out set.

    `prompts` is the number of prompts with a reward, `failed` that of the others. `reward_mean` is the mean over the
    prompts with a reward, and `reward_stderr` its standard error over these prompts. `temperature` is 0 for greedy
    completions. `non_greedy_tokens` is the number of tokens of greedy completions that are not the most probable ones.
    It must be 0, and is None for several samples of a prompt.
    `pass_at` has the mean pass@k by k; a completion passes with a reward of at least `pass_reward`. `components` has
    the mean of each component of the reward, without its weight. `completion_tokens_mean`, `truncated_ratio` and
    `turns_mean` are as in `EvalRecord`.
    """

    name: str
    prompts: int
    failed: int
    samples: int
    temperature: float
    non_greedy_tokens: int | None = None
    reward_mean: float | None
    reward_stderr: float | None
    pass_reward: float
    pass_at: dict[int, float]
    components: dict[str, float]
    completion_tokens_mean: float
    truncated_ratio: float
    turns_mean: float | None = None
    answers: list[AnsweredPrompt]


async def evaluate_model(
    config: Config, *, report: Callable[[str], None], reward_output: Callable[[str], None]
) -> list[SetResult]:
    """Evaluates the model in the directory or with the Hub's name `model.path`. Call `prepare_environment` first.

    `report` gets a line about each set before its evaluation, and `reward_output` the lines that reward code prints.
    Raises DatasetError if there are no held-out prompts, and RunError if no prompt of a set got a reward.
    """
    config = config.model_copy(update={"generator": config.generator.model_copy(update={"seeded": True})})
    path, secrets = config.model.path, read_secrets(config.environment, os.environ)
    warn_of_short(secrets)
    tasks = heldout_tasks(config)
    how = config.eval.each_set()
    async with AsyncExitStack() as started:
        scorer = PartScorers(all_configs(config), secrets=secrets, output=reward_output)
        started.push_async_callback(scorer.close)
        scorer_started = asyncio.create_task(scorer.start())
        await asyncio.sleep(0)  # lets the scorer start its processes before the engine's start blocks the event loop
        tokenizer = load_tokenizer(path, chat=config.data.chat, chat_options=config.data.chat_options)
        engine = await VLLMEngine.start(config, model_path=path, name="eval")
        started.push_async_callback(engine.shutdown)
        await engine.weights.name(LOADED)
        await scorer_started
        agents = await _with_agents(config, engine=engine, scorer=scorer, tokenizer=tokenizer, started=started)
        rollouts = Rollouts(
            config=config, engine=engine, tokenizer=tokenizer, scorer=scorer, replica="eval", agents=agents
        )
        results = []
        for name, of_set in tasks.items():
            report(f"{name}: {len(of_set)} prompts, {samples_in_words(how[name].samples)} each")
            results.append(await evaluate_set(name, of_set, rollouts=rollouts, config=config))
        return results


async def _with_agents(
    config: Config, *, engine: VLLMEngine, scorer: PartScorers, tokenizer: Any, started: AsyncExitStack
) -> "AgentRollouts | None":
    """Starts a gateway in this process if the configuration has agents."""
    if not scorer.any_agent:
        return None
    from asyncrl.gateway.agent_rollouts import AgentRollouts
    from asyncrl.gateway.rendering import Renderer
    from asyncrl.gateway.server import GatewayServer

    renderer = Renderer(tokenizer, control_tokens=config.data.control_tokens)
    server = GatewayServer(config=config, renderer=renderer, sample=lambda asked: agents.sample(asked))
    agents = AgentRollouts(config=config, gateway=server, engine=engine, scorer=scorer, tokenizer=tokenizer)
    await server.start()
    started.push_async_callback(server.shutdown)
    return agents


def heldout_tasks(config: Config) -> dict[str, Sequence[Task]]:
    """Returns the first prompts of each held-out set by its name, as a run evaluates them. Raises DatasetError if there
    are none."""
    read = read_prompts(config)._replace(train=())
    fitting = fitting_prompts(read, config=config, model=config.model.path)
    of_sets = {HELDOUT: fitting.heldout, **fitting.sets}
    found = {name: of_sets[name][: how.prompts] for name, how in config.eval.each_set().items()}
    if not any(found.values()):
        raise DatasetError("no question is held out; raise data.heldout_fraction, or add a set to eval.sets")
    return {name: tasks for name, tasks in found.items() if tasks}


async def evaluate_set(name: str, tasks: Sequence[Task], *, rollouts: Rollouts, config: Config) -> SetResult:
    """Evaluates the weights of an engine on `tasks`. Raises RunError if no prompt got a reward.

    A prompt fails if its rollout takes longer than `generator.rollout_timeout_s`.
    """
    how, timeout_s = config.eval.each_set()[name], config.generator.rollout_timeout_s

    async def answer(number: int, task: Task) -> list[HeldoutAnswer]:
        try:
            async with asyncio.timeout(timeout_s):
                return await rollouts.answers(task, how, number=number)
        except TimeoutError:
            raise InfraError(
                f"the rollout took longer than generator.rollout_timeout_s = {timeout_s:g} s", reason="timeout"
            ) from None

    async def nowhere(failure: Failure) -> None:
        """Does nothing with a failure, because the answers that `answers_of` returns contain it."""

    slots = config.generator.max_concurrent_groups * config.learner.group_size
    at_once = prompts_at_once(slots, share=1.0, samples=how.samples)
    found = await answers_of(tasks, answer, at_once=at_once, report=nowhere)
    failures = [each for each in found if isinstance(each, Failure)]
    answers = [each for each in found if not isinstance(each, Failure)]
    if not answers:
        cause = f". The first cause: {failures[0].words}" if failures else ", because it has no prompts"
        raise RunError(f"no prompt of {name} got a reward{cause}")
    rewards = [[sample.reward for sample in each] for each in answers]
    reward_mean, error = mean_and_error(rewards)
    numbers = mean_numbers([sample.numbers for each in answers for sample in each])
    assert numbers is not None, "each answer has at least one completion"
    counts = [each[0].non_greedy_tokens for each in answers if each[0].non_greedy_tokens is not None]
    return SetResult(
        name=name,
        prompts=len(answers),
        failed=len(failures),
        samples=how.samples,
        temperature=how.temperature if how.samples > 1 else 0.0,
        non_greedy_tokens=sum(counts) if counts else None,
        reward_mean=reward_mean,
        reward_stderr=error,
        pass_reward=how.pass_reward,
        pass_at=pass_at(rewards, pass_reward=how.pass_reward),
        components=dict(numbers.components),
        completion_tokens_mean=numbers.completion_tokens,
        truncated_ratio=numbers.truncated,
        turns_mean=numbers.turns,
        answers=[_answered(task, each) for task, each in zip(tasks, found, strict=True)],
    )


def _answers_without_reward(result: SetResult) -> list[str]:
    """Returns lines with the first answers of a set whose rewards are all 0, because their text often shows why: the
    reward looks for something else, or the model does not know what to answer. Returns none for other sets."""
    answered = [each for each in result.answers if each.rewards]
    if not answered or any(reward for each in answered for reward in each.rewards):
        return []
    lines = ["  all rewards are 0; compare the first answers with what the reward looks for:"]
    for each in answered[:ANSWERS_SHOWN]:
        lines.append(f"    prompt: {_short(each.prompt)}")
        lines.append(f"      answer of the data: {_short(each.answer)}")
        lines.append(f"      the model's answer: {_short(each.completions[0])}")
    return lines


def _short(text: str) -> str:
    return repr(text if len(text) <= TEXT_SHOWN else f"{text[: TEXT_SHOWN // 2]} … {text[-TEXT_SHOWN // 2 :]}")


def samples_in_words(samples: int) -> str:
    """Returns the number of completions of a prompt in words."""
    return "1 greedy completion" if samples == 1 else f"{samples} completions"


def result_lines(result: SetResult) -> list[str]:
    """Returns the lines that show a result.

    >>> given = dict(samples=2, temperature=1.0, pass_reward=1.0, components={"right": 0.5, "short": 1.0}, answers=[])
    >>> numbers = dict(prompts=8, failed=1, reward_mean=0.5, reward_stderr=0.125, pass_at={1: 0.5, 2: 0.75})
    >>> numbers |= dict(completion_tokens_mean=20.25, truncated_ratio=0.125)
    >>> print(*result_lines(SetResult(name="heldout", **given, **numbers)), sep=chr(10))
    heldout: reward 0.500 ± 0.125 (8 of 9 prompts, 2 completions each at temperature 1)
      pass@1 0.500  pass@2 0.750  (a completion passes with a reward of at least 1)
      components of the reward: right 0.500  short 1.000
      a completion has 20.2 tokens on average; 12 % are cut at their length limit
    """
    asked = result.prompts + result.failed
    prompts = f"{result.prompts} of {asked} prompts" if result.failed else f"{asked} prompts"
    at = f" at temperature {result.temperature:g}" if result.samples > 1 else ""
    error = "" if result.reward_stderr is None else f" ± {result.reward_stderr:.3f}"
    samples = f"{samples_in_words(result.samples)} each{at}"
    lines = [f"{result.name}: reward {result.reward_mean:.3f}{error} ({prompts}, {samples})"]
    passes = "".join(f"pass@{k} {value:.3f}  " for k, value in result.pass_at.items())
    lines.append(f"  {passes}(a completion passes with a reward of at least {result.pass_reward:g})")
    if result.components:
        shown = "  ".join(f"{name} {value:.3f}" for name, value in result.components.items())
        lines.append(f"  components of the reward: {shown}")
    turns = "" if result.turns_mean is None else f" and {result.turns_mean:.2f} turns"
    lines.append(
        f"  a completion has {result.completion_tokens_mean:.1f} tokens{turns} on average; "
        f"{result.truncated_ratio * 100:.0f} % are cut at their length limit"
    )
    if result.non_greedy_tokens:
        lines.append(
            f"  not greedy: {result.non_greedy_tokens} tokens are not the most probable ones. It is a bug of asyncrl "
            "or of vLLM: report it"
        )
    return lines + _answers_without_reward(result)


def _answered(task: Task, found: list[HeldoutAnswer] | Failure) -> AnsweredPrompt:
    if isinstance(found, Failure):
        return AnsweredPrompt(prompt=task.prompt, answer=task.answer, failure=found.words)
    return AnsweredPrompt(
        prompt=task.prompt,
        answer=task.answer,
        completions=tuple(each.text for each in found),
        rewards=tuple(each.reward for each in found),
        components=tuple(dict(each.numbers.components) for each in found if each.numbers.components),
    )
