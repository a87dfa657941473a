"""Advantages of tokens by teachers, which are added to the advantages of rewards (on-policy distillation)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rl_algos.distillation.config import teacher_sections
from rl_algos.distillation.self_teacher import SelfTeacher
from rl_algos.distillation.teachers import RolloutTeacher, Teachers
from rl_algos.grpo.config import GRPOConfig, GRPORoot
from rl_algos.losses.distillation import TEACHER_TOKEN_LOGPROBS
from rl_algos.losses.mask import without_demonstrations
from rl_algos.policy_gradient.advantages import clip_advantages
from rl_algos.rollouts.training.batch import Advantages
from rl_algos.rollouts.training.segments import whole_rollouts
from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.model import LOGPROBS
from rl_core.rollouts.group import LOSS_MASK, RolloutGroup
from rl_core.run import Components


def teachers_of(config: GRPORoot, components: Components) -> RolloutTeacher | None:
    """Return the teachers of a run, which read the logprobs of sampled tokens; None if only rewards teach."""
    own, temperature = config.grpo.distillation.self_teacher, config.policy.generation.temperature
    if own is not None:
        return SelfTeacher(
            components.models["policy"],
            components.data.encode,
            own,
            [LOGPROBS],
            temperature=temperature,
            max_tokens=config.policy.max_total_sequence_length,
        )
    models = {role: components.models[role] for role in teacher_sections(config)}
    return Teachers(models, [LOGPROBS], temperature=temperature) if models else None


class TaughtAdvantages(NamedTuple):
    """Advantages of rewards and teachers.

    Args:
        advantages: float64 `[tokens]`, a row per rollout.
        metrics: Measurements of the step, by name.
    """

    advantages: Ragged
    metrics: dict[str, float]


def with_teachers(
    advantages: Advantages, batch: Batch, groups: Sequence[RolloutGroup], teachers: RolloutTeacher, config: GRPOConfig
) -> TaughtAdvantages:
    """Add the advantages of teachers to the advantages of rewards.

    A sampled token y has `reward_weight A + weight (log q(y) - log p(y))`, with A the advantage of the rewards, q its
    teacher and p the policy as the step begins; no gradient passes through it. In expectation over p, its policy
    gradient is `-weight` times the gradient of the token's KL(p || q), the reverse KL.

    p are the weights that the step trains (`prev_logprobs`), not the older weights mu that may have sampled
    (`generation_logprobs`). The loss weights the term by p / mu, so that it stays the gradient of KL(p || q) for stale
    rollouts. With `log q - log mu` it would be the gradient of `KL(p || q) - KL(p || mu)`, which drives the policy away
    from the weights that sampled. As in the loss, p is normalised over the tokens that sampling keeps, and q over all.

    Args:
        advantages: Advantages of the rewards, `[rollouts]` or `[tokens]`.
        batch: Batch of the groups, with `prev_logprobs`.
        groups: Groups of the step.
        teachers: Teachers of the run. Rollouts without a teacher have the advantages of the rewards only, and so do
            rollouts about which a self-teacher knows nothing more, and demonstrations.
        config: Config section of the algorithm; the bounds of advantages hold for either term.
    """
    settings, scored = config.distillation, teachers.scored(batch, groups)
    mask = without_demonstrations(scored).ragged(LOSS_MASK)
    is_taught = mask.values > 0
    gains = np.zeros(len(is_taught))
    if is_taught.any():
        teacher, policy = (scored.ragged(name).values for name in (TEACHER_TOKEN_LOGPROBS, "prev_logprobs"))
        gains[is_taught] = teacher[is_taught].astype(np.float64) - policy[is_taught]
    of_teachers = whole_rollouts(mask.like(settings.weight * gains), groups)
    bounded = clip_advantages(of_teachers, config.advantage_clip_low, config.advantage_clip_high)
    assert isinstance(bounded, Ragged)
    of_rewards = advantages.values if isinstance(advantages, Ragged) else np.repeat(advantages, of_teachers.lengths)
    summed = of_teachers.like(settings.reward_weight * of_rewards + bounded.values)
    kl = -gains.sum() / max(np.count_nonzero(is_taught), 1)
    return TaughtAdvantages(summed, {**teachers.metrics, "teacher/kl": float(kl)})
