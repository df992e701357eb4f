"""Runs agents: opens a session for each sample of a group at the gateway, lets the scoring processes run the agents,
closes the sessions, and takes their episodes."""

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from asyncrl.gateway.conversations import SessionSettings
from asyncrl.gateway.gateway import Answered, Asked, EndedSession
from asyncrl.gateway.server import GatewayServer, RemoteGateway
from asyncrl.gateway.vllm_tools import ToolParser
from asyncrl.generation.episodes import AgentActivity, Attempt, Episode, Node, Origin, Played, of_branches
from asyncrl.generation.interfaces import NOTHING, Completion, InferenceEngine, PartialCompletion, Sampled
from asyncrl.generation.prefixes import hash_of, joined, turns_of

# Keeps what the agents of a group have sampled so far, and gives them the stored answers of an earlier attempt.
#
# If a replica dies, the agents of its groups begin again on another one, because their processes have ended. The stored
# answers of the earlier attempt are then given to the calls that ask for exactly the same: the same tokens, tools and
# limits. An answer that was not complete is continued. So an agent that does the same as before comes to the call at
# which the replica died, and its answers keep their log-probs and versions. If an agent makes other calls, their
# answers are sampled. Invariant: a stored answer is given at most once in a conversation.


@dataclass(eq=False, slots=True, kw_only=True)
class Turn:
    """A call of an agent of `group`, and its answer. `call` is the id of what the call asks for (`call_of`). `stored`
    is what an earlier attempt has stored of the answer. `asked` is True from the call on, unless the call fails, and
    `answer` is set when the answer is complete."""

    call: int
    group: "GroupProgress"
    stored: PartialCompletion = NOTHING
    asked: bool = False
    answer: Completion | None = None
    _sampled: Sampled | None = None

    @property
    def tokens(self) -> int:
        """The number of tokens of the answer so far."""
        if self._sampled is not None:
            return sum(self._sampled.lengths)
        return len((self.answer or self.stored).token_ids)

    @property
    def prefix(self) -> list[PartialCompletion]:
        """The stored beginning of the answer, which the engine continues; empty if nothing is stored."""
        return [self.stored] if self.stored.token_ids else []

    @property
    def continued_tokens(self) -> int:
        """The number of stored tokens in the complete answer. A stop string in them makes the answer shorter."""
        return 0 if self.answer is None else min(len(self.stored.token_ids), len(self.answer.token_ids))

    @property
    def non_greedy_tokens(self) -> int:
        """The number of tokens of the complete answer that were not the most probable ones, if they were counted."""
        return 0 if self.answer is None else self.answer.non_greedy_tokens or 0

    def progressed(self, sampled: Sampled) -> None:
        """Records what the engine has sampled of the answer so far."""
        self._sampled = sampled
        self.group.grown()

    def answered(self, completion: Completion) -> None:
        """Records the complete answer."""
        self.answer, self._sampled = completion, None
        self.group.grown()

    def failed(self) -> None:
        """Records that the engine gave no answer. The call may be made again."""
        self.asked, self._sampled = False, None

    def partial(self) -> list[PartialCompletion] | None:
        """Returns the answer as it is now; an empty list if it has no token yet. Returns None if the answer has ended
        and the engine has not reported it yet."""
        if self.answer is not None:
            return [self.answer]
        return self.prefix if self._sampled is None else self._sampled.partial()


