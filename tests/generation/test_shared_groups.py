"""An update by groups begins with the first group and ends with the group that completes it; otherwise it is torn."""

from typing import Any

import msgspec
import pytest

from asyncrl.common.version import Version
from asyncrl.errors import ManifestMismatch, TornReplica, VersionRegression, WeightError
from asyncrl.generation.vllm_weights import VLLMWeights
from asyncrl.weights.manifest import TensorEntry
from asyncrl.weights.transports.ipc import SharedGroup

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]  # imports torch

EXPECTED = dict.fromkeys(("a", "b", "c"), ((2, 3), "float32"))


class Engine:
    """Records the requests to vLLM. The next update raises `fail`."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.requests: list[Any] = []
        self.fail: Exception | None = None
        self.engine_core = self

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any, **options: Any) -> None:
            self.calls.append(options.get("weight_version") or name)
            self.requests += arguments
            if name == "update_weights" and self.fail is not None:
                error, self.fail = self.fail, None
                raise error

        return call


def group(*names: str, step: int = 3, shape: tuple[int, ...] = (2, 3)) -> dict[str, SharedGroup]:
    entries = tuple(
        TensorEntry(name=name, shape=shape, dtype="float32", offset=64 * i, nbytes=24) for i, name in enumerate(names)
    )
    return {"cpu:here": SharedGroup(version=Version(1, step), entries=entries, nbytes=64, checksum="", path="/")}


class Scene:
    def __init__(self) -> None:
        self.engine = Engine()
        self.weights = VLLMWeights(self.engine, clear_cache=True)

    async def load(self, *names: str, **options: Any) -> bool:
        return await self.weights.load_shared(group(*names, **options), expected=EXPECTED)


async def test_the_handle_of_a_gpu_arrives_byte_for_byte() -> None:
    scene = Scene()
    [shared] = group("a").values()
    on_gpu = msgspec.structs.replace(shared, path="", cuda=(0, b"\x00\xffhandle", 64))
    await scene.weights.load_shared({"gpu": on_gpu}, expected=EXPECTED)
    [request] = scene.engine.requests
    assert msgspec.convert(request.update_info["shared"], dict[str, SharedGroup]) == {"gpu": on_gpu}


async def test_the_first_group_stands_still_and_the_last_goes_on() -> None:
    scene = Scene()
    assert await scene.load("a", "b") is False
    assert not scene.weights.is_whole
    assert await scene.load("c") is True
    assert scene.weights.is_whole
    assert scene.weights.version == Version(1, 3)
    assert scene.engine.calls == [
        "pause_scheduler_async",
        "start_weight_update",
        "update_weights",
        "update_weights",
        "1.3",
        "resume_generation",
    ]


@pytest.mark.parametrize("unfit", [{"shape": (3, 2)}, {"names": ("a", "x")}])
@pytest.mark.fault("F12")
async def test_a_first_group_that_does_not_fit_is_refused_before_anything_stands_still(unfit: Any) -> None:
    scene = Scene()
    with pytest.raises(ManifestMismatch, match="nothing was applied"):
        await scene.load(*unfit.get("names", ("a",)), shape=unfit.get("shape", (2, 3)))
    assert scene.weights.is_whole
    assert not scene.engine.calls


async def test_a_group_on_no_device_is_refused() -> None:
    with pytest.raises(WeightError, match="names no device"):
        await Scene().weights.load_shared({}, expected=EXPECTED)


@pytest.mark.fault("F13")
async def test_an_older_version_is_refused_and_a_repeated_one_is_not() -> None:
    scene = Scene()
    await scene.load("a", "b", "c")
    with pytest.raises(VersionRegression):
        await scene.load("a", step=2)
    assert scene.weights.is_whole
    assert await scene.load("a", "b", "c") is True


@pytest.mark.parametrize(
    ("second", "why"),
    [
        ({"names": ("a",)}, "a arrived twice"),
        ({"names": ("b",), "step": 4}, "1.4 arrived during an update to 1.3"),
        ({"names": ("b",), "shape": (3, 2)}, "b is float32"),
    ],
)
@pytest.mark.fault("F11")
async def test_from_the_first_group_on_what_does_not_fit_tears(second: dict[str, Any], why: str) -> None:
    scene = Scene()
    await scene.load("a")
    names = second.pop("names")
    with pytest.raises(TornReplica, match=why):
        await scene.load(*names, **second)
    assert not scene.weights.is_whole
    assert scene.weights.version is None
    assert "resume_generation" not in scene.engine.calls


@pytest.mark.fault("F11")
async def test_a_group_that_failed_is_mended_by_whole_weights_alone() -> None:
    scene = Scene()
    await scene.load("a")
    scene.engine.fail = RuntimeError("no memory")
    with pytest.raises(TornReplica, match=r"1\.3 failed half way .RuntimeError: no memory"):
        await scene.load("b")
    assert [await scene.load(name) for name in ("c", "b")] == [False, False], "a failed update is never completed"
    scene.weights.start_over()
    assert not scene.weights.is_whole
    assert await scene.load("a", "b") is False
    assert await scene.load("c") is True
    assert scene.weights.is_whole


async def test_an_update_that_was_given_up_is_forgotten_when_the_next_starts_over() -> None:
    scene = Scene()
    await scene.load("a", "b")
    scene.weights.start_over()
    assert not scene.weights.is_whole, "only a part of the update was applied"
    assert await scene.load("a") is False
    assert await scene.load("b", "c") is True
