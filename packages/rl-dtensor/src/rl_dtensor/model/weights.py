"""The weights of a whole model by their names in its files, of which a rank holds parts of some."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from rl_core.torch.files.model_files import READ_AS_WEIGHTS, OpenWeights, WeightFiles, head_advice
from rl_core.torch.quantization.formats import WeightFormat, rounded
from rl_core.torch.training.lora import LORA_A, LORA_B, WEIGHT
from rl_core.weights import TensorSpec
from rl_dtensor.model.lora import BASE, Adapter, adapters_of
from rl_dtensor.model.names import FileNames, Piece
from rl_dtensor.parallel.fsdp import local, local_slices, whole
from rl_dtensor.parallel.mesh import Mesh

SCORE = "score.weight"
SHOWN = 8
"""Maximum number of names that an error spells out."""


@dataclass(frozen=True)
class Entry:
    """A parameter or persistent buffer of the whole model.

    Args:
        keeps_float32: Whether it is saved and sent in float32 whatever the rest is.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    stage: int
    keeps_float32: bool = False

    def dtype_in(self, dtype: str) -> str:
        """Name of its dtype among floating tensors of a dtype."""
        if not self.dtype.is_floating_point:
            return str(self.dtype).removeprefix("torch.")
        return "float32" if self.keeps_float32 else dtype


@dataclass(frozen=True)
class Catalog:
    """Everything that the model's files hold.

    Args:
        entries: Entries in the model's order, a shared parameter once.
        tied: Each further name of a shared parameter to its first.
        tied_in_files: The same, by the names in the files.
    """

    entries: tuple[Entry, ...]
    tied: Mapping[str, str]
    tied_in_files: Mapping[str, str]
    ignored: tuple[str, ...]
    kind: str

    @classmethod
    def of(cls, hf: PreTrainedModel, stage_of: Callable[[str], int]) -> Catalog:
        """Read off a whole model on `meta`, without adapters."""
        names = FileNames(hf)
        entries = [
            Entry(
                name,
                tuple(tensor.shape),
                tensor.dtype,
                tuple(names.pieces(name, tuple(tensor.shape))),
                stage_of(name),
            )
            for name, tensor in persistent(hf).items()
        ]
        ignored = (
            *(hf._keys_to_ignore_on_load_unexpected or ()),
            r"rotary_emb\.inv_freq$",
            *_beyond_the_last(hf.config),
        )
        in_files = {alias: owner for owner, alias in tied_pairs(hf)}
        return cls(tuple(entries), tied_names(hf), in_files, ignored, type(hf).__name__)

    def keeping(self, float32: Set[str]) -> Catalog:
        """The same, with names of tensors that stay float32."""
        entries = (replace(entry, keeps_float32=entry.name in float32) for entry in self.entries)
        return replace(self, entries=tuple(entries))

    def problem(self, files: WeightFiles, *, new: Iterable[str] = (), foreign: Iterable[str] = ()) -> str:
        """Return which weights are missing in files, or unexpected; empty if they are those of the model.

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

    def sources(self, entry: Entry, available: Set[str]) -> list[Piece] | None:
        """Tensors to read a weight from: its pieces, or one tensor under its own or a tied name; None if there are
        none."""
        if all(piece.name in available for piece in entry.pieces):
            return list(entry.pieces)
        names = [entry.name, *(alias for alias, owner in self.tied.items() if owner == entry.name)]
        found = next((name for name in names if name in available), None)
        return None if found is None else [Piece(found, (), entry.shape)]


@dataclass(frozen=True)
class PlacedAdapter:
    """An adapter of the whole model.

    Args:
        weight: Name of the weight that it sits on.
        down: Shape of its first factor.
        up: Shape of its second factor.
        stage: The pipeline stage that holds it.
    """

    weight: str
    down: tuple[int, ...]
    up: tuple[int, ...]
    stage: int

    @property
    def factors(self) -> tuple[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...]]]:
        """Name and shape of each factor."""
        layer = self.weight.removesuffix(WEIGHT)
        return (layer + LORA_A, self.down), (layer + LORA_B, self.up)


class Weights:
    """This rank's part of the weights of a model.

    Args:
        catalog: Catalog of the whole model.
        chunks: The parts of it that this rank holds, sharded.
        served: Name of each weight that generators get rounded, to its format.
    """

    def __init__(
        self,
        catalog: Catalog,
        chunks: Sequence[PreTrainedModel],
        mesh: Mesh,
        served: Mapping[str, WeightFormat] = MappingProxyType({}),
    ) -> None:
        self.catalog = catalog
        self._served = served
        self._mesh = mesh
        self._tensors: dict[str, Tensor] = {}
        self._adapters: dict[str, Adapter] = {}
        for hf in chunks:
            for name, tensor in persistent(hf).items():
                plain = name.replace(BASE, "")
                self._tensors.setdefault(catalog.tied.get(plain, plain), tensor)
            self._adapters.update(adapters_of(hf))

    @property
    def tied(self) -> Mapping[str, str]:
        """Each name that is not sent, to the name of the tensor that it equals, as in the files."""
        return self.catalog.tied_in_files

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters and persistent buffers of this rank by name."""
        yield from self._tensors.items()

    def load(self, files: WeightFiles, *, new: Iterable[str] = (), foreign: Iterable[str] = ()) -> None:
        """Fill this rank's parts from the files.

        Args:
            files: Files with the weights of the whole model.
            new: Names that the files need not have; those they lack are left alone.
            foreign: Names that the files may have in addition to the model's own.

        Raises:
            ValueError: Naming weights that are missing, unexpected, or of another shape.
        """
        if problem := self.catalog.problem(files, new=new, foreign=foreign):
            raise ValueError(problem)
        sources = {entry.name: self.catalog.sources(entry, files.names) for entry in self.catalog.entries}
        with files.open() as opened, torch.no_grad():
            for name, target in self._tensors.items():
                for piece in sources[name] or ():
                    read_into(opened, piece, target)

    def specs(self, dtype: str) -> list[TensorSpec]:
        """All tensors of the files, floating ones in a dtype unless they stay float32."""
        return [
            TensorSpec(piece.name, piece.shape, entry.dtype_in(dtype))
            for entry in self.catalog.entries
            for piece in entry.pieces
        ]

    @property
    def holders(self) -> Sequence[int]:
        """All ranks."""
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
        """Parameter by parameter its whole tensors, in the order of `specs`; collective. They are gathered one at a
        time and reach all ranks, whatever is asked for.

        Args:
            dtype: Name of the dtype of floating tensors, such as `bfloat16`, except those that are kept in float32.
            everywhere: Not used: every rank gets whole tensors.
            bucket_bytes: Not used: tensors are gathered one at a time.
            merges_adapters: True if adapters are added to the weights that they sit on.
            served: True for the weights that generators compute with.
        """
        for entry in self.catalog.entries:
            tensor = self._whole(entry, getattr(torch, entry.dtype_in(dtype)), merges_adapters=merges_adapters)
            if served and entry.name in self._served:
                tensor = rounded(tensor, self._served[entry.name])
            yield [(piece.name, tensor[piece.region] if piece.region else tensor) for piece in entry.pieces]

    def adapter_specs(self, dtype: str) -> list[TensorSpec]:
        """The tensors of `adapters` in their order; collective."""
        factors = [
            TensorSpec(name, shape, dtype) for placed in self._placed_adapters() for name, shape in placed.factors
        ]
        return factors + [TensorSpec(SCORE, each.shape, dtype) for each in self.catalog.entries if each.name == SCORE]

    @torch.no_grad()
    def adapters(self, dtype: str = "float32", *, everywhere: bool = True) -> Iterator[tuple[str, Tensor]]:
        """The factors of every adapter, and a score head, whole on every rank, whatever is asked for; collective."""
        kind = getattr(torch, dtype)
        for placed in self._placed_adapters():
            own = self._adapters.get(placed.weight)
            factors = (None, None) if own is None else (whole(own.down, kind), whole(own.up, kind))
            for (name, shape), factor in zip(placed.factors, factors, strict=True):
                yield name, self._from_stage(factor, shape, kind, placed.stage)
        for entry in self.catalog.entries:
            if entry.name == SCORE:
                yield SCORE, self._whole(entry, kind)

    def _placed_adapters(self) -> list[PlacedAdapter]:
        """The adapters of all pipeline stages, in the same order on every rank; collective."""
        stage = self._mesh.on("pp")
        here = [
            PlacedAdapter(name, tuple(each.down.shape), tuple(each.up.shape), stage)
            for name, each in self._adapters.items()
        ]
        everyone: list[list[PlacedAdapter]] = [[]] * self._mesh.world_size
        dist.all_gather_object(everyone, here, group=self._mesh.control)
        return list(dict.fromkeys(placed for several in everyone for placed in several))

    def _whole(self, entry: Entry, dtype: torch.dtype, *, merges_adapters: bool = True) -> Tensor:
        """A whole tensor, on the ranks of every stage."""
        stage = entry.stage % self._mesh.sizes.pp
        gathered = None
        if self._mesh.on("pp") == stage:
            tensor = self._tensors[entry.name]
            adapter = self._adapters.get(entry.name) if merges_adapters else None
            gathered = whole(tensor, dtype) if adapter is None else adapter.merged(tensor, dtype)
        return self._from_stage(gathered, entry.shape, dtype, stage)

    def _from_stage(self, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, stage: int) -> Tensor:
        """A tensor that the ranks of one pipeline stage have, on the ranks of every stage.

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


def _beyond_the_last(config: PreTrainedConfig) -> list[str]:
    """Patterns of the names of layers for multi-token prediction, which files have after those of the model."""
    text: Any = config.get_text_config()
    first = getattr(text, "num_hidden_layers", 0)
    num_layers = getattr(text, "num_nextn_predict_layers", None) or 0
    return [rf"^model\.layers\.{number}\." for number in range(first, first + num_layers)]


def persistent(hf: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, a shared one once, without adapters."""
    transient = {name for name, _ in hf.named_non_persistent_buffers()}
    buffers = {name: buffer for name, buffer in hf.named_buffers() if name not in transient}
    parameters = {name: parameter for name, parameter in hf.named_parameters() if ".lora_" not in name}
    return {**parameters, **buffers}


