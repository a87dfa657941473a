"""Work inside a rank of a pool: layers with shared experts, and the order in which they compute."""

from dataclasses import dataclass, field
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core.selfcheck.rank_pool import Rank
from rl_core.torch.process_group import join_process_group
from rl_dtensor.model.layers import experts as expert_layers
from rl_dtensor.model.layers.experts import NAMES, dispatch_experts
from rl_dtensor.model.tiny import made_tiny, shrink
from rl_dtensor.parallel import collectives
from rl_dtensor.parallel.dispatch import AllToAll, Grouped
from rl_dtensor.parallel.experts import expert_modules


@dataclass
class Outcome:
    """Logits and gradients of a rank, and the order of what it did in each layer with experts."""

    values: dict[str, Tensor]
    num_layers: int
    order: list[str] = field(default_factory=list)
    backward_order: list[str] = field(default_factory=list)


def shared_early_and_late(rank: Rank, family: str, num_chunks: int) -> tuple[Outcome, Outcome]:
    """The same pass with shared experts computed while tokens travel, and as the family's code is written."""
    join_process_group(rank.rendezvous)
    try:
        early = _passed(family, num_chunks)
        with mock.patch.object(expert_layers, "early_part", return_value=None):
            return early, _passed(family, num_chunks)
    finally:
        dist.destroy_process_group()


def _passed(family: str, num_chunks: int) -> Outcome:
    config = shrink(AutoConfig.for_model(family))
    torch.manual_seed(0)
    with made_tiny(config.model_type):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    outcome = Outcome({}, len(expert_modules(model)))
    for name, part in model.named_modules():
        if name.rpartition(".")[2] in NAMES:
            # the first product of the part, whichever way it is called
            first = next(module for module in part.modules() if isinstance(module, torch.nn.Linear))
            first.register_forward_hook(lambda *_: outcome.order.append("shared"))
            first.register_full_backward_hook(lambda *_: outcome.backward_order.append("shared"))
    outputs = expert_layers._outputs

    def noted_outputs(module: torch.nn.Module, grouped: Grouped, **kwargs: bool) -> Tensor:
        outcome.order.append("products")
        out = outputs(module, grouped, **kwargs)
        out.register_hook(lambda _: outcome.backward_order.append("products"))
        return out

    with mock.patch.object(expert_layers, "_outputs", noted_outputs):
        dispatch_experts(model, AllToAll([dist.group.WORLD], fused=True, num_chunks=num_chunks), fused=False)
    for module in expert_modules(model):
        _keep_own(module)
    tokens = torch.arange(6).view(1, 6) + 7 * dist.get_rank()
    start, finish = collectives._Trip.start, collectives._Trip.finish
    is_backward = False

    def noted(what: str) -> None:
        (outcome.backward_order if is_backward else outcome.order).append(what)

    with (
        mock.patch.object(collectives._Trip, "start", lambda *args: (noted("send"), start(*args))[1]),
        mock.patch.object(collectives._Trip, "finish", lambda trip: (noted("arrive"), finish(trip))[1]),
    ):
        logits = model(input_ids=tokens, use_cache=False).logits
        is_backward = True
        logits.sin().mean().backward()
    outcome.values = {"logits": logits.detach(), **{name: each.grad for name, each in model.named_parameters()}}
    return outcome


def _keep_own(module: torch.nn.Module) -> None:
    """Keep this rank's half of stacked experts."""
    own = module.num_experts // dist.get_world_size()
    for parameter in module.parameters():
        parameter.data = parameter.data[dist.get_rank() * own :][:own].clone()
    module.num_experts = own
