"""Routers that balance experts only by a batch's own tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from rl_core.torch.loss import Rows
from rl_megatron.model.balancing_loss import balancing_loss
from rl_megatron.model.layout import Layout

T = TypeVar("T")


class PerMicrobatch(Generic[T]):
    """Hands a router the value that belongs to the tokens of each microbatch.

    If the router is recomputed in the backward pass, it runs again microbatch by microbatch in the order of the
    first time. Of a model whose layers are recomputed, some may not be.
    """

    def __init__(self) -> None:
        self._is_recomputed = False
        self._given: T | None = None
        self._again: deque[T] = deque()

    def start(self, *, is_recomputed: bool) -> None:
        """Forget earlier passes."""
        self._is_recomputed = is_recomputed
        self._given = None
        self._again.clear()

    def give(self, value: T) -> None:
        """Set the value of the next forward pass."""
        self._given = value

    def next(self) -> T | None:
        """The value of the forward pass that runs now; None if there is no value for it."""
        if not self._is_recomputed or self._given is None:
            return self._given
        # recomputed regions run without gradients first; layers that are not recomputed have nothing to run again
        if torch.is_grad_enabled():
            return self._again.popleft() if self._again else self._given
        self._again.append(self._given)
        return self._given


def is_router_recomputed(config: TransformerConfig) -> bool:
    """Return whether routers run again in the backward pass."""
    return config.recompute_granularity == "full" or (
        config.recompute_granularity == "selective" and "moe" in config.recompute_modules
    )


@dataclass(frozen=True)
class TokenRows:
    """To which row each token of a router belongs.

    Args:
        numbers: Int64 `[tokens]`, of the row from 1; 0 for padding, and for rows that only keep other ranks company.
        num_rows: Number of rows of the microbatch.
    """

    numbers: Tensor
    num_rows: int


class RowRouter(TopKRouter):
    """Megatron's router; padding enters neither its balancing loss nor the counts that move its expert biases.

    megatron-core 0.16.1 takes a padding mask, but fails on it if there are expert biases, divides by zero if all is
    padding, and supports only rows of equal length.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        # without Transformer Engine 0.16.1 does not define the name, and looks it up in every forward pass
        vars(moe_utils).setdefault("te_general_gemm", None)
        # Megatron leaves it on the host until the first forward pass
        self.weight.data = self.weight.data.to(torch.cuda.current_device())
        self.rows: PerMicrobatch[TokenRows] = PerMicrobatch()
        self.noted: Tensor | None = None
        self._now: TokenRows | None = None

    def start(self, *, is_recomputed: bool) -> None:
        """Forget earlier passes and the losses that they noted."""
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
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if coefficient == 0 or self._now is None:
            return probs
        return self._balance(probs, scores_for_aux_loss, routing_map, self._now.numbers.clamp(max=1), 1, coefficient)

    def _apply_seq_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        seq_length: int,
        bsz: int,
        with_padding_mask: bool = False,
    ) -> Tensor:
        coefficient = self.get_aux_loss_coeff("seq_aux_loss")
        if coefficient == 0 or self._now is None:
            return probs
        now = self._now
        return self._balance(probs, scores_for_aux_loss, routing_map, now.numbers, now.num_rows, coefficient)

    def _balance(
        self,
        probs: Tensor,
        scores: Tensor,
        routing_map: Tensor,
        segments: Tensor,
        num_segments: int,
        coefficient: float,
    ) -> Tensor:
        loss = balancing_loss(scores, routing_map, segments, num_segments, topk=self.topk, group=self.tp_cp_group)
        noted = loss.detach()
        self.noted = noted if self.noted is None else self.noted + noted
        balanced: Tensor = MoEAuxLossAutoScaler.apply(probs, coefficient * loss)
        return balanced

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        if not self.enable_expert_bias or not torch.is_grad_enabled():
            return
        with torch.no_grad():
            counted = routing_map if self._now is None else routing_map & (self._now.numbers > 0)[:, None]
            self.local_tokens_per_expert += counted.sum(0)


class Routing:
    """The routers of this rank, by chunk.

    Args:
        chunks: Chunks of the model, in order.
        config: Megatron's.
    """

    def __init__(self, chunks: Sequence[nn.Module], config: TransformerConfig) -> None:
        self._config = config
        self._by_chunk = {chunk: routers_of(chunk) for chunk in chunks}
        self.routers = [router for routers in self._by_chunk.values() for router in routers]

    def start(self, *, trains: bool) -> None:
        """Before the microbatches of a pass."""
        for router in self.routers:
            router.start(is_recomputed=trains and is_router_recomputed(self._config))

    def give(self, chunk: nn.Module, rows: Rows, layout: Layout, *, is_own: bool) -> None:
        """Tell the routers of a chunk the rows of the microbatch that passes next; needed in training.

        Args:
            chunk: Chunk that the microbatch passes next.
            rows: Rows of the microbatch.
            layout: This rank's tokens of the rows.
            is_own: True if the rows are the rank's own; others only let it join in a pass of other ranks.
        """
        ends = rows.offsets[1:].contiguous()
        numbers = torch.bucketize(layout.places, ends, right=True) + 1
        numbers = numbers.masked_fill(layout.places < 0, 0) if is_own else torch.zeros_like(layout.places)
        value = TokenRows(in_router_order(numbers, layout, self._config), len(ends))
        for router in self._by_chunk[chunk]:
            router.rows.give(value)

    def biases(self) -> list[Tensor]:
        """Copies of the biases, which the finalisation of gradients moves."""
        return [router.expert_bias.clone() for router in self.routers if router.enable_expert_bias]

    def restore(self, biases: Sequence[Tensor]) -> None:
        """Put biases back that `biases` returned."""
        for router, bias in zip((each for each in self.routers if each.enable_expert_bias), biases, strict=True):
            router.expert_bias.copy_(bias)


def routers_of(chunk: nn.Module) -> list[RowRouter]:
    """The routers of a chunk in the order of its layers."""
    return [module for module in chunk.modules() if isinstance(module, RowRouter)]


def in_router_order(values: Tensor, layout: Layout, config: TransformerConfig) -> Tensor:
    """Select and order the values of a layout's positions, `[batch * seq, *inner]`, as this rank's routers see the
    tokens."""
    placed = values.unflatten(0, layout.input_ids.shape).transpose(0, 1)  # [seq, batch, *inner]
    if config.sequence_parallel:
        size = parallel_state.get_tensor_model_parallel_world_size()
        placed = placed.chunk(size)[parallel_state.get_tensor_model_parallel_rank()]
    return placed.flatten(0, 1)
