import numpy as np

from rl_algos.grpo.config import RewardScalingConfig, RewardShapingConfig
from rl_algos.grpo.rewards import scale_rewards, shape_rewards


def test_scaling_maps_the_ends_of_the_range_and_clamps_outside():
    scaling = RewardScalingConfig(enabled=True, source_min=-1, source_max=3, target_min=0, target_max=10)
    scaled = scale_rewards(np.array([-5.0, -1.0, 1.0, 3.0, 9.0, np.nan]), scaling)
    np.testing.assert_array_equal(scaled, [0, 0, 5, 10, 10, np.nan])


def test_scaling_that_is_off_changes_nothing():
    rewards = np.array([-5.0, 7.0])
    assert scale_rewards(rewards, RewardScalingConfig()) is rewards


def test_the_length_penalty_grows_over_the_buffer_alone():
    shaping = RewardShapingConfig(
        enabled=True, max_response_length=100, overlong_buffer_length=20, overlong_buffer_penalty=2
    )
    shaped = shape_rewards(np.ones(5), np.array([10, 80, 90, 100, 150]), shaping)
    np.testing.assert_allclose(shaped, [1, 1, 0, -1, -1])
