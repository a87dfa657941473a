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
        name: unique in the evaluation.
        groups: the rollouts of each prompt.
        refused: prompts that leave no room for a completion, each with the reason; they score 0.
        num_samples: samples of each prompt.
    """

    name: str
    groups: Sequence[RolloutTask]
    refused: Sequence[tuple[Prompt, str]] = ()
    num_samples: int = 1


@dataclass(frozen=True)
class EvaluationPlan:
    """Everything that an evaluation rolls out, and how it is scored.

    Args:
        tasks: in order.
        needs: of the rollout workers.
        scoring: the estimates to make.
    """

    tasks: Sequence[EvaluationTask]
    needs: RolloutNeeds
    scoring: Scoring = field(default_factory=Scoring)
