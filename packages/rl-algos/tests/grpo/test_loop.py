import dataclasses

import numpy as np
import pytest

from rl_algos.data.stream import Stream
from rl_algos.grpo.advantages import grpo
from rl_algos.grpo.config import EstimatorConfig, GRPOConfig
from rl_algos.grpo.estimators import reads
from rl_algos.grpo.loop import train
from rl_algos.losses.mask import DEMONSTRATION
from rl_algos.losses.policy import KLPenalty, PolicyLoss
from rl_algos.losses.surrogates import GSPO, Clip
from rl_algos.losses.terms import Aggregation, Demonstrations
from rl_algos.losses.tokens import DraftLoss
from rl_algos.policy_gradient.objective import AdaptiveKL, Objective, rollouts_of_rows
from rl_algos.rollouts.driver.steps import Drafter, RolloutSteps
from rl_algos.rollouts.driver.validation import Validation
from rl_algos.rollouts.training.batch import build_batch
from rl_algos.rollouts.training.demonstrations import DemonstrationRows
from rl_algos.rollouts.training.rewards import varies
from rl_algos.rollouts.training.segments import ROLLOUT
from rl_algos.sft.data import TrainingRow
from rl_core.data.microbatch import PAIR
from rl_core.data.ragged import Ragged
from rl_core.errors import ConfigError, DataError
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.rollout import Prompt, Rollout, Turn, WeightSpan
from rl_core.testing.fakes import FakeModel, FakeRolloutSource, FakeRun, FakeWeights

PROMPTS = [Prompt(f"p{i}", (), np.arange(2, dtype=np.int32), "math", {"answer": i}, "sums") for i in range(400)]


def even_share(prompt, tokens):
    return float(np.mean(tokens % 2 == 0))


def run_loop(
    run,
    *,
    loss=None,
    objective=None,
    reward=even_share,
    prompts=PROMPTS,
    model=None,
    rows=4,
    drafter=None,
    shown=None,
    **settings,
):
    config = GRPOConfig(**{"num_prompts_per_step": 2, "num_generations_per_prompt": 4, "max_num_steps": 5} | settings)
    policy = model or FakeModel()
    source = FakeRolloutSource(prompts, reward, num_generations=4)
    validation = Validation(PROMPTS[-7:], SamplingParams(max_new_tokens=3, temperature=0), config)
    greedy = SamplingParams(max_new_tokens=3, temperature=0) if reads(config, "baselines") else None
    steps = RolloutSteps(config, source, FakeWeights(policy), validation, run, greedy, drafter=drafter)
    train(
        config,
        objective or Objective(loss or PolicyLoss()),
        policy=policy,
        steps=steps,
        rows_per_minibatch=rows,
        demonstrations=shown,
    )
    return policy


def test_each_step_generates_reads_logprobs_trains_and_syncs_in_this_order():
    run = FakeRun()
    policy = run_loop(run, max_num_steps=2)
    assert run.phases == ["weight_sync", *["generation", "logprobs", "training", "weight_sync"] * 2]
    assert [name for name, _ in policy.calls] == ["infer", "train_step", "train_step"] * 2


def test_a_draft_model_learns_from_the_rollouts_of_a_step_before_they_are_synced_and_is_saved(tmp_path):
    run, drafter = FakeRun(tmp_path), FakeModel()
    policy = run_loop(run, max_num_steps=2, rows=8, drafter=Drafter(drafter, 4))
    assert run.phases[1:] == ["generation", "logprobs", "training", "drafter_training", "weight_sync"] * 2
    trained = [batch.ragged("tokens") for name, batch in policy.calls if name == "train_step"]
    drafted = [batch.ragged("tokens") for name, batch in drafter.calls]
    assert [name for name, _ in drafter.calls] == ["train_step"] * 4
    assert np.array_equal(np.concatenate([each.values for each in drafted]), Ragged.concat(trained).values)
    assert {"drafter/loss", "train/loss"} <= run.metrics[1].keys()
    assert (tmp_path / "drafter" / "model.json").exists()


