"""Learning-rate schedules of other systems as lists of torch's."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_algos.data.config import DatasetConfig
from rl_algos.data.load import load_rows
from rl_core.errors import DataError

_TORCH = "torch.optim.lr_scheduler"
_COUNTS = ("total_iters", "T_max", "T_0", "step_size")
_FOREVER = 10**10
_LEAST_START = 1e-8
"""torch's LinearLR cannot start at 0."""


def scaled(schedules: Sequence[Mapping[str, Any]], factor: int) -> list[dict[str, Any]]:
    """Schedules whose counts of steps are multiplied.

    Args:
        schedules: Entries of a `scheduler` section; not changed.
        factor: Optimizer steps here for each step that the schedules count.
    """
    found = [copy.deepcopy(dict(each)) for each in schedules]
    for each in found if factor > 1 else ():
        arguments = each.get("kwargs") or {}
        for name in _COUNTS:
            if isinstance(arguments.get(name), int) and arguments[name] < _FOREVER:
                arguments[name] *= factor
        if "milestones" in each:
            each["milestones"] = [step * factor for step in each["milestones"]]
        if isinstance(arguments.get("milestones"), list):
            arguments["milestones"] = [step * factor for step in arguments["milestones"]]
    return found


def warmup_and_decay(
    rate: float, *, warmup: int, decay: str, end: int, last: int, start_rate: float = 0.0, end_rate: float = 0.0
) -> list[dict[str, Any]]:
    """A linear warmup, a decay, and the last rate of the decay.

    Args:
        rate: Learning rate after the warmup.
        warmup: Steps of the warmup.
        decay: `constant`, `linear` or `cosine`.
        end: Step at which the decay ends.
        last: Last step of the run.
        start_rate: Learning rate at the start of the warmup.
        end_rate: Learning rate at the end of the decay.
    """
    schedules, milestones = [], []
    length = max(1, end - warmup)
    if warmup > 0:
        start = min(1.0, max(round(start_rate / rate, 12), _LEAST_START))
        schedules.append(_schedule("LinearLR", start_factor=start, end_factor=1.0, total_iters=warmup))
        milestones.append(warmup)
    if decay == "linear":
        schedules.append(_schedule("LinearLR", start_factor=1.0, end_factor=end_rate / rate, total_iters=length))
    elif decay == "cosine":
        schedules.append(_schedule("CosineAnnealingLR", T_max=length, eta_min=end_rate))
        if end < last:  # torch's cosine rises again
            milestones.append(end)
            schedules.append(_schedule("ConstantLR", factor=end_rate / rate, total_iters=_FOREVER))
    used = milestones[: len(schedules) - 1]
    return [*schedules, {"milestones": used}] if used else schedules


def count_rows(train: Any, folder: Path) -> int | None:
    """Return the number of rows to train on; None if they are not in local files that can be read.

    Args:
        train: `data.train` of a recipe.
        folder: Folder that relative paths start from.
    """
    rows = 0
    for each in train if isinstance(train, list) else [train]:
        if "data_path" not in each:
            return None
        path = str(folder / Path(each["data_path"]).expanduser())
        try:
            number = len(load_rows(DatasetConfig(data_path=path, split=each.get("split")), "train"))
        except (DataError, OSError):
            return None
        held = each.get("split_validation_size") or 0
        rows += number - math.ceil(held * number if held < 1 else held)
    return rows


def _schedule(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": f"{_TORCH}.{name}", "kwargs": arguments}


@dataclass(frozen=True)
class MegatronSchedule:
    """The schedule of Megatron's optimizer.

    Args:
        rate: Highest learning rate.
        least: Lowest learning rate of the decay.
        start: Learning rate at the start of the warmup.
        warmup: Steps of the warmup.
        style: Megatron's name of the decay.
        total: Steps at which the decay ends; None for those of the run.
        changes_decay: Whether weight decay changes while training.
    """

    rate: float
    least: float
    start: float
    warmup: int
    style: str
    total: int | None
    changes_decay: bool

    @classmethod
    def of(cls, optimizer: Mapping[str, Any], scheduler: Mapping[str, Any]) -> MegatronSchedule:
        """The schedule by the sections `optimizer` and `scheduler`."""
        rate = optimizer.get("lr") or 1e-6
        decay = scheduler.get("start_weight_decay"), scheduler.get("end_weight_decay")
        return cls(
            rate,
            optimizer.get("min_lr") or 0.0,
            scheduler.get("lr_warmup_init") or 0.0,
            scheduler.get("lr_warmup_iters") or 0,
            scheduler.get("lr_decay_style") or "constant",
            scheduler.get("lr_decay_iters"),
            decay[0] != decay[1] and scheduler.get("weight_decay_incr_style", "constant") != "constant",
        )

    @property
    def problem(self) -> tuple[str, str] | None:
        """The key that asks for a schedule which is not offered, and the schedule; None if there is none."""
        if self.style not in ("constant", "linear", "cosine"):
            return "lr_decay_style", f"the learning-rate schedule {self.style}"
        if self.changes_decay:
            return "end_weight_decay", "weight decay that changes during training"
        return None

    def torch_schedules(self, last: int) -> list[dict[str, Any]]:
        """The same as torch schedules.

        Args:
            last: Steps of the run.
        """
        return warmup_and_decay(
            self.rate,
            warmup=self.warmup,
            decay=self.style,
            end=self.total or last,
            last=last,
            start_rate=self.start,
            end_rate=self.least,
        )
