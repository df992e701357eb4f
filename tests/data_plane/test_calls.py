"""A wait for several calls returns results in order, raises the first failure at once, and ends at a deadline."""

from typing import Any

import pytest

from asyncrl.data_plane import calls


class Ray:
    """Calls finish in the order of `done`. Calls that are not in `done` never finish."""

    def __init__(self, *done: str) -> None:
        self._done = list(done)
        self.cancelled: list[str] = []

    def wait(self, refs: list[str], *, timeout: float) -> tuple[list[str], list[str]]:
        done = [self._done.pop(0)] if self._done else []
        return done, [ref for ref in refs if ref not in done]

    def get(self, ref: str, *, timeout: float) -> str:
        if ref == "bad":
            raise ValueError("bad")
        return ref.upper()

    def cancel(self, ref: str) -> None:
        self.cancelled.append(ref)


def found(monkeypatch: pytest.MonkeyPatch, ray: Ray, *refs: str) -> list[Any]:
    monkeypatch.setattr(calls, "ray", ray)
    return calls.answers(refs, timeout_s=7.0, what="asking")


def test_answers_come_in_the_order_of_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, Ray("b", "a"), "a", "b") == ["A", "B"]
    assert found(monkeypatch, Ray()) == []


def test_a_failure_does_not_wait_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="bad"):
        found(monkeypatch, Ray("bad"), "never", "bad")


def test_what_is_late_is_cancelled_and_the_limit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Ray("a")
    with pytest.raises(TimeoutError, match="asking took longer than 7 s"):
        found(monkeypatch, ray, "a", "never")
    assert ray.cancelled == ["never"]
