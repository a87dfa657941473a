"""Any torch optimizer and learning-rate schedule by dotted name, for every training backend."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, SequentialLR

from rl_core.model import StepSettings
from rl_core.model_config import OptimizerConfig, SchedulerConfig
from rl_core.torch.optim.muon import IS_MATRIX, Muon
from rl_core.torch.optim.parameters import OptimizedParameter, rate_of

WAYS_TO_STEP = frozenset({"fused", "foreach", "differentiable"})
"""Arguments that choose how an optimizer steps. They follow from the config of the process at
hand, so a checkpoint does not hold them."""

FUSED = ("torch.optim.Adam", "torch.optim.AdamW")
"""Optimizers with a fused step for whole parameters on GPUs, and for DTensors."""


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


def take_grads(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """Return the gradient of each parameter that has one, and leave none."""
    taken = {}
    for parameter in parameters:
        if parameter.grad is not None:
            taken[parameter], parameter.grad = parameter.grad, None
    return taken


def add_grads(taken: Mapping[nn.Parameter, Tensor]) -> None:
    """Add gradients of `take_grads` to those that their parameters have now."""
    for parameter, grad in taken.items():
        parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)


def counts_on_device(optimizer: Optimizer) -> bool:
    """Return whether an optimizer wants its step counts on the device of the parameters."""
    return bool(optimizer.defaults.get("fused") or optimizer.defaults.get("capturable"))


def build_optimizer(
    config: OptimizerConfig,
    *groups: Iterable[nn.Parameter],
    described: Mapping[nn.Parameter, OptimizedParameter] | None = None,
) -> Optimizer:
    """Build an optimizer over groups of parameters.

    Each group becomes one for every combination of settings that the config may give a parameter, and any of these may
    be empty, so that ranks with different parameters have the same groups.

    Args:
        config: Name and arguments of the optimizer.
        groups: Parameters that the optimizer steps together.
        described: Descriptions of the parameters of all groups; only needed for `decay_norms_and_biases` and
            `lr_scales`, and for Muon, which steps the matrices of hidden layers only.

    Raises:
        ValueError: If the name is not an optimizer class, or the class does not take these arguments.
    """
    optimizer_class = _class_of(config.name, Optimizer, "optimizer.name")
    known = described or {}
    kinds: list[dict[str, Any]] = [{}]
    if optimizer_class is torch.optim.Muon:
        pieces = {parameter: found.pieces for parameter, found in known.items() if found.pieces is not None}
        optimizer_class, kinds = partial(Muon, pieces=pieces), [{IS_MATRIX: True}, {IS_MATRIX: False}]
    decays = [True] if config.decay_norms_and_biases else [True, False]
    scales = list(dict.fromkeys([1.0, *config.lr_scales.values()]))
    parts: list[dict[str, Any]] = []
    for group in groups:
        keys = product(range(len(kinds)), decays, scales)
        chosen: dict[tuple[int, bool, float], list[nn.Parameter]] = {key: [] for key in keys}
        for parameter in group:
            found = known.get(parameter, _UNNAMED)
            kind = 0 if len(kinds) == 1 or found.pieces is not None else 1
            decays_it = config.decay_norms_and_biases or not found.is_norm_or_bias
            chosen[kind, decays_it, rate_of(config, found)].append(parameter)
        parts += [
            {"params": held, **kinds[kind], **({} if decays_it else {"weight_decay": 0.0})}
            for (kind, decays_it, _), held in chosen.items()
        ]
    optimizer: Optimizer = _built(optimizer_class, config.name, "optimizer", config.kwargs, parts)
    for key, is_set, needed in (
        ("decay_norms_and_biases=false", not config.decay_norms_and_biases, "weight_decay"),
        ("lr_scales", bool(config.lr_scales), "lr"),
    ):
        if is_set and needed not in optimizer.defaults:
            raise ValueError(
                f"optimizer.{key} has no effect with {config.name}, which has no argument {needed}; remove this key"
            )
    for number, part in enumerate(optimizer.param_groups):
        if (scale := scales[number % len(scales)]) != 1:
            part["lr"] *= scale
    return optimizer


@contextmanager
def stepped_by(settings: StepSettings, optimizer: Optimizer) -> Iterator[float]:
    """Set the settings of one step in the parameter groups, and put back those that were there; yields the learning
    rate of the first group.

    Groups keep the ratios of their learning rates. A group that the config exempts from its weight decay stays exempt,
    unless that is 0, so that no group differs.

    Raises:
        ValueError: For a setting that no group has.
    """
    groups = optimizer.param_groups
    before = [dict(group) for group in groups]
    values = {**settings.kwargs, **({} if settings.lr is None else {"lr": settings.lr})}
    for name in values:
        if not any(name in group for group in groups):
            known = ", ".join(sorted(set().union(*groups) - {"params", "initial_lr"}))
            raise ValueError(f"{type(optimizer).__name__} has no setting {name!r} for a step; it has {known}")
    base = groups[0].get("initial_lr", groups[0].get("lr"))
    try:
        for group in groups:
            for name, value in values.items():
                if name == "lr" and base:
                    group[name] = value * (group.get("initial_lr", group["lr"]) / base)
                elif name in group and not (name == "weight_decay" and not group[name] and optimizer.defaults[name]):
                    group[name] = tuple(value) if isinstance(value, list) else value
        yield float(groups[0]["lr"])
    finally:
        for group, kept in zip(groups, before, strict=True):
            group.update({name: kept[name] for name in values if name in kept})


_UNNAMED = OptimizedParameter(("",), is_norm_or_bias=False)


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
