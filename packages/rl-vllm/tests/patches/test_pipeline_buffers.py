"""Activations that arrive on a pipeline rank, on CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sequence import IntermediateTensors
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from rl_vllm.patches.pipeline_buffers import make_pipeline_buffers_on_cpu

ARRIVED = IntermediateTensors({"hidden_states": torch.arange(6.0).view(2, 3)})


def pipeline_rank() -> Any:
    def make(batch_size: int, dtype: torch.dtype, device: str) -> IntermediateTensors:
        return IntermediateTensors({"hidden_states": torch.zeros(batch_size, 3, dtype=dtype, device=device)})

    model = SimpleNamespace(make_empty_intermediate_tensors=make)
    config = SimpleNamespace(dtype=torch.float32)
    return SimpleNamespace(intermediate_tensors=None, model=model, model_config=config, max_num_tokens=4, device="cpu")


def test_vllms_pipeline_rank_begins_without_buffers() -> None:
    with pytest.raises(AssertionError):
        GPUModelRunner.sync_and_gather_intermediate_tensors(pipeline_rank(), 2, ARRIVED, True)


def test_activations_arrive_without_a_dummy_run() -> None:
    make_pipeline_buffers_on_cpu()
    rank = pipeline_rank()
    for _ in range(2):
        found = CPUModelRunner.sync_and_gather_intermediate_tensors(rank, 2, ARRIVED, True)
        assert found["hidden_states"].equal(ARRIVED["hidden_states"])
    assert len(rank.intermediate_tensors["hidden_states"]) == 4
