"""Optimizer steps that are skipped because their gradient is not finite."""

from __future__ import annotations

import logging
import math

from rl_core.errors import RLError

_log = logging.getLogger(__name__)


class SkippedSteps:
    """Decides whether the optimizer steps, and ends the run after too many steps in a row without a finite gradient.

    Every rank keeps its own count and asks with the same global norm, so all ranks decide alike without a further
    collective. The count is not part of a checkpoint: a resumed run starts at 0.

    The usage loop::

        steps = skipped.admits(norm)
        if steps:
            clip(norm)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()                               # also after a skipped step: it counts calls
        metrics = {"skipped_steps": Metric(float(not steps), reduction="max"), ...}

    Args:
        limit: Steps in a row that may be skipped (`ModelConfig.max_skipped_steps`).
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_a_row = 0

    def admits(self, grad_norm: float) -> bool:
        """Return whether to step with a gradient of this norm, the same on every rank.

        Raises:
            RLError: If it is not finite and neither were the `limit` gradients before it.
        """
        if math.isfinite(grad_norm):
            self._in_a_row = 0
            return True
        self._in_a_row += 1
        if self._in_a_row > self._limit:
            raise RLError(
                f"the gradient norm is {grad_norm} in {self._in_a_row} training steps in a row; the weights were not "
                f"changed by them. max_skipped_steps={self._limit} in the model's config section allows {self._limit}. "
                "Lower the learning rate, or check the loss of the last steps"
            )
        _log.warning("the gradient norm is %s; the optimizer step is skipped (%d in a row)", grad_norm, self._in_a_row)
        return False
