"""Settings of every algorithm that learns from given rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from rl_algos.data.config import DataConfig, dataset_names
from rl_core.config import Config, WhenChanged


class SupervisedConfig(Config):
    """Base of the section of an algorithm that learns from given rows."""

    also_called: ClassVar[Mapping[str, str]] = {
        "max_val_samples": "val_batches",
        "max_val_prompts": "val_batches",
        "max_prompts": "val_batches",
    }

    max_num_epochs: Annotated[int | None, WhenChanged.GOAL] = Field(default=None, gt=0)
    """Maximum number of passes over the training data. If unset, 1 if `max_num_steps` is unset too, otherwise
    unlimited."""
    max_num_steps: Annotated[int | None, WhenChanged.GOAL] = Field(default=None, gt=0)
    """Maximum number of optimizer steps. If unset, only `max_num_epochs` limits the run."""
    val_period: Annotated[int, WhenChanged.RESUME] = Field(default=10, ge=0)
    """Number of steps between validations; 0 turns them off. Without validation data there are none."""
    val_batches: Annotated[int | None, WhenChanged.RESUME] = Field(default=None, gt=0)
    """Maximum number of batches per validation dataset; all of its data if unset."""
    val_global_batch_size: Annotated[int | None, WhenChanged.RESUME] = Field(default=None, gt=0)
    """Number of rows per validation batch; `policy.train_global_batch_size` if unset."""
    val_at_start: Annotated[bool, WhenChanged.RESUME] = False
    """Validate before the first step too."""
    val_at_end: Annotated[bool, WhenChanged.RESUME] = False
    """Validate after the last step too."""
    stop_at_validation_loss: Annotated[float | None, WhenChanged.GOAL] = Field(default=None, gt=0)
    """Validation loss at or below which the run ends. If unset, the run does not end early."""
    seed: int = Field(default=42, ge=0)
    """Seed for the order of the data."""

    @property
    def num_epochs(self) -> int | None:
        """Effective maximum number of epochs; None if only steps limit the run."""
        return 1 if self.max_num_epochs is None and self.max_num_steps is None else self.max_num_epochs


def validation_metrics(section: SupervisedConfig, data: DataConfig, reported: Iterable[str]) -> list[str]:
    """Return the metrics that a validation records; none if there is no validation.

    Args:
        section: Config section of the algorithm, with its times of validation.
        data: Config section `data`.
        reported: Metrics of each dataset, including `loss`.
    """
    if not data.validation_datasets or not (section.val_period or section.val_at_start or section.val_at_end):
        return []
    names = sorted(set(dataset_names(data.validation_datasets, "validation")))
    prefixes = ["val", *(f"val/{name}" for name in names)] if len(names) > 1 else ["val"]
    return [f"{prefix}/{name}" for prefix in prefixes for name in reported]
