"""A model's linear layers quantised in its files, as engines read them (`quantization_config` of compressed-tensors).

Run in an environment with torch, by the driver: `quantise_to_stdout(source, target, settings)` prints one JSON object.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rl_core.torch.files.model_files import CONFIG, GENERATION_CONFIG, INDEX, PRECISION, WeightFiles, copy_files
from rl_core.torch.quantization.formats import WeightFormat, weight_format

WEIGHT = ".weight"
_IN_A_LAYER = re.compile(r"(^|\.)layers\.\d+\.")
_KEPT = re.compile(r"\.experts\.|(^|\.)(vision|visual|audio)")
"""Experts, and encoders next to the language model."""
_ROUTERS = ("gate", "router", "shared_expert_gate")
"""Last part of the name of modules whose weights choose experts."""


@dataclass(frozen=True)
class QuantizedFiles:
    """The result of `quantise`.

    Args:
        num_quantised: Linear layers that were quantised.
        num_bytes: Bytes of all tensors.
        num_bytes_before: Bytes of all tensors of the source.
        relative_error: Root mean square of the errors of the quantised weights, divided by the root mean square of the
            weights in the source.
        dtype: Dtype of most weights when they were quantised.
    """

    num_quantised: int
    num_bytes: int
    num_bytes_before: int
    relative_error: float
    dtype: str


def quantise(
    source: Path, target: Path, fmt: WeightFormat, *, exclude: Sequence[str] = (), dtype: torch.dtype | None = None
) -> QuantizedFiles:
    """Write a model with the weights of its linear layers quantised, and copy its tokenizer.

    Head, embedding, routers, experts and encoders of images keep their weights. The others are cast to `dtype` first if
    it is given, as a trainer casts its master weights: so the files have the values that quantisation-aware training in
    that dtype computes with, bit for bit.

    Args:
        source: Folder with Hugging Face files of a model that is not quantised.
        target: Empty folder.
        fmt: Format of the weights.
        exclude: Modules whose weights are kept: names, their endings (`o_proj`), or the module around them
            (`model.layers.0`).
        dtype: Dtype that the model computes in; if None, the precision of the run that exported the files, or otherwise
            each weight's own dtype.

    Raises:
        ValueError: If the model is quantised already, the format does not fit a layer, a name in `exclude` has none, or
            a weight is not finite.
    """
    config = json.loads((source / CONFIG).read_text(encoding="utf-8"))
    if "quantization_config" in config:
        raise ValueError(f"{source} is quantised already; use the model that it was made from")
    files = WeightFiles.of(source)
    with files.open() as opened:
        matrices = [name for name in files.names if name.endswith(WEIGHT) and len(opened.shape(name)) == 2]
    chosen = _chosen(matrices, exclude)
    totals = _Totals()
    file_of: dict[str, str] = {}
    for path in sorted(source.glob("*.safetensors")):
        written = _write(path, target / path.name, chosen, fmt, dtype, totals)
        file_of.update(dict.fromkeys(written, path.name))
    if (source / INDEX).is_file():
        index = {"metadata": {"total_size": totals.after}, "weight_map": dict(sorted(file_of.items()))}
        (target / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    ignored = [name.removesuffix(WEIGHT) for name in matrices if name not in chosen]
    config["quantization_config"] = quantization_config(fmt, ignored)
    config["dtype"] = totals.dtype
    config.pop("torch_dtype", None)
    (target / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    copy_files(source, target, GENERATION_CONFIG)
    return QuantizedFiles(len(chosen), totals.after, totals.before, totals.relative_error, totals.dtype)


def quantization_config(fmt: WeightFormat, ignored: Iterable[str]) -> Mapping[str, object]:
    """Return how `config.json` describes quantised linear layers.

    Args:
        fmt: Format of the weights.
        ignored: Names of modules with a matrix that is not quantised.
    """
    group = {"targets": ["Linear"], "weights": {**fmt.scheme(), "dynamic": False}, "format": fmt.file_format}
    if fmt.name == "float8":
        dynamic = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
        group["input_activations"] = dynamic
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": fmt.file_format,
        "config_groups": {"group_0": group},
        "ignore": sorted(ignored),
    }


def quantise_to_stdout(source: str, target: str, settings: str) -> None:
    """Quantise, and print one JSON object: the fields of `QuantizedFiles`, or the `problem`.

    Args:
        source: Folder with Hugging Face files.
        target: Empty folder.
        settings: JSON with `format`, `group_size`, `exclude` and `dtype`.
    """
    try:
        given: dict[str, Any] = json.loads(settings)
        fmt = weight_format(given["format"], given["group_size"])
        dtype = getattr(torch, given["dtype"]) if given["dtype"] else None
        answer = asdict(quantise(Path(source), Path(target), fmt, exclude=given["exclude"], dtype=dtype))
    except (ValueError, OSError) as error:
        answer = {"problem": str(error) or type(error).__name__}
    sys.stdout.write(json.dumps(answer) + "\n")


def _chosen(matrices: Sequence[str], exclude: Sequence[str]) -> set[str]:
    linear = {
        name
        for name in matrices
        if _IN_A_LAYER.search(name) and not _KEPT.search(name) and name.split(".")[-2] not in _ROUTERS
    }
    for each in exclude:
        if not any(_is_named(name, each) for name in linear):
            known = sorted({name.split(".")[-2] for name in linear})
            raise ValueError(f"--exclude: {each!r} is not a linear layer of the model; name some of {', '.join(known)}")
    chosen = {name for name in linear if not any(_is_named(name, each) for each in exclude)}
    if not chosen:
        raise ValueError("no linear layer is left to quantise; exclude fewer of them")
    return chosen


def _is_named(weight: str, name: str) -> bool:
    module = weight.removesuffix(WEIGHT)
    return f".{module}".endswith(f".{name}") or f"{module}.".startswith(f"{name}.")


class _Totals:
    """Sums over all files."""

    def __init__(self) -> None:
        self.before = self.after = 0
        self._squares = self._errors = 0.0
        self._num_values: dict[str, int] = {}

    @property
    def relative_error(self) -> float:
        return (self._errors / self._squares) ** 0.5 if self._squares else 0.0

    @property
    def dtype(self) -> str:
        return max(self._num_values, key=lambda dtype: self._num_values[dtype])

    def count(self, exact: Tensor, rounded: Tensor) -> None:
        dtype = str(rounded.dtype).removeprefix("torch.")
        self._num_values[dtype] = self._num_values.get(dtype, 0) + exact.numel()
        self._squares += float(exact.double().square().sum())
        self._errors += float((rounded.double() - exact.double()).square().sum())


def _write(
    source: Path, target: Path, chosen: set[str], fmt: WeightFormat, dtype: torch.dtype | None, totals: _Totals
) -> list[str]:
    """Write one file, and list its tensors."""
    written: dict[str, Tensor] = {}
    with safe_open(source, framework="pt") as file:
        trained_in = (file.metadata() or {}).get(PRECISION)
        dtype = dtype or (getattr(torch, trained_in) if trained_in else None)
        for name in file.keys():  # noqa: SIM118 - not a mapping
            tensor = file.get_tensor(name)
            totals.before += tensor.numel() * tensor.element_size()
            if name not in chosen:
                written[name] = tensor
                continue
            if not bool(tensor.isfinite().all()):
                raise ValueError(f"{name} has values that are not finite; choose an earlier checkpoint")
            if tensor.shape[1] % fmt.step:
                raise ValueError(f"{name} has {tensor.shape[1]} inputs, not a multiple of {fmt.step}; exclude it")
            compute = dtype or tensor.dtype
            try:
                quantised = fmt.quantise(tensor.to(compute))
            except ValueError as error:
                raise ValueError(f"{name}: {error}; choose another group size, or exclude it") from None
            totals.count(tensor, quantised.dequantise(compute))
            prefix = name.removesuffix("weight")
            written |= {prefix + suffix: part for suffix, part in quantised.tensors().items()}
    totals.after += sum(tensor.numel() * tensor.element_size() for tensor in written.values())
    save_file({name: tensor.contiguous() for name, tensor in written.items()}, target, metadata={"format": "pt"})
    return list(written)
