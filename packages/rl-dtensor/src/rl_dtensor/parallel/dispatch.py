"""Tokens brought to the experts that they chose, and the results of these brought back.

All-to-all exchanges send tokens in one group, or first between nodes. If there are many tokens they go in chunks, so
that one chunk travels while experts compute on another. The kernels of DeepEP (https://github.com/deepseek-ai/DeepEP)
send tokens through NVLink and RDMA.
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
from rl_dtensor.parallel.collectives import start_exchange

MIN_CHUNKED_TOKENS = 16384
"""Tokens of a microbatch on a rank from which two chunks pay.

For a layer of Qwen3-30B-A3B on H100s, with its experts on 8 ranks, a second chunk costs 65 launches, and 1 GB of memory
traffic because weights are read and their gradients added once more. It hides half of the exchanges, 0.12 us a token.
The device gains by that from 5,000 tokens. The host takes 70 to 125 us for a launch with its part of the backward pass,
and the device 1.5 us a token, so that the host keeps ahead from 10,000 to 17,000 tokens.
"""

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Contexts of a checkpoint's forward pass and of its recomputation, for `torch.utils.checkpoint`."""


class Grouped(NamedTuple):
    """Copies of tokens that chose this rank's experts, grouped by expert.

    Args:
        rows: `[rows, hidden]`.
        weights: `[rows]`, the router's weight of the expert's result for each row.
        ends: int32 `[experts]`, the end of the rows of each of this rank's experts. Rows after the last one belong to
            none and may have any values.
        combine: Function from the weighted outputs of the experts, `[rows, hidden]`, to their sum for each token,
            `[tokens, hidden]`.
    """

    rows: Tensor
    weights: Tensor
    ends: Tensor
    combine: Callable[[Tensor], Tensor]


Compute = Callable[[Grouped], Tensor]
"""From the rows of a rank's experts to their weighted outputs, `[rows, hidden]`."""


def nothing() -> None:
    """Do nothing while tokens are on their way."""


