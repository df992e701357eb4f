"""Ranks of one node are consecutive, a copy of the model that spans nodes is warned of, and sockets use the interface
of the node's address."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.ranks.actor import rank_order, socket_interfaces, spanning_groups, spanning_warning

ADDRESSES = {
    "lo": {"127.0.0.1", "::1"},
    "docker0": {"172.17.0.1"},
    "eth1": {"10.0.0.7", "fe80::1%eth1"},
    "eth10": {"192.0.2.9"},
}


@given(nodes=st.lists(st.sampled_from("abcd"), min_size=1, max_size=16), shards=st.integers(1, 8))
def test_each_bundle_is_one_rank_and_the_ranks_of_a_node_are_consecutive(nodes: list[str], shards: int) -> None:
    order = rank_order(nodes, shards=shards)
    assert sorted(order) == list(range(len(nodes)))
    along = [nodes[bundle] for bundle in order]
    assert sum(one != other for one, other in itertools.pairwise(along)) == len(set(nodes)) - 1


@given(nodes=st.lists(st.sampled_from("abcd"), min_size=1, max_size=16), shards=st.integers(1, 8))
def test_a_node_whose_ranks_are_whole_copies_shares_none(nodes: list[str], shards: int) -> None:
    along = [nodes[bundle] for bundle in rank_order(nodes, shards=shards)]
    shared = {node for group in spanning_groups(along, shards=shards).values() for node in group}
    assert not any(count % shards == 0 for node, count in Counter(nodes).items() if node in shared)


def test_bundles_that_ray_mixes_are_sorted_so_that_no_copy_spans_nodes() -> None:
    mixed = ["a", "b", "a", "b", "b", "a", "b", "a"]
    assert spanning_groups(mixed, shards=4) == {0: ["a", "b"], 4: ["b", "a"]}
    along = [mixed[bundle] for bundle in rank_order(mixed, shards=4)]
    assert along == [*"aaaabbbb"]
    assert spanning_warning(along, shards=4) is None


def test_the_warning_names_ranks_nodes_and_the_value_that_fits() -> None:
    text = spanning_warning(["gpu-a"] * 4 + ["gpu-b"] * 4, shards=None)
    assert text is not None
    assert "ranks 0 to 7 on gpu-a and gpu-b" in text
    assert "learner.shards = unset and gpu-a has 4, gpu-b has 4; set learner.shards = 4, if" in text
    text = spanning_warning(["gpu-a"] * 3 + ["gpu-b"] * 3, shards=2)
    assert text is not None
    assert "ranks 2 to 3 on gpu-a and gpu-b" in text
    assert "learner.shards = 2 and gpu-a has 3, gpu-b has 3; set learner.shards = 3" in text


def test_without_a_common_size_the_warning_asks_for_as_many_ranks_on_each_node() -> None:
    text = spanning_warning(["gpu-a"] * 3 + ["gpu-b"], shards=2)
    assert text is not None
    assert "use as many ranks on each node (learner.ranks, learner.node_labels)" in text


@pytest.mark.parametrize("shards", [None, 1, 2])
def test_ranks_on_one_node_need_no_warning(shards: int | None) -> None:
    assert spanning_warning(["gpu-a"] * 4, shards=shards) is None


def test_a_rank_of_several_nodes_uses_the_interface_of_its_own_address() -> None:
    found = socket_interfaces(node="10.0.0.7", rendezvous="10.0.0.3", interfaces=ADDRESSES)
    assert found == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}


def test_on_a_loopback_cluster_all_sockets_use_lo() -> None:
    found = socket_interfaces(node="127.0.0.1", rendezvous="127.0.0.1", interfaces=ADDRESSES)
    assert found == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}


def test_ranks_of_one_node_of_a_cluster_meet_on_lo_and_send_weights_from_the_node_s_interface() -> None:
    found = socket_interfaces(node="10.0.0.7", rendezvous="127.0.0.1", interfaces=ADDRESSES)
    assert found == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=eth1"}


def test_an_address_of_no_interface_sets_nothing() -> None:
    assert socket_interfaces(node="203.0.113.5", rendezvous="203.0.113.5", interfaces=ADDRESSES) == {}
