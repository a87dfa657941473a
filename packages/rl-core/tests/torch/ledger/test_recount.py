"""Operators of the project are counted by what they launch and touch: a recount with data finds the same."""

import importlib
import pkgutil
from collections import defaultdict

import pytest
import recount_cases
import torch
from ledger.counter import CostCounter
from torch.utils._python_dispatch import TorchDispatchMode

from rl_core.selfcheck.rank_pool import RankPool
from rl_core.testing.torch.interpreted import interpret_kernels
from rl_core.torch import kernels
from rl_core.torch.transport.digest import begin_digest

OWN = "rl_core::"


class ByOperator(TorchDispatchMode):
    """Has the ledger count each call of an operator."""

    def __init__(self):
        super().__init__()
        self.found = defaultdict(list)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace != "rl_core":
            return function(*args, **(kwargs or {}))
        with CostCounter() as counter:
            out = function(*args, **(kwargs or {}))
        self.found[function._opname].append((counter.costs.other.kernels, counter.costs.other.bytes))
        return out


def test_every_operator_costs_what_its_programs_launch_and_touch():
    with ByOperator() as counted:
        for case in recount_cases.CASES:
            case("meta")
    with RankPool(1) as pool:
        pool.run(interpret_kernels, [()])
        (recounted,) = pool.run(recount_cases.recounted, [()])
    for module in pkgutil.iter_modules(kernels.__path__):
        importlib.import_module(f"{kernels.__name__}.{module.name}")
    names = {name.partition("::")[2].partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if OWN in name}
    assert names == set(recounted), "add a case to recount_cases.py for each operator"
    for name, calls in recounted.items():
        for ours, theirs in zip(counted.found[name], calls, strict=True):
            assert ours[0] == theirs[0], name
            # A program may leave a part of a result as it is, such as a statistic that nobody reads.
            assert ours[1] == pytest.approx(theirs[1], rel=0.01), name


@pytest.mark.parametrize("num_bytes", [2**28, 2**24 + 3])
def test_a_digest_on_a_device_reads_each_byte_once(num_bytes):
    with CostCounter() as counter:
        begin_digest(torch.empty(num_bytes, dtype=torch.uint8, device="meta"))
    assert num_bytes <= counter.costs.other.bytes < 1.01 * num_bytes
