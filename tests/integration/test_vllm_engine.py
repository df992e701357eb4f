"""vLLM keeps the engine's contract, loads weights exactly, and survives an update that stopped in the middle."""

import asyncio
import itertools
import statistics
import urllib.request
from collections.abc import Awaitable, Callable
from contextlib import closing

import msgspec
import pytest
import torch
from conftest import small_config
from dense_reward import by_checksum
from engine_contract import CONTRACT, MAX_TOKENS, PARITY_NATS, PROMPT
from local_weights import staged
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForCausalLM

from asyncrl.buffer.groups import seed_of_group
from asyncrl.common.version import Version
from asyncrl.config.load import load_config
from asyncrl.config.parts import all_configs
from asyncrl.data.prompts import Task
from asyncrl.data.specs import SUPPORT, TOP_IDS, TOP_LOGPROBS
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.deployment.model_evaluation import evaluate_set, heldout_tasks
from asyncrl.environments.scoring import PartScorers
from asyncrl.errors import InfraError, TornReplica
from asyncrl.generation.interfaces import Completion
from asyncrl.generation.model_parameters import expected_parameters
from asyncrl.generation.rollout import Rollouts
from asyncrl.generation.vllm_engine import VLLMEngine
from asyncrl.generation.vllm_sampled import sampling_parameters
from asyncrl.metrics.recorders import GeneratorMetrics
from asyncrl.metrics.server import MetricsServer
from asyncrl.ranks.gather import own_shards, parameter_specs
from asyncrl.weights.manifest import Manifest, check_parameters, layout
from asyncrl.weights.publisher import snapshot_of
from asyncrl.weights.staging import StagedWeights

pytestmark = pytest.mark.integration

SMALL_BUCKETS = 2**18


class Trainer:
    """The learner's copy of the model. It changes a little before every publication."""

    def __init__(self, model_path: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        self._generator = torch.Generator().manual_seed(7)

    @torch.no_grad()
    def change(self) -> None:
        for parameter in self.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=self._generator) * 0.02)

    @torch.no_grad()
    def log_probs(self, tokens: list[int]) -> list[float]:
        logits = self.model(input_ids=torch.tensor([tokens])).logits[0, :-1]
        picked = torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(tokens[1:])[:, None])
        return [float(value) for value in picked[:, 0]]

    def publication(self, step: int) -> tuple[Manifest, StagedWeights]:
        entries = layout(parameter_specs(self.model, dtype=torch.float32))
        snapshot = snapshot_of(own_shards(self.model, rank=0), entries, bucket_bytes=SMALL_BUCKETS)
        return staged(snapshot, Version(1, step))


@pytest.fixture(scope="module")
def trainer(model_path: str) -> Trainer:
    return Trainer(model_path)


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("holds", CONTRACT, ids=lambda holds: holds.__name__)
async def test_vllm_keeps_the_contract(
    holds: Callable[..., Awaitable[None]], engine: VLLMEngine, trainer: Trainer
) -> None:
    async def load(step: int, *, on_paused: Callable[[], None] | None = None) -> None:
        trainer.change()
        await engine.load(*trainer.publication(step), on_paused=on_paused)

    await holds(engine, load)


async def compared(engine: VLLMEngine, trainer: Trainer, *, seed: int) -> tuple[float, Completion]:
    """Returns the largest difference between the log-probs of engine and trainer for a prompt and its completion, when
    the engine samples and when it scores. Also returns the completion."""
    [completion] = await engine.generate(PROMPT, n=1, seed=seed, temperature=1.0, max_tokens=MAX_TOKENS)
    tokens = PROMPT + completion.token_ids
    expected = trainer.log_probs(tokens)
    pairs = [*zip(await engine.score(tokens), expected, strict=True)]
    pairs += zip(completion.logprobs, expected[len(PROMPT) - 1 :], strict=True)
    return max(abs(ours - theirs) for ours, theirs in pairs), completion