class Dispatch(Protocol):
    """Brings the tokens of a layer to their experts, and the results back. Gradients flow through both ways."""

    def __call__(
        self,
        hidden: Tensor,
        ids: Tensor,
        weights: Tensor,
        num_experts: int,
        compute: Compute,
        meanwhile: Callable[[], None] = nothing,
    ) -> Tensor:
        """Return the sum of the weighted outputs of each token's experts, `[tokens, hidden]`; collective over the ranks
        that share the experts.

        Args:
            hidden: `[tokens, hidden]`.
            ids: Chosen experts of all ranks, int64 `[tokens, k]`.
            weights: Weights of these, `[tokens, k]`.
            num_experts: Number of experts of each rank.
            compute: Computes the experts of this rank, on all tokens or on one chunk of them after another.
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

    All chunks leave before the first products. Then the products of a chunk run while the next chunk arrives and the
    results of the one before return, and the backward pass does the same in the reverse order. Each chunk adds its
    part to the gradients of the experts' weights.

    Args:
        groups: The ranks that share the experts; or first the ranks at the same place of each node, then the ranks of a
            node. Experts are in the order of nodes, and in a node of ranks.
        fused: False to index also where kernels run.
        num_chunks: Number of chunks that the tokens of a pass are split into, the same on all ranks.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], *, fused: bool, num_chunks: int = 1) -> None:
        self._groups = groups
        self._dims = [dist.get_world_size(group) for group in groups]
        self._fused = fused
        self._num_chunks = num_chunks

    def __call__(
        self,
        hidden: Tensor,
        ids: Tensor,
        weights: Tensor,
        num_experts: int,
        compute: Compute,
        meanwhile: Callable[[], None] = nothing,
    ) -> Tensor:
        """Dispatch tokens; see `Dispatch`."""
        # Some chunks are empty if there are few tokens, because the other ranks may have more.
        each, more = divmod(len(hidden), self._num_chunks)
        lengths = [each + (number < more) for number in range(self._num_chunks)]
        sizes = sizes_of_exchange(lambda: self._ask(ids, lengths, num_experts))

        def parts(tokens: Tensor) -> Sequence[Tensor]:
            return tokens.split(lengths) if self._num_chunks > 1 else [tokens]

        trips = [
            _RoundTrip(*chunk, self._hops(own, num_experts), own.num_choices, fused=self._fused)
            for chunk, own in zip(zip(parts(hidden), parts(ids), parts(weights), strict=True), sizes, strict=True)
        ]
        meanwhile()
        returning = [trip.send_back(compute(trip.arrive(num_experts))) for trip in trips]
        out = [finish() for finish in returning]
        return torch.cat(out) if len(out) > 1 else out[0]

    def _hops(self, sizes: ExchangeSizes, num_experts: int) -> list[_Hop]:
        hops, num_below = [], num_experts * math.prod(self._dims)
        for group, (sent, received) in zip(self._groups, sizes.hops, strict=True):
            num_below //= len(sent)
            hops.append(_Hop(group, num_below, sent, received))
        return hops

    def _ask(self, ids: Tensor, lengths: Sequence[int], num_experts: int) -> list[ExchangeSizes]:
        """Count the tokens of chunks of these lengths with the other ranks, and wait for the numbers."""

        def summed(numbers: Tensor) -> Tensor:
            return torch.stack([chunk.sum(0) for chunk in numbers.split(lengths)], 1)

        # The table has numbers of this rank's tokens, `[ranks of the first group, chunks, n]`: first the tokens for
        # each rank of it; then, for each of the next group, the tokens that it passes on to that; last the choices of
        # experts.
        ranks = ids // num_experts
        choices = torch.zeros(len(ids), math.prod(self._dims), dtype=torch.int32, device=ids.device)
        choices.scatter_add_(1, ranks, torch.ones_like(ranks, dtype=torch.int32))
        choices = choices.view(len(ids), *self._dims)
        goes = choices > 0
        table = summed(torch.stack([goes, choices], -1))
        for _ in self._dims[1:]:
            goes = goes.any(-1)
            table = torch.cat([summed(goes)[..., None], table.flatten(-2)], -1)
        asked = []
        for group, after in zip(self._groups, [*self._dims[1:], 1], strict=True):
            received = torch.empty_like(table)
            dist.all_to_all_single(received, table, group=group)
            asked.append(torch.stack([table[..., 0], received[..., 0]], -1))
            arrived = received[..., 1:].sum(0)  # The sum counts the arrivals from all ranks.
            table = arrived.view(len(lengths), after, -1).transpose(0, 1).contiguous()
        numbers = torch.cat([*asked, table.expand(1, -1, 2)]).tolist()
        found = []
        for chunk in zip(*numbers, strict=True):
            hops, start = [], 0
            for size in self._dims:
                sent, received_numbers = zip(*chunk[start : start + size], strict=True)
                hops.append((sent, received_numbers))
                start += size
            found.append(ExchangeSizes(tuple(hops), chunk[start][0]))
        return found


def default_chunks(num_tokens: int) -> int:
    """Return the number of chunks for microbatches of this maximum number of tokens on a rank."""
    return 2 if num_tokens >= MIN_CHUNKED_TOKENS else 1


class _Hop(NamedTuple):
    """An exchange on the way to experts.

    Args:
        group: Ranks that take part.
        num_below: Number of experts that a rank of the group leads to.
        sent: Number of tokens for each rank.
        received: Number of tokens from each rank.
    """

    group: dist.ProcessGroup
    num_below: int
    sent: Sequence[int]
    received: Sequence[int]


class _RoundTrip:
    """The way of tokens to their experts and back. The first exchange starts when it is made.

    Args:
        hidden: `[tokens, hidden]`.
        ids: Chosen experts of all ranks, int64 `[tokens, k]`.
        weights: Weights of these, `[tokens, k]`.
        hops: Exchanges on the way.
        num_choices: Number of choices of this rank's experts.
        fused: False to index also where kernels run.
    """

    def __init__(
        self, hidden: Tensor, ids: Tensor, weights: Tensor, hops: Sequence[_Hop], num_choices: int, *, fused: bool
    ) -> None:
        self._hops, self._num_choices, self._fused, self._dtype = hops, num_choices, fused, weights.dtype
        self._places: list[Tensor] = []
        self._combine: Callable[[Tensor], Tensor] | None = None
        self._arriving = self._leave(hidden, ids, weights)

    def _leave(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> list[Callable[[], Tensor]]:
        """Start the next exchange, of choices and of hidden states."""
        hop = self._hops[len(self._places)]
        places = _places(ids, hop.num_below, len(hop.sent))
        self._places.append(places)
        # Ids and weights go in one tensor, whose dtype represents numbers of experts exactly.
        dtype = torch.promote_types(self._dtype, torch.float32)
        parts = torch.cat([ids.to(dtype), weights.to(dtype)], 1), hidden
        rows = [spread(part, places, sum(hop.sent), fused=self._fused) for part in parts]
        return [start_exchange(each, hop.sent, hop.received, hop.group) for each in rows]

    def arrive(self, num_experts: int) -> Grouped:
        """Wait for the tokens of all ranks, and group them by this rank's experts."""
        for number, hop in enumerate(self._hops, 1):
            # They are dropped here, so that a token is in memory only once while experts compute.
            choices, hidden = (self._arriving.pop(0)() for _ in range(2))
            # An expert gets its number among this rank's experts, and `num_below` if it is elsewhere.
            all_ids, all_weights = choices.chunk(2, 1)
            own = all_ids.detach().long() - dist.get_rank(hop.group) * hop.num_below
            ids = own.clamp(max=hop.num_below).masked_fill_(own < 0, hop.num_below)
            weights = all_weights.to(self._dtype)
            if number < len(self._hops):
                self._arriving = self._leave(hidden, ids, weights)
        grouped = group_tokens(hidden, ids, weights, num_experts, self._num_choices, fused=self._fused)
        self._combine = grouped.combine
        return grouped

    def send_back(self, outputs: Tensor) -> Callable[[], Tensor]:
        """Start to return the results, and return the function that waits for the results of this rank's tokens."""
        assert self._combine is not None
        finish = partial(self._combine, outputs)
        for hop, places in zip(reversed(self._hops), reversed(self._places), strict=True):
            arrive = start_exchange(finish(), hop.received, hop.sent, hop.group)
            finish = partial(self._collect, arrive, places)
        return finish

    def _collect(self, arrive: Callable[[], Tensor], places: Tensor) -> Tensor:
        return collect(arrive(), places, fused=self._fused)


