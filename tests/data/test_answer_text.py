"""Rewards and samples get the same text of an answer: without special tokens, or with all but the one that ended it."""

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

import pytest
from chat_templates import tokenizer_of
from pool import LengthScorer

from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.data.answer_text import AnswerText, hidden_tags, note_on_begin, note_on_tags
from asyncrl.data.prompts import Task
from asyncrl.data.turn_ends import generation_prompt
from asyncrl.demo.chat_tokenizer import build_chat_tokenizer
from asyncrl.environments.scores import Score
from asyncrl.generation.interfaces import Completion
from asyncrl.generation.rollout import Rollouts
from asyncrl.learner.sample_records import Texts

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<|think|>\n{% endif %}"
)
TOKENIZER = tokenizer_of(TEMPLATE + "{# <|/think|> <|tool|> #}")


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(("sampled", "stops", "dropped", "kept"), [
    ("why<|/think|>42<|im_end|>", (), "why42", "why<|/think|>42"),
    ("<|think|>why<|/think|>42", (), "why42", "<|think|>why<|/think|>42"),
    ("a<|tool|>b<|im_end|>", ("b",), "a", "a<|tool|>"),
    ("a<|im_end|><|im_end|>", (), "a", "a<|im_end|>"),
    ("a<|tool|>b#c", ("<|tool|>", "#"), "ab", "a"),
    ("<|im_end|>", (), "", ""),
    ("", (), "", ""),
])  # fmt: skip
def test_only_the_token_that_ended_an_answer_is_left_out_of_kept_tokens(
    sampled: str, stops: Sequence[str], dropped: str, kept: str
) -> None:
    text = AnswerText(TOKENIZER, stops=stops)
    assert text(ids(sampled), special_tokens="drop") == dropped
    assert text(ids(sampled), special_tokens="keep") == kept


class Scorer(LengthScorer):
    """Records what is scored."""

    def __init__(self) -> None:
        super().__init__()
        self.scored: list[tuple[Task, list[str]]] = []

    async def score(self, task: Task, completions: Sequence[str]) -> list[Score]:
        self.scored.append((task, list(completions)))
        return await super().score(task, completions)

    def runs_agent(self, _: Task) -> bool:
        return False


class Engine:
    """Returns the same answer to each prompt, as vLLM would decode it."""

    async def generate(self, *_: Any, n: int, **_options: Any) -> list[Completion]:
        token_ids = ids("why<|/think|>42<|im_end|>")
        count = len(token_ids)
        return [
            Completion(
                token_ids=token_ids, logprobs=[-1.0] * count, versions=[Version(1, 0)] * count, text="why42",
                truncated=False,
            )
        ] * n  # fmt: skip


@pytest.mark.parametrize(("special_tokens", "scored"), [("drop", "why42"), ("keep", "why<|/think|>42")])
def test_the_text_that_was_scored_is_the_one_that_samples_show(special_tokens: str, scored: str) -> None:
    config = Config.model_validate(
        {
            "environment": {"special_tokens": special_tokens},
            "model": {"max_length": 256},
            "data": {"max_prompt_tokens": 64},
        }
    )
    scorer = Scorer()
    rollouts = Rollouts(config=config, engine=Engine(), tokenizer=TOKENIZER, scorer=scorer, replica="a")  # type: ignore[arg-type]  # fmt: skip
    task = Task(question="q", prompt="q", answer="42")
    how = config.eval.each_set()["heldout"]
    [answer, *_] = asyncio.run(rollouts.answers(task, how, number=0))
    [(seen, texts)] = scorer.scored
    assert {answer.text, *texts} == {scored}
    assert seen.generation_prompt == "<|im_start|>assistant\n<|think|>\n", "a completion continues the thought"
    assert Texts.of(TOKENIZER, config).answer(ids("why<|/think|>42<|im_end|>"), "") == scored
    assert task.generation_prompt == ""


def test_without_a_template_or_with_one_that_changes_there_is_no_generation_prompt() -> None:
    plain = tokenizer_of(TEMPLATE)
    plain.chat_template = None
    assert generation_prompt(plain) == ""
    changing = "{{ 'x' if add_generation_prompt else 'y' }}{{ messages[0].content }}"
    assert generation_prompt(tokenizer_of(changing)) == ""
    assert generation_prompt(tokenizer_of("{{ raise_exception('no') }}")) == ""


def test_special_tokens_for_which_rewards_look_are_named_at_the_start() -> None:
    note = note_on_tags(TOKENIZER)
    assert note is not None
    assert "<|/think|>, <|think|>, <|tool|>;" in note
    assert "<|im_end|>" not in note
    assert note_on_tags(tokenizer_of("<|im_start|>{{ messages[0].content }}<|im_end|>")) is None