@pytest.mark.asyncio(loop_scope="session")
async def test_after_an_update_engine_and_trainer_agree_on_every_token(engine: VLLMEngine, trainer: Trainer) -> None:
    for step in (30, 31):
        trainer.change()
        await engine.load(*trainer.publication(step))
        apart_nats, _ = await compared(engine, trainer, seed=step)
        assert apart_nats < PARITY_NATS


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("top_k", [None, 8])
async def test_the_most_likely_tokens_have_the_log_probs_of_the_trainer(
    engine: VLLMEngine, trainer: Trainer, monkeypatch: pytest.MonkeyPatch, top_k: int | None
) -> None:
    """Those of the distribution from which the engine samples: after the temperature, and with top_k among 8 tokens."""
    await engine.load(*trainer.publication(32 + (top_k is None)))
    settings = ["generator.logprobs=12", *([f"generator.top_k={top_k}", "generator.top_p=0.99"] if top_k else [])]
    config = load_config([], settings)
    choice = sampling_parameters(config.generator, vocabulary=engine._llm.model_config.get_vocab_size())
    monkeypatch.setattr(engine, "_widths", config.widths)
    monkeypatch.setattr(engine, "_choice", choice)
    [completion] = await engine.generate(PROMPT, n=1, seed=5, temperature=0.8, max_tokens=MAX_TOKENS)
    assert {name: column.shape[1] for name, column in completion.wide.items()} == config.widths
    with torch.no_grad():
        logits = trainer.model(input_ids=torch.tensor([PROMPT + completion.token_ids])).logits[0, len(PROMPT) - 1 : -1]
    for t, own in enumerate(completion.token_ids):
        ids, logprobs = (torch.from_numpy(completion.wide[name][t]) for name in (TOP_IDS, TOP_LOGPROBS))
        served = logits[t] / 0.8
        if top_k:
            support = torch.from_numpy(completion.wide[SUPPORT][t])
            support = support[support >= 0].long()
            assert set(ids[ids >= 0].tolist()) == set(support.tolist()), "all tokens that could be sampled are listed"
            served = torch.full_like(served, -torch.inf).index_copy(0, support, served[support])
            assert float(logprobs[ids >= 0].exp().sum()) == pytest.approx(1.0, abs=1e-5)
        log_p = served.log_softmax(0)
        listed = int((ids >= 0).sum())
        assert listed == 12 or (top_k and 0 < listed <= top_k)
        assert (logprobs[:listed] - log_p[ids[:listed].long()]).abs().max() < PARITY_NATS
        assert (logprobs[:listed] - log_p.topk(listed).values).abs().max() < PARITY_NATS, "no likelier token is missing"
        assert completion.logprobs[t] == pytest.approx(float(log_p[own]), abs=PARITY_NATS)


@pytest.mark.asyncio(loop_scope="session")
async def test_each_live_parameter_is_read_back_and_an_old_one_is_named(engine: VLLMEngine, trainer: Trainer) -> None:
    for step in (35, 36):  # the first version, and one that was prepared beside decoding
        trainer.change()
        published = trainer.publication(step)
        await engine.load(*published)
        found = await engine.read_back(*published)
        assert (found.differing, found.unread) == (frozenset(), frozenset())
    names = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
    names |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
    read = set()
    for name, parameter in trainer.model.named_parameters():
        before = parameter.detach().clone()
        with torch.no_grad():
            parameter.mul_(1.01).add_(1e-3)
        of_engine = ".".join(names.get(part, part) for part in name.split("."))
        differing = (await engine.read_back(*trainer.publication(37))).differing
        assert differing >= {of_engine}
        assert len(differing) == (2 if "embed_tokens" in name else 1), "the embedding is the head too"
        read |= differing
        parameter.data.copy_(before)
    assert read == found.alike


