"""Turns the messages of an agent's calls into the exact tokens that the engine saw.

An agent sends the whole history with each call. Its messages are not rendered again: the tokens of a turn are those of
the turn before, with what the model sampled, and the rendered messages that are new. A history that does not continue
an earlier one begins a branch, from the longest part that is the same. Branches form a tree, and each sampled token is
trained in one row only: that of the first branch that contains it.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.gateway.messages import Fork, Message, canonical, compact, difference, text_of
from asyncrl.gateway.rendering import Renderer
from asyncrl.generation.episodes import Episode, Node, Origin
from asyncrl.generation.interfaces import Completion

CHARACTERS_PER_TOKEN = 16
"""Usual text has about four characters for each token, and rarely more than this number. Of a text with more than this
number times `max_length` characters, only the beginning is made into tokens, to see whether it is too long."""


class LimitExceeded(Exception):
    """A call exceeds a limit of its session. `code` names the limit for programs."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, kw_only=True)
class SessionSettings:
    """How the calls of a session are sampled, and its limits.

    With a `seed` of the group, each call of each sample has a seed of its own; `child` is the number of the sample. The
    limits are for calls (also for those at the same time), branches, and tokens of a branch and of one answer.
    """

    seed: int | None
    child: int
    temperature: float
    max_calls: int
    max_branches: int
    max_length: int
    answer_tokens: int
    calls_at_once: int = 64


@dataclass(eq=False, kw_only=True)
class Turn:
    """A call of an agent: a place in the tree where the model answers, or has answered.

    `history` are the call's messages in canonical form, `node` the tokens that the call added, and `length` the number
    of all tokens of its prompt. `fork` is the reason if the call does not continue the newest branch, and `why` says
    what the chat template does, with `Fork.TEMPLATE`. `reply` is set when the model has answered: `answer` is the
    message for the agent, `closing` the same in canonical form, and `answered_as` the number of the answer in its
    session. The agent has got the answer if it is `delivered`. `then` are the turns that continue it.

    A call with a text has the digest of this text in `asked`, the text itself in `text` until it is answered, and then
    the digest of the text with the answer in `said`. Its answer ends before a stop string; `tail` is the text of its
    tokens from there on, and `stop` are the stop strings.
    """

    history: tuple[str, ...]
    tools: str
    parent: "Turn | None"
    node: Node
    length: int
    fork: Fork | None
    why: str = ""
    asked: "Digest | None" = None
    text: str | None = None
    said: "Digest | None" = None
    tail: str = ""
    stop: tuple[str, ...] = ()
    reply: Node | None = None
    answer: dict[str, Any] | None = None
    closing: str = ""
    delivered: bool = False
    truncated: bool = False
    answered_as: int = 0
    then: list["Turn"] = field(default_factory=list)

    @property
    def path(self) -> list["Turn"]:
        """The turns of this turn's branch, from the first one to this one."""
        turns, before = [self], self.parent
        while before is not None:
            turns.append(before)
            before = before.parent
        return turns[::-1]

    @property
    def token_ids(self) -> list[int]:
        """The prompt of the call, exactly as the engine gets it."""
        tokens: list[int] = []
        for turn in self.path:
            tokens += turn.node.token_ids
            if turn is not self and turn.reply is not None:
                tokens += turn.reply.token_ids
        return tokens

    @property
    def whole(self) -> list[int]:
        """The prompt of the call and what the model has sampled."""
        return [*self.token_ids, *(self.reply.token_ids if self.reply is not None else ())]

    @property
    def replied(self) -> tuple[str, ...]:
        """The history with the model's answer."""
        return (*self.history, self.closing)

    @property
    def whole_length(self) -> int:
        """The number of tokens of `whole`."""
        return self.length + (len(self.reply.token_ids) if self.reply is not None else 0)

    def begins(self, history: tuple[str, ...], tools: str) -> bool:
        """Returns True if `history` begins with this turn's messages and its answer, and the tools are the same."""
        messages = len(self.history)
        return (
            self.reply is not None
            and self.tools == tools
            and history[messages : messages + 1] == (self.closing,)
            and history[:messages] == self.history
        )


