"""Names of a model's parameters in its Hugging Face files, and how stacked parameters are split there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
)

Region = tuple[int | slice, ...]
"""Part of a parameter: an index takes a dim away; dims that are left out are whole."""


@dataclass(frozen=True)
class Piece:
    """A tensor as the files have it.

    Args:
        name: Name in the files.
        region: Region of the parameter.
        shape: Shape of the tensor.
    """

    name: str
    region: Region
    shape: tuple[int, ...]


class FileNames:
    """Maps a model's parameters to the tensors of its files, as `transformers` converts them.

    Raises:
        ValueError: If the family's files hold anything but parameters, experts one by one, gate and up apart, and apart
            the convolutions of what several projections give.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        self._stacked: dict[str, tuple[str, ...]] = {}
        self._convolutions: dict[str, tuple[str, ...]] = {}
        self._num_rows = {name: len(parameter) for name, parameter in hf.named_parameters() if parameter.dim()}
        self._renamings: list[WeightTransform] = []
        for conversion in get_model_conversion_mapping(hf, add_legacy=False):
            if isinstance(conversion, WeightConverter):
                kinds = [type(operation) for operation in conversion.operations]
                operations: list[Any] = conversion.operations
                dims = [operation.dim for operation in operations]
                patterns = (conversion.target_patterns[0], *conversion.source_patterns)
                target, *sources = (pattern.replace("\\", "") for pattern in patterns)
                if kinds == [Concatenate] and dims == [0] and all("conv1d" in source for source in sources):
                    self._convolutions[target] = tuple(sources)
                    continue
                is_known = kinds in ([MergeModulelist], [MergeModulelist, Concatenate])
                if not is_known or dims not in ([0], [0, 1]):
                    raise ValueError(
                        f"files of {hf.config.model_type} models hold weights in a layout that is not supported "
                        f"({', '.join(kind.__name__ for kind in kinds)} of {', '.join(sources)})"
                    )
                self._stacked[target] = tuple(sources)
            elif isinstance(conversion, WeightRenaming) and not isinstance(conversion, PrefixChange):
                # the last one on the way in is the first on the way out
                self._renamings.insert(0, conversion.reverse_transform())

    def pieces(self, name: str, shape: tuple[int, ...]) -> Iterator[Piece]:
        """The tensors that make up a parameter."""
        found = next((target for target in self._convolutions if target in name), None)
        if found is not None:
            yield from self._convolved(name, found, shape)
            return
        found = next((target for target in self._stacked if target in name), None)
        if found is None:
            yield Piece(self._rename(name), (), shape)
            return
        sources = self._stacked[found]
        width = shape[1] // len(sources)
        for expert in range(shape[0]):
            for index, source in enumerate(sources):
                tensor = name.replace(found, source.replace("*", str(expert)))
                rows = slice(index * width, (index + 1) * width)
                yield Piece(self._rename(tensor), (expert, rows), (width, *shape[2:]))

    def _convolved(self, name: str, target: str, shape: tuple[int, ...]) -> Iterator[Piece]:
        """A convolution of each channel that projections give, in the files one of each projection."""
        start = 0
        for source in self._convolutions[target]:
            width = self._num_rows[name.replace(target, source.replace("conv1d", "proj"))]
            tensor = self._rename(name.replace(target, source))
            yield Piece(tensor, (slice(start, start + width),), (width, *shape[1:]))
            start += width

    def _rename(self, name: str) -> str:
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        return name
