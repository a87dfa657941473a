"""The draft model that weights are sent to, in workers with either of vLLM's model runners."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from vllm.v1.worker.gpu import model_runner as second
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as FirstRunner
from vllm.v1.worker.gpu_worker import Worker

from rl_core.errors import WeightSyncError
from rl_vllm.engine_worker import EngineWorker


class ExtendedWorker(EngineWorker, Worker):
    """vLLM's worker with the extension, as vLLM itself mixes them."""


class Speculator(DraftModelSpeculator):
    """One that only holds its model."""


Speculator.__abstractmethods__ = frozenset()


def first_runner(drafter: object) -> FirstRunner:
    runner = FirstRunner.__new__(FirstRunner)
    runner.drafter = drafter
    return runner


def second_runner(speculator: object) -> second.GPUModelRunner:
    runner = second.GPUModelRunner.__new__(second.GPUModelRunner)
    runner.speculator = speculator
    return runner


def speculator_of(model: nn.Module) -> DraftModelSpeculator:
    speculator = Speculator.__new__(Speculator)
    speculator.model = model
    return speculator


def worker_with(runner: Any) -> ExtendedWorker:
    worker = ExtendedWorker.__new__(ExtendedWorker)
    runner.model = nn.Linear(2, 2)
    worker.model_runner = runner
    drafted = SimpleNamespace(draft_model_config="config of the drafter")
    worker.vllm_config = SimpleNamespace(speculative_config=drafted, model_config="config of the model")
    return worker


@pytest.mark.parametrize("runner_of", [first_runner, second_runner])
def test_weights_of_a_drafter_reach_the_model_that_drafts(runner_of: Any) -> None:
    drafter = nn.Linear(3, 3)
    held = SimpleNamespace(model=drafter) if runner_of is first_runner else speculator_of(drafter)
    worker = worker_with(runner_of(held))
    target = worker.target("drafter")
    assert target.model is drafter
    assert (target.config, target.host) == ("config of the drafter", worker.model_runner.model)
    assert worker.target("policy").model is worker.model_runner.model


@pytest.mark.parametrize("runner_of", [first_runner, second_runner])
def test_an_engine_that_drafts_without_a_model_refuses_weights_for_one(runner_of: Any) -> None:
    worker = worker_with(runner_of(SimpleNamespace()))
    with pytest.raises(WeightSyncError, match="no draft model"):
        worker.target("drafter")
