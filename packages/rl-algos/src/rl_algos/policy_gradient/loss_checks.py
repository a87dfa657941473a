"""Settings of the policy loss that contradict one another, or would have no effect."""

from __future__ import annotations

from collections.abc import Iterator

from rl_algos.losses.importance import ImportanceCorrection
from rl_algos.policy_gradient.config import ObjectiveRoot
from rl_algos.policy_gradient.loss import COLUMNS, columns_of, has_one_update, loss_of, needs_prev
from rl_algos.policy_gradient.loss_config import LossConfig
from rl_algos.rollouts.checks import filter_problems
from rl_algos.rollouts.config import PolicyGradientConfig
from rl_core.config import Problem
from rl_core.data.microbatch import PAIR
from rl_core.model_config import reduced_precision
from rl_core.problems import NOT_GIVEN


def loss_problems(config: ObjectiveRoot, algorithm: PolicyGradientConfig) -> Iterator[Problem]:
    """Problems of `loss_fn` in a whole config, and of the reference that it compares with.

    Args:
        config: Resolved config of the run.
        algorithm: Config section of the algorithm.
    """
    loss = config.loss_fn
    yield from _reference(config, algorithm)
    yield from _uncorrected(config, algorithm)
    if isinstance(loss, LossConfig) and loss.staleness is not None and not algorithm.max_staleness:
        yield Problem.unused(
            "loss_fn.staleness",
            "in a synchronous run, because the newest weights sample every rollout",
            remedy=f"Remove this key, or set {algorithm.section}.async_grpo.enabled=true and max_trajectory_age_steps "
            "above 0",
        )
    if not isinstance(loss, LossConfig):
        yield from _custom_loss_problems(config, algorithm)
        return
    if loss.force_on_policy_ratio and not has_one_update(config, algorithm):
        rows = algorithm.rollouts_per_step
        is_one_pass = algorithm.passes_per_step == 1
        yield Problem(
            "loss_fn.force_on_policy_ratio",
            "needs one minibatch and one pass over it per step",
            got=True,
            remedy=f"Set policy.train_global_batch_size={rows}" if is_one_pass else "Remove this key",
        )
    yield from policy_loss_problems(loss)


def _reference(config: ObjectiveRoot, algorithm: PolicyGradientConfig) -> Iterator[Problem]:
    """Find moves of a reference that nothing reads, or that never take place."""
    if algorithm.reference_sync_period and "ref_logprobs" not in columns_of(config, algorithm):
        yield Problem.unused(
            f"{algorithm.section}.reference_sync_period",
            "because the loss does not use a reference policy",
            remedy="Remove this key, or set loss_fn.kl.weight above 0",
        )
    if algorithm.reference_mixup_alpha != 1 and not algorithm.reference_sync_period:
        yield Problem.unused(
            f"{algorithm.section}.reference_mixup_alpha",
            f"with {algorithm.section}.reference_sync_period=0",
            remedy="Remove this key, or set reference_sync_period above 0",
        )


def _uncorrected(config: ObjectiveRoot, algorithm: PolicyGradientConfig) -> Iterator[Problem]:
    """Find a loss that takes what older weights, or an engine in fewer bits, sampled for what the policy samples."""
    if algorithm.max_staleness:
        cause = f"{algorithm.section}.async_grpo allows rollouts that are {algorithm.max_staleness} steps old"
        why = "the loss does not correct for their age otherwise"
        otherwise = f"set {algorithm.section}.async_grpo.enabled=false"
        yield from _without_correction(config, algorithm, cause, why, otherwise)
        return
    reduced = " and ".join(f"policy.{found}" for found in reduced_precision(config.policy))
    if not reduced or (isinstance(config.loss_fn, LossConfig) and config.loss_fn.allow_uncorrected_precision):
        return
    cause = f"the engine and the trainer compute in different precisions ({reduced})"
    remedy = "remove that key"
    if isinstance(config.loss_fn, LossConfig):
        remedy += ", or set loss_fn.allow_uncorrected_precision=true to train without a correction"
    yield from _without_correction(config, algorithm, cause, "the loss does not correct for it otherwise", remedy)


def _without_correction(
    config: ObjectiveRoot, algorithm: PolicyGradientConfig, cause: str, why: str, otherwise: str
) -> Iterator[Problem]:
    """Find a loss that does not read, or does not use, the logprobs with which tokens were sampled.

    Args:
        config: Resolved config of the run.
        algorithm: Config section of the algorithm.
        cause: What makes the correction necessary.
        why: What is wrong without it.
        otherwise: The remedy that avoids the cause.
    """
    if not isinstance(config.loss_fn, LossConfig):
        if "generation_logprobs" not in columns_of(config, algorithm):
            yield Problem(
                "loss_fn.name",
                f"does not read generation_logprobs, so it cannot correct for what the engine sampled, but {cause}",
                got=config.loss_fn.name,
                remedy=f"Add the column, or {otherwise}",
            )
    elif config.loss_fn.importance is None and config.loss_fn.ratio_denominator == "prev":
        yield Problem(
            "loss_fn.importance",
            f"must be set, because {cause} and {why}",
            remedy=f"Set loss_fn.importance.high=2, or loss_fn.ratio_denominator=generation, or {otherwise}",
        )


