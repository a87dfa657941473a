"""The linear layers of a model whose products may be computed in fewer bits."""

from __future__ import annotations

from collections.abc import Sequence, Set

from torch import nn
from transformers import PreTrainedModel

from rl_core.model_config import num_experts_of
from rl_core.torch.training.lora import ends_with
from rl_dtensor.model.lora import BASE

_ADAPTER = ".lora_"


def chosen_linear_layers(
    hf: PreTrainedModel,
    layers: Sequence[nn.Module],
    *,
    num_first: int,
    num_last: int,
    exclude: Sequence[str],
    kept: Set[str],
    key: str,
) -> dict[str, nn.Linear]:
    """Linear layers by name, in the model's order, without the head, routers and adapters.

    Args:
        hf: Whole model.
        layers: Its repeated layers, in order.
        num_first: Number of layers at the start that are left out.
        num_last: Number of layers at the end that are left out.
        exclude: Names of linear layers, or their endings, that are left out.
        kept: Names of parameters that stay float32, whose layers are left out.
        key: Key of the section that chooses, for messages.

    Raises:
        ValueError: If a name in `exclude` is not one of these layers, or nothing is left.
    """
    inside = {id(module): place for place, layer in enumerate(layers) for module in layer.modules()}
    found = {
        name: (inside[id(module)], module)
        for name, module in hf.named_modules()
        if id(module) in inside and _is_plain(name, module, hf, kept)
    }
    plain = {name: name.replace(BASE, "") for name in found}
    for ending in exclude:
        if not any(ends_with(each, [ending]) for each in plain.values()):
            known = sorted({each.rpartition(".")[2] for each in plain.values()})
            raise ValueError(
                f"{key}.exclude_modules: {ending!r} is not a linear layer of this {type(hf).__name__}; name some of "
                f"{', '.join(known)}"
            )
    chosen = {
        name: module
        for name, (place, module) in found.items()
        if num_first <= place < len(layers) - num_last and not ends_with(plain[name], exclude)
    }
    if not chosen:
        raise ValueError(
            f"{key} leaves no linear layer of the {len(layers)} layers of this {type(hf).__name__}; lower "
            f"num_first_layers_in_bf16 and num_last_layers_in_bf16, or set {key}.enabled=false"
        )
    return chosen


def _is_plain(name: str, module: nn.Module, hf: PreTrainedModel, kept: Set[str]) -> bool:
    """Return whether a module is a linear layer that computes nothing but its product, and not a router."""
    if type(module).forward is not nn.Linear.forward or _ADAPTER in name:
        return False
    assert isinstance(module, nn.Linear)
    num_experts = num_experts_of(hf.config.get_text_config().to_dict())
    is_router = module.out_features in {1, num_experts}
    return not is_router and f"{name.replace(BASE, '')}.weight" not in kept
