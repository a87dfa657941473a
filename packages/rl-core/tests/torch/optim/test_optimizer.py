"""The choice of how an optimizer steps."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rl_core.model_config import OptimizerConfig
from rl_core.torch.optim.optimizer import build_optimizer, counts_on_device, with_fused_step

ADAMW = OptimizerConfig(name="torch.optim.AdamW", kwargs={"lr": 0.1})
SGD = OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 0.1})
EACH = OptimizerConfig(name="torch.optim.AdamW", kwargs={"lr": 0.1, "foreach": True})


def parameters(device):
    with FakeTensorMode():
        return [torch.nn.Parameter(torch.empty(3, device=device)) for _ in range(2)]


@pytest.mark.parametrize(
    ("config", "device", "is_fused"),
    [(ADAMW, "cuda", True), (ADAMW, "cpu", False), (SGD, "cuda", False), (EACH, "cuda", False)],
)
def test_steps_on_gpus_are_fused_unless_the_config_chooses(config, device, is_fused):
    chosen = with_fused_step(config, parameters(device))
    assert chosen.kwargs.get("fused", False) == is_fused
    assert is_fused or chosen is config


def test_parameters_on_several_devices_are_not_stepped_fused():
    assert with_fused_step(ADAMW, [*parameters("cuda"), *parameters("cpu")]) is ADAMW


@pytest.mark.parametrize("kwargs", [{}, {"fused": True}, {"capturable": True}], ids=str)
def test_a_fused_step_counts_on_the_device(kwargs):
    optimizer = build_optimizer(OptimizerConfig(kwargs={"lr": 0.1, **kwargs}), [torch.nn.Parameter(torch.zeros(2))])
    assert counts_on_device(optimizer) == bool(kwargs)
