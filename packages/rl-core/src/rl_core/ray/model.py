"""A model of many ranks, called as one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import ray
from ray.actor import ActorHandle

from rl_core.data.batch import Batch, RemoteColumn, RemoteRows
from rl_core.data.microbatch import PAIR, PREFIX, PREFIX_GROUP, shard, shard_ids
from rl_core.data.shuffle import Shard, plan_shuffle
from rl_core.errors import FailureOrigin, RLError, WorkerDied, WorkerError, WorkerStalled
from rl_core.images import IMAGES
from rl_core.metrics import combine
from rl_core.model import (
    ADAPTER,
    AdapterSettings,
    Coordinates,
    Loss,
    Metrics,
    ModelPart,
    Read,
    SavedFile,
    StepSettings,
    read_columns,
)
from rl_core.model_config import SchedulerConfig
from rl_core.ray.calls import fetch, gather, request_stacks
from rl_core.ray.rows import StoredRows
from rl_core.weights import Manifest, Transport, WeightForm

_log = logging.getLogger(__name__)

DEATH_NOTICE_S = 10.0
"""How long Ray may take to notice that a process has ended; its peers see their connections close before that."""

CLOSE_TIMEOUT_S = 30.0

CALL_TIMEOUT_S = 3600.0
"""Seconds after which a call of a model's ranks is given up, unless the config sets another limit."""


MAX_PICKERS = 4
"""Ranks that read the stores of a batch's remote columns, and lay out their rows by shard."""

TOKENS_PER_PICKER = 8 * 2**20
"""Bytes of a batch for which one picker is enough: it takes a tenth of a second, and fewer pickers make larger chunks.
Small ones would pass through this process."""


