"""Plugins of algorithms with rollouts: those that train on them, and the evaluation of a model without a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from rl_algos.data.config import DataConfig
from rl_algos.evaluation.config import EvaluationConfig
from rl_algos.judges.config import (
    JUDGES,
    MODELS,
    JudgesConfig,
    JudgesRoot,
    RewardModelJudgeConfig,
    judge_problems,
    judge_role,
    judge_sections,
    judge_type,
)
from rl_algos.judges.needs import fixed_judges, has_generators
from rl_algos.requirement import GRAMMARS, LOSSES
from rl_algos.rollouts import checks as of_rollouts
from rl_algos.rollouts.config import DRAFTER, EvaluationRoot, RolloutRoot, drafter_section
from rl_core.config import Config, Problem, ProblemError, assemble
from rl_core.model import ModelSpec
from rl_core.plugins import (
    AlgorithmPlugin,
    ModelNeed,
    Requirement,
    TrainingDefaults,
    WrittenValues,
    no_defaults,
    no_models,
    nothing_further,
)


def rollout_algorithm(
    name: str,
    *,
    sections: Mapping[str, type[Config] | Callable[[Any], type[Config]]],
    implementation: str,
    models: Callable[[Any], Mapping[str, ModelNeed]],
    training_defaults: Callable[[WrittenValues], Mapping[str, TrainingDefaults]] = no_defaults,
    model_sections: tuple[str, ...] = ("policy",),
    optional_models: tuple[str, ...] = (),
    requirements: tuple[Requirement, ...] = (),
    further: Callable[[Any], tuple[Requirement, ...]] = nothing_further,
    reads_filtered: bool = False,
    checks: tuple[Callable[[Any], Iterable[Problem]], ...] = (),
    further_models: Callable[[Any], Mapping[str, str]] = no_models,
    further_metrics: Callable[[Any], Iterable[str]] = lambda config: (),
) -> AlgorithmPlugin:
    """Return a plugin that loads prompts, rolls them out with `MultiTurnProgram`, validates and evaluates as all such
    algorithms do.

    Args:
        name: Name of the algorithm.
        sections: Sections of the config except `data`, `eval` and `judges`; the first extends
            `rl_algos.rollouts.config.RolloutConfig`.
        implementation: A `rl_algos.rollouts.algorithm.RolloutAlgorithm`.
        models: See `AlgorithmPlugin`.
        training_defaults: See `AlgorithmPlugin`.
        model_sections: See `AlgorithmPlugin`.
        optional_models: See `AlgorithmPlugin`; every such algorithm also has a drafter and judges.
        requirements: Requirements in addition to rl-algos itself.
        further: See `AlgorithmPlugin`.
        reads_filtered: True if its loss reads logprobs of the tokens that `top_p`, `top_k` and `min_p` of generation
            keep (`Read.token_filter`), or does not compare with the distribution that was sampled from; otherwise these
            are refused.
        checks: Checks after the checks of rollouts, validation and environments.
        further_models: See `AlgorithmPlugin`.
        further_metrics: Function from the resolved config to metrics that its validation records in addition.
    """
    key = next(iter(sections), name)

    def all_models(config: RolloutRoot) -> Mapping[str, ModelNeed]:
        found = {**models(config), **judge_models(config)}
        if drafter_section(config) is not None:
            found[DRAFTER] = ModelNeed(DRAFTER, ModelSpec(seed=getattr(config, key).seed), exported=True)
        return found

    def all_defaults(written: WrittenValues) -> Mapping[str, TrainingDefaults]:
        own = training_defaults(written)
        if "policy" not in own or not isinstance(written(DRAFTER), Mapping):
            return own
        # A drafter has as many updates as the policy, with a larger learning rate, because the policy moves.
        return {**own, DRAFTER: TrainingDefaults(lr=1e-5, adapter_lr=1e-4, rows=own["policy"].rows)}

    def all_further(config: RolloutRoot) -> tuple[Requirement, ...]:
        is_constrained = getattr(config, key).structured_output == "constrain" or has_generators(config)
        return (*further(config), GRAMMARS) if is_constrained else further(config)

    def metrics(config: RolloutRoot) -> list[str]:
        names = of_rollouts.validation_metrics(getattr(config, key), config.data)
        return [*names, *further_metrics(config)] if names else []

    def problems(config: RolloutRoot) -> Iterator[Problem]:
        settings, drafter = getattr(config, key), drafter_section(config)
        yield from of_rollouts.rollout_problems(config, settings)
        yield from of_rollouts.evaluation_problems(config)
        yield from of_rollouts.thinking_problems(config)
        yield from of_rollouts.task_problems(config.eval, settings)
        yield from judge_problems(config)
        if drafter is not None:
            rows, length = drafter.train_global_batch_size, drafter.max_total_sequence_length
            yield from of_rollouts.minibatch_problem(settings, f"{DRAFTER}.train_global_batch_size", rows)
            yield from of_rollouts.length_problem(config.policy, DRAFTER, length)

    return AlgorithmPlugin(
        name=name,
        sections={**sections, "data": DataConfig, "eval": EvaluationConfig, JUDGES: judges_section},
        implementation=implementation,
        generates=True,
        evaluates=True,
        models=all_models,
        model_sections=model_sections,
        optional_models=(*optional_models, DRAFTER, MODELS),
        training_defaults=all_defaults,
        requirements=(LOSSES, *requirements),
        further=all_further,
        validation_metrics=metrics,
        without_validation={f"{key}.{asked}": value for asked, value in of_rollouts.WITHOUT_VALIDATION.items()},
        evaluates_in_training=lambda config: config.eval.in_training,
        checks=(problems, *(() if reads_filtered else (of_rollouts.whole_distribution,)), *checks),
        further_models=lambda config: {**further_models(config), **fixed_judges(config)},
    )


def sections_by_name(
    written: Any, key: str, base: type[Config], section: Callable[[str, Any], type[Config]], *, remedy: str = ""
) -> type[Config]:
    """Return the type of a section whose keys are names that the user chooses: a section for each that is written.

    Args:
        written: Plain value of the section around, as the user wrote it.
        key: Key of the section: the plural of the things that have these names.
        base: Type of the section without a name.
        section: Function from a name and the plain value of its section to the type of this section.
        remedy: Sentence about what to do with a name that cannot be a key.

    Raises:
        ProblemError: If a name cannot be a key.
    """
    named = written.get(key) if isinstance(written, Mapping) else None
    if not isinstance(named, Mapping):
        return base
    kinds: dict[str, type[Config]] = {}
    for name, settings in named.items():
        if not isinstance(name, str) or not name.isidentifier():
            article = "an" if key[0] in "aeiou" else "a"
            reason = f"has a key that cannot be the name of {article} {key.removesuffix('s')}"
            allowed = "letters, digits and underscores, not a digit first"
            raise ProblemError(Problem(key, reason, got=name, allowed=allowed, remedy=remedy))
        kinds[name] = section(name, settings)
    return assemble(base.__name__.removesuffix("Config"), kinds, base=base)


def judge_models(config: JudgesRoot) -> dict[str, ModelNeed]:
    """Return the judges of a resolved config that are reward models, by role. They do not train."""
    spec = ModelSpec(role="reward_model", trains=False)
    judges = judge_sections(config).items()
    return {
        judge_role(name): ModelNeed(f"{JUDGES}.{name}", spec)
        for name, judge in judges
        if isinstance(judge, RewardModelJudgeConfig)
    }


def judges_section(written: Any) -> type[Config]:
    """Return the type of `judges`, with a section for each judge that is written there."""
    try:
        return sections_by_name({JUDGES: written}, JUDGES, JudgesConfig, judge_type)
    except ProblemError as error:
        raise ProblemError(*(each.at(each.key.removeprefix(JUDGES)) for each in error.problems)) from None


def with_tasks(plugin: AlgorithmPlugin) -> AlgorithmPlugin:
    """Return the declaration of the runs of an algorithm without rollouts that score tasks as they train: the policy
    generates, and its weights are published to engines before each evaluation.

    Args:
        plugin: Declaration of its runs without tasks. Its implementation extends
            `rl_algos.supervised.algorithm.SupervisedAlgorithm`.
    """

    def further(config: Any) -> tuple[Requirement, ...]:
        return (*plugin.further(config), GRAMMARS) if has_generators(config) else plugin.further(config)

    return replace(
        plugin,
        with_tasks=None,
        sections={**plugin.sections, "eval": EvaluationConfig, JUDGES: judges_section},
        generates=True,
        evaluates=True,
        evaluates_in_training=lambda config: config.eval.in_training,
        models=lambda config: {**plugin.models(config), **judge_models(config)},
        optional_models=(*plugin.optional_models, MODELS),
        further=further,
        further_models=fixed_judges,
        checks=(
            *plugin.checks,
            of_rollouts.evaluation_problems,
            of_rollouts.thinking_problems,
            of_rollouts.engine_problems,
            judge_problems,
        ),
    )


def training_problems(config: EvaluationRoot) -> Iterator[Problem]:
    """Yield keys that are for runs that train."""
    for key in ("period", "at_start", "at_end"):
        if getattr(config.eval, key):
            yield Problem.unused(f"eval.{key}", "because this run does not train")


EVALUATION = AlgorithmPlugin(
    name="evaluation",
    sections={"eval": EvaluationConfig, JUDGES: judges_section},
    implementation="rl_algos.rollouts.algorithm:EvaluationOnly",
    generates=True,
    trains=False,
    evaluates=True,
    models=judge_models,
    optional_models=(MODELS,),
    further=lambda config: (GRAMMARS,) if has_generators(config) else (),
    further_models=fixed_judges,
    checks=(of_rollouts.evaluation_problems, of_rollouts.thinking_problems, training_problems, judge_problems),
)
