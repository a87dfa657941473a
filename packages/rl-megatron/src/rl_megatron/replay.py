"""Routing that is replayed: tokens go to the experts that the generator sent them to.

Two engines that compute the same router in different orders choose other experts for a token now and then, and their
logprobs of it then differ by much more than by rounding. With the generator's choice in the trainer's forward passes
they agree, and the router still learns: it weighs the given experts by its own scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from rl_core.batch import Batch
from rl_core.ragged import Ragged
from rl_core.torch.loss import Rows
from rl_megatron.layout import Layout
from rl_megatron.routing import PerMicrobatch, in_router_order, is_router_recomputed, routers_of

ROUTED_EXPERTS = "routed_experts"
"""Column of a batch: `[tokens, layers, experts per token]`, the experts that each token was sent to, by layer of the
whole model (any number for layers without experts); -1 where they are not known."""


class RoutedLayer:
    """Stands in for Megatron's `RouterReplay` on one router.

    Args:
        layer: its number in the whole model, from 0.
    """

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.experts: PerMicrobatch[Tensor] = PerMicrobatch()
        """`[tokens, experts per token]` of each microbatch; -1 lets the router choose."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Scores and experts of each token, as Megatron's top-k function returns them."""
        own_scores, own = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        given = self.experts.next()
        if given is None:
            return own_scores, own
        experts = torch.where(given < 0, own, given)
        return scores.gather(1, experts), experts


class Replay:
    """The routers of this rank, by chunk.

    Args:
        chunks: of the model, in order.
        config: Megatron's.
    """

    def __init__(self, chunks: Sequence[nn.Module], config: TransformerConfig) -> None:
        self._config = config
        self._layers: dict[nn.Module, list[RoutedLayer]] = {chunk: [] for chunk in chunks}
        for chunk, layers in self._layers.items():
            for router in routers_of(chunk):
                router.router_replay = RoutedLayer(router.layer_number - 1)
                layers.append(router.router_replay)

    def columns_of(self, batch: Batch) -> dict[str, Ragged]:
        """Where the tokens of a batch were sent.

        Raises:
            ValueError: where it does not say, or not for this model.
        """
        if ROUTED_EXPERTS not in batch:
            raise ValueError(
                f"megatron_cfg.moe_router_replay needs the column {ROUTED_EXPERTS!r} and the batch has "
                f"{', '.join(sorted(batch))}; set moe_router_replay=false, or have the generator report the experts "
                "it chose"
            )
        column = batch.only([ROUTED_EXPERTS]).local().ragged(ROUTED_EXPERTS)
        found, expected = column.values.shape[1:], (self._config.num_layers, self._config.moe_router_topk)
        if found != expected:
            raise ValueError(f"{ROUTED_EXPERTS} has [layers, experts per token] {found}, the model {expected}")
        return {ROUTED_EXPERTS: column}

    def start(self, *, trains: bool) -> None:
        """Before the microbatches of a pass."""
        for layers in self._layers.values():
            for layer in layers:
                layer.experts.start(is_recomputed=trains and is_router_recomputed(self._config))

    def give(self, chunk: nn.Module, rows: Rows, layout: Layout) -> None:
        """Send the tokens of a microbatch to their experts in the next forward pass of a chunk."""
        if not self._layers[chunk]:
            return
        shape = (self._config.num_layers, self._config.moe_router_topk)
        # padding, and rows that keep other ranks company, are at -1
        unknown = torch.full((1, *shape), -1, device=layout.places.device)
        routed = rows.columns.get(ROUTED_EXPERTS, unknown.expand(int(rows.offsets[-1]), -1, -1))
        experts = in_router_order(torch.cat([routed.long(), unknown])[layout.places], layout, self._config)
        for layer in self._layers[chunk]:
            layer.experts.give(experts[:, layer.layer].contiguous())
