"""Work inside a rank of a pool: tokens that go to experts of all ranks and back, by each dispatcher."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from types import ModuleType
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rl_core.selfcheck.rank_pool import Rank
from rl_core.torch.process_group import join_process_group
from rl_dtensor.parallel.dispatch import AllToAll, DeepEP, Dispatch, Grouped, keeping_sizes

HIDDEN, PER_RANK, NUM_CHOSEN = 6, 2, 3
Routing = Sequence[Sequence[int]]
"""Experts of the tokens of a rank."""


class BufferOnGloo:
    """`deep_ep.Buffer` as its documentation describes it, without its kernels."""

    def __init__(self, group: dist.ProcessGroup, nvlink: int, rdma: int) -> None:
        self.group = group
        self.size = dist.get_world_size(group)

    @staticmethod
    def get_dispatch_config(size: int) -> type[Config]:
        return Config

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, ids: Tensor, num_experts: int) -> tuple[Tensor | Event | None, ...]:
        goes = torch.stack([((ids // (num_experts // self.size)) == rank).any(1) for rank in range(self.size)], 1)
        return goes.sum(0), None, torch.bincount(ids.flatten(), minlength=num_experts), goes, Event()

    def dispatch(
        self,
        x,
        handle=None,
        *,
        topk_idx=None,
        topk_weights=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        **_,
    ):
        if handle is not None:
            return self._to_ranks(x, handle), None, None, None, None, Event()
        per_rank = len(num_tokens_per_expert) // self.size
        sent = is_token_in_rank.sum(0).tolist()
        received = [torch.zeros((), dtype=torch.int64) for _ in sent]
        everyone = [torch.zeros(self.size, dtype=torch.int64) for _ in sent]
        dist.all_gather(everyone, torch.tensor(sent), group=self.group)
        received = [int(each[dist.get_rank(self.group)]) for each in everyone]
        handle = is_token_in_rank, sent, received
        own = self._to_ranks(topk_idx, handle) - dist.get_rank(self.group) * per_rank
        own = own.where((own >= 0) & (own < per_rank), -1)
        weights = self._to_ranks(topk_weights, handle).where(own >= 0, 0.0)
        counts = torch.bincount(own[own >= 0], minlength=per_rank).tolist()
        return self._to_ranks(x, handle), own, weights, counts, handle, Event()

    def combine(self, x, handle, topk_weights=None):
        weights = None if topk_weights is None else self._from_ranks(topk_weights, handle)
        return self._from_ranks(x, handle), weights, Event()

    def _to_ranks(self, x, handle):
        goes, sent, received = handle
        rows = torch.cat([x[goes[:, rank]] for rank in range(self.size)])
        out = x.new_empty((sum(received), *x.shape[1:]))
        dist.all_to_all_single(out, rows, received, sent, group=self.group)
        return out

    def _from_ranks(self, x, handle):
        goes, sent, received = handle
        back = x.new_empty((sum(sent), *x.shape[1:]))
        dist.all_to_all_single(back, x, sent, received, group=self.group)
        total = x.new_zeros((len(goes), *x.shape[1:]))
        for rank, rows in enumerate(back.split(sent)):
            total[goes[:, rank]] += rows
        return total


class Config:
    @staticmethod
    def get_nvl_buffer_size_hint(hidden_bytes: int, size: int) -> int:
        return hidden_bytes * size

    get_rdma_buffer_size_hint = get_nvl_buffer_size_hint


class Event:
    def current_stream_wait(self) -> None:
        pass


def dispatchers(world: int, kind: str, num_chunks: int = 1) -> Dispatch:
    if kind == "deep_ep":
        library = ModuleType("deep_ep")
        library.Buffer = BufferOnGloo
        with mock.patch.dict(sys.modules, {"deep_ep": library}):
            return DeepEP(dist.group.WORLD, HIDDEN, fused=True)
    if kind == "flat":
        return AllToAll([dist.group.WORLD], fused=True, num_chunks=num_chunks)
    node = world // 2
    between = [dist.new_group([place, place + node]) for place in range(node)]
    inside = [dist.new_group(list(range(start, start + node))) for start in (0, node)]
    rank = dist.get_rank()
    return AllToAll([between[rank % node], inside[rank // node]], fused=True, num_chunks=num_chunks)


def passes(rank: Rank, kind: str, chosen: Routing, num_chunks: int = 1) -> dict[str, Tensor]:
    """Outputs of this rank's tokens, and the gradients by these, by their weights and by this rank's experts."""
    world = rank.rendezvous.world_size
    join_process_group(rank.rendezvous)
    try:
        dispatch = dispatchers(world, kind, num_chunks)
        hidden, weights = tokens(rank.rendezvous.rank, len(chosen))
        experts = all_experts(world)[rank.rendezvous.rank * PER_RANK :][:PER_RANK].clone().requires_grad_()
        ids = torch.tensor(chosen, dtype=torch.int64).view(-1, NUM_CHOSEN)

        def compute(grouped: Grouped) -> Tensor:
            starts = [0, *grouped.ends.tolist()]
            outputs = [
                grouped.rows[start:end] @ each for start, end, each in zip(starts, starts[1:], experts, strict=False)
            ]
            filler = grouped.rows[starts[-1] :] * 0.0
            return torch.cat([*outputs, filler]) * grouped.weights[:, None]

        out = dispatch(hidden, ids, weights, PER_RANK, compute)
        out.sin().sum().backward()
        return {"out": out.detach(), "hidden": hidden.grad, "weights": weights.grad, "experts": experts.grad}
    finally:
        dist.destroy_process_group()


def tokens(rank: int, count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(count, HIDDEN, dtype=torch.float64, generator=generator)
    weights = torch.rand(count, NUM_CHOSEN, dtype=torch.float64, generator=generator)
    return hidden.requires_grad_(), weights.requires_grad_()


def all_experts(world: int) -> Tensor:
    generator = torch.Generator().manual_seed(99)
    return torch.randn(world * PER_RANK, HIDDEN, HIDDEN, dtype=torch.float64, generator=generator)


def expected(routings: Sequence[Routing]) -> list[dict[str, Tensor]]:
    """What `passes` returns on each rank, from experts that are all here."""
    experts = all_experts(len(routings)).requires_grad_()
    found = []
    for rank, chosen in enumerate(routings):
        hidden, weights = tokens(rank, len(chosen))
        ids = torch.tensor(chosen, dtype=torch.int64).view(-1, NUM_CHOSEN)
        out = (torch.einsum("th,tkhf->tkf", hidden, experts[ids]) * weights[..., None]).sum(1)
        out.sin().sum().backward()
        found.append({"out": out.detach(), "hidden": hidden.grad, "weights": weights.grad})
    by_rank = experts.grad.split(PER_RANK)
    return [{**each, "experts": grad} for each, grad in zip(found, by_rank, strict=True)]


def exchanges_of_recomputation(rank: Rank, num_chunks: int) -> tuple[Counter[str], Counter[str]]:
    """Exchanges of numbers and of tokens in a forward pass, and in a backward pass that computes it again."""
    join_process_group(rank.rendezvous)
    try:
        dispatch = dispatchers(rank.rendezvous.world_size, "flat", num_chunks)
        hidden, weights = tokens(0, 4)
        ids = torch.arange(4 * NUM_CHOSEN).view(4, NUM_CHOSEN) % (PER_RANK * rank.rendezvous.world_size)

        def layer(hidden: Tensor, weights: Tensor) -> Tensor:
            return dispatch(hidden, ids, weights, PER_RANK, lambda grouped: grouped.rows * grouped.weights[:, None])

        counts: Counter[str] = Counter()
        original = dist.all_to_all_single

        def counted(out: Tensor, *args, **kwargs):
            counts["tokens" if out.is_floating_point() else "numbers"] += 1
            return original(out, *args, **kwargs)

        with mock.patch.object(dist, "all_to_all_single", counted):
            out = checkpoint(layer, hidden, weights, use_reentrant=False, context_fn=keeping_sizes)
            forward = counts.copy()
            out.sin().sum().backward()
        return forward, counts - forward
    finally:
        dist.destroy_process_group()
