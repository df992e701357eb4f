"""Episodes: their rows, and what is trained of them."""

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from asyncrl.buffer.records import GroupMeta, Ticket, VersionSpan
from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.data.prompts import Task
from asyncrl.data.specs import BRANCH, SUPPORT, TOP_IDS
from asyncrl.errors import HandshakeError
from asyncrl.generation.episodes import Episode, Node, Origin, Played, episode_rows, of_branches
from asyncrl.generation.rollout import finished_group
from asyncrl.learner.sample_records import turns

TICKET = Ticket(
    group=3, attempt=0, task=Task(question="q", prompt="q", answer="a", part="games"), seed=0, version=Version(1, 6),
    max_staleness_versions=2, replica="a",
)  # fmt: skip


def read(*tokens: int, origin: Origin = Origin.ENVIRONMENT) -> Node:
    return Node(origin=origin, token_ids=tokens)


def sampled(*tokens: int, step: int = 6) -> Node:
    return Node(
        origin=Origin.SAMPLED,
        token_ids=tokens,
        logprobs=[-0.5] * len(tokens),
        versions=[Version(1, step)] * len(tokens),
    )


def episode(*nodes: Node) -> Episode:
    return Episode(nodes=nodes, text="", truncated=False)


LONG = episode(read(1, 2), sampled(3), read(4, origin=Origin.TEMPLATE), read(5, 6), sampled(7, 8, step=7), read(9))
SHORT = episode(read(1, 2), sampled(3, 3))


def meta_of(episodes: list[Episode], *, max_branches: int = 1) -> GroupMeta:
    config = Config.model_validate({"environment": {"max_branches": max_branches}})
    played = Played(episodes=episodes, scores=[1.0] * len(episodes), environment_s=0.0)
    return finished_group(TICKET, played, config=config, replica="a").meta


def test_rows_have_the_whole_sequence_and_only_sampled_tokens_are_trained() -> None:
    rows = episode_rows([LONG, SHORT])
    assert {name: column.tolist() for name, column in rows.items()} == {
        "input_ids": [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 3, 0, 0, 0, 0, 0]],
        "weight_versions": [[-1, -1, 6, -1, -1, -1, 7, 7, -1], [-1, -1, 6, 6, -1, -1, -1, -1, -1]],
        "generation_logprobs": [[0, 0, -0.5, 0, 0, 0, -0.5, -0.5, 0], [0, 0, -0.5, -0.5, 0, 0, 0, 0, 0]],
        "token_mask": [[0, 0, 1, 0, 0, 0, 1, 1, 0], [0, 0, 1, 1, 0, 0, 0, 0, 0]],
        "input_lengths": [9, 4],
    }


def test_branches_follow_each_other_and_have_numbers() -> None:
    again = episode(read(1, 2), read(3), read(5), sampled(9))
    both = of_branches([LONG, again])
    assert (both.tokens, both.sampled_tokens, both.prompt_tokens) == (14, 4, 2)
    assert [(span.step, span.tokens) for span in both.version_spans] == [(6, 1), (7, 2), (6, 1)]
    rows = episode_rows([both, SHORT], branches=True)
    assert rows["input_ids"][0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 5, 9]
    assert rows[BRANCH].tolist() == [[0] * 9 + [1] * 5, [0] * 4 + [-1] * 10]
    assert rows[BRANCH].dtype == torch.int32
    assert of_branches([SHORT]) == SHORT
    plain, numbered = meta_of([both]), meta_of([both], max_branches=2)
    assert numbered.row_bytes == plain.row_bytes + 14 * 4
    assert numbered.row_checksums != plain.row_checksums, "the checksums contain the branches"


def test_only_sampled_tokens_have_supports() -> None:
    def supported(*tokens: int) -> Node:
        return dataclasses.replace(
            sampled(*tokens), wide={SUPPORT: np.array([[token, 9] for token in tokens], np.int32)}
        )

    rows = episode_rows([episode(read(1), supported(3), read(4), supported(7, 8)), episode(read(1), supported(3))])
    no = [-1, -1]
    assert rows[SUPPORT].tolist() == [[no, [3, 9], no, [7, 9], [8, 9]], [no, [3, 9], no, no, no]]
    assert SUPPORT not in episode_rows([LONG, SHORT])
    for wrong in (sampled(3), read(4, 5)):
        with pytest.raises(HandshakeError, match="entries in the column support_ids; every sampled token needs one"):
            dataclasses.replace(wrong, wide={SUPPORT: np.zeros((2, 2), np.int32)})


@pytest.mark.parametrize("other", [{}, {TOP_IDS: np.zeros((2, 1), np.int32)}], ids=["none", "fewer"])
@pytest.mark.fault("F25")
def test_a_group_in_which_some_answers_lack_most_likely_tokens_is_refused(other: dict[str, npt.NDArray[Any]]) -> None:
    listed = dataclasses.replace(sampled(3, 4), wide={TOP_IDS: np.zeros((2, 3), np.int32)})
    without = dataclasses.replace(sampled(5, 6), wide=other)
    empty = dataclasses.replace(sampled(), wide={})
    assert episode_rows([episode(listed), episode(empty)])[TOP_IDS].shape == (2, 2, 3)
    found = "1 and 3" if other else "0 and 3"
    with pytest.raises(HandshakeError, match=rf"{found} numbers for each token in the column top_ids; .*\.logprobs"):
        episode_rows([episode(listed), episode(without)])


def test_a_group_counts_what_was_sampled_and_what_was_read() -> None:
    meta = meta_of([LONG, SHORT])
    assert (meta.prompt_tokens, meta.completion_tokens, meta.read_tokens) == (2, (3, 2), (4, 0))
    assert meta.row_tokens == [9, 4]
    assert meta.generated_tokens == 5
    assert (meta.oldest, meta.newest, meta.mid_sequence_updates) == (6, 7, 1)
    assert meta.version_spans == ((VersionSpan(1, 6, 1), VersionSpan(1, 7, 2)), (VersionSpan(1, 6, 2),))
    assert meta.part == "games"
    alone = meta_of([SHORT])
    assert alone.read_tokens == ()
    assert alone.row_tokens == [4]


def test_the_turns_of_a_row_are_found_by_its_versions() -> None:
    [row, _] = episode_rows([LONG, SHORT])["weight_versions"].tolist()
    assert turns(row[2:]) == ((0, 1), (3, 2), (1, 0))
    assert turns([4, 4, 5]) == ((0, 3),)
    assert turns([]) == ()


@pytest.mark.parametrize("column", ["logprobs", "versions"])
@pytest.mark.fault("F25")
def test_a_sampled_token_without_its_log_prob_or_version_is_refused(column: str) -> None:
    whole = {"logprobs": [-1.0] * 2, "versions": [Version(1, 8)] * 2}
    Node(origin=Origin.SAMPLED, token_ids=[4, 5], **whole)  # type: ignore[arg-type]
    with pytest.raises(HandshakeError, match=r"a node of 2 tokens \(sampled\) has"):
        Node(origin=Origin.SAMPLED, token_ids=[4, 5], **(whole | {column: whole[column][:1]}))  # type: ignore[arg-type]
    with pytest.raises(HandshakeError, match="no other token may have any"):
        Node(origin=Origin.TEMPLATE, token_ids=[4, 5], **{column: whole[column]})  # type: ignore[arg-type]
