"""A run on a taskset of verifiers, with the package as it is; without it, only its recorded requests are tested."""

import importlib.util

import pytest
from runs import Run, assert_tokens_are_those_of_rollouts, figures, rollouts_of

from rl_core.testing.exhaustive import exhaustive

HAS_VERIFIERS = importlib.util.find_spec("verifiers") is not None
SHORT = (
    "logger.token_level=all",
    "policy.generation.backend=hf",
    "policy.train_global_batch_size=16",
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "grpo.max_num_steps=2",
    "grpo.val_period=0",
    "checkpointing.metric_name=null",
)


@exhaustive
@pytest.mark.skipif(not HAS_VERIFIERS, reason="needs rl-envs[verifiers]")
def test_a_taskset_is_trained_on_with_its_own_rewards(tmp_path):
    run = Run.start(tmp_path / "run", "verifiers-tiny", *SHORT)
    run.finish()
    assert_tokens_are_those_of_rollouts(run.folder)
    for records in rollouts_of(run.folder).values():
        assert len(records) == 16
        for record in records:
            [segment] = record["segments"]
            [turn] = segment["turns"]
            left, right = record["prompt"][0]["content"].rstrip("=").split("+")
            is_right = float(turn["text"].strip() == str(int(left) + int(right)))
            rewards = {"reward": is_right, "right": is_right, "length": float(len(turn["text"].strip()))}
            assert (record["status"], record["rewards"]) == ("ok", rewards)
    assert len(figures(run.folder)) == 2
