"""Where vLLM imports the class of a model to see what it can do."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from vllm.model_executor.models import ModelRegistry, registry

import rl_vllm.engine.arguments


@pytest.fixture(autouse=True)
def processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Commands of the processes that vLLM starts, on a machine that has seen no model."""
    started: list[Any] = []

    def start(command: list[str], **others: Any) -> None:
        started.append(command)
        raise RuntimeError("starts no process")

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", start)
    return started


def test_a_model_is_inspected_where_it_will_run(processes: list[Any]) -> None:
    assert rl_vllm.engine.arguments.has_states({"architectures": ["MambaForCausalLM"]})
    assert not rl_vllm.engine.arguments.has_states({"architectures": ["Qwen3ForCausalLM"]})
    assert not processes


def test_vllm_inspects_a_model_in_another_process(processes: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Once this fails, it need not be changed any longer."""
    monkeypatch.setattr(registry, "_run_in_subprocess", registry._run_in_subprocess.__wrapped__)
    with pytest.raises(RuntimeError, match="starts no process"):
        ModelRegistry.models["MambaForCausalLM"].inspect_model_cls()
    assert processes == [registry._SUBPROCESS_COMMAND]
