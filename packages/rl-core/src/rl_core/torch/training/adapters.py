"""Several adapters on one base: the losses of their rows, and the files of one of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD

from rl_core.model import ADAPTER, UNDIVIDED, AdapterLosses, AdapterSettings, Loss, SavedFile
from rl_core.model_config import SchedulerConfig
from rl_core.plugins import resolve
from rl_core.torch.heads.reads import ROW_READS
from rl_core.torch.loss import LossSums, MetricSum, Rows
from rl_core.torch.optim.optimizer import build_schedule
from rl_core.torch.process_group import on_rank0
from rl_core.torch.residency import Residency
from rl_core.torch.training.backend import RankAdapters, RankMesh
from rl_core.torch.training.checkpoint_files import (
    SHARDS,
    KeptSavePlanner,
    exported_files,
    verify_files,
    write_checkpoint,
)
from rl_core.torch.training.peft_form import AdapterExport
from rl_core.torch.training.step import TrainingSteps

SETTINGS = "adapter.json"


def sums_by_adapter(loss: AdapterLosses, reads: Mapping[str, Tensor], rows: Rows) -> LossSums:
    """Return the sums of each adapter's loss over its own rows, under names that begin with the adapter's place."""
    places = rows.host_column(ADAPTER)
    objective: dict[str, Tensor] = {}
    metrics: dict[str, MetricSum] = {}
    for place, own in loss.losses.items():
        chosen = np.flatnonzero(places == place)
        if not len(chosen):
            continue
        part, found = rows, reads
        if len(chosen) < len(rows):
            part, tokens = rows.select(chosen)
            found = {name: values[chosen if name in ROW_READS else tokens] for name, values in reads.items()}
        compute: Callable[[Loss, Mapping[str, Tensor], Rows], LossSums] = resolve(own.implementation)
        sums = compute(own, found, part)
        for name, value in sums.objective.items():
            total = UNDIVIDED if name == UNDIVIDED else f"{place}/{name}"
            objective[total] = objective[total] + value if total in objective else value
            shown = f"{place}/loss" if len(sums.objective) == 1 else f"{place}/loss/{name}"
            metrics[shown] = (
                MetricSum(value, reduction="sum") if name == UNDIVIDED else MetricSum(value, total, reduction="mean")
            )
        for name, each in sums.metrics.items():
            weight = each.denominator
            metrics[f"{place}/{name}"] = replace(
                each, denominator=f"{place}/{weight}" if isinstance(weight, str) else weight
            )
    return LossSums(objective, metrics)


class WorkerAdapters:
    """This rank's part of `rl_core.model.Adapters`; every method is collective.

    Args:
        adapters: The adapters as a backend keeps them.
        steps: Gradients of the model; None if it does not train.
        export: Writes adapters for peft.
        export_merged: Writes the weights with the adapter that is merged in, into a folder; returns the files.
        residency: Residency of the model.
        mesh: Ranks of the model.
    """

    def __init__(
        self,
        adapters: RankAdapters,
        steps: TrainingSteps | None,
        export: AdapterExport,
        export_merged: Callable[[str], tuple[SavedFile, ...]],
        residency: Residency,
        mesh: RankMesh,
    ) -> None:
        self._adapters, self._steps, self._export, self._export_merged = adapters, steps, export, export_merged
        self._residency, self._mesh = residency, mesh

    def make(self, place: int, settings: AdapterSettings) -> None:
        """Put a new adapter into a place.

        Raises:
            ValueError: If there is no such place, or the rank is larger than `lora_cfg.dim`.
        """
        self._begin(place)
        if settings.rank > self._adapters.max_rank:
            raise ValueError(
                f"an adapter of rank {settings.rank} does not fit a model with lora_cfg.dim={self._adapters.max_rank}"
            )
        self._adapters.make(place, settings)

    def save(self, place: int, path: str) -> tuple[SavedFile, ...]:
        """Write the factors and the optimizer state of an adapter; returns the files of this rank."""
        self._require(place)
        folder = Path(path)
        on_rank0(self._mesh.control, lambda: (folder / SHARDS).mkdir(parents=True))
        settings = self._adapters.settings.get(place)
        files = {}
        if self._mesh.rank == 0:
            files[SETTINGS] = json.dumps(None if settings is None else asdict(settings)).encode()
        tensors = self._adapters.tensors(place)
        return write_checkpoint(folder, tensors, files, group=self._mesh.control, planner=KeptSavePlanner())

    def load(self, place: int, path: str, *, with_optimizer: bool = True, files: Sequence[SavedFile] = ()) -> None:
        """Put an adapter that was saved into a place.

        Raises:
            ValueError: If there is no such place, or no adapter in the folder.
            CheckpointDamaged: Naming a file that is missing or differs from `files`.
        """
        self._require(place)
        verify_files(Path(path), files, self._mesh.control)
        self._begin(place)
        described = Path(path) / SETTINGS
        if not described.is_file():
            raise ValueError(f"there is no saved adapter at {path}: {SETTINGS} is missing")
        fields = json.loads(described.read_text(encoding="utf-8"))
        settings = None if fields is None else AdapterSettings.of(fields)
        self._adapters.restore(place, Path(path), settings, with_optimizer=with_optimizer)

    def export(self, place: int, path: str, *, merged: bool = False) -> tuple[SavedFile, ...]:
        """Write an adapter for peft, or the weights with the adapter merged in."""
        self._require(place)
        if merged:
            with self._adapters.merging(place):
                return self._export_merged(path)
        self._export.write(Path(path), self._adapters.factors(place), self._adapters.settings.get(place))
        return exported_files(Path(path), self._mesh.control)

    def rates(self, lr: float, scheduler: Sequence[SchedulerConfig], count: int) -> list[float]:
        """Return the learning rates that a schedule gives the first `count` steps of an adapter."""
        stand_in = SGD([torch.zeros(1, requires_grad=True)], lr=lr)
        schedule = build_schedule(scheduler, stand_in)
        rates: list[float] = []
        for _ in range(count):
            rates.append(float(stand_in.param_groups[0]["lr"]))
            stand_in.step()
            if schedule is not None:
                schedule.step()
        return rates

    def _begin(self, place: int) -> None:
        self._require(place)
        if self._steps is not None:
            self._steps.discard(place)

    def _require(self, place: int) -> None:
        self._residency.require("parameters", "optimizer")
        if not 0 <= place < self._adapters.count:
            raise ValueError(
                f"there is no adapter {place}: the model has {self._adapters.count} (lora_cfg.max_adapters)"
            )
        dist.barrier(self._mesh.control)
