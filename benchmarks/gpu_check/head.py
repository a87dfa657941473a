"""The logprob head at the vocabulary of real models."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_check.environment import seconds_of
from gpu_check.expected import Chip
from gpu_check.report import Report
from gpu_check.setup import VOCAB, Setup
from rl_core.torch.heads.logprobs import Head, head_reads

HIDDEN = 2048
CHUNKS = (256, 1024, 2048, 4096)
BYTES_PER_LOGIT = 18
"""Maximum bytes per logit of a chunk at one time: in half precision, in float32, its exponential and a gradient."""


def check(setup: Setup, report: Report) -> None:
    """Compare values and gradients with float64, then measure time and memory by chunk."""
    vocab, hidden = setup.pick(1519, VOCAB), setup.pick(64, HIDDEN)
    generator = torch.Generator(setup.torch_device).manual_seed(0)
    weight = torch.randn(vocab, hidden, device=setup.torch_device, generator=generator) * hidden**-0.5
    states = torch.randn(setup.pick(64, 8192), hidden, device=setup.torch_device, generator=generator)
    targets = torch.randint(vocab, (len(states),), device=setup.torch_device, generator=generator)
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        name = str(dtype).removeprefix("torch.")
        with report.attempt(f"{name}, vocabulary {vocab}"):
            _values(report, states.to(dtype), weight.to(dtype), targets, bound, name, num=setup.pick(16, 256))
    with report.attempt("time and memory by chunk"):
        _memory(setup, report, states.bfloat16(), weight.bfloat16(), targets)


def _values(
    report: Report, states: Tensor, weight: Tensor, targets: Tensor, bound: float, name: str, *, num: int
) -> None:
    """Compare a slice of tokens, in chunks that do not divide it, with whole logits in float64."""
    states, targets = states[:num], targets[:num]
    leaves = [states.clone().requires_grad_(), weight.clone().requires_grad_()]
    found = head_reads(leaves[0], Head(leaves[1]), targets, temperature=0.7, entropy=True, k=4, chunk_size=num // 3)
    (found.logprobs.sum() + 0.1 * found.entropy.sum()).backward()
    wide = [states.double().requires_grad_(), weight.double().requires_grad_()]
    logprobs = (wide[0] @ wide[1].T / 0.7).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    picked = logprobs.gather(1, targets[:, None])[:, 0]
    (picked.sum() + 0.1 * entropy.sum()).backward()
    expected = (picked, entropy, logprobs.topk(4).values)
    names = ("logprobs", "entropy", "top 4")
    for what, ours, theirs in zip(names, (found.logprobs, found.entropy, found.topk_logprobs), expected, strict=True):
        error = ((ours.double() - theirs).abs().max() / theirs.abs().max()).item()
        report.within(f"{what}, {name}", "whole logits in float64", error, bound)
    for what, leaf, oracle in zip(("states", "weight"), leaves, wide, strict=True):
        assert leaf.grad is not None
        assert oracle.grad is not None
        error = ((leaf.grad.double() - oracle.grad).norm() / oracle.grad.norm()).item()
        report.within(f"gradient by the {what}, {name}", "whole logits in float64", error, bound)


def _memory(setup: Setup, report: Report, states: Tensor, weight: Tensor, targets: Tensor) -> None:
    accelerator, rows = setup.accelerator, []
    for chunk in (16, 64) if setup.is_small else CHUNKS:

        def both(chunk: int = chunk) -> None:
            leaves = [states.detach().requires_grad_(), weight.detach().requires_grad_()]
            found = head_reads(leaves[0], Head(leaves[1]), targets, entropy=True, chunk_size=chunk)
            (found.logprobs.sum() + found.entropy.sum()).backward()

        held = accelerator.restart_peak()
        took = seconds_of(both, setup, repeats=2)
        peak = accelerator.peak_bytes() - held
        flops = 8 * len(states) * weight.numel()
        expected = setup.chip and _expected(setup.chip, states, weight, flops, chunk)
        report.speed(f"chunks of {chunk}", "TFLOP/s", flops / took / 1e12, expected, "the ledger's bytes and products")
        rows.append((str(chunk), f"{took * 1e3:.1f}", f"{flops / took / 1e12:.1f}", f"{peak / 1e9:.2f}"))
        if not accelerator.measures_memory:
            report.skip(f"peak memory, chunks of {chunk}", "host memory is not measured")
            continue
        # gradients in both dtypes and one chunk's product for the weight
        allowed = BYTES_PER_LOGIT * chunk * len(weight) + 10 * weight.numel() + 8 * states.numel()
        report.within(f"peak memory in GB, chunks of {chunk}", "bytes per logit of a chunk", peak / 1e9, allowed / 1e9)
    report.figures(
        f"Forward and backward with entropy, {len(states)} tokens, {tuple(weight.shape)} head, bfloat16",
        ("chunk", "ms", "TFLOP/s", "peak, GB"),
        rows,
    )


def _expected(chip: Chip, states: Tensor, weight: Tensor, flops: float, chunk: int) -> float | None:
    """Return the expected TFLOP/s of both passes, by the bytes that the ledger counts; None if rl-dtensor cannot be
    imported."""
    try:
        from ledger.head import head_costs
    except ModuleNotFoundError:
        return None
    costs = head_costs(states.shape[1], len(weight), len(states), chunk_size=chunk, entropy=True).training
    return flops / 1e12 / (flops / chip.products + costs.other.bytes / chip.memory_bytes)
