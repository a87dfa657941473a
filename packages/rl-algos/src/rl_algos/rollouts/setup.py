"""From the sections of a resolved config to the objects that roll out prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from rl_algos.judges.config import RewardModelJudgeConfig, functions_of_models, judge_sections, judged_rewards
from rl_algos.losses.tokens import DraftLoss
from rl_algos.rollouts.config import (
    DRAFTER,
    SCORED_BY_AGENT,
    EvaluationRoot,
    GeneratingPolicy,
    PolicyGradientConfig,
    RolloutConfig,
    RolloutRoot,
    drafter_section,
    rollout_config,
)
from rl_algos.rollouts.data import RolloutData
from rl_algos.rollouts.driver.judged import JudgedSource, ModelJudges
from rl_algos.rollouts.driver.live_source import LiveSource, ServingCanary, UserPrompts
from rl_algos.rollouts.driver.mixture import Mixture
from rl_algos.rollouts.driver.scoring_functions import ScoringFunctions
from rl_algos.rollouts.driver.source import PacedRolloutSource
from rl_algos.rollouts.driver.steps import Drafter, RolloutSteps
from rl_algos.rollouts.driver.task_evaluation import TaskEvaluation
from rl_algos.rollouts.driver.validation import Validation
from rl_algos.rollouts.driver.watches import FailureWatch
from rl_algos.rollouts.worker.programs import (
    AGENT_PROGRAM,
    LIVE_PROGRAM,
    PROGRAMS,
    TURNS,
    code_named,
    files_named,
    program_named,
)
from rl_core.environments.instance import instance_of
from rl_core.model import Model
from rl_core.model_config import GenerationConfig
from rl_core.plugins import RolloutNeeds
from rl_core.rollouts.generation import SamplingParams, ThinkingBudget
from rl_core.rollouts.pool import RolloutPool
from rl_core.run import Components, Run

SAMPLED = 4
"""Number of prompts for the proof of an engine's computation."""


def program_needs(
    settings: RolloutConfig, policy: GeneratingPolicy, environments: frozenset[str], users: SamplingParams | None = None
) -> RolloutNeeds:
    """Return the needs of the rollout program of an algorithm, or of the agent that plays instead of it.

    Args:
        settings: Section of the algorithm.
        policy: Section of the policy.
        environments: Names of the environments that score the prompts.
        users: How completions for users are drawn; None in an evaluation, which serves nobody.
    """
    agent, max_tokens = settings.agent, policy.max_total_sequence_length
    if agent is None or (settings.serves_users and users is None):
        given: dict[str, Any] = {"max_turns": settings.max_rollout_turns, "max_tokens": max_tokens}
        # A program of the user's makes its segments itself.
        if settings.renders_anew and settings.rollout_program in PROGRAMS:
            given["split"] = True
        if settings.rollout_program in TURNS:
            given["structured_output"] = settings.structured_output
        program, args = program_named(settings.rollout_program), {**given, **settings.rollout_program_args}
        return RolloutNeeds(program, args, environments, settings.max_rollout_s)
    shared = {"config": agent, "max_tokens": max_tokens, "split": settings.renders_anew}
    shared |= {"takes_images": policy.vision.enabled, "structured_output": settings.structured_output}
    if settings.serves_users:
        args = {**shared, "sampling": users, "group_size": settings.num_generations_per_prompt}
        return RolloutNeeds(LIVE_PROGRAM, args, environments, settings.max_rollout_s)
    args = {
        **shared,
        "function": None if agent.run is None else code_named(agent.run),
        "files": files_named(agent.files),
    }
    return RolloutNeeds(AGENT_PROGRAM, args, environments - {SCORED_BY_AGENT}, settings.max_rollout_s)


