"""A version of the weights."""

import msgspec


class Version(msgspec.Struct, frozen=True, order=True):
    """A version of the weights: (incarnation, step). Its text form is `2.140`. Ordered by incarnation, then by step."""

    incarnation: int
    step: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.step}"

    @classmethod
    def parse(cls, label: str) -> "Version":
        """Returns the version with the text form `label`.

        Raises ValueError for any other text, for example for vLLM's initial label `default`.
        """
        incarnation, dot, step = label.partition(".")
        if not (dot and incarnation.isdecimal() and step.isdecimal()):
            raise ValueError(f"{label!r} is not a weight version; versions look like '1.140'")
        return cls(int(incarnation), int(step))

    @property
    def words(self) -> str:
        """The version in words, for logs. The incarnation is left out if it is the first one.

        >>> Version(1, 140).words, Version(2, 140).words
        ('step 140', 'step 140 of incarnation 2')
        """
        return f"step {self.step}" + (f" of incarnation {self.incarnation}" if self.incarnation > 1 else "")


# The lineage of a run: which versions of the weights the live learner descends from.
#
# A run's first learner is incarnation 1. A learner that takes over starts the next incarnation, from the weights of one
# version, its branch point. A version is an *ancestor* if the weights of the live learner are made from it. Every other
# version is *dead*: no later weights are made from it.
#
#     1.0 ── 1.1 ── 1.2 ── 1.3          1.0, 1.1, 1.2 and all versions of incarnation 2 are ancestors
#                    └── 2.3 ── 2.4     1.3 is dead


class Lineage(msgspec.Struct, frozen=True):
    """The branch points of a run's learners. `branches[i]` is the version from which the learner of incarnation i + 2
    began."""

    branches: tuple[Version, ...] = ()

    @property
    def incarnation(self) -> int:
        """The incarnation of the live learner."""
        return len(self.branches) + 1

    def has(self, version: Version) -> bool:
        """Returns True if the live learner's weights are made from `version`, and for each version of the live
        incarnation, also a future one.

        >>> lineage = Lineage((Version(1, 2), Version(1, 1)))
        >>> [lineage.has(Version(*each)) for each in [(1, 1), (1, 2), (2, 3), (3, 2), (4, 2)]]
        [True, False, False, True, False]
        """
        incarnation, last_step = self.incarnation, None
        while incarnation > version.incarnation:
            if incarnation == 1:
                return False
            branch = self.branches[incarnation - 2]
            incarnation, last_step = branch.incarnation, branch.step
        return incarnation == version.incarnation and (last_step is None or version.step <= last_step)

    def continues(self, other: "Lineage") -> bool:
        """Returns whether this is the lineage of the same run as `other`, with at least one later incarnation."""
        return len(self.branches) > len(other.branches) and self.branches[: len(other.branches)] == other.branches

    def child(self, at: Version) -> "Lineage":
        """Returns the lineage in which the next incarnation begins with the weights of `at`, which need not be an
        ancestor of the live learner's weights.

        The number of an incarnation is never used twice, so the lineage also keeps incarnations of which no weights
        remain. Raises ValueError if there was no incarnation that could have made `at`.
        """
        if not 1 <= at.incarnation <= self.incarnation or at.step < 0:
            raise ValueError(
                f"incarnation {self.incarnation + 1} cannot begin at version {at}: there was no such version"
            )
        return Lineage((*self.branches, at))
