"""What the rules find, and that a healthy run is left alone."""

import pytest

from rl_core.config import all_keys
from rl_launch.run_config.reading import read_raw
from rl_launch.run_config.root_types import type_of
from rl_launch.show.advice import advice

CONFIG = {
    "grpo": {"num_prompts_per_step": 10, "num_generations_per_prompt": 4},
    "policy": {
        "generation": {
            "backend": "vllm",
            "max_new_tokens": 64,
            "vllm_cfg": {"speculation": {"method": "draft_model", "model": "drafter", "min_tokens_per_step": 1.3}},
        }
    },
}
NUM_STEPS = 32


def healthy(step):
    return {
        "step": step,
        "reward/mean": 0.2 + 0.02 * step,
        "reward/std": 0.4,
        "rollout/failed": 0.0,
        "rollout/groups_without_signal": 3.0,
        "rollout/truncated": 0.02,
        "policy/nll": 1.0 - 0.01 * step,
        "policy/kl": 0.0005 * step,
        "policy/clipped": 0.1,
        "mismatch/kl": 1e-4,
        "speculation/tokens_per_step": 1.8,
        "speculation/acceptance_rate": 0.5 - 0.0025 * step,
        "train/skipped_steps": 0.0,
        "val/loss": 2.0 - 0.05 * step,
    }


HEALTHY_TIMES = {"step": 100.0, "generation": 50.0, "training": 40.0}


def collapsed(step, after, reward):
    """A step of a run whose rewards are all 0 after some steps."""
    if step <= after:
        return {"reward/mean": reward}
    return {"reward/mean": 0.0, "reward/std": 0.0, "rollout/groups_without_signal": 10.0}


def found(change=lambda step: {}, timings=HEALTHY_TIMES):
    rows = [{**healthy(step), **change(step)} for step in range(1, NUM_STEPS + 1)]
    return advice(rows, timings, CONFIG)


def test_a_healthy_run_is_left_alone():
    assert found() == []


@pytest.mark.parametrize(
    ("agent", "names"),
    [
        (None, "logs/environment-NAME.log"),
        ({"run": "agent.py:run"}, "logs/agents"),
        ({"place": "environment", "command": ["python", "agent.py"]}, "logs/agents"),
        ({"external": True}, "the output of your agents"),
    ],
)
def test_advice_on_failed_rollouts_leads_to_the_log_of_what_played_them(agent, names):
    rows = [{**healthy(step), "rollout/failed": 8.0} for step in range(1, NUM_STEPS + 1)]
    config = {**CONFIG, "grpo": {**CONFIG["grpo"], "agent": agent}}
    first = advice(rows, HEALTHY_TIMES, config)[0]
    assert names in first.remedy
    assert ("logs/environment" in first.remedy) == (agent is None)


