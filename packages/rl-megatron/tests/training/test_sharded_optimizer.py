"""The norm of gradients over many runs of parameters, and step counts that were restored."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from rl_megatron.training.sharded_optimizer import square_sum
from rl_megatron.training.state import _restored

CPU = torch.device("cpu")


class Recorded(TorchDispatchMode):
    """Names of the operations that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_of_squares_is_that_of_all_elements(dtype):
    tensors = [torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype) for size in (1, 7, 1000)]
    expected = torch.cat(tensors).double().square().sum()
    assert square_sum(tensors, CPU).item() == pytest.approx(expected.item(), rel=1e-6)
    assert square_sum([], CPU).item() == 0.0


def test_the_number_of_kernels_does_not_grow_with_the_runs():
    """On GPUs; one operation on the list of all tensors is a few kernels."""
    with FakeTensorMode():
        tensors = [torch.empty(5, device="cuda", dtype=torch.bfloat16) for _ in range(300)]
        with Recorded() as recorded:
            total = square_sum(tensors, torch.device("cuda"))
    assert total.dtype == torch.float32
    assert recorded.names == ["_foreach_norm", "stack", "pow", "sum"]


def test_a_restored_step_count_is_copied_to_where_the_optimizer_wants_it():
    saved = torch.tensor(3.0)
    assert _restored(saved, torch.device("meta")).device.type == "meta"
    copy = _restored(saved, CPU)
    copy += 1
    assert saved.item() == 3.0