def _places(ids: Tensor, num_below: int, size: int) -> Tensor:
    """Return int32 `[tokens, ranks]`, the row of the copy of a token for each rank of a group, or -1.

    Rows are in the order of ranks, and for each rank of tokens.

    Args:
        ids: `[tokens, k]`; `num_below * size` and more are experts elsewhere.
        num_below: Number of experts that a rank of the group leads to.
        size: Number of ranks in the group.
    """
    # One for each copy. The column at the end is of experts elsewhere.
    goes = torch.zeros(len(ids), size + 1, dtype=torch.int32, device=ids.device).scatter_(1, ids // num_below, 1)
    goes = goes[:, :size]
    numbers = goes.T.flatten().cumsum(0, dtype=torch.int32).view(size, len(ids)).T
    return (goes * numbers).sub_(1)


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
        self.sizes: list[Sequence[ExchangeSizes]] = []
        self.position: int | None = None


_tape: ContextVar[_Tape | None] = ContextVar("_tape", default=None)


def sizes_of_exchange(ask: Callable[[], Sequence[ExchangeSizes]]) -> Sequence[ExchangeSizes]:
    """Return the sizes of the exchanges of each chunk: the forward pass's sizes if it is recomputed, otherwise the
    result of `ask`.

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
        self,
        hidden: Tensor,
        ids: Tensor,
        weights: Tensor,
        num_experts: int,
        compute: Compute,
        meanwhile: Callable[[], None] = nothing,
    ) -> Tensor:
        """Dispatch tokens; see `Dispatch`."""
        trip = _DeepEPTrip(self._buffer, num_experts * self._size)
        rows, row_weights, row_ids = _Dispatch.apply(hidden, weights.float(), ids, trip)
        meanwhile()
        trip.event.current_stream_wait()
        own = row_ids.where(row_ids >= 0, num_experts)
        row_weights = row_weights.to(weights.dtype)
        grouped = group_tokens(rows, own, row_weights, num_experts, trip.num_choices, fused=self._fused)
        return cast("Tensor", _Combine.apply(grouped.combine(compute(grouped)), trip))


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
