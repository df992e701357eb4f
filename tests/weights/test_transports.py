"""Weights through Ray's object store: lost bytes raise an error of their own type."""

from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, OwnerDiedError

from asyncrl.errors import FetchTimeout, ManifestVoid
from asyncrl.weights.transports import object_store
from asyncrl.weights.transports.object_store import ObjectStoreTransport


def failing_with(error: Exception) -> Any:
    def get(handle: Any, *, timeout: float) -> Any:
        raise error

    return get


@pytest.mark.asyncio
@pytest.mark.fault("F11")
async def test_a_sender_that_died_before_its_bytes_arrived_voids_the_manifest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    died = OwnerDiedError("00ffffffffffffffffffffff0100000001000000", None, "publisher")  # type: ignore[no-untyped-call]
    monkeypatch.setattr(object_store.ray, "get", failing_with(died))
    with pytest.raises(ManifestVoid, match="the process that published these weights has ended"):
        await ObjectStoreTransport().receive("handle", timeout_s=1.0)


@pytest.mark.asyncio
async def test_bytes_that_do_not_arrive_in_time_name_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store.ray, "get", failing_with(GetTimeoutError()))
    with pytest.raises(FetchTimeout, match=r"weights\.load_timeout_s = 7 s"):
        await ObjectStoreTransport().receive("handle", timeout_s=7.0)
