"""Checkpoints of Megatron-LM and Megatron Bridge (`torch_dist`), written as Hugging Face files.

Run in an environment with megatron-core, by the driver: `convert_to_stdout(source, target, model)` prints one JSON
object. The tensors of one file are in memory at a time, and no code of a pickle is run.
"""

from __future__ import annotations

import argparse
import json
import pickle
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
import yaml
from huggingface_hub import snapshot_download
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rl_core.torch.files.model_files import (
    CONFIG,
    GENERATION_CONFIG,
    INDEX,
    SINGLE,
    TOKENIZER_FILES,
    copy_files,
    read_hf_config,
)
from rl_core.torch.training.export import FILE_BYTES
from rl_megatron.conversion.splits import Vocabulary
from rl_megatron.conversion.weight_map import FUSED_NORMS, WeightMap, by_tensor, whole_tensors
from rl_megatron.families.catalog import family_of
from rl_megatron.families.dense import single_map
from rl_megatron.model.model import LM_HEAD
from rl_megatron.training.pieces import Pieces, PiecesLoadPlanner

LATEST = "latest_checkpointed_iteration.txt"
FORMAT = "metadata.json"
COMMON = "common.pt"
RUN_CONFIG = "run_config.yaml"

COMPARED = (
    *("num_attention_heads", "num_query_groups", "kv_channels", "layernorm_epsilon", "qk_layernorm"),
    *("layernorm_zero_centered_gamma", "add_qkv_bias", "multi_latent_attention", "softmax_type"),
    *("moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor"),
    *("moe_router_num_groups", "moe_router_group_topk", "moe_shared_expert_gate", "rotary_base"),
)
"""Fields of Megatron's config that change the computation, but not every time the shapes of tensors."""

ARGUMENTS = {"norm_epsilon": "layernorm_epsilon", "apply_layernorm_1p": "layernorm_zero_centered_gamma"}
"""Arguments of Megatron-LM that have another name in its config."""

IGNORED = re.compile(r"_extra_state|^(optimizer|chained_\d+|rng_state|rerun_state|opt_param_scheduler|mtp)\b")
"""Keys that no Hugging Face model has: states of kernels, of the optimizer and of generators, and layers for
multi-token prediction."""

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.local_experts\.(\d+)\.")
_MAX_SHOWN = 6


class Place(NamedTuple):
    """Place of a parameter in a checkpoint.

    Args:
        key: Name of the tensor.
        outer: Numbers of the layer and of the expert that it is of, if the tensor stacks several.
    """

    key: str
    outer: tuple[int, ...]


def convert(source: Path, target: Path, model: str) -> dict[str, Any]:
    """Write the weights of a checkpoint as Hugging Face files, with the config and the tokenizer of a model.

    Args:
        source: Folder of an iteration, or the folder with all of them, whose last one is taken.
        target: Empty folder.
        model: Folder with the config and the tokenizer of a model of the same architecture, or its name on the hub.

    Returns:
        Numbers of files, tensors and bytes, and the folder that was read.

    Raises:
        ValueError: If it is not such a checkpoint, or is of another architecture than the model.
    """
    source = iteration_of(source)
    reader = _Reader(str(source))
    tensors = reader.tensors()
    folder = Path(model)
    if not folder.is_dir():
        folder = Path(snapshot_download(model, allow_patterns=[CONFIG, GENERATION_CONFIG, *TOKENIZER_FILES]))
    hf = read_hf_config(folder, {})
    family = family_of(hf)
    settings = family.settings(hf)
    if settings.get("linear_attention_freq"):
        raise ValueError(
            f"{hf.model_type} models have linear attention, which Megatron keeps in another layout than rl-megatron"
        )
    check_settings(source, {**settings, "rotary_base": hf.rope_parameters.get("rope_theta")})
    maps = [*family.weights(hf), *_head(hf, tensors)]
    found = {entry.target: _place_of(entry, tensors) for entry in maps}
    _check(maps, found, tensors)
    places = {target: place for target, place in found.items() if place is not None}
    written = _write(reader, target, maps, places, tensors)
    first = tensors[places[maps[0].target].key].properties.dtype
    hf.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[hf.model_type]]
    hf.dtype = str(first).removeprefix("torch.")
    hf.save_pretrained(target)
    copy_files(folder, target, GENERATION_CONFIG)
    return {**written, "source": str(source)}


