"""Fused kernels at the sizes of an 8B model and of a mixture of experts: values, gradients, and speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gpu_check.environment import seconds_of
from gpu_check.report import Report, Skip
from gpu_check.setup import VOCAB, Setup
from rl_core.torch.kernels.devices import takes
from rl_core.torch.kernels.exact import check_exact_rows
from rl_core.torch.kernels.float8 import (
    E4M3,
    E5M2,
    Float8Matrix,
    largest_of,
    rounded_columns,
    rounded_rows,
    rounded_whole,
)
from rl_core.torch.kernels.norm import NormForm, add_rms_norm, rms_norm
from rl_core.torch.kernels.permutation import collect, group_by_expert, spread
from rl_core.torch.kernels.rotary import HeadNorm, rotated
from rl_core.torch.kernels.swiglu import swiglu, swiglu_of_halves
from rl_core.torch.kernels.vocabulary import LogitForm, softmax_statistics
from rl_core.torch.transport.digest import begin_digest, digest

ORACLE = "the formula in float64"
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of the largest difference, relative to the largest value; values that are used again are rounded again."""
NUM_CHECKED = 300
"""Tokens whose values are compared, which no block divides."""
SOFTMAX, DIGEST = "softmax of logits", "digest"
FORM = NormForm(1e-6)


@dataclass(frozen=True)
class Case:
    """A kernel.

    Args:
        function: Function of the tensors; one tensor or several.
        shapes: Maps a number of tokens to the shapes of the inputs.
        num_moved: Maps the inputs to the elements that forward and backward pass must read and write.
    """

    function: Callable[..., Tensor | tuple[Tensor, ...]]
    shapes: Callable[[int], Sequence[tuple[int, ...]]]
    num_moved: Callable[[Sequence[Tensor]], int]


def check(setup: Setup, report: Report) -> None:
    """Compare each kernel with its formula, then measure how fast it moves its bytes."""
    rows: list[tuple[str, ...]] = []
    for name, case in _cases(setup).items():
        for dtype, bound in BOUNDS.items():
            subject = f"{name}, {str(dtype).removeprefix('torch.')}"
            with report.attempt(subject):
                inputs = _drawn(case.shapes(setup.pick(20, NUM_CHECKED)), setup, dtype)
                report.holds(f"{subject}: device", "runs the kernel", takes(*inputs) == setup.kind.runs_on_gpus, "")
                report.within(subject, ORACLE, _worst_error(case.function, inputs), bound)
        with report.attempt(f"{name}: speed"):
            rows.append((name, *_speed(setup, report, name, case)))
    with report.attempt(SOFTMAX):
        rows.append((SOFTMAX, *_softmax(setup, report)))
    report.figures("Forward and backward, bfloat16", ("kernel", "ms", "GB/s"), rows)
    others: list[tuple[str, ...]] = []
    with report.attempt(DIGEST):
        others.append((DIGEST, *_digest(setup, report)))
    for name, cast in CASTS.items():
        with report.attempt(name):
            others.append((name, *_cast(setup, report, name, cast)))
    report.figures("Once", ("kernel", "ms", "GB/s"), others)
    for dtype in BOUNDS:
        subject = f"rows alone and among others, {str(dtype).removeprefix('torch.')}"
        with report.attempt(subject):
            _exact(setup, report, subject, dtype)