@pytest.mark.parametrize(
    ("change", "says", "names"),
    [
        (lambda step: {"rollout/failed": 8.0}, "20% of the rollouts failed", "env.NAME.deadline_s"),
        (lambda step: {"rollout/failed": float(step == 2)}, "1 rollouts failed", "--where status=failed"),
        (
            lambda step: {"reward/mean": 0.0, "reward/std": 0.0, "rollout/groups_without_signal": 10.0},
            "no rollout of 32 steps has a reward, so",
            "easier prompts",
        ),
        (
            lambda step: {"reward/mean": 1.0, "reward/std": 0.0, "rollout/groups_without_signal": 10.0},
            "no rollout of 32 steps has a reward other than 1, so",
            "If all earn the same, correct the reward",
        ),
        (
            lambda step: {
                "reward/mean": 0.05 * (step == 1),
                "reward/std": 0.1 * (step == 1),
                "rollout/groups_without_signal": 10.0,
            },
            "no rollout of 31 of 32 steps has a reward, so",
            "rl env run",
        ),
        (lambda step: {"train/skipped_steps": float(step == 3)}, "1 optimizer steps were skipped", "kwargs.lr"),
        (lambda step: {"mismatch/kl": 0.05}, "mismatch/kl is 0.05", "loss_fn.importance.high=2"),
        (lambda step: {"idle/trainer": 0.4}, "waits for rollouts 40% of", "grpo.async_grpo.max_trajectory_age_steps"),
        (lambda step: {"idle/generators": 0.6}, "have no rollouts 60% of", "colocated.resources.gpus_per_node"),
        (lambda step: {"idle/trainer": 0.3, "idle/generators": 0.4}, "40% of it", "in_flight_weight_updates"),
        (
            lambda step: {"mismatch/effective_sample_size": 0.25},
            "25% of the tokens are in effect",
            "loss_fn.importance.high",
        ),
        (lambda step: {"rollout/groups_without_signal": 8.0}, "80% of the groups", "grpo.use_dynamic_sampling"),
        (
            lambda step: collapsed(step, after=16, reward=0.6),
            "the run collapsed: reward/mean was 0.6 at step 1, is 0 in the last 8 steps, and all groups have equal",
            "rl train --from RUN:STEP policy.optimizer.kwargs.lr",
        ),
        (lambda step: collapsed(step, after=4, reward=0.6), "the run collapsed: reward/mean was 0.6", "--from"),
        (lambda step: collapsed(step, after=NUM_STEPS - 8, reward=0.6), "the run collapsed", "--from"),
        (
            lambda step: collapsed(step, after=16, reward=0.6) | {"reward/mean": 0.3 + 0.02 * step},
            "100% of the groups have equal rewards",
            "easy nor too hard, or raise grpo.num_generations_per_prompt",
        ),
        (lambda step: {"reward/mean": 0.3}, "the reward is flat", "grpo.num_generations_per_prompt"),
        (lambda step: {"reward/mean": 0.9 - 0.04 * step}, "the reward falls", "policy.optimizer.kwargs.lr"),
        (
            lambda step: {"policy/nll": 1.0 / step**2, "reward/mean": 0.3 + 0.003 * step},
            "the entropy collapsed",
            "loss_fn.surrogate.clip_high",
        ),
        (
            lambda step: {"policy/kl": 0.05 * step},
            "policy/kl grew from 0.23 to 1.4 (means of the first and the last 8 steps)",
            "loss_fn.kl.weight",
        ),
        (lambda step: {"policy/clipped": 0.5}, "50% of the tokens are clipped", "policy.train_global_batch_size"),
        (
            lambda step: {"rollout/truncated": 0.4},
            "40% of the rollouts reach the token limit",
            "policy.generation.max_new_tokens",
        ),
        (
            lambda step: {"speculation/tokens_per_step": 1.1},
            "does not pay: requests get 1.10 tokens per engine step, and 1.3",
            "min_tokens_per_step",
        ),
        (
            lambda step: {"speculation/acceptance_rate": 0.6 - 0.015 * step},
            "the policy leaves its drafter behind: 53% of the drafted tokens were accepted at first, 17% now",
            "the section drafter",
        ),
        (lambda step: {"rollout/ignored/top_p": 1.0}, "agents set top_p, without effect", "generation.temperature"),
        (lambda step: {"val/loss": 1.0 + abs(step - 4)}, "the validation loss increases", "checkpointing.metric_name"),
    ],
)
def test_a_rule_finds_its_trouble_and_names_a_key(change, says, names):
    (one,) = found(change)
    assert says in one.found
    assert names in one.remedy


@pytest.mark.parametrize(
    ("phase", "names"),
    [
        ("generation", "policy.generation.vllm_cfg"),
        ("training", "policy.train_micro_batch_size"),
        ("logprobs", "policy.logprob_batch_size"),
        ("validation", "max_val_samples"),
        ("data", "data.num_workers"),
        ("weight_sync", "a sync takes as long for any number"),
    ],
)
def test_a_phase_that_takes_most_of_the_time(phase, names):
    (one,) = found(timings={"step": 100.0, "generation": 10.0, phase: 80.0})
    assert one.found == f"{phase} takes 80% of the time"
    assert names in one.remedy


def test_generation_of_agents_is_not_blamed_on_the_engine():
    config = {**CONFIG, "grpo": {**CONFIG["grpo"], "agent": {"run": "agent.py:run"}}}
    rows = [healthy(step) for step in range(1, NUM_STEPS + 1)]
    (one,) = advice(rows, {"step": 100.0, "generation": 93.0}, config)
    assert one.found == "generation takes 93% of the time"
    assert "the start and the work of the agents" in one.remedy
    assert "colocated" not in one.remedy


@pytest.mark.parametrize(("num_steps", "is_found"), [(8, False), (29, False), (30, True), (100, True)])
def test_a_reward_is_called_flat_after_enough_steps(num_steps, is_found):
    rows = [{**healthy(step), "reward/mean": 0.3} for step in range(1, num_steps + 1)]
    assert any("the reward is flat" in each.found for each in advice(rows, HEALTHY_TIMES, CONFIG)) == is_found


def test_phases_of_a_few_steps_are_not_judged():
    assert advice([healthy(step) for step in range(1, 8)], {"step": 100.0, "generation": 95.0}, CONFIG) == []