def convert_to_stdout(source: str, target: str, model: str) -> None:
    """Convert, and print one JSON object: the result of `convert`, or the `problem`."""
    try:
        answer = convert(Path(source), Path(target), model)
    except (ValueError, OSError) as error:
        answer = {"problem": str(error) or type(error).__name__}
    sys.stdout.write(json.dumps(answer) + "\n")


def iteration_of(source: Path) -> Path:
    """Return the folder of the iteration to read.

    Raises:
        ValueError: If there is none in the format `torch_dist`.
    """
    if (source / LATEST).is_file():
        latest = (source / LATEST).read_text().strip()
        found = source / (f"iter_{int(latest):07d}" if latest.isdigit() else latest)
        if not found.is_dir():
            raise ValueError(f"{LATEST} names {latest}, but {found.name} does not exist")
        source = found
    if not (source / FORMAT).is_file():
        raise ValueError(
            f"{source} has no {FORMAT}, so it is not a checkpoint in the format torch_dist. Save it with "
            "--ckpt-format torch_dist"
        )
    found_format = json.loads((source / FORMAT).read_text()).get("sharded_backend")
    if found_format != "torch_dist":
        raise ValueError(
            f"{source} has the format {found_format}, but only torch_dist is supported. Save it with --ckpt-format "
            "torch_dist"
        )
    return source


def check_settings(source: Path, settings: Mapping[str, Any]) -> None:
    """Compare the settings in a checkpoint with the ones that follow from the model, as far as it has them.

    Args:
        source: Folder of an iteration.
        settings: Fields of Megatron's config.

    Raises:
        ValueError: If one differs.
    """
    file, stated = _stated(source)
    for name in COMPARED:
        expected, found = settings.get(name), stated.get(name)
        if expected is None or found is None or expected == found:
            continue
        raise ValueError(
            f"{file} of the checkpoint has {name}={found}, but the model that policy.model_name gives has {expected}. "
            "Set policy.model_name to the model that it was trained from"
        )


def _stated(source: Path) -> tuple[str, dict[str, Any]]:
    """Return the file with the settings of a run of Megatron Bridge or Megatron-LM, and the settings."""
    if (source / RUN_CONFIG).is_file():
        return RUN_CONFIG, yaml.load((source / RUN_CONFIG).read_text(), _PlainYaml).get("model") or {}
    if not (source / COMMON).is_file():
        return COMMON, {}
    with zipfile.ZipFile(source / COMMON) as archive:
        name = next(each for each in archive.namelist() if each.endswith("/data.pkl"))
        with archive.open(name) as file:
            arguments = vars(_InertUnpickler(file).load().get("args") or argparse.Namespace())
    stated = {ARGUMENTS.get(name, name): value for name, value in arguments.items()}
    if not stated.get("group_query_attention"):
        stated.pop("num_query_groups", None)
    return COMMON, stated


class _PlainYaml(yaml.SafeLoader):
    """Reads objects of Python as None."""


_PlainYaml.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


class _Inert:
    """Stands for an object of any class in a pickle."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


class _InertUnpickler(pickle.Unpickler):
    """Reads arguments by name; all other objects become `_Inert`."""

    def find_class(self, module: str, name: str) -> Any:
        return argparse.Namespace if (module, name) == ("argparse", "Namespace") else _Inert

    def persistent_load(self, _: Any) -> None:
        return None


class _MetadataUnpickler(pickle.Unpickler):
    """Reads the metadata of torch's distributed checkpoint, and no other objects."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _METADATA.get(module, ()):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member  # Python 3.11 pickles a constant so.
        raise ValueError(f".metadata holds {module}.{name}, which can run code when read, so it was not read")


