"""Finished rollout groups as plain data of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from rl_core.data.batch import Batch, Column
from rl_core.data.ragged import Ragged
from rl_core.rollouts.group import RolloutGroup, RolloutReports
from rl_core.rollouts.rollout import Prompt


def group_state(group: RolloutGroup) -> Mapping[str, Any]:
    """Plain data of a group without its prompt; columns that lie elsewhere are fetched."""
    columns = group.columns.local()
    return {
        "rollouts": asdict(group.rollouts),
        "columns": {name: _column_state(columns[name]) for name in columns},
        "opponents": None if group.opponents is None else group_state(group.opponents),
    }


def group_from(state: Mapping[str, Any], prompt: Prompt) -> RolloutGroup:
    """The group of a prompt whose plain data this is.

    Raises:
        ValueError: If it is a group of another prompt.
    """
    rollouts = RolloutReports(**state["rollouts"])
    if rollouts.prompt_id != prompt.id:
        raise ValueError(f"the saved rollouts are of prompt {rollouts.prompt_id}, not of {prompt.id}")
    columns = Batch({name: _column(saved) for name, saved in state["columns"].items()})
    # a checkpoint of an earlier release has no opponents
    opponents = state.get("opponents")
    return RolloutGroup(prompt, rollouts, columns, None if opponents is None else group_from(opponents, prompt))


def _column_state(column: Ragged | np.ndarray) -> Mapping[str, np.ndarray]:
    return {"values": column.values, "offsets": column.offsets} if isinstance(column, Ragged) else {"values": column}


def _column(state: Mapping[str, np.ndarray]) -> Column:
    return Ragged(state["values"], state["offsets"]) if "offsets" in state else state["values"]