def idle(*parts):
    """Shares of each side, from pairs of a number of steps and `(trainer, generators)`."""
    shares = [share for count, share in parts for _ in range(count)]
    return [
        {**healthy(step), "idle/trainer": trainer, "idle/generators": generators}
        for step, (trainer, generators) in enumerate(shares, start=1)
    ]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        # the start and the tail of a run of 40 steps
        (idle((4, (0.0, 0.9)), (32, (0.05, 0.05)), (4, (0.9, 0.0))), []),
        (idle((4, (0.0, 0.9)), (32, (0.4, 0.05)), (4, (0.0, 0.9))), ["training waits for rollouts 40% of the time"]),
        (idle((18, (0.9, 0.0))), []),
        (idle((19, (0.9, 0.0))), ["training waits for rollouts 90% of the time"]),
    ],
)
def test_the_balance_is_judged_over_a_window_and_not_at_the_ends(rows, says):
    assert [each.found for each in advice(rows, HEALTHY_TIMES, CONFIG) if "idle/trainer" in each.metrics] == says


def test_waiting_for_rollouts_ahead_of_training_is_told_once():
    grpo = {**CONFIG["grpo"], "async_grpo": {"enabled": True}}
    rows = [{**healthy(step), "idle/trainer": 0.8} for step in range(1, NUM_STEPS + 1)]
    (one,) = advice(rows, {"step": 100.0, "generation": 80.0}, {**CONFIG, "grpo": grpo})
    assert one.found == "training waits for rollouts 80% of the time"


def test_fine_tuning_does_nothing_but_train():
    assert found(timings={"step": 100.0, "training": 95.0}) == []


@pytest.mark.parametrize(("last", "is_found"), [(4.616, True), (4.2, False)])
def test_fine_tuning_whose_loss_does_not_move_is_told(last, is_found):
    rows = [{"step": 1, "train/loss": 4.619}, {"step": 2, "train/loss": last}]
    said = [each.found for each in advice(rows, {}, {"sft": {}})]
    assert said == (["the loss does not decrease: 4.619 at first, 4.616 after 2 steps"] if is_found else [])


def test_n_grams_that_are_accepted_less_often_are_no_drafter_left_behind():
    rows = [{"step": step, "speculation/acceptance_rate": 0.6 - 0.015 * step} for step in range(1, NUM_STEPS + 1)]
    assert advice(rows, {}, {"policy": {"generation": {"vllm_cfg": {"speculation": {"method": "ngram"}}}}}) == []


def test_a_short_run_has_no_trends():
    assert advice([{**healthy(1), "reward/mean": 0.3}] * 3, HEALTHY_TIMES, CONFIG) == []


def test_nothing_recorded_is_nothing_to_look_at():
    assert advice([], {}, {}) == []


def test_every_key_that_a_remedy_names_exists():
    """All rules at once, over a run in which everything is wrong."""

    def broken(step):
        return {
            "rollout/failed": 30.0,
            "train/skipped_steps": 1.0,
            "mismatch/kl": 1.0,
            "idle/trainer": 0.9,
            "idle/generators": 0.9,
            "mismatch/effective_sample_size": 0.1,
            "rollout/groups_without_signal": 9.0,
            "reward/mean": 0.3,
            "policy/nll": 1.0 / step**2,
            "policy/kl": 0.1 * step,
            "policy/clipped": 0.9,
            "rollout/truncated": 0.9,
            "val/loss": float(step),
        }

    phases = ("generation", "training", "logprobs", "validation", "data", "weight_sync")
    each = found(broken, {"step": 1.0, **dict.fromkeys(phases, 0.9)})
    known = {
        key
        for name in ("grpo-arithmetic", "ppo-tiny", "sft-arithmetic")
        for key in all_keys(type_of(read_raw(name)), {})
    }
    sections = {key.partition(".")[0] for key in known}
    words = {word.strip("(),:;") for one in each for word in one.remedy.split()}
    keys = {word.partition("=")[0] for word in words if word.partition(".")[0] in sections and "." in word}
    free = {"policy.optimizer.kwargs.lr", "env.NAME.deadline_s", "env.NAME.memory_limit_gib"}
    assert len(each) == 18
    assert keys - free <= known


@pytest.mark.parametrize("after", [4, 16])
def test_dynamic_sampling_is_not_advised_where_all_groups_are_equal(after):
    assert not any("dynamic_sampling" in each.remedy for each in found(lambda step: collapsed(step, after, 0.6)))


def test_the_advice_on_a_collapse_has_a_lower_rate_than_the_config():
    config = {**CONFIG, "policy": {**CONFIG["policy"], "optimizer": {"kwargs": {"lr": 3e-5}}}}
    rows = [{**healthy(step), **collapsed(step, 16, 0.6)} for step in range(1, NUM_STEPS + 1)]
    assert advice(rows, HEALTHY_TIMES, config)[0].remedy.endswith("policy.optimizer.kwargs.lr=1e-05")


def test_a_policy_that_becomes_certain_while_its_reward_rises_has_learned():
    assert found(lambda step: {"policy/nll": 1.0 / step**2}) == []
