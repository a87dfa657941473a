"""Hyperparameters of an optimizer and its schedule, as a checkpoint holds them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rl_core.torch.optim.optimizer import WAYS_TO_STEP


class Hyperparameters:
    """The settings of an optimizer's parameter groups, and the position of its schedule.

    A run with the settings of the checkpoint continues exactly as it was. A run with others, such as a branch with a
    lower learning rate, takes its own, and its schedule is brought to the step that the checkpoint was saved at.

    Args:
        optimizer: Just built, before its first step.
        schedule: Just built over it; None for constant settings.
    """

    def __init__(self, optimizer: Optimizer, schedule: LRScheduler | None) -> None:
        self._optimizer = optimizer
        self._schedule = schedule
        self._beginning = copy.deepcopy(self._now())
        self._num_steps = 0
        optimizer.register_step_post_hook(self._count)

    def state(self) -> dict[str, Any]:
        """Settings as of now and as of the beginning, which says what the config was, and steps made."""
        return {**self._now(), "beginning": self._beginning, "num_steps": self._num_steps}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `state` returned. State without `beginning` is taken as it is."""
        schedule = saved["schedule"] or {}
        self._num_steps = saved.get("num_steps", schedule.get("last_epoch", 0))
        if saved.get("beginning", self._beginning) == self._beginning:
            self._set(saved)
            return
        self._set(copy.deepcopy(self._beginning))
        if self._schedule is None:
            return
        with warnings.catch_warnings():
            # torch warns of a schedule that steps before its optimizer does
            warnings.simplefilter("ignore")
            for _ in range(schedule.get("last_epoch", self._num_steps)):
                self._schedule.step()

    def _now(self) -> dict[str, Any]:
        return {
            "param_groups": [_without(group, "params", *WAYS_TO_STEP) for group in self._optimizer.param_groups],
            "schedule": None if self._schedule is None else self._schedule.state_dict(),
        }

    def _set(self, state: Mapping[str, Any]) -> None:
        for group, saved in zip(self._optimizer.param_groups, state["param_groups"], strict=True):
            group.update(_without(saved, *WAYS_TO_STEP))
        if self._schedule is not None:
            self._schedule.load_state_dict(state["schedule"])

    def _count(self, optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        self._num_steps += 1


def _without(group: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in names}
