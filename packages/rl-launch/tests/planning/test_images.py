"""Plans count the vision tower of a model that sees images."""

import pytest

from rl_core.devices import CUDA
from rl_launch.planning.accelerators import accelerator_named
from rl_launch.planning.memory import IMAGES
from rl_launch.planning.plan import plan_run
from rl_launch.run_config.reading import read_plan


def planned(recipe, *overrides):
    run = read_plan(recipe, ["cluster.device=cuda", *overrides])
    return plan_run(run, recipe, accelerator=accelerator_named("h100"), device=CUDA)


def usage(plan, role, phase):
    return next(each for each in plan.usages if (each.role, each.phase) == (role, phase))


@pytest.mark.parametrize(("recipe", "billions"), [("grpo-clevr-count", 3.75), ("grpo-vlm-geometry", 8.29)])
def test_published_models_have_their_whole_number_of_parameters(recipe, billions):
    rank = planned(recipe).roles[0].rank
    assert rank.size.count == pytest.approx(billions * 1e9, rel=5e-3)
    assert rank.trained.vision == 0


def test_what_trains_of_a_tower_has_gradients_and_keeps_activations():
    frozen = planned("sft-vlm", "policy.vision.projector=frozen")
    whole = planned("sft-vlm", "policy.vision.tower=trained", "policy.vision.projector=trained")
    vision = whole.roles[0].rank.vision
    assert [each.roles[0].rank.trained.vision for each in (frozen, whole)] == [0, vision.parameters()]
    memory = [usage(each, "policy", "training").device for each in (frozen, whole)]
    assert memory[1]["optimizer state"] - memory[0]["optimizer state"] == 8 * vision.parameters()
    assert memory[1][IMAGES] > memory[0][IMAGES] > 0
    # Layers of a tower are recomputed together with those of the language model.
    kept = planned("sft-vlm", "policy.vision.tower=trained", "policy.dtensor_cfg.recompute=none")
    assert usage(kept, "policy", "training").device[IMAGES] > 5 * memory[1][IMAGES]


def test_patterns_choose_what_trains_of_a_tower():
    found = planned("sft-vlm", "policy.vision.tower=trained", "policy.freeze=[model.visual.blocks]")
    vision = found.roles[0].rank.vision
    assert found.roles[0].rank.trained.vision == vision.outside


def test_engines_have_the_tower_and_tensor_parallel_ranks_of_a_policy_a_whole_one():
    engine = planned("grpo-clevr-count").engine
    assert engine.weights == 2 * engine.size.count
    alone, split = (
        planned("sft-vlm", "cluster.gpus_per_node=2", f"policy.dtensor_cfg.tensor_parallel_size={size}").roles[0].rank
        for size in (1, 2)
    )
    # FSDP shards the tower over data-parallel ranks only.
    difference = split.memory.device - alone.memory.device
    half = alone.vision.parameters() / 2
    trained = alone.trained.vision / half / 2
    assert difference == pytest.approx(half * (2 * (1 - trained) + 16 * trained), rel=1e-6)


def test_a_plan_states_how_many_tokens_are_of_images():
    (stated,) = [each for each in planned("grpo-clevr-count").work.assumptions if "images" in each]
    assert stated.startswith("up to 2,048 of the 2,048 tokens")
    limited = planned("grpo-clevr-count", "policy.vision.max_images=1")
    assert any("up to 256 of the 2,048 tokens" in each for each in limited.work.assumptions)
    unknown = planned("grpo-clevr-count", "policy.model_name=org/unknown-7B")
    assert any("not counted" in each for each in unknown.work.assumptions)
    assert not any("images" in each for each in planned("grpo-math-8b").work.assumptions)


def test_host_memory_has_the_processes_of_a_node():
    host = planned("grpo-clevr-count").host
    assert host["processes"] > 1e9
    assert planned("grpo-clevr-count").host_bytes == sum(host.values())
