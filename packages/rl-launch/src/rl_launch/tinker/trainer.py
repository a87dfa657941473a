"""The thread that trains: requests of all models in their orders, restored from the disk after every failure.

Each model is at the state after its request `stepped_seq`, plus the gradients of the passes after it. Its last save is
the state after `saved_seq`. Whenever a model is not on the device, because the server has started, the host was built
again or other models took its slot, it is loaded from its save, and the finished requests since then are computed
again; their results were given already and stay as they are. So a request acts on its model exactly once, whatever
ends, and wherever.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from rl_core.data.batch import Batch
from rl_core.metrics import results
from rl_core.model import AdapterSettings, Metrics, StepSettings
from rl_launch.root_config import TinkerConfig
from rl_launch.runtime.adapter_places import AdapterWork
from rl_launch.tinker import passes
from rl_launch.tinker.checkpoints import TRAINING, CheckpointPath, Checkpoints, replaced_folder
from rl_launch.tinker.client_types import types
from rl_launch.tinker.host import AdapterHost
from rl_launch.tinker.refusal import RequestRefused
from rl_launch.tinker.store import STATE_CHANGES, Row, Store
from rl_launch.tinker.tenants import Tenant, Tenants

_log = logging.getLogger(__name__)

PROTOBUF, JSON = "application/x-protobuf", "application/json"

GAP_S = 900.0
"""Seconds after which a request stops waiting for an earlier one of its model that has not arrived. The client tries
for 300 seconds."""

_MAX_BUILDS = 3
"""Number of tries to build a host again before the server ends."""

_TICK_S = 1.0
_HOUSEKEEPING_S = 60.0
_KEPT_S = 3600.0

Hosting = Callable[[], AbstractContextManager[AdapterHost]]
"""Enters a context with a new host."""


@dataclass
class Waiting:
    """A request that waits.

    Args:
        request: Id of the request.
        kind: Kind of the request.
        arrived: When it arrived, by `time.monotonic`.
        failures: Number of host calls for it that have failed.
    """

    request: str
    kind: str
    arrived: float
    failures: int = 0


@dataclass
class TrainedModel:
    """A model, as the thread knows it.

    Args:
        id: Id of the model.
        number: Number of the model, which names its adapter and folder.
        tenant: Name of its tenant.
        settings: Settings of its adapter.
        next_seq: Number of the request that is next.
        stepped_seq: Number of the request that last changed its weights; -1 before it exists.
        saved_seq: Number of the last request that its save contains; -1 if there is no save.
        steps: Number of its optimizer steps.
        saved_steps: Number of them in its save.
        has_gradient: True if passes have added to its gradient since its last step.
        is_on_device: True if the host has it.
        used: When it was last used, by `time.monotonic`.
        waiting: Requests by number.
    """

    id: str
    number: int
    tenant: str
    settings: AdapterSettings
    next_seq: int
    stepped_seq: int
    saved_seq: int
    steps: int
    saved_steps: int = 0
    has_gradient: bool = False
    is_on_device: bool = False
    used: float = 0.0
    waiting: dict[int, Waiting] = field(default_factory=dict)

    @property
    def adapter(self) -> str:
        """Name of its adapter."""
        return f"m{self.number}"

    @property
    def head(self) -> Waiting | None:
        """The request that is next; None if it has not arrived."""
        return self.waiting.get(self.next_seq)


class Outcome(NamedTuple):
    """The result of a request that was done.

    Args:
        result: Result.
        media: Type of the result.
        changes: True if the request has changed the weights of its model.
        is_saved: True if the model is saved as it is now, in the folder for this request.
        counts: Numbers to add to those of the tenant.
    """

    result: bytes
    media: str = JSON
    changes: bool = False
    is_saved: bool = False
    counts: Mapping[str, int] = {}


class Trainer:
    """Trains all models on one host.

    Args:
        hosting: Enters a context with a new host; it is left and entered again after a failure.
        store: Queue.
        config: Settings of the server.
        tenants: Quotas.
        checkpoints: Checkpoints and exports.
        done: Called with the id of each request that has a result.
        given_up: Called with the error if no host can be built any more.
    """

    def __init__(
        self,
        hosting: Hosting,
        store: Store,
        config: TinkerConfig,
        tenants: Tenants,
        checkpoints: Checkpoints,
        done: Callable[[str], None],
        given_up: Callable[[Exception], None],
    ) -> None:
        self._hosting, self._store, self._config = hosting, store, config
        self._tenants, self._checkpoints, self._done, self._given_up = tenants, checkpoints, done, given_up
        self._models: dict[str, TrainedModel] = {}
        self._ready = threading.Condition()
        self._is_ending = False
        self._held = ExitStack()
        self.host = self._enter_host()
        self._host_lost = False
        self._num_builds = 0
        self._thread = threading.Thread(target=self._run, name="rl-tinker-trainer", daemon=True)
        for row in store.rows("SELECT * FROM models WHERE ended = 0 ORDER BY number"):
            self.add_model(row)
        waiting = store.rows("SELECT id, scope, seq, kind FROM requests WHERE state = 'pending' ORDER BY arrived")
        for row in waiting:
            if row["scope"] in self._models:
                self._put(row["scope"], row["seq"], row["id"], row["kind"])

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End after the request in progress, and end the host. What waits continues when the queue is opened again."""
        with self._ready:
            self._is_ending = True
            self._ready.notify()
        if self._thread.ident is not None:
            self._thread.join()
        self._held.close()

    def add_model(self, row: Row) -> None:
        """Take a model of the store."""
        settings = json.loads(row["settings"])
        model = TrainedModel(
            row["id"],
            row["number"],
            row["tenant"],
            adapter_settings(settings["adapter"]),
            row["next_seq"],
            row["stepped_seq"],
            row["saved_seq"],
            row["steps"],
            saved_steps=row["steps"],
            used=time.monotonic(),
        )
        with self._ready:
            self._models.setdefault(model.id, model)

    def put(self, model: str, seq: int, request: str, kind: str) -> None:
        """Take a request of the store."""
        with self._ready:
            self._put(model, seq, request, kind)
            self._ready.notify()

    def _put(self, model: str, seq: int, request: str, kind: str) -> None:
        found = self._models[model]
        if seq >= found.next_seq:
            found.waiting.setdefault(seq, Waiting(request, kind, time.monotonic()))

    def next_seq(self, model: str) -> int:
        """Return the number of the request of a model that is next."""
        with self._ready:
            return self._models[model].next_seq

    def end_models(self, session: str) -> None:
        """Forget the models of a session that is finished; their checkpoints stay."""
        with self._ready:
            rows = self._store.rows("SELECT id FROM models WHERE session = ?", session)
            ended = {row["id"] for row in rows}
            self._store.change("UPDATE models SET ended = 1 WHERE session = ?", session)
            for model in ended:
                for waiting in self._models[model].waiting.values() if model in self._models else ():
                    self._refuse(waiting.request, RequestRefused("the session is finished"))
            self._ready.notify()

    def host_failed(self, host: AdapterHost) -> None:
        """Have the host built again because a call of it has failed elsewhere, unless it was already."""
        with self._ready:
            if self.host is host:
                self._host_lost = True
                self._ready.notify()

    def is_building(self, host: AdapterHost) -> bool:
        """Return True if a host that has failed is to be built again."""
        return self._host_lost and self.host is host

    # The thread

    def _run(self) -> None:
        housekept = time.monotonic()
        while True:
            with self._ready:
                if self._is_ending:
                    return
                group = self._next_group()
                if not group and not self._host_lost:
                    self._ready.wait(_TICK_S)
            try:
                if self._host_lost:
                    self._build_host_again()
                if group:
                    self._do(group)
                self._drop_ended()
                if time.monotonic() - housekept > min(_HOUSEKEEPING_S, self._config.idle_adapter_s):
                    housekept = time.monotonic()
                    self._keep_house()
            except Exception as error:  # noqa: BLE001 - whatever the host raises, it is built again
                _log.warning("the host failed between two requests: %s", error, exc_info=error)
                self._host_lost = True

    def _next_group(self) -> list[tuple[TrainedModel, Waiting]]:
        """Return the models whose requests are next: the one that has waited longest, and if it is a pass with
        gradients, those of other models."""
        ready = [(model, model.head) for model in self._models.values()]
        heads = [(model, head) for model, head in ready if head is not None]
        heads.sort(key=lambda each: each[1].arrived)
        if not heads:
            return []
        first = heads[0]
        if first[1].kind != "forward_backward" or first[1].failures:
            return [first]
        alike = [each for each in heads if each[1].kind == "forward_backward" and not each[1].failures]
        return alike[: self.host.num_slots]

    def _do(self, group: Sequence[tuple[TrainedModel, Waiting]]) -> None:
        try:
            if group[0][1].kind == "forward_backward":
                self._accumulate(group)
                return
            ((model, waiting),) = group
            try:
                outcome: Outcome | RequestRefused = self._handlers[waiting.kind](self, model, waiting)
            except RequestRefused as refused:
                outcome = refused
            self._finish(model, waiting, outcome)
        except Exception as error:  # noqa: BLE001 - whatever the host raises, it is built again
            self._fail(group, error)
            return
        self._save_if_due(model)

    def _fail(self, group: Sequence[tuple[TrainedModel, Waiting]], error: Exception) -> None:
        """Count the failure of a host call; a request that fails alone as well is answered with the error."""
        cause = f"{type(error).__name__}: {error}"[:500]
        _log.warning("%d requests failed: %s. The host is built again", len(group), cause, exc_info=error)
        self._host_lost = True
        for model, waiting in group:
            if model.head is not waiting:
                continue
            waiting.failures += 1
            if waiting.failures > 1:
                self._finish(model, waiting, RequestRefused(f"the server has failed twice: {cause}", category="server"))

    def _build_host_again(self) -> None:
        held, self._held = self._held, ExitStack()
        try:
            held.close()
        except Exception as error:  # noqa: BLE001 - what has failed may fail to end as well
            _log.warning("the host that failed did not end cleanly: %s", error)
        for model in list(self._models.values()):
            model.is_on_device = model.has_gradient = False
        try:
            self.host = self._enter_host()
        except Exception as error:
            self._num_builds += 1
            if self._num_builds < _MAX_BUILDS:
                raise
            self._given_up(error)
            self._is_ending = True
            return
        self._num_builds, self._host_lost = 0, False

    def _enter_host(self) -> AdapterHost:
        return self._held.enter_context(self._hosting())

    def _finish(self, model: TrainedModel, waiting: Waiting, outcome: Outcome | RequestRefused) -> None:
        """Store the result of a request, and what it has changed, together."""
        seq, before = model.next_seq, model.saved_seq
        is_done = isinstance(outcome, Outcome)
        stepped, saved = model.stepped_seq, False
        with self._store.transaction():
            if isinstance(outcome, Outcome):
                stepped, saved = (seq if outcome.changes else stepped), outcome.is_saved
                keeps_body = waiting.kind in STATE_CHANGES
                self._store.finish(
                    waiting.request, state="done", media=outcome.media, result=outcome.result, keeps_body=keeps_body
                )
                if outcome.counts:
                    self._store.count(model.tenant, **outcome.counts)
            else:
                self._store.finish(waiting.request, state="failed", media=JSON, result=outcome.body)
            steps = model.steps + (is_done and waiting.kind == "optim_step")
            self._store.change(
                "UPDATE models SET next_seq = ?, stepped_seq = ?, steps = ?, ended = MAX(ended, ?) WHERE id = ?",
                # A model that could not be made does not count as one.
                *(seq + 1, stepped, steps, int(stepped < 0), model.id),
            )
            if saved:
                self._store.saved(model.id, seq)
        with self._ready:
            model.waiting.pop(seq, None)
            model.next_seq, model.stepped_seq, model.steps = seq + 1, stepped, steps
        if saved:
            model.saved_seq, model.saved_steps = seq, steps
            self._drop_save(model, before)
        self._done(waiting.request)

    def _refuse(self, request: str, refused: RequestRefused) -> None:
        self._store.finish(request, state="failed", media=JSON, result=refused.body)
        self._done(request)

    # Models on the device

    def _bring(self, model: TrainedModel, beside: Sequence[TrainedModel] = ()) -> None:
        """Have a model on the device, at its state.

        Args:
            model: Model.
            beside: Models that stay there.

        Raises:
            RequestRefused: If what it is restored from is not there.
        """
        model.used = time.monotonic()
        if model.is_on_device:
            return
        changes = self._store.changes_since(model.id, model.saved_seq)
        if lost := [row["seq"] for row in changes if not row["has_body"]]:
            raise self._lost(model, f"its request {lost[0]} is not stored any more")
        self._make_room(beside)
        if model.saved_seq >= 0:
            folder = self._save_folder(model, model.saved_seq)
            if not folder.is_dir():
                raise self._lost(model, f"its save is not at {folder}")
            self.host.load(model.adapter, folder, with_optimizer=True)
        else:
            self.host.create(model.adapter, model.settings)
        model.is_on_device, model.has_gradient = True, False
        for row in changes:
            body = self._store.body(row["id"])
            if row["kind"] == "optim_step":
                self.host.apply(model.adapter, step_settings(adam_params(body)))
                model.has_gradient = False
            else:
                given = passes.read_pass(passes.parsed(body), self._limits)
                self.host.accumulate([AdapterWork(model.adapter, given.batch, given.loss)])
                model.has_gradient = True

    def _lost(self, model: TrainedModel, cause: str) -> RequestRefused:
        self._store.change("UPDATE models SET corrupted = 1 WHERE id = ?", model.id)
        remedy = "load a checkpoint into a new model"
        return RequestRefused(f"the model {model.id} cannot be restored: {cause}; {remedy}", category="server")

    def _make_room(self, beside: Sequence[TrainedModel] = ()) -> None:
        """Move a model to the disk if all slots are in use.

        Args:
            beside: Models that stay on the device.
        """
        held = [each for each in list(self._models.values()) if each.is_on_device]
        if len(held) >= self.host.num_slots:
            free = [each for each in held if each not in beside]
            # A gradient is computed again when its model comes back.
            self._to_disk(min(free, key=lambda each: (each.has_gradient, each.used)))

    def _to_disk(self, model: TrainedModel) -> None:
        self._save(model)
        self.host.release(model.adapter)
        model.is_on_device = model.has_gradient = False

    def _save_if_due(self, model: TrainedModel) -> None:
        if model.steps - model.saved_steps >= self._config.save_every:
            self._save(model)

    def _save(self, model: TrainedModel) -> None:
        """Save a model as it is after its last step; does nothing if it is saved."""
        if model.saved_seq == model.stepped_seq:
            return
        before = model.saved_seq
        with replaced_folder(self._save_folder(model, model.stepped_seq)) as folder:
            self.host.save(model.adapter, folder)
        self._store.saved(model.id, model.stepped_seq)
        model.saved_seq, model.saved_steps = model.stepped_seq, model.steps
        self._drop_save(model, before)

    def _drop_save(self, model: TrainedModel, seq: int) -> None:
        if 0 <= seq != model.saved_seq:
            shutil.rmtree(self._save_folder(model, seq), ignore_errors=True)

    def _save_folder(self, model: TrainedModel, seq: int) -> Path:
        return self._store.folder / "models" / str(model.number) / f"state-{seq}"

    @property
    def _limits(self) -> passes.Limits:
        return passes.Limits(self.host.vocab_size, self.host.max_length)

    def _drop_ended(self) -> None:
        ended = {row["id"] for row in self._store.rows("SELECT id FROM models WHERE ended = 1")} & set(self._models)
        for name in ended:
            with self._ready:
                model = self._models.pop(name)
            if model.is_on_device:
                self.host.release(model.adapter)
            self._store.change("UPDATE requests SET body = NULL WHERE scope = ?", name)
            shutil.rmtree(self._store.folder / "models" / str(model.number), ignore_errors=True)

    def _keep_house(self) -> None:
        """Move models without a heartbeat to the disk, end what waits for requests that never came, and delete what has
        expired."""
        idle = self._store.idle_models(self._config.idle_adapter_s)
        for model in list(self._models.values()):
            if model.id in idle and model.is_on_device and not model.waiting:
                self._to_disk(model)
            self._close_gap(model)
        self._checkpoints.delete_expired()
        self._store.forget_results(kept_s=_KEPT_S)
        self._checkpoints.drop_unused_samplers(self._config.max_samplers)

    def _close_gap(self, model: TrainedModel) -> None:
        """Skip the requests of a model that others have waited for too long; they are refused if they still arrive."""
        with self._ready:
            if not model.waiting or model.head is not None:
                return
            seq = min(model.waiting)
            if time.monotonic() - model.waiting[seq].arrived < GAP_S:
                return
            missing, model.next_seq = model.next_seq, seq
            self._store.change("UPDATE models SET next_seq = ? WHERE id = ?", seq, model.id)
            waiting = model.waiting[seq]
        problem = f"request {missing} of the model has not arrived for {GAP_S:g} s, and this one follows it"
        self._finish(model, waiting, RequestRefused(problem))

    # Requests by kind

    def _accumulate(self, group: Sequence[tuple[TrainedModel, Waiting]]) -> None:
        given = list(self._readable(group))
        if not given:
            return
        for model, _, _ in given:
            model.has_gradient = True
        found = self.host.accumulate([AdapterWork(model.adapter, work.batch, work.loss) for model, _, work in given])
        for (model, waiting, work), (metrics, columns) in zip(given, found, strict=True):
            self._finish(model, waiting, _passed(work, metrics, columns))

    def _readable(
        self, group: Sequence[tuple[TrainedModel, Waiting]]
    ) -> Iterator[tuple[TrainedModel, Waiting, passes.Pass]]:
        """Return the passes that can be computed, with their models on the device, and answer the others."""
        models = [model for model, _ in group]
        for model, waiting in group:
            try:
                work = self._read(model, waiting)
                self._bring(model, models)
            except RequestRefused as refused:
                self._finish(model, waiting, refused)
            else:
                yield model, waiting, work

    def _read(self, model: TrainedModel, waiting: Waiting) -> passes.Pass:
        self._check_exists(model)
        given = passes.read_pass(passes.parsed(self._store.body(waiting.request)), self._limits)
        self._check_quota(model, "tokens", given.num_tokens)
        return given

    def _forward(self, model: TrainedModel, waiting: Waiting) -> Outcome:
        work = self._read(model, waiting)
        self._bring(model)
        metrics, columns = self.host.evaluate(AdapterWork(model.adapter, work.batch, work.loss))
        return _passed(work, metrics, columns)

    def _optim_step(self, model: TrainedModel, waiting: Waiting) -> Outcome:
        self._check_exists(model)
        settings = step_settings(adam_params(self._store.body(waiting.request)))
        self._check_quota(model, "steps", 1)
        self._bring(model)
        if not model.has_gradient:
            raise RequestRefused("there is no gradient: call forward_backward before optim_step")
        metrics = self.host.apply(model.adapter, settings)
        model.has_gradient = False
        return Outcome(_json({"metrics": results(metrics)}), changes=True, counts={"steps": 1})

    def _create(self, model: TrainedModel, _waiting: Waiting) -> Outcome:
        if model.settings.rank > self.host.max_rank:
            problem = f"lora_config.rank is {model.settings.rank}; at most {self.host.max_rank} (policy.lora_cfg.dim)"
            raise RequestRefused(problem)
        self._make_room()
        self.host.create(model.adapter, model.settings)
        model.is_on_device, model.has_gradient, model.used = True, False, time.monotonic()
        return Outcome(_json({"model_id": model.id, "type": "create_model"}), changes=True)

    def _load(self, model: TrainedModel, waiting: Waiting) -> Outcome:
        request = types.LoadWeightsRequest.model_validate_json(self._store.body(waiting.request))
        found = self._checkpoints.find(request.path, model.tenant, kind=TRAINING)
        settings = json.loads(found["settings"])
        if not model.is_on_device:
            self._make_room()
        folder = self._store.folder / found["folder"] / "state"
        self.host.load(model.adapter, folder, with_optimizer=bool(request.optimizer))
        model.is_on_device, model.has_gradient, model.used = True, False, time.monotonic()
        model.settings = adapter_settings(settings["adapter"])
        # What is loaded may be deleted later, so the model does not depend on it.
        with replaced_folder(self._save_folder(model, model.next_seq)) as own:
            self.host.save(model.adapter, own)
        self._store.change("UPDATE models SET settings = ? WHERE id = ?", found["settings"], model.id)
        answer = {"path": request.path, "model_id": model.id, "type": "load_weights"}
        return Outcome(_json(answer), changes=True, is_saved=True)

    def _save_weights(self, model: TrainedModel, waiting: Waiting) -> Outcome:
        request = types.SaveWeightsRequest.model_validate_json(self._store.body(waiting.request))
        self._check_exists(model)
        path = CheckpointPath(model.id, "weights", request.path or f"{model.next_seq:06d}")
        self._checkpoints.check_new(path, model.tenant, overwrites=request.overwrite)
        self._bring(model)

        def write(folder: Path) -> None:
            self.host.save(model.adapter, folder / "state")
            self.host.export(model.adapter, folder / "adapter")

        settings = self._model_settings(model)
        self._checkpoints.add(
            path, model.next_seq, model.tenant, settings, write, request.ttl_seconds, request.user_metadata
        )
        return Outcome(_json({"path": str(path), "type": "save_weights"}))

    def _save_for_sampler(self, model: TrainedModel, waiting: Waiting) -> Outcome:
        request = types.SaveWeightsForSamplerRequest.model_validate_json(self._store.body(waiting.request))
        self._check_exists(model)
        if request.path is not None:
            path = CheckpointPath(model.id, "sampler_weights", request.path)
            self._checkpoints.check_new(path, model.tenant, overwrites=False)
            self._bring(model)
            self._checkpoints.add(
                path,
                model.next_seq,
                model.tenant,
                self._model_settings(model),
                lambda folder: self.host.export(model.adapter, folder / "adapter"),
                *(request.ttl_seconds, request.user_metadata),
            )
            return Outcome(_json({"path": str(path), "type": "save_weights_for_sampler"}))
        if request.sampling_session_seq_id is None:
            raise RequestRefused("save_weights_for_sampler needs a path or a sampling_session_seq_id")
        self._bring(model)
        sampler = self._checkpoints.add_sampler_of(
            model.id,
            model.number,
            model.tenant,
            (request.sampling_session_seq_id, model.next_seq),
            lambda folder: self.host.export(model.adapter, folder),
        )
        return Outcome(_json({"sampling_session_id": sampler, "type": "save_weights_for_sampler"}))

    def _save_external(self, _model: TrainedModel, _waiting: Waiting) -> Outcome:
        raise RequestRefused(
            "save_weights_external is not served: nothing is downloaded from here. The checkpoints of "
            "save_weights_for_sampler are folders that peft loads, in tinker.queue_dir on the server"
        )

    _handlers: Any = {
        "create_model": _create,
        "forward": _forward,
        "load_weights": _load,
        "optim_step": _optim_step,
        "save_weights": _save_weights,
        "save_weights_for_sampler": _save_for_sampler,
        "save_weights_external": _save_external,
    }

    def _model_settings(self, model: TrainedModel) -> str:
        row = self._store.row("SELECT settings FROM models WHERE id = ?", model.id)
        assert row is not None
        return str(row["settings"])

    def _check_exists(self, model: TrainedModel) -> None:
        if model.stepped_seq < 0:
            raise RequestRefused("the model does not exist: its create_model or load_weights has failed")

    def _check_quota(self, model: TrainedModel, quota: str, added: int) -> None:
        tenant: Tenant = self._tenants[model.tenant]
        usage = self._store.usage(tenant.name)
        used = usage["steps"] if quota == "steps" else usage["trained_tokens"] + usage["sampled_tokens"]
        tenant.check(quota, used + added)