def _member(owner: Any, name: str) -> Any:
    """Return a constant of an enumeration, and no other attribute."""
    if not (isinstance(owner, type) and issubclass(owner, Enum)):
        raise ValueError(".metadata reads attributes, which can run code, so it was not read")
    return owner[name]


_CHECKPOINT = "torch.distributed.checkpoint"
_METADATA = {
    f"{_CHECKPOINT}.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata"),
        *("BytesStorageMetadata", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
    f"{_CHECKPOINT}.filesystem": ("_StorageInfo", "_StoragePrefix"),
    f"{_CHECKPOINT}.planner": ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"),
    "torch": (
        *("Size", "device", "bool", "bfloat16", "float16", "float32", "float64"),
        *("uint8", "int8", "int16", "int32", "int64"),
    ),
    "torch.serialization": ("_get_layout",),
    "collections": ("OrderedDict",),
    "pathlib": ("Path", "PosixPath", "PurePosixPath"),
}
"""Classes, dtypes and constants in the metadata of a checkpoint, by module."""


class _Reader(FileSystemReader):
    """Reads torch's distributed checkpoint without running code of its metadata."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata: Metadata = _MetadataUnpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Return the tensors of the model by key."""
        kept = self.read_metadata().state_dict_metadata
        return {
            key: value
            for key, value in kept.items()
            if isinstance(value, TensorStorageMetadata) and not IGNORED.search(key)
        }


def _head(hf: Any, tensors: Mapping[str, Any]) -> Iterator[WeightMap]:
    if "output_layer.weight" in tensors and not hf.tie_word_embeddings:
        shape = (hf.vocab_size, hf.hidden_size)
        yield single_map("output_layer.weight", LM_HEAD, shape, Vocabulary(hf.vocab_size))
    elif not hf.tie_word_embeddings:
        raise ValueError(
            "the checkpoint has no output_layer.weight, but the model that policy.model_name gives does not tie its "
            "head to the embedding"
        )


def _place_of(entry: WeightMap, tensors: Mapping[str, TensorStorageMetadata]) -> Place | None:
    """Return the place of a parameter; None if the checkpoint lacks it.

    Megatron keeps each kind of parameter of all layers, and of all experts, in one tensor, or if layers differ in one
    for each layer.
    """
    names = [entry.target]
    for fused, plain in FUSED_NORMS.items():
        if entry.target.endswith(f".{plain}"):
            names.append(entry.target.removesuffix(plain) + fused)
    for name in names:
        layer, expert = _LAYER.search(name), _EXPERT.search(name)
        index = () if expert is None else (int(expert[1]),)
        key = _EXPERT.sub(".experts.experts.", name)
        choices = [Place(key, index)]
        if layer is not None:
            choices.append(Place(_LAYER.sub("decoder.layers.", key), (int(layer[1]), *index)))
        if expert is not None:
            choices.append(Place(_EXPERT.sub(rf".experts.experts.{expert[1]}.", name), ()))
        for place in choices:
            if place.key in tensors:
                return place
    return None


def _shape(entry: WeightMap) -> tuple[int, ...]:
    """Return the shape of a whole parameter in Megatron."""
    meta = [torch.empty(source.part_shape, device="meta") for source in entry.sources]
    return tuple(entry.split.part(lambda number, slices: meta[number][slices], 0, 1).shape)


