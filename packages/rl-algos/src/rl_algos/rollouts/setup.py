"""From the resolved config to the objects that roll out prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from rl_algos.losses.drafts import DraftLoss
from rl_algos.rollouts.agent_config import SCORED_BY_AGENT, AgentConfig
from rl_algos.rollouts.config import EvaluationRoot, PolicyGradientConfig, RolloutRoot, rollout_config
from rl_algos.rollouts.data import RolloutData
from rl_algos.rollouts.drafter import DRAFTER, drafter_section
from rl_algos.rollouts.driver.drafter import Drafter
from rl_algos.rollouts.driver.mixture import Mixture
from rl_algos.rollouts.driver.source import PacedRolloutSource
from rl_algos.rollouts.driver.steps import RolloutSteps
from rl_algos.rollouts.driver.task_evaluation import TaskEvaluation
from rl_algos.rollouts.driver.validation import Validation
from rl_algos.rollouts.worker.programs import AGENT_PROGRAM, PROGRAMS, code_named, files_named, program_named
from rl_core.model_config import GenerationConfig
from rl_core.plugins import RolloutNeeds
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.pool import RolloutPool
from rl_core.run import Components, Run

SAMPLED = 4
"""Number of prompts that prove what engines compute."""


def needs(config: RolloutRoot, data: RolloutData) -> RolloutNeeds:
    """The program of the rollouts, over the environments that the prompts name."""
    settings = rollout_config(config)
    found = program_needs(
        config,
        _environments(data) if data.environments is None else data.environments,
        program=settings.rollout_program,
        args=settings.rollout_program_args,
        max_turns=settings.max_rollout_turns,
        renders_anew=settings.renders_anew,
        max_seconds=settings.max_rollout_seconds,
        agent=settings.agent,
    )
    return replace(
        found,
        keeps_cache=settings.keeps_cache,
        max_steps=settings.max_num_steps,
        sample_prompts=_first_prompts(data),
    )


def program_needs(
    config: EvaluationRoot,
    environments: frozenset[str],
    *,
    program: str,
    args: Mapping[str, Any],
    max_turns: int,
    renders_anew: bool,
    max_seconds: float | None,
    agent: AgentConfig | None = None,
) -> RolloutNeeds:
    """A rollout program over these environments.

    Args:
        config: Resolved config of the run.
        environments: Names of the environments that score the prompts.
        program: Name or path of the program, as in `RolloutConfig.rollout_program`.
        args: Further arguments of the program, as in `RolloutConfig.rollout_program_args`.
        max_turns: Maximum number of turns of a rollout.
        renders_anew: True if every turn is rendered anew and may start a segment; the user's own program makes its
            segments itself.
        max_seconds: Timeout of a rollout in seconds; None for no limit.
        agent: Config of the agent that plays the rollouts instead of the program; None without an agent.
    """
    if agent is not None:
        return RolloutNeeds(
            program=AGENT_PROGRAM,
            program_args={
                "config": agent,
                "function": None if agent.run is None else code_named(agent.run),
                "max_tokens": config.policy.max_total_sequence_length,
                "split": renders_anew,
                "files": files_named(agent.files),
            },
            max_seconds=max_seconds,
            environments=environments - {SCORED_BY_AGENT},
        )
    found = program_named(program)
    given = {"max_turns": max_turns, "max_tokens": config.policy.max_total_sequence_length}
    if renders_anew and program in PROGRAMS:
        given["split"] = True
    return RolloutNeeds(
        program=found,
        program_args={**given, **args},
        max_seconds=max_seconds,
        environments=environments,
    )


def _first_prompts(data: RolloutData) -> tuple[tuple[int, ...], ...]:
    """Tokens of the first prompts of each dataset; of a streamed one, of those that are at hand."""
    first = (prompt for prompts in (*data.train.datasets, data.validation) for prompt in islice(prompts, SAMPLED))
    return tuple(tuple(prompt.token_ids.tolist()) for prompt in islice(first, SAMPLED))


def _environments(data: RolloutData) -> frozenset[str]:
    return frozenset(prompt.environment for prompts in (*data.train.datasets, data.validation) for prompt in prompts)


def steps_of(config: RolloutRoot, components: Components, run: Run, *, with_greedy: bool = False) -> RolloutSteps:
    """The steps of the loop.

    Args:
        config: Resolved config of the run.
        components: Objects of the run, with its rollout pool and weights.
        run: Run that records the steps.
        with_greedy: True if each also has a greedy rollout of every prompt.
    """
    assert components.pool is not None, "the algorithm's plugin says that it generates"
    assert components.weights is not None, "the algorithm's plugin says that it generates"
    data: RolloutData = components.data
    greedy = replace(training_sampling(config.policy.generation, data.stop_token_ids), temperature=0.0)
    return RolloutSteps(
        rollout_config(config),
        source_of(config, data, components.pool),
        components.weights,
        validation_of(config, data),
        run,
        greedy if with_greedy else None,
        None if components.evaluation is None else TaskEvaluation(components.evaluation, config.eval),
        mixture_of(config, data),
        components.opponents,
        _drafter(config, components),
    )


def _drafter(config: RolloutRoot, components: Components) -> Drafter | None:
    section, head = drafter_section(config), config.policy.draft_head
    if section is not None:
        return Drafter(components.models[DRAFTER], section.train_global_batch_size)
    if head is None:
        return None
    rows, loss = config.policy.train_global_batch_size, DraftLoss(head.num_tokens)
    return Drafter(components.models[DRAFTER], rows, loss, "policy.draft_head")


def mixture_of(config: RolloutRoot, data: RolloutData) -> Mixture | None:
    """The datasets of a run that learns from the rewards on several; None for others."""
    settings = rollout_config(config)
    if len(data.train.datasets) == 1 or not isinstance(settings, PolicyGradientConfig):
        return None
    names = [prompts[0].dataset for prompts in data.train.datasets]
    return Mixture(data.train, names, settings.curriculum if settings.curriculum.enabled else None)


def source_of(config: RolloutRoot, data: RolloutData, pool: RolloutPool) -> PacedRolloutSource:
    """The source that the loop collects from."""
    settings = rollout_config(config)
    return PacedRolloutSource(
        pool,
        data.train,
        sampling=training_sampling(config.policy.generation, data.stop_token_ids),
        num_generations=settings.num_generations_per_prompt,
        seed=settings.seed,
        max_staleness=settings.max_staleness,
        in_flight=settings.updates_in_flight,
        prompts_per_step=settings.num_prompts_per_step,
        max_failed_share=settings.max_failed_share,
        section=settings.section,
    )


def validation_of(config: RolloutRoot, data: RolloutData) -> Validation:
    """The validation of the run."""
    sampling = validation_sampling(config.policy.generation, data.stop_token_ids)
    return Validation(data.validation, sampling, rollout_config(config))


def training_sampling(generation: GenerationConfig, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """How training rollouts are drawn."""
    return SamplingParams(
        max_new_tokens=generation.max_new_tokens,
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k or 0,
        min_p=generation.min_p,
        stop_token_ids=(*stop_token_ids, *generation.stop_token_ids),
        stop_strings=tuple(generation.stop_strings),
    )


def validation_sampling(generation: GenerationConfig, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """How validation rollouts are drawn."""
    return SamplingParams(
        max_new_tokens=generation.max_new_tokens,
        temperature=generation.val_temperature,
        top_p=generation.val_top_p,
        top_k=generation.val_top_k or 0,
        stop_token_ids=(*stop_token_ids, *generation.stop_token_ids),
        stop_strings=tuple(generation.stop_strings),
    )
