"""Keys of the loss in version 0.1.0 lead to keys that there are, and the losses that they described are the same."""

import itertools
import re

import pytest

from rl_algos.policy_gradient.config import RENAMED
from rl_algos.policy_gradient.plugin import loss_fn_section
from rl_core.config import all_keys, assemble, load, resolve
from rl_core.errors import ConfigError, ConfigProblems

RECORDED = {
    "name": "policy",
    "surrogate": {"name": None},
    "ratio_denominator": "prev",
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.2,
    "ratio_clip_c": None,
    "sequence_level_importance_ratios": False,
    "use_cispo": False,
    "disable_ppo_ratio": False,
    "force_on_policy_ratio": None,
    "token_level_loss": True,
    "aggregation": None,
    "aggregation_divisor": None,
    "reference_policy_kl_penalty": 0.01,
    "reference_policy_kl_type": "k3",
    "reference_policy_kl_unbiased": False,
    "use_on_policy_kl_approximation": False,
    "use_kl_in_reward": False,
    "adaptive_kl": {"target": None, "horizon": 10000},
    "kl_input_clamp_value": 20.0,
    "kl_output_clamp_value": 10.0,
    "use_importance_sampling_correction": False,
    "importance_sampling_level": None,
    "importance_sampling_batch_normalize": False,
    "importance_sampling_rejection": {"statistic": "mean", "estimator": "k3", "high": None, "low": None},
    "truncated_importance_sampling_type": "tis",
    "truncated_importance_sampling_ratio": None,
    "truncated_importance_sampling_ratio_min": None,
    "staleness_decay": 1.0,
    "off_policy_sequence_mask_threshold": None,
    "top_entropy_share": None,
    "entropy_bonus": {"weight": 0.0, "target": None, "weight_step": 0.005},
    "positive_example_nll_weight": 0.0,
}
"""The section as version 0.1.0 recorded it with its defaults."""

CORRECTION = {
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_type": "icepop",
    "truncated_importance_sampling_ratio": 2.0,
    "truncated_importance_sampling_ratio_min": 0.5,
}


def read(**changed):
    """The section as this version reads it."""
    raw = load({"loss_fn": {**RECORDED, **changed}})
    raw, upgrade = raw.upgraded(assemble("Root", {"loss_fn": loss_fn_section(raw.select("loss_fn"))}))
    assert set(upgrade.renamed) == {f"loss_fn.{key}" for key in RENAMED} - {"loss_fn.surrogate", "loss_fn.aggregation"}
    return resolve(raw, assemble("Root", {"loss_fn": loss_fn_section(raw.select("loss_fn"))})).config.loss_fn


@pytest.mark.parametrize("key", sorted(RENAMED.keys() - {"surrogate", "aggregation"}))
def test_an_old_key_is_answered_with_a_key_that_exists(key):
    value = {"adaptive_kl": {"target": 0.1}, "importance_sampling_rejection": {"high": 2.0}}
    value = {**value, "staleness_decay": 0.5}.get(key, True)
    written = {key: value}
    root = assemble("Root", {"loss_fn": loss_fn_section(written)})
    with pytest.raises(ConfigProblems) as refused:
        resolve(load({"loss_fn": written}), root)
    (problem,) = refused.value.problems
    assert problem.key == f"loss_fn.{key}"
    commands = re.findall(r"(loss_fn\.[\w.]+)=\S+", problem.message)
    assert commands
    named = assemble("Root", {"loss_fn": loss_fn_section({"importance": {}, "staleness": {}})})
    known = set(all_keys(named, {"loss_fn": {"importance": {"rejection": {}}, "staleness": {}}}))
    assert set(commands) <= known


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({}, {}),
        ({"ratio_clip_max": 0.28, "ratio_clip_c": 3.0}, {"surrogate": {"clip_high": 0.28, "dual_clip": 3.0}}),
        ({"use_cispo": True, "ratio_clip_min": 1.0}, {"surrogate": {"name": "cispo", "clip_low": 1.0}}),
        (
            {"sequence_level_importance_ratios": True, "token_level_loss": False},
            {"surrogate": "gspo", "aggregation": "sequence-mean"},
        ),
        ({"disable_ppo_ratio": True}, {"surrogate": "reinforce"}),
        (
            {"surrogate": {"name": "sapo", "tau_positive": 2.0}, "aggregation": "sequence-mean"},
            {"surrogate": {"name": "sapo", "tau_positive": 2.0}, "aggregation": "sequence-mean"},
        ),
        (
            {"aggregation": "sequence-mean-token-sum", "aggregation_divisor": 8.0, "token_level_loss": False},
            {"aggregation": {"name": "sequence-mean-token-sum", "divisor": 8.0}},
        ),
        ({"reference_policy_kl_penalty": 0.0}, {"kl": {"weight": 0.0}}),
        (
            {"adaptive_kl": {"target": 0.1, "horizon": 5}, "kl_input_clamp_value": None},
            {"kl": {"target": 0.1, "horizon": 5, "input_clamp": None}},
        ),
        ({"use_kl_in_reward": True, "reference_policy_kl_type": "k1"}, {"kl": {"in_reward": True, "estimator": "k1"}}),
        (CORRECTION, {"importance": {"truncation": "icepop", "high": 2.0, "low": 0.5}}),
        (
            {**CORRECTION, "importance_sampling_rejection": {"statistic": "max", "estimator": "k2", "high": 1.0}},
            {
                "importance": {
                    "truncation": "icepop",
                    "high": 2.0,
                    "low": 0.5,
                    "rejection": {"statistic": "max", "estimator": "k2", "high": 1.0},
                }
            },
        ),
        ({"staleness_decay": 0.5, "top_entropy_share": 0.2}, {"staleness": 0.5, "filters": {"top_entropy_share": 0.2}}),
    ],
)
def test_a_recorded_loss_is_the_same_under_the_keys_of_this_version(changed, wanted):
    if "staleness" in wanted:
        wanted = {**wanted, "staleness": {"decay": wanted["staleness"]}}
    root = assemble("Root", {"loss_fn": loss_fn_section(wanted)})
    assert read(**changed) == resolve(load({"loss_fn": wanted}), root).config.loss_fn


def test_switches_that_contradict_each_other_are_answered_with_no_command_to_follow():
    switches = ("sequence_level_importance_ratios", "use_cispo", "disable_ppo_ratio")
    for one, other in itertools.permutations(switches, 2):
        with pytest.raises(ConfigError) as refused:
            resolve(load({"loss_fn": {one: True, other: True}}), assemble("Root", {"loss_fn": loss_fn_section({})}))
        assert str(refused.value).count("Keep one of the two") == 2
        with pytest.raises(ConfigError) as refused:
            resolve(load({"loss_fn": {one: True, other: False}}), assemble("Root", {"loss_fn": loss_fn_section({})}))
        assert "Remove this line" in str(refused.value)
        assert "Keep one" not in str(refused.value)
