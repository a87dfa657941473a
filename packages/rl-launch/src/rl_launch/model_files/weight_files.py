"""Files of weights: safetensors checked by their headers, and checkpoint folders of other frameworks, recognised by
their files. No library that loads weights is needed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rl_core.config.tree import reason

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8
_LFS_POINTER = b"version https://git-lfs"
_MAX_NAMED = 4


def shapes_of(path: Path, *, whole: bool = False) -> dict[str, tuple[int, ...]]:
    """Read only the header of a safetensors file, and return the shapes of its tensors.

    Args:
        path: The file.
        whole: True to check that the file has the length that its header gives.

    Raises:
        ValueError: If the file does not start with a header, or has another length; the message begins with its name.
    """
    try:
        with path.open("rb") as file:
            start = file.read(_LENGTH_BYTES)
            # the length of the header comes first, in eight bytes
            length = int.from_bytes(start, "little")
            if _LFS_POINTER.startswith(start) and start:
                raise ValueError(f"{path.name} is a pointer of Git LFS; run `git lfs pull` to get the file itself")
            if len(start) < _LENGTH_BYTES or length > _MAX_HEADER_BYTES:
                raise ValueError(f"{path.name} is not a safetensors file")
            text = file.read(length)
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read: {error.strerror}") from None
    if len(text) < length:
        raise ValueError(f"{path.name} is truncated: it ends within its header")
    try:
        entries: dict[str, Any] = json.loads(text)
        entries.pop("__metadata__", None)
        shapes = {name: tuple(entry["shape"]) for name, entry in entries.items()}
        places = sorted(tuple(map(int, entry["data_offsets"])) for entry in entries.values())
        ends = [0, *(end for _, end in places)]
        if any(begin != before or end < begin for (begin, end), before in zip(places, ends, strict=False)):
            raise ValueError
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise ValueError(f"{path.name} is not a safetensors file: its header is not valid") from None
    num_bytes = _LENGTH_BYTES + length + ends[-1]
    if whole and (size := path.stat().st_size) != num_bytes:
        kind = "is truncated" if size < num_bytes else "does not match its header"
        raise ValueError(f"{path.name} {kind}: it has {size} of {num_bytes} bytes")
    return shapes


def shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors in the safetensors files of a folder; empty if a header cannot be read."""
    try:
        return {name: shape for file in sorted(folder.glob("*.safetensors")) for name, shape in shapes_of(file).items()}
    except ValueError:
        return {}


def weight_file_problems(folder: Path) -> Iterator[str]:
    """Yield the damage of the safetensors of a model's folder: files that are missing or truncated, and tensors that
    the index places in files without them. Contents are not read. A folder without safetensors has no damage.
    """
    if (folder / INDEX).is_file():
        yield from _index_problems(folder)
    elif (folder / SINGLE).is_file():
        try:
            shapes_of(folder / SINGLE, whole=True)
        except ValueError as error:
            yield str(error)


def _index_problems(folder: Path) -> Iterator[str]:
    try:
        file_of: dict[str, str] = dict(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        yield f"{INDEX} is not a valid index of weights: {type(error).__name__}: {reason(error)}"
        return
    files = sorted({str(file) for file in file_of.values()})
    if outside := [file for file in files if Path(file).name != file]:
        are = "is" if len(outside) == 1 else "are"
        yield f"{INDEX} lists {listed(outside, _MAX_NAMED)}, which {are} not in the folder. Download the model again"
        return
    if (folder / SINGLE).is_file() and SINGLE not in files:
        yield (
            f"it has both {SINGLE} and {INDEX}, which does not list that file, so there may be two models. Remove the "
            "outdated one"
        )
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        yield f"{INDEX} lists {listed(missing, _MAX_NAMED)}, which {are} missing ({len(missing)} of {len(files)} files)"
    for file in (each for each in files if each not in missing):
        try:
            held = shapes_of(folder / file, whole=True)
        except ValueError as error:
            yield str(error)
            continue
        absent = sorted(name for name, place in file_of.items() if place == file and name not in held)
        if absent:
            which = "it" if len(absent) == 1 else "them"
            yield f"{INDEX} places {listed(absent, _MAX_NAMED)} in {file}, which does not contain {which}"


def listed(names: Sequence[str], most: int = 8) -> str:
    """Return a list in words, with the number of items that are left out."""
    shown = ", ".join(names[:most]) or "nothing"
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


class ForeignKind(NamedTuple):
    """A kind of checkpoint that cannot be read.

    Args:
        name: Name with an article.
        patterns: Globs. A folder that matches one of them contains such a checkpoint.
        remedy: How to get Hugging Face files from it, as a sentence without the full stop.
    """

    name: str
    patterns: tuple[str, ...]
    remedy: str

    def __str__(self) -> str:
        return f"it is {self.name}. {self.remedy}"


FOREIGN_KINDS = (
    ForeignKind(
        "a DeepSpeed checkpoint",
        ("zero_to_fp32.py", "global_step*/*_optim_states.pt", "*_optim_states.pt", "global_step*/mp_rank_*"),
        "Run its zero_to_fp32.py with --safe_serialization, and save the model's config.json next to the result",
    ),
    ForeignKind(
        "a Megatron-LM checkpoint",
        ("latest_checkpointed_iteration.txt", "iter_*", "mp_rank_*/model_optim_rng.pt", "common.pt"),
        "Run `rl convert FOLDER NEW_FOLDER policy.model_name=MODEL`, which reads the format torch_dist",
    ),
    ForeignKind(
        "a PyTorch distributed checkpoint (torch.distributed.checkpoint)",
        (".metadata", "*.distcp"),
        "Export it with the program that wrote it",
    ),
    ForeignKind(
        "a NeMo checkpoint", ("model_config.yaml", "*.nemo", "weights/*.distcp"), "Export it with NeMo's export_ckpt"
    ),
    ForeignKind("a GGUF file of llama.cpp", ("*.gguf",), "Use the model that it was quantised from"),
    ForeignKind(
        "a model in Meta's own format",
        ("consolidated.*.pth",),
        "Convert it with convert_llama_weights_to_hf.py of transformers",
    ),
    ForeignKind(
        "a model in Mistral's own format",
        ("consolidated*.safetensors", "params.json"),
        "Use the Hugging Face files of the same model",
    ),
    ForeignKind(
        "a Flax or TensorFlow model",
        ("flax_model*.msgpack", "tf_model*.h5", "model.ckpt*"),
        "Load it with from_flax=True or from_tf=True of transformers 4 and save it with `save_pretrained`",
    ),
    ForeignKind(
        "a pickled adapter", ("adapter_model.bin",), "Load it with peft and save it with safe_serialization=True"
    ),
    ForeignKind(
        "a model with pickled weights",
        ("pytorch_model*.bin", "pytorch_model*.bin.index.json"),
        "Run `rl convert FOLDER NEW_FOLDER`, which writes safetensors files without running code from the pickle",
    ),
)


MEGATRON, PICKLED = FOREIGN_KINDS[1], FOREIGN_KINDS[-1]
"""Folders that `rl convert` turns into safetensors."""


def foreign_kind(folder: Path) -> ForeignKind | None:
    """Return the framework whose checkpoint a folder contains; None if it is not known."""
    return next((kind for kind in FOREIGN_KINDS if any(any(folder.glob(each)) for each in kind.patterns)), None)
