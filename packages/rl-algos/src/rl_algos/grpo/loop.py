"""GRPO (arXiv:2402.03300): sample groups, compare rewards within each, and take a clipped policy-gradient step."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from rl_algos.data.examples import Datasets
from rl_algos.distillation.teachers import RolloutTeacher, check_routes, check_teachers
from rl_algos.grpo.config import GRPOConfig, GRPORoot, trained_agents, trained_environments
from rl_algos.grpo.estimators import advantages_of, columns_before, reads
from rl_algos.grpo.opponents import check_tokens, opponents_of
from rl_algos.grpo.teacher_advantages import teachers_of, with_teachers
from rl_algos.policy_gradient.advantages import by_rollout
from rl_algos.policy_gradient.loss import objective_of
from rl_algos.policy_gradient.objective import Objective, StepData, with_logprobs
from rl_algos.rollouts.algorithm import RolloutAlgorithm
from rl_algos.rollouts.data import RolloutData
from rl_algos.rollouts.driver.steps import RolloutSteps
from rl_algos.rollouts.setup import steps_of
from rl_algos.rollouts.training.agents import AgentWatch, trained_batch
from rl_algos.rollouts.training.batch import build_batch, passes, with_advantages
from rl_algos.rollouts.training.metrics import rollout_metrics, signal_metrics, training_metrics
from rl_core.errors import ConfigError
from rl_core.model import Model
from rl_core.plugins import RolloutNeeds
from rl_core.run import Checkpointable, Components, Run
from rl_core.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rl_algos.rollouts.training.demonstrations import DemonstrationRows

_log = logging.getLogger(__name__)


class GRPO(RolloutAlgorithm[GRPORoot]):
    """Group-relative policy optimization and its family."""

    def prepare(self, config: GRPORoot, tokenizer: Tokenizer, loaded: Datasets) -> RolloutData:
        check_tokens(config.grpo, tokenizer)
        check_environments(config.grpo, loaded)
        check_teachers(config, tokenizer)
        settings = config.grpo.distillation
        check_routes(config, loaded, all_rows=not settings.reward_weight and settings.self_teacher is None)
        data = super().prepare(config, tokenizer, loaded)
        if settings.self_teacher is None:
            return data
        # A run is checked before a tokenizer is needed.
        from rl_algos.tokenizer import encode_prompt

        return replace(data, encode=partial(encode_prompt, tokenizer))

    def rollouts(self, config: GRPORoot, prepared: RolloutData) -> RolloutNeeds:
        needs = super().rollouts(config, prepared)
        return replace(needs, opponents=(*needs.opponents, *opponents_of(config.grpo)))

    def run(self, config: GRPORoot, components: Components, run: Run) -> None:
        grpo, teachers = config.grpo, teachers_of(config, components)
        read_before = columns_before(grpo) | ({"prev_logprobs"} if teachers is not None else set())
        train(
            grpo,
            objective_of(config, grpo, read_before=read_before, weights=components.weights),
            policy=components.models["policy"],
            steps=steps_of(config, components, run, with_greedy=reads(grpo, "baselines")),
            rows_per_minibatch=config.policy.train_global_batch_size,
            demonstrations=components.data.demonstrations,
            teachers=teachers,
        )


def train(
    config: GRPOConfig,
    objective: Objective,
    *,
    policy: Model,
    steps: RolloutSteps,
    rows_per_minibatch: int,
    demonstrations: DemonstrationRows | None = None,
    teachers: RolloutTeacher | None = None,
) -> None:
    """Train the policy for `config.max_num_steps` steps, or until the data or the run ends.

    Whether rollouts are synchronous, where models run and on what backend are properties of the objects handed in.

    Args:
        config: Config section of the algorithm.
        objective: Loss of the policy, with the columns and weights that are computed for it once a step.
        policy: Policy to train.
        steps: Rollouts of each step, weight sync, validation and checkpoints; with greedy rollouts for an estimator
            that compares with them.
        rows_per_minibatch: Plays of one optimizer step. All rollouts that a play returned count as one.
        demonstrations: Conversations that each step learns in addition to its rollouts; None for none.
        teachers: Teachers that give advantages to tokens, for an objective that reads `prev_logprobs`; None for none.
    """
    run, agents = steps.run, trained_agents(config)
    watch = AgentWatch(config.section, agents)
    state: dict[str, Checkpointable] = {"objective": objective}
    if demonstrations is not None:
        state["demonstrations"] = demonstrations.stream
    for step, groups, aside, greedy in steps.take(models={"policy": policy}, state=state):
        watch.observe(groups)
        batch = trained_batch(build_batch(groups, config), groups, agents)
        with run.phase("logprobs"):
            batch = with_logprobs(batch, policy, objective)
        penalties = objective.penalties(batch)
        advantages = advantages_of(groups, config, penalties=penalties, greedy=greedy, batch=batch)
        if teachers is not None:
            with run.phase("teacher"):
                advantages, of_teachers = with_teachers(advantages, batch, groups, teachers, config)
            run.record(step, of_teachers)
        batch = objective.prepared(StepData(step, groups, with_advantages(batch, advantages)))
        loss, shown = objective.loss, None if demonstrations is None else demonstrations.take()
        with run.phase("training"):
            count, seed = config.num_iterations, (config.seed, step)
            parts = passes(batch, rows_per_minibatch, count=count, seed=seed, demonstrations=shown)
            updates = [policy.train_step(minibatch, loss) for minibatch in parts]
            if run.due(config.reference_sync_period, step):
                policy.update_reference(config.reference_mixup_alpha)
        steps.sync(step, batch)
        metrics = training_metrics(updates)
        run.record(step, {**metrics, **objective.observe(metrics)})
        run.record(step, {**rollout_metrics(groups, advantages), **signal_metrics(groups, aside)})
        run.record_rollouts(step, [*groups, *aside], by_rollout(advantages, groups), batch=batch)


def check_environments(config: GRPOConfig, loaded: Datasets) -> None:
    """Refuse settings of an environment that no row of the training data has.

    Raises:
        ConfigError: With the environments that there are.
    """
    if any(dataset.source is not None for dataset in loaded.train):
        return  # Rows that are streamed are not known yet.
    found = sorted({name for dataset in loaded.train for name in dataset.environments()})
    for name in trained_environments(config):
        if name not in found:
            problem = f"grpo.environments.{name}: no row of data.train has this environment"
            raise ConfigError(f"{problem}; their environments are {', '.join(found)}")
