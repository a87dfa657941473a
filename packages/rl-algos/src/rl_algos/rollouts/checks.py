"""Settings of rollouts, rewards and validation that contradict one another, or the rest of the config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rl_algos.data.config import DataConfig, dataset_names
from rl_algos.evaluation.config import EvaluationConfig
from rl_algos.evaluation.summary import powers_of_two
from rl_algos.evaluation.tasks import is_file
from rl_algos.rollouts.config import (
    COMPACTION_PROGRAM,
    EvaluationRoot,
    GeneratingPolicy,
    PolicyGradientConfig,
    RolloutConfig,
    RolloutRoot,
    rollout_config,
)
from rl_algos.rollouts.worker.programs import (
    GIVEN,
    POLICY,
    RECENT,
    argument_problem,
    code_named,
    files_named,
    program_named,
)
from rl_core.config import Problem, is_changed, show
from rl_core.environments.instance import problem_with
from rl_core.model_config import GenerationConfig
from rl_core.plugins import GENERATORS, names, plugin
from rl_core.rollouts.thoughts import THOUGHTS

WITHOUT_VALIDATION: Mapping[str, Any] = {
    "val_period": 0,
    "val_at_start": False,
    "val_at_end": False,
    "stop_at_validation_metric": None,
    "stop_at_validation_threshold": None,
}
"""Keys of a `RolloutConfig` that ask for validation, and the values that do not."""


def rollout_problems(config: RolloutRoot, settings: RolloutConfig) -> Iterator[Problem]:
    """Yield problems of every algorithm that trains on its own rollouts.

    Args:
        config: Resolved config of the run.
        settings: Section of the algorithm.
    """
    policy, generation = config.policy, config.policy.generation
    yield from minibatch_problem(settings, "policy.train_global_batch_size", policy.train_global_batch_size)
    if generation.max_new_tokens >= policy.max_total_sequence_length:
        limit = f"policy.max_total_sequence_length ({policy.max_total_sequence_length}), which includes the prompt"
        yield Problem("policy.generation.max_new_tokens", f"must be less than {limit}", got=generation.max_new_tokens)
    if generation.exact and not isinstance(settings, PolicyGradientConfig):
        reason = f"is compared with logprobs before the update, which {settings.section} does not read"
        yield Problem("policy.generation.exact", reason, got=True, remedy="Use GRPO or PPO, or remove this key")
    yield from _ahead(settings, generation)
    if isinstance(settings, PolicyGradientConfig):
        section, curriculum = f"{settings.section}.curriculum", settings.curriculum
        for key in () if curriculum.enabled else ("by", "success_reward", "window", "half_life", "floor"):
            if is_changed(curriculum, key):
                yield Problem.unused(f"{section}.{key}", f"without {section}.enabled=true")
        unread = "window" if curriculum.by == "prompt" else "half_life"
        if curriculum.enabled and is_changed(curriculum, unread):
            yield Problem.unused(f"{section}.{unread}", f"with {section}.by={curriculum.by}")
        if curriculum.enabled and curriculum.by == "dataset" and len(config.data.train_datasets) == 1:
            reason = "needs several training datasets to choose from, but there is 1"
            remedy = f"List several in data.train (such as one per level of difficulty), or set {section}.by=prompt"
            yield Problem(f"{section}.enabled", reason, got=True, remedy=remedy)
        if curriculum.enabled and curriculum.by == "prompt" and any(d.streaming for d in config.data.train_datasets):
            reason = "needs every prompt at hand, but `streaming` reads them one by one"
            remedy = f"Turn `streaming` off, or set {section}.by=dataset"
            yield Problem(f"{section}.by", reason, got="prompt", remedy=remedy)
    try:
        program_named(settings.rollout_program)
    except ValueError as error:
        yield Problem(f"{settings.section}.rollout_program", str(error))
    key, args = f"{settings.section}.rollout_program_args", settings.rollout_program_args
    if given := sorted(set(args) & set(GIVEN)):
        yield Problem(key, f"cannot give {', '.join(given)}, which other keys give", remedy="Remove them")
    elif problem := argument_problem(settings.rollout_program, args):
        yield Problem(key, problem, got=dict(args))
    elif settings.rollout_program == COMPACTION_PROGRAM:
        yield from _compaction(settings, policy.max_total_sequence_length, generation.max_new_tokens)
    yield from _agent(settings)
    yield from _users(settings, config)
    if settings.structured_output == "constrain" and generation.thinking_budget is not None:
        reason = "appends tokens that the grammar of a constrained turn may not allow"
        remedy = f"Remove this key, or set {settings.section}.structured_output to ignore"
        yield Problem("policy.generation.thinking_budget", reason, got=generation.thinking_budget, remedy=remedy)
    yield from _demonstrated(settings)
    yield from _validation(settings, config.data)
    for key, dataset in config.data.sections():
        if dataset.env_name is not None and (problem := problem_with(dataset.env_name, config.env)):
            yield Problem(f"{key}.env_name", problem)


def _demonstrated(settings: RolloutConfig) -> Iterator[Problem]:
    """Yield problems of rollouts that take the response in their row: it is one completion, written beforehand."""
    if not settings.demonstrated_share:
        return
    reason = "cannot be combined with rollouts that are demonstrations, each of which is the single turn of its row"
    remedy = "Remove this key, or sample all rollouts"
    if settings.agent is not None:
        yield Problem(f"{settings.section}.agent", reason, remedy=remedy)
    for name in ("max_rollout_turns", "rollout_program"):
        if is_changed(settings, name):
            yield Problem(f"{settings.section}.{name}", reason, got=getattr(settings, name), remedy=remedy)


def _compaction(settings: RolloutConfig, max_tokens: int, max_new_tokens: int) -> Iterator[Problem]:
    """Yield problems of conversations that are summarised when they become long."""
    section, args = settings.section, settings.rollout_program_args
    summariser, at = args.get("summariser", POLICY), args.get("compact_at")
    if settings.max_rollout_turns == 1:
        because = "with the program compaction, which summarises earlier turns"
        yield Problem(f"{section}.max_rollout_turns", f"must be above 1 {because}", got=1)
    if summariser not in (POLICY, RECENT) and summariser not in settings.fixed_agents:
        reason = f"{summariser!r} is neither {POLICY} nor {RECENT}, nor an agent that is an opponent in every play"
        remedy = f"Set {section}.agents.{summariser}.opponent.model_name to a model that summarises (in GRPO)"
        yield Problem(f"{section}.rollout_program_args.summariser", reason, remedy=remedy)
    summary = 0 if summariser == RECENT else args.get("summary_tokens") or max_new_tokens
    if (at or max_new_tokens) + summary >= max_tokens:
        what = f"compact_at ({at})" if at else f"a turn (policy.generation.max_new_tokens, {max_new_tokens})"
        reason = f"{what} and a summary ({summary} tokens) do not fit into policy.max_total_sequence_length"
        remedy = "Lower compact_at, summary_tokens or policy.generation.max_new_tokens"
        yield Problem(f"{section}.rollout_program_args", f"{reason} ({max_tokens})", remedy=remedy)


def _agent(settings: RolloutConfig) -> Iterator[Problem]:
    """Yield problems of the agent that plays the rollouts."""
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


def _users(settings: RolloutConfig, config: RolloutRoot) -> Iterator[Problem]:
    """Yield problems of learning from users, whose conversations come when they come."""
    agent, section, data = settings.agent, settings.section, config.data
    if agent is None or agent.live is None:
        if not data.train_datasets and agent is not None and agent.external:
            reason = "must not be empty, because external agents take its prompts"
            yield Problem("data.train", reason, got=[], remedy=f"Add a dataset, or set {section}.agent.live")
        return
    key = f"{section}.agent.live"
    if not settings.learns_from_users:
        yield Problem(key, "is for algorithm: grpo, whose estimators include ones for single rollouts")
        return
    if data.train_datasets:
        remedy = "Set data.train=[], or remove the key agent.live"
        yield Problem("data.train", f"is unused with {key}: prompts come from users", remedy=remedy)
    if not settings.async_grpo.enabled:
        reason = f"must be true with {key}: otherwise users would wait while the policy trains"
        yield Problem(f"{section}.async_grpo.enabled", reason, got=False)
    if settings.max_rollout_s is not None:
        reason = f"has no meaning with {key}, whose rollouts wait for users"
        yield Problem(f"{section}.max_rollout_s", reason, remedy=f"Remove it; see {key}.deadline_s")
    unused = ("over_sampling_ratio", "max_num_epochs", "use_dynamic_sampling")
    for name in unused:
        if is_changed(settings, name):
            reason = f"is for prompts of a dataset, but {key} learns from users"
            yield Problem(f"{section}.{name}", reason, got=getattr(settings, name), remedy="Remove this key")
    if settings.async_grpo.sampler is not None:
        yield Problem.unused(f"{section}.async_grpo.sampler", f"with {key}: conversations train in the order they end")
    if isinstance(settings, PolicyGradientConfig) and settings.curriculum.enabled:
        reason = "chooses prompts of a dataset, but users choose theirs"
        yield Problem(f"{section}.curriculum.enabled", reason, got=True)
    canary = agent.live.canary
    if not canary.enabled:
        for name in ("max_drop", "num_prompts"):
            if is_changed(canary, name):
                yield Problem.unused(f"{key}.canary.{name}", f"without {key}.canary.enabled=true")
        return
    if not data.validation_datasets:
        reason = "scores new weights on the prompts of data.validation, and there are none"
        yield Problem(f"{key}.canary.enabled", reason, got=True, remedy="Add data.validation with its environment")
    saving = getattr(config, "checkpointing", None)
    if saving is not None and saving.async_save:
        reason = f"cannot be combined with {key}.canary, which saves the policy at the same time"
        yield Problem("checkpointing.async_save", reason, got=True, remedy="Remove one of the two")


def evaluation_problems(config: EvaluationRoot) -> Iterator[Problem]:
    """Yield settings of `eval` that contradict one another."""
    settings, count = config.eval, config.eval.num_samples
    given = [key for key, value in settings.default if value is not None]
    if given and not any(isinstance(task, str) and is_file(task) for task in settings.tasks):
        because = "without a file among eval.tasks, such as problems.jsonl"
        remedy = "Remove this key, or set it in the `dataset` of a task"
        yield Problem.unused(f"eval.default.{given[0]}", because, remedy=remedy)
    elif settings.default.subset is not None:
        yield Problem.unused("eval.default.subset", "on files: only datasets on the hub have subsets")
    for k in settings.k:
        if k < 1 or (count is not None and k > count):
            allowed = "int > 0" if count is None else f"int from 1 to eval.num_samples ({count})"
            yield Problem("eval.k", got=k, allowed=allowed)
    temperature = settings.temperature
    if temperature is None:
        temperature = config.policy.generation.val_temperature
    if count is not None and count > 1 and temperature == 0:
        reason = "is of no use with greedy sampling: all samples of a prompt are equal"
        yield Problem("eval.num_samples", reason, got=count, remedy="Set eval.temperature above 0, such as 0.8")


def task_problems(settings: EvaluationConfig, rollouts: RolloutConfig) -> Iterator[Problem]:
    """Yield problems of evaluation tasks that a run scores while it trains. The source of the run rolls them out, so
    they have its turns and seed.

    Args:
        settings: Section `eval`.
        rollouts: Section of the algorithm.
    """
    if not settings.in_training:
        return
    if not settings.tasks:
        reason = "must not be empty, because `eval` requests evaluation during training"
        remedy = f"Add tasks, such as gsm8k. To score the validation data instead, use {rollouts.section}.val_period"
        yield Problem("eval.tasks", reason, got=settings.tasks, remedy=remedy)
    pairs = {"max_turns": "max_rollout_turns", "seed": "seed"}
    for key, other in pairs.items():
        given, own = getattr(settings, key), getattr(rollouts, other)
        if given not in (None, own):
            reason = f"cannot differ from {rollouts.section}.{other} ({own}) in a run that trains"
            yield Problem(f"eval.{key}", reason, got=given, remedy="Remove this key")


def engine_problems(config: EvaluationRoot) -> Iterator[Problem]:
    """Yield problems of a run that generates only to score tasks."""
    settings = config.eval
    if not settings.in_training:
        reason = "must be set, because the section `eval` is for tasks that are scored as a run trains"
        remedy = "Set it, eval.at_start or eval.at_end. To score a model or a run now, use rl eval without this section"
        yield Problem("eval.period", reason, remedy=remedy)
    elif not settings.tasks:
        reason = "must not be empty, because `eval` requests evaluation during training"
        yield Problem("eval.tasks", reason, got=settings.tasks, remedy="Add tasks, such as gsm8k")


def reward_problems(algorithm: PolicyGradientConfig, *, by_turn: str = "") -> Iterator[Problem]:
    """Yield problems of every algorithm that learns from rewards.

    Args:
        algorithm: Section of the algorithm.
        by_turn: Setting with which the rewards of turns are trained on; empty without one.
    """
    section, scaling = algorithm.section, algorithm.reward_scaling
    if algorithm.batch_multiplier != 1 and not algorithm.use_dynamic_sampling:
        yield Problem.unused(f"{section}.batch_multiplier", "without use_dynamic_sampling=true")
    if scaling.enabled and scaling.source_max <= scaling.source_min:
        reason = f"must be greater than source_min ({scaling.source_min})"
        yield Problem(f"{section}.reward_scaling.source_max", reason, got=scaling.source_max)
    if scaling.enabled and by_turn:
        reason = f"maps the reward of a whole rollout, but {by_turn} trains on the rewards of its turns"
        yield Problem(f"{section}.reward_scaling.enabled", reason, got=True, remedy="Scale rewards in the environment")


def filter_problems(
    generation: GenerationConfig, reader: str, *, remedy: str, rollouts: RolloutConfig | None = None
) -> Iterator[Problem]:
    """Yield problems of sampling from some tokens only, for a loss that reads the distribution over all of them.

    Args:
        generation: Section `policy.generation`.
        reader: Clause about the code that reads that distribution.
        remedy: Sentence about what to do.
        rollouts: Section of the algorithm; None if grammars may limit sampling.
    """
    if rollouts is not None and rollouts.structured_output == "constrain":
        reason = f"limits sampling to the tokens that a grammar allows, but {reader}"
        otherwise = "Set it to ignore or refuse" if remedy == "Remove this key" else remedy
        yield Problem(f"{rollouts.section}.structured_output", reason, got="constrain", remedy=otherwise)
    for key, is_set in (("top_p", generation.top_p != 1), ("top_k", generation.top_k), ("min_p", generation.min_p)):
        if is_set:
            reason = f"limits sampling to some tokens, but {reader}"
            yield Problem(f"policy.generation.{key}", reason, got=getattr(generation, key), remedy=remedy)


def whole_distribution(config: RolloutRoot) -> Iterator[Problem]:
    """Yield problems of sampling from some tokens only, for an algorithm that trains on the distribution over all."""
    reader = "this algorithm trains on the distribution over all tokens"
    rollouts = rollout_config(config)
    yield from filter_problems(config.policy.generation, reader, remedy="Remove this key", rollouts=rollouts)


def validation_metrics(settings: RolloutConfig, data: DataConfig) -> list[str]:
    """Return the metrics that a validation may record, with `*` in place of the parts that environments
    choose; none if the run does not validate.
    """
    if not settings.validates:
        return []
    names = sorted(set(dataset_names(data.validation_datasets, "validation")))
    by_dataset = [f"val/{name}/{kind}" for name in names for kind in ("reward", "accuracy")] if len(names) > 1 else []
    samples = settings.val_num_generations_per_prompt
    several = ["val/reward_std", *(f"val/pass@{k}" for k in powers_of_two(samples))] if samples > 1 else []
    of_agents = ["val/agent/*", "val/opponent/*"]
    return ["val/reward", "val/reward/*", "val/accuracy", "val/mean_length", *of_agents, *several, *by_dataset]


def thinking_problems(config: EvaluationRoot) -> Iterator[Problem]:
    """Yield settings of thoughts within a budget that contradict one another, or would not take effect."""
    generation, section = config.policy.generation, "policy.generation"
    budget, end = generation.thinking_budget, generation.thinking_end
    if budget is None:
        for key in ("thinking_budget_mode", "thinking_end"):
            if is_changed(generation, key):
                yield Problem.unused(f"{section}.{key}", f"without {section}.thinking_budget")
        return
    if budget >= generation.max_new_tokens:
        reason = f"must be less than {section}.max_new_tokens ({generation.max_new_tokens}), which ends the turn before"
        yield Problem(f"{section}.thinking_budget", reason, got=budget)
    if end is None:
        return
    if generation.thinking_budget_mode == "truncate":
        yield Problem.unused(f"{section}.thinking_end", f"with {section}.thinking_budget_mode=truncate")
    elif not any(mark in end for mark in THOUGHTS.values()):
        reason, remedy = "has no mark that ends thoughts", f"Add the mark of the model: {', '.join(THOUGHTS.values())}"
        yield Problem(f"{section}.thinking_end", reason, got=end, remedy=remedy)
    for stop in generation.stop_strings:
        if stop in end:
            reason = f"contains the stop string {stop!r}, but the policy is to answer after it"
            remedy = f"Remove the stop string, or set {section}.thinking_budget_mode=truncate"
            yield Problem(f"{section}.thinking_end", reason, got=end, remedy=remedy)


def minibatch_problem(settings: RolloutConfig, key: str, rows: int) -> Iterator[Problem]:
    """Yield the problem of a number of rows per optimizer step that does not divide the rollouts of a step.

    Args:
        settings: Section of the algorithm.
        key: Key of the number of rows.
        rows: Number of rows per optimizer step.
    """
    if settings.rollouts_per_step % rows:
        counts = ("num_prompts_per_step", "num_generations_per_prompt")
        product = " x ".join(f"{settings.section}.{name} {getattr(settings, name)}" for name in counts)
        yield Problem(key, f"must divide the {settings.rollouts_per_step} rollouts of a step ({product})", got=rows)


def length_problem(policy: GeneratingPolicy, section: str, length: int) -> Iterator[Problem]:
    """Yield the problem of a model that reads the policy's rollouts and is too short for them.

    Args:
        policy: Section `policy`.
        section: Key of the model's section.
        length: Its `max_total_sequence_length`.
    """
    longest = policy.max_total_sequence_length
    if length < longest:
        reason = f"must be at least policy.max_total_sequence_length ({longest}), because this model reads the policy's"
        key, remedy = f"{section}.max_total_sequence_length", f"Set it to {longest}"
        yield Problem(key, f"{reason} rollouts", got=length, remedy=remedy)


def _ahead(rollouts: RolloutConfig, generation: GenerationConfig) -> Iterator[Problem]:
    """Yield problems of rolling out ahead of training."""
    section, settings = f"{rollouts.section}.async_grpo", rollouts.async_grpo
    ratio = f"{rollouts.section}.over_sampling_ratio"
    without = f"without {section}.enabled=true or {ratio} above 1"
    if not (settings.enabled or rollouts.over_samples) and is_changed(settings, "max_trajectory_age_steps"):
        yield Problem.unused(f"{section}.max_trajectory_age_steps", without)
    if not rollouts.max_staleness and settings.sampler is not None:
        yield Problem.unused(f"{section}.sampler", without)
    if rollouts.over_samples:
        yield from _over_sampling(rollouts, section, ratio)
    num_prompts, window = rollouts.num_prompts_per_step, settings.sampler_window
    if settings.sampler == "windowed" and window is None:
        remedy = f"Set it to a number of prompts from {num_prompts} to {num_prompts + rollouts.num_ahead}"
        yield Problem(f"{section}.sampler_window", "must be set with the sampler windowed", remedy=remedy)
    elif window is not None and settings.sampler != "windowed":
        yield Problem.unused(f"{section}.sampler_window", f"without {section}.sampler=windowed")
    elif window is not None and not num_prompts <= window <= num_prompts + rollouts.num_ahead:
        allowed = f"int from {num_prompts} (the prompts of a step) to {num_prompts + rollouts.num_ahead} (the prompts "
        yield Problem(f"{section}.sampler_window", got=window, allowed=f"{allowed}in progress)")
    if settings.in_flight_weight_updates and not rollouts.max_staleness:
        because = "in a synchronous run, because no completion is in progress when the weights change"
        remedy = f"Remove this key, or set {section}.enabled=true and max_trajectory_age_steps above 0"
        yield Problem.unused(f"{section}.in_flight_weight_updates", because, remedy=remedy)
    if settings.enabled and rollouts.max_staleness and generation.colocated.enabled:
        reason = "needs separate devices for generation, because generation on the policy's devices stops while the"
        remedy = "Set policy.generation.colocated.enabled=false and policy.generation.colocated.resources, or set"
        remedy = f"{remedy} {section}.enabled=false"
        yield Problem(f"{section}.enabled", f"{reason} policy trains", got=settings.enabled, remedy=remedy)
    key = f"{section}.recompute_kv_cache_after_weight_updates"
    if settings.recompute_kv_cache_after_weight_updates:
        return
    if not rollouts.updates_in_flight:
        yield Problem.unused(key, f"without {section}.in_flight_weight_updates=true or {ratio} above 1")
    elif generation.colocated.enabled:
        because = "with policy.generation.colocated.enabled=true, because the engine loses its cache when it sleeps"
        yield Problem.unused(key, because)
    elif generation.lora_sync == "adapter":
        because = "with policy.generation.lora_sync=adapter, because the engine caches keys and values per adapter and"
        remedy = "Set policy.generation.lora_sync=merged, or remove this key"
        yield Problem.unused(key, f"{because} would recompute them", remedy=remedy)
    elif generation.backend in names(GENERATORS) and not plugin(GENERATORS, generation.backend).keeps_cache:
        reason = f"is not supported by {generation.backend}, which recomputes the keys and values of an interrupted"
        remedy = "Set policy.generation.backend=vllm, or remove this key"
        yield Problem(key, f"{reason} request", got=False, remedy=remedy)


def _over_sampling(rollouts: RolloutConfig, section: str, ratio: str) -> Iterator[Problem]:
    """Yield problems of ending a step before all its rollouts have finished."""
    settings, most = rollouts.async_grpo, 1 + rollouts.max_staleness
    if rollouts.over_sampling_ratio > most:
        reason = f"must be at most 1 + {section}.max_trajectory_age_steps ({most}), so that every group trains in time"
        yield Problem(ratio, reason, got=rollouts.over_sampling_ratio, remedy="Lower it, or raise that limit")
    elif not rollouts.num_ahead:
        reason = f"adds no prompt to the {rollouts.num_prompts_per_step} of a step"
        yield Problem(ratio, reason, got=rollouts.over_sampling_ratio)
    if rollouts.sampler in ("weight_fifo", "in_order"):
        reason = f"makes a step wait for older groups, but {ratio} ends it with the groups that finish first"
        allowed = "ready_first, windowed"
        yield Problem(f"{section}.sampler", reason, got=settings.sampler, allowed=allowed)
    if settings.enabled and not settings.in_flight_weight_updates:
        reason = f"must be true with {ratio} above 1: otherwise every update waits for the rollouts that a step leaves"
        yield Problem(f"{section}.in_flight_weight_updates", reason, got=False)


def _validation(rollouts: RolloutConfig, data: DataConfig) -> Iterator[Problem]:
    metric, goal = f"{rollouts.section}.stop_at_validation_metric", rollouts.stop_at_validation_metric
    if (goal is None) != (rollouts.stop_at_validation_threshold is None):
        yield Problem(metric, "must be set together with stop_at_validation_threshold", remedy="Set both or neither")
    if goal not in (None, *rollouts.validation_goals):
        yield Problem(metric, got=goal, allowed=" or ".join(rollouts.validation_goals))
    if data.validation_datasets:
        return
    for name in ("val_period", "val_at_start", "val_at_end"):
        if value := getattr(rollouts, name):
            remedy = f"Set data.validation, or set this to {show(WITHOUT_VALIDATION[name])}"
            key, reason = f"{rollouts.section}.{name}", "needs validation data, and there is none"
            yield Problem(key, reason, got=value, remedy=remedy)
