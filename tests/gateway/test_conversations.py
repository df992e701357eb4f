"""Conversations: whatever a client does to its history, tokens, masks and branches are exactly those of the engine."""

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from session_settings import session_settings
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from asyncrl.common.version import Version
from asyncrl.data.specs import BRANCH
from asyncrl.demo.chat_tokenizer import END, build_chat_tokenizer
from asyncrl.gateway.conversations import Conversation, Turn
from asyncrl.gateway.messages import Fork, canonical, difference
from asyncrl.gateway.rendering import Renderer
from asyncrl.generation.episodes import episode_rows, of_branches
from asyncrl.generation.interfaces import Completion

TOKENIZER = build_chat_tokenizer(max_length=4096)
RENDERER = Renderer(TOKENIZER)
END_ID = TOKENIZER.convert_tokens_to_ids(END)
TOOL = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}
OTHER_TOOL = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def completion(text: str, *, ended: bool = True) -> Completion:
    token_ids = ids(text) + ([END_ID] if ended else [])
    return Completion(
        token_ids=token_ids, logprobs=[-1.0] * len(token_ids), versions=[Version(1, 0)] * len(token_ids), text=text,
        truncated=not ended,
    )  # fmt: skip


def message(text: str) -> dict[str, Any]:
    if "<tool_call>" not in text:
        return {"role": "assistant", "content": text}
    called = json.loads(text.partition("<tool_call>")[2].partition("</tool_call>")[0])
    function = {"name": called["name"], "arguments": json.dumps(called["arguments"])}
    return {
        "role": "assistant",
        "content": text.partition("<tool_call>")[0],
        "tool_calls": [{"id": "call-1", "type": "function", "function": function}],
    }


