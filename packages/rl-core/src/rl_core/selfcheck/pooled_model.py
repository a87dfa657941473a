"""A model whose workers run in a pool of ranks, called as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from rl_core.data.batch import Batch
from rl_core.data.microbatch import shard, shard_ids
from rl_core.metrics import CLOCKED, OF_LAYOUT, reduce_metrics
from rl_core.model import Loss, ModelPart, ModelSpec, Read, SavedFile, StepSettings
from rl_core.model_config import ModelConfig
from rl_core.plugins import resolve
from rl_core.selfcheck.rank_pool import Closing, Rank, RankPool
from rl_core.weights import Manifest, Transport, WeightForm

HELD = "model_worker"


class PooledModel(Closing):
    """A `rl_core.model.Model` over workers in a `RankPool`, except that its metrics are the numbers to report; close it
    before the next one is built there.

    Args:
        factory: `"package.module:function"`, called as `function(config, spec, rendezvous, **settings)` on every rank.
        settings: Settings for the factory; they pickle.
    """

    def __init__(
        self, pool: RankPool, factory: str, config: ModelConfig, spec: ModelSpec, num_ranks: int, **settings: Any
    ) -> None:
        self.trains = spec.trains
        self._pool = pool
        self._num_ranks = num_ranks
        pool.run(_build, [(factory, config, spec, settings)] * num_ranks)
        self._generation = pool.generation
        self._coordinates = self.call("coordinates")

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every rank, or of a part of it (`part.method`), with the same arguments; the results in rank
        order."""
        return self._pool.run(_call, [(method, args, kwargs)] * self._num_ranks)

    def infer(self, batch: Batch, reads: Sequence[Read], *, reference: bool = False, temperature: float = 1.0) -> Batch:
        """See `Model.infer`; also checks that exactly the leading ranks answer."""
        rows = self._rows_per_shard(batch)
        answers = self._call_shards("infer", batch, rows, tuple(reads), reference=reference, temperature=temperature)
        return self._joined(answers, rows)

    def accumulate(self, batch: Batch, loss: Loss) -> tuple[Mapping[str, float], Batch]:
        """See `Model.accumulate`."""
        rows = self._rows_per_shard(batch)
        answers = self._call_shards("accumulate", batch, rows, loss)
        return reduce_metrics([metrics for metrics, _ in answers]), self._joined([each for _, each in answers], rows)

    def apply(self, settings: StepSettings | None = None, *, adapter: int | None = None) -> Mapping[str, float]:
        """See `Model.apply`."""
        return reduce_metrics(self.call("apply", settings, adapter=adapter))

    def discard(self, *, adapter: int | None = None) -> None:
        """See `Model.discard`."""
        self.call("discard", adapter=adapter)

    def evaluate(self, batch: Batch, loss: Loss) -> Mapping[str, float]:
        """See `Model.evaluate`."""
        return reduce_metrics(self._call_shards("evaluate", batch, self._rows_per_shard(batch), loss))

    def train_step(self, batch: Batch, loss: Loss) -> Mapping[str, float]:
        """See `Model.train_step`."""
        return reduce_metrics(self._call_shards("train_step", batch, self._rows_per_shard(batch), loss))

    def train_steps(self, batches: Iterable[Batch], loss: Loss) -> list[dict[str, float]]:
        """Return the metrics of a step on each batch, except those that depend on the clock or the layout."""
        steps = [self.train_step(batch, loss) for batch in batches]
        return [{name: value for name, value in step.items() if name not in CLOCKED | OF_LAYOUT} for step in steps]

    def update_reference(self, share: float = 1.0) -> None:
        """See `Model.update_reference`."""
        self.call("update_reference", share)

    def save(self, path: str, *, wait: bool = True) -> None:
        """See `Model.save`."""
        self.call("save", path, wait=wait)

    def finish_save(self, *, wait: bool = True) -> tuple[SavedFile, ...] | None:
        """See `Model.finish_save`."""
        parts = self.call("finish_save", wait=wait)
        return None if None in parts else tuple(file for part in parts for file in part)

    def load(self, path: str, *, files: Sequence[SavedFile] = ()) -> None:
        """See `Model.load`."""
        self.call("load", path, files=tuple(files))

    def export(self, path: str) -> tuple[SavedFile, ...]:
        """See `Model.export`."""
        return tuple(file for part in self.call("export", path) for file in part)

    def export_adapter(self, path: str) -> tuple[SavedFile, ...]:
        """See `Model.export_adapter`."""
        return tuple(file for part in self.call("export_adapter", path) for file in part)

    def offload(self, parts: Sequence[ModelPart] = ("parameters", "optimizer")) -> None:
        """See `Resident.offload`, on every rank."""
        self.call("offload", tuple(parts))

    def onload(self, parts: Sequence[ModelPart] = ("parameters", "optimizer")) -> None:
        """See `Resident.onload`, on every rank."""
        self.call("onload", tuple(parts))

    def manifest(self, version: int, form: WeightForm = "merged") -> Manifest:
        """Return the manifest, which only rank 0 returns."""
        first, *others = self.call("manifest", version, form)
        assert others == [None] * len(others), "only rank 0 answers with the manifest"
        return first

    def send(self, manifest: Manifest, transport: Transport) -> str:
        """See `WeightSource.send`; the digest that every rank that sent has, if all receivers keep the same."""
        (digest,) = {digest for digests in self.call("send", manifest, transport) for digest in digests}
        return digest

    def close(self) -> None:
        """Close every worker, unless a failure has ended its process."""
        if self._pool.generation == self._generation:
            self._pool.run(_close, [()] * self._num_ranks)

    def _rows_per_shard(self, batch: Batch) -> list[np.ndarray]:
        return shard(batch.ragged("tokens").lengths, self._coordinates[0].along("dp"), groups=shard_ids(batch))

    def _joined(self, answers: Sequence[Batch | None], rows: Sequence[np.ndarray]) -> Batch:
        """Join the columns of the leading ranks, in the order of the rows."""
        parts = {}
        for place, answer in zip(self._coordinates, answers, strict=True):
            assert (answer is not None) == place.leads, f"rank at {place} leads: {place.leads}, answered: {answer}"
            if answer is not None:
                parts[place.on("dp")] = answer
        for part, index in zip((parts[place] for place in sorted(parts)), rows, strict=True):
            assert len(part) == len(index), f"{len(part)} rows of results for a shard of {len(index)} rows"
        joined = Batch.concat([parts[place] for place in sorted(parts)])
        return joined.select(np.argsort(np.concatenate(rows)))

    def _call_shards(
        self, method: str, batch: Batch, rows: Sequence[np.ndarray], *args: Any, **kwargs: Any
    ) -> list[Any]:
        shards = [batch.select(index) for index in rows]
        calls = [(method, (shards[place.on("dp")], *args), kwargs) for place in self._coordinates]
        return self._pool.run(_call, calls)


def _build(rank: Rank, factory: str, config: ModelConfig, spec: ModelSpec, settings: dict[str, Any]) -> None:
    rank.held[HELD] = resolve(factory)(config, spec, rank.rendezvous, **settings)


def _call(rank: Rank, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return attrgetter(method)(rank.held[HELD])(*args, **kwargs)


def _close(rank: Rank) -> None:
    rank.held.pop(HELD).close()
