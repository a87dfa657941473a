"""Bookkeeping of low-rank adapters on any layers."""

from __future__ import annotations

import json
import logging
import math
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from rl_core.model import AdaptedPart
from rl_core.model_config import LoraConfig, ModelConfig
from rl_core.torch.files.language_part import LANGUAGE_PREFIX
from rl_core.torch.files.model_files import CONFIG, WeightFiles

_log = logging.getLogger(__name__)

WEIGHT = ".weight"
"""Ending of the name of a layer's weight."""
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
"""Suffixes of a layer's name in the names of its adapter's factors: `[dim, inputs]` and `[outputs, dim]`, as in the
files of peft. Those of stacked experts are `[experts, dim, inputs]` and `[experts, outputs, dim]` under the name of the
stacked weight, and are renamed and reshaped for peft: `peft_layers`, `flat_factors`."""
MAGNITUDE = ".lora_magnitude_vector"
"""Suffix of a layer's name in the name of the magnitudes `[outputs]` of DoRA, as in the files of peft."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_PREFIX = "base_model.model."
"""Begins every name in that file: peft wraps a model twice."""


def is_adapted(layer: str, config: LoraConfig) -> bool:
    """Return whether a linear layer of this name gets an adapter."""
    is_target = config.match_all_linear or ends_with(layer, config.target_modules)
    return is_target and not ends_with(layer, config.exclude_modules)


def ends_with(layer: str, endings: Sequence[str]) -> bool:
    """Return whether a layer's name is one of these, or ends with one after a dot. Names that a layer of a language
    model has within a composite model count as well."""
    return any(f".{layer}".endswith((f".{ending}", f".{alone(ending)}")) for ending in endings)


def alone(name: str) -> str:
    """Return the name that a layer of a composite model has in its language model; other layers keep their name."""
    return LANGUAGE_PREFIX.sub("model.", name)


def refused_by_peft(model: Any, layers: Iterable[str]) -> set[str]:
    """Return the layers that peft refuses to adapt in the family of a model. Kernels of state-space layers read their
    weights without calling them, so that an adapter would not take part.

    Args:
        model: A model of `transformers`.
        layers: Names of linear layers.
    """
    # The import takes seconds, which models without adapters do not pay.
    from peft import LoraConfig as PeftConfig
    from peft.tuners.lora import LoraModel

    def is_refused(name: str) -> bool:
        try:
            LoraModel._check_target_module_compatiblity(None, PeftConfig(), model, name)
        except ValueError:
            return True
        return False

    names = {layer: layer.rpartition(".")[2] for layer in layers}
    refused = {name for name in set(names.values()) if is_refused(name)}
    return {layer for layer, name in names.items() if name in refused}


FEED_FORWARD = frozenset({"mlp", "feed_forward", "ffn", "experts", "shared_expert", "block_sparse_moe", "moe"})
"""Modules that are the feed-forward part of a layer; other layers with an adapter are of its attention."""


def is_of_part(weight: str, parts: Sequence[AdaptedPart]) -> bool:
    """Return whether a weight belongs to one of these parts of a layer."""
    return ("attention" if FEED_FORWARD.isdisjoint(weight.split(".")) else "mlp") in parts


def is_adapted_stack(weight: str, config: LoraConfig) -> bool:
    """Return whether a weight of stacked experts of this name gets an adapter for each of them."""
    return ends_with(weight, config.target_parameters) and not ends_with(weight, config.exclude_modules)


class AdapterSize(NamedTuple):
    """Rank of an adapter, numerator of its scale, and the scale, by which its product is multiplied."""

    dim: int
    alpha: float
    scale: float


def size_of(layer: str, config: LoraConfig) -> AdapterSize:
    """Return the size of the adapter of a layer, which a pattern may set.

    Args:
        layer: Name of a linear layer, or of a stacked weight of experts.
        config: Settings of the adapters.
    """
    dim = next((dim for pattern, dim in config.rank_pattern.items() if fits(layer, pattern)), config.dim)
    alpha = next((alpha for pattern, alpha in config.alpha_pattern.items() if fits(layer, pattern)), config.alpha)
    return AdapterSize(dim, alpha, config.scale_of(dim, alpha))


def fits(layer: str, pattern: str) -> bool:
    """Return whether a pattern of `rank_pattern` or `alpha_pattern` matches a layer, by the rule of peft. The name of
    the layer's weight, and names that a layer of a language model has within a composite model, count as well."""
    names = (layer, layer + WEIGHT)
    return any(re.match(rf"(.*\.)?({each})$", name) for each in (pattern, alone(pattern)) for name in names)


