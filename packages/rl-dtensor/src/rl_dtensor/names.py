"""Names of a model's parameters in its Hugging Face files, and how stacked parameters are split there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
        name: in the files.
        region: of the parameter.
        shape: of the tensor.
    """

    name: str
    region: Region
    shape: tuple[int, ...]


class FileNames:
    """Maps a model's parameters to the tensors of its files, as `transformers` converts them.

    Raises:
        ValueError: if the family's files hold anything but parameters, experts one by one, and gate and up
            apart.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        self._stacked: dict[str, tuple[str, ...]] = {}
        self._renamings: list[WeightTransform] = []
        for conversion in get_model_conversion_mapping(hf, add_legacy=False):
            if isinstance(conversion, WeightConverter):
                kinds = [type(operation) for operation in conversion.operations]
                is_known = kinds in ([MergeModulelist], [MergeModulelist, Concatenate])
                if not is_known or [operation.dim for operation in conversion.operations] not in ([0], [0, 1]):
                    raise ValueError(
                        f"files of {hf.config.model_type} models hold weights in a layout that is not supported "
                        f"({', '.join(kind.__name__ for kind in kinds)} of {', '.join(conversion.source_patterns)})"
                    )
                self._stacked[conversion.target_patterns[0]] = tuple(conversion.source_patterns)
            elif isinstance(conversion, WeightRenaming) and not isinstance(conversion, PrefixChange):
                # the last one on the way in is the first on the way out
                self._renamings.insert(0, conversion.reverse_transform())

    def pieces(self, name: str, shape: tuple[int, ...]) -> Iterator[Piece]:
        """The tensors that make up a parameter."""
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

    def _rename(self, name: str) -> str:
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        return name
