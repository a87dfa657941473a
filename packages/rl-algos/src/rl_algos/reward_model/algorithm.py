"""Training of a reward model: the supervised loop on pairs of responses, or on single ones with a score."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_algos.data.examples import Datasets
from rl_algos.data.preview import RowReader
from rl_algos.losses.reward import BradleyTerryLoss, RegressionLoss
from rl_algos.preference.algorithm import PreferenceAlgorithm
from rl_algos.preference.rows import judged_batch, pair_batch
from rl_algos.reward_model.config import RewardModelConfig, RewardModelRoot
from rl_algos.supervised.loop import Objective, train
from rl_core.run import Components, Run

if TYPE_CHECKING:
    from rl_algos.preference.data import PreferenceData


class RewardModel(PreferenceAlgorithm[RewardModelRoot]):
    """Training of a reward model."""

    def prepare(self, config: RewardModelRoot, tokenizer: Any, loaded: Datasets) -> PreferenceData:
        # imports transformers, which takes a second that checks before need not pay
        from rl_algos.reward_model.data import prepare

        return prepare(config, tokenizer, loaded)

    def row_reader(self, config: RewardModelRoot) -> RowReader:
        from rl_algos.reward_model.data import reader

        return reader(config)

    def run(self, config: RewardModelRoot, components: Components, run: Run) -> None:
        model = components.models["policy"]
        objective = objective_of(config.rm)
        train(config.rm, objective, model, components.data, run, batch_size=config.policy.train_global_batch_size)


def objective_of(rm: RewardModelConfig) -> Objective[Any]:
    """The objective: the configured loss on pairs or on single responses."""
    if rm.loss == "regression":
        return Objective(RegressionLoss(), judged_batch)
    return Objective(BradleyTerryLoss(rm.margin, rm.center_rewards_coefficient), pair_batch)
