"""Evaluation tasks of a run that trains, on a scripted source."""

from types import SimpleNamespace

import numpy as np
import pytest
from rollouts_builder import make_prompt

from rl_algos.evaluation.config import EvaluationConfig
from rl_algos.evaluation.summary import PromptScore, SampleScore, Scoring, summarize
from rl_algos.grpo.config import GRPOConfig
from rl_algos.rollouts.driver.source import evaluation_tasks
from rl_algos.rollouts.driver.steps import RolloutSteps
from rl_algos.rollouts.driver.task_evaluation import EvaluationPlan, EvaluationTask, TaskEvaluation
from rl_algos.rollouts.setup import task_scores
from rl_core.model_config import GenerationConfig
from rl_core.plugins import RolloutNeeds
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.pool import Evaluation
from rl_core.rollouts.rollout import Rollout, WeightSpan
from rl_core.run import Components
from rl_core.testing.fakes import FakeModel, FakeRolloutSource, FakeRun, FakeWeights

GREEDY, SAMPLED = SamplingParams(max_new_tokens=4, temperature=0.0), SamplingParams(max_new_tokens=8)


class ScriptedSource:
    """Answers each prompt as the script says: answer and reward of each sample; an answer of None fails."""

    def __init__(self, script):
        self._script = script
        self.asked = []

    def evaluate(self, prompts, sampling, *, num_generations=1):
        self.asked.append(([prompt.id for prompt in prompts], sampling, num_generations))
        return Evaluation([self._group(prompt, num_generations) for prompt in prompts])

    def _group(self, prompt, num_generations):
        samples = self._script[prompt.id]
        assert len(samples) == num_generations
        return RolloutGroup.of(prompt, [rollout(prompt, *sample) for sample in samples])


def rollout(prompt, answer, reward):
    if answer is None:
        return Rollout.failed(prompt, "the verifier hung")
    return Rollout(
        prompt_id=prompt.id,
        tokens=np.array([1, 2, 3], np.int32),
        loss_mask=np.array([0, 1, 1], np.uint8),
        generation_logprobs=np.zeros(3, np.float32),
        spans=(WeightSpan(1, 2),),
        turns=(),
        rewards={"reward": reward},
        stop_reason="stop",
        info={"answer": answer},
    )


def make_plan(*tasks, k=()):
    return EvaluationPlan(tasks, RolloutNeeds("program", {}, frozenset()), Scoring(k=k))


def make_task(name, ids, sampling, num_samples=1, refused=()):
    groups = evaluation_tasks(list(map(make_prompt, ids)), sampling, num_generations=num_samples, seed=0)
    return EvaluationTask(name, groups, refused, num_samples)