def test_a_draft_head_learns_by_its_own_loss_and_is_saved_as_a_draft_model_is(tmp_path):
    run, head = FakeRun(tmp_path), FakeModel()
    run_loop(run, max_num_steps=2, rows=8, drafter=Drafter(head, 8, DraftLoss(3), "policy.draft_head"))
    assert run.phases[1:] == ["generation", "logprobs", "training", "drafter_training", "weight_sync"] * 2
    assert [name for name, _ in head.calls] == ["train_step"] * 2
    assert "drafter/loss" in run.metrics[1]
    assert (tmp_path / "drafter" / "model.json").exists()


@pytest.mark.parametrize(
    ("drafter", "section"),
    [
        (Drafter(FakeModel(), 4), "drafter"),
        (Drafter(FakeModel(), 4, DraftLoss(3), "policy.draft_head"), "policy.draft_head"),
    ],
    ids=["model", "head"],
)
def test_a_loop_that_gives_no_rollouts_cannot_train_a_drafter(drafter, section):
    steps = RolloutSteps(GRPOConfig(), None, None, None, FakeRun(), drafter=drafter)
    with pytest.raises(ConfigError, match=rf"^{section}: .*without the batch"):
        steps.sync(1)


def test_the_values_of_tokens_are_recorded_as_the_loss_reads_them():
    run = FakeRun()
    policy = run_loop(run, max_num_steps=1, rows=8)
    (trained,) = [batch for name, batch in policy.calls if name == "train_step"]
    recorded = run.batches[1]
    for name in ("tokens", "loss_mask", "prev_logprobs", "weight_versions"):
        assert recorded.ragged(name).equals(trained.ragged(name))
    assert np.array_equal(recorded["advantages"], trained["advantages"])


def test_a_step_has_as_many_updates_as_minibatches_and_every_rollout_trains_once():
    policy = run_loop(FakeRun(), max_num_steps=1, rows=2)
    parts = [batch for name, batch in policy.calls if name == "train_step"]
    assert [len(part) for part in parts] == [2, 2, 2, 2]


def test_the_reference_is_read_only_where_the_loss_compares_with_it():
    policy = run_loop(FakeRun(), loss=PolicyLoss(kl=KLPenalty(weight=0.1)), max_num_steps=1)
    assert [name for name, _ in policy.calls][:2] == ["infer", "infer_reference"]


@pytest.mark.parametrize(("alpha", "seen"), [(1.0, [0, 0, 2, 2, 4]), (0.5, [0, 0, 1, 1, 2.5])])
def test_the_reference_follows_the_policy_after_every_period(alpha, seen):
    class Noting(FakeModel):
        def __init__(self):
            super().__init__()
            self.references = []

        def train_step(self, batch, loss):
            self.references.append(self.reference_steps)
            return super().train_step(batch, loss)

    policy = Noting()
    loss = PolicyLoss(kl=KLPenalty(weight=0.1))
    run_loop(FakeRun(), loss=loss, model=policy, rows=8, reference_sync_period=2, reference_mixup_alpha=alpha)
    assert policy.references == seen


