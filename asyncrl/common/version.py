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
        """The version in words, for logs. The incarnation is left out if the learner was started only once.

        >>> Version(1, 140).words, Version(2, 140).words
        ('step 140', 'step 140 of incarnation 2')
        """
        return f"step {self.step}" + (f" of incarnation {self.incarnation}" if self.incarnation > 1 else "")
