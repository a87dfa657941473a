"""The steps of a loop that trains on its own rollouts: the work around the training of each step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rl_algos.losses.tokens import NLLLoss
from rl_algos.rollouts.config import DRAFTER, PolicyGradientConfig, RolloutConfig
from rl_algos.rollouts.driver.live_source import ServingCanary
from rl_algos.rollouts.driver.mixture import Mixture
from rl_algos.rollouts.driver.task_evaluation import TaskEvaluation
from rl_algos.rollouts.driver.validation import Validation
from rl_algos.rollouts.driver.watches import RewardWatch
from rl_algos.rollouts.training.batch import minibatches
from rl_algos.rollouts.training.metrics import training_metrics
from rl_algos.rollouts.training.rewards import varies
from rl_core.data.batch import Batch
from rl_core.errors import ConfigError, DataError
from rl_core.metrics import Metric
from rl_core.model import Loss, Model, Saved
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.pool import RolloutSource
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
        rollouts: Source of the groups.
        weights: Weights of the policy.
        validation: Validation of the policy.
        run: Owns steps, timing and checkpoints.
        greedy: How a greedy rollout of each prompt is drawn; None for none.
        evaluation: Evaluation of the tasks that the run scores in addition to its validation data; None for none.
        mixture: Weights that the prompts are drawn by; None if they are always the same.
        opponents: Older weights of the policy that play against it; None for none.
        drafter: Drafter that trains with the policy; None for none.
        canary: Trial of each version before users are answered with it; None for none.
        judge_usage: Returns the metrics of the language models that judge since the last call; None without judges.
    """

    config: RolloutConfig
    rollouts: RolloutSource
    weights: Weights
    validation: Validation
    run: Run
    greedy: SamplingParams | None = None
    evaluation: TaskEvaluation | None = None
    mixture: Mixture | None = None
    opponents: Saved | None = None
    drafter: Drafter | None = None
    canary: ServingCanary | None = None
    judge_usage: Callable[[], Mapping[str, float]] | None = None

    def take(self, *, models: Mapping[str, Saved], state: Mapping[str, Checkpointable] | None = None) -> Iterator[Step]:
        """Yield the steps still to do, until `config.max_num_steps`, or until the data or the run ends.

        Args:
            models: Models that train, by role.
            state: Further state of the loop, in addition to the rollouts and the weights.
        """
        config, run = self.config, self.run
        held: dict[str, Checkpointable] = {"rollouts": self.rollouts, "weights": self.weights, **(state or {})}
        if self.mixture is not None and self.mixture.has_curriculum:
            held["curriculum"] = self.mixture
        if self.canary is not None:
            held["canary"] = self.canary
        saved = dict(models)
        if self.opponents is not None:
            saved["opponents"] = self.opponents
        if self.drafter is not None:
            saved[DRAFTER] = self.drafter.model
        numbers = run.steps(config.max_num_steps, models=saved, state=held)
        watch = RewardWatch()
        with run.phase("weight_sync"):
            self.rollouts.adopt(self.weights.publish())
        if self.canary is not None:
            with run.phase("canary"):
                self.canary.begin()
        for number in numbers:
            if number == 1 and config.val_at_start:
                self.validation(self.rollouts, run, step=0)
            if number == 1:
                self._evaluate_tasks(0)
            if self.mixture is not None:
                self.mixture.stream.begin(number)
            with run.phase("generation"):
                groups, aside = self.collect(config.max_num_steps - number)
                greedy: Sequence[RolloutGroup] = ()
                if self.greedy is not None:
                    greedy = self.rollouts.evaluate([group.prompt for group in groups], self.greedy).groups
            if len(groups) < config.num_prompts_per_step:
                run.stop("the data has ended")
                return
            if not config.further_datasets:
                # Otherwise the policy also learns rows without rewards.
                watch.observe([*groups, *aside])
            run.record(number, self.rollouts.metrics())
            if self.judge_usage is not None:
                run.record(number, self.judge_usage())
            if self.mixture is not None:
                run.record(number, self.mixture.learn([*groups, *aside]))
            yield Step(number, groups, aside, greedy)
            if run.due(config.val_period, number, at_end=config.val_at_end):
                self.validation(self.rollouts, run, step=number)
            self._evaluate_tasks(number)

    def collect(self, num_later: int) -> tuple[list[RolloutGroup], list[RolloutGroup]]:
        """Return the groups of the next step, and those that were set aside; see `collect_groups`.

        Args:
            num_later: Number of steps that follow.
        """
        num_groups = num_later * self.config.num_prompts_per_step
        return collect_groups(self.rollouts, self.config, num_later=num_groups)

    def sync(self, number: int, batch: Batch | None = None) -> None:
        """Bring the generators to the weights that the step has trained.

        Args:
            number: Number of the step.
            batch: Its rollouts, for a drafter to learn from first; a loop that gives none cannot train one.

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
        update = self.weights.publish()
        if self.canary is not None:
            with self.run.phase("canary"):
                update, tried = self.canary.serve(update)
            self.run.record(number, tried)
        else:
            with self.run.phase("weight_sync"):
                self.rollouts.adopt(update)
        self.run.record(number, {"weight_version": update.version})

    def _evaluate_tasks(self, number: int) -> None:
        if self.evaluation is not None and self.evaluation.is_due(self.run, number):
            self.evaluation(self.rollouts, self.run, step=number)


NO_SIGNAL = "all rewards of the group are equal"
NOT_WANTED = "the step had its groups"
"""Reasons for which dynamic sampling sets groups aside."""

NO_TURN = "the policy had no turn"
"""Reason for which a group is set aside whose plays opponents ended before the policy had a turn."""

TRIES = 10
"""Prompts that are tried for each prompt of a step before a run fails because the policy has no turn."""


def collect_groups(
    rollouts: RolloutSource, config: RolloutConfig, *, num_later: int | None = None
) -> tuple[list[RolloutGroup], list[RolloutGroup]]:
    """Collect the groups of one step. The second list has the groups that were set aside: by dynamic sampling (without
    signal, or more than the step needs), or because opponents ended every play before the policy had a turn. Both lists
    are empty or short when the data ends.

    Args:
        rollouts: Source of the rollouts.
        config: Config section of the algorithm, with the size of a step and the settings of dynamic sampling.
        num_later: Groups that later steps train on; None if that is not known.

    Raises:
        DataError: If `dynamic_sampling_max_gen_batches` rounds did not find enough groups whose rewards differ, or the
            policy had no turn in far too many.
    """
    if not (isinstance(config, PolicyGradientConfig) and config.use_dynamic_sampling):
        return _with_turns(rollouts, config, num_later)
    kept: list[RolloutGroup] = []
    aside: list[RolloutGroup] = []
    for _ in range(config.dynamic_sampling_max_gen_batches):
        drawn = math.ceil((config.num_prompts_per_step - len(kept)) * config.batch_multiplier)
        groups = rollouts.collect(drawn, num_later=num_later)
        useful = [group for group in groups if varies(group)]
        num_wanted = config.num_prompts_per_step - len(kept)
        kept += useful[:num_wanted]
        rollouts.set_aside([group for group in groups if not varies(group)], NO_SIGNAL)
        rollouts.set_aside(useful[num_wanted:], NOT_WANTED)
        chosen = {id(group) for group in kept}
        aside += [group for group in groups if id(group) not in chosen]
        if len(kept) == config.num_prompts_per_step or len(groups) < drawn:
            return kept, aside
    raise DataError(
        f"dynamic sampling found {len(kept)} of {config.num_prompts_per_step} groups with differing rewards in "
        f"{config.dynamic_sampling_max_gen_batches} rounds. Increase "
        f"{config.section}.dynamic_sampling_max_gen_batches, or choose prompts that the policy sometimes solves"
    )


def _with_turns(
    rollouts: RolloutSource, config: RolloutConfig, num_later: int | None
) -> tuple[list[RolloutGroup], list[RolloutGroup]]:
    kept: list[RolloutGroup] = []
    aside: list[RolloutGroup] = []
    while len(aside) < TRIES * config.num_prompts_per_step:
        num_wanted = config.num_prompts_per_step - len(kept)
        groups = rollouts.collect(num_wanted, num_later=num_later)
        without = [group for group in groups if not len(group.rollouts)]
        kept += [group for group in groups if len(group.rollouts)]
        if without:
            rollouts.set_aside(without, NO_TURN)
            aside += without
        if not without or len(groups) < num_wanted:
            return kept, aside
    raise DataError(
        f"opponents ended every play of {len(aside)} prompts before the policy had a turn, and {len(kept)} of "
        f"{config.num_prompts_per_step} prompts are left to train on. Leave an agent to the policy in "
        f"{config.section}.agents, or begin with a policy that can play"
    )


@dataclass(frozen=True)
class Drafter:
    """Trains a drafter on the rollouts of the policy.

    A draft model learns by the likelihood of sampled tokens, an unbiased estimate of its divergence from the policy, up
    to the policy's entropy, so no pass of the policy is needed. A draft head reads a pass of the policy in any case, so
    it learns the distributions of that pass.

    Args:
        model: The drafter.
        rows: Rollouts of one optimizer step.
        loss: Objective of the drafter.
        section: Dotted key of its config section, for messages.
    """

    model: Model
    rows: int
    loss: Loss = field(default_factory=NLLLoss)
    section: str = DRAFTER

    def learn(self, batch: Batch) -> dict[str, Metric]:
        """Train on the rollouts of a step, once each, and return the metrics of the step."""
        updates = [self.model.train_step(minibatch, self.loss) for minibatch in minibatches(batch, self.rows)]
        return training_metrics(updates, prefix="drafter")
