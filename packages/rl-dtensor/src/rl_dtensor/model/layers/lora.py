"""Low-rank adapters on linear layers, by peft, and on stacked experts.

The weights that leave the model have the adapters merged in. The adapters of stacked experts are parameters of the
experts' module, stacked in the same way, so that a split of experts over ranks splits them too. The module computes
with `weight + scale * up @ down`. (peft's own adapters for such weights keep the experts in the last dim of `up`, where
no mesh can split them.)
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rl_core.model_config import LoraConfig
from rl_core.torch.training.lora import (
    InitialFactors,
    ends_with,
    is_adapted,
    is_adapted_stack,
    nothing_adapted,
    peft_layers,
    refused_by_peft,
)
from rl_dtensor.parallel.collectives import Parameters, compute_on
from rl_dtensor.parallel.experts import STACK_DIMS, expert_modules
from rl_dtensor.parallel.fsdp import local, local_slices, whole

ADAPTER = "default"
BASE = ".base_layer"
STACKED_A, STACKED_B = "lora_A_", "lora_B_"
"""Prefixes of the factors of a stacked weight, which are parameters of the same module."""
LINEAR = (nn.Linear.forward, Conv1D.forward)
"""Forward functions of the modules that take adapters. The latter belongs to GPT-2 and its kin, whose weights are
transposed. A router may be a linear layer that returns more than its product, which is another function."""


class Adapter(NamedTuple):
    """An adapter: `scale * up @ down` is added to the weight. With stacked experts every tensor has a first dim of
    experts.

    Args:
        down: `[dim, inputs]`.
        up: `[outputs, dim]`.
        is_transposed: True if the weight is `[inputs, outputs]`.
    """

    down: Tensor
    up: Tensor
    scale: float
    is_transposed: bool = False

    def factors(self) -> tuple[Tensor, Tensor, float]:
        """Return float32 `[..., rows, dim]` and `[..., dim, columns]`, whose product times the last value is added to
        the weight; collective over the ranks that share it."""
        down, up = whole(self.down, torch.float32), whole(self.up, torch.float32)
        return (down.mT, up.mT, self.scale) if self.is_transposed else (up, down, self.scale)

    def merged(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the whole weight with the adapter, added in float32; collective over the ranks that share it."""
        left, right, scale = self.factors()
        return (whole(weight, torch.float32) + scale * (left @ right)).to(dtype)


def add_adapters(
    hf: PreTrainedModel, config: LoraConfig, *, is_left_out: Callable[[str], bool] = lambda _: False
) -> None:
    """Put adapters on linear layers and stacked experts of a model and freeze everything else but a score head.

    Args:
        hf: Model, changed in place.
        config: Layers that get adapters, and their size.
        is_left_out: Returns whether a module of this name belongs to a part without adapters.

    Raises:
        ValueError: If the config contains no layer of the model, or a part that gets no adapter.
    """
    _check_targets(hf, config)
    stacks = {name: module for name, module in stacked_weights(hf).items() if is_adapted_stack(name, config)}
    targets = [name for name in adapted_modules(hf, config) if not is_left_out(name)]
    if not targets and not stacks:
        raise nothing_adapted(config, type(hf).__name__)
    hf.requires_grad_(False)
    if targets:
        # The import takes seconds, which models without adapters do not need.
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model

        # If peft knows the family, it takes any `gate_proj` in a model with experts for one of the experts' layers. It
        # does not know the shell around the model.
        peft = PeftConfig(
            r=config.dim,
            lora_alpha=cast("int", config.alpha),  # peft computes with any number.
            lora_dropout=config.dropout,
            use_rslora=config.use_rslora,
            target_modules=[f"hf.{name}" for name in targets],
        )
        inject_adapter_in_model(peft, nn.ModuleDict({"hf": hf}), adapter_name=ADAPTER)
    for module in dict.fromkeys(stacks.values()):
        _adapt_stacks(module, [name.rpartition(".")[2] for name, of in stacks.items() if of is module], config)
    score = dict(hf.named_children()).get("score")
    if score is not None:
        score.requires_grad_(True)


def _adapt_stacks(module: nn.Module, names: list[str], config: LoraConfig) -> None:
    """Make stacked experts compute with adapters.

    Args:
        module: Module with the stacked experts of a layer, changed in place.
        names: Parameters of the module that get adapters.
        config: Rank and scale of the adapters.
    """
    is_transposed = _is_transposed(module)
    for name in names:
        weight = cast("Tensor", module._parameters[name])
        num_experts, outputs, inputs = weight.mT.shape if is_transposed else weight.shape
        module.register_parameter(STACKED_A + name, nn.Parameter(weight.new_empty(num_experts, config.dim, inputs)))
        module.register_parameter(STACKED_B + name, nn.Parameter(weight.new_empty(num_experts, outputs, config.dim)))
    scale = config.scale
    vars(module)["lora_scale"] = scale

    def merged(held: Parameters) -> Parameters:
        computed = dict(held)
        for name in names:
            weight, down, up = (cast("Tensor", held[each]) for each in (name, STACKED_A + name, STACKED_B + name))
            left, right = (down.mT, up.mT) if is_transposed else (up, down)
            computed[name] = torch.baddbmm(weight, left, right, alpha=scale)
        return computed

    compute_on(module, merged)


