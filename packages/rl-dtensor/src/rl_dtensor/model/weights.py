"""The weights of a whole model by file name. A rank holds parts of some of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from rl_core.torch.files.file_names import FileNames, FilePiece, PieceRegion
from rl_core.torch.files.model_files import READ_AS_WEIGHTS, OpenWeights, WeightFiles, head_advice
from rl_core.torch.quantization.float8 import largest_values
from rl_core.torch.quantization.formats import Float8Format, WeightFormat, rounded
from rl_core.torch.training.lora import WEIGHT
from rl_core.torch.transport.exchange import HeldPart, Holdings
from rl_core.weights import TensorSpec
from rl_dtensor.model.layers.lora import Adapter, adapters_of, names_of
from rl_dtensor.model.layers.low_precision import largest_of_ranks
from rl_dtensor.model.layers.quantized_base import BASE, PackedFormat, logical_slices, quantized_layers, whole_values
from rl_dtensor.parallel.fsdp import local, local_slices, whole
from rl_dtensor.parallel.mesh import DTensorMesh

SCORE = "score.weight"
SHOWN = 8
"""Maximum number of tensors that an error lists."""


class WeightEntry(NamedTuple):
    """A parameter or persistent buffer of the whole model.

    Args:
        keeps_float32: True if it is saved and sent in float32 whatever the rest is.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[FilePiece, ...]
    stage: int
    keeps_float32: bool = False

    def dtype_in(self, dtype: str) -> str:
        """Return the name of its dtype if floating tensors have this dtype."""
        if not self.dtype.is_floating_point:
            return str(self.dtype).removeprefix("torch.")
        return "float32" if self.keeps_float32 else dtype


@dataclass(frozen=True)
class Catalog:
    """Everything that the model's files hold.

    Args:
        entries: Entries in the model's order, a shared parameter once.
        tied: Each further name of a shared parameter to its first.
        tied_in_files: The same, by file names.
    """

    entries: tuple[WeightEntry, ...]
    tied: Mapping[str, str]
    tied_in_files: Mapping[str, str]
    ignored: tuple[str, ...]
    kind: str

    @classmethod
    def of(cls, hf: PreTrainedModel, stage_of: Callable[[str], int]) -> Catalog:
        """Read the catalog of a whole model on `meta`, without adapters."""
        names = FileNames(hf)
        entries = []
        for name, tensor in persistent(hf).items():
            shape = tuple(tensor.shape)
            entries.append(WeightEntry(name, shape, tensor.dtype, tuple(names.pieces(name, shape)), stage_of(name)))
        # Files have the layers for multi-token prediction after the layers of the model.
        text: Any = hf.config.get_text_config()
        first = getattr(text, "num_hidden_layers", 0)
        further = range(first, first + (getattr(text, "num_nextn_predict_layers", None) or 0))
        ignored = (
            *(hf._keys_to_ignore_on_load_unexpected or ()),
            r"rotary_emb\.inv_freq$",
            *(rf"^model\.layers\.{number}\." for number in further),
        )
        in_files = {alias: owner for owner, alias in tied_pairs(hf)}
        return cls(tuple(entries), tied_names(hf), in_files, ignored, type(hf).__name__)

    def keeping(self, float32: Set[str]) -> Catalog:
        """Return the catalog with these tensors in float32."""
        entries = (entry._replace(keeps_float32=entry.name in float32) for entry in self.entries)
        return replace(self, entries=tuple(entries))

    def problem(self, files: WeightFiles, *, new: Iterable[str] = (), foreign: Iterable[str] = ()) -> str:
        """Return which weights are missing in files, or unexpected; empty if the files match the model.

        Args:
            files: Files with the weights of the whole model.
            new: Names that the files need not have.
            foreign: Names that the files may have in addition to the model's own.
        """
        stored = files.names
        sources = {entry.name: self.sources(entry, stored) for entry in self.entries}
        missing = [
            piece.name
            for entry in self.entries
            for piece in entry.pieces
            if sources[entry.name] is None and entry.name not in set(new) and piece.name not in stored
        ]
        known = {piece.name for found in sources.values() for piece in found or ()}
        known |= {*self.tied_in_files, *self.tied, *(entry.name for entry in self.entries), *foreign}
        ignored = [re.compile(pattern) for pattern in self.ignored]
        unexpected = [name for name in sorted(stored) if name not in known and not any(p.search(name) for p in ignored)]
        if not missing and not unexpected:
            return ""
        with files.open() as opened:
            quantised = next((name for name in unexpected if opened.dtype(name) not in READ_AS_WEIGHTS), None)
            advice = "" if quantised is None else f". {_quantised(quantised, opened.dtype(quantised))}"
        return (
            f"the weights in {files.folder} are not those of a {self.kind}: "
            f"missing {_shown(missing)}; unexpected {_shown(unexpected)}{advice or head_advice(unexpected)}"
        )

    def sources(self, entry: WeightEntry, available: Set[str]) -> list[FilePiece] | None:
        """Return the tensors to read a weight from: its pieces, or one tensor under its own or a tied name; None if
        there are none."""
        if all(piece.name in available for piece in entry.pieces):
            return list(entry.pieces)
        names = [entry.name, *(alias for alias, owner in self.tied.items() if owner == entry.name)]
        found = next((name for name in names if name in available), None)
        return None if found is None else [FilePiece(found, (), entry.shape)]


