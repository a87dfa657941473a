"""Adapters in the format of `peft`, read without the libraries that load them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_core.config import Problem
from rl_core.config.tree import reason
from rl_core.errors import ConfigError
from rl_core.model_config import LoraConfig
from rl_launch.model_files.model_folder import layer_names
from rl_launch.model_files.weight_files import foreign_kind, shapes_of

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

_OF_LINEAR = ".weight"
"""Ends the name of a parameter that is the weight of a linear layer."""

_PREFIX, _DOWN, _UP, _WRAPPED = "base_model.model.", ".lora_A", ".lora_B", ".base_layer"
_MAGNITUDE = ".lora_magnitude_vector"


@dataclass(frozen=True)
class AdapterFolder:
    """A folder with an adapter.

    Args:
        base: Its base model, as written in its config.
        layers: Names of the linear layers that it adapts.
        parameters: Full or shortened names of the stacked weights of experts that it adapts.
        patterns: Values of `rank_pattern` and `alpha_pattern`, which have the same form in peft and in `lora_cfg`.
        use_dora: True if it has the magnitudes of DoRA.
    """

    path: Path
    base: str
    dim: int
    alpha: float
    use_rslora: bool
    layers: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    patterns: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    use_dora: bool = False

    @classmethod
    def read(cls, path: Path) -> AdapterFolder:
        """Read the config, and the header of the file with the factors.

        Raises:
            ConfigError: If the folder holds no adapter, or one of a kind that is not supported.
        """
        try:
            said: dict[str, Any] = json.loads((path / ADAPTER_CONFIG).read_text(encoding="utf-8"))
            kind = str(said.get("peft_type") or _LORA)
            dim, alpha = (int(said["r"]), float(said["lora_alpha"])) if kind == _LORA else (0, 0.0)
            adapted = [str(name) for name in said.get("target_parameters") or ()]
            patterns: dict[str, Mapping[str, float]] = {
                "rank_pattern": {key: int(rank) for key, rank in (said.get("rank_pattern") or {}).items()},
                "alpha_pattern": {key: float(alpha) for key, alpha in (said.get("alpha_pattern") or {}).items()},
            }
        except FileNotFoundError:
            raise ConfigError(
                f"{path} has no {ADAPTER_CONFIG}; pass a folder that was saved by peft or by a run"
            ) from None
        except (OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            what = f"{type(error).__name__}: {reason(error)[:200]}"
            raise ConfigError(f"{path / ADAPTER_CONFIG} is not the config of a low-rank adapter: {what}") from None
        if kind != _LORA:
            advice = "pass a LoRA adapter" if kind in _PROMPTS else "merge it with peft, or pass a LoRA adapter"
            raise ConfigError(f"{path} is an adapter with peft_type={kind}, which is not supported; {advice}")
        if odd := _unsupported(said):
            raise ConfigError(f"{path} is an adapter with {', '.join(odd)}, which is not supported; merge it with peft")
        # tensors of embeddings, heads and biases are not factors of a layer
        use_dora = bool(said.get("use_dora"))
        factors = (_DOWN + ".weight", _UP + ".weight", *((_MAGNITUDE,) if use_dora else ()))
        if others := sorted(name for name in _tensors(path) if not name.endswith(factors)):
            raise ConfigError(
                f"{path} has tensors that are not factors of linear layers, such as {others[0]}, which are not "
                "supported; merge it with peft"
            )
        names = (name.removeprefix(_PREFIX) for name in layer_names(str(path)) if name.endswith(_DOWN))
        layers = tuple(name.removesuffix(_DOWN) for name in names)
        if not layers:
            raise ConfigError(f"{path} has no factors of layers in {ADAPTER_WEIGHTS}; save the adapter again")
        if heads := [layer for layer in layers if layer.rpartition(".")[2] in _HEADS]:
            raise ConfigError(
                f"{path} adapts the head ({heads[0]}), which cannot have an adapter here; merge it with peft"
            )
        parameters = tuple(name for name in adapted if not name.endswith(_OF_LINEAR))
        # peft wraps each of several parameters of a module, whose factors have the name of the module
        modules = tuple("." + parameter.rpartition(".")[0] for parameter in parameters)
        linear = tuple(layer for layer in layers if not ("." + layer.replace(_WRAPPED, "")).endswith(modules))
        base = str(said.get("base_model_name_or_path") or "")
        return cls(path, base, dim, alpha, bool(said.get("use_rslora")), linear, parameters, patterns, use_dora)

    def settings(self) -> dict[str, Any]:
        """Return a `lora_cfg` that starts from this adapter."""
        return {
            "enabled": True,
            "match_all_linear": False,
            "target_modules": list(self.layers),
            "target_parameters": list(self.parameters),
            "dim": self.dim,
            "alpha": self.alpha,
            "use_rslora": self.use_rslora,
            "use_dora": self.use_dora,
            **self.patterns,
            "adapter": str(self.path.absolute()),
        }


_HEADS = ("lm_head", "embed_out", "score")
"""Last part of the name of a head; layers within blocks are named otherwise."""
_LORA = "LORA"
_PROMPTS = {
    *("ADAPTION_PROMPT", "CARTRIDGE", "CPT", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "PROMPT_TUNING")
}
"""Types of adapters that add tokens, or states of tokens, and change no weights that they could be merged into."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "peft_type": (_LORA,),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
"""Values of fields that leave an adapter the plain product of its factors; for other fields these are empty values,
false or null. Starts from a decomposition of the weights, as PiSSA's, change the weights of the base model."""
_IRRELEVANT = {
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *(
        "r",
        "lora_alpha",
        "use_rslora",
        "use_dora",
        "rank_pattern",
        "alpha_pattern",
        "lora_dropout",
        "target_modules",
        "target_parameters",
        "exclude_modules",
    ),
    *("layers_to_transform", "layers_pattern", "megatron_core", "runtime_config", "ensure_weight_tying"),
    *("qalora_group_size", "loftq_config", "eva_config", "fan_in_fan_out"),
}
"""Fields that are read elsewhere, or list the adapted layers, which follow from the names of the tensors as well, or
describe how adapters began or were trained. `fan_in_fan_out` follows from the kind of layer: peft sets it for
transposed weights (GPT-2), and ignores it for others."""


