"""Each family's rows have the log-probs of each row alone, padded and packed, or the ranks refuse the model at their
start. "Alone" is transformers' eager attention, without padding, with full logits."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiny_families import FAMILIES, VOCABULARY, tiny_model
from tiny_groups import STEP, make_batch, make_model
from transformers import PreTrainedModel

import asyncrl.policy.worker
from asyncrl.algorithms.loss import build_loss
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.policy.worker import PolicyWorker
from asyncrl.ranks.accelerator import forget_accelerator
from asyncrl.ranks.batching import token_batch
from asyncrl.value.worker import ValueWorker

pytestmark = pytest.mark.slow

LENGTHS = (24, 17, 17, 30, 2, 9, 6)
NATS = 1.5e-5
REFUSED = {
    "cohere", "cohere2", "granite", "granitemoe", "falcon_h1", "granitemoehybrid", "minicpm3", "phi", "gptj",
    "recurrent_gemma", "nanochat", "gemma2", "vaultgemma", "gemma3n_text", "gpt_oss", "bloom", "mpt",
    "gpt_neox_japanese", "openai-gpt", "xglm", "mamba", "falcon_mamba", "mamba2",
}  # fmt: skip
MIXING = {
    "stablelm", "nemotron", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear", "olmo_hybrid", "lfm2",
    "lfm2_moe", "minimax", "nemotron_h", "zamba2", "bamba", "jamba", "phimoe", "llama4_text",
}  # fmt: skip
"""Families whose packed rows are wrong, at least with the windows and chunks of the tiny models."""
NOT_PACKED = REFUSED | MIXING | {"falcon"}


def rows() -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    found = [torch.randint(3, VOCABULARY, (length,), generator=draw).tolist() for length in LENGTHS]
    found[2][:8] = found[1][:8]
    return found


def alone(model: PreTrainedModel) -> list[torch.Tensor]:
    found = []
    for row in rows():
        tokens_1S = torch.tensor([row])
        with torch.no_grad():
            logprobs_SV = model(input_ids=tokens_1S, use_cache=False).logits[0].log_softmax(-1)
        found.append(logprobs_SV[:-1].gather(1, tokens_1S[0, 1:, None])[:, 0])
    return found


def config(path: Path, *, batching: str, max_length: int = 32) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(path), "max_length": max_length},
            "learner": {"batching": batching, "collective_timeout_s": 240.0},
            "generator": {"temperature": 1.0},
        }
    )


def worker(kind: type[PolicyWorker] | type[ValueWorker], path: Path, *, batching: str, max_length: int = 32):  # type: ignore[no-untyped-def]
    try:
        return kind(
            model_path=str(path),
            config=config(path, batching=batching, max_length=max_length),
            rank=0,
            world_size=1,
            store=dist.HashStore(),
        )
    except BaseException:
        forget_accelerator()
        raise


@pytest.mark.parametrize("model_type", FAMILIES)
def test_rows_are_right_or_refused(model_type: str, tmp_path: Path) -> None:
    model = tiny_model(model_type)
    model.save_pretrained(tmp_path)
    for batching, refused in (("packed", NOT_PACKED), ("dynamic", REFUSED)):
        if model_type in refused:
            with pytest.raises(ConfigError, match=rf"famil(y|ies) .*{model_type}|attention_chunk_size"):
                worker(PolicyWorker, tmp_path, batching=batching)
            continue
        policy = worker(PolicyWorker, tmp_path, batching=batching)
        found_BS = policy.get_logprobs(token_batch(rows()))["logprobs"]
        policy.close()
        for found_S, want_T in zip(found_BS, alone(model), strict=True):
            assert (found_S[1 : len(want_T) + 1] - want_T).abs().max() <= NATS


@pytest.mark.parametrize("kind", [PolicyWorker, ValueWorker], ids=["policy", "critic"])
@pytest.mark.parametrize("model_type", sorted(MIXING))
def test_the_check_of_the_start_finds_each_family_whose_packed_rows_are_wrong(
    model_type: str, kind: type[PolicyWorker] | type[ValueWorker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncrl.policy.worker, "check_family", lambda *args, **options: None)
    tiny_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"packed: for models of the family {model_type}, .* set learner.batching"):
        worker(kind, tmp_path, batching="packed")
    worker(kind, tmp_path, batching="dynamic").close()


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("max_length", [2, 3, 9])
def test_the_check_of_the_start_accepts_short_rows(model_type: str, max_length: int, tmp_path: Path) -> None:
    tiny_model(model_type).save_pretrained(tmp_path)
    for kind in (PolicyWorker, ValueWorker):
        worker(kind, tmp_path, batching="packed", max_length=max_length).close()


def test_the_check_of_the_start_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path)

    def trained() -> tuple[bool, list[int], list[type], int]:
        torch.manual_seed(99)
        policy = worker(PolicyWorker, tmp_path, batching="packed")
        state = torch.get_rng_state()
        gradients = any(each.grad is not None for each in policy.model.parameters())
        kinds = [type(each) for each in policy.model.parameters()]  # a shard, or a whole tensor after a pass
        policy.train(make_batch(), build_loss(policy.config), rows_per_update=100, step=STEP)
        digest = policy.weights_digest()
        policy.close()
        return gradients, [int(each) for each in state], kinds, digest

    checked = trained()
    monkeypatch.setattr(asyncrl.policy.worker, "check_start", lambda *args, **options: None)
    assert checked == trained()
    assert not checked[0]
