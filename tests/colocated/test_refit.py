"""A refit makes its calls in the right order, and only the answer True counts as success."""

from typing import Any

import pytest
import ray

from asyncrl.colocated.refit import refit_by_broadcast, refit_colocated
from asyncrl.common.version import Version
from asyncrl.errors import WeightError
from asyncrl.generation.interfaces import all_succeeded


class Recorder:
    """A policy and a generation in one object. Records the calls in order, and returns `answers` or True."""

    def __init__(self, **answers: Any) -> None:
        self.calls: list[str] = []
        self._answers = {
            "prepare_weights_for_ipc": [["a", "b"], ["c"]],
            "prepare_for_generation": True,
            "update_weights_from_ipc_handles": True,
            **answers,
        }

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            detail = options.get("tags") or (args[0] if name == "get_weights_ipc_handles" else "")
            self.calls.append(f"{name} {','.join(detail)}".strip())
            return self._answers.get(name)

        return call


def test_the_policy_makes_room_before_weights_wake_and_again_before_the_kv_cache_does() -> None:
    both: Any = Recorder()
    refit_colocated(both, both)
    assert both.calls == [
        "offload_before_refit",
        "prepare_for_generation weights",
        "prepare_weights_for_ipc",
        "get_weights_ipc_handles a,b",
        "update_weights_from_ipc_handles",
        "get_weights_ipc_handles c",
        "update_weights_from_ipc_handles",
        "offload_after_refit",
        "prepare_for_generation kv_cache",
    ]


@pytest.mark.parametrize("answer", [False, None])
@pytest.mark.parametrize("call", ["prepare_for_generation", "update_weights_from_ipc_handles"])
def test_what_does_not_succeed_is_raised_and_ends_the_refit(call: str, answer: Any) -> None:
    both: Any = Recorder(**{call: answer})
    with pytest.raises(WeightError, match="did not succeed on every engine"):
        refit_colocated(both, both)
    assert both.calls[-1].startswith(call)
    assert both.calls.count("update_weights_from_ipc_handles") == (call == "update_weights_from_ipc_handles")


@pytest.mark.parametrize(
    ("answers", "success"), [([True, True], True), ([True, None], False), ([True, 1], False), ([], False)]
)
def test_success_is_true_from_everybody_and_nobody_is_no_success(answers: list[Any], success: bool) -> None:
    assert all_succeeded(answers) is success


class WithoutVersions:
    """A policy of a user, written for the first form of the interface: none of its calls takes a version."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def offload_before_refit(self) -> None: ...
    def offload_after_refit(self) -> None: ...

    def prepare_weights_for_ipc(self) -> list[list[str]]:
        self.calls.append("prepare_weights_for_ipc")
        return [["a"]]

    def get_weights_ipc_handles(self, keys: list[str]) -> dict[str, Any]:
        return {}

    def broadcast_weights_for_collective(self) -> list[Any]:
        self.calls.append("broadcast_weights_for_collective")
        return ["sent"]


def test_a_policy_whose_calls_take_no_version_is_asked_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    policy: Any = WithoutVersions()
    engines: Any = Recorder(update_weights_from_collective=["received"])
    monkeypatch.setattr(ray, "get", lambda ref: True)
    refit_by_broadcast(policy, engines)
    refit_colocated(policy, engines)
    assert policy.calls == ["broadcast_weights_for_collective", "prepare_weights_for_ipc"]
    with pytest.raises(TypeError, match="version"):
        refit_by_broadcast(policy, engines, version=Version(1, 2))
