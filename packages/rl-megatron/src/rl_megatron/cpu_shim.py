"""Megatron Core on a machine without CUDA, for development: nothing here runs if torch has CUDA.

megatron-core 0.16 asks `torch.cuda` for the current device, for generator states and streams, and writes
`device="cuda"` in the middle of its schedules. `install` answers with the CPU. It changes functions of `torch` in this
process for good, and does not depend on the calling thread.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import megatron.core.tensor_parallel.random as megatron_random
import megatron.core.transformer.moe.moe_utils as moe_utils
import torch
import torch.distributed as dist

CPU = torch.device("cpu")
FACTORIES = ("arange", "empty", "full", "ones", "rand", "randn", "tensor", "zeros")

_installed = False


def install() -> None:
    """Answer Megatron's questions to `torch.cuda` with the CPU; once per process.

    Raises:
        RuntimeError: If torch has CUDA, which needs no replacement.
    """
    global _installed
    if torch.cuda.is_available():
        raise RuntimeError("torch has CUDA here; run Megatron on it with cluster.device=cuda")
    if _installed:
        return
    _installed = True
    warnings.warn("Megatron Core runs on CPU behind a shim, which is for development and tests only", stacklevel=2)
    torch._dynamo.config.disable = True  # Megatron compiles its fused functions, which pays on CUDA only.
    # Dynamo maps names in torch.cuda to its rules by object, and must see the originals.
    torch._dynamo.trace_rules.get_torch_obj_rule_map()
    # So must `with torch.device(...)`, which `transformers` loads models in: its list is made at first use, and kept.
    torch.utils._device._device_constructors()
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    # `torch.manual_seed` would seed CUDA's generators too and thereby call this function again.
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    cuda.Stream = type("Stream", (_Nothing,), {})
    cuda.Event = type("Event", (_Nothing,), {})
    cuda.current_stream = lambda *_, **__: _Nothing()
    cuda.default_stream = lambda *_, **__: _Nothing()
    cuda.stream = lambda *_, **__: contextlib.nullcontext()
    for name in ("synchronize", "empty_cache", "set_device"):
        setattr(cuda, name, lambda *_, **__: None)
    for name in ("range_push", "range_pop"):
        setattr(cuda.nvtx, name, lambda *_, **__: None)
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    torch.Tensor.record_stream = lambda *_: None
    megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    megatron_random.logging.getLogger(megatron_random.__name__).disabled = True  # "CPU RNG state changed"
    if moe_utils.HAVE_TE:
        # Routers would multiply with Transformer Engine, which takes no tensor of the CPU.
        moe_utils.te_general_gemm = None
    _patch_all_to_all()
    _patch_gloo()


class _Nothing:
    """A stream or an event of a device that does everything at once, so that nothing is ever pending."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait(self, *_: Any) -> None:
        """Return at once."""

    wait_stream = wait_event = synchronize = record = wait

    def record_event(self, *_: Any) -> _Nothing:
        """Return an event that has happened."""
        return self

    def query(self) -> bool:
        """Return that everything has happened."""
        return True


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> Any:
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return made


def _patch_all_to_all() -> None:
    """Convert split sizes to integers: without CUDA they stay tensors, which torch does not accept."""
    all_to_all_single = dist.all_to_all_single

    @functools.wraps(all_to_all_single)
    def with_plain_sizes(
        output: Any, sent: Any, output_split_sizes: Any = None, input_split_sizes: Any = None, **kwargs: Any
    ) -> Any:
        given = (output_split_sizes, input_split_sizes)
        plain = [None if sizes is None else [int(size) for size in sizes] for sizes in given]
        return all_to_all_single(output, sent, *plain, **kwargs)

    dist.all_to_all_single = with_plain_sizes


def _patch_gloo() -> None:
    """Let gloo exchange parts of different sizes, as experts spread over tensor-parallel ranks need."""
    all_gather, reduce_scatter = dist.all_gather, dist.reduce_scatter

    @functools.wraps(all_gather)
    def gather_any(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        if len({part.shape for part in tensor_list}) <= 1:
            return all_gather(tensor_list, tensor, group=group, async_op=async_op)
        assert not async_op
        for rank, part in enumerate(tensor_list):
            if rank == dist.get_rank(group):
                part.copy_(tensor)
            dist.broadcast(part, group_src=rank, group=group)
        return None

    @functools.wraps(reduce_scatter)
    def scatter_any(output: Any, input_list: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, **kwargs: Any) -> Any:
        if len({part.shape for part in input_list}) <= 1:
            return reduce_scatter(output, input_list, op=op, group=group, **kwargs)
        for rank, part in enumerate(input_list):
            total = part.clone()
            dist.reduce(total, group_dst=rank, op=op, group=group)
            if rank == dist.get_rank(group):
                output.copy_(total)
        return None

    dist.all_gather = gather_any
    dist.reduce_scatter = scatter_any
