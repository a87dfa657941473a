"""Training rows of reward models."""

from __future__ import annotations

from typing import Any

from rl_algos.data.examples import Dataset, Datasets
from rl_algos.preference.data import judged_rows, pair_rows
from rl_algos.preference.rows import JudgedRow, PairRow
from rl_algos.reward_model.config import RewardModelRoot
from rl_algos.supervised.data import SupervisedData, longest_row, supervised_data
from rl_algos.tokenizer import require_chat_template


def prepare(
    config: RewardModelRoot, tokenizer: Any, datasets: Datasets
) -> SupervisedData[PairRow] | SupervisedData[JudgedRow]:
    """Tokenise the data, as pairs or as single responses with a score; called on the driver before anything is started.

    Args:
        config: root with `rm`, `data` and `policy`.
        tokenizer: as `rl_algos.tokenizer.load_tokenizer` returns it.
        datasets: as `rl_algos.preference.data.load` returns them.

    Raises:
        DataError: naming dataset and row, and the remedy.
        ConfigError: if the tokenizer has no chat template.
    """
    require_chat_template(tokenizer)
    rm, data, policy = config.rm, config.data, config.policy
    limit = longest_row(data, policy)

    def judged(dataset: Dataset) -> list[JudgedRow]:
        return judged_rows(dataset, data, tokenizer, limit, by="score")

    def paired(dataset: Dataset) -> list[PairRow]:
        needs_margin = rm.margin != "ignore"
        return pair_rows(dataset, data, tokenizer, limit, pairing=rm.pairing, needs_margin=needs_margin)

    if rm.loss == "regression":
        return supervised_data(rm, data, policy, datasets, judged)
    return supervised_data(rm, data, policy, datasets, paired)
