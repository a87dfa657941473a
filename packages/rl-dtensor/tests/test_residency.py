"""Parked tensors leave their memory and come back the same objects with the same bits; freed memory goes to others."""

import os
import platform
from pathlib import Path

import pytest
import torch

from rl_core.torch.parked import Parked
from rl_dtensor.residency import Residency


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_aliases_keep_seeing_the_same_bytes(dtype):
    base = torch.randn(6, 4).to(dtype)
    view, expected = base[2:], base.clone()
    parked = Parked([base, view, torch.zeros(0)])
    assert base.untyped_storage().nbytes() == 0
    parked.restore()
    assert base.equal(expected)
    assert view.equal(expected[2:])
    view.zero_()
    assert base[2:].abs().max() == 0


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="others' allocators are left alone")
def test_an_offload_gives_back_what_the_process_has_freed():
    activations = [torch.zeros(25_000) for _ in range(2_000)]  # too small to be mapped one by one
    kept = activations[-1]
    del activations
    before = resident_bytes()
    Residency(None, None, torch.device("cpu")).offload(["optimizer"])
    assert before - resident_bytes() > 100e6
    assert kept.sum() == 0
