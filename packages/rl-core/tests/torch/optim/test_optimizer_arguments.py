"""The arguments that are known without torch are those that torch's classes have."""

import importlib
import inspect

import pytest

from rl_core.facts.optimizer_arguments import OPTIMIZERS, SCHEDULES


@pytest.mark.parametrize(("name", "arguments"), [*OPTIMIZERS.items(), *SCHEDULES.items()])
def test_the_table_has_the_arguments_of_the_class(name, arguments):
    module, _, attribute = name.rpartition(".")
    parameters = list(inspect.signature(getattr(importlib.import_module(module), attribute).__init__).parameters)
    assert arguments == set(parameters[2:])
