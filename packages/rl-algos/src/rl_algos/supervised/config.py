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
    """Passes over the training data; unbounded if unset, but 1 if `max_num_steps` is unset as well."""
    max_num_steps: Annotated[int | None, WhenChanged.GOAL] = Field(default=None, gt=0)
    """Most optimizer steps; as many as the epochs have if unset."""
    val_period: Annotated[int, WhenChanged.RESUME] = Field(default=10, ge=0)
    """Steps from one validation to the next; 0 for none. Only if there is data to validate on."""
    val_batches: Annotated[int | None, WhenChanged.RESUME] = Field(default=None, gt=0)
    """Batches of a validation, of each dataset; all the validation data if unset."""
    val_global_batch_size: Annotated[int | None, WhenChanged.RESUME] = Field(default=None, gt=0)
    """Rows of a validation batch; `policy.train_global_batch_size` if unset."""
    val_at_start: Annotated[bool, WhenChanged.RESUME] = False
    """Validate before the first step as well."""
    val_at_end: Annotated[bool, WhenChanged.RESUME] = False
    """Validate after the last step as well."""
    stop_at_validation_loss: Annotated[float | None, WhenChanged.GOAL] = Field(default=None, gt=0)
    """End the run once the validation loss is at or below this."""
    seed: int = Field(default=42, ge=0)
    """Seed of the order of the data."""

    @property
    def num_epochs(self) -> int | None:
        """Epochs in force, None if steps alone bound the run."""
        return 1 if self.max_num_epochs is None and self.max_num_steps is None else self.max_num_epochs


def validation_metrics(section: SupervisedConfig, data: DataConfig, reported: Iterable[str]) -> list[str]:
    """Names of the metrics that a validation records; none if there is no validation.

    Args:
        reported: metrics of each dataset, `loss` among them.
    """
    if not data.validation_datasets or not (section.val_period or section.val_at_start or section.val_at_end):
        return []
    names = sorted(set(dataset_names(data.validation_datasets, "validation")))
    prefixes = ["val", *(f"val/{name}" for name in names)] if len(names) > 1 else ["val"]
    return [f"{prefix}/{name}" for prefix in prefixes for name in reported]
