"""The broadcast gate: is the learner's version published now?

Every `publish_every_steps` steps, or earlier on demand: when all that could start a group stand at the published
version and are refused for staleness, only newer weights let them go on. `publish_every_steps ≤ η + 1`, which the
config holds, so that the gate alone never leaves both sides waiting for each other. Pure; imports no ray and no torch.
"""

from collections.abc import Iterable

from asyncrl.buffer.records import Refusal, ReplicaView, Version


def should_publish(
    *, version: Version, published: Version | None, publish_every_steps: int, replicas: Iterable[ReplicaView]
) -> bool:
    """Whether `version`, the learner's own, is to be published now.

    The first version of an incarnation always is: replicas may hold nothing, or weights of a history that is gone. On
    demand, every live replica with a free concurrency slot, at least one, must stand at `published` and have been
    refused for staleness; one that is still loading has not asked at the new version yet, and is waited for.

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
