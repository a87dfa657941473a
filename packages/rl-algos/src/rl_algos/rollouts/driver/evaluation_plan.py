"""The rollouts of an evaluation, and how they are scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rl_algos.evaluation.summary import Scoring
from rl_core.plugins import RolloutNeeds
from rl_core.rollouts.pool import RolloutTask
from rl_core.rollouts.rollout import Prompt


@dataclass(frozen=True)
class EvaluationTask:
    """Prompts that are scored together.

    Args:
        name: Unique in the evaluation.
        groups: The rollouts of each prompt.
        refused: Prompts that leave no room for a completion, each with the reason; they score 0.
        num_samples: Samples of each prompt.
    """

    name: str
    groups: Sequence[RolloutTask]
    refused: Sequence[tuple[Prompt, str]] = ()
    num_samples: int = 1


@dataclass(frozen=True)
class EvaluationPlan:
    """Everything that an evaluation rolls out, and how it is scored.

    Args:
        tasks: Tasks in order.
        needs: Requirements of the rollout workers.
        scoring: The estimates to make.
    """

    tasks: Sequence[EvaluationTask]
    needs: RolloutNeeds
    scoring: Scoring = field(default_factory=Scoring)
