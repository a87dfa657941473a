"""The place of a rank on the named mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

AXES = ("dp", "pp", "cp", "tp", "ep")
"""The axes a loop or a facade may know of. `ep` folds into `dp`: it never multiplies the world."""


@dataclass(frozen=True)
class Coordinates:
    """One rank's place on the mesh: index and size along each axis; an axis of size 1 may be left out.

    Args:
        index: Axis to this rank's index on it.
        size: Axis to the number of ranks along it.
    """

    index: Mapping[str, int]
    size: Mapping[str, int]

    def __post_init__(self) -> None:
        for axis, index in self.index.items():
            if axis not in AXES:
                raise ValueError(f"unknown mesh axis {axis!r}; axes are {', '.join(AXES)}")
            if not 0 <= index < self.along(axis):
                raise ValueError(f"index {index} on axis {axis!r} of size {self.along(axis)}")
        for axis, size in self.size.items():
            if axis not in AXES:
                raise ValueError(f"unknown mesh axis {axis!r}; axes are {', '.join(AXES)}")
            if size < 1 or (size > 1 and axis not in self.index):
                raise ValueError(
                    f"axis {axis!r} has size {size}; a size is at least 1, and an axis of more than 1 needs an index"
                )

    def on(self, axis: str) -> int:
        """Index on an axis, 0 if the mesh does not have it."""
        return self.index.get(axis, 0)

    def along(self, axis: str) -> int:
        """Number of ranks along an axis, 1 if the mesh does not have it."""
        return self.size.get(axis, 1)

    @property
    def leads(self) -> bool:
        """Return True if this rank reports for its data-parallel shard: first on `tp` and `cp`, last on `pp`."""
        return self.on("tp") == 0 and self.on("cp") == 0 and self.on("pp") == self.along("pp") - 1
