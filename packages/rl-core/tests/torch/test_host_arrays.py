"""Arrays reach the device together."""

import numpy as np
import torch

from rl_core.torch.host_arrays import to_device

CPU = torch.device("cpu")


def test_arrays_of_all_kinds_arrive_in_one_copy():
    arrays = [
        np.array([True, False, True]),
        np.arange(6, dtype=np.int64).reshape(2, 3)[:, ::-1],
        np.array([], dtype=np.int32),
        np.array(2.5, dtype=np.float32),
        np.zeros((0, 4), dtype=np.float16),
    ]
    found = to_device(arrays, CPU)
    for tensor, array in zip(found, arrays, strict=True):
        assert tensor.dtype == torch.from_numpy(np.zeros(1, array.dtype)).dtype
        np.testing.assert_array_equal(tensor.numpy(), array)
    assert len({tensor.untyped_storage().data_ptr() for tensor in found}) == 1


def test_a_change_in_place_of_one_is_not_one_of_another():
    weight = torch.ones(2, requires_grad=True)
    first, second = to_device([np.ones(2, np.float32), np.ones(2, np.float32)], CPU)
    product = weight * first
    second += 1
    product.sum().backward()
    assert weight.grad.tolist() == first.tolist() == [1, 1]


def test_arrays_without_values_alone_arrive():
    (found,) = to_device([np.zeros(0, np.int64)], CPU)
    assert found.dtype == torch.int64
    assert found.shape == (0,)
