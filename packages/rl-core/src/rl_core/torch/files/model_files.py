"""A model's Hugging Face files: config, tokenizer and safetensors, read slice by slice, and weights that are tied."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed import ProcessGroup

from rl_core.facts.hf_config import HFConfig, is_composite
from rl_core.model_config import TokenizerConfig
from rl_core.torch.files.language_part import language_names, read_composite_config, read_language_config, tower_names
from rl_core.torch.files.stored import FLOATING, BlockScaledWeight, Slices, StoredMXFP4, StoredTensor, StoredWeight
from rl_core.torch.process_group import on_all_ranks, on_rank0

CONFIG = "config.json"
"""File of a model's config in its folder."""
GENERATION_CONFIG = "generation_config.json"
"""File of the settings to generate with by default, in a model's folder."""
SINGLE = "model.safetensors"
"""File of a model's weights, if they are in one file."""
INDEX = "model.safetensors.index.json"
"""File with the file of each weight, if they are in several files."""
PRECISION = "precision"
"""Key in the metadata of exported safetensors of the precision that the model computed in when it was trained."""
TEMPLATES = "additional_chat_templates"
PATTERNS = [
    "*.json",
    "*.safetensors",
    "*.jinja",
    "*.txt",
    "*.model",
    "*.tiktoken",
    "*.model.v3",
    f"{TEMPLATES}/*.jinja",
]
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files of the processor of a model that sees images."""

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
    "tokenizer.model.v3",
    "tekken.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.json",
)
"""Files of a tokenizer in a model's folder; most models have some of them."""


TEMPLATE = "chat_template.jinja"


READ_AS_WEIGHTS = (*FLOATING, BlockScaledWeight.dtype, StoredMXFP4.dtype)
"""Dtypes and quantisations of `OpenWeights` that give values of a weight when they are read."""

_WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.|_fsdp_wrapped_module\.)+")
"""Start of the name of each weight that was saved from within a wrapper: of data parallelism, `torch.compile` or
FSDP."""

_BARE_LAYER = re.compile(r"^(?:decoder\.|encoder\.)?(?:layers|h|blocks|block)\.\d+\.")
"""Start of layer names of a model that was saved without its head."""

_HEADS = ("lm_head.", "score.", "v_head.", "value_head.", "embed_out.")
"""Start of the name of a head, which a model has next to its body."""

READ_BYTES = 2**26
"""Bytes of a weight that are compared at one time."""

_logger = logging.getLogger(__name__)


def copy_side_files(
    target: Path, *, source: Path, tokenizer: Path, settings: TokenizerConfig, is_whole: bool = False
) -> None:
    """Copy the files of an export other than config and weights into a folder: the generation config, the tokenizer's
    files, and the chat template as it is configured.

    Args:
        target: Existing folder that receives the files.
        source: Folder of the model that the generation config is copied from.
        tokenizer: Folder of the tokenizer.
        settings: Settings of the tokenizer.
        is_whole: True of a model that sees images, whose processor's files are copied too.
    """
    for name in (GENERATION_CONFIG, *(PROCESSOR_FILES if is_whole else ())):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    copy_tokenizer(target, tokenizer=tokenizer, settings=settings)


def copy_tokenizer(target: Path, *, tokenizer: Path, settings: TokenizerConfig) -> None:
    """Copy the tokenizer's files into a folder, with the chat template as it is configured.

    Args:
        target: Existing folder that receives the files.
        tokenizer: Folder of the tokenizer.
        settings: Settings of the tokenizer.
    """
    copy_files(tokenizer, target)
    template = settings.template_text() or None
    if not template and (target / TEMPLATE).is_file():
        template = (target / TEMPLATE).read_text(encoding="utf-8")
    elif not template and (config := target / "tokenizer_config.json").is_file():
        template = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
    # A tokenizer may have several templates by name, which are kept as they are.
    if isinstance(template, str):
        (target / TEMPLATE).write_text(settings.with_variables(template), encoding="utf-8")


def copy_files(source: Path, target: Path, *names: str) -> None:
    """Copy the tokenizer's files and these into a folder, as far as they exist."""
    for name in (*names, *TOKENIZER_FILES):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    if (source / TEMPLATES).is_dir():
        shutil.copytree(source / TEMPLATES, target / TEMPLATES, dirs_exist_ok=True)


def model_folder(name: str) -> Path:
    """Return the local folder of a model: `name` itself, or its download from the hub."""
    if Path(name).is_dir():
        return Path(name)
    if name.startswith((".", "/", "~")):
        raise ValueError(f"model_name {name!r} is not a folder; give a folder with Hugging Face files, or a hub name")
    # comes with the backends' transformers, which reading a folder does not need
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=PATTERNS))


def fetched_folder(name: str, control: ProcessGroup) -> Path:
    """Return what `model_folder` does on every rank; one of them downloads, the others find it in the cache.
    Collective.

    Args:
        name: Folder or hub name.
        control: All ranks, on gloo.
    """
    folders: list[Path] = []
    on_rank0(control, lambda: folders.append(model_folder(name)))
    return folders[0] if folders else model_folder(name)


