"""A replica's weights: waits for new versions, checks them, loads them, and verifies the loaded weights with a probe.

Invariants:

- Rollouts start only on a version that is loaded whole.
- From the first byte that the engine loads until the update counts as verified, no delivery of groups begins. An
  update that is not probed (`weights.probe_every_updates`) counts as verified when it is loaded.
- A torn replica (its load stopped half way, or its probe failed) has no version and starts no rollout until a whole
  update succeeds.
"""

import asyncio
import logging
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.errors import (
    FetchFailed,
    FirstParityError,
    InfraError,
    ManifestMismatch,
    ManifestVoid,
    ParityError,
    TornReplica,
    WeightError,
    WeightsDamaged,
)
from asyncrl.generation.interfaces import InferenceEngine
from asyncrl.metrics.recorders import GeneratorMetrics
from asyncrl.weights.manifest import Bytes, Manifest, ReadBack, check_manifest, is_news
from asyncrl.weights.parity import Differences, ParityJudge, ParityLimits
from asyncrl.weights.staging import Part, StagedWeights
from asyncrl.weights.store import Publication, WeightClient
from asyncrl.weights.transports.interfaces import BroadcastEnd, Transport

logger = logging.getLogger(__name__)

WEIGHTS_WAIT_S = 20.0
"""Longest time of one wait for a newer version, seconds. The wait is repeated until there is one."""
RETRY_PAUSE_S = 1.0
"""Seconds before a torn replica asks for weights again."""
REFETCH_PAUSE_S = 0.5
"""Seconds before weights are fetched again after an update was refused: its bytes were lost, late or damaged, or did
not fit. The pause doubles with each further refusal, up to `LONGEST_REFETCH_PAUSE_S`, until an update is loaded."""
LONGEST_REFETCH_PAUSE_S = 10.0
_NUMBER = re.compile(r"\.\d+\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateHooks:
    """The calls of a weight update to the replica whose weights change.

    `show_loading` records that generation has paused for an update (True) or goes on (False). `fail_unverified` fails
    the rollouts that run, and the groups that are finished and wait for the verdict of the probe: bad weights may have
    produced both. `report` reports the loaded version to the coordinator at once.
    """

    show_loading: Callable[[bool], None]
    fail_unverified: Callable[[InfraError], Awaitable[None]]
    report: Callable[[], Awaitable[None]]


class WeightUpdates:
    """Keeps one engine at the newest version. `run` never returns. It raises when the replica cannot go on."""

    def __init__(
        self,
        *,
        config: Config,
        name: str,
        engine: InferenceEngine,
        source: WeightClient,
        transport: Transport,
        parameters: Mapping[str, tuple[tuple[int, ...], str]],
        metrics: GeneratorMetrics,
        clock: Callable[[], float] = time.monotonic,
        staged_at: Path | None = None,
    ) -> None:
        self._limits = config.weights
        self._judge = ParityJudge(ParityLimits.of(config))
        self._changed_by_loader: frozenset[str] | None = None
        """Live parameters that are never as published, because the model's loader changes them. None until a probe has
        passed."""
        self._name = name
        self._engine = engine
        self._source = source
        self._transport = transport
        self._parameters = parameters
        self._metrics = metrics
        self._clock = clock

        self.version: Version | None = None
        """The version that is loaded and verified; None before the first one and while the replica is torn."""
        self.updates = 0
        """Number of versions that the engine has loaded whole."""
        self.parity_max_nats = 0.0
        """Largest difference (nats) of all probes that passed."""
        self._serial = 0
        self._staged = StagedWeights(staged_at)
        self._may_start = asyncio.Event()
        self._verified = asyncio.Event()
        self._held = asyncio.Lock()

    @asynccontextmanager
    async def held(self) -> AsyncIterator[Version | None]:
        """Keeps the engine at the loaded version until the block ends. Yields this version; None while the replica has
        none. Afterwards the newest version is fetched and loaded."""
        async with self._held:
            yield self.version

    async def startable(self) -> Version:
        """Waits until rollouts may start. Returns the version that they start with."""
        await self._may_start.wait()
        assert self.version is not None
        return self.version

    async def verified(self) -> None:
        """Waits until the last update counts as verified. From then on finished groups may be committed."""
        await self._verified.wait()

    async def run(self, replica: UpdateHooks) -> None:
        """Loads new versions into the engine, and calls the hooks of its replica. It may skip versions."""
        taking_part = self._transport.take_part(self._name, ended=self._broadcast_ended)
        receiving = asyncio.create_task(taking_part, name="broadcasts of weights")
        receiving.add_done_callback(_name_error)
        try:
            await self._load_all(replica)
        finally:
            receiving.cancel()

    def _broadcast_ended(self, end: BroadcastEnd) -> None:
        self._metrics.broadcast(outcome=end.outcome, bytes=end.nbytes, duration_s=end.seconds)

    async def _load_all(self, replica: UpdateHooks) -> None:
        newest = None
        torn_since_s: float | None = None
        refused: Version | None = None
        refusals = 0
        while True:
            publication = await self._source.newer_than(newest, wait_s=WEIGHTS_WAIT_S, besides=refused)
            if publication is None:
                continue
            newest = publication.manifest.version
            if self.version is None or publication.serial - self._serial > self._limits.max_lag_publications:
                self._may_start.clear()
            try:
                if not await self._update(publication, replica):
                    newest = self.version
                    continue
            except (ManifestMismatch, ManifestVoid, FetchFailed) as error:
                lasting = isinstance(error, ManifestMismatch) and not isinstance(error, WeightsDamaged)
                if self.version is None and lasting:
                    raise  # the replica's model differs from the learner's, so no later version would fit either
                # The next fetch asks for any version but this one. The store offers this one again if it has no other.
                refused, newest, refusals = newest, self.version, refusals + 1
                if isinstance(error, WeightsDamaged | ManifestVoid):
                    await self._source.refuse(publication.delivery)
                await self._refused(error, times=refusals)
                self._check_torn(torn_since_s, error)
                continue
            except (TornReplica, ParityError) as error:
                self._metrics.weight_update(outcome="torn", phase_seconds={})
                logger.error("replica %s starts no rollout until another weight update succeeds: %s", self._name, error)
                await self._mark_torn(error, replica)
                # Only a whole update repairs a torn replica. `newest = None` below makes the store give the same
                # version again, or a newer one.
                torn_since_s = torn_since_s or self._clock()
                self._check_torn(torn_since_s, error)
                newest = None
                await asyncio.sleep(RETRY_PAUSE_S)
                continue
            except WeightError:
                self._metrics.weight_update(outcome="failed", phase_seconds={})
                raise
            torn_since_s, refused, refusals = None, None, 0
            self._serial = publication.serial
            self._may_start.set()

    def _check_torn(self, since_s: float | None, error: WeightError) -> None:
        """Raises the error if the replica has been torn for longer than `weights.load_timeout_s`: its tickets must not
        wait for ever."""
        if since_s is not None and self._clock() - since_s > self._limits.load_timeout_s:
            raise error

    async def _refused(self, error: WeightError, *, times: int) -> None:
        """Logs the error of a refused update, the `times`-th one since an update was loaded, and pauses before the next
        one is fetched."""
        self._metrics.weight_update(outcome="refused", phase_seconds={})
        pause_s = min(LONGEST_REFETCH_PAUSE_S, REFETCH_PAUSE_S * 2 ** min(times - 1, 10))
        logger.error(
            "replica %s refused a weight update and keeps %s; it fetches weights again in %.1f s: %s",
            self._name,
            "no weights" if self.version is None else f"the weights of {self.version.words}",
            pause_s,
            error,
        )
        await asyncio.sleep(pause_s)

    async def _mark_torn(self, error: WeightError, replica: UpdateHooks) -> None:
        """Drops the version and stops admission. After a failed probe also fails all unverified groups as INFRA. After
        a load that broke off, the engine stays paused."""
        self.version = None
        self._may_start.clear()
        replica.show_loading(isinstance(error, TornReplica))
        if isinstance(error, ParityError):
            await self._engine.abort()
            await replica.fail_unverified(InfraError(str(error), reason="parity"))

    async def _update(self, publication: Publication, replica: UpdateHooks) -> bool:
        """Loads a version, unless it is loaded already. Returns False without loading it if it had to wait for the end
        of a `held` block: there may be a newer version by now."""
        manifest = publication.manifest
        if not is_news(manifest.version, self.version):
            self._metrics.weight_update(outcome="repeated", phase_seconds={})
            return True
        check_manifest(manifest, self._parameters)
        seconds = {}
        started_s = self._clock()
        await self._stage(publication)
        seconds["fetch"] = self._clock() - started_s
        if self._held.locked():
            self._staged.release()  # so that other replicas of the node need not wait for an evaluation of this one
            async with self._held:
                return False
        async with self._held:
            await self._load(manifest, replica, seconds)
        return True

    async def _load(self, manifest: Manifest, replica: UpdateHooks, seconds: dict[str, float]) -> None:
        """Loads the staged version, and verifies it if a probe is due. `seconds` has the time of each phase so far."""

        def paused() -> None:
            # From here until the update counts as verified, groups that these weights may have produced are not
            # committed.
            self._verified.clear()
            replica.show_loading(True)

        verify = (self.updates + 1) % self._limits.probe_every_updates == 0 or self.version is None
        live: ReadBack | None = None
        try:
            async with self._limited(manifest, doing="loading"):
                times = await self._engine.load(manifest, self._staged, on_paused=paused)
                loaded_s = self._clock()
                if verify:
                    live = await self._engine.read_back(manifest, self._staged)
        finally:
            self._staged.release()
            replica.show_loading(False)
        seconds |= {"pause": times.pause_s, "load": times.load_s, "resume": times.resume_s}
        self.updates += 1
        if live is not None:
            await self._verify(manifest, live)
        seconds["probe"] = self._clock() - loaded_s
        self.version = manifest.version
        self._verified.set()
        self._metrics.policy_version(manifest.version.step)
        self._metrics.weight_update(outcome="applied", phase_seconds=seconds)
        await replica.report()

    async def _stage(self, publication: Publication) -> None:
        """Stages a version, and keeps it staged until `release`. Generation goes on."""
        handles, deadline_s = publication.handles, math.inf

        async def fetch(part: Part) -> Bytes:
            nonlocal deadline_s
            deadline_s = min(deadline_s, time.monotonic() + self._limits.load_timeout_s)
            handle = handles[part.bucket] if part.link is None else handles[part.bucket][part.link]
            return await self._transport.receive(handle, timeout_s=max(0.0, deadline_s - time.monotonic()))

        await self._staged.stage(publication.manifest, fetch)
        self._transport.staged(publication.manifest.version)

    @asynccontextmanager
    async def _limited(self, manifest: Manifest, *, doing: str) -> AsyncIterator[None]:
        """Raises WeightError, which ends the replica, when the block takes longer than `weights.load_timeout_s`."""
        timeout_s = self._limits.load_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError:
            raise WeightError(
                f"{doing} the weights of {manifest.version.words} took longer than weights.load_timeout_s = "
                f"{timeout_s:g} s, so the replica ends its engine; raise the limit if {doing} needs more time"
            ) from None

    async def _verify(self, manifest: Manifest, live: ReadBack) -> None:
        """Judges the live parameters and the probe. Raises ParityError if the loaded weights are not the published
        ones; with `weights.on_parity_failure: alarm` it logs an error instead."""
        async with self._limited(manifest, doing="probing"):
            scores = await asyncio.gather(*[self._engine.score(tokens) for tokens in manifest.probe.tokens])
        found = Differences.of(manifest.probe.differences_nats(scores))
        verdict = self._judge.judge(found)
        is_first = self._changed_by_loader is None
        if is_first and verdict.ratio <= 1.0:
            self._learn_unread(live)
        differing = live.differing - (self._changed_by_loader or frozenset())
        self._metrics.parity(found.max_nats, ratio=math.inf if differing else verdict.ratio)
        if verdict.ratio <= 1.0 and not differing:
            self.parity_max_nats = max(self.parity_max_nats, found.max_nats)
            return
        message = (
            f"replica {self._name}: after loading the weights of {manifest.version.words} the engine's weights are not "
            "the learner's: "
        )
        if differing:
            message += (
                f"{len(differing)} of {len(live.alike | live.differing)} live parameters are not as published, such as "
                f"{', '.join(sorted(differing)[:3])}"
            )
        if verdict.ratio > 1.0:
            message += (
                f"{'; and ' if differing else ''}the engine's log-probs of the probe are not the learner's: "
                f"{verdict.words}; check that both pools use the same model and dtype, or raise the limits if the "
                "difference is only rounding"
            )
        if self._limits.on_parity_failure == "stop":
            if is_first and verdict.ratio > 1.0:
                raise FirstParityError(message, nats=found.max_nats)
            raise ParityError(message)
        logger.error("%s", message)

    def _learn_unread(self, live: ReadBack) -> None:
        """Remembers which live parameters cannot be compared, because the model's loader changes them. Called when a
        probe passes for the first time. A parameter that differs in all layers counts as changed by the loader: a fault
        that changed all layers would fail the probe."""
        alike = {_in_all_layers(name) for name in live.alike}
        self._changed_by_loader = frozenset(name for name in live.differing if _in_all_layers(name) not in alike)
        if unread := sorted(self._changed_by_loader | live.unread):
            logger.info(
                "replica %s: each update that is verified compares %d live parameters with the published ones, and %d "
                "are not compared, because vLLM keeps them in another form, such as %s; the probe verifies these",
                self._name,
                len(live.alike),
                len(unread),
                ", ".join(unread[:3]),
            )


def _in_all_layers(name: str) -> str:
    """Returns the name of a parameter without the numbers of layers.

    >>> _in_all_layers("model.layers.12.mlp.down_proj.weight")
    'model.layers.*.mlp.down_proj.weight'
    """
    return _NUMBER.sub(".*.", name)


def _name_error(receiving: "asyncio.Task[None]") -> None:
    if not receiving.cancelled() and (error := receiving.exception()) is not None:
        logger.error("broadcasts of weights are not received any more, so weights are fetched", exc_info=error)
