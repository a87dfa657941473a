"""Routers that balance experts only by a batch's own tokens, and can take their choice of experts from the outside."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.torch.loss import Rows
from rl_core.torch.training.replay import RoutingShape, chosen_experts
from rl_megatron.model.layout import RowLayout

T = TypeVar("T")

TopK = Callable[..., tuple[Tensor, Tensor]]
"""Megatron's top-k function: scores and experts of each token."""


class PerMicrobatch(Generic[T]):
    """Hands a router the value that belongs to the tokens of each microbatch.

    If the router is recomputed in the backward pass, it runs again microbatch by microbatch in the order of the
    first time. Even if layers of a model are recomputed, some may not be.
    """

    def __init__(self) -> None:
        self.start(is_recomputed=False)

    def start(self, *, is_recomputed: bool) -> None:
        """Forget earlier passes."""
        self._is_recomputed = is_recomputed
        self._given: T | None = None
        self._again: deque[T] = deque()

    def give(self, value: T) -> None:
        """Set the value of the next forward pass."""
        self._given = value

    def next(self) -> T | None:
        """Return the value of the forward pass that runs now; None if there is no value for it."""
        if not self._is_recomputed or self._given is None:
            return self._given
        # Recomputed regions run without gradients first; layers that are not recomputed have nothing to run again.
        if torch.is_grad_enabled():
            return self._again.popleft() if self._again else self._given
        self._again.append(self._given)
        return self._given


class RowRouter(TopKRouter):
    """Megatron's router; padding enters neither its balancing loss nor the counts that move its expert biases.

    megatron-core 0.16.1 takes a padding mask, but fails on it if there are expert biases, divides by zero if all is
    padding, and supports only rows of equal length.

    Attributes:
        rows: For each microbatch, the number of each token's row (int64 `[tokens]`, from 1; 0 for padding and for rows
            that only keep other ranks company), and the number of rows.
        noted: Sum of the losses of the pass; None if there are none.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        # Without Transformer Engine, 0.16.1 does not define the name, and looks it up in every forward pass.
        vars(moe_utils).setdefault("te_general_gemm", None)
        # Megatron leaves it on the host until the first forward pass.
        self.weight.data = self.weight.data.to(torch.cuda.current_device())
        self.rows: PerMicrobatch[tuple[Tensor, int]] = PerMicrobatch()
        self.noted: Tensor | None = None
        self._now: tuple[Tensor, int] | None = None

    def start(self, *, is_recomputed: bool) -> None:
        """Forget earlier passes and their losses."""
        self.rows.start(is_recomputed=is_recomputed)
        self.noted = None

    def gating(self, hidden: Tensor) -> Tensor:
        """Return the logits `[..., experts]`; a float32 weight takes its input in float32."""
        logits: Tensor = super().gating(hidden.to(self.weight.dtype))
        return logits

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Route as Megatron's router does, for the rows that were handed over."""
        assert padding_mask is None
        self._now = self.rows.next()
        probs, routing_map = super().routing(logits)
        return probs, routing_map

    def _apply_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        if self._now is None:
            return probs
        numbers, _ = self._now
        return self._balance("aux_loss", probs, scores_for_aux_loss, routing_map, numbers.clamp(max=1), 1)

    def _apply_seq_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        seq_length: int,
        bsz: int,
        with_padding_mask: bool = False,
    ) -> Tensor:
        if self._now is None:
            return probs
        return self._balance("seq_aux_loss", probs, scores_for_aux_loss, routing_map, *self._now)

    def _balance(
        self, kind: str, probs: Tensor, scores: Tensor, routing_map: Tensor, segments: Tensor, num_segments: int
    ) -> Tensor:
        coefficient = self.get_aux_loss_coeff(kind)
        if coefficient == 0:
            return probs
        loss = balancing_loss(scores, routing_map, segments, num_segments, topk=self.topk, group=self.tp_cp_group)
        noted = loss.detach()
        self.noted = noted if self.noted is None else self.noted + noted
        balanced: Tensor = MoEAuxLossAutoScaler.apply(probs, coefficient * loss)
        return balanced

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        if not self.enable_expert_bias or not torch.is_grad_enabled():
            return
        with torch.no_grad():
            counted = routing_map if self._now is None else routing_map & (self._now[0] > 0)[:, None]
            self.local_tokens_per_expert += counted.sum(0)


