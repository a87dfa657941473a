"""Collectives are counted by name, group and size, over ranks that do not exist."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from ledger.costs import Collective, Traffic, Work
from ledger.counter import CostCounter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

RANKS = 8


@pytest.fixture(scope="module", autouse=True)
def _ranks():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


def counted(compute):
    with CostCounter("cpu") as counter:
        compute()
    return counter.costs


SMALL, LARGE = 4 * 6, 4 * 6 * RANKS


def part():
    return torch.zeros(6)


def whole():
    return torch.zeros(6 * RANKS)


CASES = {
    "all_reduce": (lambda: dist.all_reduce(part()), "all_reduce", SMALL),
    "all_gather": (lambda: dist.all_gather_into_tensor(whole(), part()), "all_gather", LARGE),
    "all_gather of a list": (lambda: dist.all_gather([part() for _ in range(RANKS)], part()), "all_gather", LARGE),
    "reduce_scatter": (lambda: dist.reduce_scatter_tensor(part(), whole()), "reduce_scatter", LARGE),
    "reduce_scatter of a list": (
        lambda: dist.reduce_scatter(part(), [part() for _ in range(RANKS)]),
        "reduce_scatter",
        LARGE,
    ),
    "all_to_all": (lambda: dist.all_to_all_single(whole(), whole()), "all_to_all", LARGE),
    "broadcast": (lambda: dist.broadcast(part(), 0), "broadcast", SMALL),
    "send": (lambda: dist.isend(part(), 1), "send", SMALL),
    "recv": (lambda: dist.irecv(part(), 1), "recv", SMALL),
    "functional all_gather": (
        lambda: functional.all_gather_tensor(part(), 0, dist.group.WORLD).sum(),
        "all_gather",
        LARGE,
    ),
    "functional reduce_scatter": (
        lambda: functional.reduce_scatter_tensor(whole(), "sum", 0, dist.group.WORLD).sum(),
        "reduce_scatter",
        LARGE,
    ),
}


@pytest.mark.parametrize(("compute", "name", "size"), CASES.values(), ids=CASES)
def test_a_collective_is_counted_with_what_it_moves(compute, name, size):
    assert counted(compute).collectives == {Collective(name, RANKS, RANKS): Traffic(1, size)}


def test_groups_are_told_apart_by_their_ranks():
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("outer", "inner"))
    costs = counted(lambda: [dist.all_reduce(part(), group=mesh.get_group(axis)) for axis in ("outer", "inner")])
    assert costs.collectives == {
        Collective("all_reduce", 2, 5): Traffic(1, SMALL),
        Collective("all_reduce", 4, 4): Traffic(1, SMALL),
    }


def test_a_group_of_one_rank_moves_nothing():
    mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("outer", "inner"))
    assert counted(lambda: dist.all_reduce(part(), group=mesh.get_group("outer"))).collectives == {}


def test_fsdp_gathers_a_unit_twice_and_reduces_it_once():
    """The root keeps its own parameters from the forward to the backward pass."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False), torch.nn.Linear(16, 16, bias=False))
    mesh = init_device_mesh("cpu", (RANKS,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    costs = counted(lambda: model(torch.zeros(3, 16, requires_grad=True)).sum().backward())
    assert costs.traffic("all_gather") == Traffic(3, 3 * 16 * 16 * 4)
    assert costs.traffic("reduce_scatter") == Traffic(2, 2 * 16 * 16 * 4)
    # each gather: its part is copied in, and the whole is copied out; each reduction: the whole is copied in
    part, whole = 16 * 16 * 4 // RANKS, 16 * 16 * 4
    assert costs.sharding == Work(3 * 2 + 2, 3 * (2 * part + 2 * whole) + 2 * 2 * whole)
    assert costs.products.kernels == 6


def test_the_first_operation_on_dtensors_costs_what_the_others_do():
    mesh = init_device_mesh("cpu", (RANKS,))
    whole = DTensor.from_local(torch.zeros(3, 5), mesh, [Shard(0)])
    first, second = (counted(lambda: whole.cos()).other for _ in range(2))
    assert first == second == Work(1, 2 * 3 * 5 * 4)
