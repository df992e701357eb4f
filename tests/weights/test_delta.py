"""Deltas: what is sent of a version, and that a replica has the learner's bytes or an error."""

from collections import Counter

import numpy as np
import pytest
import torch
from delta_chains import PROBE, SPECS, Memory, random_chain
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from asyncrl.common.version import Version
from asyncrl.weights.delta import SKIP, DeltaSender, decode, encode
from asyncrl.weights.manifest import Manifest, layout
from asyncrl.weights.publisher import snapshot_of
from asyncrl.weights.staging import StagedWeights

pytestmark = pytest.mark.slow  # imports torch

CHAINS = 400

BITS = arrays.arrays(np.uint16, st.integers(0, 700), elements=st.sampled_from([0, 1, 2**16 - 1]), fill=st.just(0))


@given(BITS, st.data())
def test_a_delta_gives_the_new_bytes(new: np.ndarray, data: st.DataObject) -> None:
    base = data.draw(arrays.arrays(np.uint16, len(new), elements=st.sampled_from([0, 1, 7]), fill=st.just(0)))
    delta = encode(base.view(np.uint8), new.view(np.uint8))
    assert decode(base.view(np.uint8), delta).tobytes() == new.tobytes()


@pytest.mark.parametrize("gap", [0, 1, SKIP - 1, SKIP, SKIP + 1, 3 * SKIP, 3 * SKIP + 7])
def test_a_change_after_any_number_of_equal_elements_has_its_place(gap: int) -> None:
    base, new = np.zeros(4 * SKIP, dtype=np.uint16), np.zeros(4 * SKIP, dtype=np.uint16)
    new[gap], new[-1] = 5, 6
    delta = encode(base.view(np.uint8), new.view(np.uint8))
    assert decode(base.view(np.uint8), delta).tobytes() == new.tobytes()
    assert delta.nbytes == 8 + 2 * 2 + 2 + gap // SKIP + (4 * SKIP - gap - 2) // SKIP


@given(arrays.arrays(np.uint8, st.integers(0, 60)))
def test_bytes_that_are_no_delta_are_refused_or_give_as_many_bytes(damaged: np.ndarray) -> None:
    base = np.zeros(40, dtype=np.uint8)
    try:
        assert decode(base, damaged).nbytes == base.nbytes
    except ValueError:
        assert not base.any(), "the base is not changed"


@pytest.mark.fault("F12")
def test_in_random_histories_every_replica_has_the_learners_bytes_or_an_error() -> None:
    """`python tests/weights/delta_chains.py 10000` runs more of them."""
    totals = Counter[str]()
    for seed in range(CHAINS):
        totals += random_chain(seed)
    kinds = {
        "deltas",
        "whole",
        "staged",
        "lost",
        "bit",
        "cut",
        "other",
        "repeated",
        "WeightsDamaged",
        "not recorded",
        "again",
    }
    assert kinds - {"lost"} <= totals.keys()
    assert totals["Lost"] > 0


def test_a_replica_fetches_only_the_links_that_it_lacks() -> None:
    """The newest version is enough, also after versions that the replica left out, and for one that starts."""
    sender, memory, versions = DeltaSender(anchor_every=4), Memory(), []
    values, stored = torch.zeros(8, 40), None
    for step in range(6):
        values[0, step] = 1.0
        snapshot = snapshot_of([("a", 0, values)], layout(SPECS[:1]), bucket_bytes=1000)
        [sent] = sender.deliver(snapshot, memory, Version(1, step), previous=stored)  # type: ignore[arg-type]
        stored = Version(1, step)
        versions.append(Manifest(version=stored, tensors=layout(SPECS[:1]), buckets=(sent.bucket,), probe=PROBE))
    assert [version.sent_bytes for version in versions] == [640, 11, 11, 11, 640, 11]
    assert [len(version.buckets[0].links) for version in versions] == [1, 2, 3, 4, 1, 2]

    def missing(replica: StagedWeights, step: int) -> list[int | None]:
        replica.begin(versions[step])
        parts, links = replica.missing, versions[step].buckets[0].links
        for part in parts:
            assert part.link is not None
            replica.put(part, memory.parts[links[part.link].version.step])
        return [part.link for part in parts]

    steady, late = StagedWeights(), StagedWeights()
    assert [missing(steady, step) for step in (0, 1, 3, 4, 5)] == [[0], [1], [2, 3], [0], [1]]
    assert missing(late, 3) == [0, 1, 2, 3]
    assert missing(late, 5) == [0, 1]
    for replica in (steady, late):
        replica.close()
