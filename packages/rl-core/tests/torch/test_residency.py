"""Bytes in host memory whose allocations a rounding allocator does not enlarge."""

import pytest
import torch
from torch import nn

from rl_core.devices import CPU, REHEARSAL, DeviceMemory, RehearsalDevice
from rl_core.torch.residency import (
    SMALLEST_BYTES,
    HostOffload,
    HostSlabs,
    ModuleResidency,
    Reference,
    bytes_of,
    slab_sizes,
)


def rounded(size):
    """As the allocator of page-locked memory does."""
    return 1 << (size - 1).bit_length()


@pytest.fixture
def small_slabs(monkeypatch):
    monkeypatch.setattr("rl_core.torch.residency.SLAB_BYTES", 16)
    monkeypatch.setattr("rl_core.torch.residency.SMALLEST_BYTES", 4)


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
    monkeypatch.setattr(
        "rl_core.torch.residency.slab_sizes", lambda num_bytes: made.append(num_bytes) or slab_sizes(num_bytes)
    )
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


def test_a_rehearsal_really_takes_the_weights_away_and_brings_them_back():
    module = nn.Linear(4, 3)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    residency = ModuleResidency(module, REHEARSAL)
    residency.offload(("parameters",))
    assert module.weight.untyped_storage().nbytes() == 0
    with pytest.raises(RuntimeError, match="parameters are offloaded"):
        residency.require("parameters")
    residency.onload(("parameters",))
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_on_the_cpu_there_is_nothing_to_free():
    module = nn.Linear(4, 3)
    residency = ModuleResidency(module, CPU)
    residency.offload(("parameters",))
    assert module.weight.untyped_storage().nbytes()


def test_weights_that_are_mapped_from_a_file_can_leave_too(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(torch.arange(12, dtype=torch.float32).numpy().tobytes())
    module = nn.Linear(4, 3, bias=False)
    module.weight.data = torch.from_file(str(path), shared=False, size=12).view(3, 4)
    residency = ModuleResidency(module, REHEARSAL)
    residency.offload(("parameters",))
    assert module.weight.untyped_storage().nbytes() == 0
    residency.onload(("parameters",))
    assert torch.equal(module.weight.flatten(), torch.arange(12.0))


class FreedLater(RehearsalDevice):
    """A device on which a process that was killed still holds memory, until it has been asked for it some times."""

    asked = 0

    def memory(self):
        type(self).asked += 1
        return DeviceMemory(total=4000, free=4000 if self.asked > 2 else 399, own=0, peak=0)


@pytest.mark.parametrize("max_wait_s", [60.0, 0.0])
def test_parts_come_back_when_a_killed_process_has_left_the_device(monkeypatch, max_wait_s):
    monkeypatch.setattr("rl_core.torch.residency.MAX_WAIT_S", max_wait_s)
    monkeypatch.setattr("rl_core.torch.residency._POLL_S", 0.001)
    monkeypatch.setattr(FreedLater, "asked", 0)
    module = nn.Linear(10, 9, bias=False)
    module.register_buffer("ten", torch.arange(10.0))
    expected = module.weight.clone()
    residency = ModuleResidency(module, FreedLater())
    residency.offload(("parameters",))
    residency.onload(("parameters",))
    assert FreedLater.asked == (3 if max_wait_s else 1)  # Without room the allocator decides.
    assert torch.equal(module.weight, expected)