@pytest.mark.asyncio(loop_scope="session")
async def test_seeded_sequences_survive_being_recomputed_all_at_once(engine: VLLMEngine, trainer: Trainer) -> None:
    """There are more running tokens than fit into one batch. A prefill that is split in two would end vLLM's CPU
    worker."""
    await engine.load(*trainer.publication(40))
    prompt = PROMPT * 4
    pending = asyncio.gather(
        *[engine.generate(prompt, n=4, seed=4 * i, temperature=1.0, max_tokens=14) for i in range(64)]
    )
    for step in range(41, 45):
        await asyncio.sleep(0.05)  # lets the real engine decode some tokens
        await engine.load(*trainer.publication(step))
    groups = await pending
    assert len([completion for group in groups for completion in group]) == 256


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.fault("F11")
async def test_half_an_update_leaves_the_engine_paused_until_a_whole_one(engine: VLLMEngine, trainer: Trainer) -> None:
    trainer.change()
    await engine.load(*trainer.publication(50))
    trainer.change()
    manifest, weights = trainer.publication(51)
    middle = len(manifest.tensors) // 2
    entries = list(manifest.tensors)
    entries[middle] = msgspec.structs.replace(entries[middle], shape=(entries[middle].nbytes // 4,))
    broken = msgspec.structs.replace(manifest, tensors=tuple(entries))
    pending = asyncio.create_task(engine.generate(PROMPT, n=4, seed=0, temperature=1.0, max_tokens=MAX_TOKENS))
    with pytest.raises(TornReplica, match="51 failed half way"):
        await engine.load(broken, weights)
    late = asyncio.create_task(engine.generate(PROMPT, n=1, seed=9, temperature=1.0, max_tokens=4))
    done, _ = await asyncio.wait([late], timeout=1.0)
    assert not done, "a torn engine must not generate"
    await engine.load(manifest, weights)
    for completion in [*await pending, *await late]:
        assert len(completion.token_ids) == len(completion.versions)
    scores = await engine.score(PROMPT)
    assert max(abs(a - b) for a, b in zip(scores, trainer.log_probs(PROMPT), strict=True)) < PARITY_NATS


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.fault("F11")
async def test_an_update_with_too_few_tensors_is_torn_although_vllm_would_finish_it(
    engine: VLLMEngine, trainer: Trainer
) -> None:
    manifest, weights = trainer.publication(60)
    names = [entry.name for entry in manifest.tensors]
    some = {"path": weights.path, "nbytes": weights.flat.nbytes, "tensors": msgspec.to_builtins(manifest.tensors[:-1])}
    await engine.weights.begin(manifest.version)
    await engine.weights.apply(some, names[:-1])
    with pytest.raises(TornReplica, match="tensors"):
        await engine.weights.commit(names)
    await engine.load(manifest, weights)
    scores = await engine.score(PROMPT)
    assert max(abs(a - b) for a, b in zip(scores, trainer.log_probs(PROMPT), strict=True)) < PARITY_NATS


@pytest.mark.fault("F12")
def test_the_models_own_config_tells_what_a_manifest_must_hold(model_path: str, trainer: Trainer) -> None:
    expected = expected_parameters(model_path, dtype="float32")
    check_parameters(trainer.publication(0)[0], expected)
    assert "lm_head.weight" in expected


@pytest.mark.asyncio(loop_scope="session")
async def test_an_aborted_request_is_an_infra_failure(engine: VLLMEngine, trainer: Trainer) -> None:
    await engine.load(*trainer.publication(70))
    pending = asyncio.create_task(engine.generate(PROMPT * 5, n=8, seed=0, temperature=1.0, max_tokens=10))
    while not engine._running:
        await asyncio.sleep(0)
    await engine.abort()
    with pytest.raises(InfraError, match="aborted"):
        await pending


@pytest.mark.asyncio(loop_scope="session")
async def test_vllms_own_metrics_are_on_the_generators_port_beside_ours(engine: VLLMEngine, trainer: Trainer) -> None:
    """The metrics would be missing or 0 with `disable_log_stats`, with a second engine, or if the registry were
    cleared."""
    await engine.load(*trainer.publication(80))
    metrics = GeneratorMetrics(environment="test")
    metrics.policy_version(80)
    with closing(MetricsServer(metrics.registry, host="127.0.0.1", port=0)) as server:
        before = samples_at(f"http://{server.address}/metrics")
        [completion] = await engine.generate(PROMPT, n=1, seed=1, temperature=1.0, max_tokens=MAX_TOKENS)
        after = samples_at(f"http://{server.address}/metrics")
    assert after["asyncrl_generator_policy_version"] == 80
    generated = after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"]
    assert generated == len(completion.token_ids) > 0
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total")
    assert {f"vllm:{name}" for name in names} <= set(after), "the dashboards need these metrics"


@pytest.mark.asyncio(loop_scope="session")
async def test_pass_at_k_of_an_evaluation_is_that_of_vllm_with_the_same_seeds(
    engine: VLLMEngine, model_path: str
) -> None:
    from vllm import SamplingParams  # after the fixture has set the environment of vLLM
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

    await engine.load(*Trainer(model_path).publication(90))
    # This reward is above 0.9 for a tenth of all completions, so some prompts have a right sample and some have none.
    reward = ["environment.reward=dense_reward:by_checksum", "eval.pass_reward=0.9"]
    config = small_config(
        model_path, "eval.samples=4", "eval.prompts=24", "generator.seeded=true", "run.seed=3", *reward
    )
    tokenizer, tasks = load_tokenizer(model_path), heldout_tasks(config)["heldout"]
    assert len(tasks) == 24
    scorer = PartScorers(all_configs(config))
    try:
        rollouts = Rollouts(config=config, engine=engine, tokenizer=tokenizer, scorer=scorer, replica="eval")
        result = await evaluate_set("heldout", tasks, rollouts=rollouts, config=config)
    finally:
        await scorer.close()

    async def direct(number: int, task: Task) -> list[bool]:
        seed = seed_of_group(3, number, group_size=4)
        kind = RequestOutputKind.FINAL_ONLY
        parameters = SamplingParams(n=4, seed=seed, temperature=1.0, max_tokens=10, output_kind=kind)
        prompt = tokens_input(tokenizer(task.prompt, add_special_tokens=False)["input_ids"])
        async for output in engine._llm.generate(prompt, parameters, f"direct-{number}"):
            final = output
        return [by_checksum(task, each.text) >= 0.9 for each in final.outputs]

    passed = await asyncio.gather(*[direct(number, task) for number, task in enumerate(tasks)])
    for k in (1, 2, 4):
        of_prompts = [statistics.fmean(map(any, itertools.combinations(each, k))) for each in passed]
        assert result.pass_at[k] == pytest.approx(statistics.fmean(of_prompts)), k
    assert 0 < result.pass_at[1] < result.pass_at[4] < 1


def samples_at(url: str) -> dict[str, float]:
    """Returns the sum of the samples of an endpoint, by name."""
    with urllib.request.urlopen(url, timeout=120) as response:
        text = response.read().decode()
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums
