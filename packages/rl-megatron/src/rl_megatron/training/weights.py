"""A model's weights, spread over ranks, in Hugging Face's terms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from rl_core.torch.files.model_files import OpenWeights, WeightFiles, head_advice
from rl_core.torch.heads.scalar import new_head
from rl_core.torch.optim.optimizer import is_norm_or_bias
from rl_core.torch.training.lora import InitialFactors
from rl_core.weights import TensorSpec, buckets, num_bytes
from rl_megatron.conversion.names import held_weights
from rl_megatron.conversion.splits import Vocabulary, Whole
from rl_megatron.conversion.weight_map import AdapterMap, HFTensor, WeightMap
from rl_megatron.families.catalog import family_of
from rl_megatron.model.model import EMBEDDING, LM_HEAD, ReadingModel
from rl_megatron.model.precision import hold_in_float32, is_kept, kept_in_float32
from rl_megatron.parallel.mesh import Mesh
from rl_megatron.training.gathering import Gathering, Holding

SCORE = "score.weight"
BUCKET_BYTES = 64 * 2**20
"""Default size of the weights that `stream` brings together at one time."""
SHOWN = 8
"""Maximum number of names that an error spells out."""


@dataclass(frozen=True)
class Place:
    """This rank's share of what is spread over `tp` and over `etp`: index and number of shares."""

    tp: tuple[int, int]
    etp: tuple[int, int]

    def of(self, entry: WeightMap) -> tuple[int, int]:
        """Index and number of shares of a parameter."""
        if isinstance(entry.split, Whole):
            return 0, 1
        return self.tp if entry.over == "tp" else self.etp


