"""Static checks of algorithms that learn from given rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rl_algos.data.config import DataConfig
from rl_algos.supervised.config import SupervisedConfig
from rl_core.config import Problem, is_changed
from rl_core.model_config import ModelConfig

WITHOUT_VALIDATION: Mapping[str, Any] = {
    "val_period": 0,
    "val_batches": None,
    "val_global_batch_size": None,
    "val_at_start": False,
    "val_at_end": False,
    "stop_at_validation_loss": None,
}
"""Keys of a `SupervisedConfig` that are for validation, and the values without one."""


def supervised_problems(
    key: str, section: SupervisedConfig, data: DataConfig, policy: ModelConfig
) -> Iterator[Problem]:
    """Settings that have no effect, or that contradict one another.

    Args:
        key: Key of the algorithm's section.
        section: Config section of the algorithm.
        data: Config section `data`.
        policy: Config section of the model.
    """
    yield from _validation(key, section, data)
    yield from _environments(key, data)
    yield from _lengths(data, policy)


def _validation(key: str, section: SupervisedConfig, data: DataConfig) -> Iterator[Problem]:
    """Settings of a validation that has no data."""
    if data.validation_datasets:
        return
    for name in WITHOUT_VALIDATION:
        if getattr(section, name) and is_changed(section, name):
            yield Problem(
                f"{key}.{name}",
                "needs validation data, and there is none",
                got=getattr(section, name),
                remedy="Set data.validation, or remove this key",
            )


def _environments(key: str, data: DataConfig) -> Iterator[Problem]:
    """Environments, which score rollouts; there are none here."""
    for section, dataset in data.sections():
        if dataset.env_name is not None:
            yield Problem.unused(f"{section}.env_name", f"because {key} trains on given data and scores nothing")


def _lengths(data: DataConfig, policy: ModelConfig) -> Iterator[Problem]:
    """Rows longer than the model may see."""
    limit, most = data.max_input_seq_length, policy.max_total_sequence_length
    if limit is not None and limit > most:
        yield Problem(
            "data.max_input_seq_length",
            f"must not exceed policy.max_total_sequence_length ({most})",
            got=limit,
            remedy="Lower it, or remove it to use the same limit",
        )
