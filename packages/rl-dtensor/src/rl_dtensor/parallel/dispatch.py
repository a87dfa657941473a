"""Tokens brought to the experts that they chose, and the results of these brought back.

All-to-all exchanges send tokens in one group, or first between nodes. The kernels of DeepEP
(https://github.com/deepseek-ai/DeepEP) do it through NVLink and RDMA.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from rl_core.torch.kernels.permutation import collect, group_by_expert, spread, spread_weighted
from rl_dtensor.parallel.collectives import exchange, start_exchange

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Contexts of a checkpoint's forward pass and of its recomputation, for `torch.utils.checkpoint`."""


class Grouped(NamedTuple):
    """Copies of tokens that chose this rank's experts, grouped by expert.

    Args:
        rows: `[rows, hidden]`.
        weights: `[rows]`, the router's weight of the expert's result for each row.
        ends: int32 `[experts]`, the end of the rows of each of this rank's experts. Rows after the last one belong to
            none and may have any values.
        combine: Function from the weighted outputs of the experts, `[rows, hidden]`, to their sum for each token that
            was dispatched, `[tokens, hidden]`; collective if the dispatch was.
    """

    rows: Tensor
    weights: Tensor
    ends: Tensor
    combine: Callable[[Tensor], Tensor]


def nothing() -> None:
    """Do nothing while tokens are on their way."""


class Dispatch(Protocol):
    """Brings the tokens of a layer to their experts. Gradients flow through both ways."""

    def __call__(
        self, hidden: Tensor, ids: Tensor, weights: Tensor, num_experts: int, meanwhile: Callable[[], None] = nothing
    ) -> Grouped:
        """Dispatch tokens; collective over the ranks that share the experts.

        Args:
            hidden: `[tokens, hidden]`.
            ids: Chosen experts of all ranks, int64 `[tokens, k]`.
            weights: Weights of these, `[tokens, k]`.
            num_experts: Number of experts of each rank.
            meanwhile: Called once while tokens are on their way, for other work of the device.
        """


def group_tokens(
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    num_experts: int,
    num_choices: int | None = None,
    *,
    fused: bool = True,
) -> Grouped:
    """Group tokens by expert on the rank that has the experts.

    Args:
        hidden: `[tokens, hidden]`.
        ids: Chosen experts, int64 `[tokens, k]`; `num_experts` means an expert elsewhere.
        weights: Weights of these, `[tokens, k]`.
        num_experts: Number of experts.
        num_choices: Number of choices of experts that are here; None for an upper bound, which the host knows without
            waiting for the device.
        fused: False to index also where kernels run.
    """
    places, ends = group_by_expert(ids, num_experts)
    num_rows = ids.numel() if num_choices is None else num_choices
    if not num_rows:  # All parameters need a gradient, even of zeros: FSDP2 reduces them together.
        num_rows, ends = 1, ends + 1
    rows, row_weights = spread_weighted(hidden, weights, places, num_rows, fused=fused)
    return Grouped(rows, row_weights, ends, partial(collect, places=places, fused=fused))


