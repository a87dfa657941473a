"""The light half of the Hugging Face generator: its config, and the name of its class."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from rl_core.config import Config, WhenChanged
from rl_core.devices import Device
from rl_core.facts.rank_layout import EngineLayout
from rl_core.model_config import ModelConfig, local_family
from rl_core.plugins import BackendPlugin, Requirement, reports_routing
from rl_core.weights import ITEM_BYTES
from rl_dtensor.model.settings import FAMILIES, exactness_problem
from rl_dtensor.plugin import VISION


class HFConfig(Config):
    """Generation with Hugging Face transformers."""

    when_changed: ClassVar[WhenChanged | None] = WhenChanged.RESUME

    max_batch_size: int = Field(default=64, gt=0)
    """Maximum number of completions decoded together; further requests wait for a free row."""
    max_prefill_tokens: int = Field(default=16384, gt=0)
    """Maximum number of tokens, padding included, in one forward pass over prompts. A single longer prompt is an
    exception."""
    attn_implementation: Literal["auto", "sdpa", "eager"] = "auto"
    """Attention implementation of the model. `auto` uses `sdpa`, and `eager` for models that `sdpa` does not compute:
    with a soft cap of scores, or with sinks."""


def ranks(backend: HFConfig) -> int:
    """Return the number of ranks: a replica is one process on one device."""
    return 1


def image_problem(config: HFConfig, model: ModelConfig, device: Device) -> str:
    """Return why the generator cannot serve this model with images; empty if it can."""
    family = local_family(model)
    if family is None or family in FAMILIES:
        return ""
    return f"it reads the images of models of the types {', '.join(FAMILIES)}, and this one is a {family}"


def exact_problem(config: HFConfig, model: ModelConfig, device: Device) -> str:
    """Return why the generator cannot compute the trainer's bits; empty if it can."""
    if config.attn_implementation != "auto":
        return f"hf_cfg.attn_implementation={config.attn_implementation} is not the trainer's attention. Set it to auto"
    return exactness_problem(model, device)


def engine_layout(model: ModelConfig, config: HFConfig, device: Device, *, is_shared: bool) -> EngineLayout:
    """Return what an engine keeps of a device; see `BackendPlugin.engine_layout`."""
    each = ITEM_BYTES[model.precision]
    return EngineLayout(weight_bytes=each, cache_bytes=each, num_sequences=config.max_batch_size, is_eager=True)


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
    engine_layout=engine_layout,
    images=VISION,
    runs_model_code=True,
    image_problem=image_problem,
    routing_problem=reports_routing,
    exact_problem=exact_problem,
)
