"""Supervised fine-tuning: the likelihood of the assistant's text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from rl_algos.data.examples import Datasets
from rl_algos.data.preview import RowReader
from rl_algos.losses.tokens import NLLLoss
from rl_algos.sft.config import SFTRoot
from rl_algos.supervised.algorithm import SupervisedAlgorithm
from rl_algos.supervised.loop import RowObjective, train
from rl_core.run import Components, Run
from rl_core.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rl_algos.sft.data import TrainingRow
    from rl_algos.supervised.data import SupervisedData


class SFT(SupervisedAlgorithm["SFTRoot", "SupervisedData[TrainingRow]"]):
    """Supervised fine-tuning."""

    def prepare(self, config: SFTRoot, tokenizer: Tokenizer, loaded: Datasets) -> SupervisedData[TrainingRow]:
        # imports transformers, which takes a second that checks before need not pay
        from rl_algos.sft.data import prepare_examples

        return prepare_examples(config, tokenizer, loaded)

    def row_reader(self, config: SFTRoot) -> RowReader:
        from rl_algos.sft.data import conversation_reader

        return conversation_reader(config.data, config.policy, config.sft.learn)

    def run(self, config: SFTRoot, components: Components, run: Run) -> None:
        from rl_algos.sft.data import to_batch

        policy, data = components.models["policy"], components.data
        names = [dataset[0].dataset for dataset in data.train.datasets]
        objective = RowObjective(NLLLoss(), to_batch, describe=partial(shares, datasets=names))
        rows, scores = config.policy.train_global_batch_size, self.scores(config, components, run)
        train(config.sft, objective, policy, data, run, batch_size=rows, scores=scores)


def shares(rows: Sequence[TrainingRow], datasets: Sequence[str]) -> dict[str, float]:
    """Return the share of each of several datasets in the tokens under the loss of some rows."""
    if len(datasets) == 1:
        return {}
    tokens: Counter[str] = Counter()
    for row in rows:
        tokens[row.dataset] += int(row.loss_mask.sum())
    return {f"train/{name}/share": tokens[name] / max(1, tokens.total()) for name in datasets}
