"""Muon over whole matrices is torch's, and the rest is stepped by AdamW."""

from functools import partial

import pytest
import torch
from torch import nn

from rl_core.facts.optimizer_arguments import OPTIMIZERS
from rl_core.model_config import OptimizerConfig
from rl_core.torch.optim.muon import Muon
from rl_core.torch.optim.optimizer import build_optimizer
from rl_core.torch.optim.parameters import describe_parameters, matrices_in

SETTINGS = {"lr": 0.02, "weight_decay": 0.1}


def model():
    torch.manual_seed(0)
    layers = {"embed_tokens": nn.Embedding(7, 4), "up": nn.Linear(4, 6), "down": nn.Linear(6, 4, bias=False)}
    return nn.ModuleDict({**layers, "norm": nn.RMSNorm(4), "lm_head": nn.Linear(4, 7, bias=False)})


def step(optimizer, parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


@pytest.mark.parametrize(
    "settings", [{}, {"adjust_lr_fn": "match_rms_adamw"}, {"nesterov": False, "ns_steps": 3, "momentum": 0.5}], ids=str
)
def test_matrices_of_hidden_layers_step_as_in_torch_and_the_rest_by_adamw(settings):
    ours, theirs = model(), model()
    config = OptimizerConfig(name="torch.optim.Muon", kwargs={**SETTINGS, **settings, "adamw": {"lr": 0.003}})
    optimizer = build_optimizer(config, ours.parameters(), described=describe_parameters([ours]))
    matrices = [theirs["up"].weight, theirs["down"].weight]
    rest = [parameter for parameter in theirs.parameters() if all(parameter is not matrix for matrix in matrices)]
    muon, adamw = (
        torch.optim.Muon(matrices, **SETTINGS, **settings),
        torch.optim.AdamW(rest, lr=0.003, weight_decay=0.1),
    )
    for seed in range(3):
        step(optimizer, list(ours.parameters()), seed)
        step(adamw, list(theirs.parameters()), seed)
        muon.step()
    for (name, parameter), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-6, atol=1e-6, msg=name)
        is_matrix = any(expected is matrix for matrix in matrices)
        assert set(optimizer.state[parameter]) == (
            {"momentum_buffer"} if is_matrix else {"step", "exp_avg", "exp_avg_sq"}
        )


def test_each_matrix_of_a_stack_steps_alone():
    stack = nn.Parameter(torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0)))
    apart = [nn.Parameter(matrix.detach().clone()) for matrix in stack]
    place = tuple(slice(0, extent) for extent in stack.shape)
    group = {"params": [stack], "is_matrix": True}
    together = Muon([group], {stack: partial(matrices_in, "experts", stack.shape, place)}, **SETTINGS)
    alone = torch.optim.Muon(apart, **SETTINGS)
    stack.grad = torch.randn(stack.shape, generator=torch.Generator().manual_seed(1))
    for matrix, grad in zip(apart, stack.grad, strict=True):
        matrix.grad = grad
    together.step()
    alone.step()
    torch.testing.assert_close(stack.detach(), torch.stack([each.detach() for each in apart]), rtol=1e-6, atol=1e-6)


def test_groups_are_the_same_on_every_rank_and_rates_of_both_are_scaled():
    found = model()
    config = OptimizerConfig(
        name="torch.optim.Muon",
        kwargs={**SETTINGS, "adamw": {"lr": 0.003}},
        decay_norms_and_biases=False,
        lr_scales={"up": 0.5},
    )
    described = describe_parameters([found])
    groups = build_optimizer(config, found.parameters(), described=described).param_groups
    assert len(groups) == len(build_optimizer(config, [found["norm"].weight], described=described).param_groups) == 8
    rates = {id(each): (group["lr"], group["weight_decay"]) for group in groups for each in group["params"]}
    for name, expected in {
        "up.weight": (0.01, 0.1),
        "up.bias": (0.0015, 0.0),
        "down.weight": (0.02, 0.1),
        "norm.weight": (0.003, 0.0),
        "lm_head.weight": (0.003, 0.1),
    }.items():
        assert rates[id(found.get_parameter(name))] == pytest.approx(expected), name


@pytest.mark.parametrize(
    "kwargs", [{"ns_dtype": "float16"}, {"ns_steps": 0}, {"adamw": {"nesterov": True}}, {"lr": -1.0}]
)
def test_arguments_that_it_does_not_take_are_refused(kwargs):
    assert kwargs.keys() <= OPTIMIZERS["torch.optim.Muon"]
    with pytest.raises(ValueError, match=r"torch\.optim\.Muon does not take"):
        build_optimizer(OptimizerConfig(name="torch.optim.Muon", kwargs=kwargs), [nn.Parameter(torch.zeros(2))])
