"""Supervised fine-tuning as an algorithm plugin."""

from __future__ import annotations

from collections.abc import Iterator

from rl_algos.data.config import DataConfig, dataset_names
from rl_algos.requirement import LOSSES
from rl_algos.sft.config import SFTConfig, SFTRoot
from rl_core.config import Problem
from rl_core.model import ModelSpec
from rl_core.plugins import AlgorithmPlugin, ModelNeed

_OF_VALIDATION = (
    "val_period",
    "val_batches",
    "val_global_batch_size",
    "val_at_start",
    "val_at_end",
    "stop_at_validation_loss",
)


def check_validation(config: SFTRoot) -> Iterator[Problem]:
    """Settings of a validation that has no data."""
    if config.data.validation is not None:
        return
    for key in _OF_VALIDATION:
        if key in config.sft.model_fields_set and getattr(config.sft, key):
            yield Problem(f"sft.{key}", "there is nothing to validate on; set data.validation, or remove this key")


def check_environments(config: SFTRoot) -> Iterator[Problem]:
    """Environments, which supervised fine-tuning has none of."""
    for key, dataset in config.data.sections():
        if dataset.env_name is not None:
            yield Problem(f"{key}.env_name", "supervised fine-tuning scores nothing; remove this key")


def check_mixture(config: SFTRoot) -> Iterator[Problem]:
    """A unit of weights that are not there."""
    weights = [dataset.weight for dataset in config.data.train_datasets]
    if config.sft.mix_by != "rows" and (None in weights or len(weights) == 1):
        yield Problem(
            "sft.mix_by", "there are no weights to mix by; give each of several datasets in data.train a `weight`"
        )


def check_lengths(config: SFTRoot) -> Iterator[Problem]:
    """Rows longer than the model may see."""
    limit, most = config.data.max_input_seq_length, config.policy.max_total_sequence_length
    if limit is not None and limit > most:
        yield Problem(
            "data.max_input_seq_length",
            f"got {limit}, above policy.max_total_sequence_length ({most}); lower it, or remove it to have them equal",
        )


def validation_metrics(config: SFTRoot) -> list[str]:
    """What a validation records; nothing where there is none."""
    sft = config.sft
    validates = config.data.validation is not None and (sft.val_period or sft.val_at_start or sft.val_at_end)
    if not validates:
        return []
    names = dataset_names(config.data.validation_datasets, "validation")
    by_dataset = [f"val/{name}/loss" for name in names] if len(names) > 1 else []
    return ["val/loss", "val/num_tokens", *by_dataset]


def models(config: SFTRoot) -> dict[str, ModelNeed]:
    """The policy trains and needs no reference."""
    return {"policy": ModelNeed("policy", ModelSpec(seed=config.sft.seed))}


PLUGIN = AlgorithmPlugin(
    name="sft",
    sections={"sft": SFTConfig, "data": DataConfig},
    load="rl_algos.data.examples:load",
    prepare="rl_algos.sft.data:prepare",
    run="rl_algos.sft.loop:run",
    generates=False,
    models=models,
    requirements=(LOSSES,),
    validation_metrics=validation_metrics,
    checks=(check_validation, check_environments, check_mixture, check_lengths),
)
