"""Names of a model's layers while they are wrapped to apply adapters."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig as EngineConfig
from vllm.config import set_current_vllm_config
from vllm.lora.layers import ReplicatedLinearWithLoRA
from vllm.model_executor import parameter
from vllm.model_executor.layers.linear import ReplicatedLinear

from rl_vllm.patches.bare_model import without_adapters


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A model with one layer of vLLM's, wrapped as vLLM wraps it."""
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)
    with set_current_vllm_config(EngineConfig()):
        layer = ReplicatedLinear(4, 3, bias=False, params_dtype=torch.float32, disable_tp=True)
        return nn.ModuleDict({"proj": ReplicatedLinearWithLoRA(layer), "norm": nn.LayerNorm(3)})


def names(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters()}


def test_vllm_puts_the_parameters_of_a_wrapped_layer_under_another_name(model: nn.Module) -> None:
    """Once this fails, the layers need not be taken off any longer."""
    assert "proj.base_layer.weight" in names(model)
    assert "proj.weight" not in names(model)


def test_the_layers_are_off_inside_and_back_afterwards(model: nn.Module) -> None:
    wrapper, bare = model["proj"], model["proj"].base_layer
    with without_adapters(model):
        assert model["proj"] is bare
        assert names(model) == {"proj.weight", "norm.weight", "norm.bias"}
    assert model["proj"] is wrapper
    assert wrapper.base_layer is bare


def test_the_layers_are_back_after_a_transfer_that_broke_off(model: nn.Module) -> None:
    wrapper = model["proj"]
    with pytest.raises(RuntimeError, match="the transfer broke off"), without_adapters(model):
        raise RuntimeError("the transfer broke off")
    assert model["proj"] is wrapper
