"""Tokens sent to the ranks of their experts by the kernels of DeepEP (https://github.com/deepseek-ai/DeepEP)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from rl_dtensor.parallel.dispatch import Grouped, group_tokens, nothing


def deep_ep_buffer() -> Any:
    """Return the class of DeepEP's buffers for training.

    Raises:
        ValueError: If the package cannot be imported.
    """
    try:
        return importlib.import_module("deep_ep").Buffer
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"dtensor_cfg.expert_dispatcher=deep_ep needs DeepEP, which cannot be imported ({error}); no package index "
            "has it: build it in the environment that this run is started from, with cluster.worker_envs=shared, or "
            "set expert_dispatcher=all_to_all"
        ) from error


class DeepEP:
    """Sends each token once to every rank that has experts of it, through NVLink and between nodes through RDMA.

    The host waits for the number of tokens in each forward pass and recomputation, and not in backward passes.

    Args:
        group: Ranks that share the experts.
        hidden: Width of hidden states, which are bfloat16.
        fused: False to index also where kernels run.

    Raises:
        ValueError: If the package cannot be imported.
    """

    def __init__(self, group: dist.ProcessGroup, hidden: int, *, fused: bool) -> None:
        kind = deep_ep_buffer()
        size = dist.get_world_size(group)
        hidden_bytes = hidden * torch.bfloat16.itemsize
        configs = [kind.get_dispatch_config(size), kind.get_combine_config(size)]
        nvlink = max(config.get_nvl_buffer_size_hint(hidden_bytes, size) for config in configs)
        rdma = max(config.get_rdma_buffer_size_hint(hidden_bytes, size) for config in configs)
        self._buffer = kind(group, nvlink, rdma)
        self._size = size
        self._fused = fused

    def __call__(
        self, hidden: Tensor, ids: Tensor, weights: Tensor, num_experts: int, meanwhile: Callable[[], None] = nothing
    ) -> Grouped:
        """Dispatch tokens; see `rl_dtensor.parallel.dispatch.Dispatch`."""
        trip = _Trip(self._buffer, num_experts * self._size)
        rows, row_weights, row_ids = _Dispatch.apply(hidden, weights.float(), ids, trip)
        meanwhile()
        trip.event.current_stream_wait()
        own = row_ids.where(row_ids >= 0, num_experts)
        row_weights = row_weights.to(weights.dtype)
        grouped = group_tokens(rows, own, row_weights, num_experts, trip.num_choices, fused=self._fused)

        def combine(outputs: Tensor) -> Tensor:
            return cast("Tensor", _Combine.apply(grouped.combine(outputs), trip))

        return Grouped(grouped.rows, grouped.weights, grouped.ends, combine)


@dataclass
class _Trip:
    """One dispatch: the buffer, and its results for the ways back.

    Args:
        buffer: DeepEP's buffer.
        num_experts: Number of experts of all ranks.
    """

    buffer: Any
    num_experts: int
    handle: Any = None
    event: Any = None
    num_choices: int = 0


class _Dispatch(torch.autograd.Function):
    """Returns copies of tokens, float32 weights of their choices and ids of these; -1 is an expert elsewhere."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weights: Tensor, ids: Tensor, trip: _Trip) -> tuple[Tensor, Tensor, Tensor]:
        ctx.trip = trip
        by_rank, by_node, by_expert, goes, _ = trip.buffer.get_dispatch_layout(ids, trip.num_experts)
        rows, row_ids, row_weights, counts, trip.handle, trip.event = trip.buffer.dispatch(
            hidden.contiguous(),
            topk_idx=ids.contiguous(),
            topk_weights=weights.contiguous(),
            num_tokens_per_rank=by_rank,
            num_tokens_per_rdma_rank=by_node,
            is_token_in_rank=goes,
            num_tokens_per_expert=by_expert,
            async_finish=True,
        )
        trip.num_choices = sum(counts)
        ctx.mark_non_differentiable(row_ids)
        return rows, row_weights, row_ids

    @staticmethod
    def backward(ctx: Any, by_rows: Tensor, by_weights: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        trip, weights = ctx.trip, by_weights.contiguous()
        by_hidden, by_choices, _ = trip.buffer.combine(by_rows.contiguous(), trip.handle, topk_weights=weights)
        return by_hidden, by_choices, None, None


class _Combine(torch.autograd.Function):
    """Sums the results of all ranks for each token."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        return trip.buffer.combine(outputs.contiguous(), trip.handle)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.trip.buffer.dispatch(grad.contiguous(), handle=ctx.trip.handle)[0], None
