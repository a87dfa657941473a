"""AdamW with its averages in fewer bits is AdamW, right in the mean."""

from copy import deepcopy

import pytest
import torch

from rl_core.model_config import OptimizerConfig
from rl_core.torch.optim.adamw import EightBitAdamW, HalfStateAdamW, codes
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


LEAN = pytest.mark.parametrize("lean", [HalfStateAdamW, EightBitAdamW])


@LEAN
def test_the_first_step_is_that_of_torch(lean):
    found, _ = trained(lean, 1)
    full, _ = trained(torch.optim.AdamW, 1)
    torch.testing.assert_close(found, full, rtol=1e-6, atol=1e-6)


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


@LEAN
def test_what_few_bits_could_not_add_is_added_in_the_mean(lean):
    parameter = torch.nn.Parameter(torch.zeros(4096))
    optimizer = lean([parameter], betas=(0.9, 0.999))
    grad = torch.full((4096,), 0.5)
    # The largest of each block has the scale, so that the others are between codes.
    grad[::64] = 1
    for _ in range(1000):
        parameter.grad = grad.clone()
        optimizer.step()
    second = optimizer.read(optimizer.state[parameter], "exp_avg_sq")
    expected = 0.25 * (1 - 0.999**1000)
    # Rounded to the nearest, bfloat16 stops at a quarter of it, and 8 bits stop at less.
    assert second[grad == 0.5].mean().item() == pytest.approx(expected, rel=0.01)


@LEAN
def test_a_resumed_run_is_bit_equal(lean):
    expected, _ = trained(lean, 6)
    parameter, optimizer = trained(lean, 3)
    saved = deepcopy(optimizer.state_dict())
    resumed = lean([parameter], **SETTINGS)
    resumed.load_state_dict(saved)
    kept, restored = optimizer.state[parameter], resumed.state[parameter]
    assert {name: value.dtype for name, value in restored.items()} == {n: value.dtype for n, value in kept.items()}
    found, _ = trained(lean, 6, resumed, parameter, first_step=3)
    assert torch.equal(found, expected)


@LEAN
def test_copies_of_a_parameter_stay_copies(lean):
    runs = []
    for seed in range(2):
        torch.manual_seed(seed)
        runs.append(trained(lean, 5)[0])
    assert torch.equal(*runs)


def gaps(name, optimizer, state):
    """Of each element of an average, the distance of the codes around it: the bound of rounding to 8 bits."""
    table = codes(name == "exp_avg", torch.device("cpu")).double()
    place = state[name].long()
    widths = torch.cat([table.diff(), table.diff()[-1:]])
    wide = torch.maximum(widths[place], widths[(place - 1).clamp(min=0)])
    return (wide.unflatten(-1, (-1, 64)) * state[name + "_scale"].double().unsqueeze(-1)).flatten(-2)


def test_each_step_is_adamw_in_float64_on_averages_that_are_rounded_to_8_bits():
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 8192).view(64, 128))
    optimizer = EightBitAdamW([parameter], **SETTINGS)
    beta1, beta2 = SETTINGS["betas"]
    for step in range(1, 21):
        generator = torch.Generator().manual_seed(step)
        # Gradients of very different sizes within a block.
        grad = torch.randn(64, 128, generator=generator) * torch.logspace(-6, 1, 128)
        before = parameter.detach().double()
        state = optimizer.state[parameter]
        first, second = (
            optimizer.read(state, name).double() if state else torch.zeros(64, 128, dtype=torch.float64)
            for name in ("exp_avg", "exp_avg_sq")
        )
        parameter.grad = grad.clone()
        optimizer.step()
        first = beta1 * first + (1 - beta1) * grad.double()
        second = beta2 * second + (1 - beta2) * grad.double() ** 2
        size = (second / (1 - beta2**step)).sqrt() + 1e-8
        expected = before * (1 - 0.01 * 0.1) - 0.01 * first / (1 - beta1**step) / size
        torch.testing.assert_close(parameter.detach().double(), expected, rtol=1e-5, atol=1e-6)
        for name, average in (("exp_avg", first), ("exp_avg_sq", second)):
            off = (optimizer.read(state, name).double() - average).abs()
            assert (off <= gaps(name, optimizer, state) * 1.001).all(), name
            scale = average.abs().unflatten(-1, (-1, 64)).amax(-1)
            torch.testing.assert_close(state[name + "_scale"].double(), scale, rtol=1e-6, atol=0)
        assert (optimizer.read(state, "exp_avg_sq")[grad != 0] > 0).all()


def test_small_parameters_and_those_without_whole_blocks_keep_float32():
    shapes = ((4095,), (65, 65), (64, 64), ())
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = EightBitAdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    dtypes = [optimizer.state[parameter]["exp_avg"].dtype for parameter in parameters]
    assert dtypes == [torch.float32, torch.float32, torch.uint8, torch.float32]


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_seven_decades_and_symmetric(signed):
    table = codes(signed, torch.device("cpu"))
    assert len(table) == 255
    assert (table.diff() > 0).all()
    assert (table[0], table[-1]) == (-1 if signed else 0, 1)
    assert 0 in table
    if signed:
        assert torch.equal(table, -table.flip(0))
    # Numbers of a decade are at most this far apart, relative to the decade's end.
    top = table[table > 0.1].diff()
    assert top.max() < (0.015 if signed else 0.0075)


@pytest.mark.parametrize(
    "kwargs",
    [{"lr": -1.0}, {"betas": [0.9, 1.0]}, {"betas": [0.9]}, {"fused": True}, {"block_size": 0}, {"min_8bit_size": -1}],
)
@LEAN
def test_it_is_built_by_name_and_refuses_what_it_cannot_do(lean, kwargs):
    name = f"rl_core.torch.{lean.__name__}"
    parameter = torch.nn.Parameter(torch.zeros(3))
    assert isinstance(build_optimizer(OptimizerConfig(name=name), [parameter]), lean)
    with pytest.raises(ValueError, match="does not take"):
        build_optimizer(OptimizerConfig(name=name, kwargs=kwargs), [parameter])
