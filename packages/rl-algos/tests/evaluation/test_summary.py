import json
from dataclasses import replace

import numpy as np
import pytest
from rollouts_builder import make_group, make_prompt, make_rollout

from rl_algos.evaluation.summary import PromptScore, SampleScore, Scoring, summarize, values_by_name
from rl_algos.rollouts.driver.validation import validation_metrics
from rl_core.rollouts.group import RECORD, RolloutGroup
from rl_core.rollouts.pool import Evaluation
from rl_core.rollouts.rollout import Prompt, Rollout


def samples(*pairs):
    """Samples of a text of answers, each with its reward."""
    return [SampleScore(reward, answer=answer, num_sampled=3) for answer, reward in pairs]


SCORES = [
    PromptScore("a", "sums", samples(("4", 1.0), ("4", 1.0), ("5", 0.0), ("5", 0.0))),
    PromptScore("b", "sums", samples(("1", 0.0), ("2", 1.0), ("1", 0.0), ("3", 0.0))),
    PromptScore("c", "words", [SampleScore(0.0, "failed", "it hung after 3 s")] * 4),
]


def test_hand_computed_estimates():
    values = values_by_name(SCORES, Scoring(k=(1, 2, 4)))
    assert values["mean"].tolist() == [0.5, 0.25, 0.0]
    assert values["pass@1"].tolist() == [0.5, 0.25, 0.0]
    assert values["pass@2"].tolist() == pytest.approx([5 / 6, 0.5, 0.0])
    assert values["pass@4"].tolist() == [1.0, 1.0, 0.0]
    assert values["cons@4"].tolist() == [0.5, 0.0, 0.0]
    # of the six pairs of the second prompt, 1-1 is won by 1, and three others are ties with 2
    assert values["cons@2"].tolist() == pytest.approx([0.5, 3 * 0.5 / 6, 0.0])


def test_failed_prompts_count_and_are_never_dropped():
    summary = summarize(SCORES, Scoring(k=(4,)))
    assert (summary.num_prompts, summary.num_rollouts, summary.num_failed) == (3, 12, 4)
    assert summary.mean == pytest.approx(0.25)
    assert summary.failures == {"it hung after 3 s": 4}
    assert summary.by_dataset == {"sums": 0.375, "words": 0.0}
    assert summary.mean_length == 2.0


def test_sizes_above_the_number_of_samples_are_left_out():
    assert set(values_by_name(SCORES, Scoring(k=(4, 8)))) == {"mean", "pass@4", "cons@4"}


def test_a_threshold_decides_what_passes():
    scores = [PromptScore("a", "d", [SampleScore(0.4), SampleScore(0.6)])]
    assert values_by_name(scores, Scoring(k=(1,), pass_threshold=0.5))["pass@1"].tolist() == [0.5]
    assert "cons@1" not in values_by_name(scores, Scoring(k=(1,)))


def test_records_have_the_scores_of_their_group_and_the_answers_besides():
    prompt = make_prompt("p0")
    rollouts = [make_rollout(prompt, 0.1), Rollout.failed(prompt, "no"), make_rollout(prompt, 0.7, status="truncated")]
    rollouts[0].info.update(answer="12")
    group = RolloutGroup.of(prompt, rollouts)
    records = [json.loads(row.tobytes()) for row in group.columns.ragged(RECORD)]
    by_group, by_records = PromptScore.of_group(group), PromptScore.of_records(records[::-1])
    assert by_records.mean == by_group.mean == np.nan_to_num(group.rewards()).mean()
    assert [sample.status for sample in by_records.samples] == ["ok", "failed", "truncated"]
    assert [sample.answer for sample in by_records.samples] == ["12", None, None]
    assert [sample.num_sampled for sample in by_records.samples] == [2, 0, 2]


def test_the_metrics_of_validation_are_the_means_of_the_groups():
    generator = np.random.default_rng(0)
    groups = [make_group(f"p{i}", generator.random(1).tolist()) for i in range(7)]
    evaluation = Evaluation(groups)
    assert validation_metrics(evaluation) == {"val/reward": evaluation.rewards.mean(), "val/mean_length": 2.0}


def test_several_samples_have_a_deviation_and_the_chance_that_some_pass():
    found = validation_metrics(Evaluation([make_group("a", [1.0, 0.0, 0.0]), make_group("b", [0.0, 0.0, 0.0])]))
    assert found["val/reward"] == pytest.approx(1 / 6)
    assert found["val/reward_std"] == pytest.approx(np.std([1.0, 0.0, 0.0]) / 2)
    assert found["val/pass@1"] == pytest.approx(1 / 6)
    assert found["val/pass@2"] == pytest.approx((1 - (2 * 1) / (3 * 2)) / 2)
    assert "val/pass@4" not in found


def scored(name, environment, dataset, *samples):
    """A group whose samples have rewards by name and what the environment reports; None for one that failed."""
    prompt = Prompt(name, (), np.zeros(1, dtype=np.int32), environment, dataset=dataset)
    whole = make_group(name, [0.0 if sample is None else sample[0]["reward"] for sample in samples])
    reports = replace(
        whole.rollouts,
        rewards=tuple({} if sample is None else sample[0] for sample in samples),
        info=tuple({} if sample is None else sample[1] for sample in samples),
        status=tuple("failed" if sample is None else "ok" for sample in samples),
    )
    return replace(whole, prompt=prompt, rollouts=reports)


def test_parts_of_rewards_and_accuracies_that_are_reported_are_metrics_of_their_own():
    right, wrong = (
        ({"reward": 1.2, "format": 0.2}, {"accuracy": 1.0}),
        ({"reward": 0.2, "format": 0.2}, {"accuracy": 0.0}),
    )
    groups = [
        scored("a", "math", "sums", right, wrong, None),
        scored("b", "math", "products", right, right, right),
        scored("c", "talk", "talks", ({"reward": -3.0}, {}), ({"reward": -1.0}, {}), ({"reward": -2.0}, {})),
    ]
    found = validation_metrics(Evaluation(groups))
    assert found["val/reward"] == pytest.approx((1.4 + 3.6 - 6.0) / 9)
    assert found["val/reward/format"] == pytest.approx((0.4 + 0.6) / 6)
    # a sample that failed is not right and has no part; an environment that reports none does not count
    assert found["val/accuracy"] == pytest.approx(4 / 6)
    assert found["val/sums/accuracy"] == pytest.approx(1 / 3)
    assert found["val/products/accuracy"] == 1.0
    assert "val/talks/accuracy" not in found
    assert found["val/talks/reward"] == -2.0
    assert "val/accuracy" not in validation_metrics(Evaluation(groups[2:]))
