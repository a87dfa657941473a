"""Ranks of an engine on the nodes of a replica, on CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch.distributed as dist
from vllm.distributed.device_communicators import shm_broadcast
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.executor.multiproc_executor import WorkerProc

from rl_vllm.patches.ranks_of_node import count_ranks_of_node_on_cpu


def test_a_node_has_as_many_ranks_as_the_engine_has_there(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    monkeypatch.setattr(CpuPlatform, "device_count", None, raising=False)
    monkeypatch.setattr(WorkerProc, "_init_message_queues", lambda *_: found.append(CpuPlatform.device_count()))
    count_ranks_of_node_on_cpu()
    config = SimpleNamespace(parallel_config=SimpleNamespace(local_world_size=2))
    WorkerProc._init_message_queues(SimpleNamespace(), None, config)
    assert found == [2]


def test_vllm_takes_the_second_rank_for_one_of_another_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once this fails, ranks of a node need not be counted any longer."""

    class MadeError(Exception):
        pass

    def made(**arguments: int) -> None:
        raise MadeError(arguments["n_local_reader"])

    monkeypatch.setattr(shm_broadcast, "current_platform", CpuPlatform())
    monkeypatch.setattr(dist, "get_rank", lambda *_: 1)
    create = shm_broadcast.MessageQueue.create_from_process_group_single_reader
    monkeypatch.setattr(shm_broadcast, "MessageQueue", made)
    with pytest.raises(MadeError) as error:
        create(None, 1, 1, reader_rank=0)
    assert error.value.args == (0,)
