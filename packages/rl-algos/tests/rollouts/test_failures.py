import numpy as np
import pytest

from rl_algos.rollouts.failures import check_failures
from rl_core.errors import RolloutsFailed
from rl_core.rollout import Prompt, Rollout, RolloutGroup

PROMPT = Prompt("p7", (), np.array([1], np.int32), "math")


def groups(*failures):
    """Groups of one rollout each; an empty failure is a good one."""
    good = Rollout("p7", *[np.zeros(1)] * 3, (), (), {"reward": 1.0}, "stop")
    return [RolloutGroup.of(PROMPT, (Rollout.failed(PROMPT, failure) if failure else good,)) for failure in failures]


def test_a_share_that_is_allowed_passes():
    check_failures(groups("hung", ""), 0.5)
    check_failures(groups("hung", "hung"), 1.0)
    check_failures([], 0.0)


def test_past_it_the_reasons_are_counted_and_one_prompt_is_named():
    reasons = ["EnvironmentFailed: the verifier hung"] * 3 + ["RequestRefused: no room"] * 2 + [""]
    with pytest.raises(RolloutsFailed) as caught:
        check_failures(groups(*reasons), 0.5)
    said = str(caught.value)
    assert said.startswith("5 of 6 rollouts failed, more than grpo.max_failed_share=0.5 allows: ")
    assert "3 x EnvironmentFailed: the verifier hung; 2 x RequestRefused: no room." in said
    assert said.endswith("For example, prompt p7: EnvironmentFailed: the verifier hung")


def test_many_reasons_are_cut_short():
    with pytest.raises(RolloutsFailed, match="1 x reason 4; and 3 other reasons"):
        check_failures(groups(*[f"reason {i}" for i in range(8)]), 0.0)