def read_hf_config(folder: Path, overrides: Mapping[str, Any], *, is_whole: bool = False) -> Any:
    """Return the model's `transformers` config with overrides, for the text of a composite model.

    It does not describe how weights are quantised on disk: they are dequantised when they are read, and exported so.

    Args:
        folder: Folder of the model.
        overrides: Fields of the language model's config.
        is_whole: True for the whole config of a composite model.

    Raises:
        ValueError: Naming overrides that are not fields of this config, or the type of a composite model whose text
            cannot be trained alone.
    """
    config = (read_composite_config if is_whole else read_language_config)(folder, overrides)
    if not is_whole and config.get_text_config() is not config:
        raise ValueError(
            f"{config.model_type} models cannot be trained as language models: transformers has no causal language "
            "model of their text. Use a model of text, or set vision.enabled=true for a family that trains with images"
        )
    vars(config).pop("quantization_config", None)
    return config


class Quantisation(NamedTuple):
    """How the files name the two tensors that a weight is computed from: after the weight, and these.

    Args:
        values: Ends the name of its values.
        scales: Ends the name of their scales.
        weight: Function from both to the weight.
    """

    values: str
    scales: str
    weight: Callable[[StoredTensor, StoredTensor], StoredWeight]


QUANTISATIONS = (Quantisation("", "_scale_inv", BlockScaledWeight), Quantisation("_blocks", "_scales", StoredMXFP4))


@dataclass(frozen=True)
class WeightFiles:
    """The safetensors of one folder, and of a composite model only its language model, by name in it.

    Args:
        folder: That holds them.
        file_of: Name of each tensor to the file that holds it.
        stored_as: Name of each tensor to another one that it has in that file.
    """

    folder: Path
    file_of: Mapping[str, str]
    stored_as: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path, *, is_whole: bool = False) -> WeightFiles:
        """Read the index, or the single file.

        Args:
            folder: Folder of the model.
            is_whole: True for all weights of a composite model.

        Raises:
            ValueError: If the folder has no safetensors.
        """
        file_of, kept_as = _files_of_tensors(folder), dict[str, str]()
        if all(_WRAPPERS.match(name) for name in file_of):
            kept_as = {_WRAPPERS.sub("", name): name for name in file_of}
            file_of = {name: file_of[stored] for name, stored in kept_as.items()}
        if is_whole:
            others = tower_names(file_of)
            names = {other: name for name, other in others.items()}
            own = {names.get(name, name): file for name, file in file_of.items()}
            return cls(folder, own, kept_as | {name: kept_as.get(other, other) for name, other in others.items()})
        config = folder / CONFIG
        is_more = config.is_file() and is_composite(json.loads(config.read_text(encoding="utf-8")))
        named = language_names(file_of) if is_more else _bare_names(folder, file_of)
        stored_as = {name: kept_as.get(other, other) for name, other in named.items()}
        return cls(folder, {name: file_of[other] for name, other in named.items()}, stored_as)

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of the weights, quantised ones as the model has them."""
        quantised = self._quantised
        parts = {name + suffix for name, how in quantised.items() for suffix in (how.values, how.scales)}
        return frozenset((set(self.file_of) - parts) | set(quantised))

    @contextmanager
    def open(self) -> Iterator[OpenWeights]:
        """Open the files for reading, mapped, in the context."""
        with ExitStack() as stack:
            files = {
                file: stack.enter_context(safe_open(self.folder / file, framework="pt"))
                for file in set(self.file_of.values())
            }
            tensors = {
                name: StoredTensor(files[file], self.stored_as.get(name, name)) for name, file in self.file_of.items()
            }
            quantised = {
                name: how.weight(tensors[name + how.values], tensors[name + how.scales])
                for name, how in self._quantised.items()
            }
            yield OpenWeights({name: quantised.get(name) or tensors[name] for name in self.names})

    @cached_property
    def _quantised(self) -> Mapping[str, Quantisation]:
        """Weights that are computed from two tensors."""
        return {
            name.removesuffix(how.scales): how
            for how in QUANTISATIONS
            for name in self.file_of
            if name.endswith(how.scales) and name.removesuffix(how.scales) + how.values in self.file_of
        }


def _bare_names(folder: Path, stored: Iterable[str]) -> dict[str, str]:
    """Map each weight of a causal language model to its name in files.

    They differ if the files were saved from a model without its head.
    """
    stored = list(stored)
    if not any(map(_BARE_LAYER.match, stored)) or not (folder / CONFIG).is_file():
        return {name: name for name in stored}
    # comes with the backends
    from transformers import MODEL_MAPPING, AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    prefix = MODEL_MAPPING[type(config)].base_model_prefix if type(config) in MODEL_MAPPING else ""
    if not prefix or any(name.startswith(f"{prefix}.") for name in stored):
        return {name: name for name in stored}
    return {name if name.startswith(_HEADS) else f"{prefix}.{name}": name for name in stored}


def head_advice(names: Iterable[str]) -> str:
    """Return what to do about heads of other libraries among the weights that a model does not have; empty
    without any."""
    found = sorted(name for name in names if name.startswith(("v_head.", "value_head.", "score.")))
    if not found:
        return ""
    return (
        f". {found[0]} belongs to a head of values or scores, which is read only as score.weight [1, hidden size], "
        "without a bias, and only for a critic or a reward model. Save the model without this head, or save a model "
        "with num_labels=1 (AutoModelForSequenceClassification) that has its weight"
    )


def _files_of_tensors(folder: Path) -> dict[str, str]:
    if (folder / INDEX).is_file():
        file_of = dict(json.loads((folder / INDEX).read_text())["weight_map"])
        if outside := [file for file in file_of.values() if Path(file).name != file]:
            raise ValueError(f"{folder / INDEX} lists {outside[0]!r}, which is not in the folder")
        if (folder / SINGLE).is_file() and SINGLE not in file_of.values():
            raise ValueError(two_models(folder))
        return file_of
    if (folder / SINGLE).is_file():
        with safe_open(folder / SINGLE, framework="pt") as file:
            return dict.fromkeys(file.keys(), SINGLE)
    raise ValueError(
        f"{folder} has neither {SINGLE} nor {INDEX}; save the model with save_pretrained() to get them. A model with "
        "only pytorch_model.bin is converted by: rl convert FOLDER NEW_FOLDER (of a model of the hub, FOLDER is what "
        "hf download NAME --local-dir FOLDER makes)"
    )


def two_models(folder: Path) -> str:
    """Return the message for a folder with weights in one file and in several; libraries read either."""
    return (
        f"{folder} has both {SINGLE} and {INDEX}, which does not name that file, so two models may lie there; remove "
        "the one that is out of date"
    )


class OpenWeights(NamedTuple):
    """Weights in open files.

    Args:
        weights: Weights by name.
    """

    weights: Mapping[str, StoredWeight]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole weight."""
        return self.weights[name].shape

    def dtype(self, name: str) -> str:
        """Return the dtype of a weight by its name in safetensors (`F32`, `BF16`, ...), or its quantisation."""
        return self.weights[name].dtype

    @property
    def common_dtype(self) -> str:
        """Dtype or quantisation of most values."""
        counts: dict[str, int] = {}
        for weight in self.weights.values():
            counts[weight.dtype] = counts.get(weight.dtype, 0) + prod(weight.shape)
        return max(counts, key=lambda dtype: counts[dtype], default="F32")

    def read(self, name: str, slices: Slices) -> Tensor:
        """Return a part of a weight, and little more than that is read; a quantised one is dequantised.

        Raises:
            ValueError: If it is not quantised as its name implies.
        """
        return self.weights[name].read(slices)