class Client:
    """A client that does what clients do to their histories, and an engine that records what it got and sampled."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.conversation = Conversation(RENDERER, session_settings(max_branches=99))
        self.seen: list[tuple[list[int], list[int]]] = []
        self.history: list[Mapping[str, Any]] = [{"role": "user", "content": self.text()}]
        if self.rng.random() < 0.5:
            self.history.insert(0, {"role": "system", "content": self.text()})
        self.tools: tuple[dict[str, Any], ...] = self.rng.choice([(), (TOOL,)])

    def text(self) -> str:
        return " ".join(self.rng.choices(["42", "red", "é ü", "<think>", "the number", "\n", "b" * 9], k=3))

    def sampled(self) -> str:
        kind = self.rng.random()
        if kind < 0.3:
            return f"<think>{self.text()}</think>{self.text()}"
        if kind < 0.6:
            return '<tool_call>{"name": "calculator", "arguments": {"a": 1, "b": [2, "x"]}}</tool_call>'
        return self.text()

    def call(self, *, retry: bool = False) -> Turn:
        turn = self.conversation.call(self.history, tools=self.tools, retry=retry)
        if turn.reply is None:
            text, ended = self.sampled(), self.rng.random() < 0.85
            got = completion(text, ended=ended)
            self.seen.append((turn.token_ids, got.token_ids))
            self.conversation.answered(turn, got, message(text))
            turn.delivered = True
        assert turn.answer is not None
        return turn

    def act(self) -> None:
        turn = self.call()
        kind = self.rng.randrange(12)
        if kind == 0:
            assert self.call(retry=True) is turn, "a retry gets the recorded reply"
        elif kind == 1:
            self.call()  # the same call again, which is no retry
        assert turn.answer is not None
        self.history = [*self.history, turn.answer]
        follow: dict[str, Any] = {"role": "user", "content": self.text()}
        if turn.answer.get("tool_calls"):
            follow = {"role": "tool", "content": self.text(), "tool_call_id": "call-1"}
        if kind == 2:  # two calls at once, with the same history
            self.history = [*self.history, {"role": "user", "content": self.text()}]
            self.call()
            self.history = self.history[:-1]
        self.history = [*self.history, follow]
        self.spoil(kind)

    def spoil(self, kind: int) -> None:
        place = self.rng.randrange(len(self.history))
        old = self.history[place]
        changed: dict[str, Any] = dict(old)
        if kind == 3:
            changed["content"] = str(old.get("content") or "").rpartition("</think>")[2].strip()
        elif kind == 4 and old.get("tool_calls"):
            arguments = json.dumps({"b": [2, "x"], "a": 1})
            changed["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": arguments}} for call in old["tool_calls"]
            ]
        elif kind == 5:
            changed["content"] = str(old.get("content") or "") + "!"
        self.history[place] = changed
        if kind == 6 and len(self.history) > 3:
            del self.history[1:3]
        elif kind == 7 and len(self.history) > 2:
            self.history = [{"role": "user", "content": "summary: " + self.text()}, self.history[-1]]
        elif kind == 8:
            self.tools = (OTHER_TOOL,)


class TextClient:
    """A client of `completions` that continues its text, changes it, or repeats a call; and an engine."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.conversation = Conversation(RENDERER, session_settings(max_branches=99))
        self.seen: list[tuple[list[int], list[int]]] = []
        self.text = f"to {self.words()}"

    def words(self) -> str:
        return "".join(
            self.rng.choices(["42", " red", "é ü", "\n", f"{END}", " the number", "b" * 9], k=self.rng.randrange(5))
        )

    def call(self, *, retry: bool = False) -> Turn:
        turn = self.conversation.call_with_text(self.text, retry=retry)
        if turn.reply is None:
            got = completion(self.words(), ended=self.rng.random() < 0.5)
            self.seen.append((turn.token_ids, got.token_ids))
            seen = TOKENIZER.decode(turn.token_ids, skip_special_tokens=True)
            assert seen == self.text.replace(END, ""), "the engine gets the text of the call"
            text = got.text.replace(END, "")  # the engine gives the agent no special tokens
            self.conversation.answered(turn, replace(got, text=text), message(text))
            turn.delivered = True
        return turn

    def act(self) -> None:
        turn = self.call()
        kind = self.rng.randrange(8)
        if kind == 0:
            assert self.call(retry=True) is turn, "a retry gets the recorded reply"
        elif kind == 1:
            self.call()
        assert turn.answer is not None
        self.text += turn.answer["content"] + self.words()
        if kind == 2:
            self.text = self.text.replace("42", "43", 1)
        elif kind == 3:
            self.text = self.text[: self.rng.randrange(1, len(self.text))]
        elif kind == 4:
            self.text = f"to {self.words()}"


def check(conversation: Conversation, seen: list[tuple[list[int], list[int]]]) -> None:
    trained: list[tuple[list[int], list[int]]] = []
    branches = list(conversation.episodes())
    row = episode_rows([of_branches(branches)], branches=True)
    for number, episode in enumerate(branches):
        sequence: list[int] = []
        for node in episode.nodes:
            if node.sampled:
                trained.append((sequence.copy(), list(node.token_ids)))
            sequence += node.token_ids
        assert row["input_ids"][row[BRANCH] == number].tolist() == sequence, "a row has its branches in order"
    assert int(row["token_mask"].sum()) == sum(len(sampled) for _, sampled in seen)
    assert sorted(trained) == sorted(seen), "each sampled token is trained once, after what the engine saw"
    first, *others = conversation.turns
    assert first.fork is None
    for turn in others:
        continues = turn.parent is not None and turn.parent.then[0] is turn
        assert continues or turn.fork is not None, "every branch has a reason"


@pytest.mark.parametrize("seeds", [range(start, start + 100) for start in range(0, 1000, 100)], ids=str)
@pytest.mark.parametrize("kind", [Client, TextClient], ids=["messages", "texts"])
def test_hostile_histories_never_train_a_token_twice_or_in_another_context(
    kind: type[Client] | type[TextClient], seeds: range
) -> None:
    for seed in seeds:
        client = kind(seed)
        for _ in range(client.rng.randint(1, 9)):
            client.act()
        check(client.conversation, client.seen)


