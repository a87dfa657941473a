"""Values that vLLM looks for kernels in when an engine starts on CPU."""

from __future__ import annotations

import builtins
import sys
from types import ModuleType
from typing import Any

import pytest
from vllm.triton_utils import dispatcher

import rl_vllm.engine.local_engine


class Library:
    """Answers every attribute with a function, as the library handle of llvmlite does."""

    def __getattribute__(self, name: str) -> Any:
        return lambda *args: None


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that holds a library, and a kernel under another name; the only one that is loaded."""
    module = ModuleType("odd")
    module.library, module.held = Library(), KERNEL
    monkeypatch.setattr(sys, "modules", {"odd": module})
    return module


KERNEL, WRAPPER = object(), object()


def test_kernels_are_found_next_to_odd_values(modules: ModuleType) -> None:
    assert rl_vllm.engine.local_engine.LocalEngine
    dispatcher._rebind_kernels([(KERNEL, WRAPPER)])
    assert modules.held is WRAPPER


def test_vllm_takes_any_attribute_for_a_mapping(modules: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once this fails, it need not be corrected any longer."""
    assert modules.library
    monkeypatch.setattr(dispatcher, "vars", builtins.vars)
    with pytest.raises(AttributeError):
        dispatcher._rebind_kernels([(KERNEL, WRAPPER)])
