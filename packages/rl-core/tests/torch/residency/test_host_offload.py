"""An offloaded tensor frees its storage and comes back as it was, under every alias."""

import torch

from rl_core.devices import CPU
from rl_core.torch.residency.host_offload import HostOffload


def test_values_come_back_under_every_alias():
    whole = torch.arange(12, dtype=torch.float32)
    rows, other = whole.view(3, 4)[1:], torch.ones(2, dtype=torch.bfloat16)
    offloaded = HostOffload([rows, whole, other], CPU)
    assert whole.untyped_storage().nbytes() == 0
    assert other.untyped_storage().nbytes() == 0
    offloaded.restore()
    assert torch.equal(whole, torch.arange(12, dtype=torch.float32))
    assert torch.equal(rows, whole.view(3, 4)[1:])
    assert torch.equal(other, torch.ones(2, dtype=torch.bfloat16))
    rows += 1
    assert whole[4] == 5


def test_what_is_not_kept_comes_back_as_zeros():
    buffer = torch.full((5,), 3.0)
    offloaded = HostOffload([buffer], CPU, keeps=False)
    assert buffer.untyped_storage().nbytes() == 0
    offloaded.restore()
    assert torch.equal(buffer, torch.zeros(5))


def test_nothing_is_offloaded_twice():
    tensor = torch.ones(3)
    first, second = HostOffload([tensor], CPU), HostOffload([tensor], CPU)
    second.restore()
    assert tensor.untyped_storage().nbytes() == 0
    first.restore()
    assert torch.equal(tensor, torch.ones(3))