@pytest.mark.parametrize("surrogate", [Clip(), GSPO()])
def test_the_segments_of_a_rollout_train_in_one_update_with_its_advantage(surrogate):
    class InSegments(FakeRolloutSource):
        """Every second rollout is two rows."""

        def _rollout(self, prompt, draw, place):
            rollout = super()._rollout(prompt, draw, place)
            return dataclasses.replace(rollout, segments=(3, 2)) if place % 2 else rollout

    config = GRPOConfig(
        num_prompts_per_step=3, num_generations_per_prompt=4, max_num_steps=1, rewritten_history="split"
    )
    run, policy = FakeRun(), FakeModel()
    steps = RolloutSteps(
        config,
        InSegments(PROMPTS, even_share, num_generations=4),
        FakeWeights(policy),
        Validation(PROMPTS[-7:], SamplingParams(max_new_tokens=3), config),
        run,
    )
    name = "sequence-mean" if surrogate.level == "sequence" else "token-mean"
    loss = PolicyLoss(surrogate, Aggregation(name=name), has_segments=True)
    objective = Objective(loss, statistics={PAIR: rollouts_of_rows} if PAIR in loss.columns else {})
    train(config, objective, policy=policy, steps=steps, rows_per_minibatch=5)
    parts = [batch for name, batch in policy.calls if name == "train_step"]
    numbers = [part.array(ROLLOUT).tolist() for part in parts]
    assert numbers == [[0, 1, 1, 2, 3, 3, 4], [5, 5, 6, 7, 7, 8, 9, 9], [10, 11, 11]]
    expected = np.concatenate([grpo(group.rewards(), np.zeros(4, int)) for group in run.groups[1]])
    for part, rollouts in zip(parts, numbers, strict=True):
        np.testing.assert_allclose(part.array("advantages"), expected[rollouts], rtol=1e-6)
        assert (PAIR in part) == (surrogate.level == "sequence")
        if PAIR in part:
            assert part.array(PAIR).tolist() == rollouts
            assert loss.totals(part)["sequences"] == len(set(rollouts))
    assert run.metrics[1]["rollout/segments"] == 1.5


def test_an_on_policy_ratio_spares_the_logprob_pass():
    policy = run_loop(FakeRun(), loss=PolicyLoss(on_policy=True), max_num_steps=1)
    assert {name for name, _ in policy.calls} == {"train_step"}


def test_a_step_reports_rewards_losses_and_versions():
    run = FakeRun()
    run_loop(run)
    assert sorted(run.metrics) == [1, 2, 3, 4, 5]
    for step, metrics in run.metrics.items():
        assert {"train/loss", "train/grad_norm", "train/lr", "train/num_tokens", "reward/mean"} <= set(metrics)
        assert metrics["weight_version"] == step + 1
    rollouts = [rollout for group in run.groups[1] for rollout in group.rollouts]
    assert run.metrics[1]["reward/mean"] == pytest.approx(np.mean([rollout.reward for rollout in rollouts]))


def test_dynamic_sampling_trains_on_groups_that_differ_and_records_the_others():
    run = FakeRun()

    def reward(prompt, tokens):
        return even_share(prompt, tokens) if prompt.info["answer"] % 3 else 1.0

    run_loop(run, reward=reward, use_dynamic_sampling=True, max_num_steps=4)
    for step, groups in run.groups.items():
        kept, aside = groups[:2], groups[2:]
        assert all(np.ptp(group.rewards()) > 0 for group in kept), step
        assert all(np.ptp(group.rewards()) == 0 for group in aside), step
    seen = [group.prompt.id for groups in run.groups.values() for group in groups]
    assert sorted(seen) == sorted(prompt.id for prompt in PROMPTS[: len(seen)])


def test_a_larger_batch_of_dynamic_sampling_takes_fewer_rounds_and_sets_the_surplus_aside():
    def reward(prompt, tokens):
        return even_share(prompt, tokens) if prompt.info["answer"] % 3 else 1.0

    run = FakeRun()
    settings = {"use_dynamic_sampling": True, "dynamic_sampling_max_gen_batches": 1, "max_num_steps": 3}
    run_loop(run, reward=reward, batch_multiplier=2.5, **settings)
    for step, groups in run.groups.items():
        assert len(groups) == 5
        wanted = [group.prompt.id for group in groups if varies(group)][:2]
        assert [group.prompt.id for group in groups[:2]] == wanted
        alike = sum(not varies(group) for group in groups)
        assert run.metrics[step]["rollout/groups_without_signal"] == alike


def test_dynamic_sampling_that_finds_nothing_says_what_to_do():
    with pytest.raises(DataError, match=r"0 of 2 groups .* 3 rounds.*grpo.dynamic_sampling_max_gen_batches"):
        run_loop(FakeRun(), reward=lambda *_: 1.0, use_dynamic_sampling=True, dynamic_sampling_max_gen_batches=3)


