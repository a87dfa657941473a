"""The same run on another generator, and on devices of its own."""

from runs import assert_same, steps_of

from rl_core.testing.exhaustive import exhaustive


@exhaustive
def test_a_single_rank_beside_a_replica_of_its_own_makes_the_same_steps(driver, grpo, whole_grpo, tmp_path):
    apart = ["policy.generation.colocated.enabled=false", "policy.generation.colocated.resources.gpus_per_node=1"]
    driver.train(tmp_path / "run", *grpo, "grpo.max_num_steps=4", *apart)
    found = steps_of(tmp_path / "run")
    assert max(line["mismatch/max"] for line in found) < 1e-3
    assert_same(found, steps_of(whole_grpo)[:4], ("reward/mean", "train/loss", "train/grad_norm"), 1e-3)


def test_the_trainers_own_generator_agrees_with_it(whole_hf, few_steps):
    found = steps_of(whole_hf)
    assert [line["step"] for line in found] == list(range(1, 5 if few_steps else 13))
    assert max(line["mismatch/max"] for line in found) < 1e-4
    assert max(line["reward/mean"] for line in found) > 0.1
