"""Layers that draft heads have in common with their model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.v1.spec_decode import llm_base_proposer
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from rl_vllm.patches.draft_files import LAYERS, keep_layers_of_heads


def model_with(weight: torch.Tensor) -> nn.Module:
    model = nn.Module()
    model.model = nn.Module()
    for owner, name in ((model.model, "embed_tokens"), (model, "lm_head")):
        layer = nn.Module()
        layer.weight = nn.Parameter(weight.clone())
        owner.add_module(name, layer)
    return model


def is_shared(monkeypatch: pytest.MonkeyPatch, method: Any, *, has_own: bool) -> bool:
    """Whether a head has a layer of its model after vLLM has looked at both, whose weights are equal."""
    group = SimpleNamespace(world_size=1)
    monkeypatch.setattr(llm_base_proposer, "get_pp_group", lambda: group)
    head, model = model_with(torch.ones(3, 2)), model_with(torch.ones(3, 2))
    for flag, _ in LAYERS.values():
        setattr(head, flag, has_own)
    config = SimpleNamespace(speculative_config=None)
    method(SimpleNamespace(model=head, vllm_config=config, use_local_argmax_reduction=False), model)
    return bool(head.lm_head is model.lm_head or head.model.embed_tokens is model.model.embed_tokens)


@pytest.mark.parametrize("method", LAYERS)
def test_a_head_shares_only_layers_that_its_files_lack(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setattr(SpecDecodeBaseProposer, method, _original(method))
    keep_layers_of_heads()
    patched = vars(SpecDecodeBaseProposer)[method]
    assert not is_shared(monkeypatch, patched, has_own=True)
    assert is_shared(monkeypatch, patched, has_own=False)


@pytest.mark.parametrize("method", LAYERS)
def test_vllm_shares_layers_that_are_equal(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Once this fails, heads need not be kept from it any longer."""
    assert is_shared(monkeypatch, _original(method), has_own=True)


def _original(method: str) -> Any:
    found = vars(SpecDecodeBaseProposer)[method]
    return vars(found).get("__wrapped__", found)
