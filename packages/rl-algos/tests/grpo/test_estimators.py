"""Estimators by name, of packages and of files, and what they may return."""

import numpy as np
import pytest
from rollouts_builder import make_group, make_prompt, make_rollout

from rl_algos.grpo.advantages import gdpo, grpo, optimal_token_baseline, reinforce_plus_plus, rloo, tpo
from rl_algos.grpo.config import EstimatorConfig, GRPOConfig
from rl_algos.grpo.estimators import advantages_of, columns_before, estimator_section
from rl_algos.policy_gradient.advantages import by_rollout
from rl_algos.rollouts.config import RewardScalingConfig
from rl_algos.rollouts.training.batch import build_batch, with_advantages
from rl_core.data.ragged import Ragged
from rl_core.rollouts.group import RolloutGroup

GROUPS = [make_group("a", [1.0, 0.0, 0.0]), make_group("b", [0.5, 2.0, 1.0])]
REWARDS = np.array([1.0, 0.0, 0.0, 0.5, 2.0, 1.0])
IDS = np.array([0, 0, 0, 1, 1, 1])

FILE = """
import numpy as np
from rl_core.data.ragged import Ragged

def scaled(rewards, groups, lengths, *, factor: float = 2.0):
    return rewards * factor + groups + lengths

def by_token(rewards, loss_mask):
    rows = [mask * (reward + np.arange(len(mask))) for mask, reward in zip(loss_mask, rewards)]
    return Ragged.from_rows(rows, np.float64)

def too_few(rewards):
    return rewards[:-1]

def as_list(rewards):
    return list(rewards)

def not_finite(rewards):
    return np.log(rewards)

def other_rows(rewards, loss_mask):
    return Ragged.from_rows([mask[:-1] * 1.0 for mask in loss_mask], np.float64)

def greedy(rewards, values):
    return rewards
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("user") / "mine.py"
    path.write_text(FILE)
    return path


def configured(name, **settings):
    return GRPOConfig(adv_estimator=estimator_section(name)(name=name, **settings))


def test_the_optimal_token_baseline_is_given_probabilities_from_before_the_update():
    config, batch = configured("optimal_token_baseline"), build_batch(GROUPS, GRPOConfig())
    mask, random = batch.ragged("loss_mask"), np.random.default_rng(0)
    prev = np.where(mask.values > 0, -random.exponential(1, len(mask.values)), np.nan).astype(np.float32)
    collision = random.uniform(0, 1, len(prev)).astype(np.float32)
    batch = batch.with_columns({"prev_logprobs": mask.like(prev), "prev_collision": mask.like(collision)})
    squared = np.where(mask.values > 0, np.maximum(1 - 2 * np.exp(prev.astype(np.float64)) + collision, 0), 0)
    expected = optimal_token_baseline(REWARDS, IDS, mask, None, mask.like(squared))
    found = advantages_of(GROUPS, config, batch=batch)
    np.testing.assert_allclose(found.values, expected.values, rtol=1e-6)
    assert columns_before(config) == {"prev_logprobs", "prev_collision"}
    assert columns_before(GRPOConfig()) == set()


def test_the_target_of_tpo_is_given_logprobs_from_before_the_update():
    config, batch = configured("tpo", temperature=2.0), build_batch(GROUPS, GRPOConfig())
    mask = batch.ragged("loss_mask")
    prev = np.where(mask.values > 0, -np.random.default_rng(0).exponential(1, len(mask.values)), np.nan)
    batch = batch.with_columns({"prev_logprobs": mask.like(prev)})
    sums = mask.like(np.where(mask.values > 0, prev, 0.0)).sums()
    expected = tpo(REWARDS, IDS, mask.sums(), sums, temperature=2.0)
    np.testing.assert_array_equal(advantages_of(GROUPS, config, batch=batch), expected)
    assert columns_before(config) == {"prev_logprobs"}


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, grpo),
        ({"use_leave_one_out_baseline": True}, rloo),
        ({"adv_estimator": EstimatorConfig(name="rloo")}, rloo),
        ({"adv_estimator": EstimatorConfig(name="grpo")}, grpo),
    ],
)
def test_the_two_switches_and_the_names_choose_the_same_estimators(settings, expected, normalize):
    found = advantages_of(GROUPS, GRPOConfig(normalize_rewards=normalize, **settings))
    assert np.array_equal(found, expected(REWARDS, IDS, normalize))


def test_an_estimator_of_a_file_gets_what_its_parameters_name(file):
    found = advantages_of(GROUPS, configured(f"{file}:scaled", factor=3.0))
    np.testing.assert_array_equal(found, REWARDS * 3.0 + IDS + 2)


def test_advantages_of_tokens_reach_the_batch_and_are_clipped_and_averaged_over_sampled_tokens(file):
    config = configured(f"{file}:by_token").model_copy(update={"advantage_clip_high": 4.5})
    found = advantages_of(GROUPS, config)
    assert isinstance(found, Ragged)
    # prompts of three tokens, two sampled after them
    assert found[4].tolist() == [0, 0, 0, 4.5, 4.5]
    column = with_advantages(build_batch(GROUPS, config), found).ragged("advantages")
    assert (column.values.dtype, column[0].tolist()) == (np.float32, [0, 0, 0, 4.0, 4.5])
    assert by_rollout(found, GROUPS).tolist() == [4.25, 3.5, 3.5, 4.0, 4.5, 4.25]


def test_penalties_come_off_rewards_unless_the_estimator_takes_them_off_by_token():
    mask = Ragged.concat([group.columns.ragged("loss_mask") for group in GROUPS])
    penalties = mask.like(mask.values * np.arange(len(mask.values)) / 100)
    found = advantages_of(GROUPS, GRPOConfig(normalize_rewards=False), penalties=penalties)
    np.testing.assert_allclose(found, grpo(REWARDS - penalties.sums(), IDS, False))
    by_token = advantages_of(GROUPS, configured("reinforce_plus_plus"), penalties=penalties)
    assert isinstance(by_token, Ragged)
    np.testing.assert_allclose(
        by_token.values, reinforce_plus_plus(REWARDS, np.full(6, 2), mask, penalties).values, rtol=1e-12
    )


def test_scores_and_named_rewards_are_as_the_environments_gave_them():
    prompt = make_prompt()
    rollouts = [make_rollout(prompt, 1.0), make_rollout(prompt, 0.0), make_rollout(prompt, 0.0, status="failed")]
    for rollout, named in zip(rollouts, ({"brief": 0.5}, {"brief": 0.2, "correct": 1.0}, {}), strict=True):
        rollout.rewards.update(named)
    groups = [RolloutGroup.of(prompt, rollouts)]
    scaling = RewardScalingConfig(enabled=True, target_max=10.0)
    config = configured("pass_at_k", k=1).model_copy(update={"reward_scaling": scaling})
    np.testing.assert_allclose(advantages_of(groups, config), [1.0, -1.0, 0.0])
    named = {"brief": np.array([0.5, 0.2, np.nan]), "correct": np.array([0.0, 1.0, np.nan])}
    np.testing.assert_allclose(advantages_of(groups, configured("gdpo")), gdpo(named, np.zeros(3)))


def test_a_rollout_without_sampled_tokens_has_the_mean_advantage_zero():
    prompt = make_prompt()
    groups = [RolloutGroup.of(prompt, (make_rollout(prompt, 1.0, sampled=()),))]
    assert by_rollout(Ragged.from_rows([[1.0, 2.0, 3.0]]), groups).tolist() == [0.0]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("too_few", r"a value for every rollout.*got shape \(5,\)"),
        ("as_list", r"must return an array \[6\].*got list"),
        ("not_finite", r"returned 2 values that are not finite"),
        ("other_rows", r"a value at every token of `loss_mask`"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_what_is_no_advantage_is_refused(file, name, says):
    with pytest.raises(ValueError, match=rf"mine\.py:{name} .*{says}"):
        advantages_of(GROUPS, configured(f"{file}:{name}"))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("grop", r'got "grop"; allowed: grpo, grpo_batch_std, .*, gigpo, or .*package.module:function'),
        ("a2po", r"A\*-PO compares rewards with values that are estimated before training"),
        ("raft++", r"RAFT\+\+ is grpo\.adv_estimator=raft with loss_fn\.surrogate=clip"),
        ("luffy", r"LUFFY is loss_fn\.demonstrations=shaped with grpo\.demonstrations\.share"),
        ("{file}:greedy", r"greedy has the parameters values; .*rewards, scores, .*, normalize"),
        ("{file}:missing", r"has no 'missing'"),
        ("{file}:np", r"is not a function"),
    ],
)
def test_what_cannot_be_an_estimator_is_refused(file, name, says):
    with pytest.raises(ValueError, match=says):
        estimator_section(name.format(file=file))
