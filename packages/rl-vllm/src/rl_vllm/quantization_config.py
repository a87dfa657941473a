"""Settings of rollouts with quantised weights, `policy.generation.vllm_cfg.quantization`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rl_core.config import Config, Problem, ProblemError, WhenChanged

Method = Literal["fp8_per_channel", "fp8_per_block", "fp8_per_tensor", "mxfp8", "nvfp4"]

ROUTERS = ("*.gate", "*.router", "*.shared_expert_gate")
"""Patterns of the names of linear layers that choose experts."""

_REFUSED_METHODS = {
    "mxfp8": (
        "stores scales in an order that vLLM's kernels choose, so that a weight sync could not be verified against "
        "what was sent"
    ),
    "nvfp4": "is not applied to linear layers of bfloat16 models by vLLM 0.32, only to experts",
}


class QuantizationConfig(Config):
    """Rollouts with quantised weights.

    The policy sends its weights in `policy.precision`. Every rank of the engine quantises them again at each weight
    sync, and the sync is refused if the engine does not hold what its recipe gives. Embeddings, the head, norms,
    routers and the experts of a mixture keep their precision.
    """

    when_changed = WhenChanged.RESUME

    method: Method
    """Format of the weights of linear layers. 8-bit floating point (E4M3) with a scale per output
    (`fp8_per_channel`), per block of 128 by 128 (`fp8_per_block`) or per matrix (`fp8_per_tensor`). Activations are
    quantised too, as they are computed. Devices differ in the methods that they have kernels for; a run is refused
    before it starts if this one is missing. `mxfp8` and `nvfp4` are refused, with the reason."""
    num_first_layers_in_bf16: int = Field(default=0, ge=0)
    """Number of layers at the start of the model that are not quantised."""
    num_last_layers_in_bf16: int = Field(default=0, ge=0)
    """Number of layers at the end of the model that are not quantised."""
    ignored_layers: list[str] = []
    """Names of linear layers that are not quantised, with `*` for any characters, such as `*.o_proj`. Layers that the
    engine computes as one (`q_proj`, `k_proj` and `v_proj`; `gate_proj` and `up_proj`) must be named together."""
    oracle_every: int = Field(default=10, ge=1)
    """Number of weight syncs from one comparison in float64 of all quantised weights with those that were sent to the
    next, in which the error of the quantisation is measured; the first sync is one. Scales and values are compared
    with the recipe at every sync."""

    @model_validator(mode="after")
    def _refuse_methods(self) -> QuantizationConfig:
        reason = _REFUSED_METHODS.get(self.method)
        if reason:
            remedy = "Set fp8_per_channel or fp8_per_block"
            raise ProblemError(Problem("method", reason, got=self.method, remedy=remedy))
        return self

    def ignored(self, num_layers: int) -> list[str]:
        """Patterns of the names of the engine's layers that are not quantised.

        Args:
            num_layers: Number of layers of the model.
        """
        first = range(min(self.num_first_layers_in_bf16, num_layers))
        last = range(max(num_layers - self.num_last_layers_in_bf16, 0), num_layers)
        return [*ROUTERS, *(f"*layers.{layer}.*" for layer in sorted({*first, *last})), *self.ignored_layers]
