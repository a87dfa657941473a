"""The PPO loop on fakes."""

import numpy as np
import pytest

from rl_algos.data.stream import Stream
from rl_algos.losses.mask import DEMONSTRATION
from rl_algos.losses.policy import KLPenalty, PolicyLoss
from rl_algos.losses.terms import Demonstrations
from rl_algos.losses.tokens import ValueLoss
from rl_algos.policy_gradient.objective import AdaptiveKL, Objective
from rl_algos.ppo.config import PPOConfig
from rl_algos.ppo.loop import train
from rl_algos.rollouts.driver.steps import RolloutSteps
from rl_algos.rollouts.driver.validation import Validation
from rl_algos.rollouts.training.demonstrations import DemonstrationRows
from rl_algos.sft.data import TrainingRow
from rl_core.errors import DataError
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.rollout import Prompt
from rl_core.testing.fakes import FakeModel, FakeRolloutSource, FakeRun, FakeWeights

PROMPTS = [Prompt(f"p{i}", (), np.arange(2, dtype=np.int32), "math", {"answer": i}, "sums") for i in range(200)]


class Recorder(FakeModel):
    """Keeps the losses of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.losses = []
        self.references = []

    def update_reference(self, share=1.0):
        self.references.append((self.num_steps, share))
        super().update_reference(share)

    def train_step(self, batch, loss):
        self.losses.append(loss)
        batch.require(*loss.columns)
        return super().train_step(batch, loss)


def run_loop(run, *, objective=None, prompts=PROMPTS, policy_rows=4, critic_rows=8, shown=None, **settings):
    config = PPOConfig(**{"num_prompts_per_step": 8, "max_num_steps": 3} | settings)
    policy, critic = Recorder(), Recorder()
    source = FakeRolloutSource(prompts, lambda _, tokens: float(np.mean(tokens % 2 == 0)), num_generations=1)
    validation = Validation(PROMPTS[-7:], SamplingParams(max_new_tokens=3, temperature=0), config)
    train(
        config,
        objective or Objective(PolicyLoss()),
        policy=policy,
        critic=critic,
        steps=RolloutSteps(config, source, FakeWeights(policy), validation, run),
        policy_rows=policy_rows,
        critic_rows=critic_rows,
        demonstrations=shown,
    )
    return policy, critic


def rows_of(batches):
    """Rows trained on, in order, told apart by their tokens."""
    return [tuple(row) for batch in batches for row in batch.ragged("tokens").values.reshape(len(batch), -1)]


def trained(model):
    return [batch for name, batch in model.calls if name == "train_step"]


def test_each_step_generates_values_trains_the_critic_then_the_policy_and_syncs():
    run = FakeRun()
    policy, critic = run_loop(run, max_num_steps=2)
    phases = ["generation", "values", "logprobs", "critic_training", "training", "weight_sync"]
    assert run.phases == ["weight_sync", *phases * 2]
    assert [name for name, _ in critic.calls] == ["infer", "train_step"] * 2
    assert [name for name, _ in policy.calls] == ["infer", "train_step", "train_step"] * 2
    assert {type(loss) for loss in critic.losses} == {ValueLoss}


def test_every_pass_trains_on_every_rollout_once_in_an_order_of_its_own():
    policy, critic = run_loop(FakeRun(), max_num_steps=1, num_ppo_epochs=3, critic_rows=4)
    assert policy.num_steps == critic.num_steps == 6
    passes = [rows_of(trained(policy)[start : start + 2]) for start in (0, 2, 4)]
    assert len({tuple(sorted(each)) for each in passes}) == 1
    assert len({tuple(each) for each in passes}) == 3
    assert rows_of(trained(critic)) == rows_of(trained(policy))


def test_the_values_of_tokens_are_recorded_in_the_order_of_the_rollouts_whether_the_policy_trains_or_not():
    run = FakeRun()
    policy, _ = run_loop(run, max_num_steps=2, critic_warmup_steps=1, policy_rows=8)
    of_policy = {tuple(row): batch for batch in trained(policy) for row in batch.ragged("tokens")}
    for step in (1, 2):
        batch, groups = run.batches[step], run.groups[step]
        rows = [row.tolist() for group in groups for row in group.columns.ragged("tokens")]
        assert [row.tolist() for row in batch.ragged("tokens")] == rows
        assert batch.ragged("advantages").offsets.tolist() == batch.ragged("prev_logprobs").offsets.tolist()
    assert set(of_policy) == {tuple(row) for row in run.batches[2].ragged("tokens")}


def test_the_critic_warms_up_while_the_policy_stays():
    run = FakeRun()
    policy, critic = run_loop(run, critic_warmup_steps=2)
    assert (policy.num_steps, critic.num_steps) == (2, 3)
    for step in (1, 2):
        assert "critic/loss" in run.metrics[step]
        assert not [name for name in run.metrics[step] if name.startswith("train/")]
    assert {"train/loss", "train/lr", "train/num_tokens"} <= set(run.metrics[3])
    assert [run.metrics[step]["weight_version"] for step in (1, 2, 3)] == [2, 3, 4]


def test_the_reference_follows_the_policy_after_every_period_of_its_training():
    settings = {"reference_sync_period": 2, "reference_mixup_alpha": 0.5, "critic_warmup_steps": 2, "max_num_steps": 6}
    policy, critic = run_loop(FakeRun(), objective=Objective(PolicyLoss(kl=KLPenalty(weight=0.1))), **settings)
    assert policy.references == [(4, 0.5), (8, 0.5)]  # after steps 4 and 6, two updates each; it stays in the warm-up
    assert critic.references == []


def test_a_step_reports_the_critic_beside_the_policy_and_the_rollouts():
    run = FakeRun()
    run_loop(run)
    names = {"loss", "grad_norm", "lr", "skipped_steps", "explained_variance", "value_mean", "return_mean"}
    for metrics in run.metrics.values():
        assert {f"critic/{name}" for name in names} <= set(metrics)
        assert {"train/loss", "reward/mean", "advantage/max", "weight_version"} <= set(metrics)


def test_kl_in_the_reward_lowers_the_rewards_of_tokens_and_its_weight_adapts():
    run = FakeRun()
    kl = KLPenalty(weight=0.1, in_reward=True, target=1e-3, horizon=2)
    objective = Objective(PolicyLoss(), reward_kl=kl, kl_weight=AdaptiveKL(kl, rollouts_per_step=1))
    policy, _ = run_loop(run, objective=objective, critic_warmup_steps=1)
    assert [name for name, _ in policy.calls][:2] == ["infer", "infer_reference"]
    assert run.metrics[3]["policy/kl"] > 0
    assert run.metrics[3]["policy/kl_weight"] != 0.1


def test_the_objective_is_that_of_grpo_with_its_terms():
    policy, _ = run_loop(FakeRun(), objective=Objective(PolicyLoss(kl=KLPenalty(weight=0.1))), max_num_steps=1)
    assert {loss.kl for loss in policy.losses} == {KLPenalty(weight=0.1)}
    assert all("ref_logprobs" in batch for batch in trained(policy))
    assert all(batch.ragged("advantages").values.dtype == np.float32 for batch in trained(policy))


def test_a_resumed_run_repeats_the_uninterrupted_one(tmp_path):
    settings = {"max_num_steps": 6, "num_ppo_epochs": 2, "critic_warmup_steps": 2}
    whole, first = FakeRun(), FakeRun(tmp_path, save_period=1, end_after=3)
    second = FakeRun(tmp_path, save_period=1)
    uninterrupted = run_loop(whole, **settings)
    run_loop(first, **settings)
    resumed = run_loop(second, **settings)
    assert sorted(second.metrics) == [4, 5, 6]
    for step, metrics in second.metrics.items():
        # the resumed run publishes the weights that it has restored
        assert metrics == {**whole.metrics[step], "weight_version": whole.metrics[step]["weight_version"] + 1}
    for ours, theirs in zip(resumed, uninterrupted, strict=True):
        assert rows_of(trained(ours)) == rows_of(trained(theirs))[-len(rows_of(trained(ours))) :]
        assert ours.num_steps == theirs.num_steps


def test_validation_and_the_end_of_the_data_are_those_of_every_loop():
    run = FakeRun()
    run_loop(run, prompts=PROMPTS[:20], max_num_steps=9, val_at_start=True, val_period=2)
    assert run.stop_reason == "the data has ended"
    assert [step for step, metrics in sorted(run.metrics.items()) if "val/reward" in metrics] == [0, 2]


def test_dynamic_sampling_needs_groups():
    run = FakeRun()
    with pytest.raises(DataError, match=r"ppo.dynamic_sampling_max_gen_batches"):
        run_loop(run, use_dynamic_sampling=True, dynamic_sampling_max_gen_batches=2)


def test_the_policy_alone_learns_demonstrations():
    rows = [TrainingRow(str(n), np.array([1, n, n], np.int32), np.array([0, 1, 1], np.uint8)) for n in range(90, 98)]
    shown = DemonstrationRows(Stream([rows], seed=5), 4)
    settings = {"demonstrations": {"dataset": {"data_path": "rows"}, "rows_per_step": 4}, "max_num_steps": 2}
    objective = Objective(PolicyLoss(demonstrations=Demonstrations()))
    policy, critic = run_loop(FakeRun(), objective=objective, shown=shown, num_ppo_epochs=2, **settings)
    of_policy, of_critic = (
        [batch for name, batch in model.calls if name == "train_step"] for model in (policy, critic)
    )
    assert [batch.array(DEMONSTRATION).tolist() for batch in of_policy] == [[0, 0, 0, 0, 1, 1]] * 8
    learned = [row[-1] for batch in of_policy for row in batch.ragged("tokens") if row[-1] >= 90]
    # both passes of a step learn its rows, and the next step others
    assert sorted(learned) == sorted(2 * list(range(90, 98)))
    assert not any(batch.array(DEMONSTRATION).any() for batch in of_critic)
