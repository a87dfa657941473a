"""The Hugging Face generator, as rl-launch finds it."""

from __future__ import annotations

from rl_core.plugins import BackendPlugin, Requirement, reports_routing
from rl_dtensor.generation.config import HFConfig


def ranks(backend: HFConfig) -> int:
    """A replica is one process on one device."""
    del backend
    return 1


PLUGIN = BackendPlugin(
    name="hf",
    key="hf_cfg",
    config=HFConfig,
    worker="rl_dtensor.generation.generator:HFGenerator",
    requirement=Requirement(
        distribution="rl-dtensor",
        extras={"cpu": ("worker",), "cuda": ("worker",)},
        imports=("torch", "transformers", "safetensors"),
    ),
    ranks=ranks,
    routing_problem=reports_routing,
)
