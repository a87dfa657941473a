"""Losses of a user's own, by the path of their class."""

from types import SimpleNamespace

import pytest

from rl_algos.dpo.plugin import PLUGIN as DPO
from rl_algos.grpo.config import GRPOConfig
from rl_algos.grpo.plugin import PLUGIN as GRPO
from rl_algos.losses.custom import loss_requirements
from rl_algos.ppo.config import PPOConfig
from rl_algos.ppo.plugin import PLUGIN as PPO
from rl_core.plugins import Requirement


def config_with(loss):
    section = SimpleNamespace(name=loss)
    dpo = SimpleNamespace(loss=section)
    return SimpleNamespace(loss_fn=section, dpo=dpo, grpo=GRPOConfig(), ppo=PPOConfig())


@pytest.mark.parametrize("algorithm", [DPO, GRPO, PPO], ids=lambda plugin: plugin.name)
def test_a_loss_of_an_installed_package_is_needed_where_models_run(algorithm):
    assert algorithm.further(config_with("yaml.nodes:Loss")) == (Requirement("PyYAML", imports=("yaml",)),)
    assert algorithm.further(config_with("policy")) == ()


def test_a_loss_in_a_file_needs_no_package():
    assert loss_requirements("folder/losses.py:Loss") == ()
