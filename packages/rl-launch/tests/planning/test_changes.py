"""The smallest change that fits, and the layouts that a search finds, of every shipped recipe."""

from contextlib import suppress
from functools import partial

import pytest

from rl_core.devices import CUDA
from rl_core.errors import ConfigError
from rl_launch.planning.accelerators import accelerator_named
from rl_launch.planning.changes import SEQUENCE_PARALLEL, engine_tensor_key, fastest, smallest_change, with_values
from rl_launch.planning.plan import device_of, plan_run
from rl_launch.recipes import recipe_names
from rl_launch.run_config.reading import changed_plan, read_plan

RECIPES = [name for name in recipe_names() if not name.endswith("-tiny")]
RESET = {
    "dapo-math-32b": {"dtensor_cfg.tensor_parallel_size": 1, "dtensor_cfg.sequence_parallel": False},
    "deepswe-32b": {"dtensor_cfg.tensor_parallel_size": 1, "dtensor_cfg.sequence_parallel": False},
    "dpo-helpsteer3": {"dtensor_cfg.tensor_parallel_size": 1},
    "grpo-math-32b": {"dtensor_cfg.tensor_parallel_size": 1, "dtensor_cfg.sequence_parallel": False},
    "grpo-math-70b-megatron": {"megatron_cfg.pipeline_model_parallel_size": 1},
    "grpo-math-8b-megatron": {"megatron_cfg.tensor_model_parallel_size": 1, "megatron_cfg.sequence_parallel": False},
    "grpo-qwen3-30b-a3b-megatron": {"megatron_cfg.expert_model_parallel_size": 1},
    "rm-helpsteer3": {"dtensor_cfg.tensor_parallel_size": 1},
}
"""Recipes without their own layout. The largest one keeps its pipeline, which its uneven stages need."""

SLOW = ("grpo-deepseek-v3-megatron", "gspo-qwen3-30b-a3b")
"""A search of ten seconds, and one that differs from another recipe's only by its loss."""


def planner_on(name, device):
    return partial(plan_run, name=name, accelerator=accelerator_named(device), device=CUDA)


@pytest.mark.parametrize("device", ["rtx4090", "a100-40", "l40s"])
def test_every_recipe_has_a_change_that_fits_without_a_needless_part(device):
    for name in RECIPES:
        run, planner = read_plan(name), planner_on(name, device)
        if not run.config.cluster.device.startswith("cuda") or planner(run).fits is not False:
            continue
        change = smallest_change(run, planner)
        assert change is not None, name
        # `rl train` accepts it, and it fits.
        assert planner(changed_plan(run, change.values, "test")).fits, name
        for key in change.values:
            rest = {other: value for other, value in change.values.items() if other != key}
            if key.endswith(SEQUENCE_PARALLEL):
                continue  # It belongs to the tensor-parallel size.
            with suppress(ConfigError):
                assert not planner(changed_plan(run, rest, "test")).fits, (name, key)


@pytest.mark.parametrize("device", ["rtx4090", "a100-40"])
def test_no_single_cheaper_value_fits(device):
    """Microbatches of a row, sharded gradients and fewer logits, each alone, cost less than layouts and more GPUs."""
    for name in ("grpo-math-8b", "dpo-helpsteer3", "ppo-math-1b", "sft-openmathinstruct2", "distill-math"):
        run, planner = read_plan(name), planner_on(name, device)
        change = None if planner(run).fits else smallest_change(run, planner)
        if change is None:
            continue
        longest = run.config.policy.max_total_sequence_length
        cheap = {
            "policy.sequence_packing.train_mb_tokens": longest,
            "policy.dtensor_cfg.gradient_accumulation": "sharded",
            "policy.logprob_chunk_size": 256,
        }
        costly = {key for key in change.values if key not in cheap and "mb_tokens" not in key}
        if costly:
            assert not any(planner(with_values(run, {key: value})).fits for key, value in cheap.items()), name


def test_a_critic_changes_with_the_policy():
    run, planner = read_plan("ppo-math-1b"), planner_on("ppo-math-1b", "rtx4090")
    values = smallest_change(run, planner).values
    assert values.keys() == {"policy.dtensor_cfg.cpu_offload", "value.dtensor_cfg.cpu_offload"}


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in {*RESET, *SLOW}])
def test_a_search_is_as_fast_as_the_shipped_layout_or_faster(name):
    run = read_plan(name)
    accelerator, device = device_of(run, None, ())
    if not device.runs_on_gpus:
        pytest.skip("a recipe of the CPU")
    planner = partial(plan_run, name=name, accelerator=accelerator, device=device)
    own, found = planner(run), fastest(run, planner, num=2)
    assert own.fits
    assert all(change.plan.fits for change in found)
    assert found[0].plan.step_seconds <= own.step_seconds


@pytest.mark.parametrize("name", RESET)
def test_a_search_without_a_layout_to_start_from_finds_the_shipped_one_or_a_faster(name):
    shipped, planner = read_plan(name), planner_on(name, "h100")
    values = {f"policy.{key}": value for key, value in RESET[name].items()}
    if engine := engine_tensor_key(shipped):
        values[engine] = 1
    own, found = planner(shipped), fastest(changed_plan(shipped, values, "test"), planner, num=1)
    assert own.fits
    assert found[0].plan.step_seconds <= own.step_seconds


def test_a_search_shows_what_an_engine_with_its_own_devices_changes():
    run, planner = read_plan("grpo-math-8b"), planner_on("grpo-math-8b", "h100")
    found = fastest(run, planner, num=3)
    same, others = ([change for change in found if bool(change.remark) is differs] for differs in (False, True))
    assert found == [*same, *others]
    assert others[0].remark == "rollouts of earlier weights"
    assert others[0].values["grpo.async_grpo.enabled"] is True
    assert not any(key.startswith("grpo.") for change in same for key in change.values)