Digest = tuple[int, bytes]
"""The number of characters of a text, and its hash."""


def _digest(text: str) -> Digest:
    return len(text), hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


class Conversation:
    """The calls of one session, which are one sample of a group.

    A call raises LimitExceeded if it would begin a branch beyond `max_branches`, if its tokens leave no room for an
    answer in `max_length`, and after `max_calls` calls. Retries that get the turn of an earlier call do not count as
    calls; calls that the limits of branches and tokens refused do. A call raises other errors if its messages cannot be
    rendered, such as DataError or an error of the chat template.
    """

    def __init__(self, renderer: Renderer, settings: SessionSettings) -> None:
        self._renderer = renderer
        self._settings = settings
        self._branches = 0
        self._answers = 0
        self._refused = 0
        self.turns: list[Turn] = []
        """All calls, in the order in which they came."""

    @property
    def calls(self) -> int:
        """Number of the calls, with those that the limits of branches and tokens refused, and without retries."""
        return len(self.turns) + self._refused

    def call(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), retry: bool = False
    ) -> Turn:
        """Returns the turn of a call. If the call is a `retry` of an equal earlier one, or if the answer of an equal
        earlier one never reached the agent, this is the turn of the earlier call. Otherwise it is a new turn."""
        history, shown = tuple(map(canonical, messages)), compact(list(tools))
        as_long = [turn for turn in self.turns if len(turn.history) == len(history)]
        same = [turn for turn in as_long if turn.history == history and turn.tools == shown]
        texts = (shown, *map(text_of, messages))
        if (again := self._again(same, *texts, retry=retry, history=history, tools=shown)) is not None:
            return again
        # Longest first, so that the first turn that fits is the one to continue, and the search ends there.
        longest_first = sorted(self.turns, key=lambda turn: len(turn.history), reverse=True)
        parent = next((turn for turn in longest_first if turn.begins(history, shown)), None)

        def differs(newest: Turn) -> Fork:
            if shown != newest.tools and history[: len(newest.history)] == newest.history:
                return Fork.TOOLS_CHANGED
            return difference(newest.replied, history)

        fork = self._why(parent, differs)
        if parent is not None:
            added = self._after(parent, messages[len(parent.replied) :], tools)
            if isinstance(added, Node):
                return self._added(parent, added, history, shown, fork)
            fork, why = Fork.TEMPLATE, added
        else:
            why = ""
        node = Node(origin=Origin.ENVIRONMENT, token_ids=self._renderer.first(messages, tools))
        return self._added(None, node, history, shown, fork, why=why)

    def call_with_tokens(self, token_ids: Sequence[int], *, retry: bool = False) -> Turn:
        """Returns the turn of a call whose agent renders the messages itself. The call continues the longest earlier
        sequence with which its tokens begin. A retry gets the turn of the earlier call, as in `call`."""
        asked = list(token_ids)
        same = [turn for turn in self.turns if turn.length == len(asked) and turn.token_ids == asked]
        return self._again(same, retry=retry) or self._continued(asked)

    def _continued(self, asked: list[int]) -> Turn:
        """Adds a turn for a call with the tokens `asked`. It continues the longest earlier sequence (a prompt and its
        answer) with which they begin."""
        # Only sequences that are at most as long as `asked` are built and compared. The first that fits is the longest.
        answered = [turn for turn in self.turns if turn.reply is not None and turn.whole_length <= len(asked)]
        longest_first = sorted(answered, key=lambda turn: turn.whole_length, reverse=True)
        parent = next((turn for turn in longest_first if asked[: turn.whole_length] == turn.whole), None)

        def differs(newest: Turn) -> Fork:
            return Fork.COMPACTED if newest.whole[: len(asked)] == asked else Fork.EDITED

        node = Node(origin=Origin.ENVIRONMENT, token_ids=asked[parent.whole_length if parent is not None else 0 :])
        return self._added(parent, node, (), "", self._why(parent, differs))

    def call_with_text(
        self, text: str, *, stop: tuple[str, ...] = (), first_token: bool = True, retry: bool = False
    ) -> Turn:
        """Returns the turn of a call with a text instead of messages. If it begins with the text of an earlier call and
        the model's answer, these tokens stay as they are, and only the rest of the text is made into tokens. A retry
        gets the turn of the earlier call, as in `call`. `stop` are the call's stop strings. With `first_token`, the
        tokenizer may put its beginning-of-sequence token first."""
        asked = _digest(text)
        same = [turn for turn in self.turns if turn.asked == asked]
        turn = self._again(same, text, retry=retry)
        if turn is None:
            turn = self._continued(self._tokens_of(text, first_token=first_token))
        if turn.asked is None:  # the turn is a new one
            turn.asked, turn.text, turn.stop = asked, text, stop
        return turn

    def _again(
        self, same: Sequence[Turn], *texts: str, retry: bool, history: tuple[str, ...] = (), tools: str = ""
    ) -> Turn | None:
        """Returns the turn of a call that repeats the earlier calls `same`; None if `same` is empty.

        This is an earlier turn if the call is a `retry`, or if the answer of the last equal call never arrived.
        Otherwise it is a new turn with the `history` and `tools` of the call, and the model answers once more. A call
        that gets no earlier turn is checked against the limits of calls and of characters, also if `same` is empty;
        `texts` are its texts.
        """
        if same and (retry or (same[-1].reply is not None and not same[-1].delivered)):
            # If one of the equal calls has no answer, it is the one that failed and is tried again.
            return next((turn for turn in same if retry and turn.reply is None), same[-1])
        if self.calls >= self._settings.max_calls:
            raise LimitExceeded("max_turns", f"the agent has made {self.calls} calls, the limit environment.max_turns")
        self._check_texts(*texts)
        if not same:
            return None
        return self._added(same[0].parent, same[0].node, history, tools, Fork.RESAMPLED)

    def _tokens_of(self, text: str, *, first_token: bool) -> list[int]:
        spoken = [(turn.said, turn) for turn in self.turns if turn.said is not None]
        longest_first = sorted(spoken, key=lambda each: each[0], reverse=True)
        found = next(((said, turn) for said, turn in longest_first if _digest(text[: said[0]]) == said), None)
        if found is None:
            return self._renderer.encoded(text, first_token=first_token)
        (length, _), earlier = found
        rest = text[length:]
        # The tokens of the answer contain the stop string, but its text ends before it. The agent may put the stop
        # string behind this text: it is then removed, so that it is not in the tokens twice.
        again = [earlier.tail, *(stop for stop in earlier.stop if earlier.tail.startswith(stop))]
        rest = next((rest[len(end) :] for end in again if end and rest.startswith(end)), rest)
        kept, added = earlier.whole, self._renderer.continued(rest)
        closed = kept[-1] in self._renderer.ends and added[:1] == kept[-1:]
        return [*kept, *added[closed:]]

    def answered(self, turn: Turn, completion: Completion, message: dict[str, Any]) -> None:
        """Records what the model sampled in a turn, and the message that the agent gets."""
        turn.reply = Node.of(completion)
        if turn.text is not None:
            text, whole = completion.text, self._renderer.decoded(completion.token_ids, after=turn.token_ids)
            if text not in whole:  # the prompt ends within a character, so its last bytes change what is decoded
                whole = text
            end = whole.index(text) + len(text)  # with the space that some tokenizers leave out before the first word
            message = {**message, "content": whole[:end]}
            turn.tail, turn.said, turn.text = whole[end:], _digest(turn.text + whole[:end]), None
        turn.answer, turn.closing, turn.truncated = message, canonical(message), completion.truncated
        self._answers += 1
        turn.answered_as = self._answers

    def episodes(self) -> Iterator[Episode]:
        """Yields an episode for each answered branch, in the order of their last answers. If branches share tokens that
        the model sampled, these are trained in the first episode that has them. In later episodes they are context, as
        the tokens of the environment are."""
        trained: set[int] = set()
        for leaf in sorted(self.turns, key=lambda turn: turn.answered_as):
            if leaf.reply is None or any(turn.reply is not None for turn in leaf.then):
                continue
            nodes: list[Node] = []
            for turn in leaf.path:
                assert turn.reply is not None, "only an answered turn is continued"
                first_time = id(turn) not in trained
                trained.add(id(turn))
                seen = Node(origin=Origin.ENVIRONMENT, token_ids=turn.reply.token_ids)
                nodes += [turn.node, turn.reply if first_time else seen]
            yield Episode(
                nodes=tuple(nodes), text=str((leaf.answer or {}).get("content") or ""), truncated=leaf.truncated
            )

    def _after(self, parent: Turn, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Node | str:
        """Returns the tokens that `messages` add after the answer of `parent`. If the chat template cannot add them
        after this answer, returns the reason as a text."""
        assert parent.reply is not None, "only an answered turn is continued"
        last = parent.reply.token_ids[-1] if parent.reply.token_ids else None
        rest = self._renderer.rest(messages, last=last, tools=tools)
        return rest if isinstance(rest, str) else Node(origin=Origin.TEMPLATE, token_ids=rest)

    def _added(
        self,
        parent: Turn | None,
        node: Node,
        history: tuple[str, ...],
        tools: str,
        fork: Fork | None,
        *,
        why: str = "",
    ) -> Turn:
        length = len(node.token_ids) + (parent.whole_length if parent is not None else 0)
        if length >= self._settings.max_length:
            raise self._too_long(f"{length}")
        begins = parent is None or bool(parent.then)
        if begins and self._branches == self._settings.max_branches:
            raise self._exceeded(
                "max_branches",
                f"the call does not continue the conversation ({fork}{f': {why}' if why else ''}), and the episode has "
                f"{self._branches} branches already, the limit environment.max_branches",
            )
        self._branches += begins
        if parent is not None and history:
            # Equal texts are kept once: otherwise the memory of a conversation would grow with the square of its turns.
            history, tools = (*parent.replied, *history[len(parent.replied) :]), parent.tools
        turn = Turn(history=history, tools=tools, parent=parent, node=node, length=length, fork=fork, why=why)
        self.turns.append(turn)
        if parent is not None:
            parent.then.append(turn)
        return turn

    def _check_texts(self, *texts: str) -> None:
        """Raises LimitExceeded for texts of a call that are much too long. Only their beginning is made into tokens:
        for megabytes that would take seconds, in which the gateway answers no other call."""
        most = CHARACTERS_PER_TOKEN * self._settings.max_length
        text = "".join(texts)
        if len(text) > most:
            tokens = len(self._renderer.encoded(text[:most], first_token=False))
            if tokens > self._settings.max_length:
                raise self._too_long(f"more than {tokens}")

    def _too_long(self, tokens: str) -> "LimitExceeded":
        return self._exceeded(
            "context_length_exceeded",
            f"the conversation has {tokens} tokens, and model.max_length = {self._settings.max_length} leaves no room "
            "for an answer; raise model.max_length",
        )

    def _exceeded(self, code: str, message: str) -> "LimitExceeded":
        self._refused += 1
        return LimitExceeded(code, message)

    def _why(self, parent: Turn | None, differs: Callable[[Turn], Fork]) -> Fork | None:
        """Returns why a call after `parent` does not continue the newest branch; None if it does, or if it is the first
        one. `differs` returns how the call differs from the newest turn that is answered."""
        newest = next((turn for turn in reversed(self.turns) if turn.reply is not None), None)
        if not self.turns or (parent is not None and not parent.then and parent is newest):
            return None
        if newest is None or parent is newest:
            return Fork.PARALLEL
        return differs(newest)
