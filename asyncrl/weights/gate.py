"""The broadcast gate decides whether the learner publishes its current version now.

The learner publishes every `publish_every_steps` steps. It publishes earlier on demand: when every replica that could
start a group has the published version and was refused for staleness, only newer weights let the replicas go on. The
config requires `publish_every_steps ≤ η + 1`, so that the gate never makes learner and replicas wait for each other.
The module is pure and imports neither ray nor torch.
"""

from collections.abc import Iterable

from asyncrl.buffer.records import Refusal
from asyncrl.common.version import Version
from asyncrl.coordinator.replicas import ReplicaView


def should_publish(
    *, version: Version, published: Version | None, publish_every_steps: int, replicas: Iterable[ReplicaView]
) -> bool:
    """Returns True if `version`, the learner's current one, should be published now.

    The first version of an incarnation is always published, because replicas may have no weights, or weights of an
    earlier incarnation. A version is published on demand if at least one live replica has a free slot, and all such
    replicas have loaded `published` and were refused for staleness. A replica that is still loading `published` has not
    reserved with it yet, so the gate waits for it.

    >>> blocked = ReplicaView(replica="a", version=Version(1, 4), free_slots=2, reserved_groups=0, live=True,
    ...     silent_s=0.0, refused_for=Refusal.STALENESS)
    >>> should_publish(version=Version(1, 5), published=Version(1, 4), publish_every_steps=3, replicas=[blocked])
    True
    >>> should_publish(version=Version(1, 5), published=Version(1, 4), publish_every_steps=3, replicas=[])
    False
    >>> should_publish(version=Version(1, 7), published=Version(1, 4), publish_every_steps=3, replicas=[])
    True
    """
    if published is None or published.incarnation < version.incarnation:
        return True
    if version <= published:
        return False
    if version.step - published.step >= publish_every_steps:
        return True
    able = [replica for replica in replicas if replica.live and replica.free_slots > 0]
    return bool(able) and all(
        replica.version == published and replica.refused_for is Refusal.STALENESS for replica in able
    )
