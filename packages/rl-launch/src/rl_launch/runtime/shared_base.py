"""One base model for several runs, each of which trains an adapter of its own in a process of its own.

The process with the model answers the calls of the runs. Steps of runs that ask at about the same time are one pass.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rl_core.config import as_written
from rl_core.data.batch import Batch
from rl_core.errors import CheckpointDamaged, RLError, WorkerDied
from rl_core.metrics import Metric
from rl_core.model import Adapters, AdapterSettings, Loss, Metrics, Model, Read, SavedFile, StepSettings
from rl_core.model_config import ModelConfig
from rl_core.run import Components
from rl_launch.root_config import POLICY
from rl_launch.runtime.adapter_places import AdapterPlaces, AdapterWork

_log = logging.getLogger(__name__)

OF_A_STEP = ("betas", "eps", "weight_decay")
"""Settings of the optimizer, in addition to the learning rate, that each step of an adapter may have its own of."""

STEPS = "steps.json"
"""File of an adapter in a checkpoint with the number of its steps, which its schedule goes on from."""

MIN_RATES = 1024
"""Learning rates of a schedule that a run asks for at a time."""

SHORTEST_WAIT_S = 0.05


@dataclass
class _Step:
    """A step that a run waits for; `outcome` is its metrics or its error."""

    work: AdapterWork
    settings: StepSettings
    outcome: Metrics | BaseException | None = field(default=None)


class SharedBase:
    """The model of several runs. Each has a thread in `serve`.

    A pass waits for the runs that made the last one, but no longer than that took: a run may be validating or saving.

    Args:
        model: Model with several adapters, which nothing else calls.
        num_slots: Maximum number of runs at a time.

    Attributes:
        death: The error of a rank that has died, after which no call succeeds; None while all are alive.
    """

    def __init__(self, model: Model, num_slots: int) -> None:
        self.death: WorkerDied | None = None
        self._model, self._places = model, AdapterPlaces(model, num_slots)
        self._changed = threading.Condition()
        self._waiting: dict[str, _Step] = {}
        self._stepping: set[str] = set()
        self._is_busy = False
        self._patience_s = SHORTEST_WAIT_S

    def serve(self, connection: Connection, run: str) -> None:
        """Answer the calls of a run until it closes its end of the connection."""
        try:
            while True:
                method, args, kwargs = connection.recv()
                try:
                    answer: Any = getattr(self, f"_{method}")(run, *args, **kwargs)
                except BaseException as error:  # noqa: BLE001  # raised where the call was made
                    answer = error
                    if isinstance(error, WorkerDied):
                        self.death = error
                try:
                    connection.send(answer)
                except (TypeError, AttributeError, ValueError):  # the error does not pickle
                    connection.send(RLError(f"{type(answer).__name__}: {answer}"))
        except (EOFError, OSError):
            pass
        finally:
            with self._alone(run):
                try:
                    self._places.release(run)
                except RLError as error:
                    _log.debug("%s: %s", run, error)

    def _rates(self, run: str, *args: Any) -> list[float]:
        with self._alone(run):
            return self._model.adapters.rates(*args)

    def _create(self, run: str, settings: AdapterSettings) -> None:
        with self._alone(run):
            self._places.create(run, settings)

    def _infer(self, run: str, batch: Batch, reads: Sequence[Read], **options: Any) -> Batch:
        with self._alone(run):
            return self._model.infer(self._places.columns(run, batch), reads, **options).local()

    def _evaluate(self, run: str, batch: Batch, loss: Loss) -> Metrics:
        with self._alone(run):
            return {**self._places.measure(AdapterWork(run, batch, loss)), **_tokens(batch)}

    def _accumulate(self, run: str, batch: Batch, loss: Loss) -> tuple[Metrics, Batch]:
        with self._alone(run):
            ((metrics, columns),) = self._places.accumulate([AdapterWork(run, batch, loss)])
            return {**metrics, **_tokens(batch)}, columns

    def _apply(self, run: str, settings: StepSettings) -> Metrics:
        with self._alone(run):
            return self._places.apply(run, settings)

    def _discard(self, run: str) -> None:
        with self._alone(run):
            self._places.discard(run)

    def _save(self, run: str, folder: Path) -> tuple[SavedFile, ...]:
        with self._alone(run):
            return self._places.save(run, folder)

    def _load(self, run: str, folder: Path, files: Sequence[SavedFile]) -> None:
        with self._alone(run):
            self._places.load(run, folder, files=files)

    def _export(self, run: str, folder: Path, *, merged: bool) -> tuple[SavedFile, ...]:
        with self._alone(run):
            return self._places.export(run, folder, merged=merged)

    def _train_step(self, run: str, batch: Batch, loss: Loss, settings: StepSettings) -> Metrics:
        step = _Step(AdapterWork(run, batch, loss), settings)
        with self._changed:
            self._stepping.add(run)
            self._waiting[run] = step
            self._changed.notify_all()
            until = time.monotonic() + self._patience_s
            while step.outcome is None:
                left = until - time.monotonic()
                if self._is_busy:
                    self._changed.wait()
                elif self._waiting.keys() >= self._stepping or left <= 0:
                    self._pass()
                else:
                    self._changed.wait(left)
        if isinstance(step.outcome, BaseException):
            raise step.outcome
        return step.outcome

    def _pass(self) -> None:
        """Compute the steps that wait; the caller holds the lock, which others may take meanwhile."""
        steps, self._waiting = list(self._waiting.values()), {}
        self._is_busy = True
        self._changed.release()
        begun = time.monotonic()
        try:
            self._compute(steps)
        finally:
            self._changed.acquire()
            self._patience_s = max(SHORTEST_WAIT_S, time.monotonic() - begun)
            self._is_busy = False
            self._changed.notify_all()

    def _compute(self, steps: Sequence[_Step]) -> None:
        try:
            passed = self._places.accumulate([step.work for step in steps])
        except BaseException as error:  # noqa: BLE001  # raised in the runs
            if len(steps) > 1 and not isinstance(error, WorkerDied):
                # The rows of one run must not cost the others their steps.
                for step in steps:
                    self._compute([step])
                return
            for step in steps:
                step.outcome = error
            return
        for step, (metrics, _) in zip(steps, passed, strict=True):
            try:
                applied = self._places.apply(step.work.adapter, step.settings)
                step.outcome = {**metrics, **_tokens(step.work.batch), **applied}
            except BaseException as error:  # noqa: BLE001  # raised in the run
                step.outcome = error

    @contextmanager
    def _alone(self, run: str) -> Iterator[None]:
        """Enter a context in which this thread alone calls the model; passes of others do not wait for this run."""
        with self._changed:
            self._stepping.discard(run)
            self._changed.notify_all()
            while self._is_busy:
                self._changed.wait()
            self._is_busy = True
        try:
            yield
        finally:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()


def _tokens(batch: Batch) -> Metrics:
    return {"num_tokens": Metric(float(batch.lengths.sum()), reduction="sum")}


class AdapterModel:
    """The `rl_core.model.Model` of a run that trains an adapter on a `SharedBase` in another process.

    Args:
        connection: Connection to the thread that answers.
        config: The policy as the run has it.
        seed: Seed of the adapter's first factors.
    """

    trains = True

    def __init__(self, connection: Connection, config: ModelConfig, seed: int) -> None:
        self._connection, self._config = connection, config
        self._lock = threading.Lock()
        self._settings = AdapterSettings(config.lora_cfg.dim, config.lora_cfg.alpha, seed)
        self._files: tuple[SavedFile, ...] = ()
        self._rates: list[float] = []
        self._num_steps = 0

    def components(self, data: Any) -> Components:
        """Return the objects of an algorithm that has one model, whose adapter is new."""
        self._ask("create", self._settings)
        self._num_steps = 0
        return Components(models={POLICY: self}, data=data)

    @property
    def adapters(self) -> Adapters:
        """A run of a sweep has one adapter.

        Raises:
            ValueError: Always.
        """
        raise ValueError("this run trains one adapter of a model that other runs share; it has no others")

    def infer(self, batch: Batch, reads: Sequence[Read], *, reference: bool = False, temperature: float = 1.0) -> Batch:
        """See `rl_core.model.Model.infer`."""
        found: Batch = self._ask("infer", batch.local(), tuple(reads), reference=reference, temperature=temperature)
        return found

    def update_reference(self, share: float = 1.0) -> None:
        """Refuse: the reference is the base, which other runs share.

        Raises:
            ValueError: Always.
        """
        raise ValueError("the reference of runs that share a base is the base, and cannot move")

    def evaluate(self, batch: Batch, loss: Loss) -> Metrics:
        """See `rl_core.model.Model.evaluate`."""
        found: Metrics = self._ask("evaluate", batch.local(), loss)
        return found

    def accumulate(self, batch: Batch, loss: Loss) -> tuple[Metrics, Batch]:
        """See `rl_core.model.Model.accumulate`."""
        found: tuple[Metrics, Batch] = self._ask("accumulate", batch.local(), loss)
        return found

    def apply(self, settings: StepSettings | None = None, *, adapter: int | None = None) -> Metrics:
        """See `rl_core.model.Model.apply`."""
        found: Metrics = self._ask("apply", settings or self._of_step())
        self._num_steps += 1
        return found

    def discard(self, *, adapter: int | None = None) -> None:
        """See `rl_core.model.Model.discard`."""
        self._ask("discard")

    def train_step(self, batch: Batch, loss: Loss) -> Metrics:
        """See `rl_core.model.Model.train_step`."""
        found: Metrics = self._ask("train_step", batch.local(), loss, self._of_step())
        self._num_steps += 1
        return found

    def save(self, path: str, *, wait: bool = True) -> None:
        """See `rl_core.model.Saved.save`; an adapter is small, so that every save waits."""
        self._files = ()
        files = self._ask("save", Path(path))
        content = json.dumps({"steps": self._num_steps}).encode()
        (Path(path) / STEPS).write_bytes(content)
        self._files = (*files, SavedFile(STEPS, len(content), hashlib.sha256(content).hexdigest(), 0))

    def finish_save(self, *, wait: bool = True) -> tuple[SavedFile, ...]:
        """See `rl_core.model.Saved.finish_save`."""
        return self._files

    def load(self, path: str, *, files: Sequence[SavedFile] = ()) -> None:
        """See `rl_core.model.Saved.load`."""
        self._ask("load", Path(path), tuple(files))
        try:
            self._num_steps = int(json.loads((Path(path) / STEPS).read_bytes())["steps"])
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointDamaged(f"{Path(path) / STEPS}: {error}") from None

    def export(self, path: str) -> tuple[SavedFile, ...]:
        """See `rl_core.model.Saved.export`."""
        files: tuple[SavedFile, ...] = self._ask("export", Path(path), merged=True)
        return files

    def export_adapter(self, path: str) -> tuple[SavedFile, ...]:
        """See `rl_core.model.Saved.export_adapter`; the tokenizer is in the export of the weights."""
        files: tuple[SavedFile, ...] = self._ask("export", Path(path), merged=False)
        return files

    def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            try:
                self._connection.send((method, args, kwargs))
                answer = self._connection.recv()
            except (EOFError, OSError):
                raise RLError(
                    "the process of rl sweep with the base model has ended; run the same command again to resume"
                ) from None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _of_step(self) -> StepSettings:
        given = self._config.optimizer.kwargs
        kwargs = {name: given[name] for name in OF_A_STEP if name in given}
        return StepSettings(self._rate(), self._config.max_grad_norm, kwargs)

    def _rate(self) -> float:
        """Return the learning rate of the next step."""
        if self._num_steps >= len(self._rates):
            policy, count = self._config, max(MIN_RATES, 2 * self._num_steps)
            self._rates = self._ask("rates", policy.optimizer.kwargs["lr"], policy.scheduler, count)
        return self._rates[self._num_steps]


def base_key(policy: ModelConfig, others: Mapping[str, Any]) -> str:
    """Return what runs must have in common to share a base: everything of the policy but the settings of an adapter and
    of its steps, and other values."""
    tree = as_written(policy)
    optimizer = {name: value for name, value in tree["optimizer"]["kwargs"].items() if name not in ("lr", *OF_A_STEP)}
    tree |= {
        "optimizer": {**tree["optimizer"], "kwargs": optimizer},
        "lora_cfg": {name: value for name, value in tree["lora_cfg"].items() if name not in ("dim", "alpha")},
    }
    for name in ("scheduler", "max_grad_norm", "train_global_batch_size"):
        tree.pop(name, None)
    return json.dumps([tree, others], sort_keys=True, default=str)
