"""Arguments of torch's optimizers and learning-rate schedules, for processes without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

_SCALING = ("foreach", "maximize", "differentiable")

OPTIMIZERS: Mapping[str, frozenset[str]] = {
    f"torch.optim.{name}": frozenset(arguments)
    for name, arguments in {
        "ASGD": ("lr", "lambd", "alpha", "t0", "weight_decay", "capturable", *_SCALING),
        "Adadelta": ("lr", "rho", "eps", "weight_decay", "capturable", *_SCALING),
        "Adafactor": ("lr", "beta2_decay", "eps", "d", "weight_decay", "foreach", "maximize"),
        "Adagrad": ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps", "fused", *_SCALING),
        "Adam": (
            *("lr", "betas", "eps", "weight_decay", "amsgrad", "capturable", "fused", "decoupled_weight_decay"),
            *_SCALING,
        ),
        "AdamW": ("lr", "betas", "eps", "weight_decay", "amsgrad", "capturable", "fused", *_SCALING),
        "Adamax": ("lr", "betas", "eps", "weight_decay", "capturable", *_SCALING),
        "Muon": (
            *("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"),
            *("ns_dtype", "adamw"),
        ),
        "NAdam": (
            *("lr", "betas", "eps", "weight_decay", "momentum_decay", "decoupled_weight_decay", "capturable"),
            *_SCALING,
        ),
        "RAdam": ("lr", "betas", "eps", "weight_decay", "decoupled_weight_decay", "capturable", *_SCALING),
        "RMSprop": ("lr", "alpha", "eps", "weight_decay", "momentum", "centered", "capturable", *_SCALING),
        "Rprop": ("lr", "etas", "step_sizes", "capturable", *_SCALING),
        "SGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov", "fused", *_SCALING),
    }.items()
}
"""Arguments that each class takes in addition to the parameters, by its dotted name."""


class StateBytes(NamedTuple):
    """Bytes that an optimizer keeps for each parameter that it steps.

    Args:
        matrices: For parameters in matrices of hidden layers.
        others: For all others.
    """

    matrices: float
    others: float


_STATE_BYTES: Mapping[str, StateBytes] = {
    # Means of rows and columns are all that is kept of a matrix.
    "torch.optim.Adafactor": StateBytes(0, 4),
    "torch.optim.Adagrad": StateBytes(4, 4),
    "torch.optim.ASGD": StateBytes(4, 4),
    "torch.optim.Muon": StateBytes(4, 8),
    "torch.optim.RMSprop": StateBytes(4, 4),
    "torch.optim.SGD": StateBytes(0, 0),
    "rl_core.torch.HalfStateAdamW": StateBytes(4, 4),
}

_EIGHT_BIT = "rl_core.torch.EightBitAdamW"
_BLOCK_SIZE = 64

_FURTHER_STATE = ("amsgrad", "momentum", "centered")
"""Arguments that have an optimizer keep one more number for each parameter."""


def state_bytes(name: str, kwargs: Mapping[str, Any]) -> StateBytes:
    """Return the bytes that an optimizer keeps for each parameter; of one that is not known, the two averages of Adam.

    Args:
        name: Dotted name of its class.
        kwargs: Its arguments.
    """
    if name == _EIGHT_BIT:
        # Each of two averages has a byte, and a float32 scale for a block of them.
        each = 2 + 8 / (kwargs.get("block_size") or _BLOCK_SIZE)
        return StateBytes(each, each)
    matrices, others = _STATE_BYTES.get(name, StateBytes(8, 8))
    further = 0 if name == "torch.optim.Muon" else 4 * sum(bool(kwargs.get(each)) for each in _FURTHER_STATE)
    return StateBytes(matrices + further, others + further)


_FUNCTION = "takes a Python function, which a config cannot contain"
_LIST = "combines schedules, which are a list here"

UNSUPPORTED: Mapping[str, str] = {
    "torch.optim.LBFGS": "computes the loss several times per step, but a training step computes it once",
    "torch.optim.SparseAdam": "supports only sparse gradients, but gradients here are dense",
}
"""Optimizer classes that cannot train a model here, each with the reason."""

OF_WHOLE_PARAMETERS: Mapping[str, str] = {
    "torch.optim.Adafactor": "computes norms, and averages of rows and columns, of each whole parameter, but the "
    "optimizer of a rank receives a part of it"
}
"""Optimizer classes that cannot step sharded parameters, each with the reason."""

UNSUPPORTED_SCHEDULES: Mapping[str, str] = {
    f"torch.optim.lr_scheduler.{name}": reason
    for name, reason in {
        "ChainedScheduler": _LIST,
        "LambdaLR": _FUNCTION,
        "MultiplicativeLR": _FUNCTION,
        "ReduceLROnPlateau": "follows a metric, but schedules here follow the number of steps",
        "SequentialLR": _LIST,
    }.items()
}
"""Schedule classes that cannot be used here, each with the reason."""

SCHEDULES: Mapping[str, frozenset[str]] = {
    f"torch.optim.lr_scheduler.{name}": frozenset(arguments) | {"last_epoch"}
    for name, arguments in {
        "ConstantLR": ("factor", "total_iters"),
        "CosineAnnealingLR": ("T_max", "eta_min"),
        "CosineAnnealingWarmRestarts": ("T_0", "T_mult", "eta_min"),
        "CyclicLR": (
            *("base_lr", "max_lr", "step_size_up", "step_size_down", "mode", "gamma", "scale_fn", "scale_mode"),
            *("cycle_momentum", "base_momentum", "max_momentum"),
        ),
        "ExponentialLR": ("gamma",),
        "LinearLR": ("start_factor", "end_factor", "total_iters"),
        "MultiStepLR": ("milestones", "gamma"),
        "OneCycleLR": (
            *("max_lr", "total_steps", "epochs", "steps_per_epoch", "pct_start", "anneal_strategy", "cycle_momentum"),
            *("base_momentum", "max_momentum", "div_factor", "final_div_factor", "three_phase"),
        ),
        "PolynomialLR": ("total_iters", "power"),
        "StepLR": ("step_size", "gamma"),
    }.items()
}
"""Arguments that each class takes in addition to the optimizer, by its dotted name."""

REQUIRED: Mapping[str, tuple[str, ...]] = {
    f"torch.optim.lr_scheduler.{name}": arguments
    for name, arguments in {
        "CosineAnnealingLR": ("T_max",),
        "CosineAnnealingWarmRestarts": ("T_0",),
        "CyclicLR": ("base_lr", "max_lr"),
        "ExponentialLR": ("gamma",),
        "MultiStepLR": ("milestones",),
        "OneCycleLR": ("max_lr",),
        "StepLR": ("step_size",),
    }.items()
}
"""Arguments without a default, by the dotted name of the class."""

NUMBERS = frozenset({"alpha", "initial_accumulator_value", "lr", "lr_decay", "momentum", "rho", "weight_decay"})
"""Arguments that are numbers from 0 on in every one of these optimizers that has them."""

PAIRS = frozenset({"betas", "etas", "step_sizes"})
"""Arguments that are two numbers in every one of these optimizers that has them."""