def _cases(setup: Setup) -> dict[str, Case]:
    hidden, heads, size, inner = setup.pick(64, 4096), setup.pick(2, 32), setup.pick(32, 128), setup.pick(96, 12288)
    experts, chosen, width = setup.pick(4, 128), setup.pick(2, 8), setup.pick(64, 2048)
    generator = torch.Generator().manual_seed(0)

    def places(num_tokens: int) -> tuple[Tensor, int]:
        ids = torch.rand(num_tokens, experts, generator=generator).topk(chosen).indices.to(setup.torch_device)
        found, ends = group_by_expert(ids, experts)
        return found, int(ends[-1])

    def spread_and_collect(x: Tensor) -> Tensor:
        found, num_rows = routed[len(x)]
        return collect(spread(x, found, num_rows), found)

    counts = setup.pick(20, NUM_CHECKED), setup.pick(64, 8192)
    routed = {count: places(count) for count in counts}
    angles = torch.rand(1, max(counts), size, device=setup.torch_device, dtype=torch.float64)

    def turned(x: Tensor, weight: Tensor) -> Tensor:
        cos, sin = (part[:, : x.shape[2]].to(x.dtype) for part in (angles.cos(), angles.sin()))
        return rotated(x, cos, sin, HeadNorm(weight, FORM))

    return {
        "RMSNorm": Case(
            lambda x, weight: rms_norm(x, weight, FORM),
            lambda tokens: [(tokens, hidden), (hidden,)],
            lambda inputs: 5 * inputs[0].numel(),
        ),
        "RMSNorm of a sum": Case(
            lambda x, addend, weight: add_rms_norm(x, addend, weight, FORM),
            lambda tokens: [(tokens, hidden), (tokens, hidden), (hidden,)],
            lambda inputs: 8 * inputs[0].numel(),
        ),
        "norm and rotation of heads": Case(
            turned, lambda tokens: [(1, heads, tokens, size), (size,)], lambda inputs: 5 * inputs[0].numel()
        ),
        "SwiGLU": Case(swiglu, lambda tokens: [(tokens, inner), (tokens, inner)], lambda inputs: 8 * inputs[0].numel()),
        "weighted SwiGLU of halves": Case(
            swiglu_of_halves, lambda tokens: [(tokens, inner), (tokens,)], lambda inputs: 4 * inputs[0].numel()
        ),
        "tokens to experts and back": Case(
            spread_and_collect, lambda tokens: [(tokens, width)], lambda inputs: 4 * (1 + chosen) * inputs[0].numel()
        ),
    }


