"""Versions, the device, and speeds to compare others with."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import torch

from gpu_check.report import Report
from gpu_check.setup import Setup
from rl_core.torch.kernels.norm import NormForm, rms_norm
from rl_core.torch.training.flops import peak_flops

PACKAGES = Path(__file__).resolve().parents[2] / "packages"
DISTRIBUTIONS = (
    "torch",
    "triton",
    "transformers",
    "peft",
    "safetensors",
    "numpy",
    "pydantic",
    "omegaconf",
    "megatron-core",
    "transformer-engine",
    "flash-attn",
)
LEAST_SHARE = 0.5
"""Share of a GPU's peak that a large product of matrices reaches; less indicates a slow or shared GPU."""


def check(setup: Setup, report: Report) -> None:
    """Describe the machine; measure a product of matrices and copies."""
    asked = _asked_for()
    versions = [(name, _version(name), asked.get(name, "")) for name in DISTRIBUTIONS]
    report.figures("Versions", ("", "version", "asked for by our packages"), versions)
    report.figures("Machine", ("", ""), _machine(setup))
    with report.attempt("product of matrices"):
        _products(setup, report)
    with report.attempt("copies"):
        _copies(setup, report)
    with report.attempt("launches"):
        _launches(setup, report)


def _asked_for() -> dict[str, str]:
    """Return the ranges of distributions in the `pyproject.toml` of our packages."""
    found: dict[str, str] = {}
    for path in sorted(PACKAGES.glob("*/pyproject.toml")):
        project = tomllib.loads(path.read_text())["project"]
        extras = project.get("optional-dependencies", {})
        for requirement in [*project["dependencies"], *(one for extra in extras.values() for one in extra)]:
            name, allowed = re.match(r"([\w.-]+)(?:\[.*?\])?(.*)", requirement).groups()
            found.setdefault(name, allowed)
    return found


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _machine(setup: Setup) -> list[tuple[str, str]]:
    rows = [
        ("processor", f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}"),
        ("torch threads", str(torch.get_num_threads())),
    ]
    if setup.accelerator.measures_memory:
        properties = torch.cuda.get_device_properties(setup.torch_device)
        rows += [
            ("GPU", properties.name),
            ("capability", f"{properties.major}.{properties.minor}, {properties.multi_processor_count} processors"),
            ("memory", f"{properties.total_memory / 1e9:.1f} GB"),
            ("in use before the check", f"{setup.accelerator.used_bytes() / 1e9:.2f} GB"),
            ("CUDA of torch", str(torch.version.cuda)),
            ("driver", _driver()),
            ("NCCL", ".".join(map(str, torch.cuda.nccl.version()))),
        ]
    return rows


def _driver() -> str:
    """Return the version of NVIDIA's driver."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown: nvidia-smi does not answer"


def _products(setup: Setup, report: Report) -> None:
    size = setup.pick(256, 8192)
    a, b = (torch.randn(size, size, device=setup.torch_device, dtype=torch.bfloat16) for _ in range(2))
    rate = 2 * size**3 / seconds_of(lambda: a @ b, setup, repeats=setup.pick(3, 10))
    report.figures("Products", ("", "TFLOP/s"), [(f"bfloat16, {size} x {size} x {size}", f"{rate / 1e12:.2f}")])
    chip = setup.chip
    report.speed("product of matrices", "TFLOP/s", rate / 1e12, chip and chip.products / 1e12, "large products")
    name = setup.kind.chip
    if not name:
        report.skip("the GPU's peak is known", "this machine has no GPU")
        return
    peak = peak_flops(name)
    report.holds("the GPU's peak is known", "rl_core.torch.training.flops", peak is not None, name)
    if peak is not None:
        found = f"{rate / peak:.0%} of {peak / 1e12:.0f} TFLOP/s (at least {LEAST_SHARE:.0%})"
        report.holds("speed of a product", "the data sheet's peak", rate >= LEAST_SHARE * peak, found)


def _copies(setup: Setup, report: Report) -> None:
    num_bytes = setup.pick(2**20, 2**30)
    there = torch.empty(num_bytes, dtype=torch.uint8, device=setup.torch_device)
    other = torch.empty_like(there)
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=setup.kind.pins_host_memory)
    rows = [
        ("within the device", lambda: other.copy_(there)),
        ("from pinned host memory", lambda: there.copy_(host)),
        ("to pinned host memory", lambda: host.copy_(there)),
    ]
    taken = [(name, num_bytes / seconds_of(work, setup, repeats=3) / 1e9) for name, work in rows]
    report.figures(
        f"Copies of {num_bytes / 1e6:.0f} MB", ("", "GB/s"), [(name, f"{speed:.1f}") for name, speed in taken]
    )
    chip = setup.chip
    for name, speed in taken:
        within = name == rows[0][0]
        expected = chip and (chip.memory_bytes / 2 if within else chip.host_bytes) / 1e9
        basis = "bandwidth of the memory, read and written" if within else "PCIe 5"
        report.speed(f"copies {name}", "GB/s", speed, expected, basis)


def _launches(setup: Setup, report: Report) -> None:
    """Time of the host for an operator, of which the device has little to do."""
    x, weight = (torch.ones(size, device=setup.torch_device, dtype=torch.bfloat16) for size in ((8, 64), (64,)))
    leaf, form, number = x.clone().requires_grad_(), NormForm(1e-6), setup.pick(20, 500)
    rows = {
        "operation of torch": lambda: x.mul(x),
        "the same, with its gradient": lambda: torch.autograd.grad(leaf.mul(x), leaf, x),
        "operator of this project": lambda: rms_norm(x, weight, form),
        "the same, with its gradient ": lambda: torch.autograd.grad(rms_norm(leaf, weight, form), leaf, x),
    }
    taken = [(name, f"{seconds_of(work, setup, repeats=number) * 1e6:.1f}") for name, work in rows.items()]
    report.figures("Launches of the host", ("", "us"), taken)


def seconds_of(work: Callable[[], object], setup: Setup, *, repeats: int) -> float:
    """Return the average seconds of one run, after one that does not count."""
    work()
    setup.accelerator.synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        work()
    setup.accelerator.synchronize()
    return (time.perf_counter() - started) / repeats
