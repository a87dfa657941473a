"""Kernels run on GPUs, and on a CPU only in the interpreter."""

import importlib

import pytest
import torch

from rl_core.torch.kernels import devices
from rl_core.torch.kernels.devices import num_programs, runs_kernels, takes


def test_a_cpu_runs_kernels_in_the_interpreter_only(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = torch.zeros(2)
    assert not runs_kernels(x.device)
    assert not takes(x)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert runs_kernels(x.device)
    assert takes(x, None, x.bfloat16())
    assert not takes(x, x.double())


def test_meta_tensors_go_where_a_gpu_would():
    assert runs_kernels(torch.device("cuda"))
    assert takes(torch.zeros(2, device="meta"))
    assert not takes(torch.zeros(2, device="meta"), torch.zeros(2, device="meta", dtype=torch.float64))


def test_a_gpu_on_which_triton_does_not_start_keeps_the_plain_formulas(monkeypatch, caplog):
    class Driver:
        @property
        def active(self):
            raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.import_module("triton.runtime.driver"), "driver", Driver())
    devices._starts.cache_clear()
    try:
        assert not runs_kernels(torch.device("cuda"))
    finally:
        devices._starts.cache_clear()
    assert "Failed to find C compiler" in caplog.text
    assert "install gcc or set CC" in caplog.text


@pytest.mark.parametrize(("items", "count"), [(0, 1), (1, 1), (9, 2)])
def test_no_program_is_without_an_item(items, count):
    assert num_programs(torch.device("cpu"), items) == count