def test_validation_runs_at_start_periodically_and_at_the_end():
    run = FakeRun()
    run_loop(run, val_at_start=True, val_period=2, val_at_end=True, max_val_samples=5)
    assert [step for step, metrics in sorted(run.metrics.items()) if "val/reward" in metrics] == [0, 2, 4, 5]


def test_a_goal_in_validation_ends_the_run():
    run = FakeRun()
    run_loop(run, val_period=1, stop_at_validation_metric="reward", stop_at_validation_threshold=0.0)
    assert sorted(run.metrics) == [1]
    assert "val/reward reached" in run.stop_reason


def test_the_end_of_the_data_ends_the_run():
    run = FakeRun()
    run_loop(run, prompts=PROMPTS[:5], max_num_steps=50)
    assert sorted(run.metrics) == [1, 2]
    assert run.stop_reason == "the data has ended"


def test_a_resumed_run_repeats_the_uninterrupted_one(tmp_path):
    whole = FakeRun()
    run_loop(whole, max_num_steps=6)
    first = FakeRun(tmp_path, save_period=1, end_after=3)
    run_loop(first, max_num_steps=6)
    second = FakeRun(tmp_path, save_period=1)
    run_loop(second, max_num_steps=6)
    assert sorted(second.metrics) == [4, 5, 6]
    for step in second.metrics:
        assert second.metrics[step]["train/loss"] == whole.metrics[step]["train/loss"]
        assert [g.prompt.id for g in second.groups[step]] == [g.prompt.id for g in whole.groups[step]]


def test_a_step_learns_the_next_demonstrations_once_also_after_a_restart(tmp_path):
    rows = [TrainingRow(str(n), np.array([1, n, n], np.int32), np.array([0, 1, 1], np.uint8)) for n in range(90, 98)]
    loss = PolicyLoss(demonstrations=Demonstrations(weight=0.9, decay_steps=2, final_weight=0.1))

    def run(fake):
        shown = DemonstrationRows(Stream([rows], seed=5), 4)
        settings = {"demonstrations": {"dataset": {"data_path": "rows"}, "rows_per_step": 4}, "max_num_steps": 4}
        policy = run_loop(fake, loss=loss, shown=shown, **settings)
        trained = [batch for name, batch in policy.calls if name == "train_step"]
        return [[row[-1] for row in batch.ragged("tokens") if row[-1] >= 90] for batch in trained], trained

    whole = FakeRun()
    expected, trained = run(whole)
    assert [len(each) for each in expected] == [2] * 8
    for half in (expected[:4], expected[4:]):
        assert sorted(number for each in half for number in each) == list(range(90, 98))
    assert [batch.array(DEMONSTRATION).tolist() for batch in trained] == [[0, 0, 0, 0, 1, 1]] * 8
    # neither the recorded rollouts nor their metrics have these rows
    assert all(len(batch) == 8 for batch in whole.batches.values())
    assert [whole.metrics[step]["policy/demonstration_weight"] for step in (1, 2, 3, 4)] == [0.9, 0.5, 0.1, 0.1]
    first, _ = run(FakeRun(tmp_path, save_period=1, end_after=2))
    second, _ = run(FakeRun(tmp_path, save_period=1))
    assert first + second == expected


def test_kl_in_the_reward_reads_both_logprobs_before_the_advantages_and_is_reported():
    run = FakeRun()
    objective = Objective(PolicyLoss(on_policy=True), reward_kl=KLPenalty(weight=0.1, in_reward=True))
    policy = run_loop(run, objective=objective, max_num_steps=2, rows=8)
    assert [name for name, _ in policy.calls] == ["infer", "infer_reference", "train_step"] * 2
    assert run.metrics[1]["policy/kl"] == 0.0
    assert run.metrics[2]["policy/kl"] > 0.0
    # the second step's policy has moved, and its penalties lower the rewards that are compared
    plain = FakeRun()
    run_loop(plain, loss=PolicyLoss(on_policy=True), max_num_steps=2, rows=8)
    assert run.metrics[1]["advantage/max"] == plain.metrics[1]["advantage/max"]
    assert run.metrics[2]["advantage/max"] != plain.metrics[2]["advantage/max"]


