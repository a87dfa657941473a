"""Engines on CPU exchange tokens in numbers that differ by engine."""

from __future__ import annotations

import inspect
from threading import Barrier, Thread
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.device_communicators import cpu_communicator
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

from rl_vllm.patches import gathered_tokens

SIZES = [3, 1]


def test_vllms_communicator_on_cpu_gathers_no_uneven_tokens() -> None:
    source = inspect.getsource(cpu_communicator)
    assert "AgRsAll2AllManager" in source
    assert "all_gatherv" not in source
    assert "reduce_scatterv" not in source


def test_rows_are_gathered_and_added_up_in_any_numbers(monkeypatch: Any) -> None:
    gathered_tokens.exchange_tokens_on_cpu()
    given: dict[int, Tensor] = {}
    meet = Barrier(len(SIZES))

    def exchanged(rank: int, own: Tensor) -> list[Tensor]:
        assert not given or given[next(iter(given))].shape == own.shape, "gloo exchanges tensors of one shape only"
        given[rank] = own.clone()
        meet.wait(10)
        found = [given[each] for each in range(len(SIZES))]
        if meet.wait(10) == 0:
            given.clear()
        meet.wait(10)
        return found

    def all_gather(gathered: list[Tensor], own: Tensor, *, group: int) -> None:
        for target, each in zip(gathered, exchanged(group, own), strict=True):
            target.copy_(each)

    def all_reduce(total: Tensor, *, group: int) -> None:
        total.copy_(sum(exchanged(group, total)))

    monkeypatch.setattr(gathered_tokens, "dist", SimpleNamespace(all_gather=all_gather, all_reduce=all_reduce))
    states = [torch.randn(size, 4) for size in SIZES]
    chosen = [torch.randint(0, 8, (size, 2)) for size in SIZES]
    partial = [torch.randn(sum(SIZES), 4) for _ in SIZES]
    found: dict[int, Any] = {}

    def work(rank: int) -> None:
        engine: Any = SimpleNamespace(world_size=len(SIZES), rank_in_group=rank, device_group=rank)
        both = CpuCommunicator.all_gatherv(engine, [states[rank], chosen[rank]], 0, SIZES)
        found[rank] = (*both, CpuCommunicator.reduce_scatterv(engine, partial[rank], 0, SIZES))

    workers = [Thread(target=work, args=(rank,)) for rank in range(len(SIZES))]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    for rank, (gathered, experts, own) in found.items():
        assert gathered.equal(torch.cat(states))
        assert experts.equal(torch.cat(chosen))
        assert own.equal((partial[0] + partial[1]).split(SIZES)[rank])
    assert len(found) == len(SIZES)
