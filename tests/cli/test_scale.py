"""`asyncrl scale`: the size that it reads, and the progress that it prints."""

import msgspec
import pytest
from made_up_run import make_status

from asyncrl.buffer.fleet import ReplicaState
from asyncrl.cli.scale import _progress, _replicas, _wait
from asyncrl.coordinator.status import RunStatus
from asyncrl.errors import ConfigError, RunError


def test_a_size_is_a_number_of_generators() -> None:
    assert (_replicas("generators=4"), _replicas("generators=0")) == (4, 0)
    for wrong in ("4", "generators=-1", "generators=many", "learners=2", "generators=4.5"):
        with pytest.raises(ConfigError, match=r"generators=N with a whole number N"):
            _replicas(wrong)


def test_the_pool_has_its_size_when_all_replicas_are_healthy_and_no_other_one_is_left() -> None:
    (view,) = make_status().replicas
    healthy = msgspec.structs.replace(view, state=ReplicaState.HEALTHY, live=True)
    failed = msgspec.structs.replace(
        view, replica="generator-b", state=ReplicaState.RESTARTING, live=False, cause="EngineDied: killed"
    )
    one, both = make_status(replicas=(healthy,)), make_status(replicas=(healthy, failed))
    assert _progress(one, 1) == ("replicas: 1 healthy", True)
    assert _progress(one, 3) == ("replicas: 1 healthy, 2 starting", False)
    assert _progress(both, 2) == ("replicas: 1 healthy, 1 restarting; generator-b: EngineDied: killed", False)
    assert _progress(both, 1)[1] is False, "the other one has not ended"
    assert _progress(make_status(replicas=()), 0) == ("replicas: none", True)


def test_the_wait_ends_with_the_cause_when_a_replica_is_given_up() -> None:
    status = make_status(given_up={"generator-b": "no memory; it is not started again"})

    class Client:
        async def call(self, method: object) -> RunStatus:
            return status

    with pytest.raises(RunError, match="does not reach 2 replicas: generator-b: no memory; it is not started again"):
        _wait(Client(), 2)  # type: ignore[arg-type]