def adapted_modules(hf: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Return the linear layers, by name, that get an adapter: never the head, nor layers that peft refuses unless
    they are named."""
    layers = [name for name in _linear_layers(hf) if is_adapted(name, config)]
    refused = refused_by_peft(hf, layers) if config.match_all_linear else set()
    return [name for name in layers if name not in refused]


def adapters_of(hf: PreTrainedModel) -> dict[str, Adapter]:
    """Return the adapter of each weight by the weight's name without adapters in it."""
    peft: Any = sys.modules.get("peft.tuners.lora")  # It is not imported before the first adapter.
    linear = {
        f"{name}.weight": Adapter(
            cast("Tensor", module.lora_A[ADAPTER].weight),
            cast("Tensor", module.lora_B[ADAPTER].weight),
            float(module.scaling[ADAPTER]),
            is_transposed=isinstance(module.get_base_layer(), Conv1D),
        )
        for name, module in hf.named_modules()
        if peft is not None and isinstance(module, peft.LoraLayer)
    }
    stacked = {}
    for name, module in stacked_weights(hf).items():
        short = name.rpartition(".")[2]
        down, up = (module._parameters.get(prefix + short) for prefix in (STACKED_A, STACKED_B))
        if down is not None and up is not None:
            stacked[name] = Adapter(down, up, module.lora_scale, is_transposed=_is_transposed(module))
    return linear | stacked


def stacked_weights(hf: PreTrainedModel) -> dict[str, Any]:
    """Return the module of each weight of stacked experts by the name of the weight."""
    experts = {id(module) for module in expert_modules(hf)}
    return {
        f"{module_name}.{name}": module
        for module_name, module in hf.named_modules()
        if id(module) in experts
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.dim() == STACK_DIMS and not name.startswith((STACKED_A, STACKED_B))
    }


def _is_transposed(module: Any) -> bool:
    """Return whether weights of stacked experts are `[experts, inputs, outputs]`, as peft decides it."""
    return bool(getattr(module, "is_transposed", False))


def _linear_layers(hf: PreTrainedModel) -> list[str]:
    heads = (hf.get_output_embeddings(), dict(hf.named_children()).get("score"))
    return [
        name
        for name, module in hf.named_modules()
        if type(module).forward in LINEAR and not any(module is head for head in heads)
    ]


def _check_targets(hf: PreTrainedModel, config: LoraConfig) -> None:
    stacks = stacked_weights(hf)
    for ending in config.target_parameters:
        if not any(ends_with(name, [ending]) for name in stacks):
            known = sorted({".".join(name.split(".")[-2:]) for name in stacks})
            advice = f"name some of {', '.join(known)}" if known else "this model has none, leave it empty"
            raise ValueError(
                f"lora_cfg.target_parameters: {ending!r} is not a weight of stacked experts of this "
                f"{type(hf).__name__}; {advice}"
            )
    if config.match_all_linear:
        return
    linear = _linear_layers(hf)
    others = [name for name, _ in (*hf.named_modules(), *hf.named_parameters())]
    for ending in config.target_modules:
        if any(ends_with(name, [ending]) for name in linear):
            continue
        problem = f"is not a linear layer of this {type(hf).__name__}"
        if any(ends_with(name, [ending]) for name in others):
            problem = (
                f"names the head, a router or stacked experts of this {type(hf).__name__}, which get no adapter from "
                "this key"
            )
        raise ValueError(
            f"lora_cfg.target_modules: {ending!r} {problem}; name some of "
            f"{', '.join(sorted({name.rpartition('.')[2] for name in linear}))}, or name stacked experts in "
            "target_parameters"
        )


def init_adapters(hf: PreTrainedModel, initial: InitialFactors) -> None:
    """Fill adapters with values that are the same on any mesh."""
    with torch.no_grad():
        adapters = adapters_of(hf)
        layers = peft_layers(adapters)
        for name, adapter in adapters.items():
            down, up = initial.of_weight(name, adapter.down.shape, adapter.up.shape, layer=layers[name])
            local(adapter.down).copy_(down[local_slices(adapter.down)])
            local(adapter.up).copy_(up[local_slices(adapter.up)])