def _passed(work: passes.Pass, metrics: Metrics, columns: Batch) -> Outcome:
    answer = passes.written_pass(work, metrics, columns)
    return Outcome(answer, PROTOBUF, counts={"trained_tokens": work.num_tokens})


def adapter_settings(settings: dict[str, Any]) -> AdapterSettings:
    """Return the settings of an adapter from their stored form."""
    return AdapterSettings(**{**settings, "parts": tuple(settings["parts"])})


def adam_params(body: bytes) -> types.AdamParams:
    """Return the settings of a step.

    Raises:
        RequestRefused: If they are of another optimizer, or cannot be.
    """
    try:
        params = types.OptimStepRequest.model_validate_json(body).optim_params
    except ValidationError as error:
        raise RequestRefused(f"optim_step: {invalid(error)}") from None
    if not isinstance(params, types.AdamParams):
        raise RequestRefused(f"the optimizer {params.type!r} is not served; pass AdamParams")
    values = {name: getattr(params, name) for name in type(params).model_fields}
    wrong = [
        name
        for name, value in values.items()
        if not (math.isfinite(value) and value >= 0 and (value < 1 or not name.startswith("beta")))
    ]
    if wrong:
        given = ", ".join(f"{name}={values[name]:g}" for name in wrong)
        raise RequestRefused(f"adam_params: {given}; all numbers are at least 0, and betas below 1")
    return params


def step_settings(params: types.AdamParams) -> StepSettings:
    """Return the settings of a step of AdamW."""
    return StepSettings(
        lr=params.learning_rate,
        # A clip of 0 is none, and it replaces the clip of the config.
        max_grad_norm=params.grad_clip_norm or math.inf,
        kwargs={"betas": (params.beta1, params.beta2), "eps": params.eps, "weight_decay": params.weight_decay},
    )


def invalid(error: ValidationError) -> str:
    """Return the problems of a request in one line."""
    problems = (f"{'.'.join(map(str, each['loc'])) or 'body'}: {each['msg']}" for each in error.errors())
    return "; ".join(list(problems)[:5])[:500]


def _json(answer: dict[str, Any]) -> bytes:
    return json.dumps(answer).encode()