def check_sizes(config: LoraConfig, layers: Iterable[str]) -> None:
    """Refuse patterns of sizes that match no layer with an adapter.

    Args:
        config: Settings of the adapters.
        layers: Names of all linear layers and stacked weights with an adapter.

    Raises:
        ValueError: Naming the pattern.
    """
    adapted = list(layers)
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(config, key):
            if not any(fits(layer, pattern) for layer in adapted):
                names = sorted({layer.rpartition(".")[2] for layer in adapted})
                raise ValueError(
                    f"lora_cfg.{key}: {pattern!r} matches no layer with an adapter; write a name, an ending of names, "
                    f"or a regular expression of either. Names end in {', '.join(names)}"
                )


def peft_layers(weights: Iterable[str]) -> dict[str, str]:
    """Map each adapted weight to its layer in the files of peft.

    peft adapts the parameters of a module (`target_parameters`) by wrappers around one another, the last parameter's
    outermost, and a factor is called by its wrapper.

    Args:
        weights: Weights in the model's order; stacked ones are those that do not end in `.weight`.
    """
    layers: dict[str, str] = {}
    stacks: dict[str, list[str]] = {}
    for weight in weights:
        if weight.endswith(WEIGHT):
            layers[weight] = weight.removesuffix(WEIGHT)
        else:
            stacks.setdefault(weight.rpartition(".")[0], []).append(weight)
    for module, stacked in stacks.items():
        layers |= {weight: module + ".base_layer" * depth for depth, weight in enumerate(reversed(stacked))}
    return layers


