"""A digest sees every accident that a transfer can have."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.torch.transport import digest as digest_module
from rl_core.torch.transport.digest import begin_digest, digest, read_digests


def of_bytes(values: bytes) -> str:
    return digest(torch.tensor(list(values), dtype=torch.uint8))


@given(st.binary(min_size=1, max_size=40), st.data())
def test_a_changed_byte_changes_it(values, data):
    index = data.draw(st.integers(0, len(values) - 1))
    changed = values[:index] + bytes([values[index] ^ data.draw(st.integers(1, 255))]) + values[index + 1 :]
    assert of_bytes(changed) != of_bytes(values)


@given(st.binary(min_size=2, max_size=40), st.data())
def test_swapped_bytes_change_it(values, data):
    i, j = (data.draw(st.integers(0, len(values) - 1)) for _ in range(2))
    swapped = bytearray(values)
    swapped[i], swapped[j] = values[j], values[i]
    assert (of_bytes(bytes(swapped)) == of_bytes(values)) == (bytes(swapped) == values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32])
def test_swapped_values_zeros_and_shifts_change_it(dtype):
    values = (torch.randn(64, 16, generator=torch.Generator().manual_seed(0)) * 100).to(dtype)
    swapped, shifted = values.clone(), values.roll(1, dims=0)
    swapped[[0, 9]] = values[[9, 0]]
    others = [swapped, shifted, torch.zeros_like(values), -values, values.T.contiguous(), values[:-1]]
    assert len({digest(other) for other in [values, *others]}) == 1 + len(others)


def test_opposite_signs_swapped_change_it():
    values = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    assert digest(values) != digest(values[[1, 0, 2, 3]])


def test_only_the_bytes_count():
    values = torch.randn(6, 5)
    assert digest(values) == digest(values.clone().view(30)) == digest(values.view(torch.int32))
    assert digest(values.T) == digest(values.T.contiguous()) != digest(values)
    assert digest(values[1:, 1:]) == digest(values[1:, 1:].clone())


def test_unaligned_views_and_tails_are_read_right():
    values = torch.arange(50, dtype=torch.uint8)
    for start in range(9):
        for stop in range(start, 50, 7):
            assert digest(values[start:stop]) == digest(values[start:stop].clone())


def test_scalars_and_empty_tensors_have_one():
    assert digest(torch.zeros(0)) == digest(torch.zeros(0, 3)) != digest(torch.tensor(0.0))


def test_host_and_device_take_the_same_sum_in_chunks_of_any_size(monkeypatch):
    lanes = torch.randint(-(2**63), 2**63 - 1, (1000,), generator=torch.Generator().manual_seed(0))
    whole = digest_module._host_sum(lanes.numpy(), 3) % 2**64
    for chunk in (7, 1000, 2**20):
        monkeypatch.setattr(digest_module, "HOST_CHUNK", chunk)
        monkeypatch.setattr(digest_module, "DEVICE_CHUNK", chunk)
        assert digest_module._host_sum(lanes.numpy(), 3) % 2**64 == whole
        assert int(digest_module._device_sum(lanes, 3)) % 2**64 == whole


def test_it_is_the_same_sum_in_plain_integers():
    values = np.random.default_rng(0).integers(0, 256, 24, dtype=np.uint8)

    def shift(x: int, by: int) -> int:
        signed = x - 2**64 if x >= 2**63 else x
        return (signed >> by) % 2**64

    total = 0
    for position, lane in enumerate(values.view(np.uint64).tolist()):
        mixed = lane ^ (position + 1) * 0x9E3779B97F4A7C15 % 2**64
        mixed = (mixed ^ shift(mixed, 30)) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ shift(mixed, 27)) * 0x94D049BB133111EB % 2**64
        total += mixed ^ shift(mixed, 31)
    assert of_bytes(values.tobytes()) == f"18-{total % 2**64:016x}"


def test_a_tensor_can_let_go_of_its_memory_after_its_digest():
    tensor = torch.arange(100, dtype=torch.float32)
    digest(tensor)
    assert tensor.untyped_storage().resizable()


def test_several_that_are_read_together_are_those_of_each_alone():
    tensors = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in (0, 1, 7, 64, 3000)]
    assert read_digests([begin_digest(tensor) for tensor in tensors]) == [digest(tensor) for tensor in tensors]
    assert read_digests([]) == []


def test_sums_that_are_taken_on_a_device_are_read_together(monkeypatch):
    tensors = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in (0, 1, 7, 64, 3000)]
    expected = [digest(tensor) for tensor in tensors]
    monkeypatch.setattr(digest_module, "_mixed_sum", digest_module._device_sum)
    pending = [begin_digest(tensor) for tensor in tensors]
    assert all(isinstance(found.total, torch.Tensor) for found in pending)
    assert read_digests(pending) == expected
