"""Linear layers in float8: products and gradients, speed, and steps of a whole worker, by recipe."""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor, nn

from gpu_check.environment import seconds_of
from gpu_check.oracle import relative
from gpu_check.report import Report
from gpu_check.setup import Setup
from gpu_check.workers import SGD, NextToken, batch_of, config_of, numbers, open_worker, packed
from rl_dtensor.config import Float8Config, Float8Recipe
from rl_dtensor.model.layers.low_precision import MULTIPLE, convert, device_problem

RECIPES = get_args(Float8Recipe)
ROUNDING = 2.0**-4 / 3**0.5
"""Root mean square of errors up to half a step of 3 bits of mantissa, at the lower end of a binade."""
EXACT = 5e-3
"""Relative error of products in bfloat16."""
EMULATED_BOUND = 5e-3
"""Relative difference of kernels and emulation, which multiply the same values and add them up in another order."""
STEP_BOUNDS = {"loss": 2e-2, "grad_norm": 0.1}
LENGTHS = (9, 3, 64, 1, 33, 2, 17)
NUM_STEPS = 3
NAMES = ("output", "gradient by inputs", "gradient by weights")


def check(setup: Setup, report: Report) -> None:
    """Check every recipe; emulated if this device has no kernels."""
    problem = device_problem()
    if problem:
        report.skip("kernels", problem)
    rows: list[tuple[str, ...]] = []
    for recipe in RECIPES:
        with report.attempt(f"{recipe}: products"):
            _products(setup, report, recipe, emulate=bool(problem))
        with report.attempt(f"{recipe}: speed"):
            rows.append(_speed(setup, report, recipe, emulate=bool(problem)))
        with report.attempt(f"{recipe}: steps"):
            _steps(setup, report, recipe, emulate=bool(problem))
    report.figures("Forward and backward of one layer", ("recipe", "bfloat16, ms", "float8, ms", "faster"), rows)


def _layer(setup: Setup, inputs: int, outputs: int) -> nn.Module:
    torch.manual_seed(0)
    linear = nn.Linear(inputs, outputs, bias=False, device=setup.torch_device, dtype=torch.bfloat16)
    return nn.ModuleDict({"linear": linear})


def _converted(model: nn.Module, recipe: str, *, emulate: bool) -> nn.Module:
    settings: dict[str, Any] = {"enabled": True, "recipe": recipe, "emulate": emulate}
    convert(model, {"linear"}, Float8Config(**settings))
    return model


def _passes(model: Any, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, and the gradients of inputs and weights."""
    leaf = x.detach().requires_grad_()
    model["linear"].weight.grad = None
    out = model["linear"](leaf)
    out.backward(grad)
    assert leaf.grad is not None
    return out.detach(), leaf.grad, model["linear"].weight.grad


def _products(setup: Setup, report: Report, recipe: str, *, emulate: bool) -> None:
    inputs, outputs, tokens = setup.pick(64, 4096), setup.pick(96, 12288), setup.pick(MULTIPLE, 2048)
    generator = torch.Generator(setup.torch_device).manual_seed(1)
    x, grad = (
        torch.randn(tokens, width, device=setup.torch_device, generator=generator).bfloat16()
        for width in (inputs, outputs)
    )
    weight = dict(_layer(setup, inputs, outputs).named_parameters())["linear.weight"].detach().double()
    exact = (x.double() @ weight.T, grad.double() @ weight, grad.double().T @ x.double())
    found = _passes(_converted(_layer(setup, inputs, outputs), recipe, emulate=emulate), x, grad)
    of_gradients = 2.0 if recipe == "tensorwise" else 1.0  # 2 bits of mantissa instead of 3
    bounds = [2**0.5 * ROUNDING, *[(1 + of_gradients**2) ** 0.5 * ROUNDING] * 2]
    if recipe == "rowwise_with_gw_hp":
        bounds[2] = EXACT
    for name, ours, theirs, bound in zip(NAMES, found, exact, bounds, strict=True):
        error = float((ours.double() - theirs).norm() / theirs.norm())
        report.within(f"{recipe}: {name}", "float64, and the rounding of both operands", error, bound)
    if emulate:
        return
    rounded = _passes(_converted(_layer(setup, inputs, outputs), recipe, emulate=True), x, grad)
    for name, ours, theirs in zip(NAMES, found, rounded, strict=True):
        error = float((ours.double() - theirs.double()).norm() / theirs.double().norm())
        report.within(f"{recipe}: {name}", "the same values, multiplied in bfloat16", error, EMULATED_BOUND)


def _speed(setup: Setup, report: Report, recipe: str, *, emulate: bool) -> tuple[str, ...]:
    inputs, outputs, tokens = setup.pick(64, 4096), setup.pick(96, 12288), setup.pick(MULTIPLE, 8192)
    x, grad = (torch.randn(tokens, width, device=setup.torch_device).bfloat16() for width in (inputs, outputs))
    models = [_layer(setup, inputs, outputs), _converted(_layer(setup, inputs, outputs), recipe, emulate=emulate)]
    plain, ours = (seconds_of(lambda model=model: _passes(model, x, grad), setup, repeats=3) for model in models)
    report.speed(f"{recipe}, one layer", "TFLOP/s", 6 * tokens * inputs * outputs / ours / 1e12, None, "")
    return recipe, f"{plain * 1e3:.2f}", f"{ours * 1e3:.2f}", f"{plain / ours:.2f}"


def _steps(setup: Setup, report: Report, recipe: str, *, emulate: bool) -> None:
    """Train a few steps of a small model in both precisions."""
    from rl_dtensor.plugin import PLUGIN

    folder, batch = setup.folder(setup.parity), batch_of(LENGTHS, setup.parity.vocab)
    config = config_of(folder, 128, optimizer=SGD, max_grad_norm=None, logprob_chunk_size=32, **packed(80))
    steps = []
    for backend in ({}, {"float8": {"enabled": True, "recipe": recipe, "emulate": emulate}}):
        with open_worker(PLUGIN, config, setup, **backend) as worker:
            steps.append([numbers(worker.train_step(batch, NextToken())) for _ in range(NUM_STEPS)])
    for name, bound in STEP_BOUNDS.items():
        error = max(relative(ours[name], theirs[name]) for theirs, ours in zip(*steps, strict=True))
        report.within(f"{recipe}: {name} over {NUM_STEPS} steps", "the same worker in bfloat16", error, bound)
