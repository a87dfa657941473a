"""Names of a model's parameters in its files, as `transformers` converts them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightTransform

PieceRegion = tuple[int | slice, ...]
"""Part of a parameter: an index removes a dim; dims that are left out are whole."""


class FilePiece(NamedTuple):
    """A tensor as the files have it.

    Args:
        name: Name in the files.
        region: PieceRegion of the parameter.
        shape: Shape of the tensor.
        may_be_transposed: True if files may also have the tensor with its last two dims exchanged.
    """

    name: str
    region: PieceRegion
    shape: tuple[int, ...]
    may_be_transposed: bool = False


class FileNames:
    """Maps a model's parameters to the tensors of its files, as `transformers` converts them.

    Raises:
        ValueError: If the family's files hold anything except parameters, single experts with separate gate and up, and
            separate convolutions of the results of several projections.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        # comes with the backends
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            Concatenate,
            MergeModulelist,
            PrefixChange,
            Transpose,
            WeightConverter,
            WeightRenaming,
        )

        self._stacked: dict[str, tuple[str, ...]] = {}
        self._transposed: list[str] = []
        self._convolutions: dict[str, tuple[str, ...]] = {}
        self._num_rows = {name: len(parameter) for name, parameter in hf.named_parameters() if parameter.dim()}
        self._renamings: list[WeightTransform] = []
        for conversion in get_model_conversion_mapping(hf, add_legacy=False):
            if isinstance(conversion, WeightConverter):
                kinds = [type(operation) for operation in conversion.operations]
                operations: list[Any] = conversion.operations
                patterns = (conversion.target_patterns[0], *conversion.source_patterns)
                target, *sources = (pattern.replace("\\", "") for pattern in patterns)
                if kinds == [Transpose] and sources == [target] and operations[0].check_dims:
                    # transformers saves it as it is in the model, and reads both.
                    self._transposed.append(target)
                    continue
                dims = [getattr(operation, "dim", None) for operation in operations]
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
                # The last renaming on the way in is the first on the way out.
                self._renamings.insert(0, conversion.reverse_transform())

    def pieces(self, name: str, shape: tuple[int, ...]) -> Iterator[FilePiece]:
        """Yield the tensors that make up a parameter."""
        found = next((target for target in self._convolutions if target in name), None)
        if found is not None:
            # A convolution of each channel of several projections is one tensor for each projection in the files.
            start = 0
            for source in self._convolutions[found]:
                width = self._num_rows[name.replace(found, source.replace("conv1d", "proj"))]
                tensor = self.of(name.replace(found, source))
                yield FilePiece(tensor, (slice(start, start + width),), (width, *shape[1:]))
                start += width
            return
        found = next((target for target in self._stacked if target in name), None)
        if found is None:
            yield FilePiece(self.of(name), (), shape, any(target in name for target in self._transposed))
            return
        sources = self._stacked[found]
        width = shape[1] // len(sources)
        for expert in range(shape[0]):
            for index, source in enumerate(sources):
                tensor = name.replace(found, source.replace("*", str(expert)))
                rows = slice(index * width, (index + 1) * width)
                yield FilePiece(self.of(tensor), (expert, rows), (width, *shape[2:]))

    def of(self, name: str) -> str:
        """Return the name in the files of a parameter that is one tensor there."""
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        return name
