"""Weights that PyTorch pickled (`pytorch_model.bin`), written as safetensors.

Run in an environment with torch, by the driver: `convert_to_stdout(source, target)` prints one JSON object.
"""

from __future__ import annotations

import json
import pickle
import sys
import zipfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rl_core.torch.files.model_files import CONFIG, GENERATION_CONFIG, INDEX, SINGLE, copy_files

PICKLED_SINGLE = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"

_MAX_NAMED = 4
_LFS_POINTER = b"version https://git-lfs"
_REFUSED = "GLOBAL "
"""Precedes the name of an object other than a tensor in PyTorch's error about a pickle."""


@dataclass(frozen=True)
class Converted:
    """The result of a conversion.

    Args:
        num_files: Files of weights.
        num_tensors: Tensors in them.
        num_bytes: Bytes of all tensors.
        shared: Names that shared memory with another one; each was written in full.
    """

    num_files: int
    num_tensors: int
    num_bytes: int
    shared: tuple[str, ...]


def convert(source: Path, target: Path) -> Converted:
    """Write the pickled weights of a folder as safetensors, with the same name and value, and copy the config and the
    tokenizer. One file at a time is in memory; each is read again and compared bit by bit.

    Args:
        source: Folder with `pytorch_model.bin`, or with the files that `pytorch_model.bin.index.json` lists.
        target: Empty folder.

    Raises:
        ValueError: If the files hold anything except tensors by name, or other ones than their index; nothing of them
            is run.
        OSError: If a file cannot be read or written.
    """
    files = _pickled_files(source)
    file_of: dict[str, str] = {}
    total, shared = 0, list[str]()
    for place, (file, expected) in enumerate(files.items()):
        tensors = _load(source / file)
        # A file holds the tensors that the index places in it, and none of another file.
        if not tensors:
            raise ValueError(f"{file} holds no tensors")
        absent = sorted((expected or frozenset()) - tensors.keys())
        if absent:
            raise ValueError(f"{PICKLED_INDEX} places {_few(absent)} in {file}, which does not hold them")
        twice = sorted(tensors.keys() & file_of.keys())
        if twice:
            raise ValueError(f"{file} holds {_few(twice)}, which another file holds too")
        name = SINGLE if len(files) == 1 else f"model-{place + 1:05d}-of-{len(files):05d}.safetensors"
        whole, parts = _apart(tensors)
        shared += parts
        save_file(whole, target / name, metadata={"format": "pt"})
        _compare(tensors, target / name)
        file_of.update(dict.fromkeys(tensors, name))
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
        (target / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    # Code that came with the model is left out.
    copy_files(source, target, CONFIG, GENERATION_CONFIG)
    return Converted(len(files), len(file_of), total, tuple(sorted(shared)))


def convert_to_stdout(source: str, target: str) -> None:
    """Convert, and print one JSON object: the fields of `Converted`, or the `problem`."""
    try:
        answer = asdict(convert(Path(source), Path(target)))
    except (ValueError, OSError) as error:
        answer = {"problem": str(error) or type(error).__name__}
    sys.stdout.write(json.dumps(answer) + "\n")


def _pickled_files(folder: Path) -> dict[str, frozenset[str] | None]:
    """Return the files of weights, each with the tensors that the index places in it; None without an index."""
    if not (folder / PICKLED_INDEX).is_file():
        if not (folder / PICKLED_SINGLE).is_file():
            raise ValueError(f"{folder} has neither {PICKLED_SINGLE} nor {PICKLED_INDEX}")
        return {PICKLED_SINGLE: None}
    try:
        placed: Mapping[str, str] = json.loads((folder / PICKLED_INDEX).read_text(encoding="utf-8"))["weight_map"]
        names: dict[str, set[str]] = {}
        for name, file in placed.items():
            names.setdefault(file, set()).add(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{PICKLED_INDEX} is not a valid index of weights: {error!r}") from None
    outside = [file for file in names if Path(file).name != file]
    if outside:
        raise ValueError(f"{PICKLED_INDEX} lists {outside[0]!r}, which is not a file of the folder")
    missing = sorted(file for file in names if not (folder / file).is_file())
    if missing:
        raise ValueError(f"{PICKLED_INDEX} lists {_few(missing)}, which the folder does not have")
    return {file: frozenset(names[file]) for file in sorted(names)}


def _load(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a pickled file by name.

    Raises:
        ValueError: If it holds anything else; the code of a pickle is not run.
    """
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise ValueError(f"{path.name} is a pointer of Git LFS; run `git lfs pull` to get the file itself")
    try:
        # The older of the two formats cannot be mapped.
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        _, is_refused, rest = said.partition(_REFUSED)
        if not is_refused:
            detail = said.partition("WeightsUnpickler error: ")[2] or said
            raise ValueError(f"{path.name} is damaged, or was not written by `torch.save`: {detail[:200]}") from None
        raise ValueError(
            f"{path.name} holds more than tensors ({rest.partition(' ')[0]}), which can run code when read, so it was "
            "not read. If you trust it, load the model with transformers and save it with `save_pretrained`"
        ) from None
    if not isinstance(found, Mapping):
        raise ValueError(f"{path.name} holds {type(found).__name__}, not tensors by name")
    others = [str(name) for name, value in found.items() if not isinstance(value, Tensor)]
    if others:
        raise ValueError(
            f"{path.name} has other values than tensors under {_few(others)}; save only the model's `state_dict()`"
        )
    tensors = {str(name): value.detach() for name, value in found.items()}
    odd = [name for name, tensor in tensors.items() if tensor.layout != torch.strided or tensor.is_quantized]
    if odd:
        raise ValueError(f"{path.name} has sparse or quantised tensors, which safetensors does not hold: {_few(odd)}")
    return tensors


def _apart(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors, each with its own memory as safetensors requires, and the tensors that shared memory, by
    name."""
    storages = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors.values() if tensor.numel())
    whole: dict[str, Tensor] = {}
    shared = []
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        is_shared = tensor.numel() > 0 and storages[storage.data_ptr()] > 1
        is_part = storage.nbytes() != tensor.numel() * tensor.element_size() or not tensor.is_contiguous()
        whole[name] = tensor.contiguous().clone() if is_shared or is_part else tensor
        if is_shared:
            shared.append(name)
    return whole, shared


def _compare(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Compare what was written with the source, bit by bit.

    Raises:
        ValueError: Naming a tensor that differs.
    """
    with safe_open(path, framework="pt") as written:
        for name, tensor in tensors.items():
            found = written.get_tensor(name)
            same = found.dtype == tensor.dtype and found.shape == tensor.shape
            if not same or not torch.equal(_bits(found), _bits(tensor)):
                raise ValueError(f"{path.name} holds other values of {name} than were to be written")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _few(names: list[str]) -> str:
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
