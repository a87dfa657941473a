"""The Hugging Face generator, as rl-launch finds it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rl_core.config import Problem
from rl_core.plugins import BackendPlugin, Requirement, reports_routing
from rl_core.run_config import RunConfig
from rl_dtensor.generation.config import HFConfig


def ranks(backend: HFConfig) -> int:
    """A replica is one process on one device."""
    del backend
    return 1


def check_vision(section: Any, config: RunConfig) -> Iterable[Problem]:
    """Refuse images, which this generator does not see."""
    if section.vision.enabled:
        yield Problem(
            "generation.backend",
            "sees no images, but vision.enabled is true",
            got="hf",
            remedy="Set it to vllm, or vision.enabled=false",
        )


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
    checks=(check_vision,),
    routing_problem=reports_routing,
)
