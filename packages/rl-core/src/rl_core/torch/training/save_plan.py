"""Plans of saves, which stay the same as long as a model does."""

from __future__ import annotations

import itertools

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner

_numbers = itertools.count()


class KeptSavePlanner(DefaultSavePlanner):
    """Plans a save once: later ones whose tensors have the same names and places send nothing to rank 0, which
    otherwise gathers and compares the items of all ranks (a million for a large model on hundreds of ranks).

    Torch keeps plans per class and process. Here they belong to the object, which is used for every save of the same
    tensors, and `forget` removes them.

    Args:
        flatten: True if values may be nested dicts, or tensors that only torch knows to be sharded.
    """

    def __init__(self, *, flatten: bool = True) -> None:
        super().__init__(flatten_state_dict=flatten, flatten_sharded_tensors=flatten, enable_plan_caching=True)
        self._cached_plans_key = f"{type(self).__name__} {next(_numbers)}"

    @property
    def is_kept(self) -> bool:
        """Return whether the next save of the same tensors needs no new plan on this rank."""
        return self._cached_plans_key in SavePlanner._cached_final_save_plan

    def forget(self) -> None:
        """Remove what was planned, on this rank."""
        for kept in (
            SavePlanner._cached_save_plan,
            SavePlanner._cached_final_save_plan,
            SavePlanner._cached_all_plans,
            SavePlanner._cached_global_plan,
            SavePlanner._cached_metadata,
        ):
            kept.pop(self._cached_plans_key, None)
