"""A model's weights as Hugging Face files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from rl_core.torch.files.model_files import CONFIG, INDEX, SINGLE
from rl_core.weights import TensorSpec, buckets, num_bytes

FILE_BYTES = 2 * 2**30
"""Most bytes of one safetensors file, and of what a writing rank gathers at a time."""


def export_dtype(folder: Path, precision: str) -> str:
    """float32 where the model computes in it, else the dtype that its source has on disk; the compute dtype where the
    source doesn't say.

    Args:
        folder: of the model's source.
        precision: what the model computes in.
    """
    if precision == "float32":
        return precision
    config = json.loads((folder / CONFIG).read_text())
    source = config.get("dtype") or config.get("torch_dtype")
    return precision if source is None else str(source).removeprefix("torch.")


@dataclass(frozen=True)
class ExportPlan:
    """Which tensors go to which of the files in a folder."""

    folder: Path
    files: Sequence[Sequence[TensorSpec]]

    @classmethod
    def of(cls, folder: Path, specs: Sequence[TensorSpec]) -> ExportPlan:
        """Tensors in their order, in files of at most `FILE_BYTES` each."""
        return cls(folder, list(buckets(specs, FILE_BYTES)))

    def write(self, index: int, tensors: dict[str, Tensor]) -> None:
        """Write one file."""
        save_file(tensors, self.folder / self._name(index), metadata={"format": "pt"})

    def write_index(self) -> None:
        """Write which tensor is in which file, where there are several."""
        if len(self.files) == 1:
            return
        file_of = {spec.name: self._name(index) for index, specs in enumerate(self.files) for spec in specs}
        size = sum(num_bytes(spec) for specs in self.files for spec in specs)
        content = {"metadata": {"total_size": size}, "weight_map": file_of}
        (self.folder / INDEX).write_text(json.dumps(content, indent=2))

    def _name(self, index: int) -> str:
        count = len(self.files)
        return SINGLE if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"
