"""Runs agents: opens a session for each sample of a group, lets the scorer run the agents, and takes the episodes."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from asyncrl.config.parts import all_configs
from asyncrl.config.schema import Config
from asyncrl.data.prompts import Task
from asyncrl.environments.scores import Score
from asyncrl.environments.scoring import PartScorers
from asyncrl.environments.scoring_messages import RewardFailure
from asyncrl.errors import DataError, InfraError, RolloutError
from asyncrl.generation.agent_progress import GroupProgress, SampleProgress
from asyncrl.generation.conversations import SessionSettings
from asyncrl.generation.episodes import AgentActivity, Attempt, Episode, Node, Origin, Played, of_branches
from asyncrl.generation.gateway import Answered, Asked, EndedSession
from asyncrl.generation.gateway_server import GatewayServer, RemoteGateway
from asyncrl.generation.interfaces import InferenceEngine
from asyncrl.generation.vllm_tools import ToolParser


@dataclass(kw_only=True)
class AgentRollouts:
    """Runs the agents of a replica. Its method `sample` answers the calls of the `gateway`.

    Raises ConfigError for an unusable `generator.tool_parser`.
    """

    config: Config
    gateway: GatewayServer | RemoteGateway
    engine: InferenceEngine
    scorer: PartScorers
    tokenizer: Any

    def __post_init__(self) -> None:
        parser = self.config.generator.tool_parser
        self._tools = ToolParser(parser, self.tokenizer) if parser else None
        self._filler: int = self.tokenizer.eos_token_id
        self._calls: dict[str, SampleProgress] = {}

    async def run(self, task: Task, *, samples: int, seed: int | None, temperature: float, attempt: Attempt) -> Played:
        """Runs the agent of a task once for each sample. A call that has an answer in the prefix of the attempt, which
        an earlier one has stored, gets that answer.

        A sample fails if its agent makes no call, or ends without a result at a limit. An agent that goes back and
        continues an earlier part of its conversation in another way makes a branch of its episode.

        Raises InfraError if the engine or the gateway failed.
        """
        environment = all_configs(self.config)[task.part].environment
        began_s = time.monotonic()
        sessions = await self.gateway.open(
            [
                SessionSettings(
                    seed=seed,
                    child=child,
                    temperature=temperature,
                    max_calls=environment.max_turns,
                    max_branches=environment.branches,
                    max_length=self.config.model.max_length,
                    answer_tokens=self.config.generator.max_completion_tokens,
                )
                for child in range(samples)
            ]
        )
        ids = [id for id, _ in sessions]
        group = GroupProgress(samples, attempt)
        self._calls |= dict(zip(ids, group.samples, strict=True))
        try:
            given = [msgspec.json.encode(session).decode() for _, session in sessions]
            scores = await self.scorer.score(task, given)
        finally:
            for id in ids:
                del self._calls[id]
            ended = await self.gateway.close(ids)
        for session in ended:
            if isinstance(session.error, RolloutError):
                raise session.error
            if session.error is not None:
                raise InfraError(f"a call of an agent failed: {session.error}", reason="gateway")
        attempt.on_generated()
        waited_s = max(sample.waited_s for sample in group.samples)
        episodes = [self._episode(session) for session in ended]
        return Played(
            episodes=episodes,
            scores=[_judged(*each) for each in zip(scores, ended, episodes, strict=True)],
            environment_s=max(0.0, time.monotonic() - began_s - waited_s),
            activity=_activity(ended, episodes),
            tool_failures=tuple(failure for session in ended for failure in session.tool_failures),
            continued_tokens=group.continued_tokens,
        )

    def session_ages_s(self) -> list[float]:
        """Returns the ages of all open sessions, seconds."""
        now_s = time.monotonic()
        return [now_s - calls.opened_s for calls in self._calls.values()]

    async def sample(self, asked: Asked) -> Answered:
        """Answers a call of a session."""
        calls = self._calls.get(asked.session)
        if calls is None:
            raise InfraError("the session has ended", reason="gateway")
        with calls.answering(asked) as turn:
            [completion] = await self.engine.generate(
                asked.token_ids,
                n=1,
                seed=asked.seed,
                temperature=asked.temperature,
                max_tokens=asked.max_tokens,
                stop=asked.stop,
                prefix=turn.prefix,
                on_progress=turn.progressed,
            )
            turn.answered(completion)
        if asked.tools and self._tools is not None:
            return completion, self._tools.message(completion.token_ids, tools=asked.tools, prompt=asked.token_ids)
        return completion, {"role": "assistant", "content": completion.text}

    def _episode(self, session: EndedSession) -> Episode:
        if session.episodes:
            return of_branches(session.episodes)
        nothing = Node(origin=Origin.ENVIRONMENT, token_ids=[self._filler])
        return Episode(nodes=(nothing,), text="", truncated=False)


def _activity(sessions: Sequence[EndedSession], episodes: Sequence[Episode]) -> AgentActivity:
    tokens: Counter[str] = Counter()
    for node in (node for episode in episodes for node in episode.nodes):
        tokens[node.origin] += len(node.token_ids)
    return AgentActivity(
        turns=[session.calls for session in sessions],
        tool_calls=sum(session.tool_calls for session in sessions),
        tool_seconds=[seconds for session in sessions for seconds in session.tool_seconds],
        forks=dict(sum((session.forks for session in sessions), Counter[str]())),
        tokens=dict(tokens),
    )


def _judged(score: Score, session: EndedSession, episode: Episode) -> Score:
    """Returns the score of a sample, or why it fails. The completion of the error is the text of the episode: the
    scorer knows only the session, whose key must not be logged."""
    if not session.calls:
        message = f"the agent made no call to the model{f': {score}' if isinstance(score, DataError) else ''}"
        return DataError(message, reason=RewardFailure.NO_CALL)
    if not session.episodes and not isinstance(score, DataError):
        why = session.limit or "all of its calls were refused"
        reason = RewardFailure.LIMIT if session.limit else RewardFailure.NO_CALL
        return DataError(f"the model answered no call of the agent ({why})", reason=reason)
    if isinstance(score, DataError):
        if session.limit:
            told = str(score) if session.limit in str(score) else f"{score} ({session.limit})"
            return DataError(told, reason=RewardFailure.LIMIT, completion=episode.text)
        return DataError(str(score), reason=score.reason, completion=episode.text, error=score.error)
    return score
