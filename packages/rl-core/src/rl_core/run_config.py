"""The resolved config of a run, as far as backends check it."""

from __future__ import annotations

from typing import Protocol

from rl_core.model_config import GeneratingModelConfig


class ClusterSection(Protocol):
    """Where a run computes."""

    @property
    def device(self) -> str:
        """`auto`, `cuda`, `cpu` or `rehearsal`."""

    @property
    def num_nodes(self) -> int:
        """Number of machines."""

    @property
    def gpus_per_node(self) -> int:
        """GPUs of each machine."""


class RunConfig(Protocol):
    """The sections that every config of a run or of a single model has."""

    @property
    def cluster(self) -> ClusterSection:
        """Devices of the run."""

    @property
    def policy(self) -> GeneratingModelConfig:
        """The model that trains; it has a section `generation` only if the algorithm generates."""
