"""The steps of a loop that trains on its own rollouts, and what surrounds the training in each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rl_algos.rollouts.config import RolloutConfig
from rl_algos.rollouts.drafter import DRAFTER
from rl_algos.rollouts.driver.collect import collect_groups, greedy_groups
from rl_algos.rollouts.driver.drafter import Drafter
from rl_algos.rollouts.driver.mixture import Mixture
from rl_algos.rollouts.driver.reward_watch import RewardWatch
from rl_algos.rollouts.driver.task_evaluation import TaskEvaluation
from rl_algos.rollouts.driver.validation import RolloutValidation
from rl_core.data.batch import Batch
from rl_core.errors import ConfigError
from rl_core.model import Saved
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.source import RolloutSource
from rl_core.run import Checkpointable, Run
from rl_core.weights import Weights


class Step(NamedTuple):
    """The rollouts of one step.

    Args:
        number: Number of the step, counted from 1.
        groups: Groups to train on.
        aside: Rolled out and not trained on (dynamic sampling).
        greedy: One greedy rollout of the prompt of each of `groups`; empty if the loop asked for none.
    """

    number: int
    groups: Sequence[RolloutGroup]
    aside: Sequence[RolloutGroup]
    greedy: Sequence[RolloutGroup]


@dataclass(frozen=True)
class RolloutSteps:
    """Shared part of loops that train on their own rollouts; the loop adds how a step trains.

    Every step collects groups with the newest weights; after the training, `sync` brings the generators to the new
    weights. Validations and checkpoints follow when the loop asks for the next step. The usage loop::

        steps = RolloutSteps(config, rollouts, weights, validation, run)
        for step, groups, aside, _ in steps.take(models={"policy": policy}):
            batch = build_batch(groups, config)
            with run.phase("training"):
                updates = [policy.train_step(minibatch, loss) for minibatch in minibatches(batch, rows)]
            steps.sync(step, batch)
            run.record(step, training_metrics(updates))

    Args:
        config: Section of the algorithm.
        rollouts: What groups are collected from.
        weights: Weights of the policy.
        validation: Validation of the policy.
        run: Owns steps, timing and checkpoints.
        greedy: How a greedy rollout of each prompt is drawn; None for none.
        evaluation: Evaluation of the tasks that the run scores in addition to its validation data; None for none.
        mixture: Mixture of the datasets that the prompts come from; None for one.
        opponents: Older weights of the policy that play against it; None for none.
        drafter: Drafter that trains with the policy; None for none.
    """

    config: RolloutConfig
    rollouts: RolloutSource
    weights: Weights
    validation: RolloutValidation
    run: Run
    greedy: SamplingParams | None = None
    evaluation: TaskEvaluation | None = None
    mixture: Mixture | None = None
    opponents: Saved | None = None
    drafter: Drafter | None = None

    def take(self, *, models: Mapping[str, Saved], state: Mapping[str, Checkpointable] | None = None) -> Iterator[Step]:
        """Steps still to do, until `config.max_num_steps`, or until the data or the run ends.

        Args:
            models: What trains, by role.
            state: Further state of the loop, in addition to the rollouts and the weights.
        """
        config, run = self.config, self.run
        held: dict[str, Checkpointable] = {"rollouts": self.rollouts, "weights": self.weights, **(state or {})}
        if self.mixture is not None and self.mixture.has_curriculum:
            held["curriculum"] = self.mixture
        saved = dict(models)
        if self.opponents is not None:
            saved["opponents"] = self.opponents
        if self.drafter is not None:
            saved[DRAFTER] = self.drafter.model
        numbers = run.steps(config.max_num_steps, models=saved, state=held)
        watch = RewardWatch()
        with run.phase("weight_sync"):
            self.rollouts.adopt(self.weights.publish())
        for number in numbers:
            if number == 1 and config.val_at_start:
                self.validation(self.rollouts, run, step=0)
            if number == 1:
                self._evaluate_tasks(0)
            with run.phase("generation"):
                num_later = (config.max_num_steps - number) * config.num_prompts_per_step
                groups, aside = collect_groups(self.rollouts, config, num_later=num_later)
                greedy = greedy_groups(self.rollouts, groups, self.greedy)
            if len(groups) < config.num_prompts_per_step:
                run.stop("the data has ended")
                return
            watch.observe([*groups, *aside])
            run.record(number, self.rollouts.metrics())
            if self.mixture is not None:
                run.record(number, self.mixture.learn([*groups, *aside]))
            yield Step(number, groups, aside, greedy)
            if run.due(config.val_period, number, at_end=config.val_at_end):
                self.validation(self.rollouts, run, step=number)
            self._evaluate_tasks(number)

    def sync(self, number: int, batch: Batch | None = None) -> None:
        """Bring the generators to the weights that the step has trained.

        Args:
            number: Number of the step.
            batch: Its rollouts, from which a drafter learns first; a loop that gives none cannot train one.

        Raises:
            ConfigError: If there is a drafter to train and no batch.
        """
        if self.drafter is not None:
            if batch is None:
                raise ConfigError(
                    f"{self.drafter.section}: the loop of this algorithm does not support it, because it calls "
                    "`steps.sync` without the batch of the step. Remove this section, or pass the batch"
                )
            with self.run.phase("drafter_training"):
                self.run.record(number, self.drafter.learn(batch))
        with self.run.phase("weight_sync"):
            update = self.weights.publish()
            self.rollouts.adopt(update)
        self.run.record(number, {"weight_version": update.version})

    def _evaluate_tasks(self, number: int) -> None:
        if self.evaluation is not None and self.evaluation.is_due(self.run, number):
            self.evaluation(self.rollouts, self.run, step=number)
