"""A model's weights, spread over ranks, in Hugging Face's terms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from rl_core.model_config import ModelConfig
from rl_core.resharding import Box
from rl_core.torch.files.model_files import OpenWeights, WeightFiles, head_advice
from rl_core.torch.heads.reads import new_head
from rl_core.torch.optim.parameters import (
    MatrixPiece,
    OptimizedParameter,
    check_patterns,
    frozen_names,
    is_hidden_matrix,
    is_norm_or_bias,
)
from rl_core.torch.training.lora import InitialFactors
from rl_core.torch.transport.exchange import HeldPart, Holdings
from rl_core.weights import TensorSpec, buckets, num_bytes
from rl_megatron.conversion.splits import Alternating, Split, Vocabulary, Whole, held_boxes
from rl_megatron.conversion.weight_map import (
    AdapterMap,
    HFTensor,
    WeightMap,
    as_stored,
    by_tensor,
    held_weights,
    whole_tensors,
)
from rl_megatron.model.lora import pass_gradients
from rl_megatron.model.model import EMBEDDING, LM_HEAD, ReadingModel
from rl_megatron.model.precision import hold_in_float32, is_kept, kept_in_float32
from rl_megatron.parallel.mesh import MegatronMesh
from rl_megatron.training.gathering import Gathering
from rl_megatron.training.pieces import rectangles

SCORE = "score.weight"
BUCKET_BYTES = 64 * 2**20
"""Default size of the weights that `stream` brings together at one time."""
MAX_SHOWN = 8
"""Maximum number of names in an error."""


class MegatronWeights:
    """The maps of a model's weights, this rank's part of them, and the ranks that hold the rest.

    Args:
        model: Model as built; the tensors keep their identity. Those that stay float32 become so.
        files: Files of the weights.

    Raises:
        ValueError: If the family's maps and the model do not agree, or the layout does not divide a weight.
    """

    def __init__(self, model: ReadingModel, files: WeightFiles, mesh: MegatronMesh) -> None:
        self._model = model
        self._files = files
        self._mesh = mesh
        tensor = parallel_state.get_tensor_model_parallel_group()
        expert = parallel_state.get_expert_tensor_parallel_group()
        self._shares = {"tp": (tensor.rank(), tensor.size()), "etp": (expert.rank(), expert.size())}
        adapters = [each for adapter in model.adapters.values() for each in (adapter.down, adapter.up)]
        num_experts = model.config.num_moe_experts or 0
        maps = as_stored(model.maps, num_experts, files.names)
        self._own_maps = [*maps, *_head_maps(model)]
        self._sent = [entry for entry in self._own_maps if entry.copy_of is None]
        self.maps = [*self._own_maps, *adapters]
        self.held = held_weights(model.chunks, model.config, parallel_state.get_expert_model_parallel_rank())
        foreign = sorted(set(self.held) - {entry.target for entry in self.maps})
        if foreign:
            raise ValueError(
                f"the weight mapping of {model.hf.model_type} models has no Hugging Face name for {_shown(foreign)}"
            )
        for entry in self._own_maps:
            entry.check_split(self.share(entry)[1])
        self._kept = kept_in_float32(model.hf, self._own_maps, files)
        wide = [entry for entry in self._own_maps if is_kept(entry, self._kept)]
        hold_in_float32(model.chunks, self.held, wide, model.config)
        here = [(entry, self.held[entry.target]) for entry in self.maps if entry.target in self.held]
        holdings = {entry.target: (self.share(entry)[0], tuple(tensor.shape)) for entry, tensor in here}
        has_experts = any(entry.over == "etp" for entry in self.maps)
        self._gathering = Gathering(self.held, holdings, mesh, has_experts=has_experts)
        self._counted = {
            tensor: entry.copy_of is None and (self._shares[entry.over][0] == 0 or not isinstance(entry.split, Whole))
            for entry, tensor in here
        }

    @property
    def described(self) -> dict[nn.Parameter, OptimizedParameter]:
        """Descriptions of this rank's parameters for the optimizer, whose pieces are those of flattened parameters."""
        found: dict[nn.Parameter, OptimizedParameter] = {}
        for entry in self.maps:
            if isinstance(parameter := self.held.get(entry.target), nn.Parameter):
                names = self._names_of(entry)
                pieces = None
                shapes = [source.part_shape for source in entry.sources]
                if all(map(is_hidden_matrix, names, shapes)):
                    boxes = list(held_boxes(entry.split, shapes, *self.share(entry), in_memory=True))
                    pieces = partial(_matrices_in, entry.sources, boxes, parameter.shape[1])
                found[parameter] = OptimizedParameter(names, all(map(is_norm_or_bias, names)), pieces)
        return found

    def choose_trained(self, config: ModelConfig) -> None:
        """Freeze the parameters that `freeze` and `train_only` keep from training, and check the patterns of rates.

        Raises:
            ValueError: If a pattern matches no parameter, or only some of the tensors that one parameter is made of.
        """
        maps = self._own_maps
        if config.freeze or config.train_only:
            frozen = frozen_names(config, [name for entry in maps for name in self._names_of(entry)])
            for entry in maps:
                names = self._names_of(entry)
                if len({name in frozen for name in names}) > 1:
                    raise ValueError(
                        f"freeze: {' and '.join(names)} are one parameter in Megatron, but not all of them train; "
                        "write patterns that match all or none of them"
                    )
                if isinstance(parameter := self.held.get(entry.target), nn.Parameter) and names[0] in frozen:
                    parameter.requires_grad_(False)
            for chunk in self._model.chunks:
                if chunk.pre_process and not chunk.embedding.word_embeddings.weight.requires_grad:
                    pass_gradients(chunk)
            maps = [entry for entry in maps if self._names_of(entry)[0] not in frozen]
        if self._model.adapters:
            maps = self.maps[len(self._own_maps) :]
        still = frozenset() if self._model.vision is None else self._model.vision.frozen
        trained = [name for entry in maps for name in self._names_of(entry) if name not in still]
        check_patterns("optimizer.lr_scales", config.optimizer.lr_scales, trained)

    @property
    def tied(self) -> dict[str, str]:
        """Names in files and generators whose tensor equals another, to the name of that tensor."""
        is_tied = self._model.hf.tie_word_embeddings and not self._model.is_headless
        return {self._model.file_name(LM_HEAD): self._model.file_name(EMBEDDING)} if is_tied else {}

    @property
    def holders(self) -> Sequence[int]:
        """The ranks of the first copy of the model."""
        return self._gathering.holders

    def specs(self, dtype: str) -> list[TensorSpec]:
        """Return all tensors by Hugging Face name, in the order of `stream`."""
        return [spec for group in by_tensor(self._sent) for spec in self._specs_of(group[0], dtype)]

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

    @torch.no_grad()
    def load(self, initial: InitialFactors) -> None:
        """Fill this rank's parameters, reading only its slices; a head that the files lack is made by `new_head`, and
        adapters start as in peft. Factors that are parts of the weights are taken out of them.

        Raises:
            ValueError: If weights are missing, unexpected, or of another shape, with their names.
        """
        self._check_names()
        with self._files.open() as opened:
            for entry in self._own_maps:
                target = self.held.get(entry.target)
                if target is None:
                    continue
                if entry.target == SCORE and SCORE not in self._files.names:
                    std = self._model.hf.initializer_range
                    target.copy_(new_head(self._model.role, target.shape, std=std, seed=initial.seed))
                    continue
                for source in entry.sources:
                    if opened.shape(source.name) != source.shape:
                        raise ValueError(
                            f"weight {source.name} has shape {opened.shape(source.name)}, the model's config says "
                            f"{source.shape}; check hf_config_overrides"
                        )
                target.copy_(entry.split.part(partial(_read, opened, entry.sources), *self.share(entry)))
                if initial.is_principal and any(source.name in self._model.adapters for source in entry.sources):
                    product = entry.split.part(partial(self._product, initial, entry.sources), *self.share(entry))
                    target.copy_(target.float() - product.to(target.device))
        initial.check([self._model.known_as(name) for name in self._model.adapters])
        for name, adapter in self._model.adapters.items():
            down, up = self.held.get(adapter.down.target), self.held.get(adapter.up.target)
            if down is None or up is None:
                continue
            wholes = initial.of_weight(
                self._model.known_as(name), adapter.down.sources[0].shape, adapter.up.sources[0].shape
            )
            for target, half, whole in zip((down, up), (adapter.down, adapter.up), wholes, strict=True):
                target.copy_(half.split.part(partial(_slice, whole), *self.share(half)))

    def _product(
        self, initial: InitialFactors, sources: Sequence[HFTensor], index: int, slices: tuple[slice, ...]
    ) -> Tensor:
        """Return a part of the product that is taken out of a source; zeros without an adapter."""
        name = sources[index].name
        if name not in self._model.adapters:
            return torch.zeros(sources[index].shape)[slices]
        down, up = initial.principal(self._model.known_as(name))
        rows, columns = (*slices, slice(None), slice(None))[:2]
        return self._model.adapters[name].scale * up[rows] @ down[:, columns]

    def stored(self, name: str) -> Tensor:
        """Return a weight as the files have it, in the dtype of the model.

        Args:
            name: Name of the weight in `transformers`.
        """
        names = {} if self._model.vision is None else {own: name for name, own in self._model.vision.names.items()}
        with self._files.open() as opened:
            return opened.read(names.get(name, name), ()).to(self._mesh.device, self._model.config.params_dtype)

    def stream(
        self,
        dtype: str,
        *,
        everywhere: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        merges_adapters: bool = True,
        served: bool = False,
    ) -> Iterator[list[tuple[str, Tensor | None]]]:
        """Yield parameter by parameter its tensors by Hugging Face name, in the order of `specs`; collective.

        Args:
            dtype: Name of the dtype of floating tensors, such as `bfloat16`.
            everywhere: True if every rank gets them whole; otherwise `holders` do, and others get None.
            bucket_bytes: Number of bytes of the parameters that are gathered at one time, the last of them
                excepted. No rank holds more in addition to its own.
            merges_adapters: True if adapters are added to the weights that they adapt.
            served: Not used: generators compute with the weights that are trained.
        """
        adapters = self._model.adapters if merges_adapters else {}
        bucket: list[list[WeightMap]] = []
        size = 0
        for group in by_tensor(self._sent):
            bucket.append(group)
            size += sum(num_bytes(spec) for spec in self._specs_of(group[0], dtype))
            if size >= bucket_bytes:
                yield from self._merged(bucket, dtype, adapters, everywhere=everywhere)
                bucket, size = [], 0
        yield from self._merged(bucket, dtype, adapters, everywhere=everywhere)

    @torch.no_grad()
    def holdings(self, dtype: str) -> Holdings:
        """Return the parts of the Hugging Face tensors that this rank holds, with adapters added; collective if there
        are any."""
        found: dict[str, list[HeldPart]] = {}
        for entry in self._sent:
            held = self.held.get(entry.target)
            if held is None:
                continue
            shapes = [source.part_shape for source in entry.sources]
            for rows, index, box in held_boxes(entry.split, shapes, *self.share(entry)):
                source = entry.sources[index]
                read = partial(_held_values, entry.split, held.detach(), rows, source)
                values = read if isinstance(entry.split, Alternating) else read()
                found.setdefault(source.name, []).append(HeldPart(source.place_of(box), values))
        factors = iter(self.adapters(everywhere=True))
        for (weight, adapter), (_, down), (_, up) in zip(self._model.adapters.items(), factors, factors, strict=False):
            assert down is not None
            assert up is not None
            found[weight] = [part.with_product(up, down, adapter.scale) for part in found.get(weight, ())]
        return found

    def adapter_specs(self, dtype: str) -> list[TensorSpec]:
        """Return the tensors of `adapters` in their order."""
        return [TensorSpec(name, entry.sources[0].shape, dtype) for name, entry in self._adapter_maps.items()]

    def adapters(self, dtype: str = "float32", *, everywhere: bool = False) -> Iterator[tuple[str, Tensor | None]]:
        """Yield the factors of every adapter, and a score head; collective.

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
        """Return this rank's share of a parameter, and the number of shares."""
        return (0, 1) if isinstance(entry.split, Whole) else self._shares[entry.over]

    def leads(self, entry: WeightMap) -> bool:
        """Return whether this is the first rank that holds its share of a parameter that is not a copy."""
        return entry.copy_of is None and self.leader(entry) == self._mesh.rank

    def leader(self, entry: WeightMap) -> int:
        """Return the first rank that holds the same share of a parameter as this one."""
        return self._gathering.first_holder(entry.target, self.share(entry)[0])

    def is_counted(self, parameter: nn.Parameter) -> bool:
        """Return whether no other rank of the same data-parallel index holds the same elements.

        Such elements count once in a norm. Megatron marks split parameters only if it initialises them.
        """
        return self._counted[parameter]

    def _names_of(self, entry: WeightMap) -> tuple[str, ...]:
        """Return the names in `transformers` of the tensors that a parameter is made of."""
        return tuple(self._model.known_as(source.name) for source in entry.sources)

    @property
    def _adapter_maps(self) -> dict[str, WeightMap]:
        """The factors of every adapter, and a score head, by Hugging Face name."""
        halves = [half for adapter in self._model.adapters.values() for half in (adapter.down, adapter.up)]
        heads = [entry for entry in self._own_maps if entry.target == SCORE]
        return {entry.sources[0].name: entry for entry in (*halves, *heads)}

    def _merged(
        self,
        bucket: Sequence[Sequence[WeightMap]],
        dtype: str,
        merged_in: Mapping[str, AdapterMap],
        *,
        everywhere: bool,
    ) -> Iterator[list[tuple[str, Tensor | None]]]:
        """Yield the tensors of each group of `by_tensor` by name, with the products of these adapters added in
        float32."""
        held = self._model.config.params_dtype
        specs = [self._specs_of(group[0], dtype) for group in bucket]
        names = [[spec.name for spec in own] for own in specs]
        adapters = {name: merged_in[name] for name in chain(*names) if name in merged_in}
        wanted = []
        for group, own in zip(bucket, names, strict=True):
            served = getattr(torch, dtype) if adapters.keys().isdisjoint(own) else held
            # No tensor of a parameter may lose bits in its shares.
            wanted += [(entry, torch.float32 if is_kept(entry, self._kept) else served) for entry in group]
        halves = [(half, held) for adapter in adapters.values() for half in (adapter.down, adapter.up)]
        whole = self._gathering.join([*wanted, *halves], everywhere=everywhere)
        joined, halves_joined = iter(whole[: len(wanted)]), whole[len(wanted) :]
        factors = dict(zip(adapters, zip(halves_joined[::2], halves_joined[1::2], strict=True), strict=True))
        for group, sent_specs in zip(bucket, specs, strict=True):
            parts = [found for found in islice(joined, len(group)) if found is not None]
            if not parts:
                yield [(spec.name, None) for spec in sent_specs]
                continue
            tensors = whole_tensors(group, parts)
            merged = {spec.name: tensor for spec, tensor in zip(sent_specs, tensors, strict=True)}
            for name in adapters.keys() & merged.keys():
                down, up = factors[name]
                assert down is not None
                assert up is not None
                merged[name] = merged[name].float() + adapters[name].scale * (up[0].float() @ down[0].float())
            yield [(spec.name, merged[spec.name].to(getattr(torch, spec.dtype))) for spec in sent_specs]

    def _specs_of(self, entry: WeightMap, dtype: str) -> list[TensorSpec]:
        return [
            TensorSpec(source.name, source.shape, "float32" if source.name in self._kept else dtype)
            for source in entry.sources
        ]

    def _check_names(self) -> None:
        files, hf = self._files, self._model.hf
        names = {source.name for entry in self._own_maps for source in entry.sources}
        missing = sorted(names - files.names - {SCORE})
        allowed = {*names, *self.tied, LM_HEAD} if self._model.is_headless else {*names, *self.tied}
        unexpected = []
        for name in sorted(files.names - allowed):
            # Old files have rotary frequencies; layers for multi-token prediction are used by no policy.
            layer = name.removeprefix("model.layers.").partition(".")[0]
            is_beyond = layer.isdigit() and int(layer) >= hf.num_hidden_layers
            if not (name.startswith("mtp.") or is_beyond or name.endswith("rotary_emb.inv_freq")):
                unexpected.append(name)
        if missing or unexpected:
            raise ValueError(
                f"the weights in {files.folder} are not those of a {hf.model_type} model: "
                f"missing {_shown(missing)}; unexpected {_shown(unexpected)}{head_advice(unexpected)}"
            )


