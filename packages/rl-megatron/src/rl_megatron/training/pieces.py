"""Rectangles of a tensor of the whole model, as torch's distributed checkpoint writes and reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from rl_core.torch.training.checkpoint_files import KeptSavePlanner


def rectangles(start: int, stop: int, shape: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield offsets and sizes of the rectangles, in order, that elements `start` to `stop` of a row-major tensor form.

    A run that begins and ends anywhere is part of a row, whole rows, and part of a row, in each dim: at most
    `2 * len(shape) - 1` rectangles, and each is a run.
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    if len(shape) == 1 or (start % row == 0 and stop % row == 0):
        rest = tuple(shape[1:])
        yield (start // row, *(0 for _ in rest)), ((stop - start) // row, *rest)
        return
    first_end = min(stop, (start // row + 1) * row)
    if start % row or first_end == stop:
        yield from _in_row(start, first_end, shape, row)
        start = first_end
    whole_end = stop // row * row
    yield from rectangles(start, whole_end, shape)
    yield from _in_row(max(start, whole_end), stop, shape, row)


def _in_row(start: int, stop: int, shape: Sequence[int], row: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    number = start // row
    for offsets, sizes in rectangles(start - number * row, stop - number * row, shape[1:]):
        yield (number, *offsets), (1, *sizes)


class Pieces:
    """Rectangles of one tensor of the whole model that this rank holds.

    It is written and read through the planners below, by the methods that torch's planners call.

    Args:
        size: Size of the whole tensor.
    """

    def __init__(self, size: Sequence[int]) -> None:
        self._size = torch.Size(size)
        self._pieces: dict[torch.Size, Tensor] = {}

    def add(self, offsets: Sequence[int], piece: Tensor) -> None:
        """Add a rectangle: its offset in the whole tensor, and its memory."""
        self._pieces[torch.Size(offsets)] = piece

    def at(self, offsets: torch.Size | None) -> Tensor:
        """Return the rectangle that begins there."""
        assert offsets is not None
        return self._pieces[offsets]

    def size(self) -> torch.Size:
        """Return the shape of the whole tensor."""
        return self._size

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(name, offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(piece), self._size),
            )
            for (offsets, piece), chunk in zip(self._pieces.items(), self.__create_chunk_list__(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, piece.shape) for offsets, piece in self._pieces.items()]


class PiecesSavePlanner(KeptSavePlanner):
    """Writes `Pieces`."""

    def __init__(self) -> None:
        super().__init__(flatten=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return the rectangle of a write item."""
        return self.state_dict[index.fqn].at(index.offset)


class PiecesLoadPlanner(DefaultLoadPlanner):
    """Reads into `Pieces`, in place."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Create the plan as the base does, which replaces every value that it does not know by None."""
        self.state_dict = self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the rectangle of a read item."""
        return self.state_dict[index.fqn].at(index.offset)
