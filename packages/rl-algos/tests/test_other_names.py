"""Names that keys have in other sections lead to keys that there are."""

import pytest

from rl_algos.evaluation.config import EvaluationConfig, TaskConfig
from rl_algos.rollouts.config import RolloutConfig
from rl_algos.supervised.config import SupervisedConfig


@pytest.mark.parametrize("section", [RolloutConfig, SupervisedConfig, EvaluationConfig, TaskConfig])
def test_other_names_lead_to_keys(section):
    assert section.also_called
    assert set(section.also_called.values()) <= set(section.model_fields)
    assert not set(section.also_called) & set(section.model_fields)
