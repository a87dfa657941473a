"""The loop on fakes: rollouts or text, one teacher or several."""

from dataclasses import replace

import numpy as np
import pytest

from rl_algos.data.stream import Stream
from rl_algos.distillation.algorithm import DistillationValidation, TextRow, text_objective, train
from rl_algos.distillation.config import DistillationConfig, OfflineDistillationConfig
from rl_algos.distillation.plugin import distillation_section
from rl_algos.distillation.teachers import Teachers
from rl_algos.losses.distillation import DistillationLoss
from rl_algos.rollouts.driver.steps import RolloutSteps
from rl_algos.rollouts.training.batch import build_batch
from rl_algos.sft.data import TrainingRow
from rl_algos.supervised.data import SupervisedData
from rl_algos.supervised.loop import train as learn
from rl_core.config import assemble, load, resolve
from rl_core.errors import ConfigProblems
from rl_core.metrics import Metric
from rl_core.model import topk
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.rollout import Prompt, Rollout, WeightSpan
from rl_core.testing.fakes import FakeModel, FakeRolloutSource, FakeRun, FakeWeights

LOSS = DistillationLoss(temperature=0.5)
K = 3


class Student(FakeModel):
    """Its divergence from the teacher halves with every step."""

    def evaluate(self, batch, loss):
        return {**super().evaluate(batch, loss), "loss": Metric(2.0**-self.num_steps)}


def teachers_in(models):
    return Teachers(models or {"teacher": FakeModel()}, [topk(K)], temperature=LOSS.temperature)


def prompt(number, environment="math"):
    return Prompt(f"p{number}", (), np.arange(2, dtype=np.int32) + number % 5, environment, {}, "sums")


def on_rollouts(run, *, teachers=None, prompts=None, rows=4, source=FakeRolloutSource, **settings):
    written = {"num_prompts_per_step": 4, "num_generations_per_prompt": 2, "max_num_steps": 3, **settings}
    config = distillation_section(written).model_validate(written)
    prompts = prompts or [prompt(number) for number in range(400)]
    student, scoring = Student(), teachers_in(teachers)
    source = source(prompts, lambda prompt, tokens: 0.5, num_generations=2)
    sampling = SamplingParams(max_new_tokens=3)
    validation = DistillationValidation(student, scoring, LOSS, prompts[:3], sampling, config)
    steps = RolloutSteps(config, source, FakeWeights(student), validation, run)
    train(config, LOSS, policy=student, teachers=scoring, steps=steps, rows_per_minibatch=rows)
    return student


def on_text(run, *, teachers=None, epochs=None, teacher=lambda number: "teacher", **settings):
    rows = [
        TextRow(
            TrainingRow(f"r{i}", np.full(2 + i % 3, i, np.int32), np.array([0, 1, 1, 1][: 2 + i % 3], np.uint8)),
            teacher(i),
        )
        for i in range(10)
    ]
    config = OfflineDistillationConfig(**{"max_num_steps": 3, "val_period": 0, **settings})
    student = Student()
    data = SupervisedData(Stream([rows], seed=1, max_num_epochs=epochs), {"sums": [rows[:4], rows[4:6]]})
    learn(config, text_objective(LOSS, teachers_in(teachers)), student, data, run, batch_size=4)
    return student


