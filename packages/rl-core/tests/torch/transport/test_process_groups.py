"""Process groups of GPUs are made and left in an order that a machine without one can check."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from rl_core.devices import CUDA
from rl_core.torch.transport import collective


class FakeGroup:
    """Stands in for NCCL's process group, which needs a GPU."""

    class Options:
        """Settings of a group."""

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.calls: list[tuple[str, Any]] = [("made", (rank, size, options._timeout.total_seconds()))]

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.calls.append(("connected", device))


def test_ranks_are_connected_on_their_own_device_before_the_first_broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeGroup, raising=False)
    group = collective._group(dist.HashStore(), 1, 3, CUDA.at(2), "127.0.0.1", 30.0)
    # torch's own time-out comes after ours, which names the peer
    assert group.calls == [("made", (1, 3, 120.0)), ("connected", torch.device("cuda", 2))]
