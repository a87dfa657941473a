"""The arguments that are known without torch are those that the classes have: torch's, and ours of the same name."""

import importlib
import inspect

import pytest
import torch

from rl_core.facts.optimizer_arguments import OPTIMIZERS, SCHEDULES, UNSUPPORTED, state_bytes
from rl_core.model_config import OptimizerConfig
from rl_core.torch.optim.muon import Muon
from rl_core.torch.optim.optimizer import build_optimizer
from rl_core.torch.optim.parameters import describe_parameters

OWN = {"torch.optim.Muon": Muon}


@pytest.mark.parametrize(("name", "arguments"), [*OPTIMIZERS.items(), *SCHEDULES.items()])
def test_the_table_has_the_arguments_of_the_class(name, arguments):
    module, _, attribute = name.rpartition(".")
    kind = OWN.get(name) or getattr(importlib.import_module(module), attribute)
    parameters = list(inspect.signature(kind.__init__).parameters)
    assert arguments == set(parameters[2:]) - {"pieces"}


VARIANTS = [
    *((name, {}) for name in OPTIMIZERS.keys() - UNSUPPORTED.keys()),
    ("torch.optim.AdamW", {"amsgrad": True}),
    ("torch.optim.RMSprop", {"momentum": 0.9, "centered": True}),
    ("torch.optim.SGD", {"momentum": 0.9}),
    ("rl_core.torch.HalfStateAdamW", {}),
    ("rl_core.torch.EightBitAdamW", {}),
    ("rl_core.torch.EightBitAdamW", {"block_size": 16}),
]


@pytest.mark.parametrize(("name", "kwargs"), VARIANTS)
def test_the_bytes_that_are_counted_are_those_that_an_optimizer_keeps(name, kwargs):
    model = torch.nn.ModuleDict({"up": torch.nn.Linear(64, 256, bias=False), "embed": torch.nn.Embedding(128, 64)})
    optimizer = build_optimizer(
        OptimizerConfig(name=name, kwargs=kwargs), model.parameters(), described=describe_parameters([model])
    )
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    expected = state_bytes(name, kwargs)
    for layer, each in (("up", expected.matrices), ("embed", expected.others)):
        parameter = model[layer].weight
        held = sum(value.nbytes for value in optimizer.state[parameter].values() if value.dim())
        if name == "torch.optim.Adafactor":
            # Its means of rows and columns are less than a hundredth of a large matrix.
            assert held < 0.1 * parameter.nbytes
        else:
            assert held == parameter.numel() * each, layer
