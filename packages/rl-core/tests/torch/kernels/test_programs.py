"""Programs compile for GPUs as they are launched, and keep what they hold in registers."""

import logging
import re
import subprocess
from itertools import product
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from rl_core.testing.exhaustive import partly_exhaustive
from rl_core.torch.heads.logprobs import Head, LogitTransform, head_reads
from rl_core.torch.kernels import byte_programs, layer_programs, row_programs
from rl_core.torch.kernels.float8 import E5M2, largest_of, rounded_columns, rounded_rows, rounded_whole
from rl_core.torch.kernels.norm import NormForm, add_rms_norm, rms_norm
from rl_core.torch.kernels.permutation import collect, spread, spread_weighted
from rl_core.torch.kernels.rotary import HeadNorm, rotated, rotated_pair
from rl_core.torch.kernels.swiglu import swiglu as gated
from rl_core.torch.kernels.swiglu import swiglu_of_halves
from rl_core.torch.transport import digest

logger = logging.getLogger(__name__)

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
LOADS = {"loads": r"ld\.global", "wide loads": r"ld\.global[\w:.]*\.v4"}
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


def resources(program, args, options, capability, folder) -> dict[str, int]:
    """Registers, stack, local and shared memory of a launch on a GPU, from the machine code; by `LOADS`, loads and
    loads of 16 bytes."""
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
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    file = folder / "code.cubin"
    file.write_bytes(compiled.asm["cubin"])
    shown = subprocess.run([CUOBJDUMP, "--dump-resource-usage", file], capture_output=True, text=True, check=True)
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", shown.stdout)}
    loads = {name: len(re.findall(pattern, compiled.asm["ptx"])) for name, pattern in LOADS.items()}
    return {"WARPS": warps, **found, "SHARED": compiled.metadata.shared, **loads}


def occupancy(found) -> float:
    """Share of the warps of a Hopper multiprocessor that can be resident."""
    registers = -(-found["REG"] // 8) * 8 * 32 * found["WARPS"]
    programs = min(65536 // registers, 64 // found["WARPS"], 233_472 // (found["SHARED"] + 1024))
    return programs * found["WARPS"] / 64


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
    both = (weight, None if form is None else HeadNorm(leaf(size), form))
    backward(*rotated_pair(leaf(1, 32, 4, size), leaf(1, 8, 4, size), angles, angles, both))


def gates():
    backward(gated(leaf(4, 12288), leaf(4, 12288)))


def weighted_gates():
    backward(swiglu_of_halves(leaf(4, 1536), leaf(4)))


def experts(size, num_places):
    places = torch.zeros(4, num_places, dtype=torch.int32)
    rows, weights = spread_weighted(leaf(4, size), leaf(4, num_places), places, 4 * num_places)
    backward(collect(rows, places), weights)


def heads(transform, vocabulary=151_936, **reads):
    targets = torch.zeros(4, dtype=torch.int64)
    found = head_reads(leaf(4, 16), Head(leaf(vocabulary, 16), None, transform), targets, **reads)
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
    "digest": (lambda: digest._sums(torch.zeros(2**12, dtype=torch.int64), 0), 1),
    "head": (lambda: heads(LogitTransform(), entropy=True), 2),
    "head with all reads": (lambda: heads(LogitTransform(0.5, 30.0), entropy=True, collision=True, k=2), 2),
}


CAPABILITIES = {"hopper": 90, "blackwell": 100}


@pytest.mark.parametrize(
    ("gpu", "name"), partly_exhaustive(product(CAPABILITIES, LAUNCHES), always=[("hopper", name) for name in LAUNCHES])
)
def test_programs_compile_without_spills(launches, tmp_path, gpu, name):
    """`--every-case --log-cli-level=INFO` prints a table of all programs."""
    launch, count = LAUNCHES[name]
    launch()
    assert len(launches) == count
    for program, args, options in launches:
        found = resources(program, args, dict(options), CAPABILITIES[gpu], tmp_path)
        logger.info("%-9s %-24s %-24s occupancy %.2f, %s", gpu, name, program.__name__, occupancy(found), found)
        assert found["LOCAL"] == found["STACK"] == 0, (program.__name__, found)
        assert found["REG"] <= 65536 // (32 * options["num_warps"])


@pytest.mark.parametrize("size", partly_exhaustive((64, 896, 2048, 4096, 8192), always=[4096]))
def test_half_of_a_multiprocessor_is_in_use_when_norms_go_backward(launches, tmp_path, size):
    norms(size)
    (_, _, _), (program, args, options) = launches
    assert occupancy(resources(program, args, dict(options), 90, tmp_path)) >= 0.5


def test_a_vocabulary_of_any_size_is_read_16_bytes_at_a_time(launches, tmp_path):
    heads(LogitTransform(), 151_669, entropy=True)
    for program, args, options in launches:
        found = resources(program, args, dict(options), 90, tmp_path)
        per_thread = options["BLOCK"] // (32 * options["num_warps"])
        assert found["wide loads"] == 2 * per_thread // 16
        assert found["loads"] - found["wide loads"] <= 6, (program.__name__, found)


def one_of_each(num: int) -> None:
    """Launch the programs of layers and of a head on so many tokens."""
    backward(*add_rms_norm(leaf(num, 4096), leaf(num, 4096), leaf(4096), NormForm(1e-6)))
    backward(rms_norm(leaf(num, 16_384), leaf(16_384), NormForm(1e-6)))
    angles = torch.zeros(1, num, 128, dtype=torch.bfloat16)
    for weight in (None, HeadNorm(leaf(128), NormForm(1e-6))):
        backward(rotated(leaf(1, num, 32, 128).transpose(1, 2), angles, angles, weight))
    backward(gated(leaf(num, 12288), leaf(num, 12288)), swiglu_of_halves(leaf(num, 1536), leaf(num)))
    rows, weights = spread_weighted(leaf(num, 2048), leaf(num, 2), torch.zeros(num, 2, dtype=torch.int32), 2 * num)
    backward(collect(rows, torch.zeros(num, 2, dtype=torch.int32)), weights)
    read = head_reads(leaf(num, 16), Head(leaf(4096, 16)), torch.zeros(num, dtype=torch.int64), entropy=True)
    backward(read.logprobs, read.entropy)
    digest._sums(torch.zeros(1000 + num, dtype=torch.int64), num)


def test_all_numbers_of_tokens_are_computed_by_one_compiled_program(launches):
    backend = make_backend(GPUTarget("cuda", 90, 32))
    compiled = []
    for num in (16, 1, 17, 48):
        launches.clear()
        one_of_each(num)
        keys = []
        for program, args, options in launches:
            bind = create_function_from_signature(program.signature, program.params, backend)
            _, specialised, _ = bind(*args, **options)
            keys.append((program.__name__, str(specialised)))
        compiled.append(keys)
    assert len(compiled[0]) == 20
    for keys in compiled[1:]:
        assert keys == compiled[0]


def test_copies_of_tokens_launch_nothing_if_kernels_are_turned_off(launches):
    places = torch.tensor([[1], [0]])
    rows, weights = spread_weighted(leaf(2, 16), leaf(2, 1), places, 2, fused=False)
    backward(collect(spread(rows, places, 2, fused=False), places, fused=False), weights)
    assert not launches
