"""A scripted generator: a pool whose rollouts are written down in advance, and plans for it."""

import numpy as np

from rl_algos.evaluation.summary import Scoring
from rl_algos.rollouts.driver.task_evaluation import EvaluationPlan, EvaluationTask
from rl_core.plugins import RolloutNeeds
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.pool import RolloutTask
from rl_core.rollouts.rollout import Prompt, Rollout, WeightSpan

SAMPLING = SamplingParams(max_new_tokens=4)
NEEDS = RolloutNeeds("program", {}, frozenset())


class Killed(BaseException):
    """Ends the process, as far as a test can tell."""


def make_prompt(number, dataset="sums"):
    message = {"role": "user", "content": f"question {number}"}
    return Prompt(f"{dataset}:validation:{number}", (message,), np.array([1, number], np.int32), "math", {}, dataset)


def make_task(num_prompts, num_samples=1, name="sums", refused=()):
    seeds = tuple(range(num_samples))
    groups = [RolloutTask(make_prompt(i), SAMPLING, seeds) for i in range(num_prompts)]
    return EvaluationTask(name, groups, refused, num_samples)


def make_plan(*tasks, k=(1,)):
    return EvaluationPlan(tasks, NEEDS, Scoring(k=k))


def make_rollout(prompt, answer, reward):
    """A rollout of one sampled token; an answer of None fails."""
    if answer is None:
        return Rollout.failed(prompt, "the verifier hung")
    return Rollout(
        prompt_id=prompt.id,
        tokens=np.array([1, 2, 3], np.int32),
        loss_mask=np.array([0, 0, 1], np.uint8),
        generation_logprobs=np.zeros(3, np.float32),
        spans=(WeightSpan(0, 1),),
        turns=(),
        rewards={"reward": reward},
        stop_reason="stop",
        info={"answer": answer},
    )


class ScriptedPool:
    """Answers each prompt as the script says, the last one first.

    Args:
        script: from the number of a prompt to answer and reward of each sample.
        killed_after: groups after which the process is killed.
    """

    def __init__(self, script, killed_after=None):
        self._script, self._killed_after = script, killed_after
        self.submitted = []
        self._waiting = []

    def submit(self, tasks):
        self.submitted += tasks
        self._waiting = list(enumerate(tasks))
        return list(range(len(tasks)))

    def next_done(self):
        if self._killed_after is not None and len(self.submitted) - len(self._waiting) == self._killed_after:
            raise Killed
        ticket, task = self._waiting.pop()
        samples = self._script(int(task.prompt.id.rpartition(":")[2]))
        rollouts = [make_rollout(task.prompt, *samples[index]) for index in range(len(task.seeds))]
        return ticket, RolloutGroup.of(task.prompt, rollouts)
