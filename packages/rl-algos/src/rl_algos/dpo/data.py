"""Training rows of preference optimisation."""

from __future__ import annotations

from typing import Any

from rl_algos.data.examples import Dataset, Datasets
from rl_algos.dpo.config import DPORoot
from rl_algos.dpo.loss import KTO
from rl_algos.preference.data import judged_rows, pair_rows
from rl_algos.preference.rows import JudgedRow, PairRow
from rl_algos.supervised.data import SupervisedData, longest_row, supervised_data
from rl_algos.tokenizer import require_chat_template


def prepare(config: DPORoot, tokenizer: Any, datasets: Datasets) -> SupervisedData[PairRow] | SupervisedData[JudgedRow]:
    """Tokenise the data, as pairs or as single responses with a label; called on the driver before anything is started.

    Args:
        config: root with `dpo`, `data` and `policy`.
        tokenizer: as `rl_algos.tokenizer.load_tokenizer` returns it.
        datasets: as `rl_algos.preference.data.load` returns them.

    Raises:
        DataError: naming dataset and row, and the remedy.
        ConfigError: if the tokenizer has no chat template.
    """
    require_chat_template(tokenizer)
    dpo, data, policy = config.dpo, config.data, config.policy
    limit = longest_row(data, policy)

    def judged(dataset: Dataset) -> list[JudgedRow]:
        return judged_rows(dataset, data, tokenizer, limit, by="label")

    def paired(dataset: Dataset) -> list[PairRow]:
        return pair_rows(dataset, data, tokenizer, limit, pairing=dpo.pairing)

    if dpo.loss.name == KTO:
        return supervised_data(dpo, data, policy, datasets, judged)
    return supervised_data(dpo, data, policy, datasets, paired)
