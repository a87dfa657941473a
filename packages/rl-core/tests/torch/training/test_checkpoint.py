import copy
import io

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR, SequentialLR, StepLR

from rl_core.model_config import OptimizerConfig
from rl_core.torch.optim.optimizer import build_optimizer
from rl_core.torch.training.checkpoint import Hyperparameters

WARM_UP = {"start_factor": 0.1, "total_iters": 10}


def build(lr, schedule=None, **settings):
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(2))], lr=lr, **settings)
    built = None if schedule is None else schedule(optimizer)
    return optimizer, built, Hyperparameters(optimizer, built)


def warm_up(optimizer):
    return LinearLR(optimizer, **WARM_UP)


def decay_after_warm_up(optimizer):
    return SequentialLR(optimizer, [warm_up(optimizer), StepLR(optimizer, 5)], [10])


def steps(optimizer, schedule, count):
    """The learning rates of so many steps."""
    rates = []
    for _ in range(count):
        rates.append(optimizer.param_groups[0]["lr"])
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return rates


def saved(hyperparameters):
    """As it comes back from a file."""
    buffer = io.BytesIO()
    torch.save(hyperparameters.state(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("schedule", [None, warm_up, decay_after_warm_up])
def test_the_same_settings_go_on_exactly(schedule):
    optimizer, scheduled, whole = build(0.5, schedule)
    steps(optimizer, scheduled, 7)
    state = saved(whole)
    expected = steps(optimizer, scheduled, 9)
    optimizer, scheduled, resumed = build(0.5, schedule)
    steps(optimizer, scheduled, 2)
    resumed.restore(state)
    assert steps(optimizer, scheduled, 9) == expected


@pytest.mark.parametrize("schedule", [None, warm_up, decay_after_warm_up])
@pytest.mark.parametrize("before", [None, warm_up])
def test_other_settings_take_the_place_of_the_saved_ones_at_the_same_step(schedule, before):
    optimizer, scheduled, first = build(0.5, before, weight_decay=0.1)
    steps(optimizer, scheduled, 7)
    state = saved(first)
    optimizer, scheduled, _ = build(0.25, schedule, weight_decay=0.2)
    expected = steps(optimizer, scheduled, 16)[7:]
    optimizer, scheduled, branch = build(0.25, schedule, weight_decay=0.2)
    branch.restore(state)
    assert optimizer.param_groups[0]["weight_decay"] == 0.2
    assert steps(optimizer, scheduled, 9) == pytest.approx(expected)


def test_a_branch_of_a_branch_knows_its_step():
    optimizer, scheduled, first = build(0.5)
    steps(optimizer, scheduled, 3)
    optimizer, scheduled, second = build(0.1)
    second.restore(saved(first))
    steps(optimizer, scheduled, 2)
    third_optimizer, third_schedule, third = build(0.1, warm_up)
    third.restore(saved(second))
    assert steps(third_optimizer, third_schedule, 1) == pytest.approx([0.1 * (0.1 + 0.9 * 5 / 10)])


def test_a_file_of_before_goes_on_as_it_was_saved():
    optimizer, scheduled, first = build(0.5, warm_up)
    steps(optimizer, scheduled, 4)
    state = saved(first)
    expected = steps(optimizer, scheduled, 3)
    del state["beginning"], state["num_steps"]
    optimizer, scheduled, resumed = build(0.5, warm_up)
    resumed.restore(state)
    assert steps(optimizer, scheduled, 3) == expected


def test_how_an_optimizer_steps_follows_from_its_own_config():
    optimizer, _, first = build(0.5, foreach=False)
    steps(optimizer, None, 1)
    state = saved(first)
    optimizer, _, resumed = build(0.5, foreach=True)
    before = copy.deepcopy(optimizer.param_groups[0]["foreach"])
    resumed.restore(state)
    assert optimizer.param_groups[0]["foreach"] is before is True


@pytest.mark.parametrize("decays_all", [True, False])
def test_a_branch_that_decays_other_parameters_has_its_own_groups(decays_all):
    def groups(decays_all):
        config = OptimizerConfig(kwargs={"lr": 0.5, "weight_decay": 0.1}, decay_norms_and_biases=decays_all)
        optimizer = build_optimizer(config, [nn.Parameter(torch.zeros(2))])
        return optimizer, warm_up(optimizer)

    optimizer, scheduled = groups(decays_all)
    first = Hyperparameters(optimizer, scheduled)
    steps(optimizer, scheduled, 4)
    state = saved(first)
    expected = steps(optimizer, scheduled, 3)
    optimizer, scheduled = groups(not decays_all)
    Hyperparameters(optimizer, scheduled).restore(state)
    assert [group["weight_decay"] for group in optimizer.param_groups] == ([0.1, 0.0] if decays_all else [0.1])
    assert steps(optimizer, scheduled, 3) == pytest.approx(expected)
