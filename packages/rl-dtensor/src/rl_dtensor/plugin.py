"""The light half of the backend: its config, and the name of its worker class."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rl_core.config import Problem
from rl_core.devices import DEVICES, Device
from rl_core.facts.model_size import WIDE_BYTES, ModelSize, RankMemory
from rl_core.facts.optimizer_arguments import OF_WHOLE_PARAMETERS, state_bytes
from rl_core.facts.rank_layout import RankLayout
from rl_core.model_config import BASE_BYTES, ModelConfig, local_hf_config, local_whole_config, optimizer_problems
from rl_core.plugins import BackendPlugin, MeshCase, Requirement
from rl_core.run_config import RunConfig
from rl_core.selfcheck.cases import at_most_two
from rl_core.weights import ITEM_BYTES
from rl_dtensor.config import DTensorConfig
from rl_dtensor.model.settings import (
    adapter_problems,
    device_problems,
    draft_head_problems,
    exact_training_problem,
    kernel_problems,
    low_precision_problems,
    vision_problems,
)
from rl_dtensor.parallel.sizes import AxisSizes, combination_problems, num_ranks, shape_problems

SIZES = {
    "tensor_parallel_size": "tp",
    "context_parallel_size": "cp",
    "pipeline_parallel_size": "pp",
    "expert_parallel_size": "ep",
}
"""Keys of the sizes that split a model, and their axes."""

SHAPING = ("sequence_parallel", "custom_parallel_plan", "context_parallel_method", "recompute")
"""Further keys that decide how a split model computes."""

VISION = Requirement("rl-dtensor", {"cpu": ("vision",), "cuda": ("vision",)}, ("PIL", "torchvision"))

FLASH = Requirement("rl-dtensor", extras={"cuda": ("flash",)})


def check_mesh(section: Any, config: RunConfig) -> Iterable[Problem]:
    """Yield the problems of the mesh, and of mesh and images with the model, if its config is on this machine."""
    backend = section.dtensor_cfg
    model = local_hf_config(section)
    yield from combination_problems(backend)
    yield from shape_problems(backend, model)
    yield from kernel_problems(backend, model)
    yield from vision_problems(section.vision, backend, local_whole_config(section))
    if section.trust_remote_code is not None:
        yield from _code_problems(backend)


def _code_problems(backend: DTensorConfig) -> Iterator[Problem]:
    """Yield axes of the mesh that need to know the layers of a model, whose code may have any."""
    for name in SIZES:
        if (size := getattr(backend, name)) > 1:
            reason = "is not supported with trust_remote_code, because nothing is known of the layers of such a model"
            yield Problem(f"dtensor_cfg.{name}", reason, got=size, remedy="Set it to 1: FSDP shards any model")


UNSUPPORTED_OPTIMIZERS = {
    **OF_WHOLE_PARAMETERS,
    "torch.optim.Rprop": "uses operations that sharded parameters (DTensor) do not support",
}
"""Optimizer classes of torch that cannot step sharded parameters, each with the reason."""


def check_device(section: Any, config: RunConfig) -> Iterable[Problem]:
    """Yield the settings that the run's device, the model's precision, or a draft head does not support."""
    device = DEVICES.get(config.cluster.device)  # `auto` may still become any device.
    backend, precision = section.dtensor_cfg, section.precision
    yield from optimizer_problems(section, UNSUPPORTED_OPTIMIZERS, device)
    yield from device_problems(backend, precision=precision, device=device)
    yield from adapter_problems(backend, section.lora_cfg)
    yield from low_precision_problems(backend, section.lora_cfg, precision=precision, device=device)
    yield from draft_head_problems(section, backend)
    if section.sequence_packing.shared_prefixes is True and section.vision.enabled:
        reason = "is not supported with vision.enabled=true, because images belong to one row"
        yield Problem("sequence_packing.shared_prefixes", reason, got=True, remedy="Set it to auto or false")


def kernels(config: DTensorConfig) -> tuple[Requirement, ...]:
    """Return the packages that the chosen attention needs in addition to torch, if an index has them."""
    return (FLASH,) if config.attention_backend == "flash_attention_2" else ()


HELD_FAMILIES = frozenset(
    ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "qwen2_5_vl_text", "qwen3_vl_text")
)
"""Model types that the tests of this package train on every mesh; the last two with images."""


def mesh_case(section: Any) -> MeshCase:
    """Return the case of `rl_dtensor.selfcheck` for a model's mesh: the same axes, two ranks on each."""
    backend: DTensorConfig = section.dtensor_cfg
    sizes = at_most_two({name: getattr(backend, name) for name in SIZES})
    settings = {**{name: getattr(backend, name) for name in SHAPING}, **sizes}
    least = num_ranks(DTensorConfig(**settings))
    axes = [f"{SIZES[name]}2" for name, size in sizes.items() if size > 1]
    # With one rank per copy only the data is split, and a check of that needs two ranks.
    return MeshCase(
        " x ".join(axes) or "fsdp2",
        max(2, least),
        settings,
        is_packed=section.sequence_packing.enabled,
        has_adapters=section.lora_cfg.enabled,
    )


