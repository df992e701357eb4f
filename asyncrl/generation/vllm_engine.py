"""One vLLM engine (`AsyncLLM`) that implements `InferenceEngine`. Its weights are in `vllm_weights.py`.

A process holds one engine, because a second one would unregister the metrics of the first. Invariant: every token
carries the version that sampled it.
"""

import asyncio
import dataclasses
import gc
import itertools
import os
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from operator import sub
from pathlib import Path
from typing import Any

import psutil
import xxhash

from asyncrl.common.imports import uncollected, without_compiler
from asyncrl.config.schema import Config
from asyncrl.data.answer_text import before_stop
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.data.turn_ends import further_end
from asyncrl.errors import DataError, InfraError, RunError
from asyncrl.generation.engine_start import cause_of_death, children_begin_with, engine_starts, first_end
from asyncrl.generation.interfaces import NOTHING, Completion, LoadTimes, PartialCompletion, Sampled
from asyncrl.generation.long_work import beside_loop
from asyncrl.generation.prefixes import engine_seed, seed_of
from asyncrl.generation.shared_memory import EngineProcesses, sweep_shared_memory
from asyncrl.generation.vllm_adapters import Adapter, VLLMAdapters
from asyncrl.generation.vllm_arguments import CPU, GIB, Device, engine_arguments, engine_environment
from asyncrl.generation.vllm_sampled import (
    Child,
    SampledByVLLM,
    check_end,
    non_greedy_tokens,
    sampling_parameters,
    until_stop,
)
from asyncrl.generation.vllm_weights import VLLMWeights
from asyncrl.metrics.vllm_counters import PromptTokens, prompt_tokens
from asyncrl.weights.manifest import Manifest, ReadBack
from asyncrl.weights.staging import StagedWeights

ENGINE_EXIT_S = 1.0
"""Seconds for vLLM's own shutdown. Afterwards the processes get the same time again, and are then killed. They have
nothing to save, and Python needs 4 s of CPU time to end one of them in order."""
NO_VERSION = "default"
"""vLLM's label of the weights with which an engine starts. `Version.parse` refuses it, so a group with such a token
fails."""
UNREAD_FILES = frozenset({"tiny.json"})
"""Files of a model's directory that no engine reads: `asyncrl.demo.directory.TINY_RECIPE`."""
WEIGHT_FILES = (".safetensors", ".bin", ".pt")
"""Suffixes of files that a model's directory may have and that an engine whose weights come from a learner does not
read."""
PROGRESS_EVERY_S = 0.5
"""Seconds between two reports of what a call has sampled so far. Heartbeats carry this progress, one each second."""
STORED_PROGRESS_EVERY_S = 0.01
"""Seconds between two such reports if partial generations are stored, so that they can be stored every few tokens. A
report takes some 10 µs."""


def prepare_environment(config: Config) -> None:
    """Sets environment variables of vLLM and torch. Call it before the first import of vLLM, which reads them then."""
    of_loopback = (name for name, found in psutil.net_if_addrs().items() for at in found if at.address == "127.0.0.1")
    os.environ.update(engine_environment(config, os.environ, loopback=next(of_loopback, None)))


def device_of(config: Config) -> Device:
    """Describes the device of an engine with this configuration, as vLLM itself does when it starts.

    vLLM asks NVML, which does not start CUDA in this process. Without NVML, the description is empty. vLLM itself and
    `vllm_arguments` then use the settings for small GPUs.
    """
    if config.generator.gpus == 0:
        return CPU
    from asyncrl.vllm_internals import current_platform

    try:
        memory, name = current_platform.get_device_total_memory(), current_platform.get_device_name()
    except Exception:  # the type of the error depends on the platform
        return Device(kind="gpu")
    return Device(kind="gpu", memory_gib=memory / GIB, name=name)


def preload() -> None:
    """Imports the modules that `VLLMEngine.start` needs, and excludes them from garbage collection."""
    with uncollected(), without_compiler():
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: F401

        gc.freeze()


