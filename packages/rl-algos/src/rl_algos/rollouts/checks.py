"""Settings of rollouts, rewards and validation that contradict one another, or the rest of the config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rl_algos.data.config import dataset_names
from rl_algos.evaluation.config import EvaluationConfig
from rl_algos.evaluation.summary import powers_of_two
from rl_algos.evaluation.tasks import is_file
from rl_algos.rollouts.config import EvaluationRoot, PolicyGradientConfig, RolloutRoot, rollout_config
from rl_algos.rollouts.worker.programs import GIVEN, argument_problem, code_named, files_named, program_named
from rl_core.config import Problem, is_changed, show
from rl_core.environments.instance import problem_with
from rl_core.plugins import GENERATORS, names, plugin

WITHOUT_VALIDATION: Mapping[str, Any] = {
    "val_period": 0,
    "val_at_start": False,
    "val_at_end": False,
    "stop_at_validation_metric": None,
    "stop_at_validation_threshold": None,
}
"""Keys of a `RolloutConfig` that ask for validation, and the values that do not."""


def rollout_problems(config: RolloutRoot) -> Iterator[Problem]:
    """Problems of every algorithm that trains on its own rollouts."""
    yield from minibatch_problem(config, "policy.train_global_batch_size", config.policy.train_global_batch_size)
    yield from _sampling(config)
    yield from _ahead(config)
    yield from _curriculum(config)
    try:
        program_named(rollout_config(config).rollout_program)
    except ValueError as error:
        yield Problem(f"{rollout_config(config).section}.rollout_program", str(error))
    yield from _program_args(config)
    yield from _agent(config)
    yield from _validation(config)
    for key, dataset in config.data.sections():
        if dataset.env_name is not None and (problem := problem_with(dataset.env_name, config.env)):
            yield Problem(f"{key}.env_name", problem)


def _program_args(config: RolloutRoot) -> Iterator[Problem]:
    """Problems of the arguments of the rollout program."""
    settings = rollout_config(config)
    key, args = f"{settings.section}.rollout_program_args", settings.rollout_program_args
    if given := sorted(set(args) & set(GIVEN)):
        yield Problem(key, f"cannot give {', '.join(given)}, which other keys give", remedy="Remove them")
    elif problem := argument_problem(settings.rollout_program, args):
        yield Problem(key, problem, got=dict(args))


def _agent(config: RolloutRoot) -> Iterator[Problem]:
    """Problems of the agent that plays the rollouts."""
    settings = rollout_config(config)
    agent, key = settings.agent, f"{settings.section}.agent"
    if agent is None:
        return
    if agent.run is not None:
        try:
            code_named(agent.run)
        except ValueError as error:
            yield Problem(f"{key}.run", str(error), got=agent.run)
    try:
        files_named(agent.files)
    except ValueError as error:
        yield Problem(f"{key}.files", str(error), got=agent.files)
    if agent.place == "environment" and is_changed(agent, "grace_s"):
        yield Problem.unused(f"{key}.grace_s", f"with {key}.place=environment: the environment ends agents at once")
    for name in ("env", "grace_s"):
        if agent.external and is_changed(agent, name):
            yield Problem.unused(f"{key}.{name}", f"with {key}.external=true")
    for name in ("rollout_program", "rollout_program_args", "max_rollout_turns"):
        if is_changed(settings, name):
            yield Problem.unused(f"{settings.section}.{name}", f"with {key}", remedy=f"Remove it, or {key}")


def evaluation_problems(config: EvaluationRoot) -> Iterator[Problem]:
    """Settings of `eval` that contradict one another."""
    settings = config.eval
    yield from _task_defaults(settings)
    count = settings.num_samples
    for k in settings.k:
        if k < 1 or (count is not None and k > count):
            allowed = "int > 0" if count is None else f"int from 1 to eval.num_samples ({count})"
            yield Problem("eval.k", got=k, allowed=allowed)
    temperature = settings.temperature
    if temperature is None:
        temperature = config.policy.generation.val_temperature
    if count is not None and count > 1 and temperature == 0:
        yield Problem(
            "eval.num_samples",
            "is of no use with greedy sampling: all samples of a prompt are equal",
            got=count,
            remedy="Set eval.temperature above 0, such as 0.8",
        )


def _task_defaults(settings: EvaluationConfig) -> Iterator[Problem]:
    """Settings of tasks that are files, without any, or that files do not have."""
    given = [key for key, value in settings.default if value is not None]
    if given and not any(isinstance(task, str) and is_file(task) for task in settings.tasks):
        yield Problem.unused(
            f"eval.default.{given[0]}",
            "without a file among eval.tasks, such as problems.jsonl",
            remedy="Remove this key, or set it in the `dataset` of a task",
        )
    elif settings.default.subset is not None:
        yield Problem.unused("eval.default.subset", "on files: only datasets on the hub have subsets")


def task_problems(config: RolloutRoot) -> Iterator[Problem]:
    """Problems of evaluation tasks that a run scores while it trains: one source rolls out all that it asks for."""
    settings, rollouts = config.eval, rollout_config(config)
    if not settings.in_training:
        return
    if not settings.tasks:
        yield Problem(
            "eval.tasks",
            "must not be empty, because `eval` requests evaluation during training",
            got=settings.tasks,
            remedy=f"Add tasks, such as gsm8k. To score the validation data instead, use {rollouts.section}.val_period",
        )
    if settings.max_turns not in (None, rollouts.max_rollout_turns):
        yield Problem(
            "eval.max_turns",
            f"cannot differ from {rollouts.section}.max_rollout_turns ({rollouts.max_rollout_turns}) in a run that "
            "trains",
            got=settings.max_turns,
            remedy="Remove this key",
        )
    if settings.seed not in (None, rollouts.seed):
        yield Problem(
            "eval.seed",
            f"cannot differ from {rollouts.section}.seed ({rollouts.seed}) in a run that trains",
            got=settings.seed,
            remedy="Remove this key",
        )


def reward_problems(algorithm: PolicyGradientConfig) -> Iterator[Problem]:
    """Problems of every algorithm that learns from rewards."""
    if algorithm.batch_multiplier != 1 and not algorithm.use_dynamic_sampling:
        yield Problem.unused(f"{algorithm.section}.batch_multiplier", "without use_dynamic_sampling=true")
    scaling = algorithm.reward_scaling
    if scaling.enabled and scaling.source_max <= scaling.source_min:
        yield Problem(
            f"{algorithm.section}.reward_scaling.source_max",
            f"must be greater than source_min ({scaling.source_min})",
            got=scaling.source_max,
        )


def filter_problems(config: RolloutRoot, reader: str, *, remedy: str) -> Iterator[Problem]:
    """Yield problems of sampling from some tokens only, for a loss that reads the distribution over all of them.

    Args:
        config: Resolved config of the run.
        reader: What reads that distribution, as a clause.
        remedy: What to do, as a sentence.
    """
    generation = config.policy.generation
    for key, is_set in (("top_p", generation.top_p != 1), ("top_k", generation.top_k), ("min_p", generation.min_p)):
        if is_set:
            yield Problem(
                f"policy.generation.{key}",
                f"limits sampling to some tokens, but {reader}",
                got=getattr(generation, key),
                remedy=remedy,
            )


def whole_distribution(config: RolloutRoot) -> Iterator[Problem]:
    """Yield problems of sampling from some tokens only, for an algorithm that trains on the distribution over all."""
    reader = "this algorithm trains on the distribution over all tokens"
    yield from filter_problems(config, reader, remedy="Remove this key")


def validation_metrics(config: RolloutRoot) -> list[str]:
    """Names of the metrics that a validation may record, with `*` for those that environments name; none if the run
    does not validate.
    """
    if not rollout_config(config).validates:
        return []
    names = sorted(set(dataset_names(config.data.validation_datasets, "validation")))
    by_dataset = [f"val/{name}/{kind}" for name in names for kind in ("reward", "accuracy")] if len(names) > 1 else []
    samples = rollout_config(config).val_num_generations_per_prompt
    several = ["val/reward_std", *(f"val/pass@{k}" for k in powers_of_two(samples))] if samples > 1 else []
    of_agents = ["val/agent/*", "val/opponent/*"]
    return ["val/reward", "val/reward/*", "val/accuracy", "val/mean_length", *of_agents, *several, *by_dataset]


def minibatch_problem(config: RolloutRoot, key: str, rows: int) -> Iterator[Problem]:
    """The problem of a number of rows per optimizer step that does not divide the rollouts of a step.

    Args:
        config: Resolved config of the run.
        key: Key of the number of rows.
        rows: Number of rows per optimizer step.
    """
    rollouts = rollout_config(config)
    if rollouts.rollouts_per_step % rows:
        yield Problem(
            key,
            f"must divide the {rollouts.rollouts_per_step} rollouts of a step "
            f"({rollouts.section}.num_prompts_per_step {rollouts.num_prompts_per_step} x "
            f"{rollouts.section}.num_generations_per_prompt {rollouts.num_generations_per_prompt})",
            got=rows,
        )


def length_problem(config: RolloutRoot, section: str, length: int) -> Iterator[Problem]:
    """The problem of a model that reads the policy's rollouts and is too short for them.

    Args:
        config: Resolved config of the run.
        section: Key of the model's section.
        length: Its `max_total_sequence_length`.
    """
    longest = config.policy.max_total_sequence_length
    if length < longest:
        yield Problem(
            f"{section}.max_total_sequence_length",
            f"must be at least policy.max_total_sequence_length ({longest}), because this model reads the policy's "
            "rollouts",
            got=length,
            remedy=f"Set it to {longest}",
        )


def _sampling(config: RolloutRoot) -> Iterator[Problem]:
    generation = config.policy.generation
    if generation.max_new_tokens >= config.policy.max_total_sequence_length:
        yield Problem(
            "policy.generation.max_new_tokens",
            f"must be less than policy.max_total_sequence_length ({config.policy.max_total_sequence_length}), which "
            "includes the prompt",
            got=generation.max_new_tokens,
        )


def _ahead(config: RolloutRoot) -> Iterator[Problem]:
    """Problems of rolling out ahead of training."""
    rollouts = rollout_config(config)
    section, settings = f"{rollouts.section}.async_grpo", rollouts.async_grpo
    default = type(settings).model_fields["max_trajectory_age_steps"].default
    if not settings.enabled and settings.max_trajectory_age_steps != default:
        yield Problem.unused(f"{section}.max_trajectory_age_steps", f"without {section}.enabled=true")
    if settings.in_flight_weight_updates and not rollouts.max_staleness:
        yield Problem.unused(
            f"{section}.in_flight_weight_updates",
            "in a synchronous run, because no completion is in progress when the weights change",
            remedy=f"Remove this key, or set {section}.enabled=true and max_trajectory_age_steps above 0",
        )
    if not settings.recompute_kv_cache_after_weight_updates:
        yield from _kept_cache(config, f"{section}.recompute_kv_cache_after_weight_updates")
    if rollouts.max_staleness and config.policy.generation.colocated.enabled:
        yield Problem(
            f"{section}.enabled",
            "needs separate devices for generation, because generation on the policy's devices stops while the policy "
            "trains",
            got=settings.enabled,
            remedy="Set policy.generation.colocated.enabled=false and policy.generation.colocated.resources, or set "
            f"{section}.enabled=false",
        )


def _kept_cache(config: RolloutRoot, key: str) -> Iterator[Problem]:
    """Yield the reason that keys and values cannot be kept over a weight update."""
    rollouts, generation = rollout_config(config), config.policy.generation
    known = generation.backend in names(GENERATORS)
    if not rollouts.updates_in_flight:
        yield Problem.unused(key, f"without {rollouts.section}.async_grpo.in_flight_weight_updates=true")
    elif generation.lora_sync == "adapter":
        yield Problem.unused(
            key,
            "with policy.generation.lora_sync=adapter, because the engine caches keys and values per adapter and would "
            "recompute them",
            remedy="Set policy.generation.lora_sync=merged, or remove this key",
        )
    elif known and not plugin(GENERATORS, generation.backend).keeps_cache:
        yield Problem(
            key,
            f"is not supported by {generation.backend}, which recomputes the keys and values of an interrupted request",
            got=False,
            remedy="Set policy.generation.backend=vllm, or remove this key",
        )


def _curriculum(config: RolloutRoot) -> Iterator[Problem]:
    """Problems of weights that follow success."""
    rollouts = rollout_config(config)
    if not isinstance(rollouts, PolicyGradientConfig):
        return
    section, settings = f"{rollouts.section}.curriculum", rollouts.curriculum
    if not settings.enabled:
        for key in ("success_reward", "window", "floor"):
            if is_changed(settings, key):
                yield Problem.unused(f"{section}.{key}", f"without {section}.enabled=true")
    elif len(config.data.train_datasets) == 1:
        yield Problem(
            f"{section}.enabled",
            "needs several training datasets to choose from, but there is 1",
            got=settings.enabled,
            remedy="List several in data.train (such as one per level of difficulty), or select rows with "
            "data.train.pass_rate",
        )


def _validation(config: RolloutRoot) -> Iterator[Problem]:
    rollouts = rollout_config(config)
    metric = f"{rollouts.section}.stop_at_validation_metric"
    if (rollouts.stop_at_validation_metric is None) != (rollouts.stop_at_validation_threshold is None):
        yield Problem(metric, "must be set together with stop_at_validation_threshold", remedy="Set both or neither")
    if rollouts.stop_at_validation_metric not in (None, *rollouts.validation_goals):
        yield Problem(metric, got=rollouts.stop_at_validation_metric, allowed=" or ".join(rollouts.validation_goals))
    if config.data.validation_datasets:
        return
    for name in ("val_period", "val_at_start", "val_at_end"):
        if getattr(rollouts, name):
            off = show(WITHOUT_VALIDATION[name])
            yield Problem(
                f"{rollouts.section}.{name}",
                "needs validation data, and there is none",
                got=getattr(rollouts, name),
                remedy=f"Set data.validation, or set this to {off}",
            )
