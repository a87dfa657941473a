"""The light half of the backend: its config, and the name of its worker class."""

from __future__ import annotations

from math import lcm
from typing import Any

from rl_core.model_config import local_hf_config
from rl_core.plugins import BackendPlugin, MeshCase, Requirement
from rl_core.selfcheck.cases import at_most_two
from rl_megatron.checks import CHECKS
from rl_megatron.config import KEY, MegatronConfig
from rl_megatron.families.supported import RULES, num_key_heads
from rl_megatron.rank_memory import layout_of, memory_of

TRANSFORMER_ENGINE = Requirement("rl-megatron", extras={"cuda": ("te",)})
"""Requirement of layers on GPUs, in addition to the requirements of every worker."""

VISION = Requirement("rl-megatron", {"cpu": ("vision",), "cuda": ("vision",)}, ("PIL", "torchvision"))
"""Requirement of models that see images."""


def num_ranks(config: MegatronConfig) -> int:
    """Return the minimum number of ranks for one model.

    Each pipeline rank's layers are spread over the tensor- and context-parallel ranks, and their experts over ranks
    taken from the same.
    """
    dense = config.tensor_model_parallel_size * config.context_parallel_size
    expert_tensor = config.expert_tensor_parallel_size or config.tensor_model_parallel_size
    return config.pipeline_model_parallel_size * lcm(dense, config.expert_model_parallel_size * expert_tensor)


HELD_FAMILIES = frozenset(RULES)
"""Model types that the tests of this package train on every layout."""

SIZES = {
    "tensor_model_parallel_size": "tp",
    "context_parallel_size": "cp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "virtual",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
}
"""Keys of the sizes that split a model, to the names of their axes."""


def mesh_case(section: Any) -> MeshCase:
    """Return the case of `rl_megatron.selfcheck` for a model's layout: the same axes, with two ranks on each.

    If the layout has more tensor-parallel ranks than the model has key-value heads, the case has four: its tiny model
    has two such heads.
    """
    backend: MegatronConfig = section.megatron_cfg
    sizes = at_most_two({name: getattr(backend, name) for name in SIZES})
    if 0 < num_key_heads(local_hf_config(section)) < backend.tensor_model_parallel_size:
        sizes["tensor_model_parallel_size"] = 4
    settings: dict[str, Any] = {"sequence_parallel": backend.sequence_parallel, **sizes}
    axes = [f"{SIZES[name]}{size}" for name, size in sizes.items() if size > 1]
    return MeshCase(
        " x ".join(axes) or "dp2",
        max(2, num_ranks(MegatronConfig(**settings))),
        settings,
        is_packed=section.sequence_packing.enabled,
        has_adapters=section.lora_cfg.enabled,
    )


PLUGIN = BackendPlugin(
    name="megatron",
    key=KEY,
    config=MegatronConfig,
    worker="rl_megatron.worker:MegatronWorker",
    requirement=Requirement(
        "rl-megatron",
        extras={"cpu": ("worker",), "cuda": ("worker",)},
        imports=("torch", "megatron.core", "transformers", "safetensors"),
    ),
    further=lambda config: () if config.transformer_engine is False else (TRANSFORMER_ENGINE,),
    ranks=num_ranks,
    checks=CHECKS,
    preflight="rl_megatron.preflight:check",
    selfcheck="rl_megatron.selfcheck:cases_of",
    mesh_case=mesh_case,
    memory=memory_of,
    layout=layout_of,
    counted="rl_megatron.counted:counted",
    replay_key="moe_router_replay",
    images=VISION,
    held_families=HELD_FAMILIES,
    converter="rl_megatron.megatron_checkpoint:convert_to_stdout",
)
"""The training backend, found by the entry point `rl.policies:megatron`."""
