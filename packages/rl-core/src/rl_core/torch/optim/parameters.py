"""Parameters by their names in the Hugging Face model: those that train, and how the optimizer treats each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from rl_core.config import did_you_mean
from rl_core.model_config import ModelConfig, OptimizerConfig

_NORMS_AND_BIASES = re.compile(r"bias|layernorm|rmsnorm|(?:^|[._])norm(?:$|\.)")
"""Part of the name of each parameter that the Trainer of transformers does not decay."""


class OptimizedParameter(NamedTuple):
    """What an optimizer has to know of a parameter.

    Args:
        names: Names in the Hugging Face model of the tensors that it is made of; several if a backend fuses them.
        is_norm_or_bias: True if it is not decayed if `decay_norms_and_biases` is false.
    """

    names: tuple[str, ...]
    is_norm_or_bias: bool


def is_norm_or_bias(name: str, owner: nn.Module | None = None) -> bool:
    """Return whether a parameter is not decayed if `decay_norms_and_biases` is false.

    Args:
        name: Name of the parameter in the whole model.
        owner: Module that has the parameter, whose class may show that it is a norm if its name does not.
    """
    return bool(_NORMS_AND_BIASES.search(name.lower())) or "norm" in type(owner).__name__.lower()


def describe_parameters(
    modules: Iterable[nn.Module], names: Mapping[str, str] | None = None
) -> dict[nn.Parameter, OptimizedParameter]:
    """Return the descriptions of the parameters of Hugging Face models, or of parts of one with the names of the whole.

    Args:
        modules: The models.
        names: Names of tied parameters to the names that they have in the whole model; None if there are none.
    """
    return {
        parameter: OptimizedParameter(((names or {}).get(name, name),), is_norm_or_bias(name, owner))
        for module in modules
        for prefix, owner in module.named_modules()
        for name, parameter in owner.named_parameters(prefix, recurse=False)
    }


def matches(name: str, pattern: str) -> bool:
    """Return whether a pattern of `policy.freeze` matches a parameter, or a module that it is part of."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def check_patterns(key: str, patterns: Iterable[str], names: Sequence[str]) -> None:
    """Refuse patterns that match no parameter.

    Args:
        key: Key of the patterns.
        patterns: The patterns.
        names: Names of the parameters that they may match, in the whole model.

    Raises:
        ValueError: If a pattern matches none, with names that are like it.
    """
    for pattern in patterns:
        if not any(matches(name, pattern) for name in names):
            raise ValueError(
                f"{key}: {pattern!r} matches no parameter{did_you_mean(pattern, names)}. Patterns match whole names of "
                f"parameters or modules, such as {names[0]}; write *.NAME for a part of a name"
            )


def frozen_names(config: ModelConfig, names: Sequence[str]) -> set[str]:
    """Return the parameters that `freeze` and `train_only` keep from training.

    Args:
        config: Settings of the model.
        names: Names of all parameters of the whole model.

    Raises:
        ValueError: If a pattern matches no parameter, or nothing is left to train.
    """
    check_patterns("freeze", config.freeze, names)
    check_patterns("train_only", config.train_only, names)
    trained = [name for name in names if any(matches(name, each) for each in config.train_only or ["*"])]
    trained = [name for name in trained if not any(matches(name, each) for each in config.freeze)]
    if not trained:
        raise ValueError("freeze: no parameter is left to train; remove a pattern here, or extend train_only")
    return set(names) - set(trained)


def rate_of(optimizer: OptimizerConfig, parameter: OptimizedParameter) -> float:
    """Return the factor of a parameter's learning rate.

    Raises:
        ValueError: If a backend fuses tensors whose factors differ.
    """
    found = {
        next((scale for pattern, scale in optimizer.lr_scales.items() if matches(name, pattern)), 1.0)
        for name in parameter.names
    }
    if len(found) > 1:
        raise ValueError(
            f"optimizer.lr_scales: {' and '.join(parameter.names)} have different factors, but are one parameter here; "
            "write a pattern that matches all of them"
        )
    return found.pop()
