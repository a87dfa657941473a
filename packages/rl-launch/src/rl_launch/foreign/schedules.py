"""Learning-rate schedules of other systems as lists of torch's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rl_algos.data.config import DatasetConfig
from rl_algos.data.sources.load import load_rows
from rl_core.errors import DataError

_TORCH = "torch.optim.lr_scheduler"
FOREVER = 10**10
"""Steps of a schedule that never ends."""
_MIN_START = 1e-8
"""torch's LinearLR cannot start at 0."""


def warmup_and_decay(
    rate: float, *, warmup: int, decay: str, end: int, last: int, start_rate: float = 0.0, end_rate: float = 0.0
) -> list[dict[str, Any]]:
    """Return a linear warmup, a decay, and the last rate of the decay.

    Args:
        rate: Learning rate after the warmup.
        warmup: Steps of the warmup.
        decay: `constant`, `linear` or `cosine`.
        end: Last step of the decay.
        last: Last step of the run.
        start_rate: Learning rate at the start of the warmup.
        end_rate: Learning rate at the end of the decay.
    """
    schedules, milestones = [], []
    length = max(1, end - warmup)
    if warmup > 0:
        start = min(1.0, max(round(start_rate / rate, 12), _MIN_START))
        schedules.append(_schedule("LinearLR", start_factor=start, end_factor=1.0, total_iters=warmup))
        milestones.append(warmup)
    if decay == "linear":
        schedules.append(_schedule("LinearLR", start_factor=1.0, end_factor=end_rate / rate, total_iters=length))
    elif decay == "cosine":
        schedules.append(_schedule("CosineAnnealingLR", T_max=length, eta_min=end_rate))
        if end < last:  # the cosine of torch rises again
            milestones.append(end)
            schedules.append(_schedule("ConstantLR", factor=end_rate / rate, total_iters=FOREVER))
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
