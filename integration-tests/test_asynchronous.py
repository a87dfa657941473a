"""Rollouts ahead of training: with no lead the run is the synchronous one, and none is lost whatever happens."""

import pytest
from runs import Run, assert_same, rollouts_of, steps_of

from rl_launch.session.exactly_once import prove
from rl_launch.session.run_folder import RunFolder

HF = "policy.generation.backend=hf"
AHEAD = (
    HF,
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources.gpus_per_node=1",
    "loss_fn.use_importance_sampling_correction=true",
    "loss_fn.truncated_importance_sampling_ratio=2.0",
    "grpo.async_grpo.enabled=true",
)
SAME = ("reward/mean", "train/loss", "train/grad_norm")


def test_an_age_of_0_is_the_synchronous_run(driver, grpo, whole_hf, tmp_path):
    at_once = ("grpo.async_grpo.enabled=true", "grpo.async_grpo.max_trajectory_age_steps=0")
    driver.train(tmp_path / "run", *grpo, "grpo.max_num_steps=3", HF, *at_once)
    assert_same(steps_of(tmp_path / "run"), steps_of(whole_hf)[:3], SAME, 0.0)


@pytest.mark.parametrize("killed", ["ray::AsyncWorkerHost", "ray::WorkerHost"])
def test_a_run_ahead_of_training_keeps_its_bound_and_loses_no_prompt(grpo, tmp_path, killed):
    run = Run.start(tmp_path / "run", *grpo, "grpo.max_num_steps=6", "checkpointing.save_period=2", *AHEAD)
    run.await_step(3)
    run.kill_one(killed)
    run.finish()
    steps = steps_of(run.folder)
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert max(line["staleness/max"] for line in steps) == 1
    assert steps[1]["staleness/share_1"] > 0.9
    prompts = [row["prompt_id"] for rows in rollouts_of(run.folder).values() for row in rows if row["index"] == 0]
    assert len(set(prompts)) == len(prompts) == 32 * 6
    proof = prove(RunFolder(run.folder))
    assert (proof.contradictions, proof.gaps) == ((), ())
    assert proof.num_compared == 6