def first_prompts(data: RolloutData) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of the first prompts of each dataset; of a streamed dataset, of the prompts at hand."""
    first = (prompt for prompts in (*data.train.datasets, data.validation) for prompt in islice(prompts, SAMPLED))
    return tuple(tuple(prompt.token_ids.tolist()) for prompt in islice(first, SAMPLED))


def steps_of(config: RolloutRoot, components: Components, run: Run, *, with_greedy: bool = False) -> RolloutSteps:
    """Return the steps of the loop.

    Args:
        config: Resolved config of the run.
        components: Objects of the run, with its rollout pool and weights.
        run: Run that records the steps.
        with_greedy: True if each also has a greedy rollout of every prompt.
    """
    assert components.pool is not None, "the algorithm's plugin says that it generates"
    assert components.weights is not None, "the algorithm's plugin says that it generates"
    settings, generation = rollout_config(config), config.policy.generation
    data: RolloutData = components.data
    greedy = replace(training_sampling(generation, data.stop_token_ids), temperature=0.0)
    mixture, curriculum = None, None
    if isinstance(settings, PolicyGradientConfig) and settings.curriculum.enabled:
        curriculum = settings.curriculum
    if len(data.train.datasets) > 1 or curriculum is not None:
        assert not isinstance(data.train, UserPrompts), "users choose what they ask"
        mixture = Mixture(data.train, [prompts[0].dataset for prompts in data.train.datasets], curriculum)
    drafter, section, head = None, drafter_section(config), config.policy.draft_head
    if section is not None:
        drafter = Drafter(components.models[DRAFTER], section.train_global_batch_size)
    elif head is not None:
        rows, loss = config.policy.train_global_batch_size, DraftLoss(head.num_tokens)
        drafter = Drafter(components.models[DRAFTER], rows, loss, "policy.draft_head")
    source, canary = source_of(settings, generation, data, components.pool), None
    if isinstance(source, LiveSource) and (trial := settings.agent.live.canary).enabled:  # type: ignore[union-attr]
        sampling, prompts = validation_sampling(generation, data.stop_token_ids), data.validation[: trial.num_prompts]
        canary = ServingCanary(trial, source, components.models["policy"], components.weights, prompts, sampling)
    judges = model_judges(config, components.models)
    watch = FailureWatch(settings.max_failed_share, section=settings.section)
    return RolloutSteps(
        settings,
        source if judges is None else JudgedSource(source, judges, run.phase, watch),
        components.weights,
        Validation(data.validation, validation_sampling(generation, data.stop_token_ids), settings),
        run,
        greedy if with_greedy else None,
        None if components.evaluation is None else TaskEvaluation(components.evaluation, config.eval),
        mixture,
        components.opponents,
        drafter,
        canary,
        judge_usage=components.judge_usage,
    )


def task_scores(config: EvaluationRoot, components: Components, run: Run) -> Callable[[int], None]:
    """Return a function that scores the tasks of a run without other rollouts after a step, if they are due. The
    generators get the weights of that step first.

    Args:
        config: Resolved config of the run.
        components: Objects of the run, with its pool, weights and evaluation.
        run: Run that records the results.
    """
    pool, weights, plan = components.pool, components.weights, components.evaluation
    assert pool is not None, "the algorithm's plugin says that it generates"
    assert weights is not None, "the algorithm's plugin says that it generates"
    sampling = validation_sampling(config.policy.generation, ())
    source: Any = PacedRolloutSource(
        pool, UserPrompts(), sampling=sampling, num_generations=1, seed=plan.scoring.seed, section="eval"
    )
    judges = model_judges(config, components.models)
    if judges is not None:
        source = JudgedSource(source, judges, run.phase, FailureWatch(1.0, section="eval"))
    evaluation = TaskEvaluation(plan, config.eval)

    def score(step: int) -> None:
        if not evaluation.is_due(run, step):
            return
        with run.phase("weight_sync"):
            source.adopt(weights.publish())
        evaluation(source, run, step=step)

    return score


def model_judges(config: Any, models: Mapping[str, Model]) -> ModelJudges | None:
    """Return the models of a run that judge its rollouts; None if there are none.

    Args:
        config: Resolved config of the run or the evaluation.
        models: Its models by role.
    """
    judges = judge_sections(config)
    if not any(isinstance(judge, RewardModelJudgeConfig) for judge in judges.values()):
        return None
    # This module imports transformers, which takes a second.
    from rl_algos.judges.reward_model import reward_model_judges

    asked = reward_model_judges(config, models)
    rewards = {
        environment: {name: rubric for name, rubric in parts.items() if rubric.judge in asked}
        for environment, parts in judged_rewards(config).items()
    }
    own = {name: instance_of(config.env, name).only(parts) for name, parts in functions_of_models(config).items()}
    return ModelJudges(asked, rewards, ScoringFunctions(own, asked) if own else None)


def source_of(
    settings: RolloutConfig, generation: GenerationConfig, data: RolloutData, pool: RolloutPool
) -> PacedRolloutSource:
    """Return the source that the loop collects from.

    Args:
        settings: Section of the algorithm.
        generation: Section `policy.generation`.
        data: Prompts of the run.
        pool: Pool that runs the rollouts.
    """
    kind = LiveSource if settings.serves_users else PacedRolloutSource
    return kind(
        pool,
        data.train,
        sampling=training_sampling(generation, data.stop_token_ids),
        num_generations=settings.num_generations_per_prompt,
        seed=settings.seed,
        max_staleness=settings.max_staleness,
        prompts_per_step=settings.num_prompts_per_step,
        num_ahead=settings.num_ahead,
        sampler=settings.sampler,
        window=settings.async_grpo.sampler_window or 0,
        overlaps_training=settings.async_grpo.enabled,
        in_flight=settings.updates_in_flight,
        max_failed_share=settings.max_failed_share,
        section=settings.section,
        demonstrated_share=settings.demonstrated_share,
    )


def training_sampling(generation: GenerationConfig, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """Return how training rollouts are drawn."""
    closes, text = generation.thinking_budget_mode == "close", generation.thinking_end or ""
    budget = generation.thinking_budget
    thinking = None if budget is None else ThinkingBudget(budget, closes=closes, text=text)
    return SamplingParams(
        max_new_tokens=generation.max_new_tokens,
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k or 0,
        min_p=generation.min_p,
        stop_token_ids=(*stop_token_ids, *generation.stop_token_ids),
        stop_strings=tuple(generation.stop_strings),
        thinking=thinking,
    )


def validation_sampling(generation: GenerationConfig, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """Return how validation rollouts are drawn."""
    temperature, top_p, top_k = generation.val_temperature, generation.val_top_p, generation.val_top_k or 0
    sampling = training_sampling(generation, stop_token_ids)
    return replace(sampling, temperature=temperature, top_p=top_p, top_k=top_k, min_p=0.0)
