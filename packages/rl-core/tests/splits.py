"""Ways in which trainers and engines split a model over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl_core.resharding import Box


@dataclass(frozen=True)
class Weight:
    """A tensor of a model: rows or columns are split, by tensor parallelism, as `kind` has it."""

    shape: tuple[int, ...]
    kind: str
    layer: int = 0
    expert: int | None = None


def chunk(extent: int, size: int, rank: int) -> tuple[int, int]:
    """As torch splits a dim: the last ranks may have less, or nothing."""
    width = -(-extent // size)
    return min(width * rank, extent), min(width * (rank + 1), extent)


def within(box: Box, dim: int, size: int, rank: int) -> list[Box]:
    """A rank's chunk of a box along a dim."""
    start, stop = chunk(box[dim][1] - box[dim][0], size, rank)
    if start == stop:
        return []
    return [tuple((box[dim][0] + start, box[dim][0] + stop) if at == dim else span for at, span in enumerate(box))]


def whole(shape: Sequence[int]) -> Box:
    return tuple((0, extent) for extent in shape)


def dim_of(weight: Weight) -> int | None:
    return {"rows": 0, "columns": 1}.get(weight.kind)


@dataclass(frozen=True)
class Fsdp:
    """Ranks in the order pp, replicas, shards, tp; experts are divided over `ep` of the shards."""

    pp: int = 1
    replicas: int = 1
    shards: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def world(self) -> int:
        return self.pp * self.replicas * self.shards * self.tp

    def boxes(self, weight: Weight, rank: int) -> list[Box]:
        stage, rest = divmod(rank, self.world // self.pp)
        shard, tp = divmod(rest % (self.shards * self.tp), self.tp)
        if weight.layer % self.pp != stage:
            return []
        size, tps = self.shards, self.tp
        if weight.expert is not None and self.ep > 1:
            size, tps = self.shards // self.ep, 1
            if weight.expert % (self.ep * self.tp) != (shard % self.ep) * self.tp + tp:
                return []
            shard //= self.ep
        dim = dim_of(weight)
        box = whole(weight.shape)
        if not box:
            return [box]
        parts = [box] if dim is None or tps == 1 else within(box, dim, tps, tp)
        return [cut for part in parts for cut in within(part, 0, size, shard)]


@dataclass(frozen=True)
class Megatron:
    """Ranks in the order pp, dp, tp, with virtual stages; rows of a matrix are interleaved by group."""

    pp: int = 1
    dp: int = 1
    tp: int = 1
    ep: int = 1
    virtual: int = 1
    groups: int = 2

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.tp

    def boxes(self, weight: Weight, rank: int) -> list[Box]:
        stage, rest = divmod(rank, self.dp * self.tp)
        dp, tp = divmod(rest, self.tp)
        if weight.layer // self.virtual % self.pp != stage:
            return []
        if weight.expert is not None and self.ep > 1 and weight.expert % self.ep != dp % self.ep:
            return []
        dim, box = dim_of(weight), whole(weight.shape)
        if dim is None:
            return [box]
        groups = self.groups if dim == 0 else 1
        parts = (part for group in range(groups) for part in within(box, dim, groups, group))
        return [cut for part in parts for cut in within(part, dim, self.tp, tp)]


@dataclass(frozen=True)
class Engine:
    """Replicas side by side, each with its pipeline stages side by side; experts whole by rank, or split as others."""

    tp: int = 1
    pp: int = 1
    has_ep: bool = False
    divides_dense: bool = True

    def boxes(self, weight: Weight, rank: int) -> list[Box]:
        stage, tp = divmod(rank % (self.tp * self.pp), self.tp)
        if weight.layer % self.pp != stage:
            return []
        if weight.expert is not None and self.has_ep:
            return [whole(weight.shape)] if weight.expert % self.tp == tp else []
        dim = dim_of(weight)
        if dim is None or not self.divides_dense:
            return [whole(weight.shape)]
        return within(whole(weight.shape), dim, self.tp, tp)


def cut(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)
