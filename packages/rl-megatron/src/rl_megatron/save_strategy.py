"""Writing a distributed checkpoint from the calling process, at once or in the background."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)

from rl_core.torch.background_save import unwritten_is_told


class PlainSaveStrategy(SaveShardedStrategy):
    """Megatron's `torch_dist` format, written without the processes that Megatron's own strategy forks: a worker may be
    a process that must not have children, and a fork of one with a CUDA context is best avoided.

    Args:
        group: all ranks, on gloo; while shards are written it is used for nothing else.
        run: called with what writes this rank's shards, which is collective over the group and raises an `RLError`
            where one of its ranks cannot; it may put it off.
    """

    def __init__(self, group: dist.ProcessGroup, run: Callable[[Callable[[], None]], None]) -> None:
        super().__init__("torch_dist", 1)
        self._group = group
        self._run = run

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Have this rank's shards written."""
        named, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        state = mcore_to_pyt_state_dict(named, False)
        self._run(lambda: self._write(state, Path(checkpoint_dir)))

    def _write(self, state: Any, folder: Path) -> None:
        with unwritten_is_told(folder):
            dcp.save(
                state,
                storage_writer=dcp.FileSystemWriter(folder),
                planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
                process_group=self._group,
            )

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether objects that are no tensors can be saved."""
        return True

    def check_backend_compatibility(self, loaded_version: Any) -> None:
        """Nothing to check: it writes what Megatron's strategy of this version reads."""

    def check_version_compatibility(self, loaded_version: Any) -> None:
        """Nothing to check: it writes what Megatron's strategy of this version reads."""