def memory_of(
    model: ModelConfig, backend: DTensorConfig, size: ModelSize, ranks: int, *, trained: ModelSize
) -> RankMemory:
    """Return the memory of the rank with the most parameters; see `rl_core.plugins.BackendPlugin.memory`."""
    sizes = AxisSizes.of(backend, ranks)
    split = sizes.tp * sizes.fsdp

    def sharded(counted: ModelSize) -> float:
        return counted.dense_of_rank(sizes.pp, sizes.tp) / sizes.fsdp + counted.experts / (sizes.pp * split)

    trains = sharded(trained)
    matrices = (trained.layers + trained.experts) / (sizes.pp * split) + trained.vision / sizes.fsdp
    each = state_bytes(model.optimizer.name, model.optimizer.kwargs)
    state = matrices * each.matrices + (trains - matrices) * each.others
    weights = trains * WIDE_BYTES + (sharded(size) - trains) * ITEM_BYTES[model.precision]
    if model.lora_cfg.enabled and model.lora_cfg.base_quantization is not None:
        saved = ITEM_BYTES[model.precision] - BASE_BYTES[model.lora_cfg.base_quantization]
        weights -= size.layers / (sizes.pp * split) * saved
    # Gradients are dropped while others use the device.
    kept, held = weights + state, weights + state + trains * WIDE_BYTES
    own = trains * WIDE_BYTES
    if backend.cpu_offload:
        return RankMemory(0, 0, own, host=held, optimizer=state)
    return RankMemory(held, kept, own, optimizer=state)


def layout_of(model: ModelConfig, backend: DTensorConfig, ranks: int, device: Device) -> RankLayout:
    """Return how ranks share a model; see `rl_core.plugins.BackendPlugin.layout`."""
    sizes = AxisSizes.of(backend, ranks)
    accumulation = backend.gradient_accumulation
    recompute = backend.recompute
    return RankLayout(
        tensor=sizes.tp,
        context=sizes.cp,
        pipeline=sizes.pp,
        chunks=backend.pipeline_chunks_per_rank,
        data=sizes.dp,
        experts=sizes.ep,
        splits_tokens=backend.sequence_parallel,
        is_sharded=True,
        keeps_whole=accumulation == "unsharded" or (accumulation == "auto" and device.runs_on_gpus),
        is_fused=backend.fused_kernels and device.runs_on_gpus,
        recompute="none" if recompute == "auto" and not device.runs_on_gpus else recompute,
        offloads=backend.cpu_offload,
        recomputes_tower=True,
    )


PLUGIN = BackendPlugin(
    name="dtensor",
    key="dtensor_cfg",
    config=DTensorConfig,
    worker="rl_dtensor.worker:DTensorWorker",
    requirement=Requirement(
        "rl-dtensor", extras={"cpu": ("worker",), "cuda": ("worker",)}, imports=("torch", "transformers", "safetensors")
    ),
    further=kernels,
    images=VISION,
    ranks=num_ranks,
    checks=(check_mesh, check_device),
    preflight="rl_dtensor.preflight:check",
    selfcheck="rl_dtensor.selfcheck:cases_of",
    mesh_case=mesh_case,
    memory=memory_of,
    layout=layout_of,
    counted="rl_dtensor.counted:counted",
    replay_key="moe_router_replay",
    trains_draft_heads=True,
    runs_model_code=True,
    exact_problem=exact_training_problem,
    held_families=HELD_FAMILIES,
    family_table="rl_dtensor:families.json",
)
"""The training backend, found by the entry point `rl.policies:dtensor`."""
