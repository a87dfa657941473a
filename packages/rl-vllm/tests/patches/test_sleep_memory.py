"""An engine that goes to sleep while other processes allocate memory of its GPU."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.v1.worker.gpu_worker import Worker

from rl_vllm.patches.sleep_memory import sleep_beside_others

FREE = 100


def original_sleep() -> object:
    return vars(Worker.sleep).get("__wrapped__", Worker.sleep)


def worker_beside(monkeypatch: pytest.MonkeyPatch, taken: int) -> tuple[Worker, list[int]]:
    """A worker of vLLM that frees 10 bytes while another process takes some, and the levels it has slept at."""
    readings, levels = iter((FREE, FREE + 10 - taken)), []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda *_: (next(readings), 1000))
    worker = Worker.__new__(Worker)
    monkeypatch.setattr(Worker, "sleep_mode_backend", SimpleNamespace(suspend=levels.append))
    worker.model_runner = SimpleNamespace(model=nn.Linear(1, 1), get_draft_model=lambda: None)
    worker.vllm_config = SimpleNamespace(model_config=SimpleNamespace(enable_nccl_comm_suspend=False))
    return worker, levels


def test_vllms_worker_fails_if_another_process_takes_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once this fails, the worker need not be corrected any longer."""
    worker, levels = worker_beside(monkeypatch, taken=30)
    with pytest.raises(AssertionError, match="Memory usage increased"):
        original_sleep()(worker)
    assert levels == [1], "it has freed its memory by then"


@pytest.mark.parametrize("taken", [0, 30])
def test_an_engine_sleeps_whatever_other_processes_take(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, taken: int
) -> None:
    monkeypatch.setattr(Worker, "sleep", original_sleep())
    for _ in range(2):
        sleep_beside_others()
    worker, levels = worker_beside(monkeypatch, taken)
    with caplog.at_level(logging.WARNING):
        worker.sleep()
    assert levels == [1]
    assert ("other processes took more memory" in caplog.text) == (taken > 10)


def test_any_other_failure_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "sleep", original_sleep())
    sleep_beside_others()
    worker, _ = worker_beside(monkeypatch, taken=0)

    def broken(level: int) -> None:
        raise AssertionError(f"level {level}")

    monkeypatch.setattr(Worker, "sleep_mode_backend", SimpleNamespace(suspend=broken))
    with pytest.raises(AssertionError, match="level 1"):
        worker.sleep()
