"""The flash attention of a GPU's generation is activated where it is installed and takes the model's heads."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl

from rl_dtensor.model.kernels import activate_flash_attention


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of a generation, by its major compute capability; nothing runs on it."""

    def of(major):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))

    yield of
    restore_flash_attention_impl(_raise_warn=False)


def install(monkeypatch, name):
    """A package of flash attention with its functions, whose operators torch looks for."""
    module = ModuleType(name)
    module._flash_attn_fwd = module._flash_attn_bwd = print
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.ops, "flash_attn_3", SimpleNamespace(fwd=print, bwd=print), raising=False)


def test_a_cpu_and_an_older_gpu_keep_the_one_of_torch(gpu, monkeypatch):
    install(monkeypatch, "flash_attn_interface")
    assert activate_flash_attention(128) is None
    gpu(8)
    assert activate_flash_attention(128) is None


@pytest.mark.parametrize(
    ("major", "package", "name", "largest"),
    [(9, "flash_attn_interface", "FA3", 256), (10, "flash_attn.cute.interface", "FA4", 128)],
)
def test_the_one_of_the_generation_runs_if_it_is_installed(gpu, monkeypatch, major, package, name, largest):
    gpu(major)
    monkeypatch.setitem(sys.modules, package, None)
    assert activate_flash_attention(largest) is None
    install(monkeypatch, package)
    assert activate_flash_attention(largest + 1) is None
    assert activate_flash_attention(0) is None
    assert activate_flash_attention(largest) == name
    assert current_flash_attention_impl() == name
    assert activate_flash_attention(largest) == name
