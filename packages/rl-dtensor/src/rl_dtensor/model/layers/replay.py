"""Experts that are given to the routers of `transformers`, and those that the routers choose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.facts.hf_config import num_experts_of
from rl_core.torch.training.replay import RoutingShape, chosen_experts
from rl_dtensor.model.layout import RowLayout
from rl_dtensor.parallel.body import body_of

Choose = Callable[[Tensor], Tensor]
"""From the experts of a router's own choice, int64 `[tokens, experts per token]`, to those that tokens go to."""

REMEDY = "set moe_router_replay=false"

ROUTER_LOGITS = "router_logits"
"""Output of the modules that `transformers` declares as routers."""


class RouterReplay:
    """The routers of some layers, and the generator's routing for them.

    Args:
        hf: A whole model.
        token_part: Index of the part of each row's tokens that routers see, and number of equal parts (sequence
            parallelism).

    Raises:
        ValueError: If it has no routers, or not of a known kind.
    """

    def __init__(self, hf: PreTrainedModel, token_part: tuple[int, int] = (0, 1)) -> None:
        self._kind = hf.config.model_type
        self._shape = routing_shape(hf)
        self._token_part = token_part
        self._routed: Tensor | None = None
        for layer, router in routers_of(hf):
            intercept(router, self._shape, partial(self._choose, layer), self._kind)

    def columns_of(self, batch: Batch, *, for_loss: bool) -> dict[str, Ragged]:
        """Return the column of the experts that the tokens of a batch were sent to; none if routers choose for a batch
        that is only read.

        Raises:
            ValueError: If a batch for a loss does not have it, or it is of another model.
        """
        return self._shape.column_of(batch, is_needed=for_loss, key="dtensor_cfg.moe_router_replay")

    def give(self, layout: RowLayout) -> None:
        """Send the tokens of the next pass to their experts. A backward pass may compute layers again."""
        part, count = self._token_part
        places = layout.places.view(layout.shape).chunk(count, 1)[part].flatten()
        self._routed = self._shape.at_places(layout.rows, places)

    def _choose(self, layer: int, own: Tensor) -> Tensor:
        assert self._routed is not None, "no routing was given before the pass"
        if len(own) != len(self._routed):
            raise ValueError(
                f"routing of {self._kind} models cannot be replayed on this mesh: their routers see {len(own)} tokens "
                f"where {len(self._routed)} were expected; set dtensor_cfg.tensor_parallel_size=1"
            )
        return chosen_experts(own, self._routed[:, layer])


class RoutingRecorder:
    """The experts that the routers of a whole model chose in its last forward pass.

    Raises:
        ValueError: If the model has no routers, or not of a known kind.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        self._shape = routing_shape(hf)
        self._chosen: dict[int, Tensor] = {}
        for layer, router in routers_of(hf):
            intercept(router, self._shape, partial(self._record, layer), hf.config.model_type)

    def take(self, num_rows: int) -> np.ndarray:
        """Return int16 `[rows, columns, layers, experts per token]` of the last forward pass; -1 in layers without
        experts."""
        return self._shape.recorded(self._chosen).unflatten(0, (num_rows, -1)).cpu().numpy()

    def _record(self, layer: int, own: Tensor) -> Tensor:
        self._chosen[layer] = own
        return own


def routing_shape(hf: PreTrainedModel) -> RoutingShape:
    """Return the routing of one token in a model.

    Raises:
        ValueError: If the model has no experts, or its config does not say how many of them a token is sent to.
    """
    config = hf.config.get_text_config()
    fields = config.to_dict()
    refused = f"routing of {hf.config.model_type} models cannot be replayed"
    num_experts = num_experts_of(fields)
    if not num_experts:
        raise ValueError(f"{refused}: they have no experts; {REMEDY}")
    num_chosen = fields.get("num_experts_per_tok")
    if not isinstance(num_chosen, int):
        raise ValueError(f"{refused}: their config has no num_experts_per_tok; {REMEDY}")
    return RoutingShape(config.num_hidden_layers, num_chosen, num_experts)


def routers_of(hf: PreTrainedModel) -> Sequence[tuple[int, nn.Module]]:
    """Return the routers of a whole model and the numbers of their layers, as `transformers` declares them.

    Raises:
        ValueError: If it declares none.
    """
    declared = hf._can_record_outputs or body_of(hf)._can_record_outputs or {}
    recorded = declared.get(ROUTER_LOGITS, ())
    recorders = [
        each if isinstance(each, OutputRecorder) else OutputRecorder(each)
        for each in (recorded if isinstance(recorded, list | tuple) else (recorded,))
    ]
    found = [
        (next(int(part) for part in name.split(".") if part.isdecimal()), module)
        for name, module in hf.named_modules()
        if any(isinstance(module, each.target_class) and (each.layer_name or "") in name for each in recorders)
    ]
    if not found:
        raise ValueError(
            f"routing of {hf.config.model_type} models cannot be replayed: transformers does not say which modules are "
            f"their routers; {REMEDY}"
        )
    return found


def intercept(router: Any, shape: RoutingShape, choose: Choose, kind: str) -> None:
    """Make a router send tokens to the experts that `choose` returns, with its own scores of them as weights.

    Args:
        router: Router module, whose forward pass is replaced.
        shape: Number of experts of a layer, and of experts per token.
        choose: Function from the experts that the router chose to the experts that tokens are sent to.
        kind: Kind of the model, for messages.

    The router raises a `ValueError` if it does not choose experts by one top-k over all of them.
    """
    original = router.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _TopK(shape, choose) as top_k:
            result = original(*args, **kwargs)
        if top_k.num_calls != 1:
            raise ValueError(
                f"routing of {kind} models cannot be replayed: their routers do not choose experts by one top-k; "
                f"{REMEDY}"
            )
        return result

    router.forward = forward


class _TopK(TorchFunctionMode):
    """Replaces the experts that top-k over all experts finds, and their scores.

    Each family weighs experts in its own way, and all of them choose with the same function.
    """

    def __init__(self, shape: RoutingShape, choose: Choose) -> None:
        super().__init__()
        self._shape = shape
        self._choose = choose
        self.num_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return found
        scores: Tensor = args[0] if args else kwargs["input"]
        if scores.shape[-1] != self._shape.num_experts or found.indices.shape[-1] != self._shape.num_chosen:
            return found  # It chooses groups of experts.
        self.num_calls += 1
        experts = self._choose(found.indices)
        return torch.return_types.topk((scores.gather(-1, experts), experts))
