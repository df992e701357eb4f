"""A real policy of two ranks and two real vLLM engines through their interfaces: generation, and every kind of refit.

Equal log-probs of engines and policy prove that the engines have the policy's weights. The tests share all processes,
each continues with the weights of the one before, and the last ones kill processes. So they must run in this order.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import ray
import torch
from conftest import small_config
from local_ray import end_actor, local_ray

from asyncrl.algorithms.loss import ObjectiveLoss
from asyncrl.algorithms.presets import PRESETS
from asyncrl.colocated.generation import VLLMGeneration
from asyncrl.colocated.refit import refit_by_broadcast, refit_colocated
from asyncrl.common.version import Version
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.errors import (
    ActorGone,
    CollectiveError,
    DataError,
    ManifestMismatch,
    Offloaded,
    TornReplica,
    UpdateRefused,
    VersionRegression,
    WeightError,
)
from asyncrl.generation.interfaces import verify_right_padding
from asyncrl.generation.shared_memory import segments_of
from asyncrl.policy.lm_policy import Policy
from asyncrl.ranks.gather import parameter_specs

pytestmark = pytest.mark.integration

LOSS = ObjectiveLoss(PRESETS["decoupled_icepop"].objective)
LOOPBACK = "127.0.0.1"
PARITY_NATS = 1e-4
RANKS = ENGINES = 2
FAR_S = 240.0
"""A deadline that is so long that a test that passes did not wait for it."""
GIB = 2**30
SMALL_GB = 2**18 / GIB
PROBE = [[40, 41, 42, 43, 44, 45, 46], [50, 41, 40], [43, 43, 44, 49]]


def prompts(*rows: list[int]) -> BatchedDataDict:
    width = max(map(len, rows)) + 1
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    return BatchedDataDict(input_ids=ids, input_lengths=torch.tensor([len(row) for row in rows]))


PROMPTS = prompts([40, 41, 42], [43, 44], [45, 46, 47, 48], [49], [50, 51])


def engines(generation: VLLMGeneration) -> list[Any]:
    """Returns the handles of the engines that have not ended."""
    return generation._alive()


def processes(generation: VLLMGeneration) -> list[Any]:
    """Returns the processes of each engine."""
    return generation._processes


class Scene:
    """The policy and the engines, with the actions of the tests."""

    def __init__(self, model_path: str) -> None:
        overrides = [
            f"learner.ranks={RANKS}",
            f"generator.replicas={ENGINES}",
            f"weights.load_timeout_s={FAR_S}",
            f"weights.bucket_bytes={2**18}",
        ]
        self.config = small_config(model_path, *overrides)
        self.policy = Policy(self.config, model_path=model_path)
        self.generation = VLLMGeneration(self.config, model_path=model_path, colocated=True)

    def start(self) -> None:
        with ThreadPoolExecutor() as threads:
            for start in [threads.submit(self.generation.start), threads.submit(self.policy.start)]:
                start.result()

    def train(self, seed: int) -> BatchedDataDict:
        """Trains a step on completions of the engines. Returns the batch."""
        output = self.generation.generate(PROMPTS.slice(0, 4))
        batch = BatchedDataDict(
            input_ids=output["output_ids"],
            input_lengths=output["unpadded_sequence_lengths"],
            generation_logprobs=output["logprobs"],
            weight_versions=output["weight_versions"],
            token_mask=(output["weight_versions"] >= 0).float(),
            sample_mask=torch.ones(output.size),
            advantages=torch.randn(output.size, generator=torch.Generator().manual_seed(seed)),
        )
        batch["prev_logprobs"] = self.policy.get_logprobs(batch)["logprobs"]
        self.policy.prepare_for_training()
        assert self.policy.train(batch, LOSS)["report"].updates_applied == 1
        return batch

    def parity_nats(self) -> float:
        """Returns the largest difference between the log-probs of any engine and of the policy."""
        scored = self.policy.ranks.call(probe_logprobs)[0]
        return max(
            abs(ours - theirs)
            for engine in self.generation.score(PROBE)
            for our_row, their_row in zip(scored, engine, strict=True)
            for ours, theirs in zip(our_row, their_row, strict=True)
        )

    def versions(self) -> set[int]:
        output = self.generation.generate(PROMPTS)
        return set(output["weight_versions"].unique().tolist()) - {-1}

    def joining(self, *, world_size: int | None = None) -> list[Any]:
        """Starts joining a group. Returns the Ray references of the ranks' calls, then of the engines' calls.

        With `world_size`, the ranks wait for that number of members."""
        with socket.create_server((LOOPBACK, 0)) as listener:
            port = listener.getsockname()[1]
        everybody = RANKS + len(engines(self.generation))
        ranks = self.policy.init_collective(LOOPBACK, port, world_size or everybody, train_world_size=RANKS)
        return ranks + self.generation.init_collective(LOOPBACK, port, everybody, train_world_size=RANKS)


def probe_logprobs(worker: Any) -> list[list[float]]:
    return [row.tolist() for row in worker.probe(PROBE)]


def pid(worker: Any) -> int:
    return os.getpid()


def change_precision(worker: Any, dtype: torch.dtype) -> None:
    """Makes the rank offer weights with a dtype that the engines' model does not have."""
    worker._engine_dtype = dtype
    worker._specs = parameter_specs(worker.model, dtype=dtype)