class SampleProgress:
    """The turns of one sample, which are those that were stored and those that its agent asked for. `waited_s` is the
    time of its ended calls in the engine, seconds. `opened_s` (monotonic clock) is when its session was opened."""

    def __init__(self, stored: PartialCompletion, group: "GroupProgress") -> None:
        self._stored = stored
        self._group = group
        self._turns = self._given()
        self._begun = 0
        self.waited_s = 0.0
        self.opened_s = time.monotonic()

    @property
    def tokens(self) -> int:
        return sum(turn.tokens for turn in self._turns)

    @property
    def continued_tokens(self) -> int:
        """The number of stored tokens in the answers that the agent got."""
        return sum(turn.continued_tokens for turn in self._turns)

    @property
    def non_greedy_tokens(self) -> int:
        """The number of tokens in the answers that were not the most probable ones, if they were counted."""
        return sum(turn.non_greedy_tokens for turn in self._turns)

    def partial(self) -> PartialCompletion | None:
        """Returns a copy of the answers of all turns, also of stored ones that the agent has not asked for yet. Returns
        None if an answer has ended and the engine has not reported it yet."""
        turns: list[tuple[int, PartialCompletion]] = []
        for turn in self._turns:
            answer = turn.partial()
            if answer is None:
                return None
            turns += [(turn.call, each) for each in answer if each.token_ids]
        return joined(turns)

    @contextmanager
    def answering(self, asked: Asked) -> Iterator[Turn]:
        """Yields the turn of a call. The block lasts as long as the engine has the call. If it ends without an answer,
        the call may be made again.

        Raises InfraError if the agent has begun again since the call.
        """
        turn = self._turn(asked)
        began_s = time.monotonic()
        self._group.called(1)
        try:
            yield turn
        finally:
            if turn.answer is None:
                turn.failed()
                self._turns = [each for each in self._turns if each is not turn or turn.stored.token_ids]
            self._group.called(-1)
            self.waited_s += time.monotonic() - began_s

    def _turn(self, asked: Asked) -> Turn:
        if asked.begun < self._begun:
            raise InfraError("the agent has begun again since this call", reason="gateway")
        if asked.begun > self._begun:
            self._begun, self._turns = asked.begun, self._given()
        call = call_of(asked)
        turn = next((turn for turn in self._turns if turn.call == call and not turn.asked), None)
        if turn is None:
            turn = Turn(call=call, group=self._group)
            self._turns.append(turn)
        turn.asked = True
        return turn

    def _given(self) -> list[Turn]:
        """Makes a new turn for each stored answer. The agent has not asked for any of them yet."""
        return [Turn(call=call, group=self._group, stored=answer) for call, answer in turns_of(self._stored)]


class GroupProgress:
    """The tokens that the samples of a group have so far, with the stored ones of an earlier attempt. It implements the
    protocol `Sampled`, so these tokens can be stored like those of an engine's call."""

    def __init__(self, samples: int, attempt: Attempt) -> None:
        self._attempt = attempt
        self.greedy = attempt.greedy
        self._in_engine = 0
        self.samples = [SampleProgress(stored, self) for stored in attempt.prefix or [NOTHING] * samples]
        self.called(0)

    @property
    def lengths(self) -> list[int]:
        return [sample.tokens for sample in self.samples]

    @property
    def continued_tokens(self) -> int:
        return sum(sample.continued_tokens for sample in self.samples)

    @property
    def non_greedy_tokens(self) -> int | None:
        """The number of tokens that were not the most probable ones; None if the attempt is not `greedy`."""
        return sum(sample.non_greedy_tokens for sample in self.samples) if self.greedy else None

    def partial(self) -> list[PartialCompletion] | None:
        now = [sample.partial() for sample in self.samples]
        known = [each for each in now if each is not None]
        return known if len(known) == len(now) else None

    def called(self, more: int) -> None:
        """Records that the engine has `more` calls of the group than before (1 or −1), and tells the attempt whether
        the group only waits for its agents now."""
        self._in_engine += more
        self._attempt.on_environment(self._in_engine == 0)

    def grown(self) -> None:
        """Records that the number of tokens may have changed."""
        if self._attempt.on_progress is not None:
            self._attempt.on_progress(self)


def call_of(asked: Asked) -> int:
    """Returns an id of what a call asks for. Equal calls of different sessions have the same id."""
    what = msgspec.to_builtins(msgspec.structs.replace(asked, session="", begun=0, seed=None))
    # json, not msgspec: a schema of a tool may have integers beyond 64 bits
    return hash_of(json.dumps(what))


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
        """Runs the agent of a task once for each sample. The prefix of the attempt has answers that an earlier attempt
        has stored: a call that asks for the same as a stored call gets the stored answer.

        A sample fails if the model answered none of its calls, or if it has no score, for example because its agent
        stopped at a limit. An agent that goes back and continues an earlier part of its conversation in another way
        makes a branch of its episode.

        Raises InfraError if the engine or the gateway failed, and the errors of `Scorer.score`.
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
            non_greedy_tokens=group.non_greedy_tokens,
        )

    def session_ages_s(self) -> list[float]:
        """Returns the ages of all open sessions, seconds."""
        now_s = time.monotonic()
        return [now_s - calls.opened_s for calls in self._calls.values()]

    async def sample(self, asked: Asked) -> Answered:
        """Lets the engine answer a call of a session. Returns the completion and the message for the agent."""
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
                count_non_greedy=turn.group.greedy,
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
