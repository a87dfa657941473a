"""Copies that a model's loader makes by itself, in a reload of vLLM."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.gpt_oss import GptOssModel

from rl_core.weights import Manifest, TensorSpec
from rl_vllm.weights.load_plan import plan_load
from rl_vllm.weights.weight_receiver import WeightReceiver


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(4), requires_grad=False)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3, 5), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(2, 3), requires_grad=False)


class Model(nn.Module):
    """Loads as gpt-oss does: a part of the sinks, experts turned around, and biases by a loader."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.experts = Attention(), Experts()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameter = parameters[name]
            if name == "attention.sinks":
                parameter.data[:2].copy_(tensor.narrow(0, 0, 2))
                parameter.data[2:].copy_(tensor.narrow(0, 2, 2))
            elif name == "experts.weight":
                parameter.copy_(tensor.permute(0, 2, 1).contiguous())
            else:
                loader = getattr(parameter, "weight_loader", default_weight_loader)
                loader(parameter, tensor)


@pytest.mark.parametrize("order", [1, -1], ids=["as listed", "reversed"])
def test_what_a_model_copies_itself_arrives_with_each_version(order: int) -> None:
    model = Model()
    record_metadata_for_reloading(model)
    live = dict(model.named_parameters())
    shapes = {"attention.sinks": (4,), "experts.weight": (2, 5, 3), "experts.bias": (2, 3)}
    names = list(shapes)[::order]
    for version in (1, 2):
        sent = {name: torch.randn(shapes[name]) for name in names}
        manifest = Manifest(version, tuple(TensorSpec(name, shapes[name], "float32") for name in names))
        config = SimpleNamespace(dtype=torch.float32)
        with torch.no_grad():
            receiver = WeightReceiver(model, config, manifest, plan_load(model, manifest), None)
            receiver.load(sent.items())
        assert receiver.stale() == []
        torch.testing.assert_close(live["attention.sinks"], sent["attention.sinks"], rtol=0, atol=0)
        torch.testing.assert_close(live["experts.weight"], sent["experts.weight"].transpose(1, 2), rtol=0, atol=0)
        torch.testing.assert_close(live["experts.bias"], sent["experts.bias"], rtol=0, atol=0)
        assert all(parameter is live[name] for name, parameter in model.named_parameters())


def test_vllms_reload_drops_what_a_model_copies_itself() -> None:
    """Once this fails, direct copies need not be kept any longer."""
    model = Model()
    record_metadata_for_reloading(model)
    sent = {"attention.sinks": torch.ones(4), "experts.bias": torch.ones(2, 3), "experts.weight": torch.ones(2, 5, 3)}
    with torch.no_grad():
        initialize_layerwise_reload(model)
        model.load_weights(sent.items())
        finalize_layerwise_reload(model, SimpleNamespace(dtype=torch.float32))
    assert torch.equal(model.attention.sinks, torch.zeros(4))


def test_gpt_oss_copies_its_sinks_by_itself() -> None:
    """Once this fails, look for another model of vLLM that copies; if there is none, delete the patch."""
    assert "param.data.copy_(narrow_weight)" in inspect.getsource(GptOssModel._load_weights_other)
