"""Programs compile for GPUs as they are launched, and keep what they hold in registers."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rl_core.torch.heads.logprobs import Head, LogitTransform, head_reads
from rl_core.torch.kernels import byte_programs, layer_programs, row_programs
from rl_core.torch.kernels.float8 import E5M2, largest_of, rounded_columns, rounded_rows, rounded_whole
from rl_core.torch.kernels.norm import NormForm, add_rms_norm, rms_norm
from rl_core.torch.kernels.permutation import collect, spread, spread_weighted
from rl_core.torch.kernels.rotary import HeadNorm, rotated
from rl_core.torch.kernels.swiglu import swiglu as gated
from rl_core.torch.kernels.swiglu import swiglu_of_halves

PROGRAMS = {
    layer_programs: (
        *("rms_norm_forward", "rms_norm_backward", "rms_norm_weight_gradient"),
        *("rotary_forward", "rotary_backward", "swiglu_forward", "swiglu_backward"),
    ),
    row_programs: ("spread_rows", "collect_rows", "softmax_statistics", "softmax_gradient"),
    byte_programs: ("float8_rows", "float8_tiles", "mixed_sums"),
}
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv",
}
TYPES |= {torch.float8_e5m2: "*fp8e5"}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class Recorder:
    """A program whose launches are noted instead of run."""

    def __init__(self, program, launches):
        self.program = program
        self.launches = launches

    def __getitem__(self, grid):
        return lambda *args, **options: self.launches.append((self.program, args, options))


@pytest.fixture
def launches(monkeypatch):
    """Launches of the kernels on tensors of a CPU, which are told to take them."""
    found = []
    for module, names in PROGRAMS.items():
        for name in names:
            monkeypatch.setattr(module, name, Recorder(getattr(module, name), found))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return found


def resources(program, args, options, folder) -> dict[str, int]:
    """Registers, stack and local memory of a launch on Hopper, from the machine code."""
    warps = options.pop("num_warps")
    given = {**dict(zip(program.arg_names, args, strict=False)), **options}
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(program.arg_names):
        value = given[name]
        is_aligned = isinstance(value, torch.Tensor) or (type(value) is int and value % 16 == 0)
        if program.params[index].is_constexpr or value is None:
            signature[name], constants[name] = "constexpr", value
        else:
            signature[name] = TYPES[value.dtype] if isinstance(value, torch.Tensor) else _number(value)
            attributes |= {(index,): [["tt.divisibility", 16]]} if is_aligned else {}
    source = ASTSource(program, signature, constants, attributes)
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm["cubin"]
    file = folder / "code.cubin"
    file.write_bytes(code)
    shown = subprocess.run([CUOBJDUMP, "--dump-resource-usage", file], capture_output=True, text=True, check=True)
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", shown.stdout)}


def _number(value):
    return "fp32" if isinstance(value, float) else "i32"


def backward(*results):
    sum(result.float().sum() for result in results).backward()


def leaf(*shape):
    return torch.zeros(*shape, dtype=torch.bfloat16, requires_grad=True)


def norms(size):
    backward(*add_rms_norm(leaf(4, size), leaf(4, size), leaf(size), NormForm(1e-6)))


def plain_norm():
    backward(rms_norm(leaf(4, 4096), leaf(4096), NormForm(1e-6, offset=1.0, rounds_first=False)))


def rotations(size, rotary, form):
    weight = None if form is None else HeadNorm(leaf(size), form)
    angles = torch.zeros(1, 4, rotary, dtype=torch.bfloat16)
    backward(rotated(leaf(1, 32, 4, size), angles, angles, weight))


def gates():
    backward(gated(leaf(4, 12288), leaf(4, 12288)))


def weighted_gates():
    backward(swiglu_of_halves(leaf(4, 1536), leaf(4)))


def experts(size, num_places):
    places = torch.zeros(4, num_places, dtype=torch.int32)
    rows, weights = spread_weighted(leaf(4, size), leaf(4, num_places), places, 4 * num_places)
    backward(collect(rows, places), weights)


def heads(transform, **reads):
    targets = torch.zeros(4, dtype=torch.int64)
    found = head_reads(leaf(4, 16), Head(leaf(151_936, 16), None, transform), targets, **reads)
    backward(found.logprobs, found.entropy, found.topk_logprobs)


def roundings():
    x, weight = (torch.zeros(16, 4096, dtype=torch.bfloat16) for _ in range(2))
    rounded, largest = rounded_rows(x, with_columns=True)
    rounded_rows(weight)
    rounded_columns(rounded, largest)
    rounded_columns(weight, largest)
    for parts in ({}, {"rows": False}, {"columns": False}):
        rounded_whole(x, largest_of(x), E5M2, **parts)


LAUNCHES = {
    "norm of 8B": (lambda: norms(4096), 2),
    "norm of 70B": (lambda: norms(8192), 2),
    "norm of 405B": (lambda: norms(16_384), 3),
    "norm of Gemma": (plain_norm, 2),
    "rotation of Qwen3": (lambda: rotations(128, 128, NormForm(1e-6)), 2),
    "rotation of Llama": (lambda: rotations(128, 128, None), 2),
    "rotation of Qwen3-Next": (lambda: rotations(256, 64, NormForm(1e-6, offset=1.0, rounds_first=False)), 2),
    "gate": (gates, 2),
    "weighted gate": (weighted_gates, 2),
    "experts of 30B-A3B": (lambda: experts(2048, 8), 4),
    "ranks of DeepSeek-V3": (lambda: experts(7168, 64), 4),
    "roundings to 8 bits": (roundings, 7),
    "digest": (lambda: torch.ops.rl_core.mixed_sums(torch.zeros(2**12, dtype=torch.int64), 0), 1),
    "head": (lambda: heads(LogitTransform(), entropy=True), 2),
    "head with all reads": (lambda: heads(LogitTransform(0.5, 30.0), entropy=True, collision=True, k=2), 2),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_programs_compile_for_hopper_without_spills(launches, tmp_path, name):
    launch, count = LAUNCHES[name]
    launch()
    assert len(launches) == count
    for program, args, options in launches:
        found = resources(program, args, dict(options), tmp_path)
        assert found["LOCAL"] == found["STACK"] == 0, (program.__name__, found)
        assert found["REG"] <= 65536 // (32 * options["num_warps"])


def test_copies_of_tokens_launch_nothing_if_kernels_are_turned_off(launches):
    places = torch.tensor([[1], [0]])
    rows, weights = spread_weighted(leaf(2, 16), leaf(2, 1), places, 2, fused=False)
    backward(collect(spread(rows, places, 2, fused=False), places, fused=False), weights)
    assert not launches
