"""Tokens sent to the ranks of their experts by all-to-all exchanges, in one group or first between nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rl_core.torch.kernels.permutation import collect, spread
from rl_dtensor.parallel.collectives import exchange, start_exchange
from rl_dtensor.parallel.dispatch import Grouped, group_tokens, nothing
from rl_dtensor.parallel.kept_sizes import ExchangeSizes, sizes_of_exchange


@dataclass(frozen=True)
class _Hop:
    """One exchange of tokens.

    Args:
        places: int32 `[tokens, ranks]`, the row of the copy of a token for each rank of the group, or -1.
        sent: Number of rows for each rank.
        received: Number of rows from each rank.
        group: Ranks that take part.
    """

    places: Tensor
    sent: Sequence[int]
    received: Sequence[int]
    group: dist.ProcessGroup


class AllToAll:
    """Sends each token once to every rank that has experts of it, with the ids and weights of its choices.

    A rank adds up what its experts compute of a token before it sends that back. The host waits once in a pass, for
    the numbers of tokens; the backward pass and recomputation use them again.

    With two groups a token goes once to every node that has experts of it, and from there to the ranks inside.

    Args:
        groups: The ranks that share the experts; or first the ranks at the same place of each node, then those of a
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
        hops: list[_Hop] = []
        num_below = num_experts * math.prod(self._dims)
        for group, (sent, received) in zip(self._groups, sizes.hops, strict=True):
            num_below //= len(sent)
            hop = _Hop(_places(ids, num_below, len(sent)), sent, received, group)
            choices = self._sent(_packed(ids, weights), hop)
            arrive = start_exchange(self._copies(hidden, hop), sent, received, group)
            if not hops:
                meanwhile()
            hidden = arrive()
            ids, weights = _unpacked(choices, weights.dtype, num_below, dist.get_rank(group))
            hops.append(hop)
        grouped = group_tokens(hidden, ids, weights, num_experts, sizes.num_choices, fused=self._fused)

        def combine(outputs: Tensor) -> Tensor:
            out = grouped.combine(outputs)
            for hop in reversed(hops):
                returned = exchange(out, hop.received, hop.sent, hop.group)
                out = collect(returned, hop.places, fused=self._fused)
            return out

        return Grouped(grouped.rows, grouped.weights, grouped.ends, combine)

    def _sent(self, x: Tensor, hop: _Hop) -> Tensor:
        return exchange(self._copies(x, hop), hop.sent, hop.received, hop.group)

    def _copies(self, x: Tensor, hop: _Hop) -> Tensor:
        return spread(x, hop.places, sum(hop.sent), fused=self._fused)

    def _ask(self, ids: Tensor, num_experts: int) -> ExchangeSizes:
        """Count tokens with the other ranks, and wait for the numbers."""
        table = self._counts(ids, num_experts)
        asked = []
        for group, after in zip(self._groups, [*self._dims[1:], 1], strict=True):
            received = torch.empty_like(table)
            dist.all_to_all_single(received, table, group=group)
            asked.append(torch.stack([table[:, 0], received[:, 0]], 1))
            table = received[:, 1:].sum(0).view(after, -1)  # of what arrives here from all
        numbers = torch.cat([*asked, table.expand(1, 2)]).tolist()
        hops = []
        for size in self._dims:
            sent, received_numbers = zip(*numbers[:size], strict=True)
            hops.append((sent, received_numbers))
            numbers = numbers[size:]
        return ExchangeSizes(tuple(hops), numbers[0][0])

    def _counts(self, ids: Tensor, num_experts: int) -> Tensor:
        """Numbers of this rank's tokens, `[ranks of the first group, n]`: those for each rank of it; then, for each of
        the next group, those that it hands on to that; and those of choices of the experts at the end."""
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
        return table


def _places(ids: Tensor, num_below: int, size: int) -> Tensor:
    """Rows of copies in the order of ranks, and for each rank of tokens.

    Args:
        ids: `[tokens, k]`; `num_below * size` and more are experts elsewhere.
        num_below: Number of experts that a rank of the group leads to.
        size: Number of ranks in the group.
    """
    goes = torch.zeros(len(ids), size + 1, dtype=torch.bool, device=ids.device).scatter_(1, ids // num_below, True)
    goes = goes[:, :size]
    rows = (goes.T.flatten().cumsum(0) - 1).view(size, len(ids)).T
    return rows.where(goes, -1).to(torch.int32)


def _packed(ids: Tensor, weights: Tensor) -> Tensor:
    """Ids and weights in one tensor `[tokens, 2 * k]`, in which numbers of experts are exact."""
    dtype = torch.promote_types(weights.dtype, torch.float32)
    return torch.cat([ids.to(dtype), weights.to(dtype)], 1)


def _unpacked(choices: Tensor, dtype: torch.dtype, num_below: int, rank: int) -> tuple[Tensor, Tensor]:
    """Ids by the number among this rank's experts, `num_below` for those elsewhere, and weights."""
    ids, weights = choices.chunk(2, 1)
    own = ids.detach().long() - rank * num_below
    return own.where((own >= 0) & (own < num_below), num_below), weights.to(dtype)
