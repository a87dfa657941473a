"""Prompts for the student, which need not be scored by an environment."""

from __future__ import annotations

from dataclasses import replace

from rl_algos.data.examples import Dataset, Datasets, load_examples
from rl_algos.distillation.config import RolloutsRoot
from rl_algos.rollouts.data import check_environments

UNSCORED = "rl_algos.distillation.unscored:unscored"
"""Environment of prompts that name none."""


def load(config: RolloutsRoot) -> Datasets:
    """All data of the config, before it is tokenised; a row that names no environment is not scored.

    Raises:
        DataError: Naming dataset and row, and the remedy.
        ConfigError: If a file or a processor that a dataset names is not there.
    """
    loaded = load_examples(config)
    datasets = Datasets([_unscored(each) for each in loaded.train], [_unscored(each) for each in loaded.validation])
    check_environments(config, datasets, also=[UNSCORED])
    return datasets


def _unscored(dataset: Dataset) -> Dataset:
    return replace(dataset.answered(), default_environment=UNSCORED)
