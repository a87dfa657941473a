"""Parameters by their names in the Hugging Face model: those that train, and how the optimizer treats each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rl_core.config import did_you_mean
from rl_core.facts.parameter_patterns import TrainedPatterns, matches, trained_names, unmatched
from rl_core.model_config import OptimizerConfig

_NORMS_AND_BIASES = re.compile(r"bias|layernorm|rmsnorm|(?:^|[._])norm(?:$|\.)")
"""Part of the name of each parameter that the Trainer of transformers does not decay."""


_ENDS = re.compile(r"embed|lm_head|(?:^|\.)(?:wte|wpe|score)\.")
"""Part of the name of each matrix that is not one of a hidden layer."""


class MatrixPiece(NamedTuple):
    """A part of a matrix of the whole model that a rank holds.

    Args:
        matrix: Name of the matrix, the same on every rank.
        shape: Shape of the whole matrix.
        offsets: First row and column of the part.
        values: `[rows, columns]`, a view of the rank's memory.
    """

    matrix: str
    shape: tuple[int, int]
    offsets: tuple[int, int]
    values: Tensor


Pieces = Callable[[Tensor], Iterable[MatrixPiece]]
"""Function from this rank's part of a parameter, or of a tensor of its shape, to the matrices in it, as views."""


class OptimizedParameter(NamedTuple):
    """What an optimizer has to know of a parameter.

    Args:
        names: Names in the Hugging Face model of the tensors that it is made of; several if a backend fuses them.
        is_norm_or_bias: True if it is not decayed if `decay_norms_and_biases` is false.
        pieces: Function to the matrices of hidden layers that it is made of; None if it is something else.
    """

    names: tuple[str, ...]
    is_norm_or_bias: bool
    pieces: Pieces | None = None


def is_hidden_matrix(name: str, shape: Sequence[int]) -> bool:
    """Return whether a tensor of the whole model is a matrix of a hidden layer, or a stack of such matrices of experts:
    not an embedding, a head, a convolution or a vector."""
    return (len(shape) == 2 or (len(shape) == 3 and "expert" in name)) and _ENDS.search(name) is None


def is_norm_or_bias(name: str, owner: nn.Module | None = None) -> bool:
    """Return whether a parameter is not decayed if `decay_norms_and_biases` is false.

    Args:
        name: Name of the parameter in the whole model.
        owner: Module that has the parameter, whose class may show that it is a norm if its name does not.
    """
    return bool(_NORMS_AND_BIASES.search(name.lower())) or "norm" in type(owner).__name__.lower()


def matrices_in(name: str, shape: Sequence[int], place: Sequence[slice], part: Tensor) -> Iterator[MatrixPiece]:
    """Yield the pieces of a matrix, or of each matrix of a stack, in a part of a tensor.

    Args:
        name: Name of the whole tensor.
        shape: Shape of the whole tensor.
        place: Place of the part in it.
        part: The part.
    """
    if part.dim() == 2:
        offsets = (place[0].start, place[1].start)
        yield MatrixPiece(name, (shape[0], shape[1]), offsets, part)
        return
    for number, matrix in enumerate(part, place[0].start):
        yield from matrices_in(f"{name}.{number}", shape[1:], place[1:], matrix)


def _everything(parameter: Tensor) -> tuple[slice, ...]:
    return tuple(slice(0, extent) for extent in parameter.shape)


def describe_parameters(
    modules: Iterable[nn.Module],
    names: Mapping[str, str] | None = None,
    place_of: Callable[[Tensor], tuple[slice, ...]] = _everything,
) -> dict[nn.Parameter, OptimizedParameter]:
    """Return the descriptions of the parameters of Hugging Face models, or of parts of one with the names of the whole.

    Args:
        modules: The models.
        names: Names of tied parameters to the names that they have in the whole model; None if there are none.
        place_of: Function from a parameter to the place of this rank's part in it; ranks hold it whole if not given.
    """
    found: dict[nn.Parameter, OptimizedParameter] = {}
    for module in modules:
        for prefix, owner in module.named_modules():
            for held, parameter in owner.named_parameters(prefix, recurse=False):
                name = (names or {}).get(held, held)
                pieces = None
                if is_hidden_matrix(name, parameter.shape):
                    pieces = partial(matrices_in, name, parameter.shape, place_of(parameter))
                found[parameter] = OptimizedParameter((name,), is_norm_or_bias(held, owner), pieces)
    return found


def check_patterns(key: str, patterns: Iterable[str], names: Sequence[str]) -> None:
    """Refuse patterns that match no parameter.

    Args:
        key: Key of the patterns.
        patterns: The patterns.
        names: Names of the parameters that they may match, in the whole model.

    Raises:
        ValueError: If a pattern matches none, with names that are like it.
    """
    for pattern in unmatched(patterns, names):
        raise ValueError(
            f"{key}: {pattern!r} matches no parameter{did_you_mean(pattern, names)}. Patterns match whole names of "
            f"parameters or modules, such as {names[0]}; write *.NAME for a part of a name"
        )


def frozen_names(config: TrainedPatterns, names: Sequence[str]) -> set[str]:
    """Return the parameters that `freeze` and `train_only` keep from training.

    Args:
        config: Settings of the model.
        names: Names of all parameters of the whole model.

    Raises:
        ValueError: If a pattern matches no parameter, or nothing is left to train.
    """
    check_patterns("freeze", config.freeze, names)
    check_patterns("train_only", config.train_only, names)
    trained = trained_names(config, names)
    if not trained:
        raise ValueError("freeze: no parameter is left to train; remove a pattern here, or extend train_only")
    return set(names) - set(trained)


def local_part(tensor: Any) -> Tensor:
    """Return the part of a tensor that this rank holds, sharing memory, without its gradient."""
    held: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return held.detach()


def loss_of(closure: Callable[[], float] | None) -> float | None:
    """Return the loss that the closure of an optimizer's step computes with gradients; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


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