def untie_apart(
    config: HFConfig, pairs: Sequence[tuple[str, str]], files: WeightFiles, group: dist.ProcessGroup
) -> bool:
    """Set `tie_word_embeddings` of a `transformers` config to false if the files hold other values under two names that
    it ties, as `transformers` does when it loads them; collective.

    Args:
        config: Config of the model; changed in place.
        pairs: Tied tensors, by name in the files.
        files: Weight files that the model is loaded from.
        group: All ranks; each compares its share of the rows.

    Returns:
        True if it was set, so that the model must be built again.
    """
    stored = [pair for pair in pairs if files.names.issuperset(pair)]
    if not stored:
        return False
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    differ = torch.zeros(len(stored), dtype=torch.int32)

    def compare() -> None:
        with files.open() as opened:
            for place, (first, second) in enumerate(stored):
                differ[place] = weights_differ(opened, first, second, rank, size)

    on_all_ranks(group, compare)
    dist.all_reduce(differ, op=dist.ReduceOp.MAX, group=group)
    apart = [" and ".join(pair) for pair, differs in zip(stored, differ.tolist(), strict=True) if differs]
    if not apart:
        return False
    if not config.tie_word_embeddings:
        raise ValueError(
            f"{config.model_type} models have {apart[0]} as one weight, and {files.folder} holds other values under "
            "each name; save the model again with one of them"
        )
    config.tie_word_embeddings = False
    _logger.warning(
        "%s: the config ties %s, and the files hold other values under each name, so they are not tied, as in "
        "transformers; set policy.hf_config_overrides.tie_word_embeddings=false for generators that follow the config",
        files.folder,
        ", ".join(apart),
    )
    return True


def weights_differ(opened: OpenWeights, first: str, second: str, rank: int = 0, size: int = 1) -> bool:
    """Return whether two weights differ in a rank's share of their rows, or in shape."""
    shape = opened.shape(first)
    if shape != opened.shape(second):
        return True
    num_rows = shape[0]
    step = max(1, READ_BYTES // max(1, 4 * torch.Size(shape[1:]).numel()))
    stop = num_rows * (rank + 1) // size
    for start in range(num_rows * rank // size, stop, step):
        rows = (slice(start, min(start + step, stop)),)
        one, other = (opened.read(name, rows).float() for name in (first, second))
        if not torch.equal(one, other):
            return True
    return False