def _head_maps(model: ReadingModel) -> list[WeightMap]:
    hf: Any = model.hf
    if model.is_headless:
        return [WeightMap(SCORE, (HFTensor(SCORE, (1, hf.hidden_size)),), Whole())]
    shape = (hf.vocab_size, hf.hidden_size)
    head = WeightMap("output_layer.weight", (HFTensor(model.file_name(LM_HEAD), shape),), Vocabulary(hf.vocab_size))
    if not hf.tie_word_embeddings:
        return [head]
    embedding = HFTensor(model.file_name(EMBEDDING), shape)
    return [replace(head, sources=(embedding,), copy_of="embedding.word_embeddings.weight")]


def _read(opened: OpenWeights, sources: Sequence[HFTensor], index: int, slices: tuple[slice, ...]) -> Tensor:
    return sources[index].read(partial(opened.read, sources[index].name), slices)


def _held_values(split: Split, held: Tensor, rows: slice, source: HFTensor) -> Tensor:
    """Return rows of a rank's part in file order with the dims of the whole Hugging Face tensor."""
    return source.placed(split.in_file_order(held)[rows])


def _slice(whole: Tensor, _: int, slices: tuple[slice, ...]) -> Tensor:
    return whole[slices]


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return (", ".join(names[:MAX_SHOWN]) or "none") + more


def _matrices_in(
    sources: Sequence[HFTensor], boxes: Sequence[tuple[slice, int, Box]], width: int, run: Tensor, start: int = 0
) -> Iterator[MatrixPiece]:
    """Yield the pieces of Hugging Face matrices in a run of a flattened parameter.

    Args:
        sources: The matrices that the parameter is made of.
        boxes: Rows of the parameter, the number of their matrix, and their place in it.
        width: Number of columns of the parameter.
        run: `[elements]`.
        start: Start of the run in the flattened parameter.
    """
    for rows, index, ((row, _), (column, _)) in boxes:
        first, last = max(start, rows.start * width), min(start + len(run), rows.stop * width)
        begin = rows.start * width
        for (down, right), sizes in rectangles(first - begin, last - begin, (rows.stop - rows.start, width)):
            element = begin + down * width + right - start
            values = run[element : element + sizes[0] * sizes[1]].view(sizes)
            source = sources[index]
            name = source.name if source.expert is None else f"{source.name}.{source.expert}"
            (height, length), offsets = source.part_shape, (row + down, column + right)
            if source.is_transposed:
                yield MatrixPiece(name, (length, height), offsets[::-1], values.mT)
            else:
                yield MatrixPiece(name, (height, length), offsets, values)
