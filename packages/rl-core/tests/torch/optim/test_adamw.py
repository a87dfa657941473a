"""AdamW with its state in bfloat16 is AdamW, right in the mean."""

from copy import deepcopy

import pytest
import torch

from rl_core.model_config import OptimizerConfig
from rl_core.torch.optim.adamw import HalfStateAdamW
from rl_core.torch.optim.optimizer import build_optimizer

SETTINGS = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1}


def trained(optimizer_class, num_steps, optimizer=None, parameter=None, first_step=0):
    """A parameter that is drawn towards noisy targets, and its optimizer."""
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 4096)) if parameter is None else parameter
    optimizer = optimizer or optimizer_class([parameter], **SETTINGS)
    for step in range(first_step, num_steps):
        noise = torch.randn(4096, generator=torch.Generator().manual_seed(step))
        parameter.grad = parameter.detach() - 0.5 + 0.3 * noise
        optimizer.step()
    return parameter, optimizer


def test_the_first_step_is_that_of_torch():
    half, _ = trained(HalfStateAdamW, 1)
    full, _ = trained(torch.optim.AdamW, 1)
    torch.testing.assert_close(half, full, rtol=1e-6, atol=1e-6)


def test_a_hundred_steps_end_near_those_of_torch_and_are_off_to_no_side():
    half, optimizer = trained(HalfStateAdamW, 100)
    full, _ = trained(torch.optim.AdamW, 100)
    difference = (half - full).detach()
    assert difference.abs().max() < 0.02
    assert difference.mean().abs() < 2e-4
    assert {name: state.dtype for name, state in optimizer.state[half].items() if name != "step"} == {
        "exp_avg": torch.bfloat16,
        "exp_avg_sq": torch.bfloat16,
    }


def test_what_bfloat16_could_not_add_is_added_in_the_mean():
    parameter = torch.nn.Parameter(torch.zeros(4096))
    optimizer = HalfStateAdamW([parameter], betas=(0.9, 0.999))
    for _ in range(1000):
        parameter.grad = torch.ones(4096)
        optimizer.step()
    second = optimizer.state[parameter]["exp_avg_sq"].float()
    assert second.mean().item() == pytest.approx(1 - 0.999**1000, rel=0.01)  # rounded to the nearest it stops at 0.25


def test_a_resumed_run_is_bit_equal():
    expected, _ = trained(HalfStateAdamW, 6)
    parameter, optimizer = trained(HalfStateAdamW, 3)
    saved = deepcopy(optimizer.state_dict())
    resumed = HalfStateAdamW([parameter], **SETTINGS)
    resumed.load_state_dict(saved)
    assert resumed.state[parameter]["exp_avg"].dtype == torch.bfloat16
    found, _ = trained(HalfStateAdamW, 6, resumed, parameter, first_step=3)
    assert torch.equal(found, expected)


def test_copies_of_a_parameter_stay_copies():
    runs = []
    for seed in range(2):
        torch.manual_seed(seed)
        runs.append(trained(HalfStateAdamW, 5)[0])
    assert torch.equal(*runs)


@pytest.mark.parametrize("kwargs", [{"lr": -1.0}, {"betas": [0.9, 1.0]}, {"betas": [0.9]}, {"fused": True}])
def test_it_is_built_by_name_and_refuses_what_it_cannot_do(kwargs):
    name = "rl_core.torch.HalfStateAdamW"
    parameter = torch.nn.Parameter(torch.zeros(3))
    assert isinstance(build_optimizer(OptimizerConfig(name=name), [parameter]), HalfStateAdamW)
    with pytest.raises(ValueError, match="does not take"):
        build_optimizer(OptimizerConfig(name=name, kwargs=kwargs), [parameter])
