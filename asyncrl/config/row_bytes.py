"""The sizes of rows. The reservation of a group in the buffer books the largest possible size of the group. The real
size is known when the group is committed."""

from asyncrl.config.schema import Config

BYTES_PER_TOKEN = 24
"""Bytes of a row for each token: token id and weight version (int64), behaviour log-prob and mask (float32)."""
BYTES_PER_WIDE_NUMBER = 4
"""Bytes of each of the numbers that a token has in a column of `Config.widths`: an id (int32) or a log-prob
(float32)."""
BYTES_PER_BRANCH_ID = 4
"""Bytes of a row for each token with `environment.max_branches` above 1: the number of its branch, int32."""
BYTES_PER_ROW = 8
"""Bytes of a row in addition to its tokens: the length, int64."""


def worst_case_group_bytes(config: Config) -> int:
    """Returns the size of the rows of the largest possible group, bytes.

    A reservation of a group books this size in the buffer, because the real size is known only at the group's commit.
    """
    return config.learner.group_size * (row_tokens(config) * bytes_per_token(config) + BYTES_PER_ROW)


def row_tokens(config: Config) -> int:
    """Returns the number of tokens of the longest possible row: those of all branches of an episode."""
    return config.model.max_length * config.most_branches


def bytes_per_token(config: Config) -> int:
    """Returns the bytes of a row for each token. Tokens of the prompt take as many as sampled tokens."""
    of_branches = BYTES_PER_BRANCH_ID if config.most_branches > 1 else 0
    return BYTES_PER_TOKEN + of_branches + sum(config.widths.values()) * BYTES_PER_WIDE_NUMBER
