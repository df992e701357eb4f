"""`asyncrl scale`: the size that it reads, and the progress that it prints."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click.testing import Result
from made_up_run import make_status
from typer.testing import CliRunner

from asyncrl.buffer.fleet import ReplicaState
from asyncrl.cli import scale as command
from asyncrl.cli.main import app
from asyncrl.coordinator.coordinator import Coordinator
from asyncrl.coordinator.registry import Registry
from asyncrl.coordinator.status import RunStatus

Scale = Callable[..., Result]


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> Scale:
    """Returns a function that calls the command for a run with these states, one after the other."""

    def call(size: str, *states: RunStatus) -> Result:
        statuses = iter(states)

        async def answer(method: object, *arguments: int, **options: str) -> Any:
            if method is Registry.scale:
                assert options["because"].startswith(f"`asyncrl scale` asked for {arguments[0]} replica")
                return {"generator-d": arguments[0]}
            assert method is Coordinator.status
            return next(statuses)

        monkeypatch.setattr(command, "joined_run", lambda *_: SimpleNamespace(call=answer))
        result = CliRunner().invoke(app, ["scale", str(Path("runs/quick")), size])
        assert next(statuses, None) is None, "the command has not waited for all states"
        return result

    monkeypatch.setattr(command, "LOOK_EVERY_S", 0.0)
    return call


def lines(result: Result) -> list[str]:
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


@pytest.mark.parametrize("size", ["4", "generators=-1", "generators=many", "learners=2", "generators=4.5"])
def test_a_size_is_a_number_of_generators(size: str, scale: Scale) -> None:
    result = scale(size)
    assert result.exit_code == 2
    assert "generators=N with a whole number N" in result.stderr


def test_the_wait_ends_when_all_replicas_are_healthy_and_no_other_one_is_left(scale: Scale) -> None:
    (view,) = make_status().replicas
    healthy = msgspec.structs.replace(view, state=ReplicaState.HEALTHY, live=True)
    failed = msgspec.structs.replace(
        view, replica="generator-b", state=ReplicaState.RESTARTING, live=False, cause="EngineDied: killed"
    )
    one, both = make_status(replicas=(healthy,)), make_status(replicas=(healthy, failed))
    three = make_status(replicas=(healthy,) * 3)
    assert lines(scale("generators=3", one, three)) == [
        "generator-d: 3 replicas", "replicas: 1 healthy, 2 starting", "replicas: 3 healthy",
    ]  # fmt: skip
    assert lines(scale("generators=1", both, one)) == [
        "generator-d: 1 replica",
        "replicas: 1 healthy, 1 restarting; generator-b: EngineDied: killed",
        "replicas: 1 healthy",
    ], "the other one has not ended"
    assert lines(scale("generators=0", make_status(replicas=()))) == ["generator-d: 0 replicas", "replicas: none"]


def test_the_wait_ends_with_the_cause_when_a_replica_is_given_up(scale: Scale) -> None:
    result = scale("generators=2", make_status(given_up={"generator-b": "no memory; it is not started again"}))
    assert result.exit_code == 1
    assert "does not reach 2 replicas: generator-b: no memory; it is not started again" in result.stderr
