"""The Hugging Face generator, as rl-launch finds it."""

from __future__ import annotations

from rl_core.devices import Device
from rl_core.model_config import ModelConfig, local_family
from rl_core.plugins import BackendPlugin, Requirement, reports_routing
from rl_dtensor.generation.config import HFConfig
from rl_dtensor.model.vision.settings import FAMILIES
from rl_dtensor.plugin import VISION


def ranks(backend: HFConfig) -> int:
    """A replica is one process on one device."""
    del backend
    return 1


def image_problem(config: HFConfig, model: ModelConfig, device: Device) -> str:
    """Why the generator cannot serve this model with images; empty if it can."""
    del config, device
    family = local_family(model)
    if family is None or family in FAMILIES:
        return ""
    return f"it reads the images of models of the types {', '.join(FAMILIES)}, and this one is a {family}"


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
    images=VISION,
    image_problem=image_problem,
    routing_problem=reports_routing,
)