def balancing_loss(
    scores: Tensor,
    routing_map: Tensor,
    segments: Tensor,
    num_segments: int,
    *,
    topk: int,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """Return the sum over segments of `tokens x loss`, or this rank's part of it; the loss of a segment is 1 if its
    tokens are spread evenly.

    `loss = experts / (k tokens^2) sum over experts of (tokens sent there) (sum of its scores)`. A segment is a
    microbatch in the loss of Switch Transformers (https://arxiv.org/abs/2101.03961), and a row in the loss of
    DeepSeek-V3 (https://arxiv.org/abs/2412.19437, section 2.1.2). Weighed by tokens, a sum over microbatches divided by
    all tokens is a mean.

    Args:
        scores: `[tokens, experts]`, normalised.
        routing_map: Bool `[tokens, experts]`, the `topk` of each token.
        segments: Int64 `[tokens]`, from 1; 0 for tokens that do not count.
        num_segments: Number of segments.
        topk: Number of experts per token.
        group: Ranks that have the other tokens of the same segments; None if this rank has all.
    """
    num_experts = scores.shape[1]
    zeros = scores.new_zeros(num_segments + 1, num_experts)
    sent = zeros.index_add(0, segments, routing_map.to(scores.dtype))
    sums = zeros.index_add(0, segments, scores)
    if group is not None and group.size() > 1:
        dist.all_reduce(sent, group=group)
    sent, sums = sent[1:], sums[1:]
    num_tokens = sent.sum(1, keepdim=True) / topk
    return (sent * sums * (num_experts / (topk * num_tokens.clamp(min=1)))).sum()


class Routing:
    """The routers of this rank, by chunk.

    Args:
        chunks: Chunks of the model, in order.
        config: Config of Megatron.
    """

    def __init__(self, chunks: Sequence[nn.Module], config: TransformerConfig) -> None:
        self._config = config
        self._by_chunk = {chunk: routers_of(chunk) for chunk in chunks}
        self.routers = [router for routers in self._by_chunk.values() for router in routers]
        self._biased = [router for router in self.routers if router.enable_expert_bias]

    def start(self, *, trains: bool) -> None:
        """Prepare for the microbatches of a pass."""
        for router in self.routers:
            router.start(is_recomputed=trains and is_router_recomputed(self._config))

    def give(self, chunk: nn.Module, rows: Rows, layout: RowLayout, *, is_own: bool) -> None:
        """Hand the routers of a chunk the rows of the microbatch that passes next; needed in training.

        Args:
            chunk: Chunk that the microbatch passes next.
            rows: Rows of the microbatch.
            layout: This rank's tokens of the rows.
            is_own: True if the rows are the rank's own; others only let it join in a pass of other ranks.
        """
        ends = rows.offsets[1:].contiguous()
        numbers = torch.bucketize(layout.places, ends, right=True) + 1
        numbers = numbers.masked_fill(layout.places < 0, 0) if is_own else torch.zeros_like(layout.places)
        value = (in_router_order(numbers, layout, self._config), len(ends))
        for router in self._by_chunk[chunk]:
            router.rows.give(value)

    def biases(self) -> list[Tensor]:
        """Return copies of the biases, which the finalisation of gradients moves."""
        return [router.expert_bias.clone() for router in self._biased]

    def restore(self, biases: Sequence[Tensor]) -> None:
        """Put back biases that `biases` returned."""
        for router, bias in zip(self._biased, biases, strict=True):
            router.expert_bias.copy_(bias)


class RoutedLayer:
    """Replaces Megatron's `RouterReplay` on one router, and sends tokens to given experts.

    Args:
        layer: Its number in the whole model, from 0.
    """

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.experts: PerMicrobatch[Tensor] = PerMicrobatch()
        """`[tokens, experts per token]` of each microbatch; -1 lets the router choose."""

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: TopK
    ) -> tuple[Tensor, Tensor]:
        """Return the scores and experts of each token, as Megatron's top-k function returns them."""
        own_scores, own = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        given = self.experts.next()
        if given is None:
            return own_scores, own
        experts = chosen_experts(own, given)
        return scores.gather(1, experts), experts


