"""How a rank joins the default process group."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from rl_core.devices.kinds import CudaDevice
from rl_core.model import Rendezvous
from rl_core.selfcheck.rank_pool import free_port
from rl_core.torch.process_group import join_process_group


@pytest.mark.parametrize(("device", "connected"), [("cpu", None), ("cuda", torch.device("cuda", 0))])
def test_ranks_connect_on_their_gpu_and_further_groups_are_not_splits_of_all_ranks(monkeypatch, device, connected):
    init_process_group, given = dist.init_process_group, []

    def join(backend, *, device_id, **options):
        given.append((backend, device_id))
        init_process_group("gloo", **options)
        dist.group.WORLD.bound_device_id = device_id

    monkeypatch.setattr(dist, "init_process_group", join)
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)
    rendezvous = Rendezvous(0, 1, 0, "127.0.0.1", free_port(), device)
    with mock.patch.object(CudaDevice, "activate"):
        join_process_group(rendezvous)
    try:
        assert given == [(rendezvous.kind.process_group_backend, connected)]
        assert dist.group.WORLD.bound_device_id is None
        assert os.environ["TORCH_GLOO_LAZY_INIT"] == "1"
    finally:
        dist.destroy_process_group()
