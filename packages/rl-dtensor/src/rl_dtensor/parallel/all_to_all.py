"""Tokens sent to the ranks of their experts by all-to-all exchanges, in one group or first between nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_core.torch.kernels.permutation import collect, spread
from rl_dtensor.parallel.collectives import exchange, start_exchange
from rl_dtensor.parallel.dispatch import Grouped, group_tokens, nothing


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
        """Dispatch tokens; see `rl_dtensor.parallel.dispatch.Dispatch`."""
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


Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Contexts of a checkpoint's forward pass and of its recomputation, for `torch.utils.checkpoint`."""


@dataclass(frozen=True)
class ExchangeSizes:
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
