"""Any torch optimizer and learning-rate schedule by dotted name, for every training backend."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Sequence, Set
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, SequentialLR

from rl_core.model_config import OptimizerConfig, SchedulerConfig

WAYS_TO_STEP = frozenset({"fused", "foreach", "differentiable"})
"""Arguments that choose how an optimizer steps. They follow from the config of the process at
hand, so a checkpoint does not hold them."""

FUSED = ("torch.optim.Adam", "torch.optim.AdamW")
"""Optimizers with a fused step for whole parameters on GPUs, and for DTensors."""

_NORMS_AND_BIASES = re.compile(r"bias|layernorm|rmsnorm|(?:^|[._])norm(?:$|\.)")
"""Part of the name of each parameter that the Trainer of transformers does not decay."""


def with_fused_step(config: OptimizerConfig, parameters: Sequence[nn.Parameter]) -> OptimizerConfig:
    """Return the config with `fused` if the optimizer has a fused step for these parameters and the config does not
    choose how it steps.

    On GPUs it reads and writes everything once, without temporary tensors. With DTensors every operation on every
    parameter is otherwise dispatched to them separately, which takes longer than the arithmetic of small models.

    Args:
        config: Name and arguments of the optimizer.
        parameters: Parameters that it steps.
    """
    is_fusable = all(each.is_cuda for each in parameters) or all(isinstance(each, DTensor) for each in parameters)
    if config.name not in FUSED or WAYS_TO_STEP & set(config.kwargs) or not is_fusable:
        return config
    return config.model_copy(update={"kwargs": {**config.kwargs, "fused": True}})


def counts_on_device(optimizer: Optimizer) -> bool:
    """Return whether an optimizer wants its step counts on the device of the parameters."""
    return bool(optimizer.defaults.get("fused") or optimizer.defaults.get("capturable"))


def is_norm_or_bias(name: str, owner: nn.Module | None = None) -> bool:
    """Return whether a parameter is not decayed if `decay_norms_and_biases` is false.

    Args:
        name: Name of the parameter in the whole model.
        owner: Module that has the parameter, whose class may show that it is a norm if its name does not.
    """
    return bool(_NORMS_AND_BIASES.search(name.lower())) or "norm" in type(owner).__name__.lower()


def norms_and_biases(modules: Iterable[nn.Module]) -> set[nn.Parameter]:
    """Return the parameters of modules that are not decayed if `decay_norms_and_biases` is false."""
    return {
        parameter
        for module in modules
        for prefix, owner in module.named_modules()
        for name, parameter in owner.named_parameters(recurse=False)
        if is_norm_or_bias(f"{prefix}.{name}", owner)
    }


def build_optimizer(
    config: OptimizerConfig, *groups: Iterable[nn.Parameter], undecayed: Set[nn.Parameter] = frozenset()
) -> Optimizer:
    """Build an optimizer over groups of parameters.

    Args:
        config: Name and arguments of the optimizer.
        groups: Parameters that the optimizer steps together.
        undecayed: Parameters of any group that are not decayed if `decay_norms_and_biases` is false. Each group then
            becomes two, and either may be empty, so that ranks with different parameters have the same groups.

    Raises:
        ValueError: If the name is not an optimizer class, or the class does not take these arguments.
    """
    optimizer_class = _class_of(config.name, Optimizer, "optimizer.name")
    parts: list[dict[str, Any]] = []
    for group in map(list, groups):
        if config.decay_norms_and_biases:
            parts.append({"params": group})
            continue
        parts.append({"params": [each for each in group if each not in undecayed]})
        parts.append({"params": [each for each in group if each in undecayed], "weight_decay": 0.0})
    optimizer: Optimizer = _built(optimizer_class, config.name, "optimizer", config.kwargs, parts)
    if not config.decay_norms_and_biases and "weight_decay" not in optimizer.defaults:
        raise ValueError(
            f"optimizer.decay_norms_and_biases=false has no effect with {config.name}, which has no argument "
            "weight_decay; remove this key"
        )
    return optimizer


def build_schedule(configs: Sequence[SchedulerConfig], optimizer: Optimizer) -> LRScheduler | None:
    """Return the schedules one after another, each taking over at the next milestone; None if there are none.

    Raises:
        ValueError: If a name is not a schedule, its arguments do not fit, or the milestones do not go with the
        schedules.
    """
    named = [config for config in configs if config.name is not None]
    milestones = [step for config in configs for step in config.milestones or ()]
    if len(milestones) != max(len(named) - 1, 0):
        raise ValueError(
            f"scheduler has {len(named)} schedules and {len(milestones)} milestones; "
            "give one fewer milestone than schedules, in a separate entry"
        )
    if milestones != sorted(milestones):
        raise ValueError(f"scheduler milestones must be strictly increasing, got {milestones}")
    schedules = []
    for config in named:
        name = config.name or ""
        schedule_class = _class_of(name, LRScheduler, "scheduler name")
        schedules.append(_built(schedule_class, name, "scheduler", config.kwargs, optimizer))
    if len(schedules) <= 1:
        return schedules[0] if schedules else None
    return SequentialLR(optimizer, schedules, milestones)


def _class_of(name: str, base: type, key: str) -> Any:
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{key}={name!r} cannot be imported here ({error}). Give the dotted name of a {base.__name__} class that "
            "is installed where the model trains"
        ) from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{key}={name!r} is not a torch {base.__name__}")
    return found


def _built(built_class: Any, name: str, key: str, kwargs: dict[str, Any], target: Any) -> Any:
    try:
        return built_class(target, **kwargs)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{key}: {name} does not take {kwargs}: {error}") from error