def test_each_task_is_scored_with_its_own_sampling_and_nothing_is_dropped():
    refused = [(make_prompt("long"), "context overflow")]
    plan = make_plan(
        make_task("sums", ["a", "b"], SAMPLED, num_samples=4),
        make_task("words", ["c"], GREEDY, num_samples=4, refused=refused),
        k=(1, 2, 4),
    )
    script = {
        "a": [("4", 1.0), ("4", 1.0), ("5", 0.0), ("5", 0.0)],
        "b": [("1", 0.0), ("2", 1.0), ("1", 0.0), (None, 0.0)],
        "c": [("7", 1.0)] * 4,
    }
    source, run = ScriptedSource(script), FakeRun()
    TaskEvaluation(plan, EvaluationConfig())(source, run, step=3)
    assert source.asked == [(["a", "b"], SAMPLED, 4), (["c"], GREEDY, 4)]
    assert run.phases == ["evaluation"]
    assert run.metrics[3] == pytest.approx(
        {
            "eval/sums/mean": (0.5 + 0.25) / 2,
            "eval/sums/pass@1": (0.5 + 0.25) / 2,
            "eval/sums/pass@2": (5 / 6 + 0.5) / 2,
            "eval/sums/pass@4": 1.0,
            "eval/sums/cons@2": (0.5 + 1 / 3) / 2,
            "eval/sums/cons@4": (0.5 + 0) / 2,
            "eval/sums/mean_length": 7 * 2 / 8,
            "eval/sums/num_failed": 1,
            "eval/words/mean": 0.5,
            "eval/words/pass@1": 0.5,
            "eval/words/pass@2": 0.5,
            "eval/words/pass@4": 0.5,
            "eval/words/cons@2": 0.5,
            "eval/words/cons@4": 0.5,
            "eval/words/mean_length": 1.0,
            "eval/words/num_failed": 4,
        }
    )


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, []),
        ({"period": 2}, [2, 4]),
        ({"period": 3, "at_start": True, "at_end": True}, [0, 3, 5]),
        ({"at_end": True}, [5]),
    ],
)
def test_tasks_are_scored_when_they_are_due(settings, steps):
    config = GRPOConfig(num_prompts_per_step=2, num_generations_per_prompt=2, max_num_steps=5)
    source = FakeRolloutSource([make_prompt(f"p{index}") for index in range(20)], lambda *_: 1.0)
    run, policy = FakeRun(), FakeModel()
    evaluation = TaskEvaluation(make_plan(make_task("sums", ["a"], GREEDY)), EvaluationConfig(**settings))
    loop = RolloutSteps(config, source, FakeWeights(policy), None, run, evaluation=evaluation)
    for step in loop.take(models={"policy": policy}):
        loop.sync(step.number)
    assert [step for step, metrics in run.metrics.items() if "eval/sums/mean" in metrics] == steps
    assert source.versions == [1, 2, 3, 4, 5, 6]


class ScriptedPool:
    """Rolls each group out at once, with the reward of its weights' version."""

    def __init__(self):
        self.version, self.adopted, self._done = 0, [], []

    def adopt(self, update, *, in_flight=False):
        self.version = update.version
        self.adopted.append(update.version)

    def submit(self, tasks):
        first = len(self._done)
        for number, task in enumerate(tasks, first):
            samples = [rollout(task.prompt, "4", float(self.version)) for _ in task.seeds]
            self._done.append((number, RolloutGroup.of(task.prompt, samples)))
        self._left = iter(self._done[first:])
        return [number for number, _ in self._done[first:]]

    def next_done(self):
        return next(self._left)


def test_a_run_without_other_rollouts_gives_its_weights_to_the_engines_only_before_an_evaluation():
    settings = EvaluationConfig(period=2, at_start=True)
    config = SimpleNamespace(eval=settings, policy=SimpleNamespace(generation=GenerationConfig()))
    pool, run, policy = ScriptedPool(), FakeRun(), FakeModel()
    plan = make_plan(make_task("sums", ["a", "b"], GREEDY))
    parts = Components({"policy": policy}, None, pool=pool, weights=FakeWeights(policy), evaluation=plan)
    score = task_scores(config, parts, run)
    for step in run.steps(5, models={"policy": policy}, state={}):
        if step == 1:
            score(0)
        score(step)
    assert pool.adopted == [1, 2, 3]
    assert {step: metrics["eval/sums/mean"] for step, metrics in run.metrics.items()} == {0: 1, 2: 2, 4: 3}
    assert run.phases == ["weight_sync", "evaluation"] * 3


def test_the_results_are_those_of_a_summary_of_rl_eval():
    samples = {"a": [("4", 1.0), ("5", 0.5)], "b": [("1", 0.0), ("1", 0.25)]}
    plan = make_plan(make_task("sums", ["a", "b"], SAMPLED, num_samples=2), k=(1, 2))
    source, run = ScriptedSource(samples), FakeRun()
    TaskEvaluation(plan, EvaluationConfig())(source, run, step=1)
    scores = [
        PromptScore(id, "sums", [SampleScore(reward, answer=answer) for answer, reward in each])
        for id, each in samples.items()
    ]
    expected = {name: estimate.value for name, estimate in summarize(scores, plan.scoring).estimates.items()}
    found = {name.removeprefix("eval/sums/"): value for name, value in run.metrics[1].items()}
    assert {name: found[name] for name in expected} == pytest.approx(expected)
