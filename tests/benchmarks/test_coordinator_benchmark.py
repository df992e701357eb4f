"""The parts of the coordinator's benchmark run with the present interfaces. What they measure is not looked at."""

import asyncio

import pytest
from coordinator import at_scale, buffer_groups_per_s, commit_us

pytestmark = pytest.mark.slow


def test_the_measurements_run() -> None:
    assert asyncio.run(commit_us(waiting=3, commits=4)) > 0
    measured = asyncio.run(at_scale(groups=12, replicas=2))
    assert measured["brief status, bytes"] < measured["whole status, bytes"]
    assert buffer_groups_per_s(outstanding=40, groups=40) > 0
