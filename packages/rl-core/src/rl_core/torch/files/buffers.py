"""Buffers of a model of `transformers` that no file holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def rebuild_buffers(hf: PreTrainedModel, absent: tuple[type[nn.Module], ...] = ()) -> None:
    """Fill the buffers that no checkpoint holds (rotary frequencies): building on `meta` leaves them without values.

    Args:
        hf: Model whose tensors have memory.
        absent: Types of modules in the place of layers that this rank does not have.

    Raises:
        ValueError: Naming a buffer that the model's own initialisation leaves unfilled.
    """
    transient = dict(hf.named_non_persistent_buffers())
    # comes with the backends
    from transformers import PreTrainedModel

    # A model may fill buffers of its parts.
    models = {name: module for name, module in hf.named_modules() if isinstance(module, PreTrainedModel)}
    owners = sorted({name.rpartition(".")[0] for name in transient} | set(models), reverse=True)
    # A value that is unchanged after two different fillings is not filled by the model.
    found = []
    for filling in (0, 1):
        for buffer in transient.values():
            buffer.fill_(torch.nan if buffer.is_floating_point() else filling)
        with torch.no_grad():
            for owner in owners:
                innermost = max((name for name in models if f"{owner}.".startswith(name and f"{name}.")), key=len)
                _init_buffers(models[innermost], hf.get_submodule(owner), absent)
        found.append([buffer.clone() for buffer in transient.values() if not buffer.is_floating_point()])
    unfilled = [name for name, buffer in transient.items() if buffer.is_floating_point() and buffer.isnan().any()]
    counted = [name for name, buffer in transient.items() if not buffer.is_floating_point()]
    unfilled += [name for name, *twice in zip(counted, *found, strict=True) if not torch.equal(*twice)]
    if unfilled:
        raise ValueError(f"{hf.config.model_type} models do not say how to fill {', '.join(unfilled)}")


def _init_buffers(hf: PreTrainedModel, module: nn.Module, absent: tuple[type[nn.Module], ...]) -> None:
    """Run a model's own initialisation of a module's buffers and leave its parameters, which files fill, unchanged."""
    held = module._parameters
    filled: Any = nn.Parameter(torch.empty(0))
    filled._is_hf_initialized = True  # `transformers` leaves parameters with this mark of its loader as they are.
    module.__dict__["_parameters"] = {name: None if held[name] is None else filled for name in held}
    # A model may fill buffers of all of its layers, so its lists have only the layers of this pipeline rank meanwhile.
    lists = {name: child for name, child in module.named_children() if isinstance(child, nn.ModuleList)}
    for name, child in lists.items():
        setattr(module, name, nn.ModuleList(each for each in child if not isinstance(each, absent)))
    try:
        hf._init_weights(module)
    except AttributeError as error:  # The code of the family did not foresee the call.
        raise ValueError(f"{hf.config.model_type} models do not say how to fill their buffers: {error}") from None
    finally:
        for name, child in lists.items():
            setattr(module, name, child)
        module.__dict__["_parameters"] = held
