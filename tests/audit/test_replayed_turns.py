"""The replay of the audit scores the sampled tokens of a row wherever they are, also between tokens that were read."""

from types import SimpleNamespace
from typing import Any, cast

from asyncrl.audit.replay import token_spans
from asyncrl.common.version import Version
from asyncrl.generation.episodes import Episode, Node, Origin, episode_rows
from asyncrl.learner.audit_records import TrainedSample


def read(*token_ids: int) -> Node:
    return Node(origin=Origin.ENVIRONMENT, token_ids=token_ids)


def sampled(*tokens: tuple[int, int]) -> Node:
    """Returns a node of pairs (token, step of its weights), whose log-probs are minus the tokens."""
    return Node(
        origin=Origin.SAMPLED,
        token_ids=[token for token, _ in tokens],
        logprobs=[float(-token) for token, _ in tokens],
        versions=[Version(1, step) for _, step in tokens],
    )


def test_each_version_has_the_sampled_tokens_of_all_turns_and_no_token_that_was_read() -> None:
    turns = Episode(
        nodes=(read(1, 2, 3), sampled((11, 4), (12, 4)), read(5, 6), sampled((13, 4), (14, 7)), read(7)),
        text="",
        truncated=False,
    )
    answer = Episode(nodes=(read(1, 2, 3), sampled((21, 7))), text="", truncated=False)
    samples = [
        TrainedSample(tokens=episode.sampled_tokens, spans=episode.version_spans, reward=1.0, trained=trained, row=0)
        for episode, trained in ((turns, True), (answer, True), (answer, False))
    ]
    step: Any = SimpleNamespace(step=8, groups=[SimpleNamespace(group=3, samples=samples)])
    found = [
        (version, span.row["input_ids"][0, span.places].tolist(), span.row["generation_logprobs"][0, span.places])
        for version, span in token_spans(step, cast(Any, episode_rows([turns, answer, answer])))
    ]
    assert [(version, tokens) for version, tokens, _ in found] == [
        (Version(1, 4), [11, 12, 13]),
        (Version(1, 7), [14]),
        (Version(1, 7), [21]),
    ]
    assert all(logprobs.tolist() == [-token for token in tokens] for _, tokens, logprobs in found)
