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


def loss_problems(config: ObjectiveRoot, algorithm: PolicyGradientConfig) -> Iterator[Problem]:
    """Problems of `loss_fn` in a whole config, and of the reference that it compares with.

    Args:
        algorithm: section of the algorithm.
    """
    loss = config.loss_fn
    yield from _reference(config, algorithm)
    yield from _uncorrected(config, algorithm)
    if isinstance(loss, LossConfig) and loss.staleness is not None and not algorithm.max_staleness:
        yield _problem(
            "staleness",
            "has no effect in a synchronous run, in which every rollout is of the newest weights; set "
            f"{algorithm.section}.async_grpo.enabled=true and max_trajectory_age_steps above 0, or remove this key",
        )
    if not isinstance(loss, LossConfig):
        yield from _custom_loss_problems(config, algorithm)
        return
    if loss.force_on_policy_ratio and not has_one_update(config, algorithm):
        rows = algorithm.rollouts_per_step
        remedy = f"set policy.train_global_batch_size to {rows}" if algorithm.passes_per_step == 1 else "remove it"
        yield _problem("force_on_policy_ratio", f"needs one minibatch and one pass over it a step: {remedy}")
    yield from policy_loss_problems(loss)


def _reference(config: ObjectiveRoot, algorithm: PolicyGradientConfig) -> Iterator[Problem]:
    """Find moves of a reference that nothing reads, or that never take place."""
    if algorithm.reference_sync_period and "ref_logprobs" not in columns_of(config, algorithm):
        yield Problem(
            f"{algorithm.section}.reference_sync_period",
            "has no effect: the loss compares with no reference policy; set loss_fn.kl.weight above 0, "
            "or remove this key",
        )
    if algorithm.reference_mixup_alpha != 1 and not algorithm.reference_sync_period:
        yield Problem(
            f"{algorithm.section}.reference_mixup_alpha", "has no effect without reference_sync_period; set it above 0"
        )


def _uncorrected(config: ObjectiveRoot, algorithm: PolicyGradientConfig) -> Iterator[Problem]:
    """Find a loss that takes what older weights sampled for what the policy samples."""
    if not algorithm.max_staleness:
        return
    cause = f"{algorithm.section}.async_grpo lets rollouts be {algorithm.max_staleness} steps old"
    if not isinstance(config.loss_fn, LossConfig):
        if "generation_logprobs" not in columns_of(config, algorithm):
            yield Problem(
                "loss_fn.name",
                f"{cause}, but {config.loss_fn.name} does not read generation_logprobs and cannot correct for that; "
                f"add the column, or set {algorithm.section}.async_grpo.enabled=false",
            )
    elif config.loss_fn.importance is None and config.loss_fn.ratio_denominator == "prev":
        yield _problem(
            "importance",
            f"{cause}, for which the loss does not correct; set loss_fn.importance.high=2, or "
            "loss_fn.ratio_denominator=generation",
        )


def _custom_loss_problems(config: ObjectiveRoot, algorithm: PolicyGradientConfig) -> Iterator[Problem]:
    name = config.loss_fn.name
    try:
        loss = loss_of(config, algorithm)
        columns, temperature, reads = tuple(loss.columns), loss.temperature, loss.reads
    except (ValueError, TypeError) as error:
        yield Problem("loss_fn", f"{name}: {error}")
        return
    unknown = [column for column in columns if column not in COLUMNS and not (algorithm.splits and column == PAIR)]
    if algorithm.splits and PAIR not in columns:
        yield Problem(
            f"{algorithm.section}.rewritten_history",
            f"split makes several rows of a rollout, and {name} may take each for a rollout; add `{PAIR}` to its "
            "columns, the number of each row's rollout, and count rows with the same number as one, or set this key to "
            "`keep`",
        )
    if unknown:
        yield Problem("loss_fn.name", f"{name} needs {', '.join(unknown)}; a batch has {', '.join(COLUMNS)}")
    if temperature != config.policy.generation.temperature:
        yield Problem(
            "policy.generation.temperature",
            f"{config.policy.generation.temperature} is not the temperature of {name}, which is {temperature}; give "
            "the class a field `temperature`, which is then set to it",
        )
    if any(read.token_filter != config.policy.generation.token_filter for read in reads):
        yield from filter_problems(
            config,
            f"{name} reads logprobs of the distribution over all tokens; give the class a field `token_filter`, which "
            "is then set, and pass it on to its reads",
        )
    if algorithm.seq_logprob_error_threshold is not None:
        yield Problem(
            f"{algorithm.section}.seq_logprob_error_threshold", f"has no effect with the loss {name}; remove this key"
        )


def policy_loss_problems(loss: LossConfig) -> Iterator[Problem]:
    """Problems between the sections of `loss_fn`; each section's type checks its own keys."""
    surrogate = loss.surrogate
    if loss.aggregation.name not in surrogate.aggregations:
        yield _problem(
            "aggregation.name",
            f"{surrogate.name} does not go with the aggregation {loss.aggregation.name}; set loss_fn.aggregation to "
            f"{' or '.join(surrogate.aggregations)}",
        )
    if loss.filters.top_entropy_share is not None and not surrogate.is_by_token:
        yield _problem(
            "filters.top_entropy_share",
            f"leaves out single tokens, but a term of {surrogate.name} belongs to its whole sequence; remove it",
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
        yield _problem("force_on_policy_ratio", "a ratio of 1 leaves CISPO nothing to clip; use surrogate=reinforce")
    elif needs_prev(loss):
        normalizes = loss.importance is not None and loss.importance.batch_normalize
        what = "importance.batch_normalize" if normalizes else name
        yield _problem("force_on_policy_ratio", f"saves the pass for prev_logprobs, which {what} needs; remove it")


def _importance(loss: LossConfig, importance: ImportanceCorrection) -> Iterator[Problem]:
    surrogate = loss.surrogate
    if importance.level == "token" and surrogate.level == "sequence":
        yield _problem(
            "importance.level",
            f"{surrogate.name} has one ratio per sequence, which a weight per token does not correct; use sequence",
        )
    if importance.truncation == "seq-mask-tis" and importance.at_level(surrogate.level).level == "sequence":
        yield _problem(
            "importance.truncation",
            "seq-mask-tis has weights by token, but the weights here are by sequence; use tis or icepop",
        )
    if importance.batch_normalize and loss.aggregation.name == "token-sum":
        yield _problem("importance.batch_normalize", "has nothing to divide by with the aggregation token-sum")


def _around_generation(loss: LossConfig) -> Iterator[Problem]:
    if loss.surrogate.name == "reinforce":
        yield _problem("ratio_denominator", "has no effect with the surrogate reinforce, which has no ratio; remove it")
    if loss.importance is not None:
        yield _problem(
            "importance",
            "corrects for the generator's logprobs, which the ratio does with ratio_denominator=generation; set only "
            "one of them",
        )
    if loss.force_on_policy_ratio:
        yield _problem("force_on_policy_ratio", "takes the ratio as 1, which it is not to generation; remove it")


def _problem(key: str, message: str) -> Problem:
    return Problem(f"loss_fn.{key}", message)
