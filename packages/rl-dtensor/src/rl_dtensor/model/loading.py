"""Values that no file holds: buffers, and new heads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rl_dtensor.parallel.fsdp import local, local_slices
from rl_dtensor.parallel.stages import Absent


def rebuild_buffers(hf: PreTrainedModel) -> None:
    """Fill the buffers that no checkpoint holds (rotary frequencies): building on `meta` leaves them without values.

    Raises:
        ValueError: Naming a buffer that the model's own initialisation leaves unfilled.
    """
    transient = dict(hf.named_non_persistent_buffers())
    # a model may fill buffers of its parts
    models = {name: module for name, module in hf.named_modules() if isinstance(module, PreTrainedModel)}
    owners = sorted({name.rpartition(".")[0] for name in transient} | set(models), reverse=True)
    # what is left as it was after two different fillings is not filled by the model
    found = []
    for filling in (0, 1):
        for buffer in transient.values():
            buffer.fill_(torch.nan if buffer.is_floating_point() else filling)
        with torch.no_grad():
            for owner in owners:
                innermost = max((name for name in models if f"{owner}.".startswith(name and f"{name}.")), key=len)
                _init_alone(models[innermost], hf.get_submodule(owner))
        found.append([buffer.clone() for buffer in transient.values() if not buffer.is_floating_point()])
    unfilled = [name for name, buffer in transient.items() if buffer.is_floating_point() and buffer.isnan().any()]
    counted = [name for name, buffer in transient.items() if not buffer.is_floating_point()]
    unfilled += [name for name, *twice in zip(counted, *found, strict=True) if not torch.equal(*twice)]
    if unfilled:
        raise ValueError(f"{hf.config.model_type} models do not say how to fill {', '.join(unfilled)}")


def set_head(head: nn.Linear, full: Tensor) -> None:
    """Fill this rank's part of a head from its whole weights."""
    with torch.no_grad():
        local(head.weight).copy_(full[local_slices(head.weight)])


def _init_alone(hf: PreTrainedModel, module: nn.Module) -> None:
    """A model's own initialisation of a module's buffers; its parameters, which files fill, are left alone."""
    held = module._parameters
    module.__dict__["_parameters"] = {
        name: None if parameter is None else _filled() for name, parameter in held.items()
    }
    try:
        with _without_absent(module):
            hf._init_weights(module)
    except AttributeError as error:  # of the family's code
        raise ValueError(f"{hf.config.model_type} models do not say how to fill their buffers: {error}") from None
    finally:
        module.__dict__["_parameters"] = held


@contextmanager
def _without_absent(module: nn.Module) -> Iterator[None]:
    """Context in which the lists of a module have only the layers of this pipeline rank: a model may fill buffers of
    all of its layers."""
    lists = {name: child for name, child in module.named_children() if isinstance(child, nn.ModuleList)}
    for name, child in lists.items():
        setattr(module, name, nn.ModuleList(each for each in child if not isinstance(each, Absent)))
    try:
        yield
    finally:
        for name, child in lists.items():
            setattr(module, name, child)


def _filled() -> nn.Parameter:
    """A parameter that `transformers` takes for loaded."""
    parameter: Any = nn.Parameter(torch.empty(0))
    parameter._is_hf_initialized = True  # the mark of its own loader
    return parameter
