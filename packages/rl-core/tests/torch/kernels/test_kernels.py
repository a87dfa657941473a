"""Kernels compute what the plain formulas do, in Triton's interpreter."""

from itertools import product

import kernel_cases
import pytest

from rl_core.testing.exhaustive import partly_exhaustive

# by the largest value: float32 rounds to 6e-8 of it and bfloat16 to 4e-3; a value that is used again is rounded again
TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-2}
ROTATIONS = list(product(TOLERANCE, (None, *kernel_cases.FORMS)))
ROTATED = [("bfloat16", None), ("float32", "llama"), ("bfloat16", "gemma")]
READS = [(dtype, *read) for dtype in TOLERANCE for read in (("plain", False), ("capped", False), ("capped", True))]


def check(interpreter, dtype, function, *args):
    (errors,) = interpreter.run(function, [args])
    assert errors
    assert max(errors.values()) < TOLERANCE[dtype], errors


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", kernel_cases.FORMS)
def test_norms_are_those_of_the_formula(interpreter, form, dtype):
    check(interpreter, dtype, kernel_cases.norms, form, dtype)


def test_norms_have_the_dtype_of_the_formula(interpreter):
    (dtypes,) = interpreter.run(kernel_cases.dtypes, [()])
    assert dtypes == {name: (expected, expected) for name, (_, expected) in dtypes.items()}
    assert {expected for _, expected in dtypes.values()} == {"torch.float32", "torch.bfloat16"}


@pytest.mark.parametrize(("dtype", "norm"), partly_exhaustive(ROTATIONS, always=ROTATED))
def test_rotations_are_those_of_the_formula(interpreter, norm, dtype):
    check(interpreter, dtype, kernel_cases.rotations, dtype, norm)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gates_are_those_of_the_formula(interpreter, dtype):
    check(interpreter, dtype, kernel_cases.gates, dtype)


@pytest.mark.parametrize("dtype", partly_exhaustive(TOLERANCE, always=["bfloat16"]))
def test_rows_of_experts_are_those_of_the_formula(interpreter, dtype):
    check(interpreter, dtype, kernel_cases.permutations, dtype)


@pytest.mark.parametrize(
    ("dtype", "transform", "is_split"),
    partly_exhaustive(READS, always=[("float32", "plain", False), ("bfloat16", "capped", True)]),
)
def test_reads_of_a_head_are_those_of_whole_logits(interpreter, transform, is_split, dtype):
    check(interpreter, dtype, kernel_cases.heads, dtype, transform, is_split)


@pytest.mark.parametrize("dtype", partly_exhaustive(TOLERANCE, always=["bfloat16"]))
def test_roundings_to_8_bits_are_those_of_the_formula(interpreter, dtype):
    (found,) = interpreter.run(kernel_cases.roundings, [(dtype,)])
    assert found
    assert all(found.values()), found


def test_a_digest_of_the_device_is_that_of_the_host(interpreter):
    (found,) = interpreter.run(kernel_cases.digests, [()])
    assert found
    assert all(found.values()), found


def test_rows_of_logits_that_are_padded_have_the_results_of_others(interpreter):
    (found,) = interpreter.run(kernel_cases.paddings, [()])
    assert found
    assert all(found.values()), found