def said(conversation: Conversation, text: str, *, token_text: str, answer: str, stop: str = "") -> Turn:
    """Calls with a text. The model answers with a token for each character, and the agent gets `answer`."""
    turn = conversation.call_with_text(text, stop=(stop,) if stop else ())
    token_ids = [token for character in token_text for token in ids(character)]
    count = len(token_ids)
    got = Completion(
        token_ids=token_ids, logprobs=[-1.0] * count, versions=[Version(1, 0)] * count, text=answer, truncated=True
    )
    conversation.answered(turn, got, message(answer))
    return turn


def test_a_text_that_continues_an_answer_keeps_its_tokens() -> None:
    conversation = Conversation(RENDERER, session_settings(max_branches=99))
    said(conversation, "Question: é?\nThought:", token_text=" it is ü.", answer=" it is ü.")
    second = said(conversation, "Question: é?\nThought: it is ü. More:", token_text=" the red", answer=" the red")
    third = said(conversation, "Question: é?\nThought: it is ü. More: the red End:", token_text="42", answer="42")
    assert second.fork is third.fork is None
    [episode] = conversation.episodes()
    texts = ["Question: é?\nThought:", " it is ü.", " More:", " the red", " End:", "42"]
    assert [TOKENIZER.decode(node.token_ids) for node in episode.nodes] == texts
    assert [node.sampled for node in episode.nodes] == [False, True] * 3


@pytest.mark.parametrize(
    ("sampled", "written", "context"),
    [
        ("Observation:", "Observation: 5\n", "Observation: 5\n"),
        ("Observation: x", "Observation: 5\n", "Observation: x 5\n"),
        ("Observation: x", "Observation: x 5\n", "Observation: x 5\n"),
        ("Observation:", "Result: 5\n", "Observation:Result: 5\n"),
    ],
    ids=["written again", "ends within a token", "with the rest of the token", "left out"],
)
def test_the_tokens_of_an_answer_stay_with_their_stop_string(sampled: str, written: str, context: str) -> None:
    conversation = Conversation(RENDERER, session_settings(max_branches=99))
    asked, thought = "Question: 1\n", "Thought: look\n"
    said(conversation, asked, token_text=f"{thought}{sampled}", answer=thought, stop="Observation:")
    second = said(conversation, asked + thought + written, token_text="42", answer="42")
    assert second.fork is None
    assert TOKENIZER.decode(second.token_ids) == asked + thought + context


def test_an_agent_that_writes_the_template_itself_has_each_end_once() -> None:
    conversation = Conversation(RENDERER, session_settings(max_branches=99))
    asked = f"<|im_start|>user\nhi{END}\n<|im_start|>assistant\n"
    first = conversation.call_with_text(asked)
    conversation.answered(first, completion("hello"), message("hello"))
    more = f"{asked}hello{END}\n<|im_start|>user\nmore{END}\n<|im_start|>assistant\n"
    second = conversation.call_with_text(more)
    assert second.fork is None
    assert TOKENIZER.decode(second.token_ids) == more
    assert second.token_ids == ids(more)


def test_an_empty_answer_is_not_continued_by_an_equal_call() -> None:
    conversation = Conversation(RENDERER, session_settings(max_branches=99))
    first = conversation.call_with_text("one:")
    conversation.answered(first, completion(""), message(""))
    assert conversation.call_with_text("one:", retry=True) is first
    first.delivered = True
    again = conversation.call_with_text("one:")
    assert (again.token_ids, again.fork) == (ids("one:"), Fork.RESAMPLED)
    assert conversation.call_with_text("one: two").token_ids == [*ids("one:"), END_ID, *ids(" two")]


def test_a_retry_of_a_message_does_not_get_the_answer_to_a_call_with_the_same_tokens() -> None:
    conversation = Conversation(RENDERER, session_settings(max_branches=99))
    asked = [{"role": "user", "content": "one"}]
    first = conversation.call(asked, tools=(TOOL,))
    conversation.answered(first, completion("1"), message("1"))
    first.delivered = True
    repeat = conversation.call_with_tokens(first.token_ids)
    conversation.answered(repeat, completion("2"), message("2"))
    repeat.delivered = True
    assert repeat is not first
    assert conversation.call(asked, tools=(TOOL,), retry=True) is first