class Weights:
    """The maps of a model's weights, what this rank holds of them, and who holds the rest.

    Args:
        model: As built; the tensors keep their identity. Those that stay float32 become so.
        files: That hold the weights.

    Raises:
        ValueError: If the family's maps and the model do not agree, or the layout does not divide a weight.
    """

    def __init__(self, model: ReadingModel, files: WeightFiles, mesh: Mesh) -> None:
        self._model = model
        self._files = files
        self._mesh = mesh
        self._place = Place(
            (parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()),
            (parallel_state.get_expert_tensor_parallel_rank(), parallel_state.get_expert_tensor_parallel_world_size()),
        )
        adapters = [each for adapter in model.adapters.values() for each in (adapter.down, adapter.up)]
        self._own_maps = [*family_of(model.hf).weights(model.hf), *_head_maps(model)]
        self.maps = [*self._own_maps, *adapters]
        self.held = held_weights(model.chunks, model.config, parallel_state.get_expert_model_parallel_rank())
        self._check()
        self._kept = kept_in_float32(model.hf, self._own_maps, files)
        wide = [entry for entry in self._own_maps if is_kept(entry, self._kept)]
        hold_in_float32(model.chunks, self.held, wide, model.config)
        holdings = {
            entry.target: Holding(self._place.of(entry)[0], tuple(self.held[entry.target].shape))
            for entry in self.maps
            if entry.target in self.held
        }
        has_experts = any(entry.over == "etp" for entry in self.maps)
        self._gathering = Gathering(self.held, holdings, mesh, has_experts=has_experts)
        is_first = self._place.tp[0] == 0
        self._counted = {
            self.held[entry.target]: entry.copy_of is None and (is_first or not isinstance(entry.split, Whole))
            for entry in self.maps
            if entry.target in self.held
        }

    @property
    def norms_and_biases(self) -> set[nn.Parameter]:
        """Parameters that are made of norms and biases of the Hugging Face model."""
        return {
            parameter
            for entry in self.maps
            if isinstance(parameter := self.held.get(entry.target), nn.Parameter)
            and all(is_norm_or_bias(source.name) for source in entry.sources)
        }

    @property
    def tied(self) -> dict[str, str]:
        """Names that files and generators know and that equal another."""
        is_tied = self._model.hf.tie_word_embeddings and not self._model.is_headless
        return {LM_HEAD: EMBEDDING} if is_tied else {}

    @property
    def holders(self) -> Sequence[int]:
        """The ranks of the first copy of the model."""
        return self._gathering.holders

    def specs(self, dtype: str) -> list[TensorSpec]:
        """All tensors by Hugging Face name, in the order of `stream`."""
        return [spec for entry in self._sent for spec in self._specs_of(entry, dtype)]

    @property
    def kept(self) -> dict[str, Tensor]:
        """The tensors of `held` that steps change and checkpoints have: all of it, or the adapters, a score head and
        buffers."""
        if not self._model.adapters:
            return self.held
        adapters = {entry.target for entry in self.maps} - {entry.target for entry in self._own_maps}
        return {
            target: tensor
            for target, tensor in self.held.items()
            if target in adapters or target == SCORE or not isinstance(tensor, nn.Parameter)
        }

    def load(self, initial: InitialFactors) -> None:
        """Fill this rank's parameters, reading only its slices; a head that the files lack is made by `new_head`, and
        adapters start as those of peft.

        Raises:
            ValueError: Naming weights that are missing, unexpected, or of another shape.
        """
        self._check_names()
        with self._files.open() as opened, torch.no_grad():
            for entry in self._own_maps:
                target = self.held.get(entry.target)
                if target is None:
                    continue
                if entry.target == SCORE and SCORE not in self._files.names:
                    std = self._model.hf.initializer_range
                    target.copy_(new_head(self._model.role, target.shape, std=std, seed=initial.seed))
                else:
                    index, size = self._place.of(entry)
                    target.copy_(entry.split.part(_reader(opened, entry), index, size))
        self._start_adapters(initial)

    def stream(
        self,
        dtype: str,
        *,
        everywhere: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        merges_adapters: bool = True,
        served: bool = False,
    ) -> Iterator[list[tuple[str, Tensor | None]]]:
        """Parameter by parameter its tensors by Hugging Face name, in the order of `specs`; collective.

        Args:
            dtype: Name of the dtype of floating tensors, such as `bfloat16`.
            everywhere: True if every rank gets them whole; otherwise `holders` do, and others get None.
            bucket_bytes: Number of bytes of the parameters that are gathered at one time, the last of them
                excepted. No rank holds more in addition to its own.
            merges_adapters: True if adapters are added to the weights that they sit on.
            served: Not used: generators compute with the weights that are trained.
        """
        adapters = self._model.adapters if merges_adapters else {}
        bucket: list[WeightMap] = []
        size = 0
        for entry in self._sent:
            bucket.append(entry)
            size += sum(num_bytes(spec) for spec in self._specs_of(entry, dtype))
            if size >= bucket_bytes:
                yield from self._merged(bucket, dtype, adapters, everywhere=everywhere)
                bucket, size = [], 0
        yield from self._merged(bucket, dtype, adapters, everywhere=everywhere)

    def adapter_specs(self, dtype: str) -> list[TensorSpec]:
        """The tensors of `adapters` in their order."""
        return [TensorSpec(name, entry.sources[0].shape, dtype) for name, entry in self._adapter_maps.items()]

    def adapters(self, dtype: str = "float32", *, everywhere: bool = False) -> Iterator[tuple[str, Tensor | None]]:
        """The factors of every adapter, and a score head; collective.

        Args:
            dtype: Name of the dtype of the tensors.
            everywhere: True if every rank gets them whole; otherwise `holders` do, and others get None.
        """
        wanted = self._adapter_maps
        for bucket in buckets(self.adapter_specs(dtype), BUCKET_BYTES):
            entries = [(wanted[spec.name], getattr(torch, dtype)) for spec in bucket]
            joined = self._gathering.join(entries, everywhere=everywhere)
            for spec, tensors in zip(bucket, joined, strict=True):
                yield spec.name, None if tensors is None else tensors[0]

    def share(self, entry: WeightMap) -> tuple[int, int]:
        """This rank's share of a parameter, and the number of shares."""
        return self._place.of(entry)

    def leads(self, entry: WeightMap) -> bool:
        """Return whether this is the first rank that holds its share of a parameter that is not a copy."""
        return entry.copy_of is None and self.leader(entry) == self._mesh.rank

    def leader(self, entry: WeightMap) -> int:
        """The first rank that holds the same share of a parameter as this one."""
        share, _ = self._place.of(entry)
        return self._gathering.first_holder(entry.target, share)

    def is_counted(self, parameter: nn.Parameter) -> bool:
        """Return whether no other rank of the same data-parallel index holds the same elements.

        Such elements count once in a norm. Megatron marks split parameters only if it initialises them.
        """
        return self._counted[parameter]

    @property
    def _sent(self) -> list[WeightMap]:
        return [entry for entry in self._own_maps if entry.copy_of is None]

    @property
    def _adapter_maps(self) -> dict[str, WeightMap]:
        """The factors of every adapter, and a score head, by Hugging Face name."""
        halves = [half for adapter in self._model.adapters.values() for half in (adapter.down, adapter.up)]
        heads = [entry for entry in self._own_maps if entry.target == SCORE]
        return {entry.sources[0].name: entry for entry in (*halves, *heads)}

    @torch.no_grad()
    def _start_adapters(self, initial: InitialFactors) -> None:
        initial.check(self._model.adapters)
        for name, adapter in self._model.adapters.items():
            down, up = self.held.get(adapter.down.target), self.held.get(adapter.up.target)
            if down is None or up is None:
                continue
            wholes = initial.of_weight(name, adapter.down.sources[0].shape, adapter.up.sources[0].shape)
            for target, half, whole in zip((down, up), (adapter.down, adapter.up), wholes, strict=True):
                target.copy_(half.split.part(partial(_part_of, whole), *self._place.of(half)))

    def _merged(
        self,
        bucket: Sequence[WeightMap],
        dtype: str,
        merged_in: Mapping[str, AdapterMap],
        *,
        everywhere: bool,
    ) -> Iterator[list[tuple[str, Tensor | None]]]:
        """The tensors of each parameter by name, with what these adapters add in float32."""
        held = self._model.config.params_dtype
        specs = [self._specs_of(entry, dtype) for entry in bucket]
        names = [[spec.name for spec in own] for own in specs]
        adapters = {name: merged_in[name] for name in chain(*names) if name in merged_in}
        wanted = [
            (entry, self._gathered_dtype(entry, getattr(torch, dtype) if adapters.keys().isdisjoint(own) else held))
            for entry, own in zip(bucket, names, strict=True)
        ]
        halves = [(half, held) for adapter in adapters.values() for half in (adapter.down, adapter.up)]
        whole = self._gathering.join([*wanted, *halves], everywhere=everywhere)
        factors = dict(
            zip(adapters, zip(whole[len(bucket) :: 2], whole[len(bucket) + 1 :: 2], strict=True), strict=True)
        )
        for own, tensors in zip(specs, whole, strict=False):
            if tensors is None:
                yield [(spec.name, None) for spec in own]
                continue
            merged = {spec.name: tensor for spec, tensor in zip(own, tensors, strict=True)}
            for name in adapters.keys() & merged.keys():
                down, up = factors[name]
                assert down is not None
                assert up is not None
                merged[name] = merged[name].float() + adapters[name].scale * (up[0].float() @ down[0].float())
            yield [(spec.name, merged[spec.name].to(getattr(torch, spec.dtype))) for spec in own]

    def _specs_of(self, entry: WeightMap, dtype: str) -> list[TensorSpec]:
        return [
            TensorSpec(source.name, source.shape, "float32" if source.name in self._kept else dtype)
            for source in entry.sources
        ]

    def _gathered_dtype(self, entry: WeightMap, dtype: torch.dtype) -> torch.dtype:
        """Return a dtype for the shares of a parameter in which none of its tensors loses bits that it keeps."""
        return torch.float32 if is_kept(entry, self._kept) else dtype

    def _check(self) -> None:
        known = {entry.target for entry in self.maps}
        foreign = sorted(set(self.held) - known)
        if foreign:
            raise ValueError(
                f"the weight mapping of {self._model.hf.model_type} models has no Hugging Face name for "
                f"{_shown(foreign)}"
            )
        for entry in self._own_maps:
            entry.check_split(self._place.of(entry)[1])

    def _check_names(self) -> None:
        files = self._files
        names = {source.name for entry in self._own_maps for source in entry.sources}
        missing = sorted(names - files.names - {SCORE})
        allowed = {*names, *self.tied, LM_HEAD} if self._model.is_headless else {*names, *self.tied}
        unexpected = sorted(name for name in files.names - allowed if not self._is_extra(name))
        if missing or unexpected:
            raise ValueError(
                f"the weights in {files.folder} are not those of a {self._model.hf.model_type} model: "
                f"missing {_shown(missing)}; unexpected {_shown(unexpected)}{head_advice(unexpected)}"
            )

    def _is_extra(self, name: str) -> bool:
        """Rotary frequencies of old files, and layers for multi-token prediction, which no policy uses."""
        if name.startswith("mtp."):
            return True
        layer = name.removeprefix("model.layers.").partition(".")[0]
        is_beyond = layer.isdigit() and int(layer) >= self._model.hf.num_hidden_layers
        return is_beyond or name.endswith("rotary_emb.inv_freq")


def _head_maps(model: ReadingModel) -> list[WeightMap]:
    hf: Any = model.hf
    if model.is_headless:
        return [WeightMap(SCORE, (HFTensor(SCORE, (1, hf.hidden_size)),), Whole())]
    shape = (hf.vocab_size, hf.hidden_size)
    head = WeightMap("output_layer.weight", (HFTensor(LM_HEAD, shape),), Vocabulary(hf.vocab_size))
    if not hf.tie_word_embeddings:
        return [head]
    return [replace(head, sources=(HFTensor(EMBEDDING, shape),), copy_of="embedding.word_embeddings.weight")]


def _reader(opened: OpenWeights, entry: WeightMap) -> Any:
    for source in entry.sources:
        if opened.shape(source.name) != source.shape:
            raise ValueError(
                f"weight {source.name} has shape {opened.shape(source.name)}, the model's config says {source.shape}; "
                "check hf_config_overrides"
            )
    return lambda index, slices: opened.read(entry.sources[index].name, slices)


def _part_of(whole: Tensor, _: int, slices: tuple[slice, ...]) -> Tensor:
    return whole[slices]


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return (", ".join(names[:SHOWN]) or "none") + more
