"""A model's Hugging Face files: config, tokenizer and safetensors, read slice by slice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
)


def model_folder(name: str) -> Path:
    """The local folder of a model: `name` itself, or its download from the hub."""
    if Path(name).is_dir():
        return Path(name)
    if name.startswith((".", "/", "~")):
        raise ValueError(f"model_name {name!r} is no folder; give a folder with Hugging Face files, or a hub name")
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=PATTERNS))


@dataclass(frozen=True)
class WeightFiles:
    """The safetensors of one folder.

    Args:
        folder: where they lie.
        file_of: tensor name to the file that holds it.
    """

    folder: Path
    file_of: dict[str, str]

    @classmethod
    def of(cls, folder: Path) -> WeightFiles:
        """Reads the index, or the names in the single file.

        Raises:
            ValueError: where there are no safetensors.
        """
        if (folder / INDEX).is_file():
            return cls(folder, dict(json.loads((folder / INDEX).read_text())["weight_map"]))
        if (folder / SINGLE).is_file():
            with safe_open(folder / SINGLE, framework="pt") as file:
                return cls(folder, dict.fromkeys(file.keys(), SINGLE))
        raise ValueError(
            f"{folder} has neither {SINGLE} nor {INDEX}; save the model with save_pretrained() to get them"
        )

    @contextmanager
    def open(self) -> Iterator[OpenWeights]:
        """The files, mapped and open for reading."""
        with ExitStack() as stack:
            files = {
                name: stack.enter_context(safe_open(self.folder / name, framework="pt"))
                for name in set(self.file_of.values())
            }
            yield OpenWeights({name: files[file] for name, file in self.file_of.items()})


@dataclass(frozen=True)
class OpenWeights:
    """Open safetensors by tensor name."""

    files: dict[str, Any]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a whole tensor."""
        return tuple(self.files[name].get_slice(name).get_shape())

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """A slice of a tensor, the only part of it that is read."""
        if not slices:
            return self.files[name].get_tensor(name)
        return self.files[name].get_slice(name)[slices]
