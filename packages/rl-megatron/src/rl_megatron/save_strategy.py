"""Writing a distributed checkpoint from the calling process."""

from __future__ import annotations

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


class PlainSaveStrategy(SaveShardedStrategy):
    """Megatron's `torch_dist` format, written without the processes that Megatron's own strategy forks: a worker may be
    a process that must not have children, and a fork of one with a CUDA context is best avoided.

    Args:
        group: all ranks, on gloo.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__("torch_dist", 1)
        self._group = group

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Write this rank's shards; collective."""
        named, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        dcp.save(
            mcore_to_pyt_state_dict(named, False),
            storage_writer=dcp.FileSystemWriter(checkpoint_dir),
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
