"""Low-rank adapters on linear layers, by peft; the weights that leave the model have them merged in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from peft import LoraConfig as PeftConfig
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rl_core.model_config import LoraConfig
from rl_core.torch.training.lora import InitialFactors, ends_with, is_adapted, nothing_adapted
from rl_dtensor.parallel.fsdp import local, local_slices, whole

ADAPTER = "default"
BASE = ".base_layer"
LINEAR = (nn.Linear.forward, Conv1D.forward)
"""Forward functions of the modules that take adapters. The latter is that of GPT-2 and its kin, whose weights are
transposed. A router may be a linear layer that returns more than its product, which is another function."""


@dataclass(frozen=True)
class Adapter:
    """An adapter: `scale * up @ down` is added to the weight.

    Args:
        down: `[dim, inputs]`.
        up: `[outputs, dim]`.
        is_transposed: whether the weight is `[inputs, outputs]`.
    """

    down: Tensor
    up: Tensor
    scale: float
    is_transposed: bool = False

    def merged(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The whole weight with the adapter, added in float32; collective over the ranks that share it."""
        total = whole(weight, torch.float32)
        added = self.scale * (whole(self.up, torch.float32) @ whole(self.down, torch.float32))
        return (total + (added.T if self.is_transposed else added)).to(dtype)


def add_adapters(hf: PreTrainedModel, config: LoraConfig) -> None:
    """Put adapters on linear layers of a model and freeze everything else but a score head.

    Raises:
        ValueError: if the config names no linear layer of the model, or something of it that gets no adapter.
    """
    _check_targets(hf, config)
    targets = adapted_modules(hf, config)
    if not targets:
        raise nothing_adapted(config, type(hf).__name__)
    # if peft knows the family, it takes any `gate_proj` in a model with experts for one of theirs
    shell = nn.ModuleDict({"hf": hf})
    peft = PeftConfig(
        r=config.dim,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        use_rslora=config.use_rslora,
        target_modules=[f"hf.{name}" for name in targets],
    )
    inject_adapter_in_model(peft, shell, adapter_name=ADAPTER)
    score = dict(hf.named_children()).get("score")
    if score is not None:
        score.requires_grad_(True)


def adapted_modules(hf: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Names of the linear layers that get an adapter: never the head, nor stacked experts, which are
    not linear layers."""
    return [name for name in _linear_layers(hf) if is_adapted(name, config)]


def adapters_of(hf: PreTrainedModel) -> dict[str, Adapter]:
    """Name of each weight without adapters in it to its adapter."""
    return {
        f"{name}.weight": Adapter(
            module.lora_A[ADAPTER].weight,
            module.lora_B[ADAPTER].weight,
            float(module.scaling[ADAPTER]),
            is_transposed=isinstance(module.get_base_layer(), Conv1D),
        )
        for name, module in hf.named_modules()
        if isinstance(module, LoraLayer)
    }


def _linear_layers(hf: PreTrainedModel) -> list[str]:
    heads = (hf.get_output_embeddings(), dict(hf.named_children()).get("score"))
    return [
        name
        for name, module in hf.named_modules()
        if type(module).forward in LINEAR and not any(module is head for head in heads)
    ]


def _check_targets(hf: PreTrainedModel, config: LoraConfig) -> None:
    if config.match_all_linear:
        return
    linear = _linear_layers(hf)
    others = [name for name, _ in (*hf.named_modules(), *hf.named_parameters())]
    for ending in config.target_modules:
        if any(ends_with(name, [ending]) for name in linear):
            continue
        is_there = any(ends_with(name, [ending]) for name in others)
        what = "gets no adapter, as a head, a router or an expert does not," if is_there else "is not a linear layer"
        raise ValueError(
            f"lora_cfg.target_modules: {ending!r} {what} of this {type(hf).__name__}; name some of "
            f"{', '.join(sorted({name.rpartition('.')[2] for name in linear}))}"
        )


def init_adapters(hf: PreTrainedModel, initial: InitialFactors) -> None:
    """Fill adapters, the same on any mesh."""
    with torch.no_grad():
        for name, adapter in adapters_of(hf).items():
            down, up = initial.of_weight(name, adapter.down.shape, adapter.up.shape)
            local(adapter.down).copy_(down[local_slices(adapter.down)])
            local(adapter.up).copy_(up[local_slices(adapter.up)])