def test_a_retry_gets_its_own_answer_although_another_call_has_become_its_beginning() -> None:
    conversation = Conversation(RENDERER, session_settings(max_branches=99))
    pending = conversation.call_with_text("q: a b")
    said(conversation, "q: a", token_text=" b", answer=" b")
    assert conversation.call_with_text("q: a b", retry=True) is pending


def test_an_answer_that_ends_within_a_character_is_continued() -> None:
    conversation = Conversation(RENDERER, session_settings(max_branches=99))
    die = ids("🎲")
    assert len(die) > 1
    first = conversation.call_with_text("throw: ")
    part = Completion(token_ids=die[:1], logprobs=[-1.0], versions=[Version(1, 0)], text="\ufffd", truncated=True)
    conversation.answered(first, part, message("\ufffd"))
    second = conversation.call_with_text("throw: \ufffd")
    rest = Completion(
        token_ids=die[1:], logprobs=[-1.0] * (len(die) - 1), versions=[Version(1, 0)] * (len(die) - 1),
        text="\ufffd" * (len(die) - 1), truncated=True,
    )  # fmt: skip
    conversation.answered(second, rest, message(rest.text))
    assert second.answer is not None
    third = conversation.call_with_text(f"throw: \ufffd{second.answer['content']}!")
    assert (second.fork, third.fork) == (None, None)
    assert TOKENIZER.decode(third.token_ids) == "throw: 🎲!"


@pytest.mark.parametrize("scheme", ["prepend", "first", "always"])
def test_texts_of_tokenizers_that_put_a_space_before_the_first_word(scheme: str) -> None:
    tokenizer = spaced_tokenizer(scheme)
    conversation = Conversation(Renderer(tokenizer), session_settings(max_branches=99))
    first = conversation.call_with_text("question")
    sampled = tokenizer("hello world", add_special_tokens=False)["input_ids"]
    alone = tokenizer.decode(sampled)
    assert alone == "hello world", "the engine decodes an answer without what is before it"
    count = len(sampled)
    got = Completion(
        token_ids=sampled, logprobs=[-1.0] * count, versions=[Version(1, 0)] * count, text=alone, truncated=True
    )
    conversation.answered(first, got, message(alone))
    assert first.answer is not None
    assert first.answer["content"] == " hello world"
    for rest in ("more", " more"):
        second = conversation.call_with_text(f"question hello world{rest}")
        assert second.parent is first
        assert tokenizer.decode(second.token_ids, skip_special_tokens=True) == f"question hello world{rest}"
        assert second.token_ids.count(tokenizer.bos_token_id) == 1
    alike = conversation.call_with_text("<s>question", first_token=False)
    assert alike.token_ids.count(tokenizer.bos_token_id) == 1


def spaced_tokenizer(scheme: str) -> Any:
    core = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    if scheme == "prepend":
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    core.train_from_iterator(["the answer is hello world question more two one three"] * 50, trainer=trainer)
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
        "{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    return tokenizer


def test_branches_are_in_the_order_in_which_the_model_answered_them() -> None:
    conversation = Conversation(RENDERER, session_settings(max_branches=99))
    first, second = (conversation.call([{"role": "user", "content": text}]) for text in ("one", "two"))
    for turn, text in ((second, "b"), (first, "a")):
        conversation.answered(turn, completion(text), message(text))
    assert [episode.text for episode in conversation.episodes()] == ["b", "a"]


def talk(*texts: str) -> tuple[Conversation, list[dict[str, Any]]]:
    conversation = Conversation(RENDERER, session_settings(max_branches=99))
    history = [{"role": "user", "content": "first"}]
    for text in texts:
        turn = conversation.call(history)
        conversation.answered(turn, completion(text), message(text))
        assert turn.answer is not None
        history += [turn.answer, {"role": "user", "content": "next"}]
    return conversation, history