def open_memory_files(worker: Any) -> int:
    descriptors = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sum("asyncrl-weights" in os.readlink(path) for path in descriptors if os.path.islink(path))


def outcomes(refs: list[Any]) -> list[Any]:
    """Returns the outcome of each reference: the answer, or the error that `ray.get` raises."""
    found = []
    for ref in refs:
        try:
            answer = ray.get(ref, timeout=FAR_S / 2)
        except Exception as error:
            answer = error
        else:
            assert not isinstance(answer, Exception), "an error must be raised and not returned"
        found.append(answer)
    return found


def shared_memory() -> set[str]:
    """Returns the names of the shared memory segments of this process's descendants."""
    found: set[str] = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.update(segments_of([process]))
    return found


def running(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Returns those that run. A process that has ended is a zombie until its parent has asked for its exit code. Here
    the parent may be the machine's first process."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import a test module
    with local_ray(cpus=3):
        yield


@pytest.fixture(scope="module")
def scene(model_path: str, cluster: None) -> Iterator[Scene]:
    scene = Scene(model_path)
    try:
        scene.start()
        segments = shared_memory()
        yield scene
        segments |= shared_memory()
        left = [
            psutil.Process(pid)
            for each in processes(scene.generation)
            for pid in each.started
            if psutil.pid_exists(pid)
        ]
    finally:
        scene.policy.shutdown()
        scene.generation.shutdown()
        assert scene.generation.shutdown(), "a second shutdown must succeed too"
    assert not running(left), "engines left processes behind"
    assert not segments & set(os.listdir("/dev/shm"))


# -- generation -------------------------------------------------------------------------------------------------------


def test_engines_draw_different_samples(scene: Scene) -> None:
    """It is the first test, so that both engines have drawn equally often."""
    drawn = [scene.generation.generate(prompts([40, 41, 42], [40, 41, 42]))["logprobs"] for _ in range(8)]
    assert any(not torch.equal(of_first, of_second) for of_first, of_second in drawn)


def test_rows_come_back_in_order_with_what_sampled_them(scene: Scene) -> None:
    """Generates five rows with two engines. The engines have the weights with which the policy starts."""
    output = scene.generation.generate(PROMPTS)
    verify_right_padding(output)
    starts, ends = PROMPTS["input_lengths"], output["unpadded_sequence_lengths"]
    assert torch.equal(starts + output["generation_lengths"], ends)
    places = torch.arange(output["output_ids"].shape[1])
    sampled = (places >= starts.unsqueeze(1)) & (places < ends.unsqueeze(1))
    for row, start in enumerate(starts.tolist()):
        assert torch.equal(output["output_ids"][row, :start], PROMPTS["input_ids"][row, :start])
    assert output["weight_versions"].dtype == torch.int64
    assert torch.equal(output["weight_versions"], torch.where(sampled, 0, -1))
    assert (output["logprobs"][sampled] < 0).all()
    assert not output["logprobs"][~sampled].any()
    assert output["truncated"].dtype == torch.bool
    limit = scene.config.generator.max_completion_tokens
    assert torch.equal(output["truncated"], (output["generation_lengths"] == limit) & ~ended(output))

    rows = BatchedDataDict(input_ids=output["output_ids"], input_lengths=ends)
    theirs = scene.policy.get_logprobs(rows.slice(0, 4))["logprobs"]
    ours = output["logprobs"][:4]
    assert float((ours - theirs * sampled[:4]).abs().max()) < PARITY_NATS


def ended(output: BatchedDataDict) -> torch.Tensor:
    """Returns for each row whether its last token is the end of the sequence."""
    last = output["output_ids"].gather(1, output["unpadded_sequence_lengths"].unsqueeze(1) - 1)
    return last.squeeze(1) == 1


def test_greedy_rows_repeat_whichever_engine_has_them_and_come_alone_as_they_finish(scene: Scene) -> None:
    together = scene.generation.generate(PROMPTS, greedy=True)

    async def one_by_one() -> dict[int, BatchedDataDict]:
        return {row: output async for row, output in scene.generation.generate_async(PROMPTS, greedy=True)}

    alone = asyncio.run(one_by_one())
    assert sorted(alone) == list(range(PROMPTS.size))
    for row, output in alone.items():
        assert output.size == 1
        width = output["output_ids"].shape[1]
        assert torch.equal(output["output_ids"][0], together["output_ids"][row, :width])
        assert not together["output_ids"][row, width:].any()
        assert float((output["logprobs"][0] - together["logprobs"][row, :width]).abs().max()) < PARITY_NATS


def test_what_is_not_waited_for_is_aborted(scene: Scene) -> None:
    async def first() -> int:
        outputs = scene.generation.generate_async(PROMPTS)
        async for row, _ in outputs:
            await outputs.aclose()
            return row
        raise AssertionError("nothing came")

    assert asyncio.run(first()) in range(PROMPTS.size)
    assert scene.versions() == {0}, "the engines must still work"


def test_a_rows_own_stop_string_ends_it_and_no_other(scene: Scene) -> None:
    free = scene.generation.generate(PROMPTS, greedy=True)
    row = int(free["generation_lengths"].argmax())
    start = int(PROMPTS["input_lengths"][row])
    second = int(free["output_ids"][row, start + 1])
    text = load_tokenizer(scene.config.model.path, chat="auto").decode([second])
    stops: list[Any] = [None] * PROMPTS.size
    stops[row] = [text]
    stopped = scene.generation.generate(BatchedDataDict(**PROMPTS, stop_strings=stops), greedy=True)
    length = int(stopped["generation_lengths"][row])
    assert 1 <= length <= 2
    assert int(stopped["output_ids"][row, start + length - 1]) == second
    assert not stopped["truncated"][row]
    others = [other for other in range(PROMPTS.size) if other != row]
    assert torch.equal(stopped["generation_lengths"][others], free["generation_lengths"][others])


def test_rows_that_cannot_be_continued_are_refused(scene: Scene) -> None:
    left_padded = BatchedDataDict(PROMPTS)
    left_padded["input_ids"] = PROMPTS["input_ids"].flip(1)
    with pytest.raises(ValueError, match="not right-padded with 0"):
        scene.generation.generate(left_padded)
    with pytest.raises(ValueError, match="no row"):
        scene.generation.generate(PROMPTS.slice(0, 0))
    too_long = prompts([40] * scene.config.model.max_length)
    with pytest.raises(DataError, match=r"64 tokens.*model\.max_length"):
        scene.generation.generate(too_long)
    with pytest.raises(ValueError, match="kvcache"):
        scene.generation.prepare_for_generation(tags=["kvcache"])
    assert scene.generation.invalidate_kv_cache() is True


# -- the order of calls, and members that do not fit ------------------------------------------------------------------


def test_calls_out_of_their_order_are_refused_and_end_nobody(scene: Scene) -> None:
    with pytest.raises(WeightError, match=r"call prepare_refit_info\(\) first"):
        scene.generation.update_weights_from_collective()
    with pytest.raises(WeightError, match=r"call prepare_refit_info\(\) first"):
        scene.generation.update_weights_from_ipc_handles({})
    with pytest.raises(AssertionError, match=r"call prepare_weights_for_ipc\(\) first"):
        scene.policy.get_weights_ipc_handles(["a"])
    for outcome in outcomes(scene.policy.broadcast_weights_for_collective()):
        assert isinstance(outcome, WeightError), outcome
        assert "call init_collective() first" in str(outcome)
    first, *_ = scene.policy.prepare_weights_for_ipc(SMALL_GB)
    with pytest.raises(WeightError, match="the next group is"):
        scene.policy.get_weights_ipc_handles(["lm_head.weight"])
    assert scene.policy.get_weights_ipc_handles(first), "the ranks must still work"


@pytest.mark.fault("F12")
def test_the_policys_weights_are_compared_with_the_model_before_the_first_transfer(scene: Scene) -> None:
    info = scene.policy.prepare_refit_info()
    assert info == scene.policy.prepare_info_for_collective()
    assert list(info) == [name for group in scene.policy.prepare_weights_for_ipc() for name in group]
    (name, (shape, dtype)), *_ = info.items()
    for wrong in (
        {**info, name: ((*shape, 1), dtype)},
        {**info, name: (shape, "bfloat16")},
        dict(list(info.items())[1:]),
    ):
        with pytest.raises(ManifestMismatch, match=name):
            scene.generation.prepare_refit_info(wrong)
        with pytest.raises(WeightError, match="call prepare_refit_info"):
            scene.generation.update_weights_from_collective()
    assert scene.generation.prepare_refit_info(info) is True


def test_a_world_of_another_size_is_refused_at_once_or_within_the_deadline(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size, ranks in ((RANKS, None), (4, 3)):
        with pytest.raises(CollectiveError, match=f"world_size={size}"):
            scene.policy.init_collective(LOOPBACK, 1, size, train_world_size=ranks)
    for size, ranks in ((ENGINES, None), (5, RANKS)):
        with pytest.raises(CollectiveError, match=f"world_size={size}"):
            scene.generation.init_collective(LOOPBACK, 1, size, train_world_size=ranks)
    soon = scene.config.model_copy(update={"weights": scene.config.weights.model_copy(update={"load_timeout_s": 2.0})})
    monkeypatch.setattr(scene.policy, "_config", soon)
    monkeypatch.setattr(scene.generation, "_config", soon)
    started_s = time.monotonic()
    found = outcomes(scene.joining(world_size=5))
    assert time.monotonic() - started_s < FAR_S / 4
    assert all(isinstance(outcome, CollectiveError) for outcome in found), found
    assert "ranks [4] of 5 did not join" in str(found[0])


# -- by broadcast -----------------------------------------------------------------------------------------------------


def test_two_ranks_bring_two_engines_to_the_same_weights(scene: Scene) -> None:
    assert outcomes(scene.joining()) == [None] * RANKS + [True] * ENGINES
    for step in (1, 2):
        scene.train(step)
        assert scene.parity_nats() > 1e-3, "the probe would not see the update"
        refit_by_broadcast(scene.policy, scene.generation, version=Version(1, step))
        assert scene.parity_nats() < PARITY_NATS
        assert scene.versions() == {step}
    refit_by_broadcast(scene.policy, scene.generation)
    assert scene.versions() == {3}, "the next version, unless a version is given"
    with pytest.raises(VersionRegression):
        refit_by_broadcast(scene.policy, scene.generation, version=Version(1, 2))
    assert scene.versions() == {3}


@pytest.mark.fault("F12")
def test_a_refusal_reaches_every_process_by_its_type_and_changes_nothing(scene: Scene) -> None:
    before = scene.generation.score(PROBE)
    scene.policy.ranks.call(change_precision, torch.bfloat16)
    refs = scene.generation.update_weights_from_collective() + scene.policy.broadcast_weights_for_collective()
    *engines, rank_0, rank_1 = outcomes(refs)
    for refusal in engines:
        assert isinstance(refusal, ManifestMismatch), refusal
        assert "Check that both pools use the same `model.path`" in str(refusal)
    assert isinstance(rank_0, UpdateRefused), rank_0
    assert isinstance(rank_1, UpdateRefused), rank_1
    with pytest.raises(ManifestMismatch):
        refit_by_broadcast(scene.policy, scene.generation)
    with pytest.raises(ManifestMismatch):
        refit_colocated(scene.policy, scene.generation)
    assert scene.generation.score(PROBE) == before

    scene.policy.ranks.call(change_precision, torch.float32)
    refit_by_broadcast(scene.policy, scene.generation)  # in the same group, which stays usable after a refusal
    assert scene.parity_nats() < PARITY_NATS


# -- on one device ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffer_gb", [SMALL_GB, None], ids=["groups", "one group"])
def test_a_refit_on_one_device_leaves_engines_that_generate_and_a_policy_that_trains_on(
    scene: Scene, buffer_gb: float | None
) -> None:
    scene.train(5)
    assert scene.generation.finish_generation() is True
    assert scene.parity_nats() > 1e-3, "the probe would not see the update"
    groups = scene.policy.prepare_weights_for_ipc(buffer_gb)
    assert len(groups) == 1 if buffer_gb is None else len(groups) > 2
    refit_colocated(scene.policy, scene.generation, refit_buffer_size_gb=buffer_gb)
    versions = scene.versions()
    with pytest.raises(Offloaded, match="offloaded: the model"):
        scene.policy.get_logprobs(PROMPTS.slice(0, 4))
    assert scene.policy.ranks.call(open_memory_files) == [0] * RANKS
    scene.policy.prepare_for_training()
    assert scene.parity_nats() < PARITY_NATS
    assert len(versions) == 1
    scene.train(6)


class Failing:
    """A wrapper of the policy that fails at the third group of parameters."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._groups = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def get_weights_ipc_handles(self, keys: list[str]) -> dict[str, Any]:
        self._groups += 1
        if self._groups == 3:
            raise WeightError("injected")
        return self._policy.get_weights_ipc_handles(keys)


@pytest.mark.fault("F11")
def test_a_refit_that_stopped_half_way_is_raised_and_nobody_generates_before_a_whole_one(scene: Scene) -> None:
    failing: Any = Failing(scene.policy)
    batch = scene.train(6)
    with pytest.raises(WeightError, match="injected"):
        refit_colocated(failing, scene.generation, refit_buffer_size_gb=SMALL_GB)
    for refused in (lambda: scene.generation.generate(PROMPTS), scene.generation.prepare_for_generation):
        with pytest.raises(TornReplica, match="weight update of this engine is incomplete"):
            refused()
    with pytest.raises(Offloaded, match="the optimizer"):
        scene.policy.train(batch, LOSS)
    refit_colocated(scene.policy, scene.generation)
    assert len(scene.versions()) == 1
    scene.policy.prepare_for_training()
    assert scene.parity_nats() < PARITY_NATS


@pytest.mark.parametrize("trouble", ["a flipped bit", "a learner that let go", "a group twice"])
@pytest.mark.fault("F11")
def test_a_group_that_cannot_be_applied_tears_the_engines(scene: Scene, trouble: str) -> None:
    """The first half ends within the fused projection of a layer. The complete refit afterwards must not use any part
    of it."""
    scene.train(7)
    assert scene.generation.prepare_for_generation(tags=["weights"])
    groups = scene.policy.prepare_weights_for_ipc(1 / GIB)
    half = 1 + next(index for index, [name] in enumerate(groups) if name.endswith("k_proj.weight"))
    for names in groups[:half]:
        handles = scene.policy.get_weights_ipc_handles(names)
        assert scene.generation.update_weights_from_ipc_handles(handles) is True
    if trouble != "a group twice":
        handles = scene.policy.get_weights_ipc_handles(groups[half])
    if trouble == "a flipped bit":
        [handle] = handles.values()
        with open(handle.path, "r+b") as file:
            first = file.read(1)[0]
            file.seek(0)
            file.write(bytes([first ^ 1]))
    if trouble == "a learner that let go":
        scene.policy.offload_after_refit()
    with pytest.raises(TornReplica, match="failed half way"):
        scene.generation.update_weights_from_ipc_handles(handles)
    with pytest.raises(TornReplica, match="weight update of this engine is incomplete"):
        scene.generation.generate(PROMPTS)
    scene.policy.prepare_for_training()
    refit_colocated(scene.policy, scene.generation)
    scene.policy.prepare_for_training()
    assert scene.parity_nats() < PARITY_NATS


# -- processes that die -----------------------------------------------------------------------------------------------


def killed_while_others_wait(pid: int, scene: Scene) -> list[Any]:
    """Stops the process `pid`, starts a refit, and kills the process while the others wait for it. Returns the outcomes
    of the refit, engines first."""
    process = psutil.Process(pid)
    process.send_signal(signal.SIGSTOP)
    refs = scene.generation.update_weights_from_collective() + scene.policy.broadcast_weights_for_collective()
    done, _ = ray.wait(refs, timeout=1.5)
    assert not done, "the others must wait for the stopped process"
    process.kill()
    started_s = time.monotonic()
    found = outcomes(refs)
    assert time.monotonic() - started_s < FAR_S / 4
    return found


@pytest.mark.fault("F11")
def test_an_engine_killed_on_the_way_costs_the_others_nothing_but_the_group(scene: Scene) -> None:
    outcomes(scene.joining())
    scene.train(8)
    before, version = scene.generation.score(PROBE)[0], scene.versions()
    [killed] = processes(scene.generation)[1].started
    found = killed_while_others_wait(killed, scene)
    assert all(isinstance(outcome, CollectiveError) for outcome in found), found
    with pytest.raises(CollectiveError, match="join a new group"):
        ray.get(scene.policy.broadcast_weights_for_collective())
    dead = engines(scene.generation).pop()
    ray.kill(dead)
    assert scene.generation.score(PROBE)[0] == before, "the death of a member must not change weights"
    assert scene.versions() == version

    # A new group without the dead engine works normally.
    assert outcomes(scene.joining()) == [None] * RANKS + [True]
    refit_by_broadcast(scene.policy, scene.generation)
    assert scene.parity_nats() < PARITY_NATS


@pytest.mark.fault("F11")
def test_a_learner_rank_killed_on_the_way_leaves_the_engine_with_its_weights(scene: Scene) -> None:
    version, before = scene.versions(), scene.generation.score(PROBE)
    engine, rank_0, rank_1 = killed_while_others_wait(scene.policy.ranks.call(pid)[1], scene)
    assert isinstance(engine, CollectiveError), engine
    assert isinstance(rank_0, CollectiveError), rank_0
    assert isinstance(rank_1, ray.exceptions.RayActorError), rank_1
    assert scene.generation.score(PROBE) == before
    assert scene.versions() == version


def test_a_dead_engine_is_named(scene: Scene) -> None:
    end_actor(engines(scene.generation)[0])
    with pytest.raises(ActorGone, match="generating"):
        scene.generation.generate(PROMPTS)
