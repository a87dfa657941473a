"""Offloaded tensors leave their memory and come back the same objects with the same bits."""

import pytest
import torch

from rl_core.devices import CPU
from rl_core.torch.residency import HostOffload


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_aliases_keep_seeing_the_same_bytes(dtype):
    base = torch.randn(6, 4).to(dtype)
    view, expected = base[2:], base.clone()
    offloaded = HostOffload([base, view, torch.zeros(0)], CPU)
    assert base.untyped_storage().nbytes() == 0
    offloaded.restore()
    assert base.equal(expected)
    assert view.equal(expected[2:])
    view.zero_()
    assert base[2:].abs().max() == 0