def test_every_segment_of_a_rollout_goes_to_the_teacher_of_its_prompt():
    whole = FakeRolloutSource([prompt(0), prompt(1, "chess")], lambda prompt, tokens: 0.5, num_generations=2)
    whole.adopt(FakeWeights(FakeModel()).publish())
    groups = []
    for group in whole.collect(2):
        tokens = group.columns.ragged("tokens")
        made = [
            Rollout(group.prompt.id, row, np.array([0, 0, 1, 0, 1], np.uint8), np.zeros(5, np.float32),
                    (WeightSpan(0, 2),), (), {"reward": 0.5}, "stop", segments=(3, 2) if place else ())
            for place, row in enumerate(tokens)
        ]  # fmt: skip
        groups.append(RolloutGroup.of(group.prompt, made))
    models = {"teacher": FakeModel(), "teacher_chess": FakeModel()}
    batch = build_batch(groups, DistillationConfig(rewritten_history="split"))
    scored = teachers_in(models).scored(batch, groups)
    assert scored.ragged("teacher_ids").lengths.tolist() == [5, 3, 2, 5, 3, 2]
    (_, seen), (_, seen_by_chess) = models["teacher"].calls[0], models["teacher_chess"].calls[0]
    assert seen.ragged("tokens").equals(batch.select(range(3)).ragged("tokens"))
    assert seen_by_chess.ragged("tokens").equals(batch.select(range(3, 6)).ragged("tokens"))


def trained(student):
    return [batch for name, batch in student.calls if name == "train_step"]


def test_each_step_generates_asks_the_teacher_trains_and_syncs():
    run, teacher = FakeRun(), FakeModel()
    student = on_rollouts(run, teachers={"teacher": teacher}, max_num_steps=2)
    assert run.phases == ["weight_sync", *["generation", "teacher", "training", "weight_sync"] * 2]
    assert [name for name, _ in teacher.calls] == ["infer", "infer"]
    assert [len(batch) for batch in trained(student)] == [4, 4, 4, 4]
    assert [run.metrics[step]["weight_version"] for step in (1, 2)] == [2, 3]
    assert {"train/loss", "reward/mean", "rollout/mean_length"} <= set(run.metrics[1])
    assert [len(run.groups[step]) for step in (1, 2)] == [4, 4]


def test_an_agent_may_be_left_out_of_what_the_student_learns():
    class Game(FakeRolloutSource):
        """Every rollout is that of an agent, by its place."""

        def _group(self, prompt, draw, num_generations):
            group = super()._group(prompt, draw, num_generations)
            return replace(group, rollouts=replace(group.rollouts, agent=("first", "second")[:num_generations]))

    def learned(**agents):
        student = on_rollouts(FakeRun(), source=Game, max_num_steps=1, agents=agents)
        return np.concatenate([batch.ragged("loss_mask").sums() for batch in trained(student)]).tolist()

    assert learned() == [3, 3] * 4
    assert learned(second={"train": False}) == [3, 0] * 4


@pytest.mark.parametrize("key", ["weight", "adv_estimator", "opponent"])
def test_settings_of_agents_that_need_advantages_are_refused_by_name(key):
    written = {"agents": {"first": {key: 2.0}}}
    with pytest.raises(ConfigProblems) as refused:
        resolve(load({"distillation": written}), assemble("Root", {"distillation": distillation_section(written)}))
    assert [problem.key for problem in refused.value.problems] == [f"distillation.agents.first.{key}"]


def test_the_tokens_of_a_step_are_recorded_without_an_advantage():
    run = FakeRun()
    on_rollouts(run, max_num_steps=1)
    batch = run.batches[1]
    rows = [row.tolist() for group in run.groups[1] for row in group.columns.ragged("tokens")]
    assert [row.tolist() for row in batch.ragged("tokens")] == rows
    assert {"loss_mask", "generation_logprobs", "weight_versions"} <= set(batch)
    assert "advantages" not in batch


def test_the_student_gets_the_teachers_tokens_at_the_temperature_of_the_loss():
    teacher = FakeModel()
    student = on_text(FakeRun(), teachers={"teacher": teacher}, max_num_steps=1)
    (batch,) = trained(student)
    expected = FakeModel().infer(batch.only(["tokens"]), [topk(K)], temperature=LOSS.temperature)
    assert batch.ragged("teacher_ids").equals(expected.ragged("topk_ids"))
    assert batch.ragged("teacher_logprobs").equals(expected.ragged("topk_logprobs"))


def test_text_needs_no_generator_and_ends_with_its_epochs():
    run = FakeRun()
    student = on_text(run, epochs=1, max_num_steps=9)
    assert [len(batch) for batch in trained(student)] == [4, 4, 2]
    assert run.phases == ["data", "logprobs", "training"] * 3
    assert run.metrics[2]["train/epoch"] == 0.8


