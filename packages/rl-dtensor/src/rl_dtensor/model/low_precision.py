"""Linear layers that compute in fewer bits than the model's precision, if the config asks for it."""

from __future__ import annotations

from collections.abc import Sequence, Set

from torch import nn
from transformers import PreTrainedModel

from rl_dtensor.config import DTensorConfig
from rl_dtensor.model.float8 import MULTIPLE, use_float8
from rl_dtensor.model.qat import round_weights


def lower_precision(hf: PreTrainedModel, layers: Sequence[nn.Module], backend: DTensorConfig, kept: Set[str]) -> None:
    """Make linear layers of a whole model on `meta` compute in float8, or with rounded weights.

    To be called after adapters are added and before the model is split.

    Args:
        hf: Model, changed in place.
        layers: Its repeated layers, in order.
        backend: Settings of the backend.
        kept: Names of parameters that stay float32.

    Raises:
        ValueError: If the settings do not fit the model.
    """
    if backend.qat.enabled:
        round_weights(hf, layers, backend.qat, kept)
    if backend.float8.enabled:
        use_float8(hf, layers, backend.float8, kept, num_parts=backend.tensor_parallel_size)


def token_multiple(backend: DTensorConfig) -> int:
    """Number that the tokens of a rank's microbatch must be a multiple of: the gradient of a weight sums over tokens,
    and kernels sum over multiples."""
    return MULTIPLE if backend.float8.enabled and not backend.float8.emulate else 1
