"""Ranks that measure an all-reduce. Several of them meet in the tests of `rl doctor --cluster`."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch.distributed as dist

from rl_core.model import Rendezvous
from rl_core.selfcheck.rank_pool import free_port
from rl_core.torch.all_reduce import all_reduce_seconds


def test_a_rank_measures_and_leaves_its_group() -> None:
    assert all_reduce_seconds(Rendezvous(0, 1, 0, "127.0.0.1", free_port(), "cpu", 60.0), 4096) > 0
    assert not dist.is_initialized()


def test_a_sum_that_is_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor[0].add_(1))
    with pytest.raises(RuntimeError, match="the all-reduce gave values from 1 to 2 instead of 1"):
        all_reduce_seconds(Rendezvous(0, 1, 0, "127.0.0.1", free_port(), "cpu", 60.0), 4096)


def test_a_rank_whose_input_is_closed_ends() -> None:
    asked = {**asdict(Rendezvous(0, 2, 0, "127.0.0.1", free_port(), "cpu", 120.0)), "num_bytes": 4096}
    command = [sys.executable, "-P", "-m", "rl_core.torch.all_reduce", json.dumps(asked)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as process:
        assert process.wait() == 1