@pytest.mark.parametrize(
    ("environment", "scored"),
    [
        ({"tools": ["shop:price"], "reward": "shop:reward"}, "why<|/think|>42"),
        ({"mcp_servers": [{"url": "http://shop/mcp"}], "reward": "shop:reward"}, "why<|/think|>42"),
        ({"agent": "shop:run"}, None),
        ({"reward": "shop:reward"}, None),
    ],
    ids=["tools", "MCP", "agent", "one answer"],
)
def test_the_last_answer_of_an_episode_with_tools_is_what_was_scored(
    environment: dict[str, object], scored: str | None
) -> None:
    config = Config.model_validate({"data": {"dataset": "shop:tasks"}, "environment": environment})
    assert Texts.of(TOKENIZER, config).last_answer(ids("why<|/think|>42<|im_end|>"), "") == scored


@pytest.mark.parametrize("part", ["eval/hard", "eval/other", "sums"])
def test_a_task_of_a_held_out_set_or_a_part_is_scored_too(part: str) -> None:
    """A held-out set is no part of the mixture."""
    config = Config.model_validate(
        {
            "environment": {"special_tokens": "keep"},
            "model": {"max_length": 256},
            "data": {"max_prompt_tokens": 64, "mixture": [{"name": "sums"}]},
            "eval": {"sets": {"hard": {"data": {"dataset": "a:b"}}, "other": {"environment": {"reward": "a:b"}}}},
        }
    )
    scorer = Scorer()
    rollouts = Rollouts(config=config, engine=Engine(), tokenizer=TOKENIZER, scorer=scorer, replica="a")  # type: ignore[arg-type]  # fmt: skip
    task = Task(question="q", prompt="q", answer="42", part=part)
    asyncio.run(rollouts.answers(task, config.eval.each_set()["heldout"], number=0))
    assert {text for _, texts in scorer.scored for text in texts} == {"why<|/think|>42"}


@pytest.mark.parametrize("begin", ["<|assistant|>\n", "<|assistant|>\n<think>\n", "Answer: "])
def test_a_template_that_ends_a_prompt_without_an_answer_with_a_control_token_has_a_generation_prompt(
    begin: str,
) -> None:
    """Phi-3's template does so."""
    template = "<|user|>{{ messages[0].content }}<|end|>{{ BEGIN if add_generation_prompt else '<|endoftext|>' }}"
    assert generation_prompt(tokenizer_of(template.replace("BEGIN", repr(begin)))) == begin


@pytest.mark.parametrize(
    ("begin", "tags"),
    [
        ("<think>\n", ["<think>"]),
        ("<think>\n\n</think>\n\n", ["<think>", "</think>"]),
        ("[THINK]", ["[THINK]"]),
        ("◁think▷", ["◁think▷"]),
        ("<|start_thinking|>", ["<|start_thinking|>"]),
        ("<start_of_turn>model\n", []),
        ("I think: ", []),
        ("", []),
    ],
)
def test_tags_that_the_template_writes_before_an_answer_are_named(begin: str, tags: list[str]) -> None:
    tokenizer = tokenizer_of(
        "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>" + begin + "{% endif %}"
    )
    assert hidden_tags(tokenizer, special_tokens="keep") == tuple(tags)
    note = note_on_begin(tokenizer)
    if not tags:
        assert note is None
    else:
        assert note is not None
        assert f"writes {' '.join(tags)} before an answer" in note
        assert f"task.generation_prompt is {f'<|im_start|>{begin}'!r}" in note


def test_special_tokens_are_hidden_only_if_they_are_dropped() -> None:
    assert hidden_tags(TOKENIZER, special_tokens="keep") == ("<|think|>",)
    assert set(hidden_tags(TOKENIZER, special_tokens="drop")) == {"<|think|>", "<|/think|>", "<|tool|>"}


@pytest.mark.parametrize("special_tokens", ["drop", "keep"])
@pytest.mark.parametrize("text", ["7", "a b", ""])
def test_the_end_of_an_answer_is_left_out_although_it_is_no_special_token(
    text: str, special_tokens: Literal["drop", "keep"]
) -> None:
    tokenizer = build_chat_tokenizer(max_length=64)
    tokenizer.chat_template = (
        "{% for m in messages %}<tool_response>{{ m.content }}</tool_response>{% endfor %}"
        "{% if add_generation_prompt %}<tool_response>{% endif %}"
    )
    ids = tokenizer(f"{text}</tool_response>", add_special_tokens=False)["input_ids"]
    assert AnswerText(tokenizer, stops=())(ids, special_tokens=special_tokens) == text
