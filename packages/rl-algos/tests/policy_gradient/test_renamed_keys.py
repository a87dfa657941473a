"""Keys of the loss in version 0.1.0 lead to keys that there are."""

import re

import pytest

from rl_algos.policy_gradient.loss_config import LossConfig
from rl_algos.policy_gradient.plugin import loss_fn_section
from rl_algos.policy_gradient.renamed_keys import RENAMED
from rl_core.config import all_keys, assemble, load, resolve
from rl_core.errors import ConfigProblems


@pytest.mark.parametrize("key", RENAMED)
def test_an_old_key_is_answered_with_a_key_that_exists(key):
    assert key not in LossConfig.model_fields
    written = {key: True}
    root = assemble("Root", {"loss_fn": loss_fn_section(written)})
    with pytest.raises(ConfigProblems) as refused:
        resolve(load({"loss_fn": written}), root)
    (problem,) = refused.value.problems
    assert problem.key == f"loss_fn.{key}"
    named = re.search(r"loss_fn\.[\w.]+", problem.message)
    assert named is not None
    assert named[0] in set(all_keys(root, {}))


def test_a_surrogate_that_replaces_a_switch_is_one():
    for switch in ("sequence_level_importance_ratios", "use_cispo", "disable_ppo_ratio"):
        name = RENAMED[switch].partition("=")[2]
        assert loss_fn_section({"surrogate": name}).model_validate({"surrogate": name}).surrogate.name == name