class AllToAll:
    """Sends each token once to every rank that has experts of it, with the ids and weights of its choices.

    A rank adds up the results of its experts for a token before it sends them back. The host waits once in a pass, for
    the numbers of tokens; the backward pass and recomputation use them again.

    With two groups a token goes once to every node that has experts of it, and from there to the ranks inside.

    Args:
        groups: The ranks that share the experts; or first the ranks at the same place of each node, then the ranks of a
            node. Experts are in the order of nodes, and in a node of ranks.
        fused: False to index also where kernels run.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], *, fused: bool) -> None:
        self._groups = groups
        self._dims = [dist.get_world_size(group) for group in groups]
        self._fused = fused

    def __call__(
        self, hidden: Tensor, ids: Tensor, weights: Tensor, num_experts: int, meanwhile: Callable[[], None] = nothing
    ) -> Grouped:
        """Dispatch tokens; see `Dispatch`."""
        sizes = sizes_of_exchange(lambda: self._ask(ids, num_experts))
        hops: list[tuple[Tensor, Sequence[int], Sequence[int], dist.ProcessGroup]] = []
        num_below = num_experts * math.prod(self._dims)
        for group, (sent, received) in zip(self._groups, sizes.hops, strict=True):
            num_below //= len(sent)
            places = _places(ids, num_below, len(sent))
            # Ids and weights go in one tensor, whose dtype represents numbers of experts exactly.
            dtype = torch.promote_types(weights.dtype, torch.float32)
            packed = spread(torch.cat([ids.to(dtype), weights.to(dtype)], 1), places, sum(sent), fused=self._fused)
            choices = exchange(packed, sent, received, group)
            arrive = start_exchange(spread(hidden, places, sum(sent), fused=self._fused), sent, received, group)
            if not hops:
                meanwhile()
            hidden = arrive()
            # An expert gets its number among this rank's experts, and `num_below` if it is elsewhere.
            all_ids, all_weights = choices.chunk(2, 1)
            own = all_ids.detach().long() - dist.get_rank(group) * num_below
            ids, weights = own.where((own >= 0) & (own < num_below), num_below), all_weights.to(weights.dtype)
            hops.append((places, sent, received, group))
        grouped = group_tokens(hidden, ids, weights, num_experts, sizes.num_choices, fused=self._fused)

        def combine(outputs: Tensor) -> Tensor:
            out = grouped.combine(outputs)
            for places, sent, received, group in reversed(hops):
                out = collect(exchange(out, received, sent, group), places, fused=self._fused)
            return out

        return Grouped(grouped.rows, grouped.weights, grouped.ends, combine)

    def _ask(self, ids: Tensor, num_experts: int) -> ExchangeSizes:
        """Count tokens with the other ranks, and wait for the numbers."""
        # The table has numbers of this rank's tokens, `[ranks of the first group, n]`: first the tokens for each rank
        # of it; then, for each of the next group, the tokens that it passes on to that; last the choices of experts.
        num_ranks = math.prod(self._dims)
        ranks = ids // num_experts
        goes = torch.zeros(len(ids), num_ranks, dtype=torch.bool, device=ids.device).scatter_(1, ranks, True)
        chosen = torch.zeros(num_ranks, dtype=torch.int64, device=ids.device)
        chosen.scatter_add_(0, ranks.flatten(), torch.ones_like(ranks).flatten())
        goes = goes.view(len(ids), *self._dims)
        table = torch.stack([goes.sum(0), chosen.view(self._dims)], -1)
        for _ in self._dims[1:]:
            goes = goes.any(-1)
            table = torch.cat([goes.sum(0)[..., None], table.flatten(-2)], -1)
        asked = []
        for group, after in zip(self._groups, [*self._dims[1:], 1], strict=True):
            received = torch.empty_like(table)
            dist.all_to_all_single(received, table, group=group)
            asked.append(torch.stack([table[:, 0], received[:, 0]], 1))
            table = received[:, 1:].sum(0).view(after, -1)  # The sum counts the arrivals from all ranks.
        numbers = torch.cat([*asked, table.expand(1, 2)]).tolist()
        hops = []
        for size in self._dims:
            sent, received_numbers = zip(*numbers[:size], strict=True)
            hops.append((sent, received_numbers))
            numbers = numbers[size:]
        return ExchangeSizes(tuple(hops), numbers[0][0])


def _places(ids: Tensor, num_below: int, size: int) -> Tensor:
    """Return int32 `[tokens, ranks]`, the row of the copy of a token for each rank of a group, or -1.

    Rows are in the order of ranks, and for each rank of tokens.

    Args:
        ids: `[tokens, k]`; `num_below * size` and more are experts elsewhere.
        num_below: Number of experts that a rank of the group leads to.
        size: Number of ranks in the group.
    """
    goes = torch.zeros(len(ids), size + 1, dtype=torch.bool, device=ids.device).scatter_(1, ids // num_below, True)
    goes = goes[:, :size]
    rows = (goes.T.flatten().cumsum(0) - 1).view(size, len(ids)).T
    return rows.where(goes, -1).to(torch.int32)


class ExchangeSizes(NamedTuple):
    """Numbers of tokens that a rank exchanges in a layer.

    Args:
        hops: Tokens sent to and received from each rank of a group, for each group that tokens pass through.
        num_choices: Number of choices of this rank's experts.
    """

    hops: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    num_choices: int


class _Tape:
    """Sizes of the exchanges of one checkpoint, in order; recomputation reads them from a position."""

    def __init__(self) -> None:
        self.sizes: list[ExchangeSizes] = []
        self.position: int | None = None


_tape: ContextVar[_Tape | None] = ContextVar("_tape", default=None)


def sizes_of_exchange(ask: Callable[[], ExchangeSizes]) -> ExchangeSizes:
    """Return the sizes of an exchange: the forward pass's sizes if it is recomputed, otherwise the result of `ask`.

    Args:
        ask: Function that counts tokens with the other ranks and waits for the numbers; collective.
    """
    tape = _tape.get()
    if tape is None:
        return ask()
    if tape.position is None:
        tape.sizes.append(ask())
        return tape.sizes[-1]
    tape.position += 1
    return tape.sizes[tape.position - 1]


def keeping_sizes(others: Callable[[], Contexts] | None = None) -> Contexts:
    """Return the contexts of a checkpoint whose recomputation repeats exchanges without asking for their sizes.

    Args:
        others: Function that returns further contexts to enter; None if there are none.
    """
    tape = _Tape()
    forward, recomputation = others() if others is not None else (ExitStack(), ExitStack())
    return _Using(tape, None, forward), _Using(tape, 0, recomputation)


class _Using(AbstractContextManager[None]):
    """Records sizes, or replays them from a position, inside another context.

    It is a class because a graph that is kept enters the context of its recomputation again.
    """

    def __init__(self, tape: _Tape, position: int | None, inner: AbstractContextManager[Any]) -> None:
        self._tape = tape
        self._position = position
        self._inner = inner

    def __enter__(self) -> None:
        self._inner.__enter__()
        self._tape.position = self._position
        self._token = _tape.set(self._tape)

    def __exit__(self, *error: Any) -> bool | None:
        _tape.reset(self._token)
        return self._inner.__exit__(*error)


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
        """Dispatch tokens; see `Dispatch`."""
        trip = _DeepEPTrip(self._buffer, num_experts * self._size)
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
class _DeepEPTrip:
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
    def forward(
        ctx: Any, hidden: Tensor, weights: Tensor, ids: Tensor, trip: _DeepEPTrip
    ) -> tuple[Tensor, Tensor, Tensor]:
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
    def forward(ctx: Any, outputs: Tensor, trip: _DeepEPTrip) -> Tensor:
        ctx.trip = trip
        return trip.buffer.combine(outputs.contiguous(), trip.handle)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.trip.buffer.dispatch(grad.contiguous(), handle=ctx.trip.handle)[0], None
