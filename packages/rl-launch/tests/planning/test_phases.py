"""The phases of a step by algorithm, and the rows that they have."""

import pytest

from rl_core.devices import CUDA
from rl_launch.planning.accelerators import accelerator_named
from rl_launch.planning.plan import plan_run
from rl_launch.planning.text import as_json, lines, verdict
from rl_launch.planning.workload import Lengths
from rl_launch.recipes import source_name
from rl_launch.run_config.reading import read_plan

NO_LENGTHS = Lengths()


def planned(recipe, *overrides, device="h100", lengths=NO_LENGTHS):
    run = read_plan(recipe, overrides)
    return plan_run(run, recipe, accelerator=accelerator_named(device), device=CUDA, lengths=lengths)


@pytest.mark.parametrize(
    ("recipe", "overrides", "phases"),
    [
        ("sft-squad", (), ["training", "save"]),
        ("rm-helpsteer3", (), ["training", "save"]),
        ("dpo-helpsteer3", (), ["logprobs", "training", "save"]),
        # The reference of adapters is the model without them, which is a pass too.
        ("dpo-helpsteer3", ("policy.lora_cfg.enabled=true",), ["logprobs", "training", "save"]),
        ("distill-offline-tiny", (), ["logprobs", "training", "save"]),
        ("distill-math", (), ["generation", "teacher", "training", "weight_sync", "save"]),
        ("self-distill-math", (), ["generation", "teacher", "training", "weight_sync", "save"]),
        ("grpo-math-8b", (), ["generation", "logprobs", "training", "weight_sync", "save"]),
        ("grpo-judge-tiny", (), ["generation", "judging", "logprobs", "training", "weight_sync", "save"]),
        ("online-dpo-tiny", (), ["generation", "logprobs", "training", "weight_sync", "save"]),
        ("ppo-math-1b", (), ["generation", "values", "logprobs", "critic_training", "training", "weight_sync", "save"]),
        ("live-tiny", (), ["generation", "training", "weight_sync", "save"]),
    ],
)
def test_a_step_has_the_phases_that_its_run_records(recipe, overrides, phases):
    assert list(planned(recipe, *overrides).seconds) == phases


def test_each_pass_of_ppo_takes_its_time():
    one, two = (planned("ppo-math-1b", f"ppo.num_ppo_epochs={passes}") for passes in (1, 2))
    for phase in ("training", "critic_training"):
        assert two.seconds[phase] == pytest.approx(2 * one.seconds[phase], rel=1e-3)
    assert two.seconds["values"] == one.seconds["values"]


def test_a_critic_has_the_updates_of_its_own_batches():
    one, four = (planned("ppo-math-1b", f"value.train_global_batch_size={rows}") for rows in (512, 128))
    assert four.seconds["critic_training"] > one.seconds["critic_training"]
    assert four.seconds["training"] == one.seconds["training"]


def test_online_dpo_trains_on_pairs_and_generates_groups():
    best, every = (planned("online-dpo-tiny", f"online_dpo.pairing={pairing}") for pairing in ("best-worst", "all"))
    assert (best.work.num_rows, best.work.num_trained, best.work.updates) == (512, 128, 4)
    assert (every.work.num_rows, every.work.num_trained, every.work.updates) == (512, 64 * 56, 112)
    assert every.seconds["training"] > best.seconds["training"]


def test_a_rollout_of_several_turns_has_the_tokens_of_all():
    plan = planned("grpo-sliding-puzzle")
    assert plan.work.longest == 8 * 128
    assert plan.work.completion == 4 * 128
    assert "in up to 8 turns" in plan.work.assumptions[1]
    # As many as the row has room for.
    assert planned("grpo-sliding-puzzle", "grpo.max_rollout_turns=50").work.longest == 2047


def test_lengths_above_the_longest_row_are_those_of_the_longest_row():
    work = planned("grpo-math-8b", lengths=Lengths(1e6, 1e6)).work
    assert work.row == work.longest_row


def test_a_model_that_is_not_known_has_no_step():
    plan = planned("sft-squad", "policy.model_name=org/nothing")
    shown = "\n".join(lines(plan, price=2.0, change=None))
    assert "not estimated, because the number of parameters of org/nothing" in shown
    assert "step" not in shown
    found = as_json(plan, price=2.0, change=None, found=())
    assert found["step_seconds"] is None
    assert found["cost"] is None


def test_a_verdict_names_every_model_that_is_too_large():
    found = verdict(planned("ppo-math-1b", device="rtx4090"))
    assert "training of the policy takes most" in found
    assert "training of the critic takes" in found
    assert "generation takes most" in verdict(planned("grpo-math-1b"))


def test_a_name_keeps_its_dots():
    assert source_name("deepscaler-1.5b-8k") == "deepscaler-1.5b-8k"
    assert source_name("configs/deepscaler-1.5b-8k.yaml") == "deepscaler-1.5b-8k"
