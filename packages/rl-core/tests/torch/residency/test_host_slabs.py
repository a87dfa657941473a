"""Bytes in host memory whose allocations a rounding allocator does not enlarge."""

import pytest
import torch

from rl_core.devices import CPU
from rl_core.torch.residency import host_slabs
from rl_core.torch.residency.host_offload import HostOffload
from rl_core.torch.residency.host_slabs import SMALLEST_BYTES, HostSlabs, bytes_of, slab_sizes
from rl_core.torch.training.reference import Reference


def rounded(size):
    """As the allocator of page-locked memory does."""
    return 1 << (size - 1).bit_length()


@pytest.fixture
def small_slabs(monkeypatch):
    monkeypatch.setattr(host_slabs, "SLAB_BYTES", 16)
    monkeypatch.setattr(host_slabs, "SMALLEST_BYTES", 4)


@pytest.mark.parametrize("num_bytes", [0, 1, SMALLEST_BYTES - 1, SMALLEST_BYTES, 12_345_678_901, (1 << 33) + 1])
def test_rounding_adds_less_than_the_smallest_slab(num_bytes):
    sizes = list(slab_sizes(num_bytes))
    assert sum(sizes) == num_bytes
    assert sum(map(rounded, sizes)) - num_bytes < SMALLEST_BYTES


def test_what_was_written_is_read_across_slabs(small_slabs):
    tensors = [torch.randn(3), torch.randn(11, dtype=torch.float64), torch.arange(5, dtype=torch.int16)]
    held = HostSlabs(sum(tensor.nbytes for tensor in tensors), is_pinned=False)
    starts = [0, tensors[0].nbytes, tensors[0].nbytes + tensors[1].nbytes]
    for start, tensor in zip(starts, tensors, strict=True):
        held.write(start, bytes_of(tensor))
    for start, tensor in zip(starts, tensors, strict=True):
        found = torch.zeros_like(tensor)
        held.read(start, bytes_of(found))
        assert torch.equal(found, tensor)


def test_parts_that_are_offloaded_share_their_allocations(monkeypatch):
    made = []
    monkeypatch.setattr(host_slabs, "slab_sizes", lambda num_bytes: made.append(num_bytes) or slab_sizes(num_bytes))
    tensors = [torch.randn(100) for _ in range(50)]
    copies = [tensor.clone() for tensor in tensors]
    offloaded = HostOffload(tensors, CPU)
    assert made == [50 * 400]
    offloaded.restore()
    assert all(torch.equal(*pair) for pair in zip(tensors, copies, strict=True))


def test_a_reference_of_many_parts_is_exchanged_bit_for_bit(small_slabs):
    parts = [torch.randn(7), torch.randn(2, 5), torch.randn(1, dtype=torch.bfloat16)]
    initial = [part.clone() for part in parts]
    reference = Reference(lambda: parts)
    for part in parts:
        part.add_(1)
    trained = [part.clone() for part in parts]
    for _ in range(2):
        with reference.in_place():
            assert all(torch.equal(*pair) for pair in zip(parts, initial, strict=True))
        assert all(torch.equal(*pair) for pair in zip(parts, trained, strict=True))
