"""Exports by ranks of a pool, of weights that need no model."""

from collections.abc import Iterator
from pathlib import Path

import torch
from joined_rank import joined
from torch import Tensor

from rl_core.errors import RLError
from rl_core.selfcheck.rank_pool import Rank
from rl_core.torch.training import export
from rl_core.weights import TensorSpec

NAMES = "abcdef"


class Numbered:
    """Tensors of 24 bytes, which some ranks get."""

    tied: dict[str, str] = {}

    def __init__(self, rank: int, holders: list[int]) -> None:
        self.holders = holders
        self._is_holder = rank in holders

    def specs(self, dtype: str) -> list[TensorSpec]:
        return [TensorSpec(name, (2, 3), dtype) for name in NAMES]

    def stream(
        self, dtype: str, *, everywhere: bool = False, bucket_bytes: int = 0
    ) -> Iterator[list[tuple[str, Tensor | None]]]:
        for name, tensor in numbered().items():
            yield [(name, tensor if self._is_holder else None)]


class Here:
    """The ranks of a pool as a mesh, as far as an export asks."""

    def __init__(self, rank: int, control: object) -> None:
        self.rank = rank
        self.control = control


def numbered() -> dict[str, Tensor]:
    return {name: torch.arange(6.0).reshape(2, 3) + index for index, name in enumerate(NAMES)}


def write(rank: Rank, folder: str, holders: list[int], failing: int | None, limit: int = 50) -> tuple[list[str], str]:
    """Export in files of two tensors; the files that this rank wrote, and the error if one rank fails at it."""
    written: list[str] = []
    place = rank.rendezvous.rank
    whole, own_limit = export.save_file, export.FILE_BYTES

    def save(tensors: dict[str, Tensor], path: Path, **kwargs: object) -> None:
        if place == failing:
            raise OSError(28, "No space left on device")
        whole(tensors, path, **kwargs)
        written.append(path.name)

    export.save_file, export.FILE_BYTES = save, limit
    try:
        with joined(rank) as group:
            export.export_weights(
                Numbered(place, holders), Path(folder), dtype="float32", precision="float32", mesh=Here(place, group)
            )
    except (RLError, OSError) as error:
        return written, f"{type(error).__name__}: {error}"
    finally:
        export.save_file, export.FILE_BYTES = whole, own_limit
    return written, ""
