"""What a GRPO config must satisfy across its sections, checked before anything is started."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rl_core.config import Problem, did_you_mean
from rl_core.plugins import ENVIRONMENTS, names


def check(config: Any) -> Iterable[Problem]:
    """Problems of the whole resolved config."""
    yield from _batch_sizes(config)
    yield from _sampling(config)
    yield from _loss(config)
    yield from _validation(config)
    yield from _environments(config)


def _batch_sizes(config: Any) -> Iterator[Problem]:
    grpo, policy = config.grpo, config.policy
    rows = grpo.rollouts_per_step
    if rows % policy.train_global_batch_size:
        yield Problem(
            "policy.train_global_batch_size",
            f"{policy.train_global_batch_size} does not divide the {rows} rollouts of a step "
            f"(grpo.num_prompts_per_step {grpo.num_prompts_per_step} x "
            f"grpo.num_generations_per_prompt {grpo.num_generations_per_prompt}); set it to a divisor",
        )
    if config.loss_fn.force_on_policy_ratio and rows != policy.train_global_batch_size:
        yield Problem(
            "loss_fn.force_on_policy_ratio",
            f"needs one minibatch a step: set policy.train_global_batch_size to {rows}",
        )
    if grpo.num_generations_per_prompt < 2:
        yield Problem("grpo.num_generations_per_prompt", "a group needs at least 2 rollouts to compare")


def _sampling(config: Any) -> Iterator[Problem]:
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


def _loss(config: Any) -> Iterator[Problem]:
    loss = config.loss_fn
    if loss.truncated_importance_sampling_ratio is not None and not loss.use_importance_sampling_correction:
        yield Problem(
            "loss_fn.truncated_importance_sampling_ratio",
            "has no effect without use_importance_sampling_correction=true",
        )
    low_used = loss.truncated_importance_sampling_type != "tis"
    if loss.truncated_importance_sampling_ratio_min is not None and not low_used:
        yield Problem(
            "loss_fn.truncated_importance_sampling_ratio_min", "has no effect with type tis; use icepop or seq-mask-tis"
        )
    if loss.use_importance_sampling_correction and low_used and loss.truncated_importance_sampling_ratio is None:
        yield Problem(
            "loss_fn.truncated_importance_sampling_ratio",
            f"{loss.truncated_importance_sampling_type} needs an upper bound",
        )
    if loss.use_cispo and loss.ratio_clip_c is not None:
        yield Problem("loss_fn.ratio_clip_c", "CISPO has no dual clip; leave it unset")


def _validation(config: Any) -> Iterator[Problem]:
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
            "data.validation", "is empty, but grpo asks for validation; give a dataset or set the val_* keys off"
        )
    scaling = grpo.reward_scaling
    if scaling.enabled and scaling.source_max <= scaling.source_min:
        yield Problem("grpo.reward_scaling.source_max", "must be above source_min")


def _environments(config: Any) -> Iterator[Problem]:
    known = names(ENVIRONMENTS)
    for key, dataset in config.data.sections():
        if dataset.env_name is not None and dataset.env_name not in known:
            yield Problem(
                f"{key}.env_name",
                f"no environment {dataset.env_name!r} is installed{did_you_mean(dataset.env_name, known)}; "
                f"installed are {', '.join(known) or 'none'}",
            )
