"""Experts that are given to the routers of `transformers`, and those that the routers choose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from rl_core.model_config import num_experts_of
from rl_core.rollouts.rollout import UNKNOWN_EXPERT
from rl_core.torch.training.replay import RoutingShape, chosen_experts
from rl_dtensor.model.layout import Layout
from rl_dtensor.parallel.body import body_of

Choose = Callable[[Tensor], Tensor]
"""From the experts of a router's own choice, int64 `[tokens, experts per token]`, to those that tokens go to."""

REMEDY = "set moe_router_replay=false"

ROUTER_LOGITS = "router_logits"
"""Output of routers, by which `transformers` tells which modules they are."""


class Replay:
    """The routers of some layers, and the generator's routing for them.

    Args:
        hf: A whole model.
        token_part: Which of how many equal parts of each row's tokens routers see (sequence parallelism).

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
        """The column that says which experts the tokens of a batch were sent to; none if routers choose for a batch
        that is only read.

        Raises:
            ValueError: If a batch for a loss does not have it, or it is of another model.
        """
        return self._shape.column_of(batch, is_needed=for_loss, key="dtensor_cfg.moe_router_replay")

    def give(self, layout: Layout) -> None:
        """Send the tokens of a pass to their experts: of the forward pass that follows, or of the backward pass, which
        may compute layers again."""
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
        """int16 `[rows, columns, layers, experts per token]` of the last forward pass; -1 in layers without experts."""
        first = next(iter(self._chosen.values()))
        shape = (len(first), self._shape.num_layers, self._shape.num_chosen)
        found = torch.full(shape, UNKNOWN_EXPERT, dtype=torch.int16, device=first.device)
        for layer, experts in self._chosen.items():
            found[:, layer] = experts.to(torch.int16)
        by_row: np.ndarray = found.unflatten(0, (num_rows, -1)).cpu().numpy()
        return by_row

    def _record(self, layer: int, own: Tensor) -> Tensor:
        self._chosen[layer] = own
        return own


def routing_shape(hf: PreTrainedModel) -> RoutingShape:
    """Routing of one token in a model.

    Raises:
        ValueError: If the model has no experts, or its config does not say how many of them a token is sent to.
    """
    config = hf.config.get_text_config()
    fields = config.to_dict()
    num_experts = num_experts_of(fields)
    if not num_experts:
        kind = hf.config.model_type
        raise ValueError(f"routing of {kind} models cannot be replayed: they have no experts; {REMEDY}")
    num_chosen = fields.get("num_experts_per_tok")
    if not isinstance(num_chosen, int):
        raise ValueError(
            f"routing of {hf.config.model_type} models cannot be replayed: their config has no num_experts_per_tok; "
            f"{REMEDY}"
        )
    return RoutingShape(config.num_hidden_layers, num_chosen, num_experts)


def routers_of(hf: PreTrainedModel) -> Sequence[tuple[int, nn.Module]]:
    """The routers of a whole model and the numbers of their layers, by what `transformers` records as their output.

    Raises:
        ValueError: If it records none.
    """
    found = [
        (next(int(part) for part in name.split(".") if part.isdecimal()), module)
        for name, module in hf.named_modules()
        if any(_is_recorded(recorder, name, module) for recorder in _recorders(hf))
    ]
    if not found:
        raise ValueError(
            f"routing of {hf.config.model_type} models cannot be replayed: transformers does not say which modules are "
            f"their routers; {REMEDY}"
        )
    return found


def _recorders(hf: PreTrainedModel) -> Iterator[OutputRecorder]:
    stated = hf._can_record_outputs or body_of(hf)._can_record_outputs or {}
    recorded = stated.get(ROUTER_LOGITS, ())
    for each in recorded if isinstance(recorded, list | tuple) else (recorded,):
        yield each if isinstance(each, OutputRecorder) else OutputRecorder(each)


def _is_recorded(recorder: OutputRecorder, name: str, module: nn.Module) -> bool:
    return isinstance(module, recorder.target_class) and (recorder.layer_name or "") in name


def intercept(router: Any, shape: RoutingShape, choose: Choose, kind: str) -> None:
    """Make a router send tokens to the experts that `choose` returns, weighed by its own scores of them.

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
            return found  # it chooses groups of experts
        self.num_calls += 1
        experts = self._choose(found.indices)
        return torch.return_types.topk((scores.gather(-1, experts), experts))