class Marked(FakeModel):
    """A teacher that is told by its logprobs."""

    def __init__(self, mark):
        super().__init__()
        self.mark = mark

    def infer(self, batch, reads, **options):
        found = super().infer(batch, reads, **options)
        logprobs = found.ragged("topk_logprobs")
        return found.with_columns({"topk_logprobs": logprobs.like(np.full_like(logprobs.values, self.mark))})


def test_each_row_is_scored_by_its_own_teacher():
    teachers = {"teacher_even": Marked(-1.0), "teacher_odd": Marked(-2.0)}
    student = on_text(FakeRun(), teachers=teachers, teacher=lambda number: f"teacher_{'odd' if number % 2 else 'even'}")
    rows = [
        (int(tokens[0]), float(logprobs[0, 0]))
        for batch in trained(student)
        for tokens, logprobs in zip(batch.ragged("tokens"), batch.ragged("teacher_logprobs"), strict=True)
    ]
    assert len(rows) == 12
    assert all(mark == (-2.0 if number % 2 else -1.0) for number, mark in rows)
    assert all(teacher.calls for teacher in teachers.values())


def test_rollouts_go_to_the_teacher_of_their_environment():
    prompts = [prompt(number, "math" if number % 2 else "chess") for number in range(40)]
    teachers = {"teacher_math": Marked(-1.0), "teacher": Marked(-2.0)}
    student = on_rollouts(FakeRun(), teachers=teachers, prompts=prompts, max_num_steps=1, rows=8)
    (batch,) = trained(student)
    marks = [float(row[0, 0]) for row in batch.ragged("teacher_logprobs")]
    assert marks == [-2.0, -2.0, -1.0, -1.0] * 2


def test_validation_compares_with_the_teacher_on_held_out_rows_and_ends_at_its_goal():
    run = FakeRun()
    goal = {"stop_at_validation_metric": "loss", "stop_at_validation_threshold": 0.3}
    student = on_rollouts(run, **goal, val_period=1, val_at_start=True, max_num_steps=9, rows=8)
    assert [run.metrics[step]["val/loss"] for step in (0, 1, 2)] == [1.0, 0.5, 0.25]
    assert run.metrics[0]["val/reward"] == 0.5
    assert "val/loss reached 0.25" in run.stop_reason
    assert student.num_steps == 2
    held_out = [batch for name, batch in student.calls if name == "evaluate"]
    assert {len(batch) for batch in held_out} == {3}
    assert all("teacher_ids" in batch for batch in held_out)


def test_other_metrics_reach_their_goal_from_below():
    run = FakeRun()
    goal = {"stop_at_validation_metric": "reward", "stop_at_validation_threshold": 0.4}
    on_rollouts(run, **goal, val_period=1, max_num_steps=9)
    assert "val/reward reached 0.5" in run.stop_reason


def test_validation_on_text_ends_at_its_goal():
    run = FakeRun()
    student = on_text(run, val_period=1, max_num_steps=9, stop_at_validation_loss=0.3)
    assert [run.metrics[step]["val/loss"] for step in (1, 2)] == [0.5, 0.25]
    assert run.stop_reason
    assert all("teacher_ids" in batch for _, batch in student.calls)


@pytest.mark.parametrize("algorithm", [on_rollouts, on_text])
def test_a_resumed_run_trains_on_what_an_uninterrupted_one_does(algorithm, tmp_path):
    whole = algorithm(FakeRun(), max_num_steps=6)
    first = algorithm(FakeRun(tmp_path, end_after=3), max_num_steps=6)
    second = algorithm(FakeRun(tmp_path), max_num_steps=6)
    tokens = [batch.ragged("tokens").values.tolist() for student in (first, second) for batch in trained(student)]
    assert tokens == [batch.ragged("tokens").values.tolist() for batch in trained(whole)]
