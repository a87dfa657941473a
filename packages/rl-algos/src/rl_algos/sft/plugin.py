"""Supervised fine-tuning as an algorithm plugin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rl_algos.data.config import DataConfig
from rl_algos.sft.config import SFTConfig
from rl_core.config import Problem
from rl_core.model import ModelSpec
from rl_core.registry import AlgorithmPlugin

_OF_VALIDATION = (
    "val_period",
    "val_batches",
    "val_global_batch_size",
    "val_at_start",
    "val_at_end",
    "stop_at_validation_loss",
)


def check_validation(config: Any) -> Iterator[Problem]:
    """Settings of a validation that has no data."""
    if config.data.validation is not None:
        return
    for key in _OF_VALIDATION:
        if key in config.sft.model_fields_set and getattr(config.sft, key):
            yield Problem(f"sft.{key}", "there is nothing to validate on; set data.validation, or remove this key")


def check_environments(config: Any) -> Iterator[Problem]:
    """Environments, which supervised fine-tuning has none of."""
    for key, datasets in (("train", config.data.train), ("validation", config.data.validation)):
        several = datasets if isinstance(datasets, list) else [datasets] if datasets else []
        for index, dataset in enumerate(several):
            if dataset.env_name is not None:
                where = f"data.{key}[{index}]" if isinstance(datasets, list) else f"data.{key}"
                yield Problem(f"{where}.env_name", "supervised fine-tuning scores nothing; remove this key")
    if config.data.default.env_name is not None:
        yield Problem("data.default.env_name", "supervised fine-tuning scores nothing; remove this key")


def check_lengths(config: Any) -> Iterator[Problem]:
    """Rows longer than the model may see."""
    limit, most = config.data.max_input_seq_length, config.policy.max_total_sequence_length
    if limit is not None and limit > most:
        yield Problem(
            "data.max_input_seq_length",
            f"got {limit}, above policy.max_total_sequence_length ({most}); lower it, or remove it to have them equal",
        )


def spec(config: Any) -> ModelSpec:
    """The policy trains and needs no reference."""
    return ModelSpec(role="policy", trains=True, keeps_reference=False, seed=config.sft.seed)


PLUGIN = AlgorithmPlugin(
    name="sft",
    sections={"sft": SFTConfig, "data": DataConfig},
    prepare="rl_algos.sft.data:prepare",
    run="rl_algos.sft.loop:run",
    generates=False,
    spec=spec,
    checks=(check_validation, check_environments, check_lengths),
)