def _drawn(shapes: Sequence[tuple[int, ...]], setup: Setup, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator(setup.torch_device).manual_seed(0)
    return [torch.randn(*shape, device=setup.torch_device, generator=generator).to(dtype) for shape in shapes]


def _results(function: Callable[..., Tensor | tuple[Tensor, ...]], leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    results = function(*leaves)
    return results if isinstance(results, tuple) else (results,)


def _worst_error(function: Callable[..., Tensor | tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> float:
    """Return the largest relative difference of results and gradients; NaN if there is one."""
    kernels, formulas = (
        _with_gradients(function, [tensor.to(dtype) for tensor in inputs]) for dtype in (inputs[0].dtype, torch.float64)
    )
    errors = [
        (found.double() - expected).abs().max() / expected.abs().max()
        for found, expected in zip(kernels, formulas, strict=True)
    ]
    return torch.stack(errors).max().item()


def _with_gradients(function: Callable[..., Tensor | tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    results = _results(function, leaves)
    generator = torch.Generator(inputs[0].device).manual_seed(1)
    grads = [torch.randn(*each.shape, device=each.device, generator=generator).to(each.dtype) for each in results]
    return [*(each.detach() for each in results), *torch.autograd.grad(results, leaves, grads)]


def _speed(setup: Setup, report: Report, name: str, case: Case) -> tuple[str, str]:
    """Return milliseconds and bytes per second."""
    inputs = _drawn(case.shapes(setup.pick(64, 8192)), setup, torch.bfloat16)
    leaves = [tensor.requires_grad_() for tensor in inputs]
    grads = [torch.randn_like(each) for each in _results(case.function, leaves)]

    def both() -> None:
        torch.autograd.grad(_results(case.function, leaves), leaves, grads)

    return _figures(setup, report, name, both, 2 * case.num_moved(inputs))


def _softmax(setup: Setup, report: Report) -> tuple[str, str]:
    """Compare the statistics of a chunk of logits, which are read once; section `head` has their gradient."""
    products = torch.randn(setup.pick(16, 2048), setup.pick(509, VOCAB), device=setup.torch_device).bfloat16()
    form = LogitForm(temperature=0.7)
    if not takes(products):
        raise Skip("no kernel runs on this device")
    found = softmax_statistics(products, form)
    expected = form(products.double()).logsumexp(-1)
    error = (found.largest.double() + found.total.double().log() - expected).abs().max().item()
    report.within("logarithm of the sum of a softmax", ORACLE, error, BOUNDS[torch.float32])
    return _figures(setup, report, SOFTMAX, partial(softmax_statistics, products, form), 2 * products.numel())


def _digest(setup: Setup, report: Report) -> tuple[str, str]:
    """Compare digests of bytes that lanes, blocks and programs do not divide evenly."""
    num_bytes = setup.pick(2**16, 2**30) + 8 * 77 + 3
    values = torch.randint(256, (num_bytes,), dtype=torch.uint8, device=setup.torch_device)
    for start, count in ((0, num_bytes), (3, 2**16), (8, 5)):
        part = values[start : start + count]
        found, expected = digest(part), digest(part.cpu())
        report.holds(f"{DIGEST} of {count} bytes", "the host's", found == expected, f"{found}, {expected} on the host")
    return _figures(setup, report, DIGEST, partial(begin_digest, values), num_bytes)


def _exact(setup: Setup, report: Report, subject: str, dtype: torch.dtype) -> None:
    """Check the condition of `policy.generation.exact`, which is offered on CPUs in float32 only."""
    hidden, inner = setup.pick(64, 4096), setup.pick(96, 12288)
    try:
        check_exact_rows([(inner, hidden), (hidden, inner)], dtype, device=setup.torch_device)
    except ValueError as error:
        if not setup.kind.runs_on_gpus and dtype == torch.float32:
            raise
        raise Skip(str(error)) from None
    report.holds(subject, "the same bits", True, "they have")


BOTH = "float8 by row and by column"
CASTS: dict[str, Callable[[Tensor], list[tuple[Float8Matrix, int]]]] = {
    "float8 by row": lambda x: [(rounded_rows(x)[0], 1)],
    BOTH: lambda x: _by_row_and_column(x),
    "float8 by column": lambda x: [(rounded_columns(x, x.abs().amax(0).float()), -1)],
    "float8 E4M3 with one scale, both ways": lambda x: _whole(x, E4M3),
    "float8 E5M2 with one scale, both ways": lambda x: _whole(x, E5M2),
}
"""Casts to 8 bits; each returns matrices, with -1 if rows and columns are exchanged."""


def _by_row_and_column(x: Tensor) -> list[tuple[Float8Matrix, int]]:
    by_row, largest = rounded_rows(x, with_columns=True)
    return [(by_row, 1), (rounded_columns(by_row, largest), -1)]


def _whole(x: Tensor, dtype: torch.dtype) -> list[tuple[Float8Matrix, int]]:
    as_it_is, exchanged = rounded_whole(x, largest_of(x), dtype)
    return [(as_it_is, 1), (exchanged, -1)]


def _cast(
    setup: Setup, report: Report, name: str, cast: Callable[[Tensor], list[tuple[Float8Matrix, int]]]
) -> tuple[str, str]:
    """Compare casts with the bits of the formula on the host; values must be within half a step."""
    (x,) = _drawn([(NUM_CHECKED, setup.pick(333, 4097))], setup, torch.bfloat16)
    x[7] = 0
    found, on_host = cast(x), cast(x.cpu())
    errors = [_steps_off(matrix, x if order > 0 else x.T) for matrix, order in found]
    # A small value that is rounded by row and then by column is off by half a step of each, and one may be twice as
    # large as the other.
    bound = 3.0 if name == BOTH else 1 + 1e-6
    report.within(f"{name}: halves of a step", ORACLE, max(errors), bound)
    same = [
        torch.equal(ours.cpu().view(torch.uint8), theirs.view(torch.uint8))
        for (matrix, _), (host, _) in zip(found, on_host, strict=True)
        for ours, theirs in zip(matrix, host, strict=True)
    ]
    if takes(x):
        report.holds(f"{name}: bits", "the formula on the host", all(same), f"{sum(same)} of {len(same)} tensors")
    (large,) = _drawn([(setup.pick(64, 8192), setup.pick(64, 4096))], setup, torch.bfloat16)
    return _figures(setup, report, name, partial(cast, large), (2 + len(found)) * large.numel())


def _steps_off(matrix: Float8Matrix, x: Tensor) -> float:
    """Return the largest difference from the values, in halves of a step of 8 bits."""
    values, scales = matrix.values.double(), matrix.scales.double()
    info = torch.finfo(matrix.values.dtype)
    step = (x.double().abs() * info.eps).maximum(info.smallest_normal * info.eps * scales) / 2
    return ((values * scales - x.double()).abs() / step).max().item()


def _figures(setup: Setup, report: Report, name: str, work: Callable[[], object], num_bytes: int) -> tuple[str, str]:
    took = seconds_of(work, setup, repeats=setup.pick(2, 20))
    expected = setup.chip and setup.chip.memory_bytes / 1e9
    report.speed(name, "GB/s", num_bytes / took / 1e9, expected, "bytes of inputs and outputs")
    return f"{took * 1e3:.3f}", f"{num_bytes / took / 1e9:.0f}"