def _unsupported(said: Mapping[str, Any]) -> list[str]:
    """Return the fields, with their values, that make an adapter something else than the product of two factors."""
    odd = []
    for name, value in said.items():
        neutral = _NEUTRAL.get(name)
        if name not in _IRRELEVANT and (value not in neutral if neutral else bool(value)):
            odd.append(f"{name}={value}" if isinstance(value, str) else name)
    return odd


def _tensors(folder: Path) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of the factors of an adapter, which may be missing or damaged.

    Raises:
        ConfigError: If they are; contains the name of the file.
    """
    if not (folder / ADAPTER_WEIGHTS).is_file():
        advice = foreign_kind(folder) or "save the adapter again"
        raise ConfigError(f"{folder} does not contain {ADAPTER_WEIGHTS}; {advice}")
    try:
        return shapes_of(folder / ADAPTER_WEIGHTS, whole=True)
    except ValueError as error:
        raise ConfigError(f"{folder} is damaged: {error}") from None


def initial_adapter_problems(key: str, config: LoraConfig) -> Iterator[Problem]:
    """Yield the problems of settings that differ from the adapter that a model starts from.

    Args:
        key: Key of the `lora_cfg` section.
        config: Adapter settings of the model, with the folder of the initial adapter.
    """
    if not config.enabled or config.adapter is None:
        return
    try:
        found = AdapterFolder.read(Path(config.adapter).expanduser())
    except ConfigError as error:
        yield Problem(f"{key}.adapter", str(error))
        return
    for name in ("rank_pattern", "alpha_pattern"):
        ours, theirs = getattr(config, name), found.patterns[name]
        if any(_valued(layer, ours) != _valued(layer, theirs) for layer in found.layers):
            differs, remedy = f"differs from the adapter in {config.adapter}", f"Set it to {json.dumps(theirs)}"
            yield Problem(f"{key}.{name}", differs, got=ours, remedy=remedy)
    for name in ("dim", "alpha", "use_rslora", "use_dora"):
        ours, theirs = getattr(config, name), getattr(found, name)
        if ours != theirs:
            differs, remedy = f"differs from the adapter in {config.adapter}", f"Set it to {theirs}"
            yield Problem(f"{key}.{name}", differs, got=ours, remedy=remedy)


def _valued(layer: str, patterns: Mapping[str, float]) -> float | None:
    """Return the value of the first pattern that matches a layer, by the rule of peft; None if none does. The name of
    the layer's weight counts as well."""
    names = (layer, layer + _OF_LINEAR)
    return next(
        (
            value
            for pattern, value in patterns.items()
            if any(re.match(rf"(.*\.)?({pattern})$", name) for name in names)
        ),
        None,
    )
