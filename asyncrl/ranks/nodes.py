"""The nodes of a model's ranks: which rank is where, and through which network interface the ranks connect.

FSDP gathers the parameters of each layer in each pass among the ranks of one copy of the model, which are consecutive
(`learner.shards`, HSDP). Within a node that is ten to fifty times as fast as between nodes. So the ranks of one node
are consecutive too.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence


def rank_order(nodes: Sequence[str], *, shards: int) -> list[int]:
    """Returns the bundles of a placement group in the order of ranks. `nodes[i]` is the node of bundle i.

    The bundles of one node are consecutive. Nodes whose bundles make up whole copies of `shards` ranks come first, so
    that no other node shifts them.

    >>> rank_order(["a", "b", "a", "b"], shards=2)
    [0, 2, 1, 3]
    >>> rank_order(["a", "b", "c", "b", "c", "c"], shards=2)
    [1, 3, 0, 2, 4, 5]
    """
    counts = Counter(nodes)

    def place(bundle: int) -> tuple[bool, int, int]:
        node = nodes[bundle]
        return counts[node] % shards != 0, nodes.index(node), bundle

    return sorted(range(len(nodes)), key=place)


def spanning_groups(nodes: Sequence[str], *, shards: int) -> dict[int, list[str]]:
    """Returns the nodes of each copy of the model that is on several nodes, by its first rank. `nodes[r]` is the node
    of rank r, and a copy has `shards` consecutive ranks.

    >>> spanning_groups(["a", "a", "a", "b"], shards=2)
    {2: ['a', 'b']}
    """
    groups = {first: list(dict.fromkeys(nodes[first : first + shards])) for first in range(0, len(nodes), shards)}
    return {first: found for first, found in groups.items() if len(found) > 1}


def spanning_warning(nodes: Sequence[str], *, shards: int | None) -> str | None:
    """Returns a warning if a copy of the learner's model is on several nodes; else None. `nodes[r]` is the name of the
    node of rank r. `shards` is `learner.shards`."""
    size = shards or len(nodes)
    spanning = spanning_groups(nodes, shards=size)
    if not spanning:
        return None
    where = "; ".join(f"ranks {first} to {first + size - 1} on {' and '.join(on)}" for first, on in spanning.items())
    counts = Counter(nodes)
    fits = math.gcd(*counts.values())
    advice = (
        f"set learner.shards = {fits}, if the GPUs of {fits} ranks hold a copy of the model"
        if fits > 1 and fits != size
        else "use as many ranks on each node (learner.ranks, learner.node_labels), and set learner.shards to a divisor "
        "of that number"
    )
    have = ", ".join(f"{node} has {count}" for node, count in counts.items())
    return (
        f"learner ranks that share one copy of the model are on several nodes: {where}. Each pass then gathers the "
        f"parameters over the network, with learner.shards = {'unset' if shards is None else shards} and {have}; "
        f"{advice}"
    )


def socket_interfaces(*, node: str, rendezvous: str, interfaces: Mapping[str, Collection[str]]) -> dict[str, str]:
    """Returns the environment variables that tell gloo and NCCL the network interface of a rank.

    `node` is the rank's address in Ray, `rendezvous` the address at which the ranks meet, and `interfaces` has the
    addresses of each interface. gloo would look up the host's name, which Debian and Ubuntu map to 127.0.1.1, and NCCL
    would take the first interface, which may be one of Docker. A variable is left out if no interface has the address.
    Ranks of one node meet at 127.0.0.1. NCCL still gets the interface of `node`, because the same processes send
    weights to the engines of other nodes.
    """
    loopback = rendezvous.startswith("127.")
    gloo = _interface(rendezvous if loopback else node, interfaces)
    nccl = _interface(node, interfaces)
    # Without `=`, NCCL takes all interfaces whose names begin with the value: eth1 and eth10.
    return ({} if gloo is None else {"GLOO_SOCKET_IFNAME": gloo}) | (
        {} if nccl is None else {"NCCL_SOCKET_IFNAME": f"={nccl}"}
    )


def _interface(address: str, interfaces: Mapping[str, Collection[str]]) -> str | None:
    return next((name for name, addresses in interfaces.items() if address in addresses), None)
