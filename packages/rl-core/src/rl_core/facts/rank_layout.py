"""How the ranks of a model or of an engine share it, as far as memory and time follow from that."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankLayout:
    """The ranks of a model that trains or computes logprobs.

    Args:
        tensor: Ranks that share the matrices of each layer.
        context: Ranks that share the tokens of each row.
        pipeline: Ranks that hold consecutive layers.
        chunks: Runs of consecutive layers on each of these.
        data: Ranks with different rows.
        experts: Ranks that share the experts of each layer.
        splits_tokens: True if tensor-parallel ranks share the tokens between layers too.
        is_sharded: True if the layers of a rank are shards, which are gathered for each pass.
        keeps_whole: True if whole gradients of a rank's layers may add up over microbatches.
        joins_projections: True if queries, keys and values are results of one product, which stays for the backward
            pass.
        is_fused: True if norms, rotations and gates are fused kernels, which keep only their inputs.
        recompute: `none`, `selective`, `full`, or `auto` for as little as the memory allows.
        offloads: True if parameters are in host memory and come to the device for each pass.
        recomputed: Parts of a layer that selective recomputation computes again, of which those count that the layer
            has, or else its MLP; empty if it computes everything again except products and attention.
        expert_tensor: Ranks that share the matrices of an expert; None for `tensor`.
        recomputes_tower: True if the layers of a vision tower keep only their inputs as soon as any layer is
            recomputed; otherwise they never are.
    """

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    chunks: int = 1
    data: int = 1
    experts: int = 1
    splits_tokens: bool = False
    is_sharded: bool = False
    keeps_whole: bool = False
    joins_projections: bool = False
    is_fused: bool = True
    recompute: str = "auto"
    offloads: bool = False
    recomputed: tuple[str, ...] = ()
    expert_tensor: int | None = None
    recomputes_tower: bool = False

    @property
    def expert_ranks(self) -> int:
        """Neighbouring ranks that hold different parameters of experts, in a stage."""
        return self.experts * (self.expert_tensor or self.tensor)


@dataclass(frozen=True)
class EngineLayout:
    """The ranks of a replica, and what they keep of a device.

    Args:
        tensor: Ranks that share each layer.
        pipeline: Ranks that hold consecutive layers.
        engines: Engines of a replica, each with its own requests.
        weight_bytes: Bytes of each weight.
        cache_bytes: Bytes of each value in the KV cache.
        num_sequences: Maximum number of sequences that an engine decodes at a time; None without a limit.
        share: Share of a device's memory that the engine takes; None if it takes what it needs.
        cache_size: Bytes of the KV cache of each rank; None if `share` decides.
        is_eager: True if it launches every kernel from the host, without graphs.
    """

    tensor: int = 1
    pipeline: int = 1
    engines: int = 1
    weight_bytes: float = 2.0
    cache_bytes: float = 2.0
    num_sequences: int | None = None
    share: float | None = None
    cache_size: float | None = None
    is_eager: bool = False

    @property
    def num_ranks(self) -> int:
        """Ranks of a replica."""
        return self.tensor * self.pipeline * self.engines
