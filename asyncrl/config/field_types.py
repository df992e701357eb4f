"""Types and marks of the fields of the schema."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Temperature = Annotated[float, Field(gt=0, le=2)]
"""A sampling temperature. vLLM refuses values above 2."""
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
DecayRate = Annotated[float, Field(ge=0, lt=1)]
Port = Annotated[int, Field(ge=0, le=65535)]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


@dataclass(frozen=True, slots=True)
class Mark:
    """A property of a field that the value itself does not show. It stands in the field's annotation."""

    name: str


PER_DEPLOYMENT = Mark("per deployment")
"""The deployments of one run may have different values: places, sizes of pools, and hardware. A section with this mark
has it for all of its fields. All fields without it must agree."""
WATCHED_DEADLINE = Mark("watched deadline")
"""A healthy run may make no progress until this deadline has passed. `run.stall_timeout_s` must be longer."""


def in_home(path: str) -> str:
    """Replaces a leading `~` with the home directory. A shell does that only at the start of a word."""
    return str(Path(path).expanduser()) if path.startswith("~") else path