def _check(
    maps: Sequence[WeightMap], places: Mapping[str, Place | None], tensors: Mapping[str, TensorStorageMetadata]
) -> None:
    """Refuse a checkpoint that is not of the model's architecture.

    Raises:
        ValueError: If tensors are missing, left over, or of another shape.
    """
    advice = "Set policy.model_name to a model of the architecture of the checkpoint"
    missing = [target for target, place in places.items() if place is None]
    left = sorted(tensors.keys() - {place.key for place in places.values() if place is not None})
    left = [key for key in left if key != "output_layer.weight"]  # A copy of a tied embedding.
    if missing or left:
        shown = "; ".join(
            f"{what} {', '.join(names[:_MAX_SHOWN])}{' and more' if len(names) > _MAX_SHOWN else ''}"
            for what, names in {"it lacks": missing, "it also has": left}.items()
            if names
        )
        raise ValueError(f"the checkpoint has other tensors than the model: {shown}. {advice}")
    stacked: dict[str, int] = {}
    dims: dict[str, int] = {}
    for entry in maps:
        place = places[entry.target]
        assert place is not None
        found, expected = tuple(tensors[place.key].size)[len(place.outer) :], _shape(entry)
        is_padded = isinstance(entry.split, Vocabulary) and found[0] >= expected[0] and found[1:] == expected[1:]
        if found != expected and not is_padded:
            raise ValueError(f"{place.key} has shape {found} in the checkpoint, but {expected} in the model. {advice}")
        stacked[place.key] = stacked.get(place.key, 0) + 1
        dims.setdefault(place.key, len(tensors[place.key].size) - len(expected))
    for key, count in stacked.items():
        outer = tensors[key].size[: dims[key]]
        if torch.Size(outer).numel() != count:
            raise ValueError(f"{key} is of {list(outer)} layers and experts, but the model has {count}. {advice}")


def _files(
    groups: Iterable[Sequence[WeightMap]], places: Mapping[str, Place], tensors: Mapping[str, TensorStorageMetadata]
) -> list[list[Sequence[WeightMap]]]:
    """Return the groups of maps by the file that their tensors are written to."""
    files: list[list[Sequence[WeightMap]]] = [[]]
    size = 0
    for group in groups:
        itemsize = tensors[places[group[0].target].key].properties.dtype.itemsize
        more = sum(prod(source.shape) for source in group[0].sources) * itemsize
        if files[-1] and size + more > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(group)
        size += more
    return files


def _write(
    reader: FileSystemReader,
    target: Path,
    maps: Sequence[WeightMap],
    places: Mapping[str, Place],
    tensors: Mapping[str, TensorStorageMetadata],
) -> dict[str, int]:
    """Write the tensors of a model, file by file; returns the numbers of files, tensors and bytes."""
    files = _files(by_tensor(maps), places, tensors)
    file_of: dict[str, str] = {}
    total = 0
    for number, groups in enumerate(files):
        name = SINGLE if len(files) == 1 else f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        found = _read(reader, groups, places, tensors)
        save_file(found, target / name, metadata={"format": "pt"})
        file_of.update(dict.fromkeys(found, name))
        total += sum(tensor.numel() * tensor.element_size() for tensor in found.values())
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
        (target / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return {"num_files": len(files), "num_tensors": len(file_of), "num_bytes": total}


def _read(
    reader: FileSystemReader,
    groups: Sequence[Sequence[WeightMap]],
    places: Mapping[str, Place],
    tensors: Mapping[str, TensorStorageMetadata],
) -> dict[str, Tensor]:
    """Return the Hugging Face tensors of some groups of maps by name."""
    wanted: dict[str, Pieces] = {}
    held: dict[str, Tensor] = {}
    for entry in (entry for group in groups for entry in group):
        key, index = places[entry.target]
        size = tensors[key].size
        rest = size[len(index) :]
        piece = torch.empty((*(1 for _ in index), *rest), dtype=tensors[key].properties.dtype)
        wanted.setdefault(key, Pieces(size)).add((*index, *(0 for _ in rest)), piece)
        held[entry.target] = piece.view(rest)
    dcp.load(wanted, storage_reader=reader, planner=PiecesLoadPlanner(), no_dist=True)
    found: dict[str, Tensor] = {}
    for group in groups:
        joined = whole_tensors(group, [entry.split.join([held[entry.target]]) for entry in group])
        for source, tensor in zip(group[0].sources, joined, strict=True):
            found[source.name] = tensor.contiguous().clone()  # Files hold no views.
    return found