class VLLMEngine:
    """Implements `InferenceEngine`. Create it with `start`."""

    def __init__(
        self,
        llm: Any,
        *,
        config: Config,
        processes: Sequence[psutil.Process],
        settings: Mapping[str, object] | None = None,
        adapters: VLLMAdapters | None = None,
        further_end: int | None = None,
        before: "VLLMEngine | None" = None,
    ) -> None:
        self._llm = llm
        self._settings = settings or {}
        self._stop = config.generator.stop
        self._further_ends = [] if further_end is None else [further_end]
        self._widths = config.widths
        vocabulary = llm.model_config.get_vocab_size() if self._widths else 0
        self._choice = sampling_parameters(config.generator, vocabulary=vocabulary)
        stored = config.generator.persist_every_tokens > 0
        self._progress_every_s = STORED_PROGRESS_EVERY_S if stored else PROGRESS_EVERY_S
        self.weights: VLLMWeights = VLLMWeights(
            llm,
            clear_cache=config.weights.kv_cache == "recompute",
            before=None if before is None else before.weights,
        )
        self._adapters = adapters
        self._processes = processes
        self._names = {process.pid: _name_of(process) for process in processes}
        folders = [] if adapters is None else [adapters.folder.name]
        self.processes = EngineProcesses.of(processes, also=folders)
        """The engine's processes, and its names in /dev/shm. The process that started the engine uses this to end and
        remove them, also after the engine was killed."""
        self._counted = prompt_tokens()
        """Prompt tokens of earlier runs."""
        self._requests = itertools.count()
        self._running: set[str] = set()
        self._aborts = 0
        self._sleeping: set[str] = set()

    @classmethod
    async def start(
        cls, config: Config, *, model_path: str, name: str = "", load_weights: bool = True, sleep_mode: bool = False
    ) -> "VLLMEngine":
        """Starts the engine's processes with the model at `model_path`. Call `prepare_environment` first.

        Requests without a seed are sampled from one stream of random numbers, which depends on `run.seed` and `name`:
        engines with different names draw different samples.

        Raises RunError with the reason when vLLM does not start. With `load_weights=False` the weights are random until
        `load`, and the directory needs only a config and a tokenizer. `sleep_mode` enables `sleep`, on GPUs only. With
        `model.lora`, the engine reads the weights at `model_path`, and `load` loads an adapter to them.
        """
        from vllm import AsyncEngineArgs
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
        from vllm.lora.request import LoRARequest
        from vllm.v1.engine.async_llm import AsyncLLM

        from asyncrl.vllm_internals import enable_envs_cache
        from asyncrl.weights import vllm_plugin

        vllm_plugin.register()
        lora = config.model.lora
        arguments = engine_arguments(
            config,
            device=device_of(config),
            model_path=model_path,
            name=name,
            load_weights=load_weights,
            sleep_mode=sleep_mode,
        )
        arguments["weight_transfer_config"] = WeightTransferConfig(backend=vllm_plugin.BACKEND)
        arguments["worker_extension_cls"] = vllm_plugin.WORKER_EXTENSION
        sized = config.generator.gpus == 0 or config.generator.kv_cache_gib is not None
        knob = "kv_cache_gib" if sized else "gpu_memory_utilization"
        with engine_starts(memory_knob=f"generator.{knob}"), children_begin_with("asyncrl.generation.engine_main"):
            llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
            processes = await processes_of(llm)
        await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
        # vLLM's start has drawn random numbers. The workers are seeded again, so that samples begin as in `taken_over`.
        await llm.collective_rpc("seed_samples", args=(arguments["seed"],))
        enable_envs_cache()  # otherwise each request reads vLLM's environment variables anew in this process
        tokenizer = load_tokenizer(model_path, chat=config.data.chat, chat_options=config.data.chat_options)
        adapters = None
        if lora is not None:
            adapters = VLLMAdapters(llm, make_request=LoRARequest, lora=lora, base=model_path)
        return cls(
            llm,
            config=config,
            processes=processes,
            settings=_settings(config, model_path=model_path, load_weights=load_weights, sleep_mode=sleep_mode),
            adapters=adapters,
            further_end=further_end(tokenizer),
        )

    @property
    def prompt_tokens(self) -> PromptTokens:
        return PromptTokens(*map(sub, prompt_tokens(), self._counted))

    # -- another run -----------------------------------------------------------------------------------------------

    async def rest(self) -> None:
        """Drops the state of a run that has ended: the cached prefixes, the label of the weights, and what its updates
        have left in the workers. The weights themselves stay until the first update of the next run.

        Raises RunError if the engine cannot serve another run: if it has died, sleeps or is paused, if requests run, if
        the last update is not whole, or if the cache is not empty afterwards. Also raises it for an engine with
        adapters, because it would keep those of its run.
        """
        if self._adapters is not None or self._sleeping or not self.weights.is_whole:
            raise RunError("the engine has adapters, sleeps, or its last weights are not whole")
        if self._running or self._llm.errored or self._llm.get_num_unfinished_requests() or await self._llm.is_paused():
            raise RunError("the engine has died, is paused, or has requests of the run that has ended")
        if not await self._llm.reset_prefix_cache():
            raise RunError("the engine's prefix cache cannot be emptied, although no request runs")
        await self._llm.collective_rpc("forget_updates")
        await self._llm.update_weight_version(NO_VERSION)

    async def taken_over(self, config: Config, *, model_path: str, name: str) -> "VLLMEngine":
        """Returns the engine of another run, after `rest`. It has the processes of this engine, and generates nothing
        before its first `load`. This object must not be used any more.

        Raises RunError if a new engine for the run would start with other arguments, environment variables, or files of
        the model. The seed and the files with the model's weights may differ.
        """
        settings = _settings(config, model_path=model_path, load_weights=False, sleep_mode=False)
        keys = {*settings, *self._settings}
        if differing := [key for key in keys if settings.get(key) != self._settings.get(key)]:
            raise RunError(f"a new engine of this run would have other settings: {', '.join(sorted(differing))}")
        await self._llm.collective_rpc("seed_samples", args=(engine_seed(config.run.seed, name),))
        tokenizer = load_tokenizer(model_path, chat=config.data.chat, chat_options=config.data.chat_options)
        return VLLMEngine(
            self._llm,
            config=config,
            processes=self._processes,
            settings=settings,
            further_end=further_end(tokenizer),
            before=self,
        )

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        n: int,
        seed: int | None,
        temperature: float,
        max_tokens: int,
        stop: Sequence[str] = (),
        prefix: Sequence[PartialCompletion] = (),
        on_progress: Callable[[Sampled], None] | None = None,
        count_non_greedy: bool = False,
    ) -> list[Completion]:
        stops = [*self._stop, *stop]
        sampling: dict[str, Any] = {
            "temperature": temperature,
            "logprobs": int(count_non_greedy),  # the number of the most probable tokens beside the sampled one
            "flat_logprobs": True,
            "stop": stops or None,
            "stop_token_ids": self._further_ends,
            "detokenize": bool(stops),  # stop strings need text after every token; otherwise we decode once, at the end
            **(self._choice if temperature > 0 else {}),
        }
        widths = self._widths if temperature > 0 else {}
        if not any(sample.token_ids for sample in prefix):
            children = [Child(NOTHING, index=index, widths=widths) for index in range(n)]
            requests = [self._request(prompt_ids, children, n=n, seed=seed, max_tokens=max_tokens, **sampling)]
        else:
            children = [Child(_ended_at(max_tokens, sample), widths=widths) for sample in prefix]
            requests = [
                self._request(
                    [*prompt_ids, *child.prefix.token_ids],
                    [child],
                    seed=None if seed is None else seed_of(seed, i, len(child.prefix.token_ids)),
                    max_tokens=max_tokens - len(child.prefix.token_ids),
                    **sampling,
                )
                for i, child in enumerate(children)
                if not child.prefix.finished
            ]
        with self._progress(children, on_progress):
            await _all_or_none(requests)
        tokens = sum(SampledByVLLM(self._llm, children).lengths)
        return await beside_loop(
            lambda: [self._completion(child, stops, counted=count_non_greedy) for child in children], tokens=tokens
        )

    async def score(self, tokens: Sequence[int]) -> list[float]:
        output = await self._request(tokens, [], max_tokens=1, prompt_logprobs=0, detokenize=False)
        entries = output.prompt_logprobs[1:]
        return [entry[token].logprob for entry, token in zip(entries, tokens[1:], strict=True)]

    async def load(
        self, manifest: Manifest, staged: StagedWeights, *, on_paused: Callable[[], None] | None = None
    ) -> LoadTimes:
        return await (self._adapters or self.weights).load(manifest, staged, on_paused=on_paused)

    async def read_back(self, manifest: Manifest, staged: StagedWeights) -> ReadBack:
        return ReadBack() if self._adapters else await self.weights.read_back(manifest, staged)

    async def abort(self) -> None:
        self._aborts += 1
        if self._running:
            await self._llm.abort(list(self._running))

    # -- memory --------------------------------------------------------------------------------------------------

    async def reset_cache(self) -> bool:
        """Drops all cached prefixes. vLLM computes running requests again. Returns True if the cache is now empty."""
        return bool(await self._llm.reset_prefix_cache(reset_running_requests=True))

    @property
    def is_awake(self) -> bool:
        """True if both weights and KV cache are on the device."""
        return not self._sleeping

    async def sleep(self) -> None:
        """Moves the weights to host memory, drops the KV cache, and aborts running requests.

        Needs an engine that was started with `sleep_mode`, on GPUs only.
        """
        if self.is_awake:
            await self._llm.sleep(level=1, mode="abort")
            self._sleeping = {"weights", "kv_cache"}

    async def wake(self, tags: Collection[str]) -> None:
        """Moves the `weights` back to the device, allocates the `kv_cache` again, or both. Ignores a tag that is awake.

        vLLM resumes scheduling when both are awake. Therefore wake the KV cache only when the weights are whole.
        """
        if tags := self._sleeping.intersection(tags):
            await self._llm.wake_up(sorted(tags))
            self._sleeping -= tags

    # -- processes -----------------------------------------------------------------------------------------------

    async def died(self) -> str:
        ended = await first_end(self._processes)
        named = f"{self._names[ended.pid]}, pid {ended.pid},"
        return cause_of_death(f"its process {named} has ended, for example because the machine's memory was full")

    async def shutdown(self) -> None:
        if self._llm.output_handler is not None and not self._llm.get_num_unfinished_requests():
            self._llm.output_handler.cancel()  # otherwise vLLM may log that the engine is dead
        await asyncio.to_thread(self._llm.shutdown, ENGINE_EXIT_S)
        self._llm.shutdown = lambda: None  # vLLM calls it again when Python ends, and this call would fail
        _, alive = await asyncio.to_thread(psutil.wait_procs, self._processes, ENGINE_EXIT_S)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.weights.close()
        sweep_shared_memory(self.processes.shared_memory)

    @contextmanager
    def _progress(self, children: Sequence[Child], on_progress: Callable[[Sampled], None] | None) -> Iterator[None]:
        """Calls `on_progress` from time to time, while the requests of the block run, with what they have sampled, and
        again when they have ended without an error."""
        if on_progress is None:
            yield
            return
        loop, sampled = asyncio.get_running_loop(), SampledByVLLM(self._llm, children)
        timer: asyncio.TimerHandle

        def report() -> None:
            nonlocal timer
            timer = loop.call_later(self._progress_every_s, report)
            if any(sampled.lengths):
                on_progress(sampled)

        timer = loop.call_later(self._progress_every_s, report)
        try:
            yield
        finally:
            timer.cancel()
        on_progress(sampled)

    def _completion(self, child: Child, stops: Sequence[str], *, counted: bool) -> Completion:
        """Returns the completion of a child whose request has ended, with its `non_greedy_tokens` if they are
        `counted`."""

        def decode(token_ids: Sequence[int]) -> str:
            text: str = self._llm.tokenizer.decode(token_ids, skip_special_tokens=True)
            return text

        sample = child.prefix if child.output is None else child.ended(child.output)
        # vLLM's own text is not used: it lacks the prefix, in which a stop string may begin. With stop strings, it also
        # begins with a space that `decode` leaves out for some tokenizers.
        sample = until_stop(sample, stops, decode) if stops else sample
        # The token of a further end is left out here: it need not be a special token, which `decode` leaves out.
        ended = sample.token_ids[-1:] == self._further_ends
        text = before_stop(decode(sample.token_ids[:-1] if ended else sample.token_ids), stops)
        return Completion(
            token_ids=sample.token_ids,
            logprobs=sample.logprobs,
            versions=sample.versions,
            text=text,
            truncated=sample.truncated,
            wide=sample.wide,
            non_greedy_tokens=non_greedy_tokens(child.output) if counted else None,
        )

    def _adapter(self) -> AbstractContextManager[Adapter | None]:
        """Returns a context manager for a new request, which yields the adapter to use and keeps it until the request
        ends. It yields None without `model.lora`."""
        return nullcontext() if self._adapters is None else self._adapters.used()

    async def _request(self, tokens: Sequence[int], children: Sequence[Child], **sampling: Any) -> Any:
        """Runs one request of vLLM, whose completions are `children`. `sampling` are fields of vLLM's `SamplingParams`.
        Returns vLLM's final output. Raises DataError if vLLM refuses the prompt, InfraError if the engine fails or the
        request is aborted, and the errors of `check_end`."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **sampling)
        request_id = f"asyncrl-{next(self._requests)}"
        # The salt keeps a new request from using a cached prefix that other weights have computed. The number of loads
        # is a part of it, because a version that was not whole is loaded again. vLLM tells adapters apart by itself.
        salt = f"{self.weights.version} {self.weights.loads}"
        # vLLM would render any other kind of prompt first, in an additional thread.
        prompt = tokens_input(list(tokens), cache_salt=salt)
        self._running.add(request_id)
        aborts = self._aborts
        final = None
        try:
            with self._adapter() as adapter:
                version, lora = (None, None) if adapter is None else (adapter.version, adapter.request)
                for child in children:
                    child.request_id, child.version = request_id, version
                async for output in self._llm.generate(prompt, parameters, request_id, lora_request=lora):
                    final = output
        except ValueError as error:
            raise DataError(f"vLLM refused the prompt: {error}", reason="prompt_refused") from error
        except Exception as error:
            cause = cause_of_death(f"{type(error).__name__}: {error}")
            raise InfraError(f"the engine failed: {cause}", reason="engine") from error
        finally:
            self._running.discard(request_id)
        if aborts != self._aborts:  # vLLM misses an abort of a request that it is adding at that moment
            raise InfraError("the request was aborted", reason="aborted")
        if final is None or not final.finished:
            raise InfraError("the engine ended a request without an output", reason="engine")
        for output in final.outputs:
            check_end(output.finish_reason)
        for child in children:
            child.output = final.outputs[child.index]
        return final


def _settings(config: Config, *, model_path: str, load_weights: bool, sleep_mode: bool) -> dict[str, object]:
    """Returns all on which the processes of an engine depend, except its seed: vLLM's arguments, the environment
    variables that asyncrl sets, and the model's files beside its weights, which come from the learner. The recipe of a
    tiny model is left out: it changes with the questions, and so with the seed."""
    device = device_of(config)
    arguments = engine_arguments(
        config, device=device, model_path=model_path, name="", load_weights=load_weights, sleep_mode=sleep_mode
    )
    del arguments["seed"]
    folder = Path(model_path)
    found = folder.iterdir() if folder.is_dir() else ()  # otherwise model_path names a model on the Hub
    described = [
        path for path in found if path.is_file() and path.suffix not in WEIGHT_FILES and path.name not in UNREAD_FILES
    ]
    files = {path.name: xxhash.xxh3_64_hexdigest(path.read_bytes()) for path in described}
    return {**arguments, "environment": engine_environment(config, {}), "files of the model": files}


def _name_of(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:  # the process has ended already, and `died` reports it
        return "vLLM"


async def processes_of(llm: Any) -> list[psutil.Process]:
    """Returns the processes of an engine that has started: those of its core, and its workers on this node.

    Other children of this process do not belong to the engine: the scoring processes of rewards and what these start,
    the resource trackers of Python, and compilers. They may end at any time.
    """
    cores = [psutil.Process(process.pid) for process in llm.engine_core.resources.engine_manager.processes]
    started_by_cores = {child.pid: child for core in cores for child in core.children(recursive=True)}
    workers = await llm.collective_rpc("process_id")
    return [*cores, *(started_by_cores[pid] for pid in workers if pid in started_by_cores)]


def _ended_at(max_tokens: int, sample: PartialCompletion) -> PartialCompletion:
    """Returns a sample of a prefix. If it has `max_tokens` tokens already, it is returned as finished and truncated."""
    if sample.finished or len(sample.token_ids) < max_tokens:
        return sample
    return dataclasses.replace(sample, finished=True, truncated=True)


async def _all_or_none(requests: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """Runs the requests concurrently. If one fails, cancels the others and raises the error of the failed one."""
    try:
        async with asyncio.TaskGroup() as group:
            for request in requests:
                group.create_task(request)
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures.exceptions[0].__cause__
