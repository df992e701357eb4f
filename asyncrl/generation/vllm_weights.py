"""The weights of one vLLM engine: applies a version, whichever way its bytes arrive.

Invariant: the engine resumes only when no tensor of an update was applied, or all of them. After an update that failed
half way, it stays paused, has no version, and waits for a whole update.

    await weights.begin(version)            # pauses generation
    await weights.apply(update, some)       # `some` are the names of its tensors; called once or more
    await weights.commit(all_of_them)       # resumes generation, or raises TornReplica
"""

import asyncio
import functools
import os
import struct
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import or_
from typing import Any, TypeVar

import msgspec

from asyncrl.common.version import Version
from asyncrl.errors import CollectiveError, TornReplica, WeightError
from asyncrl.generation.interfaces import LoadTimes
from asyncrl.weights.manifest import Manifest, Parameters, ReadBack, TensorEntry, check_published, is_news
from asyncrl.weights.remote_errors import from_text
from asyncrl.weights.staging import StagedWeights
from asyncrl.weights.transports.ipc import SharedGroup
from asyncrl.weights.transports.peers import Rendezvous

ANSWER_S = 3.0
"""Seconds that the engine gets beyond the process group's own deadline. After that the engine counts as dead."""

DEATH_CHECK_S = 0.5
"""Seconds between two checks of whether the engine's process is alive, while a call is open."""

PREPARED = "<Q"
"""Format of a message of a worker that has prepared an update: the number of the preparation."""

Answer = TypeVar("Answer")


