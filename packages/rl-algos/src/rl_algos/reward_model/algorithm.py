"""Training of a reward model: the supervised loop on pairs of responses, or on single ones with a score or labels
of their steps."""

from __future__ import annotations

from typing import Any

from rl_algos.losses.preference import BradleyTerryLoss, ProcessLoss, RegressionLoss
from rl_algos.preference.algorithm import PreferenceAlgorithm
from rl_algos.preference.comparison import StepVerdict, Verdict, WeighedScores
from rl_algos.preference.rows import judged_batch, pair_batch, steps_batch
from rl_algos.reward_model.config import RewardModelConfig, RewardModelRoot
from rl_algos.supervised.loop import RowObjective, train
from rl_core.run import Components, Run


class RewardModel(PreferenceAlgorithm[RewardModelRoot]):
    """Training of a reward model."""

    def reads(self, config: RewardModelRoot) -> tuple[RewardModelConfig, Verdict | None, bool]:
        weights = config.rm.score_weights
        scored: Verdict = WeighedScores(weights) if weights else "score"
        by: dict[str, Verdict] = {"regression": scored, "process": StepVerdict(config.rm.step_end)}
        return config.rm, by.get(config.rm.loss), config.rm.margin != "ignore"

    def run(self, config: RewardModelRoot, components: Components, run: Run) -> None:
        model, rows = components.models["policy"], config.policy.train_global_batch_size
        train(config.rm, objective_of(config.rm), model, components.data, run, batch_size=rows)


def objective_of(rm: RewardModelConfig) -> RowObjective[Any]:
    """Return the objective: the configured loss on pairs, single responses or steps."""
    if rm.loss == "process":
        return RowObjective(ProcessLoss(), steps_batch)
    if rm.loss == "regression":
        return RowObjective(RegressionLoss(), judged_batch)
    return RowObjective(BradleyTerryLoss(rm.margin, rm.center_rewards_coefficient), pair_batch)
