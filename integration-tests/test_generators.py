"""The same run on another generator, and on devices of its own."""

from runs import Run, assert_same, steps_of


def test_a_single_rank_beside_a_replica_of_its_own_makes_the_same_steps(grpo, whole_grpo, tmp_path):
    apart = ["policy.generation.colocated.enabled=false", "policy.generation.colocated.resources.gpus_per_node=1"]
    run = Run.start(tmp_path / "run", *grpo, "grpo.max_num_steps=4", *apart)
    run.finish()
    assert max(line["mismatch/max"] for line in steps_of(run.folder)) < 1e-3
    assert_same(steps_of(run.folder), steps_of(whole_grpo)[:4], ("reward/mean", "train/loss", "train/grad_norm"), 1e-3)


def test_the_trainers_own_generator_agrees_with_it(grpo, tmp_path):
    run = Run.start(tmp_path / "run", *grpo, "grpo.max_num_steps=4", "policy.generation.backend=hf")
    run.finish()
    found = steps_of(run.folder)
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    assert max(line["mismatch/max"] for line in found) < 1e-4
    assert max(line["reward/mean"] for line in found) > 0.1