class VLLMWeights:
    """Applies updates to one `AsyncLLM`, one at a time. With `clear_cache`, each update drops the KV cache of earlier
    weights. `before` is the object that did this for an earlier run. Its pipe and its counts of preparations and loads
    are taken over, and its version is not."""

    def __init__(self, llm: Any, *, clear_cache: bool, before: "VLLMWeights | None" = None) -> None:
        self._llm = llm
        self._clear_cache = clear_cache
        self._session_open = False
        self._loading: Version | None = None
        self._applied: list[str] = []
        self._timeout_s = 0.0
        # The workers write into the pipe at the end of a preparation. They open it by the number of its descriptor. It
        # stays open as long as the engine, so that a late worker does not open another file with this number.
        self._pipe: tuple[int, int] | None = None if before is None else before._pipe
        self._preparations: int = 0 if before is None else before._preparations
        self.version: Version | None = None
        """The last version of which all tensors were applied; None from an update that failed half way until a whole
        one."""
        self.loads: int = 0 if before is None else before.loads
        """Number of updates that the engine's processes have begun."""
        self.is_whole = True
        """False from the beginning of an update until all of it is applied."""

    def close(self) -> None:
        """Closes the pipe. Call it when the engine's processes have ended."""
        for end in self._pipe or ():
            os.close(end)
        self._pipe = None

    async def name(self, version: Version) -> None:
        """Labels the tokens of the weights that the engine started with as those of `version`."""
        await self._llm.update_weight_version(str(version))
        self.version = version

    # -- bytes in a memory file --------------------------------------------------------------------------------------

    async def load(
        self, manifest: Manifest, staged: StagedWeights, *, on_paused: Callable[[], None] | None = None
    ) -> LoadTimes:
        """Applies a whole version from the flat buffer `staged`, which the caller has verified."""
        names = [entry.name for entry in manifest.tensors]
        update = _mapped(manifest, staged)
        await self._prepare(update)
        started_s = time.monotonic()
        paused_s = await self.begin(manifest.version, on_paused=on_paused)
        await self.apply(update, names)
        loaded_s = time.monotonic()
        await self.commit(names)
        return LoadTimes(pause_s=paused_s - started_s, load_s=loaded_s - paused_s, resume_s=time.monotonic() - loaded_s)

    async def read_back(self, manifest: Manifest, staged: StagedWeights) -> ReadBack:
        """Compares samples of the live parameters of each worker with the bytes in `staged`."""
        arguments = (_mapped(manifest, staged), self.loads)
        answers = await self._llm.collective_rpc("read_weights_back", args=arguments)
        return functools.reduce(or_, [msgspec.msgpack.decode(answer, type=ReadBack) for answer in answers])

    async def _prepare(self, update: dict[str, Any]) -> None:
        """Lets the engine's workers prepare an update, each in a thread, while they decode. Waits for all of them."""
        if self._pipe is None:
            self._pipe = os.pipe()
        reader, writer = self._pipe
        self._preparations += 1
        own, ended, loop = self._preparations, asyncio.Semaphore(0), asyncio.get_running_loop()

        def read() -> None:
            for (number,) in struct.iter_unpack(PREPARED, os.read(reader, 4096)):
                if number == own:  # other numbers are of updates that were given up
                    ended.release()

        loop.add_reader(reader, read)
        try:
            arguments = (update, f"/proc/{os.getpid()}/fd/{writer}", struct.pack(PREPARED, own))
            for _ in await self._llm.collective_rpc("prepare_weights", args=arguments):
                await ended.acquire()
        finally:
            loop.remove_reader(reader)

    # -- bytes from a process group with the learner's ranks ---------------------------------------------------------

    async def join_collective(self, rendezvous: Rendezvous, *, first_rank: int, parameters: Parameters) -> None:
        """Joins a new process group: the engine's workers become the ranks from `first_rank` on.

        `parameters` is the result of `expected_parameters` for the engine's model. Raises CollectiveError if the engine
        fails, or if ranks are missing after `rendezvous.timeout_s`.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self._timeout_s = rendezvous.timeout_s
        info = {
            "rendezvous": msgspec.to_builtins(rendezvous),
            "first_rank": first_rank,
            "parameters": {name: [list(shape), dtype] for name, (shape, dtype) in parameters.items()},
        }
        await self._answer(
            self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info)),
            what="joining the weights' process group",
        )

    async def receive(self) -> Manifest:
        """Receives one version from the group into the memory of the engine's workers, whole and checked. It is not
        applied yet.

        Call it at the same time as `send_snapshot` on the learner's ranks. Requests pause meanwhile, and continue
        afterwards, also after an error. Raises the same errors as `receive_snapshot`: ManifestMismatch, UpdateRefused
        and CollectiveError.
        """
        manifests = await self._answer(self._llm.collective_rpc("receive_weights"), what="receiving weights")
        return msgspec.msgpack.decode(manifests[0], type=Manifest)

    async def load_received(self, manifest: Manifest) -> None:
        """Applies the version that `receive` has returned."""
        names = [entry.name for entry in manifest.tensors]
        await self.begin(manifest.version)
        await self.apply({"received": str(manifest.version)}, names)
        await self.commit(names)

    async def _answer(self, call: Awaitable[Answer], *, what: str) -> Answer:
        answer = asyncio.ensure_future(call)
        try:
            async with asyncio.timeout(self._timeout_s + ANSWER_S):
                # If the engine's process dies during a call, vLLM never completes the call.
                while not (await asyncio.wait([answer], timeout=DEATH_CHECK_S))[0]:
                    if self._llm.errored:
                        raise CollectiveError(f"{what}: the engine's process has died")
                return answer.result()
        except TimeoutError as error:
            raise CollectiveError(
                f"{what}: the engine did not answer within weights.load_timeout_s = {self._timeout_s:g} s and "
                f"{ANSWER_S:g} s more; shut it down and start a new one"
            ) from error
        except WeightError:
            raise
        except Exception as error:
            known = from_text(str(error))
            raise known or CollectiveError(f"{what}: the engine failed ({type(error).__name__}: {error})") from error
        finally:
            answer.cancel()

    # -- bytes in memory that a learner's ranks share ----------------------------------------------------------------

    async def load_shared(self, handles: Mapping[str, SharedGroup], *, expected: Parameters) -> bool:
        """Applies one group of tensors in memory that the learner's ranks share. `handles`, from the policy's
        `get_weights_ipc_handles`, has the group for each device. Returns True if the update is complete, that is, if
        all parameters of `expected` were applied. The learner may free the group afterwards.

        The first group begins the update, and the last one completes it. Raises ManifestMismatch or VersionRegression
        before the first group is applied, and TornReplica for every error after that. Raises WeightError if `handles`
        is empty.
        """
        if not handles:
            raise WeightError(
                "a group of shared weights names no device; pass the handles of get_weights_ipc_handles unchanged"
            )
        group = next(iter(handles.values()))  # version and tensors are the same on every device
        names = [entry.name for entry in group.entries]
        if self._loading is None:
            is_news(group.version, self.version)
            _check_group(group.entries, expected)
            await self.begin(group.version)
        with self._torn_by_errors():
            _check_group(group.entries, expected)
            if group.version != self._loading:
                raise WeightError(
                    f"a group of weights {group.version} arrived during an update to {self._loading}; start the refit "
                    "again"
                )
            again = sorted(set(names).intersection(self._applied))
            if again:
                raise WeightError(f"the tensors {', '.join(again[:3])} arrived twice in one update")
        # CUDA IPC handles contain bytes, which msgspec would otherwise turn into text.
        await self.apply({"shared": msgspec.to_builtins(handles, builtin_types=(bytes,))}, names)
        if len(self._applied) < len(expected):
            return False
        await self.commit(list(expected))
        return True

    def start_over(self) -> None:
        """Discards an incomplete update by shared memory: the next group of tensors begins a new update."""
        self._loading = None

    # -- an update, step by step -------------------------------------------------------------------------------------

    async def begin(self, version: Version, *, on_paused: Callable[[], None] | None = None) -> float:
        """Pauses generation between two decoding steps, and opens an update to `version`. Returns when (monotonic
        seconds) generation had paused."""
        # `pause_generation` of AsyncLLM also sleeps for 20 ms, until earlier outputs are processed. This call does not:
        # each output names its version, so their order does not matter.
        await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=self._clear_cache)
        paused_s = time.monotonic()
        if on_paused is not None:
            on_paused()
        self._loading, self._applied, self.is_whole = version, [], False
        self.loads += 1
        with self._torn_by_errors():
            if self._session_open:
                await self._llm.finish_weight_update()
                self._session_open = False
            await self._llm.start_weight_update()
            self._session_open = True
        return paused_s

    async def apply(self, update: dict[str, Any], names: Sequence[str]) -> None:
        """Applies the tensors `names`, a part of the update. `update` tells vLLM's workers where the bytes are."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        with self._torn_by_errors():
            self._session_open = False  # vLLM closes it when the call raises
            await self._llm.update_weights(WeightTransferUpdateRequest(update_info=update))
            self._session_open = True
            self._applied += names

    async def commit(self, names: Sequence[str]) -> None:
        """Checks that the update had the tensors `names`, completes it, labels later tokens with it, and resumes."""
        with self._torn_by_errors():
            # vLLM does not raise when tensors are missing, so the names are counted here.
            if sorted(self._applied) != sorted(names):
                raise WeightError(
                    f"only {len(set(self._applied) & set(names))} of {len(names)} tensors of {self._loading} were "
                    "received; send a whole update"
                )
            await self._llm.finish_weight_update(weight_version=str(self._loading))
            self._session_open = False
        self.version, self._loading, self.is_whole = self._loading, None, True
        await self._llm.resume_generation()

    @contextmanager
    def _torn_by_errors(self) -> Iterator[None]:
        try:
            yield
        except TornReplica:  # an inner block has already raised it
            raise
        except Exception as error:
            self.version, loading, self._loading = None, self._loading, None
            raise TornReplica(
                f"loading weights {loading} failed half way ({type(error).__name__}: {error}); the replica stays "
                "paused until a whole update is applied"
            ) from error


def _mapped(manifest: Manifest, staged: StagedWeights) -> dict[str, Any]:
    """Returns the `update_info` with which vLLM's workers map and read the staged bytes of a version."""
    return {
        "path": staged.path,
        "nbytes": staged.flat.nbytes,
        "tensors": msgspec.to_builtins(manifest.tensors),
        "version": str(manifest.version),
    }


def _check_group(entries: Sequence[TensorEntry], expected: Parameters) -> None:
    """Raises ManifestMismatch unless every tensor is a parameter in `expected`, of the same shape and dtype."""

    found = {entry.name: (entry.shape, entry.dtype) for entry in entries}
    known = {name: expected[name] for name in found if name in expected}
    check_published(found, known, what="a group of shared weights")