def _custom_loss_problems(config: ObjectiveRoot, algorithm: PolicyGradientConfig) -> Iterator[Problem]:
    name = config.loss_fn.name
    try:
        loss = loss_of(config, algorithm)
        columns, temperature, reads = tuple(loss.columns), loss.temperature, loss.reads
    except (ValueError, TypeError) as error:
        yield Problem("loss_fn", f"could not create {name}: {error}")
        return
    unknown = [column for column in columns if column not in COLUMNS and not (algorithm.splits and column == PAIR)]
    if algorithm.splits and PAIR not in columns:
        counted = f"Add `{PAIR}`, the number of each row's rollout, to the columns of the loss and count rows with the "
        counted += "same number as one"
        is_agent = algorithm.agent is not None
        yield Problem(
            f"{algorithm.section}.{'agent' if is_agent else 'rewritten_history'}",
            f"can make several rows of one rollout, but {name} may count each row as a rollout",
            got=NOT_GIVEN if is_agent else algorithm.rewritten_history,
            remedy=counted if is_agent else f"{counted}, or set this key to `keep`",
        )
    if unknown:
        yield Problem(
            "loss_fn.name",
            f"needs {', '.join(unknown)}, which a batch does not have",
            got=name,
            allowed=f"columns {', '.join(COLUMNS)}",
        )
    if temperature != config.policy.generation.temperature:
        yield Problem(
            "policy.generation.temperature",
            f"must be equal to the temperature of the loss {name} ({temperature})",
            got=config.policy.generation.temperature,
            remedy="Add a field `temperature` to the class, which is then set from this key",
        )
    if any(read.token_filter != config.policy.generation.token_filter for read in reads):
        yield from filter_problems(
            config,
            f"the loss {name} reads logprobs of the distribution over all tokens",
            remedy="Add a field `token_filter` to the class, which is then set, and pass it to its reads",
        )
    if algorithm.seq_logprob_error_threshold is not None:
        yield Problem.unused(f"{algorithm.section}.seq_logprob_error_threshold", f"with the loss {name}")


def policy_loss_problems(loss: LossConfig) -> Iterator[Problem]:
    """Problems between the sections of `loss_fn`; each section's type checks its own keys."""
    surrogate = loss.surrogate
    if loss.aggregation.name not in surrogate.aggregations:
        yield Problem(
            "loss_fn.aggregation.name",
            f"cannot be combined with the surrogate {surrogate.name}",
            got=loss.aggregation.name,
            allowed=", ".join(surrogate.aggregations),
        )
    if loss.filters.top_entropy_share is not None and not surrogate.is_by_token:
        yield Problem(
            "loss_fn.filters.top_entropy_share",
            f"leaves out single tokens, but {surrogate.name} has one term per sequence",
            got=loss.filters.top_entropy_share,
            remedy="Remove this key",
        )
    yield from _on_policy(loss)
    if loss.ratio_denominator == "generation":
        yield from _around_generation(loss)
    if loss.importance is not None:
        yield from _importance(loss, loss.importance)


def _on_policy(loss: LossConfig) -> Iterator[Problem]:
    if not loss.force_on_policy_ratio:
        return
    name = loss.surrogate.name
    if name == "cispo":
        yield Problem(
            "loss_fn.force_on_policy_ratio",
            "makes the ratio 1, so that cispo has nothing to clip",
            got=True,
            remedy="Set loss_fn.surrogate=reinforce",
        )
    elif needs_prev(loss):
        normalizes = loss.importance is not None and loss.importance.batch_normalize
        what = "importance.batch_normalize" if normalizes else name
        yield Problem(
            "loss_fn.force_on_policy_ratio",
            f"skips the pass that computes prev_logprobs, which {what} needs",
            got=True,
            remedy="Remove this key",
        )


def _importance(loss: LossConfig, importance: ImportanceCorrection) -> Iterator[Problem]:
    surrogate = loss.surrogate
    if importance.level == "token" and surrogate.level == "sequence":
        yield Problem(
            "loss_fn.importance.level",
            f"does not correct {surrogate.name}, which has one ratio per sequence",
            got=importance.level,
            allowed="sequence",
        )
    if importance.truncation == "seq-mask-tis" and importance.at_level(surrogate.level).level == "sequence":
        yield Problem(
            "loss_fn.importance.truncation",
            "needs one weight per token, but loss_fn.importance.level is sequence",
            got=importance.truncation,
            allowed="tis, icepop",
        )
    if importance.batch_normalize and loss.aggregation.name == "token-sum":
        yield Problem.unused(
            "loss_fn.importance.batch_normalize",
            "with the aggregation token-sum, because that sum is not divided by a count",
        )


def _around_generation(loss: LossConfig) -> Iterator[Problem]:
    if loss.surrogate.name == "reinforce":
        yield Problem.unused("loss_fn.ratio_denominator", "with the surrogate reinforce, which has no ratio")
    if loss.importance is not None:
        yield Problem(
            "loss_fn.importance",
            "cannot be combined with loss_fn.ratio_denominator=generation, which corrects for the generator's logprobs "
            "too",
            remedy="Remove one of the two",
        )
    if loss.force_on_policy_ratio:
        yield Problem(
            "loss_fn.force_on_policy_ratio",
            "assumes a ratio of 1, which does not hold with loss_fn.ratio_denominator=generation",
            got=True,
            remedy="Remove this key",
        )