def test_a_plain_conversation_is_one_episode_whose_tokens_are_those_of_the_template() -> None:
    conversation, history = talk("one", "two <think>", "three")
    [episode] = conversation.episodes()
    rendered = TOKENIZER.apply_chat_template(history[:-1], tokenize=True, return_dict=False)
    tokens = [token for node in episode.nodes for token in node.token_ids]
    assert tokens == rendered[: len(tokens)]
    assert [node.sampled for node in episode.nodes] == [False, True] * 3
    assert [turn.fork for turn in conversation.turns] == [None] * 3


def test_a_turn_that_was_cut_off_is_ended_by_the_template() -> None:
    conversation = Conversation(RENDERER, session_settings(max_branches=99))
    history = [{"role": "user", "content": "first"}]
    turn = conversation.call(history)
    conversation.answered(turn, completion("cut", ended=False), message("cut"))
    later = conversation.call([*history, message("cut"), {"role": "user", "content": "go on"}])
    assert later.node.token_ids[0] == END_ID
    assert not later.node.sampled


@pytest.mark.parametrize(
    ("changed", "fork"),
    [
        ({1: {"role": "assistant", "content": "answer"}}, Fork.THINKING_STRIPPED),
        ({0: {"role": "user", "content": "other"}}, Fork.EDITED),
        ({0: None, 1: None}, Fork.COMPACTED),
    ],
)
def test_a_history_that_was_changed_begins_a_branch_with_its_reason(changed: dict[int, Any], fork: Fork) -> None:
    conversation, history = talk("<think>long</think>answer")
    spoiled = [changed.get(place, old) for place, old in enumerate(history)]
    turn = conversation.call([each for each in spoiled if each is not None])
    assert turn.fork is fork
    assert turn.parent is None


def test_other_tools_begin_a_branch() -> None:
    conversation, history = talk("one")
    assert conversation.call(history, tools=[TOOL]).fork is Fork.TOOLS_CHANGED


def called(arguments: Any) -> str:
    function = {"name": "f", "arguments": arguments}
    return canonical({"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]})


def test_reordered_arguments_are_recognised() -> None:
    assert difference([called('{"a": 1, "b": 2}')], [called('{"b": 2, "a": 1}'), "x"]) is Fork.JSON_REORDERED


@pytest.mark.parametrize("same", ['{"a":"ü","b":[1,2]}', '{\n "a": "\\u00fc", "b": [1, 2]}', {"a": "ü", "b": [1, 2]}])
def test_arguments_that_a_client_has_parsed_and_written_again_are_the_same_message(same: Any) -> None:
    assert called(same) == called('{"a": "ü", "b": [1, 2]}')


def test_arguments_that_are_not_json_are_compared_as_they_are() -> None:
    assert called("{1") == called("{1") != called("{ 1")
    assert called("[" * 100_000) != called("[" * 100_001)


def test_keys_that_clients_add_and_texts_in_parts_are_the_same_message() -> None:
    plain = canonical({"role": "assistant", "content": "hi"})
    assert (
        canonical({"role": "assistant", "content": "hi", "refusal": None, "audio": None, "tool_calls": None}) == plain
    )
    assert canonical({"role": "assistant", "content": [{"type": "text", "text": "hi"}]}) == plain


def test_a_conversation_keeps_each_text_once() -> None:
    conversation, history = talk("one")
    first = conversation.turns[0]
    second = conversation.call(history)
    assert second.history[0] is first.history[0]
    assert second.history[1] is first.closing


def test_a_conversation_may_have_more_turns_than_python_has_frames() -> None:
    conversation, tokens = Conversation(RENDERER, session_settings(max_branches=1)), [5]
    for _ in range(1200):
        turn = conversation.call_with_tokens(tokens)
        conversation.answered(turn, completion("a"), message("a"))
        turn.delivered = True
        tokens = [*turn.whole, 7]
    assert [turn.length for turn in conversation.turns] == list(range(1, 3601, 3))
    assert turn.token_ids == tokens[: turn.length]
    [episode] = conversation.episodes()
    assert episode.tokens == len(tokens) - 1
