"""The generator's routing in a trainer's passes: tokens go to the experts that the generator sent them to.

Two engines that compute the same router in different orders choose other experts for a token now and then, and their
logprobs of it then differ by much more than by rounding. With the generator's choice in the trainer's passes they
agree, and the router still learns: it weighs the given experts by its own scores. Known as rollout routing replay (R3,
arXiv:2510.11370).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.rollouts.group import ROUTED_EXPERTS
from rl_core.rollouts.rollout import UNKNOWN_EXPERT
from rl_core.torch.loss import Rows


class RoutingShape(NamedTuple):
    """Routing of one token in a whole model.

    Args:
        num_layers: Those without experts included.
        num_chosen: Experts per token.
        num_experts: Number of experts of a layer.
    """

    num_layers: int
    num_chosen: int
    num_experts: int

    def column_of(self, batch: Batch, *, is_needed: bool, key: str) -> dict[str, Ragged]:
        """Return the column of a batch with the experts of its tokens, by name.

        Args:
            batch: Batch that the pass is computed on.
            is_needed: True if there must be one; otherwise routers choose for a batch without it.
            key: That turns replay on, for messages.

        Raises:
            ValueError: If it is missing though needed, or of another model.
        """
        if ROUTED_EXPERTS not in batch and not is_needed:
            return {}
        if ROUTED_EXPERTS not in batch:
            raise ValueError(
                f"{key} needs the column {ROUTED_EXPERTS!r} and the batch has {', '.join(sorted(batch))}; set it to "
                "false, or have the generator and the rollout program report the experts"
            )
        column = batch.only([ROUTED_EXPERTS]).local().ragged(ROUTED_EXPERTS)
        found, expected = column.values.shape[1:], (self.num_layers, self.num_chosen)
        if found != expected:
            raise ValueError(f"{ROUTED_EXPERTS} has [layers, experts per token] {found}, the model {expected}")
        if column.values.size and column.values.max() >= self.num_experts:
            raise ValueError(
                f"{ROUTED_EXPERTS} contains expert {column.values.max()}, but the model has {self.num_experts} per "
                "layer"
            )
        return {ROUTED_EXPERTS: column}

    def at_places(self, rows: Rows, places: Tensor) -> Tensor:
        """Return `[positions, layers, experts per token]`, experts of the token at each position of a pass;
        `UNKNOWN_EXPERT` for padding, and for rows without the column, which only let the rank join in.

        Args:
            rows: Rows of the pass.
            places: Int64 `[positions]`, index among the tokens of the rows; -1 for padding.
        """
        shape = (self.num_layers, self.num_chosen)
        if ROUTED_EXPERTS not in rows:
            return torch.full((len(places), *shape), UNKNOWN_EXPERT, dtype=torch.int16, device=places.device)
        routed = rows[ROUTED_EXPERTS]
        return torch.cat([routed, routed.new_full((1, *shape), UNKNOWN_EXPERT)])[places]

    def recorded(self, chosen: Mapping[int, Tensor]) -> Tensor:
        """Return int16 `[tokens, layers, experts per token]`; `UNKNOWN_EXPERT` in layers without experts.

        Args:
            chosen: Experts of the tokens, `[tokens, experts per token]`, by the number of the layer.
        """
        first = next(iter(chosen.values()))
        shape = (len(first), self.num_layers, self.num_chosen)
        found = torch.full(shape, UNKNOWN_EXPERT, dtype=torch.int16, device=first.device)
        for layer, experts in chosen.items():
            found[:, layer] = experts.to(torch.int16)
        return found


def chosen_experts(own: Tensor, given: Tensor) -> Tensor:
    """Return int64 `[tokens, experts per token]`: the given experts, and the router's own for tokens where none are
    given.

    Args:
        own: Int64 `[tokens, experts per token]`, the router's choice.
        given: Experts of the same shape; `UNKNOWN_EXPERT` for tokens that the router chooses for.
    """
    return torch.where((given < 0).any(-1, keepdim=True), own, given.to(own.dtype))
