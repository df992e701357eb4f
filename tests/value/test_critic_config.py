"""The settings that the critic's ranks take from the learner's section, and those from their own section."""

from asyncrl.config.schema import Config
from asyncrl.value.lm_value import critic_config


def test_a_critic_of_one_rank_stands_beside_a_policy_of_two_copies() -> None:
    config = Config.model_validate(
        {"learner": {"ranks": 4, "shards": 2, "batching": "packed"}, "critic": {"ranks": 1, "gpus": 1.0}}
    )
    learner = critic_config(config).learner
    assert (learner.ranks, learner.shards, learner.gpus) == (1, None, 1.0)
    assert learner.batching == "packed"
    assert config.learner.shards == 2
