"""The arguments that are known without torch are those that the classes have: torch's, and ours of the same name."""

import importlib
import inspect

import pytest

from rl_core.facts.optimizer_arguments import OPTIMIZERS, SCHEDULES
from rl_core.torch.optim.muon import Muon

OWN = {"torch.optim.Muon": Muon}


@pytest.mark.parametrize(("name", "arguments"), [*OPTIMIZERS.items(), *SCHEDULES.items()])
def test_the_table_has_the_arguments_of_the_class(name, arguments):
    module, _, attribute = name.rpartition(".")
    kind = OWN.get(name) or getattr(importlib.import_module(module), attribute)
    parameters = list(inspect.signature(kind.__init__).parameters)
    assert arguments == set(parameters[2:]) - {"pieces"}
