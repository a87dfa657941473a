"""Metrics and rollouts as JSON lines."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from rl_core.rollout import Rollout, RolloutGroup

_STEP_FILE = re.compile(r"step_(\d+)\.jsonl")


class MetricsFile:
    """`metrics.jsonl`: one object per step, in the order of the steps.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a step's line; a number that is not finite becomes null, which JSON has."""
        line = json.dumps({"step": step, **{name: _number(value) for name, value in metrics.items()}}, allow_nan=False)
        with self._path.open("a") as file:
            file.write(line + "\n")

    def read(self) -> list[dict[str, Any]]:
        """The lines; one that was cut short ends them."""
        if not self._path.exists():
            return []
        rows = []
        for line in self._path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return rows

    def cut_back(self, step: int) -> None:
        """Drop what was written of later steps: they will come again."""
        kept = [row for row in self.read() if row["step"] <= step]
        aside = self._path.with_name(f"{self._path.name}.part")
        with aside.open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in kept)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(self._path)


class RolloutFiles:
    """`rollouts/step_<n>.jsonl`: one object per rollout.

    Args:
        folder: where they are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def append(self, step: int, groups: Sequence[RolloutGroup], advantages: np.ndarray) -> None:
        """Write rollouts, flattened; those beyond the advantages, which trained nothing, have null."""
        rows = [(group, index, rollout) for group in groups for index, rollout in enumerate(group.rollouts)]
        with (self._folder / f"step_{step}.jsonl").open("a", encoding="utf-8") as file:
            for row, advantage in zip_longest(rows, np.asarray(advantages).tolist()):
                if row is None:
                    raise ValueError(f"{len(advantages)} advantages for {len(rows)} rollouts")
                group, index, rollout = row
                described = _described(group, index, rollout, advantage)
                file.write(json.dumps(described, default=_foreign, ensure_ascii=False) + "\n")

    def cut_back(self, step: int) -> None:
        """Drop the files of later steps."""
        for path in self._folder.glob("step_*.jsonl"):
            match = _STEP_FILE.fullmatch(path.name)
            if match and int(match[1]) > step:
                path.unlink()


def _described(group: RolloutGroup, index: int, rollout: Rollout, advantage: float | None) -> dict[str, Any]:
    prompt = group.prompt
    return {
        "prompt_id": prompt.id,
        "dataset": prompt.dataset,
        "environment": prompt.environment,
        "index": index,
        "prompt": prompt.messages,
        "turns": [
            {"text": turn.text, "observation": turn.observation, "rewards": dict(turn.rewards)}
            for turn in rollout.turns
        ],
        "rewards": dict(rollout.rewards),
        "advantage": None if advantage is None else _number(advantage),
        "status": rollout.status,
        "failure": rollout.failure,
        "stop_reason": rollout.stop_reason,
        "num_sampled": rollout.num_sampled,
        "weight_versions": sorted({span.version for span in rollout.spans}),
        "info": rollout.info,
    }


def _number(value: Any) -> float | int | None:
    plain = value.item() if isinstance(value, np.generic | np.ndarray) else value
    if isinstance(plain, float) and not math.isfinite(plain):
        return None
    return plain


def _foreign(value: Any) -> Any:
    """A value that JSON has no form for: numpy's as plain ones, an environment's own objects as text."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return dict(value) if isinstance(value, Mapping) else repr(value)
