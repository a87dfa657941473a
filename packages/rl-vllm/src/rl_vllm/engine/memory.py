"""The share of its GPUs' memory that an engine takes for weights, activations and the KV cache."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rl_core.errors import GeneratorError
from rl_core.model_config import ModelConfig
from rl_core.rollouts.generation import Placement
from rl_core.torch.transport.ends import receiver_bytes
from rl_core.usage.meter import Gpus, GpuUsage
from rl_core.weights import num_bytes
from rl_vllm.config import GIB, MAX_SHARE, MAX_SHARED, VllmConfig
from rl_vllm.weights.file_weights import FileWeights

_log = logging.getLogger(__name__)

UNMEASURED_SHARED = 0.6
"""Share on GPUs that the engine takes turns on if their memory cannot be read."""

CONTEXT_BYTES = GIB
"""Memory of a rank that vLLM does not count: its CUDA context, and communicators."""

POLICY_BYTES = 4 * GIB
"""Memory that models which take turns with the engine allocate after its start and keep in its turns: kernels,
workspaces and communicators, which their first steps create."""


def memory_share(backend: VllmConfig, model: ModelConfig, placement: Placement) -> float:
    """Return the fraction of each GPU's memory that this engine takes, and log it.

    The value of `gpu_memory_utilization` is divided by the number of engines on the GPUs. If it is unset, an engine
    takes the memory that is free when it starts, except for a reserve, and at most its part of `MAX_SHARE` or
    `MAX_SHARED`. The reserve is for the engine's own context; for transfers of weights, if the KV cache is in use
    meanwhile; and for models that take turns with the engine, which have left the GPUs by now.

    Raises:
        GeneratorError: If the weights alone need more.
    """
    gpus = visible_gpus(placement, Gpus.of_this_machine().read()) if placement.kind.runs_on_gpus else []
    limit = MAX_SHARED if placement.shares_devices else MAX_SHARE
    if not gpus:
        unmeasured = UNMEASURED_SHARED if placement.shares_devices else MAX_SHARE
        return (backend.gpu_memory_utilization or unmeasured) / placement.num_engines
    sizes = sent_bytes(model) if placement.awaits_weights else []
    total = min(gpu.memory_total_bytes or 0 for gpu in gpus)
    used = max(gpu.memory_bytes or 0 for gpu in gpus)
    if placement.shares_devices:
        reserve = CONTEXT_BYTES + POLICY_BYTES
    else:
        largest = max(sizes, default=0)
        buffers = receiver_bytes(largest, placement.kind.bucket_bytes, has_parts=backend.num_ranks > 1)
        # A layer is filled next to the one that the engine computes with, which takes as much as the largest tensor.
        reserve = CONTEXT_BYTES + (buffers + largest if sizes else 0)
    if backend.gpu_memory_utilization is not None:
        share = backend.gpu_memory_utilization / placement.num_engines
    else:
        share = max(0.0, min(limit / placement.num_engines, 1 - (used + reserve) / total))
    weights = 0 if backend.quantization is not None else sum(sizes) // backend.num_ranks
    numbers = f"{share:.2f} of {total / GIB:.1f} GiB ({used / GIB:.1f} GiB in use, {reserve / GIB:.1f} GiB reserved)"
    if share * total <= weights and backend.kv_cache_gib is None:
        raise GeneratorError(
            f"the engine's weights take {weights / GIB:.1f} GiB of each GPU, but its share is {numbers}, which leaves "
            "nothing for the KV cache. Increase vllm_cfg.tensor_parallel_size, end other processes on the GPUs, or set "
            "vllm_cfg.gpu_memory_utilization"
        )
    left = (1 - share) * total - used
    is_tight = backend.gpu_memory_utilization is not None and placement.num_engines == 1 and left < reserve
    level = logging.WARNING if is_tight else logging.INFO
    _log.log(level, "the engine takes %s of each GPU, which leaves %.1f GiB to others", numbers, left / GIB)
    return share


def visible_gpus(placement: Placement, gpus: Sequence[GpuUsage]) -> list[GpuUsage]:
    """Return the GPUs of a placement whose memory is known."""
    names = placement.kind.visible()
    found = [gpu for gpu in gpus if not names or str(gpu.index) in names or gpu.uuid in names]
    return [gpu for gpu in found if gpu.memory_bytes is not None and gpu.memory_total_bytes]


def sent_bytes(model: ModelConfig) -> list[int]:
    """Return the size in bytes of each tensor that the policy sends; empty if the model's files do not show it."""
    try:
        weights = FileWeights.of(model, as_sent=True)
    except Exception as error:  # noqa: BLE001 - an engine that waits for its weights may start without files
        _log.info("the weights of %s were not measured: %s", model.model_name, error)
        return []
    return [num_bytes(spec) for spec in weights.manifest.tensors]
