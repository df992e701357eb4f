"""The broadcast gate decides whether the learner publishes its current version now.

The learner publishes every `publish_every_steps` steps. It publishes earlier on demand: when every replica that could
start a group has the published version and was refused for staleness, only newer weights let the replicas go on. The
config requires `publish_every_steps ≤ η + 1`, so that the gate never makes learner and replicas wait for each other.
The module is pure and imports neither ray nor torch.
"""

from collections.abc import Collection

from asyncrl.common.version import Version
from asyncrl.coordinator.registry import AbleReplicas


def should_publish(
    *, version: Version, published: Version | None, publish_every_steps: int, able: Collection[AbleReplicas]
) -> bool:
    """Returns True if `version`, the learner's current one, should be published now. `able` are the replicas with a
    free slot, counted for each version that they have loaded.

    The first version of an incarnation is always published, because replicas may have no weights, or weights of an
    earlier incarnation. A version is published on demand if at least one replica has a free slot, and all such replicas
    have loaded `published` and are refused for staleness. A replica that is still loading `published` has not reserved
    with it yet, so the gate waits for it.

    >>> blocked = AbleReplicas(version=Version(1, 4), replicas=2, stale=2)
    >>> should_publish(version=Version(1, 5), published=Version(1, 4), publish_every_steps=3, able=[blocked])
    True
    >>> should_publish(version=Version(1, 5), published=Version(1, 4), publish_every_steps=3, able=[])
    False
    >>> should_publish(version=Version(1, 7), published=Version(1, 4), publish_every_steps=3, able=[])
    True
    """
    if published is None or published.incarnation < version.incarnation:
        return True
    if version <= published:
        return False
    if version.step - published.step >= publish_every_steps:
        return True
    return bool(able) and all(each.version == published and each.stale == each.replicas for each in able)