def flat_factors(down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of stacked experts as peft keeps them.

    Args:
        down: `[experts, dim, inputs]`.
        up: `[experts, outputs, dim]`.

    Returns:
        `[experts * dim, inputs]`, expert by expert, and `[outputs, dim * experts]`, where the expert changes first.
    """
    return down.flatten(0, 1), up.permute(1, 2, 0).flatten(1)


def stacked_factors(down: Tensor, up: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the inverse of `flat_factors`."""
    return down.unflatten(0, (num_experts, -1)), up.unflatten(1, (-1, num_experts)).permute(2, 0, 1)


def initial_down(weight: str, shape: Sequence[int], seed: int) -> Tensor:
    """Return float32 `[dim, inputs]`, or `[experts, dim, inputs]`, that the adapter of a weight starts from, uniform as
    peft draws it and the same on any mesh; its other factor starts from zero.

    Args:
        weight: Name of the weight, which is combined with the seed.
        shape: Shape of the factor.
        seed: Seed of all adapters of a model.
    """
    generator = torch.Generator().manual_seed(seed + zlib.crc32(weight.encode()))
    bound = 1.0 / math.sqrt(shape[-1])
    return torch.empty(tuple(shape)).uniform_(-bound, bound, generator=generator)


def principal_factors(weight: Tensor, dim: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return float32 `[dim, inputs]` and `[outputs, dim]` whose scaled product is the part of a weight with its largest
    singular values (PiSSA, arXiv:2404.02948).

    Args:
        weight: `[outputs, inputs]`.
        dim: Number of singular values.
        scale: Factor of the product.
    """
    left, values, right = torch.linalg.svd(weight.float(), full_matrices=False)
    roots = (values[:dim] / scale).sqrt()
    return roots[:, None] * right[:dim], left[:, :dim] * roots


@dataclass(frozen=True)
class InitialFactors:
    """The factors that the adapters of a model start from: new ones, or those in files of the format of peft.

    Args:
        seed: Seed of new ones.
        given: Given by name; empty for new ones.
        folder: That they were read from.
        config: Settings of the adapters.
        stored: Function that returns a weight of a linear layer as the files have it, `[outputs, inputs]`, in the dtype
            of the model, by its name. Needed only if factors are taken out of the weights.
    """

    seed: int
    given: Mapping[str, Tensor] = field(default_factory=dict)
    folder: str = ""
    config: LoraConfig = field(default_factory=LoraConfig)
    stored: Callable[[str], Tensor] | None = None
    _principal: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, config: LoraConfig, seed: int, *, is_whole: bool = False, stored: Callable[[str], Tensor] | None = None
    ) -> InitialFactors:
        """Return the factors that a config asks for.

        Args:
            config: Settings of the adapters.
            seed: Seed of new ones.
            is_whole: True for a composite model that is not trained as its language model.
            stored: Function that returns a weight of a linear layer as the files have it.

        Raises:
            ValueError: If there is no adapter in the folder, or it is scaled differently.
        """
        if not config.enabled or config.adapter is None:
            return cls(seed, config=config, stored=stored)
        folder = Path(config.adapter).expanduser()
        if not (folder / ADAPTER_WEIGHTS).is_file():
            raise ValueError(
                f"lora_cfg.adapter: {str(folder)!r} has no {ADAPTER_WEIGHTS}; give the folder of an adapter"
            )
        factors = load_file(folder / ADAPTER_WEIGHTS)
        names = {name: name.removeprefix(ADAPTER_PREFIX) for name in factors}
        given = {name if is_whole else alone(name): factors[stored].float() for stored, name in names.items()}
        return cls(seed, given, str(folder), config)

    @property
    def is_principal(self) -> bool:
        """True if the factors are taken out of the weights, which are left with the rest."""
        return self.config.enabled and self.config.init == "pissa"

    def magnitude(self, layer: str) -> Tensor | None:
        """Return float32 `[outputs]`, the magnitudes of a layer in the folder; None for new adapters, whose magnitudes
        are the norms of the rows.

        Raises:
            ValueError: If the folder has none.
        """
        if not self.given:
            return None
        if (found := self.given.get(layer + MAGNITUDE)) is None:
            raise ValueError(
                f"lora_cfg.use_dora: the adapter in {self.folder} has no magnitudes of {layer}; set use_dora=false"
            )
        return found

    def principal(self, weight: str) -> tuple[Tensor, Tensor]:
        """Return float32 `[dim, inputs]` and `[outputs, dim]`, in host memory, that were taken out of a weight. They
        are computed once.

        Raises:
            ValueError: If the weight has fewer singular values.
        """
        if weight not in self._principal:
            assert self.stored is not None, "factors are taken out of weights that can be read"
            matrix, size = self.stored(weight), size_of(weight.removesuffix(WEIGHT), self.config)
            if size.dim > min(matrix.shape):
                raise ValueError(
                    f"lora_cfg.init: {weight} of shape {tuple(matrix.shape)} has only {min(matrix.shape)} singular "
                    f"values, but its adapter has rank {size.dim}; lower dim, or set rank_pattern for this layer"
                )
            down, up = principal_factors(matrix, size.dim, size.scale)
            self._principal[weight] = (down.cpu(), up.cpu())
        return self._principal[weight]

    def check(self, weights: Iterable[str]) -> None:
        """Refuse factors of layers that get no adapter.

        Args:
            weights: Names of all weights of the model that get one, in its order.

        Raises:
            ValueError: Naming the layers.
        """
        layers = set(peft_layers(weights).values())
        suffixes = (LORA_A, LORA_B, MAGNITUDE) if self.config.use_dora else (LORA_A, LORA_B)
        known = {layer + suffix for layer in layers for suffix in suffixes}
        others = sorted(self.given.keys() - known)
        if others:
            raise ValueError(
                f"lora_cfg.adapter: {self.folder} has {len(others)} tensors of layers without an adapter here, such as "
                f"{others[0]}; set target_modules (of experts target_parameters) to the layers of that adapter"
            )

    def of_weight(
        self, weight: str, down: Sequence[int], up: Sequence[int], *, layer: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return float32 `[dim, inputs]` and `[outputs, dim]` that the adapter of a weight starts from; for stacked
        experts with a first dim of experts.

        Args:
            weight: Name of the weight, such as `model.layers.0.mlp.up_proj.weight`.
            down: Shape of the first factor.
            up: Shape of the second factor.
            layer: Layer of the weight in `peft_layers`, which a stacked one needs.

        Raises:
            ValueError: If the folder has none of these shapes.
        """
        if self.is_principal:
            return self.principal(weight)
        if not self.given:
            return initial_down(weight, down, self.seed), torch.zeros(tuple(up))
        layer = layer or weight.removesuffix(WEIGHT)
        found = self.given.get(layer + LORA_A), self.given.get(layer + LORA_B)
        shapes = [None if factor is None else tuple(factor.shape) for factor in found]
        needed = [tuple(down), tuple(up)]
        if len(down) > 2:
            needed = [
                tuple(each.shape) for each in flat_factors(*(torch.empty(each, device="meta") for each in needed))
            ]
        if shapes != needed or found[0] is None or found[1] is None:
            raise ValueError(
                f"lora_cfg.adapter: {self.folder} has factors of shapes {shapes} for {layer}, which needs "
                f"{needed[0]} and {needed[1]}; set dim, rank_pattern and target_modules as they are in that adapter"
            )
        return (found[0], found[1]) if len(down) == 2 else stacked_factors(found[0], found[1], down[0])


_COMPARED = 4
"""Number of weights that two models are compared by."""


def check_base(config: ModelConfig, folder: Path) -> None:
    """Refuse an initial adapter that was trained on other weights by its folder. Weights that are not on
    this machine are not compared, and a warning is logged.

    Args:
        config: The model and its adapters.
        folder: Folder of the model's files.

    Raises:
        ValueError: Naming both models.
    """
    if not config.lora_cfg.enabled or config.lora_cfg.adapter is None:
        return
    described = Path(config.lora_cfg.adapter).expanduser() / ADAPTER_CONFIG
    fields = json.loads(described.read_text(encoding="utf-8")) if described.is_file() else {}
    base = str(fields.get("base_model_name_or_path") or config.model_name)
    other = Path(base).expanduser()
    if base == config.model_name or other.resolve() == folder.resolve():
        return
    name = _differing(folder, other) if (other / CONFIG).is_file() else None
    if name is None:
        _log.warning(
            "lora_cfg.adapter: %s was trained on %s, which is not compared with %s; an adapter fits only the weights "
            "that it was trained on",
            config.lora_cfg.adapter,
            base,
            config.model_name,
        )
    elif name:
        raise ValueError(
            f"lora_cfg.adapter: {config.lora_cfg.adapter} was trained on {base}, whose weights differ from "
            f"{config.model_name} ({name}). Set model_name to that model, or remove lora_cfg.adapter"
        )


def _differing(folder: Path, other: Path) -> str | None:
    """Return the name of a weight that differs by more than rounding between two models; empty if none of a few does,
    None if they cannot be compared."""
    try:
        ours, theirs = WeightFiles.of(folder), WeightFiles.of(other)
    except ValueError:
        return None
    matrices = sorted(name for name in ours.names & theirs.names if name.endswith(f"_proj{WEIGHT}"))
    names = matrices or sorted(ours.names & theirs.names)
    with ours.open() as left, theirs.open() as right:
        for name in names[:: max(1, len(names) // _COMPARED)]:
            if left.shape(name) != right.shape(name):
                return name
            one, two = (opened.read(name, (slice(0, 8),)).float() for opened in (left, right))
            if (one - two).norm() > _ROUNDING * one.norm():
                return name
    return "" if names else "their names"


_ROUNDING = 0.02
"""Relative difference of weights in two precisions of at least 8 bits."""


def nothing_adapted(config: LoraConfig, kind: str) -> ValueError:
    """Return the error for a config that leaves a model without adapters.

    Args:
        config: Config whose targets match no layer.
        kind: Kind of the model as the message shows it, such as `a qwen3 model`.
    """
    return ValueError(
        f"lora_cfg: target_modules {config.target_modules} without exclude_modules {config.exclude_modules} "
        f"match no linear layer of {kind}; name some, such as q_proj, or set match_all_linear=true"
    )
