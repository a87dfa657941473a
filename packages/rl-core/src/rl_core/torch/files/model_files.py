"""A model's Hugging Face files: config, tokenizer and safetensors, read slice by slice."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from rl_core.model_config import TokenizerConfig
from rl_core.torch.files.block_scales import BLOCK, SUFFIX, dequantised, num_blocks

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
    """Copy the files of an export other than config and weights into a folder: the generation config, the tokenizer's
    files, and the chat template as it is configured.

    Args:
        source: folder of the model that the generation config is copied from.
        tokenizer: folder of the tokenizer.
        settings: of the tokenizer.
    """
    _copy_files(("generation_config.json",), source, target)
    copy_tokenizer(target, tokenizer=tokenizer, settings=settings)


def copy_tokenizer(target: Path, *, tokenizer: Path, settings: TokenizerConfig) -> None:
    """Copy the tokenizer's files into a folder, with the chat template as it is configured.

    Args:
        tokenizer: folder of the tokenizer.
        settings: of the tokenizer.
    """
    _copy_files(TOKENIZER_FILES, tokenizer, target)
    template = settings.template_text() or _own_template(target)
    if template is not None:
        (target / TEMPLATE).write_text(settings.with_variables(template), encoding="utf-8")


def _copy_files(names: Iterable[str], source: Path, target: Path) -> None:
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _own_template(folder: Path) -> str | None:
    """A tokenizer's template; None if it has none, or several by name."""
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
        raise ValueError(f"model_name {name!r} is not a folder; give a folder with Hugging Face files, or a hub name")
    # comes with the backends' transformers, which reading a folder does not need
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=PATTERNS))


def read_hf_config(folder: Path, overrides: Mapping[str, Any]) -> Any:
    """Return the model's `transformers` config with overrides.

    It does not say how weights are quantised on disk: they are dequantised when they are read, and exported so.

    Raises:
        ValueError: naming overrides that are not fields of this config.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    unknown = sorted(set(overrides) - set(config.to_dict()))
    if unknown:
        raise ValueError(f"hf_config_overrides {unknown} are not fields of a {type(config).__name__}")
    config = AutoConfig.from_pretrained(folder, **overrides)
    vars(config).pop("quantization_config", None)
    return config


@dataclass(frozen=True)
class WeightFiles:
    """The safetensors of one folder.

    Args:
        folder: that holds them.
        file_of: tensor name to the file that holds it.
        scales_of: name of each 8-bit weight to the file that holds the scales of its blocks.
    """

    folder: Path
    file_of: dict[str, str]
    scales_of: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> WeightFiles:
        """Reads the index, or the names in the single file.

        Raises:
            ValueError: if there are no safetensors.
        """
        if (folder / INDEX).is_file():
            return cls._apart(folder, dict(json.loads((folder / INDEX).read_text())["weight_map"]))
        if (folder / SINGLE).is_file():
            with safe_open(folder / SINGLE, framework="pt") as file:
                return cls._apart(folder, dict.fromkeys(file.keys(), SINGLE))
        raise ValueError(
            f"{folder} has neither {SINGLE} nor {INDEX}; save the model with save_pretrained() to get them"
        )

    @classmethod
    def _apart(cls, folder: Path, file_of: dict[str, str]) -> WeightFiles:
        """Weights and the scales of 8-bit ones."""
        scaled = [name for name in file_of if name + SUFFIX in file_of]
        scales_of = {name: file_of.pop(name + SUFFIX) for name in scaled}
        return cls(folder, file_of, scales_of)

    @contextmanager
    def open(self) -> Iterator[OpenWeights]:
        """The files, mapped and open for reading."""
        with ExitStack() as stack:
            files = {
                name: stack.enter_context(safe_open(self.folder / name, framework="pt"))
                for name in {*self.file_of.values(), *self.scales_of.values()}
            }
            yield OpenWeights(
                {name: files[file] for name, file in self.file_of.items()},
                {name: files[file] for name, file in self.scales_of.items()},
            )


@dataclass(frozen=True)
class OpenWeights:
    """Open safetensors by tensor name.

    Args:
        files: of each weight.
        scales: of the scales of each 8-bit weight.
    """

    files: dict[str, Any]
    scales: dict[str, Any] = field(default_factory=dict)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a whole tensor."""
        return tuple(self.files[name].get_slice(name).get_shape())

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """A slice of a tensor, the only part of it that is read; of an 8-bit weight with scales its values in float32.

        Raises:
            ValueError: if the scales are not those of blocks of 128 by 128.
        """
        found: Tensor = self.files[name].get_slice(name)[slices] if slices else self.files[name].get_tensor(name)
        if name not in self.scales:
            return found
        scales, shape = self.scales[name].get_slice(name + SUFFIX), self.shape(name)
        if tuple(scales.get_shape()) != num_blocks(shape):
            raise ValueError(
                f"{name}{SUFFIX} has shape {tuple(scales.get_shape())}, and blocks of {BLOCK} by {BLOCK} of a weight "
                f"of shape {shape} have {num_blocks(shape)}; convert the model to bfloat16 first"
            )
        return dequantised(found, shape, slices, lambda part: scales[part])