def tied_names(hf: PreTrainedModel) -> dict[str, str]:
    """Each further name of a shared parameter, to its first name."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in hf.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(parameter), name)
        if owner != name:
            tied[name] = owner
    return tied


def tied_pairs(hf: PreTrainedModel) -> list[tuple[str, str]]:
    """Names in the files of each two tensors that a model has as one."""
    names, held = FileNames(hf), persistent(hf)

    def in_files(name: str, owner: str) -> str:
        return next(names.pieces(name, tuple(held[owner].shape))).name

    return [(in_files(owner, owner), in_files(alias, owner)) for alias, owner in tied_names(hf).items()]


def read_into(opened: OpenWeights, piece: Piece, target: Tensor) -> None:
    """Read what a rank holds of a piece into its part of the parameter.

    Raises:
        ValueError: If the tensor in the files has another shape, or does not hold the values of a weight.
    """
    _check_stored(opened, piece, is_weight=target.is_floating_point())
    part = local(target)
    if not part.numel():
        return
    held = local_slices(target)
    region = (*piece.region, *(slice(None),) * (len(held) - len(piece.region)))
    into: list[int | slice] = []
    taken: list[slice] = []
    for wanted, own, extent in zip(region, held, target.shape, strict=True):
        if isinstance(wanted, int):
            if not own.start <= wanted < own.stop:
                return
            into.append(wanted - own.start)
            continue
        start, stop, _ = wanted.indices(extent)
        first, last = max(start, own.start), min(stop, own.stop)
        if first >= last:
            return
        into.append(slice(first - own.start, last - own.start))
        taken.append(slice(first - start, last - start))
    part[tuple(into)].copy_(opened.read(piece.name, tuple(taken)))


def _check_stored(opened: OpenWeights, piece: Piece, *, is_weight: bool) -> None:
    name, shape, dtype = piece.name, opened.shape(piece.name), opened.dtype(piece.name)
    if is_weight and dtype not in READ_AS_WEIGHTS:
        raise ValueError(f"weight {_quantised(name, dtype)}")
    if shape == piece.shape:
        return
    if name == SCORE and shape[1:] == piece.shape[1:]:
        raise ValueError(
            f"weight {name} has shape {shape}: this classifier has {shape[0]} labels, and the head of a reward model "
            "or critic has one output. Use a model with num_labels=1, or one without a score head, which gets a new one"
        )
    raise ValueError(
        f"weight {name} has shape {shape}, the model's config says {piece.shape}; check config.json and "
        "policy.hf_config_overrides"
    )


def _quantised(name: str, dtype: str) -> str:
    return (
        f"{name} is stored as {dtype}: it is quantised in a way that is not supported. Convert the model to bfloat16, "
        "or use the release that is not quantised"
    )


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return (", ".join(names[:SHOWN]) or "none") + more
