"""A replica gets the values of secrets with its start, and shows none of them from then on."""

from pathlib import Path

import pytest

from asyncrl import shown_text
from asyncrl.config.schema import Config
from asyncrl.environments.secrets import Secrets
from asyncrl.errors import RunError
from asyncrl.generation import actor

pytestmark = pytest.mark.slow  # imports torch


@pytest.mark.asyncio
@pytest.mark.parametrize("taken_over", [False, True])
async def test_a_replica_hides_the_secrets_before_it_starts_anything(
    taken_over: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_scorer(*_: object, **__: object) -> None:
        raise RunError("nothing starts in this test")

    monkeypatch.setattr(shown_text, "_redact", str)  # restores it after the test
    monkeypatch.setattr(actor, "prepare_environment", lambda config: None)
    monkeypatch.setattr(actor, "preload", lambda: None)
    monkeypatch.setattr(actor, "PartScorers", no_scorer)
    config = Config.model_validate({"environment": {"secrets": ["JUDGE_API_KEY"]}})
    replica = actor.GeneratorActor(config=config, name="generator-a", deployment="d")
    secrets = Secrets({"JUDGE_API_KEY": "sk-0123456789"})
    if taken_over:
        starts = replica.take_over(config=config, deployment="e", secrets=secrets, logs=tmp_path)
    else:
        starts = replica.start("model", secrets=secrets, logs=tmp_path)
    with pytest.raises(RunError, match="nothing starts"):
        await starts
    assert shown_text.shown("401 for sk-0123456789") == "401 for <JUDGE_API_KEY>"
