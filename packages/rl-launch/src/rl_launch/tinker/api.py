"""The answers of the API of Tinker, path by path."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from rl_core.model import AdaptedPart
from rl_launch.root_config import TinkerConfig
from rl_launch.tinker import passes
from rl_launch.tinker.checkpoints import Checkpoints, check_ttl, described, iso
from rl_launch.tinker.client_types import types
from rl_launch.tinker.refusal import RequestRefused, not_found
from rl_launch.tinker.sampling import Sampling, read_sample
from rl_launch.tinker.store import Row, Store
from rl_launch.tinker.tenants import Tenant, Tenants
from rl_launch.tinker.trainer import JSON, Trainer, invalid

_log = logging.getLogger(__name__)

MAX_SEQ = 2**31 - 1
_LONG_POLL_S = 25.0
"""Maximum number of seconds for which a request for a result waits; clients wait 45 seconds for the answer."""

_MAX_METADATA = 65_536
_MAX_PAGE = 1000
_CLONE_BLOCK = 1_000_000_000
"""Number of sequence numbers of one client of a sampler."""

_M = TypeVar("_M", bound=BaseModel)


class Asked(NamedTuple):
    """A request.

    Args:
        request: Request, whose body has not been read.
        tenant: Who asks.
        parts: Parts of its path.
        body: Reads its body, decompressed.
    """

    request: web.BaseRequest
    tenant: Tenant
    parts: Mapping[str, str]
    body: Callable[[], Awaitable[bytes]]


Answer = Callable[[Any, Asked], Awaitable[Any]]


class ApiPath(NamedTuple):
    """A path of the API.

    Args:
        method: Method.
        template: Path below `/api/v1/`, with its parts in braces.
        answer: Answers it; None if it is refused.
        reason: Why it is refused, and what to do instead.
        needs_key: True if only a tenant may ask.
    """

    method: str
    template: str
    answer: Answer | None = None
    reason: str = ""
    needs_key: bool = True

    @property
    def pattern(self) -> re.Pattern[str]:
        """Pattern of the path; only the id of a checkpoint has slashes."""
        parts = re.sub(r"\{(\w+)\}", lambda found: f"(?P<{found[1]}>{_PARTS.get(found[1], '[^/]+')})", self.template)
        return re.compile(f"/api/v1/{parts}")


_PARTS = {"checkpoint": "[^/]+/[^/]+"}


class TinkerApi:
    """Answers requests.

    Args:
        config: Settings of the server.
        max_body: Maximum number of bytes of a request.
        tenants: Who may ask.
        store: Queue.
        trainer: Trains the models, and has the host.
        sampling: Computes samples.
        checkpoints: Checkpoints and samplers.
        compresses: True if clients are asked to compress passes.

    Attributes:
        base_model: Name of the base for clients.
    """

    def __init__(
        self,
        config: TinkerConfig,
        max_body: int,
        tenants: Tenants,
        store: Store,
        trainer: Trainer,
        sampling: Sampling,
        checkpoints: Checkpoints,
        *,
        compresses: bool,
    ) -> None:
        self._config, self._max_body, self._tenants = config, max_body, tenants
        self._store, self._trainer, self._sampling, self._checkpoints = store, trainer, sampling, checkpoints
        self._compresses = compresses
        self.base_model = config.base_model or trainer.host.base_model
        self._waiters: dict[str, set[asyncio.Event]] = defaultdict(set)
        self._has_told_unembed = False

    def status(self) -> dict[str, Any]:
        """Return the numbers of all tenants, for operators."""
        now = time.time()
        tenants = {}
        for name in self._tenants:
            usage = self._store.usage(name)
            pending, pending_bytes = self._store.pending(name)
            oldest = self._store.row("SELECT MIN(arrived) FROM requests WHERE state = 'pending' AND tenant = ?", name)
            tenants[name] = {
                "models": self._store.num_models(name),
                "steps": usage["steps"],
                "trained_tokens": usage["trained_tokens"],
                "sampled_tokens": usage["sampled_tokens"],
                "requests": usage["requests"],
                "failed_requests": usage["failed"],
                "waited_s": usage["waited_s"],
                "queued": pending,
                "queued_bytes": pending_bytes,
                "oldest_queued_s": 0.0 if oldest is None or oldest[0] is None else max(0.0, now - oldest[0]),
                "storage_bytes": self._store.storage(name),
            }
        return {"base_model": self.base_model, "tenants": tenants}

    async def _read(self, asked: Asked, kind: type[_M]) -> tuple[_M, bytes]:
        """Return a request of the API, and its body."""
        body = await asked.body()
        try:
            return kind.model_validate_json(body), body
        except ValidationError as error:
            raise RequestRefused(f"the request is not valid: {invalid(error)}") from None

    def wake(self, request: str) -> None:
        """Tell those who wait for the result of a request, or of any of its scope."""
        row = self._store.row("SELECT scope FROM requests WHERE id = ?", request)
        for key in (request, *(() if row is None else (row["scope"],))):
            for event in self._waiters.get(key, ()):
                event.set()

    async def _wait(self, key: str, is_there: Callable[[], Any], timeout_s: float) -> Any:
        """Return what is there, once a result of a request or of a scope is stored, or after the time."""
        event = asyncio.Event()
        self._waiters[key].add(event)
        try:
            end = time.monotonic() + timeout_s
            while not (found := is_there()) and (left := end - time.monotonic()) > 0:
                event.clear()
                try:
                    async with asyncio.timeout(left):
                        await event.wait()
                except TimeoutError:
                    return is_there()
            return found
        finally:
            self._waiters[key].discard(event)
            if not self._waiters[key]:
                del self._waiters[key]

    # The server itself

    async def _healthz(self, _asked: Asked) -> Any:
        return {"status": "ok"}

    async def _client_config(self, asked: Asked) -> Any:
        await self._read(asked, types.ClientConfigRequest)
        return {
            "pjwt_auth_enabled": False,
            "parallel_fwdbwd_chunks": True,
            "proto_compress_fwdbwd": self._compresses,
            "fwdbwd_max_chunk_bytes_count": min(5_000_000, self._max_body // 2),
            "sample_max_concurrent_requests": max(1, self._config.max_queued // 2),
            "sample_use_retrieve_futures": True,
            "sample_join_sampling_session": True,
            "sample_enable_stuck_detection": False,
            "custom_loss_server_side": False,
        }

    async def _dynamic_config(self, asked: Asked) -> Any:
        await self._read(asked, types.ClientConfigRequest)
        return {"sample_cancel_enabled": True}

    async def _capabilities(self, _asked: Asked) -> Any:
        model = {"model_name": self.base_model, "trainable": True, "sampleable": True}
        return {"supported_models": [{**model, "max_context_length": self._trainer.host.max_length}]}

    async def _telemetry(self, asked: Asked) -> Any:
        await asked.body()
        return {"status": "accepted"}

    async def _whoami(self, asked: Asked) -> Any:
        details = {"user_urn": f"urn:rl:tenant:{asked.tenant.name}"}
        return {"key_id": 0, "name": asked.tenant.name, "note": "", "details": details}

    async def _status(self, asked: Asked) -> Any:
        status = self.status()
        own = {name: numbers for name, numbers in status["tenants"].items() if name == asked.tenant.name}
        return {**status, "tenants": own}

    # Sessions

    async def _create_session(self, asked: Asked) -> Any:
        given, body = await self._read(asked, types.CreateSessionRequest)
        if len(body) > _MAX_METADATA:
            raise RequestRefused(f"create_session: at most {_MAX_METADATA} bytes of tags and metadata are allowed")
        session = secrets.token_hex(16)
        self._store.add_session(session, asked.tenant.name, given.user_metadata or {}, given.display_name)
        return {"type": "create_session", "session_id": session}

    def _session(self, session: str, tenant: Tenant) -> Row:
        found = self._store.session(session, tenant.name)
        if found is None:
            raise not_found(f"the session {session[:100]}")
        return found

    def _open_session(self, session: str, tenant: Tenant) -> Row:
        found = self._session(session, tenant)
        if found["finished"] is not None:
            raise RequestRefused(f"the session {session} is finished", status=410)
        self._store.change("UPDATE sessions SET seen = ? WHERE id = ?", time.time(), session)
        return found

    async def _heartbeat(self, asked: Asked) -> Any:
        given, _ = await self._read(asked, types.SessionHeartbeatRequest)
        self._open_session(given.session_id, asked.tenant)
        return {"type": "session_heartbeat"}

    async def _finish_session(self, asked: Asked) -> Any:
        session = self._session(asked.parts["session"], asked.tenant)
        body = await asked.body()
        if session["finished"] is None:
            self._store.change(
                "UPDATE sessions SET finished = ? WHERE id = ?",
                body[:_MAX_METADATA].decode(errors="replace"),
                session["id"],
            )
            self._trainer.end_models(session["id"])
        return {}

    async def _list_sessions(self, asked: Asked) -> Any:
        limit, offset = _page(asked.request)
        query = "SELECT id FROM sessions WHERE tenant = ? ORDER BY created DESC LIMIT ? OFFSET ?"
        return {"sessions": [row["id"] for row in self._store.rows(query, asked.tenant.name, limit, offset)]}

    async def _get_session(self, asked: Asked) -> Any:
        session = self._session(asked.parts["session"], asked.tenant)
        of = "SELECT id FROM {} WHERE session = ? ORDER BY rowid"
        return {
            "training_run_ids": [row["id"] for row in self._store.rows(of.format("models"), session["id"])],
            "sampler_ids": [row["id"] for row in self._store.rows(of.format("samplers"), session["id"])],
            "user_metadata": _strings(json.loads(session["metadata"])),
            "display_name": session["name"],
        }

    async def _search_sessions(self, asked: Asked) -> Any:
        given, _ = await self._read(asked, types.SessionSearchRequest)
        rows = self._store.rows(
            "SELECT * FROM sessions WHERE tenant = ? ORDER BY created DESC, id DESC", asked.tenant.name
        )
        found = [summary for row in rows if (summary := self._summary(row, given)) is not None]
        if given.cursor is not None:
            last = given.cursor.last_session_id
            place = next((number for number, each in enumerate(found) if each["session_id"] == last), len(found))
            found = found[place + 1 :]
        page, further = found[: given.limit], found[given.limit :]
        cursor = (
            {"last_created_at": page[-1]["created_at"], "last_session_id": page[-1]["session_id"]} if further else None
        )
        return {"sessions": page, "next_cursor": cursor}

    def _summary(self, row: Row, given: types.SessionSearchRequest) -> dict[str, Any] | None:
        """Return a session as a search lists it; None if it is not searched for."""
        metadata = _strings(json.loads(row["metadata"])) or {}
        words = (given.display_name or "").lower().split()
        is_named = row["id"] == given.session_id or (
            all(word in (row["name"] or "").lower() for word in words) if words else given.session_id is None
        )
        status = _session_status(row)
        is_wanted = given.statuses is None or any(_has_status(status, each) for each in given.statuses)
        if (
            not is_named
            or not is_wanted
            or any(metadata.get(key) != value for key, value in given.user_metadata.items())
        ):
            return None
        kept = self._store.row(
            "SELECT COUNT(*), COALESCE(SUM(c.size), 0) FROM checkpoints c JOIN models m ON m.id = c.model "
            "WHERE m.session = ?",
            row["id"],
        )
        assert kept is not None
        return {
            "session_id": row["id"],
            "created_at": iso(row["created"]),
            "owner": f"urn:rl:tenant:{row['tenant']}",
            "project_id": "default",
            "status": status,
            "checkpoints_count": kept[0],
            "display_name": row["name"],
            "user_metadata": metadata,
            "checkpoint_storage_bytes": kept[1],
        }

    # Models

    async def _create_model(self, asked: Asked) -> Any:
        given, body = await self._read(asked, types.CreateModelRequest)
        model = f"{given.session_id}:train:{given.model_seq_id}"
        if given.base_model != self.base_model:
            raise RequestRefused(f"base_model: {given.base_model[:200]!r} is not served; served: {self.base_model}")
        if given.optimizer_config.type != "adamw":
            raise RequestRefused(f"optimizer_config: {given.optimizer_config.type[:60]!r} is not served; served: adamw")
        if given.lora_config is None:
            raise RequestRefused("lora_config is missing: models are adapters of the base, with a rank")
        settings = self._adapter(given.lora_config, model)
        self._add_model(given.session_id, model, asked.tenant, settings, given.user_metadata)
        return self._put(model, 0, "create_model", body, asked.tenant)

    def _adapter(self, lora: types.LoraConfig, model: str) -> dict[str, Any]:
        """Return the settings of a model, as they are stored."""
        wanted: dict[AdaptedPart, bool] = {"attention": lora.train_attn, "mlp": lora.train_mlp}
        parts = [part for part, is_wanted in wanted.items() if is_wanted]
        if not parts:
            raise RequestRefused("lora_config needs train_attn or train_mlp: nothing else is trained here")
        if lora.train_unembed and self._config.refuse_unembed:
            raise RequestRefused(
                "lora_config.train_unembed is True, but the unembedding layer is not trained here; pass False"
            )
        if lora.train_unembed and not self._has_told_unembed:
            self._has_told_unembed = True
            _log.warning(
                "train_unembed=True, the client's default, has no effect: the unembedding layer gets no adapter"
            )
        if lora.rank < 1:
            raise RequestRefused(f"lora_config.rank must be at least 1, got {lora.rank}")
        seed = secrets.randbits(31) if lora.seed is None else lora.seed
        adapter = {"rank": lora.rank, "alpha": self._config.lora_alpha, "seed": seed, "parts": parts}
        return {"adapter": adapter, "train_unembed": lora.train_unembed}

    def _add_model(
        self, session: str, model: str, tenant: Tenant, settings: Mapping[str, Any], metadata: Mapping[str, Any] | None
    ) -> None:
        """Add a model, unless an earlier try of the client has."""
        self._open_session(session, tenant)
        if self._store.row("SELECT 1 FROM models WHERE id = ?", model) is not None:
            return
        tenant.check("models", self._store.num_models(tenant.name) + 1)
        if self._store.num_models() >= self._config.max_models:
            problem = f"{self._config.max_models} models are open (tinker.max_models); try again later"
            raise RequestRefused(problem, status=429, retry_after_s=30)
        self._store.add_model(model, session, tenant.name, settings, metadata)
        row = self._store.model(model, tenant.name)
        assert row is not None
        self._trainer.add_model(row)

    def _model(self, model: str, tenant: Tenant) -> Row:
        found = self._store.model(model, tenant.name)
        if found is None:
            raise not_found(f"the model {model[:200]}")
        return found

    async def _get_info(self, asked: Asked) -> Any:
        given, _ = await self._read(asked, types.GetInfoRequest)
        model = self._model(given.model_id, asked.tenant)
        data = {"model_name": self.base_model, "tokenizer_id": self._trainer.host.tokenizer}
        return {
            "type": "get_info",
            "model_id": model["id"],
            "model_data": data,
            "is_lora": True,
            "lora_rank": json.loads(model["settings"])["adapter"]["rank"],
            "model_name": self.base_model,
        }

    def _put(self, model: str, seq: int, kind: str, body: bytes, tenant: Tenant) -> Any:
        """Store a request of a model, unless an earlier try has; returns the promise of its result."""
        if not 0 <= seq <= MAX_SEQ:
            raise RequestRefused(f"seq_id must be from 0 to {MAX_SEQ}, got {seq}")
        request = f"{model}:{seq}"
        found = self._store.request(request, tenant.name)
        if found is not None and found["kind"] != kind:
            raise RequestRefused(f"seq_id {seq} of this model is the request {found['kind']}, not {kind}")
        if found is None:
            following = self._trainer.next_seq(model)
            if seq < following:
                raise RequestRefused(f"seq_id {seq} of this model has passed; the next one is {following}")
            # The request that others wait for is always taken.
            if seq > following:
                self._check_room(tenant)
            self._store.add_request(request, tenant.name, model, seq, kind, body)
            self._trainer.put(model, seq, request, kind)
        return {"request_id": request, "model_id": model}

    def _check_room(self, tenant: Tenant) -> None:
        waiting, size = self._store.pending(tenant.name)
        if waiting >= self._config.max_queued or size >= self._config.max_queued_mb * 2**20:
            problem = f"{waiting} requests of {size} bytes wait (tinker.max_queued, tinker.max_queued_mb); try again"
            raise RequestRefused(problem, status=429, retry_after_s=1)

    async def _forward_backward(self, asked: Asked) -> Any:
        body = await asked.body()
        message = passes.parsed(body)
        self._seen(self._model(message.model_id, asked.tenant), asked.tenant)
        kind = "forward" if message.forward_only else "forward_backward"
        return self._put(message.model_id, message.seq_id, kind, body, asked.tenant)

    def _seen(self, model: Row, tenant: Tenant) -> None:
        self._open_session(model["session"], tenant)

    async def _of_model(self, asked: Asked, kind: type[Any], name: str) -> Any:
        given, body = await self._read(asked, kind)
        model = self._model(given.model_id, asked.tenant)
        self._seen(model, asked.tenant)
        if given.seq_id is None or given.seq_id < 1:
            raise RequestRefused(f"{name} needs a seq_id of at least 1")
        return self._put(model["id"], given.seq_id, name, body, asked.tenant)

    async def _optim_step(self, asked: Asked) -> Any:
        return await self._of_model(asked, types.OptimStepRequest, "optim_step")

    async def _save_weights(self, asked: Asked) -> Any:
        return await self._of_model(asked, types.SaveWeightsRequest, "save_weights")

    async def _save_for_sampler(self, asked: Asked) -> Any:
        return await self._of_model(asked, types.SaveWeightsForSamplerRequest, "save_weights_for_sampler")

    async def _save_external(self, asked: Asked) -> Any:
        return await self._of_model(asked, types.SaveWeightsExternalRequest, "save_weights_external")

    async def _load_weights(self, asked: Asked) -> Any:
        given, body = await self._read(asked, types.LoadWeightsRequest)
        if given.weights_access_token is not None:
            raise RequestRefused("weights_access_token is not served: checkpoints belong to the key that saved them")
        if given.optimizer_config is not None and given.optimizer_config.type != "adamw":
            raise RequestRefused(f"optimizer_config: {given.optimizer_config.type[:60]!r} is not served; served: adamw")
        if given.session_id is None:
            if given.model_id is None:
                raise RequestRefused("load_weights needs a model_id and a seq_id, or a session_id and a model_seq_id")
            return await self._loads_into(given, body, asked.tenant)
        if given.base_model not in (None, self.base_model):
            raise RequestRefused(f"base_model: {given.base_model[:200]!r} is not served; served: {self.base_model}")
        if given.model_seq_id is None:
            raise RequestRefused("load_weights with a session_id needs a model_seq_id")
        found = self._checkpoints.find(given.path, asked.tenant.name)
        model = f"{given.session_id}:train:{given.model_seq_id}"
        self._add_model(given.session_id, model, asked.tenant, json.loads(found["settings"]), given.user_metadata)
        return self._put(model, 0, "load_weights", body, asked.tenant)

    async def _loads_into(self, given: types.LoadWeightsRequest, body: bytes, tenant: Tenant) -> Any:
        model = self._model(given.model_id or "", tenant)
        self._seen(model, tenant)
        if given.seq_id is None or given.seq_id < 1:
            raise RequestRefused("load_weights needs a seq_id of at least 1")
        return self._put(model["id"], given.seq_id, "load_weights", body, tenant)

    # Samplers

    async def _create_sampling_session(self, asked: Asked) -> Any:
        given, _ = await self._read(asked, types.CreateSamplingSessionRequest)
        self._open_session(given.session_id, asked.tenant)
        if given.model_path is None and given.base_model != self.base_model:
            wanted = (given.base_model or "")[:200]
            raise RequestRefused(f"base_model: {wanted!r} is not served; served: {self.base_model}")
        sampler = self._checkpoints.add_sampler(
            given.session_id, given.sampling_session_seq_id, asked.tenant.name, given.model_path
        )
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    def _sampler(self, sampler: str, tenant: Tenant) -> Row:
        found = self._store.row("SELECT * FROM samplers WHERE id = ? AND tenant = ?", sampler, tenant.name)
        if found is None:
            raise not_found(f"the sampling session {sampler[:200]}")
        return found

    async def _join_sampling_session(self, asked: Asked) -> Any:
        given, _ = await self._read(asked, types.JoinSamplingSessionRequest)
        sampler = self._sampler(given.sampling_session_id, asked.tenant)
        with self._store.transaction():
            self._store.change("UPDATE samplers SET clients = clients + 1 WHERE id = ?", sampler["id"])
            counted = self._sampler(sampler["id"], asked.tenant)["clients"]
        return {"type": "join_sampling_session", "client_counter": counted}

    async def _get_sampler(self, asked: Asked) -> Any:
        sampler = self._sampler(asked.parts["sampler"], asked.tenant)
        return {"sampler_id": sampler["id"], "base_model": self.base_model, "model_path": sampler["path"]}

    async def _asample(self, asked: Asked) -> Any:
        body = await asked.body()
        given = read_sample(body)
        assert given.sampling_session_id is not None
        assert given.seq_id is not None
        sampler = self._sampler(given.sampling_session_id, asked.tenant)
        self._open_session(sampler["session"], asked.tenant)
        request = f"{sampler['id']}:{given.seq_id}"
        found = self._store.request(request, asked.tenant.name)
        if found is None:
            self._check_room(asked.tenant)
            usage = self._store.usage(asked.tenant.name)
            asked.tenant.check("tokens", usage["trained_tokens"] + usage["sampled_tokens"] + 1)
            self._store.add_request(request, asked.tenant.name, sampler["id"], given.seq_id, "sample", body)
            self._sampling.put(request, asked.tenant.name)
        ids = [f"{request}:{number}" for number in range(given.num_samples)]
        return {"request_id": request, "sample_sequence_ids": ids}

    # Results

    async def _retrieve_future(self, asked: Asked) -> Any:
        given, _ = await self._read(asked, types.FutureRetrieveRequest)
        found = self._store.request(given.request_id, asked.tenant.name)
        if found is None:
            raise not_found(f"the request {given.request_id[:300]}")

        def finished() -> Row | None:
            row = self._store.request(given.request_id, asked.tenant.name)
            return row if row is None or row["state"] != "pending" else None

        row = await self._wait(given.request_id, finished, _LONG_POLL_S)
        if row is None:
            again = {"type": "try_again", "request_id": given.request_id, "queue_state": "active"}
            return web.Response(text=json.dumps(again), content_type=JSON, status=408)
        if row["media"] == "gone" or row["result"] is None:
            raise RequestRefused("the result was given before and is not kept any more", status=410)
        if row["given"] is None:
            self._store.change("UPDATE requests SET given = ? WHERE id = ?", time.time(), row["id"])
        return web.Response(body=bytes(row["result"]), content_type=row["media"])

    async def _retrieve_futures(self, asked: Asked) -> Any:
        given, _ = await self._read(asked, types.FuturesRetrieveRequest)
        sampler = self._sampler(given.target.sampling_session_id, asked.tenant)
        first = given.target.cloned_sampler_id * _CLONE_BLOCK
        for request in given.retrieved_request_ids:
            self._store.change(
                "UPDATE requests SET result = NULL, media = 'gone', given = ? "
                "WHERE id = ? AND scope = ? AND state != 'pending'",
                *(time.time(), request, sampler["id"]),
            )

        def finished() -> list[Row]:
            return self._store.rows(
                "SELECT id, state, number, LENGTH(result) AS size FROM requests WHERE scope = ? AND number > ? AND "
                "seq >= ? AND seq < ? AND media != 'gone' ORDER BY number LIMIT 1000",
                *(sampler["id"], given.prev_cursor, first, first + _CLONE_BLOCK),
            )

        wanted_s = _LONG_POLL_S if given.timeout is None else min(max(given.timeout, 0.0), _LONG_POLL_S)
        rows = await self._wait(sampler["id"], finished, wanted_s)
        completions = [
            {"state": "failed", "request_id": row["id"]}
            if row["state"] == "failed"
            else {"state": "finished", "request_id": row["id"], "response_payload_uncompressed_size": row["size"]}
            for row in rows
        ]
        return {"completions": completions, "cursor": rows[-1]["number"] if rows else given.prev_cursor}

    async def _cancel_future(self, asked: Asked) -> Any:
        given, _ = await self._read(asked, types.FutureRetrieveRequest)
        found = self._store.request(given.request_id, asked.tenant.name)
        if found is None:
            raise not_found(f"the request {given.request_id[:300]}")
        if found["kind"] != "sample":
            raise RequestRefused(f"a request of training, here {found['kind']}, cannot be cancelled")
        self._sampling.cancel(given.request_id)
        return {}

    # Training runs and checkpoints

    async def _training_runs(self, asked: Asked) -> Any:
        limit, offset = _page(asked.request)
        name = asked.tenant.name
        total = self._store.row("SELECT COUNT(*) FROM models WHERE tenant = ?", name)
        query = "SELECT * FROM models WHERE tenant = ? ORDER BY asked DESC, number DESC LIMIT ? OFFSET ?"
        runs = [self._run(row) for row in self._store.rows(query, name, limit, offset)]
        assert total is not None
        return {"training_runs": runs, "cursor": {"offset": offset, "limit": limit, "total_count": total[0]}}

    async def _training_run(self, asked: Asked) -> Any:
        return self._run(self._any_model(asked))

    def _any_model(self, asked: Asked) -> Row:
        """Return the model of a path, which may be of a finished session."""
        query = "SELECT * FROM models WHERE id = ? AND tenant = ?"
        found = self._store.row(query, asked.parts["run"], asked.tenant.name)
        if found is None:
            raise not_found(f"the training run {asked.parts['run'][:200]}")
        return found

    def _run(self, row: Row) -> dict[str, Any]:
        kept = [described(each) for each in self._store.checkpoints(row["tenant"], row["id"])]
        newest = {each["checkpoint_type"]: each for each in reversed(kept)}
        return {
            "training_run_id": row["id"],
            "base_model": self.base_model,
            "model_owner": row["tenant"],
            "is_lora": True,
            "corrupted": bool(row["corrupted"]),
            "lora_rank": json.loads(row["settings"])["adapter"]["rank"],
            "last_request_time": iso(row["asked"]),
            "last_checkpoint": newest.get("training"),
            "last_sampler_checkpoint": newest.get("sampler"),
            "user_metadata": _strings(json.loads(row["metadata"] or "null")),
        }

    async def _run_checkpoints(self, asked: Asked) -> Any:
        rows = self._store.checkpoints(asked.tenant.name, self._any_model(asked)["id"])
        return {"checkpoints": [described(row) for row in rows]}

    async def _all_checkpoints(self, asked: Asked) -> Any:
        limit, offset = _page(asked.request)
        rows = self._store.checkpoints(asked.tenant.name)
        cursor = {"offset": offset, "limit": limit, "total_count": len(rows)}
        return {"checkpoints": [described(row) for row in rows[offset : offset + limit]], "cursor": cursor}

    def _checkpoint(self, asked: Asked) -> Row:
        return self._checkpoints.find(f"tinker://{asked.parts['run']}/{asked.parts['checkpoint']}", asked.tenant.name)

    async def _delete_checkpoint(self, asked: Asked) -> Any:
        found = self._checkpoint(asked)
        await asyncio.to_thread(self._checkpoints.delete, found["path"])
        return {}

    async def _set_ttl(self, asked: Asked) -> Any:
        found, body = self._checkpoint(asked), await asked.body()
        try:
            ttl_s = json.loads(body).get("ttl_seconds")
        except (ValueError, AttributeError):
            raise RequestRefused("the request must be an object with ttl_seconds") from None
        if ttl_s is not None and (not isinstance(ttl_s, int) or isinstance(ttl_s, bool)):
            raise RequestRefused("ttl_seconds must be an integer or null")
        check_ttl(ttl_s)
        expires = None if ttl_s is None else time.time() + ttl_s
        self._store.change("UPDATE checkpoints SET expires = ? WHERE path = ?", expires, found["path"])
        return {}

    async def _weights_info(self, asked: Asked) -> Any:
        body = await asked.body()
        try:
            path = json.loads(body)["tinker_path"]
        except (ValueError, TypeError, KeyError):
            raise RequestRefused("the request must be an object with tinker_path") from None
        settings = json.loads(self._checkpoints.find(str(path), asked.tenant.name)["settings"])
        adapter = settings["adapter"]
        return {
            "base_model": self.base_model,
            "is_lora": True,
            "lora_rank": adapter["rank"],
            "train_unembed": settings["train_unembed"],
            "train_mlp": "mlp" in adapter["parts"],
            "train_attn": "attention" in adapter["parts"],
        }


_S = TinkerApi
_NO_BILLING = "there are no bills; GET status has the numbers of your key"
_NO_PROJECTS = "there are no projects"
_NO_DOWNLOADS = "nothing is downloaded from here; the folders are in tinker.queue_dir on the server"

PATHS: Sequence[ApiPath] = (
    ApiPath("GET", "healthz", _S._healthz, needs_key=False),
    ApiPath("POST", "client/config", _S._client_config),
    ApiPath("POST", "client/dynamic_config", _S._dynamic_config),
    ApiPath("GET", "get_server_capabilities", _S._capabilities),
    ApiPath("POST", "telemetry", _S._telemetry),
    ApiPath("GET", "auth/apikey/me", _S._whoami),
    ApiPath("GET", "status", _S._status),
    ApiPath("POST", "create_session", _S._create_session),
    ApiPath("POST", "session_heartbeat", _S._heartbeat),
    ApiPath("POST", "sessions/search", _S._search_sessions),
    ApiPath("POST", "sessions/{session}/finish", _S._finish_session),
    ApiPath("GET", "sessions", _S._list_sessions),
    ApiPath("GET", "sessions/{session}", _S._get_session),
    ApiPath("POST", "create_model", _S._create_model),
    ApiPath("POST", "get_info", _S._get_info),
    ApiPath("POST", "forward_backward", _S._forward_backward),
    ApiPath("POST", "optim_step", _S._optim_step),
    ApiPath("POST", "save_weights", _S._save_weights),
    ApiPath("POST", "load_weights", _S._load_weights),
    ApiPath("POST", "save_weights_for_sampler", _S._save_for_sampler),
    ApiPath("POST", "save_weights_external", _S._save_external),
    ApiPath("POST", "create_sampling_session", _S._create_sampling_session),
    ApiPath("POST", "join_sampling_session", _S._join_sampling_session),
    ApiPath("GET", "samplers/{sampler}", _S._get_sampler),
    ApiPath("POST", "asample", _S._asample),
    ApiPath("POST", "retrieve_future", _S._retrieve_future),
    ApiPath("POST", "retrieve_futures", _S._retrieve_futures),
    ApiPath("POST", "cancel_future", _S._cancel_future),
    ApiPath("GET", "training_runs", _S._training_runs),
    ApiPath("GET", "training_runs/{run}", _S._training_run),
    ApiPath("GET", "training_runs/{run}/checkpoints", _S._run_checkpoints),
    ApiPath("PUT", "training_runs/{run}/checkpoints/{checkpoint}/ttl", _S._set_ttl),
    ApiPath("GET", "training_runs/{run}/checkpoints/{checkpoint}/external_weights_urls", reason=_NO_DOWNLOADS),
    ApiPath("POST", "training_runs/{run}/checkpoints/{checkpoint}/publish", reason="checkpoints belong to one key"),
    ApiPath("DELETE", "training_runs/{run}/checkpoints/{checkpoint}/publish", reason="checkpoints belong to one key"),
    ApiPath("DELETE", "training_runs/{run}/checkpoints/{checkpoint}", _S._delete_checkpoint),
    ApiPath("GET", "checkpoints", _S._all_checkpoints),
    ApiPath("POST", "weights_info", _S._weights_info),
    ApiPath("POST", "copy_weights", reason=f"{_NO_PROJECTS} to copy to; load the checkpoint into a new model"),
    ApiPath("POST", "create_custom_loss", reason="pass the function itself to forward_backward_custom, which calls it"),
    ApiPath("POST", "auth/token", reason="the API key is used as it is"),
    ApiPath("DELETE", "auth/apikey/me", reason="the operator removes keys from tinker.keys_file"),
    ApiPath("PUT", "sessions/{session}/project", reason=_NO_PROJECTS),
    ApiPath("GET", "sessions/{session}/trace_export", reason="traces of the server are in its run directory"),
    ApiPath("GET", "audit", reason="the log of the server is in its run directory"),
    ApiPath("GET", "billing/usage/events", reason=_NO_BILLING),
    ApiPath("GET", "billing/usage/checkpoints/current", reason=_NO_BILLING),
)
"""All paths below `/api/v1/` that a client of version 0.38 knows."""


def _page(request: web.BaseRequest) -> tuple[int, int]:
    """Return the limit and the offset of a list.

    Raises:
        RequestRefused: If they cannot be.
    """
    try:
        limit, offset = (int(request.query.get(name, default)) for name, default in (("limit", "20"), ("offset", "0")))
    except ValueError:
        raise RequestRefused("limit and offset must be integers") from None
    if not 0 <= offset < 2**31 or not 1 <= limit <= _MAX_PAGE:
        raise RequestRefused(f"limit must be from 1 to {_MAX_PAGE}, and offset at least 0")
    return limit, offset


def _strings(metadata: Mapping[str, Any] | None) -> dict[str, str] | None:
    return None if metadata is None else {key: str(value) for key, value in metadata.items()}


def _has_status(status: Mapping[str, Any], wanted: types.SessionStatusQuery) -> bool:
    """Return whether a session has a status that is searched for."""
    if status["type"] != wanted.type:
        return False
    reasons = wanted.reasons if isinstance(wanted, types.ClientFinishedSessionStatusQuery) else None
    return reasons is None or status["reason"]["type"] in reasons


def _session_status(row: Row) -> dict[str, Any]:
    if row["finished"] is None:
        return {"type": "active"}
    try:
        reason = json.loads(row["finished"])["reason"]["type"]
    except (ValueError, TypeError, KeyError):
        reason = "success"
    reason = reason if reason in ("success", "errored", "interrupted") else "success"
    return {"type": "client_finished", "reason": {"type": reason}}