PlacedAdapter = tuple[str, int, tuple[tuple[str, tuple[int, ...]], ...]]
"""Name of the weight of an adapter, the pipeline stage that holds it, and the name and shape of its tensors."""


class ShardedWeights:
    """This rank's part of the weights of a model.

    Args:
        catalog: Catalog of the whole model.
        chunks: The parts of it that this rank holds, sharded.
        served: Name of each weight that generators get rounded, to its format.

    Attributes:
        held: Parameters and persistent buffers of this rank by name.
        tied: Name in the files of each tensor that is not sent, to the name of the tensor that it equals.
    """

    def __init__(
        self,
        catalog: Catalog,
        chunks: Sequence[PreTrainedModel],
        mesh: DTensorMesh,
        served: Mapping[str, WeightFormat] = MappingProxyType({}),
    ) -> None:
        self.catalog = catalog
        self.tied = catalog.tied_in_files
        self._served = served
        self._mesh = mesh
        self.held: dict[str, Tensor] = {}
        self._of_adapters: list[dict[str, Adapter]] = [{}]
        self._packed: dict[str, PackedFormat] = {}
        for hf in chunks:
            self._packed |= {f"{name}.weight".replace(BASE, ""): each.format for name, each in quantized_layers(hf)}
            for name, tensor in persistent(hf).items():
                plain = name.replace(BASE, "")
                self.held.setdefault(catalog.tied.get(plain, plain), tensor)
            for number, name in enumerate(names_of(hf)):
                self._of_adapters += [{}] * (number == len(self._of_adapters))
                self._of_adapters[number].update(adapters_of(hf, name))
        self._adapters = self._of_adapters[0]

    def load(self, files: WeightFiles, *, new: Iterable[str] = (), foreign: Iterable[str] = ()) -> None:
        """Fill this rank's parts from the files.

        Args:
            files: Files with the weights of the whole model.
            new: Names that the files need not have; the others are not changed.
            foreign: Names that the files may have in addition to the model's own.

        Raises:
            ValueError: Naming weights that are missing, unexpected, or of another shape.
        """
        if problem := self.catalog.problem(files, new=new, foreign=foreign):
            raise ValueError(problem)
        entries = {entry.name: entry for entry in self.catalog.entries}
        sources = {name: self.catalog.sources(entry, files.names) for name, entry in entries.items()}
        with files.open() as opened, torch.no_grad():
            for name, target in self.held.items():
                fmt = self._packed.get(name)
                if fmt is None:
                    for piece in sources[name] or ():
                        read_into(opened, piece, target)
                    continue
                entry, held = entries[name], logical_slices(target, fmt)
                values = torch.empty([each.stop - each.start for each in held], dtype=entry.dtype)
                for piece in sources[name] or ():
                    _read_part(opened, piece, values, held, entry.shape)
                local(target).copy_(fmt.pack(values.to(self._mesh.device)))

    def specs(self, dtype: str) -> list[TensorSpec]:
        """Return all tensors of the files, floating ones in a dtype unless they stay float32."""
        entries = self.catalog.entries
        return [TensorSpec(each.name, each.shape, own.dtype_in(dtype)) for own in entries for each in own.pieces]

    @property
    def holders(self) -> Sequence[int]:
        """Ranks that have whole tensors to send: all of them."""
        return range(self._mesh.world_size)

    def stream(
        self,
        dtype: str,
        *,
        everywhere: bool = True,
        bucket_bytes: int = 0,
        merges_adapters: bool = True,
        served: bool = False,
    ) -> Iterator[Sequence[tuple[str, Tensor]]]:
        """Yield the whole tensors of each parameter, in the order of `specs`; collective. They are gathered one at a
        time and always reach all ranks.

        Args:
            dtype: Name of the dtype of floating tensors, such as `bfloat16`, except those that are kept in float32.
            everywhere: Not used: every rank gets whole tensors.
            bucket_bytes: Not used: tensors are gathered one at a time.
            merges_adapters: True if adapters are added to their weights.
            served: True for the weights that generators compute with.
        """
        for entry in self.catalog.entries:
            tensor = self._whole(entry, getattr(torch, entry.dtype_in(dtype)), merges_adapters=merges_adapters)
            if served and entry.name in self._served:
                tensor = rounded(tensor, self._served[entry.name])
            yield [(piece.name, tensor[piece.region] if piece.region else tensor) for piece in entry.pieces]

    @torch.no_grad()
    def holdings(self, dtype: str) -> Holdings:
        """Return the parts of the files' tensors that this rank holds, with adapters added, and rounded where
        generators get rounded weights; collective."""
        stage, found = self._mesh.on("pp"), {}
        for entry in self.catalog.entries:
            if entry.stage % self._mesh.sizes.pp != stage:
                continue
            target, adapter, fmt = self.held[entry.name], self._adapters.get(entry.name), self._served.get(entry.name)
            factors, factor, packed = None, None, self._packed.get(entry.name)
            if adapter is not None:
                factors = adapter.factors()
                if adapter.magnitude is not None:
                    factor = adapter.row_factor(whole_values(target, packed, torch.float32))
            part, held = local(target), logical_slices(target, packed)
            for piece in entry.pieces if part.numel() else ():
                shared = _shared(piece.region, held, entry.shape)
                if shared is None:
                    continue
                into, taken = shared
                values = part[into] if packed is None else partial(_unpacked, packed, part, entry.dtype, into)
                own = HeldPart(tuple((each.start, each.stop) for each in taken), values)
                if factors is not None:
                    left, right, scale = factors
                    own = own.with_product(left[piece.region], right[piece.region[: right.dim() - 2]], scale)
                    own = own if factor is None else own.with_factor(factor)
                if fmt is not None:
                    own = self._rounded(own, fmt, piece.shape[1], getattr(torch, entry.dtype_in(dtype)))
                found[piece.name] = [own]
        return found

    def _rounded(self, part: HeldPart, fmt: WeightFormat, num_columns: int, dtype: torch.dtype) -> HeldPart:
        """Return a part of a matrix that is rounded in a dtype when it is read. Its groups are whole, because the
        format has been checked with the ranks' shares (`fit_to_ranks`).

        Args:
            part: Rows of the matrix, or parts of rows that are split over tensor-parallel ranks; collective over these.
            fmt: Format of the whole matrix.
            num_columns: Number of columns of the whole matrix.
            dtype: Dtype that generators get.
        """
        device = self._mesh.device  # The part may be in host memory.
        if isinstance(fmt, Float8Format) and part.box[1] != (0, num_columns):
            own = largest_values(part.read().to(device, dtype), "per_channel")
            largest = largest_of_ranks(own, self._mesh.group("tp"))
            fmt = replace(fmt, largest=lambda _: largest)
        return HeldPart(part.box, lambda: rounded(part.read().to(device, dtype), fmt))

    def adapter_specs(self, dtype: str) -> list[TensorSpec]:
        """Return the tensors of `adapters` in their order; collective."""
        found = [TensorSpec(*factor, dtype) for _, _, factors in self._placed_adapters() for factor in factors]
        return found + [TensorSpec(SCORE, each.shape, dtype) for each in self.catalog.entries if each.name == SCORE]

    @torch.no_grad()
    def adapters(
        self, dtype: str = "float32", *, everywhere: bool = True, place: int = 0
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of every adapter, and a score head; collective.

        All are always whole on every rank.

        Args:
            dtype: Dtype of the tensors.
            everywhere: Not used: every rank gets whole tensors.
            place: Place of one of several adapters.
        """
        adapters = self.adapters_at(place)
        kind = getattr(torch, dtype)
        for weight, stage, placed in self._placed_adapters():
            own = adapters.get(weight)
            parts = [None] * len(placed) if own is None else [whole(each, kind) for _, each in own.named]
            for (name, shape), part in zip(placed, parts, strict=True):
                yield name, self._from_stage(part, shape, kind, stage)
        for entry in self.catalog.entries:
            if entry.name == SCORE:
                yield SCORE, self._whole(entry, kind)

    def adapters_at(self, place: int) -> dict[str, Adapter]:
        """Return one of several adapters of each weight of this rank; `scale` is that of the config."""
        return self._of_adapters[place] if place < len(self._of_adapters) else {}

    @contextmanager
    def merging(self, place: int, scale: float) -> Iterator[None]:
        """Enter a context in which weights have one of several adapters merged in, with this scale."""
        first = self._adapters
        self._adapters = {name: each._replace(scale=scale) for name, each in self.adapters_at(place).items()}
        try:
            yield
        finally:
            self._adapters = first

    def _placed_adapters(self) -> list[PlacedAdapter]:
        """Return the adapters of all pipeline stages, in the same order on every rank; collective."""
        stage = self._mesh.on("pp")
        here: list[PlacedAdapter] = []
        for name, each in self._adapters.items():
            layer = name.removesuffix(WEIGHT)
            here.append((name, stage, tuple((layer + suffix, tuple(part.shape)) for suffix, part in each.named)))
        everyone: list[list[PlacedAdapter]] = [[]] * self._mesh.world_size
        dist.all_gather_object(everyone, here, group=self._mesh.control)
        return list(dict.fromkeys(placed for several in everyone for placed in several))

    def _whole(self, entry: WeightEntry, dtype: torch.dtype, *, merges_adapters: bool = True) -> Tensor:
        """Return a whole tensor on the ranks of every stage."""
        stage = entry.stage % self._mesh.sizes.pp
        gathered = None
        if self._mesh.on("pp") == stage:
            tensor = self.held[entry.name]
            adapter = self._adapters.get(entry.name) if merges_adapters else None
            packed = self._packed.get(entry.name)
            gathered = whole_values(tensor, packed, dtype if adapter is None else torch.float32)
            gathered = gathered if adapter is None else adapter.merged(gathered).to(dtype)
        return self._from_stage(gathered, entry.shape, dtype, stage)

    def _from_stage(self, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, stage: int) -> Tensor:
        """Return on the ranks of every stage a tensor that one pipeline stage has.

        Args:
            tensor: Whole tensor; None on the ranks of other stages.
            shape: Shape of the whole tensor.
            dtype: Dtype of the tensor.
            stage: Pipeline rank that has the tensor.
        """
        if tensor is None:
            gathered = torch.empty(shape, dtype=dtype, device=self._mesh.device)
        else:
            gathered = tensor.to(self._mesh.device).contiguous()
        if self._mesh.sizes.pp > 1:
            dist.broadcast(gathered, group=self._mesh.group("pp"), group_src=stage)
        return gathered


def persistent(hf: PreTrainedModel) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, a shared one once, without adapters."""
    transient = {name for name, _ in hf.named_non_persistent_buffers()}
    buffers = {name: buffer for name, buffer in hf.named_buffers() if name not in transient}
    parameters = {name: parameter for name, parameter in hf.named_parameters() if ".lora_" not in name}
    return {**parameters, **buffers}


def tied_names(hf: PreTrainedModel) -> dict[str, str]:
    """Return each further name of a shared parameter, to its first name."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in hf.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(parameter), name)
        if owner != name:
            tied[name] = owner
    return tied


def tied_pairs(hf: PreTrainedModel) -> list[tuple[str, str]]:
    """Return each two file tensors, by name, that a model has as one."""
    names, held = FileNames(hf), persistent(hf)

    def in_files(name: str, owner: str) -> str:
        return next(names.pieces(name, tuple(held[owner].shape))).name

    return [(in_files(owner, owner), in_files(alias, owner)) for alias, owner in tied_names(hf).items()]


def read_into(opened: OpenWeights, piece: FilePiece, target: Tensor) -> None:
    """Read a rank's share of a piece into its part of the parameter.

    Raises:
        ValueError: If the tensor in the files has another shape, or does not hold the values of a weight.
    """
    name, shape, dtype = piece.name, opened.shape(piece.name), opened.dtype(piece.name)
    if target.is_floating_point() and dtype not in READ_AS_WEIGHTS:
        raise ValueError(f"weight {_quantised(name, dtype)}")
    if name == SCORE and shape != piece.shape and shape[1:] == piece.shape[1:]:
        raise ValueError(
            f"weight {name} has shape {shape}: this classifier has {shape[0]} labels, and the head of a reward model "
            "or critic has one output. Use a model with num_labels=1, or one without a score head, which gets a new one"
        )
    if shape != piece.shape and not (piece.may_be_transposed and shape == transposed(piece.shape)):
        raise ValueError(
            f"weight {name} has shape {shape}, the model's config says {piece.shape}; check config.json and "
            "policy.hf_config_overrides"
        )
    _read_part(opened, piece, local(target), local_slices(target), target.shape)


def _read_part(
    opened: OpenWeights, piece: FilePiece, part: Tensor, held: Sequence[slice], shape: Sequence[int]
) -> None:
    """Read the values that a part of a parameter and a piece have in common.

    Args:
        opened: Files of the piece.
        piece: Tensor of the files.
        part: Part of the parameter.
        held: Slices of the parameter that the part holds.
        shape: Shape of the parameter.
    """
    shared = _shared(piece.region, held, shape) if part.numel() else None
    if shared is not None:
        into, taken = shared
        if opened.shape(piece.name) == piece.shape:
            part[into].copy_(opened.read(piece.name, taken))
        else:
            part[into].copy_(opened.read(piece.name, transposed(taken)).mT)


def transposed(sizes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return sizes or slices of a tensor whose last two dims are exchanged."""
    return (*sizes[:-2], sizes[-1], sizes[-2])


def _unpacked(fmt: PackedFormat, packed: Tensor, dtype: torch.dtype, into: tuple[int | slice, ...]) -> Tensor:
    return fmt.unpack(packed, dtype)[into]


def stored_weight(files: WeightFiles, catalog: Catalog, name: str) -> Tensor:
    """Return a weight of the model as the files have it, in float32.

    Args:
        files: Files with the weights of the whole model.
        catalog: Catalog of the model.
        name: Name of the weight in the model.
    """
    entry = next(each for each in catalog.entries if each.name == name)
    found = torch.empty(entry.shape)
    with files.open() as opened:
        for piece in catalog.sources(entry, files.names) or ():
            read_into(opened, piece, found)
    return found


def _shared(
    region: PieceRegion, held: Sequence[slice], shape: Sequence[int]
) -> tuple[tuple[int | slice, ...], tuple[slice, ...]] | None:
    """Return the common values of a region of a parameter and a rank's part of it, as an index of the part and as
    slices of the region; None if they have none.

    Args:
        region: PieceRegion of the parameter.
        held: Slices of the parameter that the rank holds.
        shape: Shape of the parameter.
    """
    region = (*region, *(slice(None),) * (len(held) - len(region)))
    into: list[int | slice] = []
    taken: list[slice] = []
    for wanted, own, extent in zip(region, held, shape, strict=True):
        if isinstance(wanted, int):
            if not own.start <= wanted < own.stop:
                return None
            into.append(wanted - own.start)
            continue
        start, stop, _ = wanted.indices(extent)
        first, last = max(start, own.start), min(stop, own.stop)
        if first >= last:
            return None
        into.append(slice(first - own.start, last - own.start))
        taken.append(slice(first - start, last - start))
    return tuple(into), tuple(taken)


def _quantised(name: str, dtype: str) -> str:
    return (
        f"{name} is stored as {dtype}: it is quantised in a way that is not supported. Convert the model to bfloat16, "
        "or use the release that is not quantised"
    )


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return (", ".join(names[:SHOWN]) or "none") + more
