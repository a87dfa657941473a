"""The adapters of a model by name, whose passes are computed together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rl_core.data.batch import Batch
from rl_core.data.microbatch import PAIR
from rl_core.data.ragged import Ragged
from rl_core.model import (
    ADAPTER,
    AdapterLosses,
    AdapterSettings,
    Loss,
    Metrics,
    Model,
    SavedFile,
    StepSettings,
    read_columns,
)


class AdapterWork(NamedTuple):
    """Rows and a loss for the gradient of one adapter.

    Args:
        adapter: Name.
        batch: Rows of tokens, and the columns of the loss.
        loss: Divided by its own totals over these rows alone.
    """

    adapter: str
    batch: Batch
    loss: Loss


class AdapterPlaces:
    """Adapters by name in the places of a model that has several. Calls come one after another.

    Args:
        model: The model.
        num_slots: Number of its places.

    Attributes:
        num_slots: As given.
    """

    def __init__(self, model: Model, num_slots: int) -> None:
        self.num_slots = num_slots
        self._model = model
        self._places: dict[str, int] = {}

    def create(self, adapter: str, settings: AdapterSettings) -> None:
        """Make a new adapter, or make one anew.

        Raises:
            ValueError: If all places are taken.
        """
        self._model.adapters.make(self._place(adapter), settings)

    def accumulate(self, works: Sequence[AdapterWork]) -> list[tuple[Metrics, Batch]]:
        """Add the gradients of several adapters in one pass; return, for each, metrics of its loss, and the columns of
        the loss's reads for its rows."""
        batch, losses = self._joined(works)
        metrics, columns = self._model.accumulate(batch, losses)
        parts = columns.local().split([len(work.batch) for work in works])
        return [
            (self._own(work, metrics), part.only([name for read in work.loss.reads for name in read.columns]))
            for work, part in zip(works, parts, strict=True)
        ]

    def measure(self, work: AdapterWork) -> Metrics:
        """Return the metrics of a loss without a gradient."""
        return self._own(work, self._model.evaluate(*self._joined([work])))

    def columns(self, adapter: str, batch: Batch) -> Batch:
        """Return rows with the column that gives them an adapter."""
        return batch.with_columns({ADAPTER: np.full(len(batch), self._places[adapter], dtype=np.int32)})

    def apply(self, adapter: str, settings: StepSettings) -> Metrics:
        """Make one optimizer step of an adapter."""
        return self._model.apply(settings, adapter=self._places[adapter])

    def save(self, adapter: str, folder: Path) -> tuple[SavedFile, ...]:
        """Write an adapter and its optimizer state; return the files."""
        return self._model.adapters.save(self._places[adapter], str(folder))

    def load(self, adapter: str, folder: Path, *, with_optimizer: bool = True, files: Sequence[SavedFile] = ()) -> None:
        """Make or replace an adapter by a saved one; see `rl_core.model.Adapters.load`."""
        self._model.adapters.load(self._place(adapter), str(folder), with_optimizer=with_optimizer, files=files)

    def export(self, adapter: str, folder: Path, *, merged: bool = False) -> tuple[SavedFile, ...]:
        """Write an adapter for engines, or the weights with it merged in; return the files."""
        return self._model.adapters.export(self._places[adapter], str(folder), merged=merged)

    def discard(self, adapter: str) -> None:
        """Begin a new gradient of an adapter; the one so far is not stepped."""
        self._model.discard(adapter=self._places[adapter])

    def release(self, adapter: str) -> None:
        """Forget an adapter."""
        place = self._places.pop(adapter, None)
        if place is not None:
            self._model.discard(adapter=place)

    def _place(self, adapter: str) -> int:
        if adapter not in self._places:
            free = set(range(self.num_slots)) - set(self._places.values())
            if not free:
                raise ValueError(f"all {self.num_slots} places are taken; release an adapter first")
            self._places[adapter] = min(free)
        return self._places[adapter]

    def _joined(self, works: Sequence[AdapterWork]) -> tuple[Batch, AdapterLosses]:
        """Return the rows of all works, which have zeros in columns of others, and their losses."""
        losses = AdapterLosses({self._places[work.adapter]: work.loss for work in works})
        names = tuple(dict.fromkeys((*losses.columns, *read_columns(losses.reads))))
        likes = {name: work.batch[name] for work in works for name in names if name in work.batch}
        parts, num_pairs = [], 0
        for work in works:
            rows = self.columns(work.adapter, work.batch)
            missing = [name for name in names if name not in rows]
            rows = rows.with_columns({name: _zeros(likes[name], rows) for name in missing})
            if PAIR in rows:
                pairs = rows.array(PAIR)
                rows, num_pairs = rows.with_columns({PAIR: pairs + num_pairs}), num_pairs + int(pairs.max()) + 1
            parts.append(rows.only([name for name in dict.fromkeys(("tokens", PAIR, *names)) if name in rows]))
        return Batch.concat(parts), losses

    def _own(self, work: AdapterWork, metrics: Metrics) -> Metrics:
        prefix = f"{self._places[work.adapter]}/"
        return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}


def _zeros(column: Ragged | np.ndarray, rows: Batch) -> Ragged | np.ndarray:
    """Return zeros in the form of another batch's column, for these rows."""
    if isinstance(column, Ragged):
        offsets = rows.ragged("tokens").offsets
        return Ragged(np.zeros((int(offsets[-1]), *column.values.shape[1:]), column.values.dtype), offsets)
    return np.zeros((len(rows), *column.shape[1:]), column.dtype)
