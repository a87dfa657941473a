"""GRPO as a plugin: its config sections, what they must satisfy together, and where its code is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from rl_algos.data.config import DataConfig, dataset_names
from rl_algos.grpo.config import GRPOConfig, GRPORoot
from rl_algos.grpo.estimators import chosen, estimator_section, reads
from rl_algos.grpo.loss import COLUMNS, columns_of, loss_of, loss_section, surrogate_section
from rl_algos.grpo.loss_checks import policy_loss_problems
from rl_algos.grpo.loss_config import LossConfig
from rl_algos.requirement import LOSSES
from rl_core.config import Config, Problem, ProblemError, assemble, settings_of
from rl_core.environments.instance import problem_with
from rl_core.model import ModelSpec
from rl_core.plugins import AlgorithmPlugin, ModelNeed


def grpo_section(written: Any) -> type[Config]:
    """The type of `grpo`, with the settings of the estimator that is written there."""
    estimator = written.get("adv_estimator") if isinstance(written, Mapping) else None
    kind = _chosen_type("adv_estimator.name", estimator, estimator_section)
    return assemble("GRPO", {"adv_estimator": kind}, base=GRPOConfig)


def loss_fn_section(written: Any) -> type[Config]:
    """The type of `loss_fn`, with the settings of the loss, or of its surrogate, that is written there."""
    kind = _chosen_type("name", written, loss_section)
    if not issubclass(kind, LossConfig):
        return kind
    surrogate = written.get("surrogate") if isinstance(written, Mapping) else None
    part = _chosen_type("surrogate.name", surrogate, surrogate_section)
    return assemble("PolicyLoss", {"surrogate": part}, base=LossConfig)


def _chosen_type(key: str, written: Any, section: Callable[[str | None], type[Config]]) -> type[Config]:
    name = written.get("name") if isinstance(written, Mapping) else written
    try:
        # what is not text is refused by the type itself
        return section(name if isinstance(name, str) else None)
    except (ValueError, ModuleNotFoundError) as error:
        raise ProblemError(Problem(key, str(error))) from None


def models(config: GRPORoot) -> dict[str, ModelNeed]:
    """The policy trains, and keeps its reference if the loss compares with it."""
    compares = "ref_logprobs" in columns_of(config)
    return {"policy": ModelNeed("policy", ModelSpec(keeps_reference=compares, seed=config.grpo.seed))}


def validation_metrics(config: GRPORoot) -> list[str]:
    """What a validation records; nothing where there is none."""
    grpo = config.grpo
    if not (grpo.val_period or grpo.val_at_start or grpo.val_at_end):
        return []
    names = sorted(set(dataset_names(config.data.validation_datasets, "validation")))
    by_dataset = [f"val/{name}/accuracy" for name in names] if len(names) > 1 else []
    return ["val/accuracy", "val/mean_length", *by_dataset]


def check(config: GRPORoot) -> Iterable[Problem]:
    """Problems of the whole resolved config."""
    yield from _batch_sizes(config)
    yield from _sampling(config)
    yield from _estimator(config)
    yield from _loss(config)
    yield from _validation(config)
    yield from _environments(config)


def _batch_sizes(config: GRPORoot) -> Iterator[Problem]:
    grpo, policy = config.grpo, config.policy
    rows = grpo.rollouts_per_step
    if rows % policy.train_global_batch_size:
        yield Problem(
            "policy.train_global_batch_size",
            f"{policy.train_global_batch_size} does not divide the {rows} rollouts of a step "
            f"(grpo.num_prompts_per_step {grpo.num_prompts_per_step} x "
            f"grpo.num_generations_per_prompt {grpo.num_generations_per_prompt}); set it to a divisor",
        )
    loss = config.loss_fn
    if isinstance(loss, LossConfig) and loss.force_on_policy_ratio and rows != policy.train_global_batch_size:
        yield Problem(
            "loss_fn.force_on_policy_ratio",
            f"needs one minibatch a step: set policy.train_global_batch_size to {rows}",
        )
    if grpo.num_generations_per_prompt < 2:
        yield Problem("grpo.num_generations_per_prompt", "a group needs at least 2 rollouts to compare")


def _sampling(config: GRPORoot) -> Iterator[Problem]:
    generation = config.policy.generation
    if generation.top_p != 1.0:
        yield Problem("policy.generation.top_p", "training samples from the whole distribution; leave it at 1.0")
    if generation.top_k is not None:
        yield Problem("policy.generation.top_k", "training samples from the whole distribution; leave it unset")
    if generation.max_new_tokens >= config.policy.max_total_sequence_length:
        yield Problem(
            "policy.generation.max_new_tokens",
            f"{generation.max_new_tokens} leaves no room for a prompt within policy.max_total_sequence_length "
            f"{config.policy.max_total_sequence_length}",
        )


def _estimator(config: GRPORoot) -> Iterator[Problem]:
    grpo = config.grpo
    if grpo.adv_estimator.name is not None and grpo.use_leave_one_out_baseline:
        yield Problem(
            "grpo.use_leave_one_out_baseline",
            f"chooses the estimator rloo, but adv_estimator.name is {grpo.adv_estimator.name}; set one of them only",
        )
    if grpo.batch_multiplier != 1 and not grpo.use_dynamic_sampling:
        yield Problem("grpo.batch_multiplier", "has no effect without use_dynamic_sampling=true")
    name, settings = chosen(grpo), settings_of(grpo.adv_estimator)
    if not grpo.normalize_rewards and not reads(grpo, "normalize"):
        yield Problem("grpo.normalize_rewards", f"has no effect with the estimator {name}; remove this key")
    if not reads(grpo, "rewards"):
        for section in ("reward_scaling", "reward_shaping"):
            if getattr(grpo, section).enabled:
                yield Problem(
                    f"grpo.{section}.enabled",
                    f"has no effect with the estimator {name}, which reads rewards as they are",
                )
        if isinstance(config.loss_fn, LossConfig) and config.loss_fn.use_kl_in_reward:
            yield Problem("loss_fn.use_kl_in_reward", f"has no effect with the estimator {name}; remove this key")
    if name == "pass_at_k" and not 1 <= settings["k"] <= grpo.num_generations_per_prompt:
        yield Problem(
            "grpo.adv_estimator.k",
            f"{settings['k']} must be from 1 to grpo.num_generations_per_prompt, {grpo.num_generations_per_prompt}",
        )


def _loss(config: GRPORoot) -> Iterator[Problem]:
    if isinstance(config.loss_fn, LossConfig):
        yield from policy_loss_problems(config.loss_fn)
        return
    name = config.loss_fn.name
    try:
        loss = loss_of(config)
        columns, temperature = tuple(loss.columns), loss.temperature
    except (ValueError, TypeError) as error:
        yield Problem("loss_fn", f"{name}: {error}")
        return
    unknown = [column for column in columns if column not in COLUMNS]
    if unknown:
        yield Problem("loss_fn.name", f"{name} needs {', '.join(unknown)}; a batch has {', '.join(COLUMNS)}")
    if temperature != config.policy.generation.temperature:
        yield Problem(
            "policy.generation.temperature",
            f"{config.policy.generation.temperature} is not the temperature of {name}, which is {temperature}; give "
            "the class a field `temperature`, which is then set to it",
        )
    if config.grpo.seq_logprob_error_threshold is not None:
        yield Problem("grpo.seq_logprob_error_threshold", f"has no effect with the loss {name}; remove this key")


def _validation(config: GRPORoot) -> Iterator[Problem]:
    grpo = config.grpo
    if (grpo.stop_at_validation_metric is None) != (grpo.stop_at_validation_threshold is None):
        yield Problem("grpo.stop_at_validation_metric", "needs stop_at_validation_threshold, and the other way round")
    if grpo.stop_at_validation_metric not in (None, "accuracy", "mean_length"):
        yield Problem(
            "grpo.stop_at_validation_metric", f"got {grpo.stop_at_validation_metric!r}; use accuracy or mean_length"
        )
    validates = grpo.val_period or grpo.val_at_start or grpo.val_at_end
    if validates and not config.data.validation:
        yield Problem(
            "data.validation",
            "is empty, but grpo asks for validation; give a dataset, or turn validation off with grpo.val_period=0, "
            "grpo.val_at_start=false and grpo.val_at_end=false",
        )
    scaling = grpo.reward_scaling
    if scaling.enabled and scaling.source_max <= scaling.source_min:
        yield Problem("grpo.reward_scaling.source_max", "must be above source_min")


def _environments(config: GRPORoot) -> Iterator[Problem]:
    for key, dataset in config.data.sections():
        if dataset.env_name is not None and (problem := problem_with(dataset.env_name, config.env)):
            yield Problem(f"{key}.env_name", problem)


PLUGIN = AlgorithmPlugin(
    name="grpo",
    sections={"grpo": grpo_section, "loss_fn": loss_fn_section, "data": DataConfig},
    load="rl_algos.grpo.setup:load",
    attempts="rl_algos.grpo.setup:attempts",
    prepare="rl_algos.grpo.setup:prepare",
    run="rl_algos.grpo.setup:run",
    generates=True,
    models=models,
    requirements=(LOSSES,),
    validation_metrics=validation_metrics,
    rollouts="rl_algos.grpo.setup:rollouts",
    evaluate="rl_algos.grpo.setup:evaluate",
    checks=(check,),
)
