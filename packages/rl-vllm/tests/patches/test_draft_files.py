"""Load configs of draft models."""

from __future__ import annotations

import importlib
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import LoadConfig
from vllm.v1.spec_decode import draft_model
from vllm.v1.spec_decode.draft_model import DraftModelProposer

from rl_vllm.patches import draft_files
from rl_vllm.patches.draft_files import get_drafter, load_drafters_as_configured

DUMMY, FILES = LoadConfig(load_format="dummy"), LoadConfig()


def loaded_with(monkeypatch: pytest.MonkeyPatch, module: Any) -> LoadConfig | None:
    """The load config that vLLM's loader of draft models ends up with, in an engine whose own is `dummy`."""
    speculative = SimpleNamespace(draft_load_config=FILES)
    config = SimpleNamespace(load_config=DUMMY, speculative_config=speculative)
    found: list[LoadConfig | None] = []
    monkeypatch.setattr(module, "get_model", lambda *, load_config=None, **others: found.append(load_config))
    proposer = SimpleNamespace(_create_draft_vllm_config=lambda: config)
    DraftModelProposer._get_model(proposer)  # type: ignore[arg-type]
    return found[0]


def test_a_drafter_is_loaded_by_its_own_load_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model, "get_model", draft_model.get_model)
    load_drafters_as_configured()
    assert draft_model.get_model is get_drafter
    assert loaded_with(monkeypatch, draft_files) is FILES


def test_vllms_loader_of_draft_models_drops_their_load_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once this fails, the loaders need not be given it any longer."""
    assert loaded_with(monkeypatch, draft_model) is None
    second = importlib.util.find_spec(draft_files.LOADERS[1])
    assert second is not None
    assert second.origin is not None
    with open(second.origin, encoding="utf-8") as file:
        assert "load_config" not in file.read()
    assert "load_config" not in inspect.getsource(DraftModelProposer._get_model)