class MegatronReplay:
    """The routers of this rank, by chunk, and the generator's routing for them.

    Args:
        chunks: Chunks of the model, in order.
        config: Config of Megatron.
    """

    def __init__(self, chunks: Sequence[nn.Module], config: TransformerConfig) -> None:
        self._config = config
        self._shape = RoutingShape(config.num_layers, config.moe_router_topk, config.num_moe_experts)
        self._layers: dict[nn.Module, list[RoutedLayer]] = {chunk: [] for chunk in chunks}
        for chunk, layers in self._layers.items():
            for router in routers_of(chunk):
                router.router_replay = RoutedLayer(router.layer_number - 1)
                layers.append(router.router_replay)

    def columns_of(self, batch: Batch, *, for_loss: bool) -> dict[str, Ragged]:
        """Return the column with the experts that the tokens of a batch were sent to; none if routers choose for a
        batch that is only read.

        Raises:
            ValueError: If a batch for a loss does not have it, or it is of another model.
        """
        return self._shape.column_of(batch, is_needed=for_loss, key="megatron_cfg.moe_router_replay")

    def start(self, *, trains: bool) -> None:
        """Prepare for the microbatches of a pass."""
        for layers in self._layers.values():
            for layer in layers:
                layer.experts.start(is_recomputed=trains and is_router_recomputed(self._config))

    def give(self, chunk: nn.Module, rows: Rows, layout: RowLayout) -> None:
        """Send the tokens of a microbatch to their experts in the next forward pass of a chunk."""
        if not self._layers[chunk]:
            return
        experts = in_router_order(self._shape.at_places(rows, layout.places), layout, self._config)
        for layer in self._layers[chunk]:
            layer.experts.give(experts[:, layer.layer].long())


class RecordedLayer:
    """Replaces Megatron's `RouterReplay` on one router, and keeps its last choice."""

    def __init__(self) -> None:
        self.experts: Tensor | None = None

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: TopK
    ) -> tuple[Tensor, Tensor]:
        """Return the scores and experts of each token, as Megatron's top-k function returns them."""
        found = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        self.experts = found[1]
        return found


class MegatronRoutingRecorder:
    """The experts that the routers of a whole model chose in its last forward pass.

    Args:
        chunk: All layers of the model.
        config: Config of Megatron.

    Raises:
        ValueError: If the model has no routers.
    """

    def __init__(self, chunk: nn.Module, config: TransformerConfig) -> None:
        self._layers: dict[int, RecordedLayer] = {}
        for router in routers_of(chunk):
            router.router_replay = self._layers[router.layer_number - 1] = RecordedLayer()
        if not self._layers:
            raise ValueError("the model has no experts, so there is no routing to report")
        self._shape = RoutingShape(config.num_layers, config.moe_router_topk, config.num_moe_experts)

    def take(self, num_rows: int) -> np.ndarray:
        """Return int16 `[rows, columns, layers, experts per token]` of the last forward pass; -1 in layers without
        experts."""
        chosen = {layer: each.experts for layer, each in self._layers.items() if each.experts is not None}
        assert len(chosen) == len(self._layers), "no forward pass yet"
        # Routers see tokens column by column.
        return self._shape.recorded(chosen).unflatten(0, (-1, num_rows)).transpose(0, 1).cpu().numpy()


def is_router_recomputed(config: TransformerConfig) -> bool:
    """Return whether routers run again in the backward pass."""
    return config.recompute_granularity == "full" or (
        config.recompute_granularity == "selective" and "moe" in config.recompute_modules
    )


def routers_of(chunk: nn.Module) -> list[RowRouter]:
    """Return the routers of a chunk in the order of its layers."""
    return [module for module in chunk.modules() if isinstance(module, RowRouter)]


def in_router_order(values: Tensor, layout: RowLayout, config: TransformerConfig) -> Tensor:
    """Select and order the values of a layout's positions, `[batch * seq, *inner]`, as this rank's routers see the
    tokens."""
    placed = values.unflatten(0, layout.input_ids.shape).transpose(0, 1)  # [seq, batch, *inner]
    if config.sequence_parallel:
        size = parallel_state.get_tensor_model_parallel_world_size()
        placed = placed.chunk(size)[parallel_state.get_tensor_model_parallel_rank()]
    return placed.flatten(0, 1)