@dataclass(frozen=True)
class _Sent:
    """A shard on its way to its ranks: the `Shard` or where it lies, and the chunks that it is assembled from."""

    shard: Shard | ray.ObjectRef
    chunks: tuple[ray.ObjectRef, ...]

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Arguments of a call on its rows."""
        return (self.shard, args, kwargs, *self.chunks)


class RemoteModel:
    """Facade of a model's workers: shards rows over `dp`, balanced by tokens, and joins what comes back.

    Neither remote columns of a batch nor the results of `infer` pass through this process: ranks take the rows of their
    shards from one another.

    Args:
        workers: One actor (`WorkerHost`) per rank, in rank order.
        role: Role, for messages.
        section: Dotted key of its config section, for messages.
        nodes: Name of the node of each rank, for messages.
        hold: Context that gives the model its device for itself.
        timeout_s: Bound of each call; past it every rank is asked to write the stacks of its threads to its log.
        logs: Log of each rank, for messages.
        trains: As `rl_core.model.Model.trains`.
        columns: Columns that all its passes read in addition to `tokens`.
        part: Name of the part of each worker that is called; the worker itself if empty.
    """

    def __init__(
        self,
        workers: Sequence[ActorHandle],
        *,
        role: str,
        section: str = "",
        nodes: Sequence[str],
        hold: Callable[[], AbstractContextManager[None]] = nullcontext,
        timeout_s: float = CALL_TIMEOUT_S,
        logs: Sequence[str] = (),
        trains: bool = True,
        columns: Sequence[str] = (),
        part: str = "",
    ) -> None:
        self.trains = trains
        self._part = part
        self._columns = ("tokens", *columns)
        self._workers = list(workers)
        self._role = role
        self._section = section
        self._nodes = list(nodes)
        self._hold = hold
        self._timeout_s = timeout_s
        self._logs = list(logs)
        self._revision = 0
        self._sent: WeakKeyDictionary[RemoteRows, list[_Sent]] = WeakKeyDictionary()
        self._coordinates: list[Coordinates] = self.call_all("coordinates")

    def part(self, name: str, *, role: str, section: str) -> RemoteModel:
        """Return the facade of a part of the workers that trains as a model does, such as a draft head.

        Args:
            name: Name of the attribute of each worker.
            role: Role of the part, for messages.
            section: Dotted key of its config section, for messages.
        """
        return RemoteModel(
            self._workers,
            role=role,
            section=section,
            nodes=self._nodes,
            hold=self._hold,
            timeout_s=self._timeout_s,
            logs=self._logs,
            columns=self._columns[1:],
            part=name,
        )

    @property
    def workers(self) -> dict[str, ActorHandle]:
        """The actors in rank order, by log name: `policy-0`."""
        return {f"{self._role}-{rank}": worker for rank, worker in enumerate(self._workers)}

    @property
    def revision(self) -> int:
        """Increases with every change of the weights, so you can check whether they are still the same."""
        return self._revision

    @property
    def num_shards(self) -> int:
        """Data-parallel shards."""
        return self._coordinates[0].along("dp")

    def infer(self, batch: Batch, reads: Sequence[Read], *, reference: bool = False, temperature: float = 1.0) -> Batch:
        """See `rl_core.model.Model.infer`."""
        with self._hold():
            return self.start_infer(batch, reads, reference=reference, temperature=temperature)()

    def start_infer(
        self, batch: Batch, reads: Sequence[Read], *, reference: bool = False, temperature: float = 1.0
    ) -> Callable[[], Batch]:
        """Begin `infer` after the ranks' earlier calls; the returned function waits for its results. The model must
        have its device until then.
        """
        rows = self._rows_per_shard(batch)
        id_columns = read_columns(reads)
        batch.require(*id_columns)
        names = dict.fromkeys((*self._columns, PAIR, PREFIX_GROUP, IMAGES, ADAPTER, *id_columns))
        inputs = batch.only([name for name in names if name in batch])
        options = {"reference": reference, "temperature": temperature}
        shards = self._send(inputs, rows)
        calls: list[Any] = [
            worker.infer.options(num_returns=2).remote(*shards[place.on("dp")].of([tuple(reads)], options))
            for worker, place in zip(self._workers, self._coordinates, strict=True)
        ]

        def finish() -> Batch:
            self._gather([answered for answered, _ in calls], "infer", self._timeout_s)
            return self._columns_of(reads, [answer for _, answer in calls], rows, batch, "infer")

        return finish

    def evaluate(self, batch: Batch, loss: Loss) -> Metrics:
        """See `rl_core.model.Model.evaluate`."""
        with self._hold():
            return self._loss_call("evaluate", batch, loss)

    def accumulate(self, batch: Batch, loss: Loss) -> tuple[Metrics, Batch]:
        """See `rl_core.model.Model.accumulate`; the columns stay with the ranks until they are read."""
        with self._hold():
            inputs, rows = self._loss_inputs(batch, loss)
            calls = self._start_on_shards("accumulate", inputs, rows, loss, num_returns=2)
            metrics = self._gather([measured for measured, _ in calls], "accumulate", self._timeout_s)
            columns = self._columns_of(loss.reads, [answer for _, answer in calls], rows, inputs, "accumulate")
            return combine(metrics), columns

    def apply(self, settings: StepSettings | None = None, *, adapter: int | None = None) -> Metrics:
        """See `rl_core.model.Model.apply`."""
        with self._hold():
            self._revision += 1
            return combine(self.call_all("apply", settings, adapter=adapter))

    def discard(self, *, adapter: int | None = None) -> None:
        """See `rl_core.model.Model.discard`."""
        self.call_all("discard", adapter=adapter)

    @property
    def adapters(self) -> RemoteAdapters:
        """See `rl_core.model.Model.adapters`."""
        return RemoteAdapters(self)

    def train_step(self, batch: Batch, loss: Loss) -> Metrics:
        """See `rl_core.model.Model.train_step`."""
        with self._hold():
            self._revision += 1
            return self._loss_call("train_step", batch, loss)

    def update_reference(self, share: float = 1.0) -> None:
        """See `rl_core.model.Model.update_reference`."""
        with self._hold():
            self.call_all("update_reference", share)

    def save(self, path: str, *, wait: bool = True) -> None:
        """See `rl_core.model.Model.save`."""
        with self._hold():
            self.call_all("save", path, wait=wait)

    def finish_save(self, *, wait: bool = True) -> tuple[SavedFile, ...] | None:
        """See `rl_core.model.Model.finish_save`; the model need not have its device, as a copy is written."""
        parts = self.call_all("finish_save", wait=wait)
        return None if None in parts else tuple(file for part in parts for file in part)

    def load(self, path: str, *, files: Sequence[SavedFile] = ()) -> None:
        """See `rl_core.model.Model.load`."""
        with self._hold():
            self._revision += 1
            self.call_all("load", path, files=tuple(files))

    def export(self, path: str, dtype: str | None = None) -> tuple[SavedFile, ...]:
        """See `rl_core.model.Model.export`.

        Args:
            path: Folder to write to.
            dtype: Dtype of the weights; the dtype of a run's exports if None.
        """
        given = () if dtype is None else (dtype,)
        with self._hold():
            return tuple(file for part in self.call_all("export", path, *given) for file in part)

    def export_adapter(self, path: str) -> tuple[SavedFile, ...]:
        """See `rl_core.model.Model.export_adapter`."""
        with self._hold():
            return tuple(file for part in self.call_all("export_adapter", path) for file in part)

    def on_adapters(self, method: str, *args: Any, changes: bool, **kwargs: Any) -> list[Any]:
        """Call a method of the adapters of every rank.

        Args:
            method: Name of the method.
            args: Its arguments.
            changes: True if it changes weights.
            kwargs: Its arguments by name.
        """
        with self._hold():
            self._revision += int(changes)
            return self.call_all(f"adapters.{method}", *args, **kwargs)

    def offload(self, parts: Sequence[ModelPart] = ("parameters", "optimizer")) -> None:
        """Free the devices of all ranks of these parts."""
        self.call_all("offload", tuple(parts))

    def onload(self, parts: Sequence[ModelPart] = ("parameters", "optimizer")) -> None:
        """Bring these parts back."""
        self.call_all("onload", tuple(parts))

    def manifest(self, version: int, form: WeightForm = "merged") -> Manifest:
        """Return the manifest that `start_send` will follow for this version."""
        return self.call_all("manifest", version, form)[0]

    def start_send(
        self, manifest: Manifest | ray.ObjectRef, transport: Transport
    ) -> tuple[list[ray.ObjectRef], list[FailureOrigin]]:
        """Begin sending on all ranks; each call answers with the digest of what that rank sent.

        Args:
            manifest: The manifest, or a reference to it in Ray's object store.
            transport: Transfer settings, the same on senders and receivers.
        """
        # The model stays on its device until another is asked for, which the caller does when the send is over.
        with self._hold():
            method = self._method("send")
            refs: list[Any] = [worker.call.remote(method, manifest, transport) for worker in self._workers]
        return refs, self._origins("weight sync (send)")

    def interrupt_send(self, transport: Transport, reason: str) -> None:
        """End this send on every rank, because nothing will receive it; does not wait until it has ended."""
        for worker in self._workers:
            worker.interrupt.remote(transport, reason)

    def write_stacks(self) -> str:
        """Ask every rank to write the stacks of its threads to its log; see `request_stacks`."""
        return request_stacks(self._workers, self._logs)

    def health(self) -> list[Mapping[str, Any]]:
        """Return each rank's report; answers while a step is running."""
        return gather([worker.health.remote() for worker in self._workers], self._origins("health"), 30.0)

    def close(self) -> None:
        """Make every rank leave its process group, then end the processes; one that is dead already only ends."""
        closing = [worker.call.remote("close") for worker in self._workers]
        try:
            gather(closing, self._origins("close"), CLOSE_TIMEOUT_S)
        except RLError as error:
            _log.debug("%s", error)
        for worker in self._workers:
            ray.kill(worker)

    def call_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call every rank alike."""
        calls = [worker.call.remote(self._method(method), *args, **kwargs) for worker in self._workers]
        return self._gather(calls, method, self._timeout_s)

    def _loss_call(self, method: str, batch: Batch, loss: Loss) -> Metrics:
        inputs, rows = self._loss_inputs(batch, loss)
        return combine(self._gather(self._start_on_shards(method, inputs, rows, loss), method, self._timeout_s))

    def _loss_inputs(self, batch: Batch, loss: Loss) -> tuple[Batch, list[np.ndarray]]:
        """Return the columns that a loss takes, and the rows of each shard."""
        required = ("tokens", *loss.columns, *read_columns(loss.reads))
        names = dict.fromkeys((*self._columns, PAIR, IMAGES, *required))
        inputs = batch.only([name for name in names if name in batch])
        inputs.require(*required)
        return inputs, self._rows_per_shard(inputs)

    def _start_on_shards(
        self, method: str, inputs: Batch, rows: Sequence[np.ndarray], loss: Loss, *, num_returns: int = 1
    ) -> list[Any]:
        """Begin a call of a loss on the rows of each rank's shard."""
        shards = self._send(inputs, rows)
        return [
            worker.call_on.options(num_returns=num_returns).remote(
                self._method(method), *shards[place.on("dp")].of([loss], {})
            )
            for worker, place in zip(self._workers, self._coordinates, strict=True)
        ]

    def _columns_of(
        self, reads: Sequence[Read], answers: Sequence[Any], rows: Sequence[np.ndarray], batch: Batch, phase: str
    ) -> Batch:
        """Return the columns of reads, which stay where the ranks' answers lie until they are read."""
        origins = self._origins(phase)
        leaders = [rank for rank, place in enumerate(self._coordinates) if place.leads]
        leaders.sort(key=lambda rank: self._coordinates[rank].on("dp"))
        stores = [StoredRows(answers[rank], origins[rank]) for rank in leaders]
        found = RemoteRows.split_over(stores, rows, batch.lengths)
        return Batch(found.columns([name for read in reads for name in read.columns]))

    def _method(self, name: str) -> str:
        return f"{self._part}.{name}" if self._part else name

    def _rows_per_shard(self, batch: Batch) -> list[np.ndarray]:
        ids = shard_ids(batch, self.num_shards, by_prefix=PREFIX in self._columns)
        return shard(batch.lengths, self.num_shards, groups=ids)

    def _send(self, batch: Batch, rows: Sequence[np.ndarray]) -> list[_Sent]:
        """Gather the rows of each shard, except those that were before for the same batch."""
        column = batch.columns["tokens"]
        key = column.rows if isinstance(column, RemoteColumn) else None
        is_plain = tuple(name for name in batch if name != IMAGES) == self._columns
        if key is not None and is_plain and key in self._sent:
            return self._sent[key]
        num_tokens = int(batch.lengths.sum())
        plan = plan_shuffle(batch, rows, min(MAX_PICKERS, len(self._workers), 1 + num_tokens // TOKENS_PER_PICKER))
        chunks: list[Any] = []
        for number, (picks, stores) in enumerate(zip(plan.picks, plan.stores, strict=True)):
            picker = self._workers[number * len(self._workers) // len(plan.picks)]
            refs: Any = picker.pick.options(num_returns=len(rows)).remote(
                picks, *((store.ref if isinstance(store, StoredRows) else ray.put(store.fetch())) for store in stores)
            )
            chunks.append([refs] if len(rows) == 1 else refs)
        # A shard without remote columns may be large; the ranks that share it then share one copy of it.
        shared = len(self._workers) > len(rows)
        sent = [
            _Sent(ray.put(each) if shared else each, tuple(picked[number] for picked in chunks))
            for number, each in enumerate(plan.shards)
        ]
        if key is not None and is_plain:
            self._sent[key] = sent
        return sent

    def _gather(self, refs: Sequence[ray.ObjectRef], phase: str, timeout_s: float) -> list[Any]:
        try:
            return gather(refs, self._origins(phase), timeout_s)
        except WorkerStalled as error:
            raise WorkerStalled(f"{error.args[0]}; {self.write_stacks()}", error.origin) from None
        except WorkerError:
            # Ranks that lose a peer fail with an error of their own before Ray reports the peer's death.
            signs: dict[Any, FailureOrigin] = dict(
                zip([worker.health.remote() for worker in self._workers], self._origins(phase), strict=True)
            )
            answered, _ = ray.wait(list(signs), num_returns=len(signs), timeout=DEATH_NOTICE_S)
            for sign in answered:
                try:
                    fetch(sign, signs[sign])
                except WorkerDied:
                    raise
                except RLError:
                    continue
            raise

    def _origins(self, phase: str) -> list[FailureOrigin]:
        return [FailureOrigin(self._role, rank, node, phase, self._section) for rank, node in enumerate(self._nodes)]


class RemoteAdapters:
    """The `rl_core.model.Adapters` of a remote model."""

    def __init__(self, model: RemoteModel) -> None:
        self._model = model

    def make(self, place: int, settings: AdapterSettings) -> None:
        """See `rl_core.model.Adapters.make`."""
        self._model.on_adapters("make", place, settings, changes=True)

    def save(self, place: int, path: str) -> tuple[SavedFile, ...]:
        """See `rl_core.model.Adapters.save`."""
        return tuple(file for part in self._model.on_adapters("save", place, path, changes=False) for file in part)

    def load(self, place: int, path: str, *, with_optimizer: bool = True, files: Sequence[SavedFile] = ()) -> None:
        """See `rl_core.model.Adapters.load`."""
        options: Any = {"with_optimizer": with_optimizer, "files": tuple(files)}
        self._model.on_adapters("load", place, path, changes=True, **options)

    def export(self, place: int, path: str, *, merged: bool = False) -> tuple[SavedFile, ...]:
        """See `rl_core.model.Adapters.export`."""
        written = self._model.on_adapters("export", place, path, changes=False, merged=merged)
        return tuple(file for part in written for file in part)

    def rates(self, lr: float, scheduler: Sequence[SchedulerConfig], count: int) -> list[float]:
        """See `rl_core.model.Adapters.rates`."""
        rates: list[float] = self._model.on_adapters("rates", lr, list(scheduler), count, changes=False)[0]
        return rates
