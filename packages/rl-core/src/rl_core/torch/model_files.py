"""A model's Hugging Face files: config, tokenizer and safetensors, read slice by slice."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from rl_core.model_config import TokenizerConfig

CONFIG = "config.json"
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


TEMPLATE = "chat_template.jinja"


def copy_side_files(target: Path, *, source: Path, tokenizer: Path, settings: TokenizerConfig) -> None:
    """Put what an export has beside config and weights into a folder: the generation config, the tokenizer's files, and
    the chat template as it is configured.

    Args:
        source: folder of the model that the generation config is copied from.
        tokenizer: folder of the tokenizer.
        settings: of the tokenizer.
    """
    for folder, names in ((source, ("generation_config.json",)), (tokenizer, TOKENIZER_FILES)):
        for name in names:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, target / name)
    template = settings.template_text() or _own_template(target)
    if template is not None:
        (target / TEMPLATE).write_text(settings.with_variables(template), encoding="utf-8")


def _own_template(folder: Path) -> str | None:
    """A tokenizer's template; None where it has none, or several by name."""
    if (folder / TEMPLATE).is_file():
        return (folder / TEMPLATE).read_text(encoding="utf-8")
    config = folder / "tokenizer_config.json"
    found = json.loads(config.read_text(encoding="utf-8")).get("chat_template") if config.is_file() else None
    return found if isinstance(found, str) else None


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
