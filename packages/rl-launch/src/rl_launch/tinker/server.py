"""The HTTP server that programs of the `tinker` client call."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import ssl
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any

import zstandard
from aiohttp import web

from rl_algos.connections import BodyTooLarge, Connections, SparingLog, receive, within_limit
from rl_algos.host_header import host_name
from rl_core.errors import ConfigError
from rl_launch.root_config import TinkerConfig
from rl_launch.tinker.api import PATHS, Asked, TinkerApi
from rl_launch.tinker.checkpoints import Checkpoints
from rl_launch.tinker.refusal import RequestRefused, not_found
from rl_launch.tinker.sampling import Sampling
from rl_launch.tinker.store import Store
from rl_launch.tinker.tenants import Tenant, Tenants
from rl_launch.tinker.trainer import JSON, Hosting, Trainer

_log = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "::1", "localhost")

_LARGE = 2**20
_MAX_LARGE = 8
"""Maximum number of large bodies in memory at a time."""


class TinkerServer:
    """Serves the API of Tinker over one host.

    Args:
        hosting: Enters a context with a new host.
        config: Settings of the server.
        folder: Folder of the queue.
        ends: Ids that end a completion, unless a request has stops of its own.

    Attributes:
        api: Answers of the API, once the server is started.
        ended: Has the error if the models cannot be started again.

    Raises:
        ConfigError: If the settings cannot be used together.
    """

    api: TinkerApi
    ended: asyncio.Future[None]

    def __init__(self, hosting: Hosting, config: TinkerConfig, folder: Path, ends: Sequence[int]) -> None:
        self._tls = check_exposure(config)
        self._config = config
        self._tenants = Tenants.read(config.keys_file)
        self._store = Store(folder)
        self._checkpoints = Checkpoints(self._store, self._tenants)
        self._max_body = config.max_body_mb * 2**20
        self._large = asyncio.Semaphore(_MAX_LARGE)
        self._failures = SparingLog(_log, "%d requests failed, the last one because of %s")
        self._hosting, self._ends = hosting, ends
        self._runner: web.ServerRunner | None = None
        self._port = 0

    async def start(self) -> None:
        """Build the host, restore the queue and listen.

        Raises:
            ConfigError: If somebody else listens at the port.
            RLError: If the host does not start.
        """
        loop = asyncio.get_running_loop()
        self.ended = loop.create_future()

        def done(request: str) -> None:
            loop.call_soon_threadsafe(lambda: self.api.wake(request))

        def given_up(error: Exception) -> None:
            loop.call_soon_threadsafe(self.ended.set_exception, error)

        parts = (self._hosting, self._store, self._config, self._tenants, self._checkpoints, done, given_up)
        self._trainer = await asyncio.to_thread(Trainer, *parts)
        self._sampling = Sampling(
            self._store, self._trainer, self._checkpoints, self._ends, self._config.max_sampling, done
        )
        self.api = TinkerApi(
            self._config,
            self._max_body,
            self._tenants,
            self._store,
            self._trainer,
            self._sampling,
            self._checkpoints,
            # On one machine, compression takes longer than what it saves.
            compresses=self._config.host not in LOOPBACK,
        )
        self._trainer.start()
        self._sampling.start()
        connections = Connections(self._serve, _refusal_of_http, encodings=("zstd",))
        self._runner = web.ServerRunner(connections, shutdown_timeout=5.0)
        await self._runner.setup()
        host, port = self._config.host, self._config.port
        try:
            await web.TCPSite(self._runner, host, port, ssl_context=self._tls).start()
        except OSError as error:
            raise ConfigError(f"tinker.port: {host}:{port} cannot be listened at: {error}") from None
        self._port = self._runner.addresses[0][1]

    @property
    def url(self) -> str:
        """URL of the server, for TINKER_BASE_URL."""
        host = self._config.host
        return f"{'https' if self._tls else 'http'}://{f'[{host}]' if ':' in host else host}:{self._port}"

    @property
    def tenants(self) -> list[str]:
        """Names of the tenants."""
        return list(self._tenants)

    async def close(self) -> None:
        """Stop listening, finish the training request in progress, and end the host."""
        if self._runner is not None:
            await self._runner.cleanup()
            await self._sampling.close()
            await asyncio.to_thread(self._trainer.close)
        self._store.close()

    # Requests

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            answer = await self._answered(request)
        except ConnectionError:
            raise
        except RequestRefused as refused:
            return _refusal(refused)
        except Exception as error:  # noqa: BLE001 - the client gets an error that it can read
            cause = f"{type(error).__name__}: {error}"[:200]
            self._failures.note(cause, error)
            return _refusal(RequestRefused(f"the server could not answer: {cause}", status=500, category="server"))
        if isinstance(answer, web.Response):
            response = answer
        else:
            response = web.Response(text=json.dumps(answer), content_type=JSON)
        await within_limit(response.prepare(request))
        await within_limit(response.write_eof())
        return response

    async def _answered(self, request: web.BaseRequest) -> Any:
        self._check_host(request)
        found = [(path, match) for path in PATHS if (match := path.pattern.fullmatch(request.path)) is not None]
        if not found:
            raise not_found(f"the path {request.path[:200]}")
        asked_for = [each for each in found if each[0].method == request.method]
        if not asked_for:
            allowed = ", ".join(sorted({path.method for path, _ in found}))
            raise RequestRefused(f"{request.method[:20]} is not allowed here; allowed: {allowed}", status=405)
        path, match = asked_for[0]
        key = request.headers.get("X-API-Key", "")
        tenant = self._tenants.of_key(key) if path.needs_key else Tenant("", {})
        if path.answer is None:
            raise RequestRefused(f"{path.template} is not served: {path.reason}", status=404)
        return await path.answer(self.api, Asked(request, tenant, match.groupdict(), lambda: self._body(request)))

    def _check_host(self, request: web.BaseRequest) -> None:
        """Refuse a page in a browser that has bound its name to the loopback address."""
        if self._config.host not in LOOPBACK:
            return
        own = request.transport.get_extra_info("sockname")[0] if request.transport is not None else ""
        name = host_name(request.headers.getall("Host", []))
        if name not in (self._config.host, own, "localhost"):
            raise RequestRefused(f"the host {name[:100]!r} is not served", status=403)

    async def _body(self, request: web.BaseRequest) -> bytes:
        """Return the body of a request, decompressed."""
        limit = self._max_body
        too_large = RequestRefused(f"the request is larger than {limit} bytes (tinker.max_body_mb)", status=413)
        is_small = request.content_length is not None and request.content_length <= _LARGE
        room: AbstractAsyncContextManager[Any] = nullcontext() if is_small else self._large
        async with room:
            try:
                body = bytes(await receive(request, limit))
            except BodyTooLarge:
                raise too_large from None
            except TimeoutError as error:
                raise RequestRefused(str(error), status=408) from None
            except web.RequestPayloadError:
                raise RequestRefused("the body of the request is incomplete") from None
            if request.headers.get("Content-Encoding") != "zstd":
                return body
            return await asyncio.to_thread(_decompressed, body, limit, too_large)


def check_exposure(config: TinkerConfig) -> ssl.SSLContext | None:
    """Check that only tenants with keys can reach the server from elsewhere; returns its TLS context, None without.

    Raises:
        ConfigError: If strangers could, or the certificate cannot be read.
    """
    if config.keys_file is None and config.host not in LOOPBACK:
        raise ConfigError(
            f"tinker.host: {config.host} can be reached from other machines, and without tinker.keys_file anybody "
            "could train. Set tinker.keys_file, or tinker.host=127.0.0.1"
        )
    if (config.tls_cert is None) != (config.tls_key is None):
        raise ConfigError("tinker.tls_cert and tinker.tls_key belong together; set both or none")
    if config.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"tinker.tls_cert, tinker.tls_key: {config.tls_cert} cannot be used: {error}") from None
    return context


def _decompressed(body: bytes, limit: int, too_large: RequestRefused) -> bytes:
    try:
        with zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(body) as reader:
            found: bytes = reader.read(limit + 1)
    except zstandard.ZstdError as error:
        raise RequestRefused(f"the body is not valid zstd: {error}") from None
    if len(found) > limit:
        raise too_large
    return found


def _refusal(refused: RequestRefused) -> web.Response:
    after = refused.retry_after_s
    headers = {} if after is None else {"Retry-After": str(math.ceil(after))}
    return web.Response(body=refused.body, content_type=JSON, status=refused.status, headers=headers)


def _refusal_of_http(status: int, message: str) -> web.StreamResponse:
    return _refusal(RequestRefused(message, status=status))
