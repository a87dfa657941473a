"""Experts that are given to Megatron's routers, and those that the routers choose."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.rollouts.rollout import UNKNOWN_EXPERT
from rl_core.torch.loss import Rows
from rl_core.torch.training.replay import RoutingShape, chosen_experts
from rl_megatron.model.layout import Layout
from rl_megatron.model.routing import PerMicrobatch, in_router_order, is_router_recomputed, routers_of

TopK = Callable[..., tuple[Tensor, Tensor]]
"""Megatron's top-k function: scores and experts of each token."""


class RoutedLayer:
    """Stands in for Megatron's `RouterReplay` on one router, and sends tokens to given experts.

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
        """Scores and experts of each token, as Megatron's top-k function returns them."""
        own_scores, own = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        given = self.experts.next()
        if given is None:
            return own_scores, own
        experts = chosen_experts(own, given)
        return scores.gather(1, experts), experts


class Replay:
    """The routers of this rank, by chunk, and the generator's routing for them.

    Args:
        chunks: Chunks of the model, in order.
        config: Megatron's.
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
        """The column that says which experts the tokens of a batch were sent to; none if routers choose for a batch
        that is only read.

        Raises:
            ValueError: If a batch for a loss does not have it, or it is of another model.
        """
        return self._shape.column_of(batch, is_needed=for_loss, key="megatron_cfg.moe_router_replay")

    def start(self, *, trains: bool) -> None:
        """Before the microbatches of a pass."""
        for layers in self._layers.values():
            for layer in layers:
                layer.experts.start(is_recomputed=trains and is_router_recomputed(self._config))

    def give(self, chunk: nn.Module, rows: Rows, layout: Layout) -> None:
        """Send the tokens of a microbatch to their experts in the next forward pass of a chunk."""
        if not self._layers[chunk]:
            return
        experts = in_router_order(self._shape.at_places(rows, layout.places), layout, self._config)
        for layer in self._layers[chunk]:
            layer.experts.give(experts[:, layer.layer].long())


class RecordedLayer:
    """Stands in for Megatron's `RouterReplay` on one router, and keeps what it chose last."""

    def __init__(self) -> None:
        self.experts: Tensor | None = None

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: TopK
    ) -> tuple[Tensor, Tensor]:
        """Scores and experts of each token, as Megatron's top-k function returns them."""
        found = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        self.experts = found[1]
        return found


class RoutingRecorder:
    """The experts that the routers of a whole model chose in its last forward pass.

    Args:
        chunk: All layers of the model.
        config: Megatron's.

    Raises:
        ValueError: If the model has no routers.
    """

    def __init__(self, chunk: nn.Module, config: TransformerConfig) -> None:
        self._layers: dict[int, RecordedLayer] = {}
        for router in routers_of(chunk):
            router.router_replay = self._layers[router.layer_number - 1] = RecordedLayer()
        if not self._layers:
            raise ValueError("the model has no experts, so there is no routing to report")
        self._shape = (config.num_layers, config.moe_router_topk)

    def take(self, num_rows: int) -> np.ndarray:
        """int16 `[rows, columns, layers, experts per token]` of the last forward pass; -1 in layers without experts."""
        chosen = {layer: recorded.experts for layer, recorded in self._layers.items()}
        first = next(iter(chosen.values()))
        assert first is not None, "no forward pass yet"
        found = torch.full((len(first), *self._shape), UNKNOWN_EXPERT, dtype=torch.int16, device=first.device)
        for layer, experts in chosen.items():
            assert experts is not None
            found[:, layer] = experts.to(torch.int16)
        # routers see tokens column by column
        by_row: np.ndarray = found.unflatten(0, (-1, num_rows)).transpose(0, 1).cpu().numpy()
        return by_row
