"""Keeps what the agents of a group have sampled so far, and gives them the stored answers of an earlier attempt.

If a replica dies, the agents of its groups begin again on another one, because their processes have ended. The stored
answers of the earlier attempt are then given to the calls that ask for exactly the same: the same tokens, tools and
limits. An answer that was not complete is continued. So an agent that does the same as before comes to the call at
which the replica died, and its answers keep their log-probs and versions. If an agent makes other calls, their answers
are sampled. Invariant: a stored answer is given at most once in a conversation.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from asyncrl.errors import InfraError
from asyncrl.generation.episodes import Attempt
from asyncrl.generation.gateway import Asked
from asyncrl.generation.interfaces import NOTHING, Completion, PartialCompletion, Sampled
from asyncrl.generation.prefixes import hash_of, joined, turns_of


@dataclass(eq=False, slots=True, kw_only=True)
class Turn:
    """A call of an agent of `group`, and its answer. `stored` is what an earlier attempt has stored of the answer.
    `asked` is True from the call on, and `answer` is set when the answer is complete."""

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

    def progressed(self, sampled: Sampled) -> None:
        """Records what the engine has so far."""
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
        """Returns the answer as it is now; an empty list if it has no token yet. None as for `Sampled.partial`."""
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

    def partial(self) -> PartialCompletion | None:
        """Returns a copy of all turns, also of stored ones that the agent has not asked for yet. None as for
        `Sampled.partial`."""
        turns: list[tuple[int, PartialCompletion]] = []
        for turn in self._turns:
            answer = turn.partial()
            if answer is None:
                return None
            turns += [(turn.call, each) for each in answer if each.token_ids]
        return joined(turns)

    @contextmanager
    def answering(self, asked: Asked) -> Iterator[Turn]:
        """Yields the turn of a call. The block lasts as long as the engine has the call.

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
        """Returns the stored turns, none of which the agent has asked for."""
        return [Turn(call=call, group=self._group, stored=answer) for call, answer in turns_of(self._stored)]


class GroupProgress:
    """The tokens that the samples of a group have so far, with the stored ones of an earlier attempt. Implements
    `Sampled`."""

    def __init__(self, samples: int, attempt: Attempt) -> None:
        self._attempt = attempt
        self._in_engine = 0
        self.samples = [SampleProgress(stored, self) for stored in attempt.prefix or [NOTHING] * samples]
        self.called(0)

    @property
    def lengths(self) -> list[int]:
        return [sample.tokens for sample in self.samples]

    @property
    def continued_tokens(self) -> int:
        return sum(sample.continued_tokens for sample in self.samples)

    def partial(self) -> list[PartialCompletion] | None:
        now = [sample.partial() for sample in self.samples]
        known = [each for each in now if each is not None]
        return known if len(known) == len(now) else None

    def called(self, more: int) -> None:
        """Records that the engine has `more` calls of the group than before."""
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