def test_a_weight_that_adapts_goes_on_from_a_checkpoint(tmp_path):
    def objective():
        kl = KLPenalty(weight=0.1, in_reward=True, target=1e-3, horizon=2)
        return Objective(PolicyLoss(), reward_kl=kl, kl_weight=AdaptiveKL(kl, rollouts_per_step=1))

    whole, first, second = FakeRun(), FakeRun(tmp_path, save_period=1, end_after=3), FakeRun(tmp_path, save_period=1)
    for run in (whole, first, second):
        run_loop(run, objective=objective(), max_num_steps=6)
    assert sorted(second.metrics) == [4, 5, 6]
    weights = [metrics["policy/kl_weight"] for _, metrics in sorted(whole.metrics.items())]
    assert len(set(weights)) > 1
    assert [second.metrics[step]["policy/kl_weight"] for step in (4, 5, 6)] == weights[3:]


def test_an_estimator_with_a_greedy_baseline_gets_one_rollout_of_each_prompt():
    run = FakeRun()
    run_loop(run, adv_estimator=EstimatorConfig(name="remax"), max_num_steps=1)
    groups = run.groups[1]
    greedy = [even_share(None, np.random.default_rng((i, 0)).integers(10, size=3, dtype=np.int32)) for i in (0, 1)]
    largest = max(abs(rollout.reward - greedy[i]) for i, group in enumerate(groups) for rollout in group.rollouts)
    assert run.metrics[1]["advantage/max"] == pytest.approx(largest)


def overlong_filtered(status: str, stop_reason: str, num_turns: int, max_turns: int) -> bool:
    rollout = Rollout(
        prompt_id="p0",
        tokens=np.arange(5, dtype=np.int32),
        loss_mask=np.array([0, 0, 1, 1, 1], np.uint8),
        generation_logprobs=np.zeros(5, np.float32),
        spans=(WeightSpan(1, 3),),
        turns=(Turn("", None, {}),) * num_turns,
        rewards={"reward": 1.0},
        stop_reason=stop_reason,
        status=status,
    )
    config = GRPOConfig(overlong_filtering=True, max_rollout_turns=max_turns)
    batch = build_batch([RolloutGroup.of(PROMPTS[0], (rollout,))], config)
    return batch.ragged("loss_mask").values.sum() == 0


def test_overlong_filtering_leaves_out_what_ran_into_a_token_limit_and_nothing_else():
    assert overlong_filtered("truncated", "length", 1, 1)
    # an observation that did not fit behind the second of four completions
    assert overlong_filtered("truncated", "stop", 2, 4)
    # the last turn allowed, without being done
    assert not overlong_filtered("truncated", "stop", 4, 4)
    assert not overlong_filtered("truncated", "abort", 1, 4)
    assert not overlong_filtered("ok", "stop", 1, 4)


def test_a_batch_keeps_the_routing_of_its_groups_also_beside_one_that_failed():
    prompt = PROMPTS[0]
    sampled = Rollout(
        prompt_id=prompt.id,
        tokens=np.arange(5, dtype=np.int32),
        loss_mask=np.array([0, 0, 1, 1, 1], np.uint8),
        generation_logprobs=np.zeros(5, np.float32),
        spans=(WeightSpan(1, 3),),
        turns=(),
        rewards={"reward": 1.0},
        stop_reason="stop",
        routed_experts=np.ones((5, 3, 2), np.int16),
    )
    failed = Rollout.failed(prompt, "hung")
    groups = [RolloutGroup.of(prompt, pair) for pair in ((failed, failed), (sampled, failed))]
    batch = build_batch(groups, GRPOConfig())
    assert [row.tolist() for row in batch.ragged("tokens")][2] == [0, 1, 2, 3, 4]
    assert [set(row.flatten().tolist()) for row in batch.ragged("routed_experts")] == [{-1}, {-1}, {1}, {-1}]
