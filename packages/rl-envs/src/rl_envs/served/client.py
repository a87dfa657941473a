"""A client of environments' servers over HTTP and WebSocket, whose memory and time no server decides."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import aiohttp

MAX_ANSWER = 4 * 2**20
"""Maximum number of bytes of an answer."""
MAX_REASON = 300
"""Maximum number of characters that a server adds to a message about its failure."""
MAX_TEXT = 20_000
"""Maximum number of characters of a server that the policy reads."""
CONNECT_S = 10.0
"""Timeout in seconds of a connection."""
CLOSE_S = 2.0
"""Seconds that a server has to agree to the end of a session."""
HEARTBEAT_S = 30.0
"""Seconds between pings that show whether the other end of a session is still there."""
KEEP_S = 2.0
"""Seconds that an unused connection is kept; servers close theirs after 5 or more."""

T = TypeVar("T")


class ServerUnreachable(Exception):
    """Raised if a server cannot be reached, ends a connection or has no room; another try may succeed."""


class WrongAnswer(Exception):
    """Raised if a server refuses a request, or its answer is not one."""


@dataclass(frozen=True)
class HTTPAnswer:
    """An answer to a request.

    Args:
        status: Status code.
        body: Its bytes.
        cookies: Cookies that it sets, by name.
    """

    status: int
    body: bytes
    cookies: Mapping[str, str]

    def json(self) -> dict[str, Any]:
        """Return the object in the body. Raises `WrongAnswer` if there is none."""
        return read_object(self.body)


class EnvironmentServer:
    """A server by its address. Everything but `__str__` is called on one event loop.

    Args:
        url: Address; its path is the beginning of all paths.
        headers: Headers of every request.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._url = urlsplit(url)
        self._headers = {"Accept-Encoding": "identity", **headers}
        self._session: aiohttp.ClientSession | None = None

    def __str__(self) -> str:
        # The path and the query of an address may hold a key.
        host = self._url.hostname or ""
        host = f"[{host}]" if ":" in host else host
        return f"the server {self._url.scheme}://{host}{f':{self._url.port}' if self._url.port else ''}"

    async def get(self, path: str) -> HTTPAnswer:
        """Return the answer to `GET`. Raises as `post` does."""
        return await self._request("GET", path, None, {})

    async def post(self, path: str, body: Any, cookies: Mapping[str, str]) -> HTTPAnswer:
        """Return the answer to a JSON body, whatever its status.

        Raises:
            ServerUnreachable: If there is no connection, or it ends.
            WrongAnswer: If the answer is not HTTP, or longer than `MAX_ANSWER`.
        """
        return await self._request("POST", path, json.dumps(body).encode("utf-8", "replace"), cookies)

    async def connect(self, path: str) -> ServerSocket:
        """Return a WebSocket connection.

        Raises:
            ServerUnreachable: If there is no connection, or the server is too busy.
            WrongAnswer: If the server has no WebSocket there, or refuses the headers.
        """
        try:
            socket = await self._opened().ws_connect(
                self._at(path),
                headers=self._headers,
                max_msg_size=MAX_ANSWER,
                heartbeat=HEARTBEAT_S,
                timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_S),
            )
        except aiohttp.WSServerHandshakeError as error:
            busy = error.status in (429, 503)
            raise (ServerUnreachable if busy else WrongAnswer)(
                f"{self} refused a session at {path} (HTTP {error.status})"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise self._failure(error) from None
        return ServerSocket(self, socket)

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _request(self, method: str, path: str, body: bytes | None, cookies: Mapping[str, str]) -> HTTPAnswer:
        headers = dict(self._headers)
        if body is not None:
            headers["Content-Type"] = "application/json"
        if cookies:
            headers["Cookie"] = "; ".join(f"{name}={value}" for name, value in cookies.items())
        try:
            # A redirect could lead the headers to someone else.
            async with self._opened().request(
                method, self._at(path), data=body, headers=headers, allow_redirects=False
            ) as response:
                content = bytearray()
                async for chunk in response.content.iter_chunked(2**16):
                    content += chunk
                    if len(content) > MAX_ANSWER:
                        raise WrongAnswer(f"{self} sent an answer of more than {MAX_ANSWER} bytes")
                set_cookies = {name: morsel.value for name, morsel in response.cookies.items()}
                return HTTPAnswer(response.status, bytes(content), set_cookies)
        except (aiohttp.ClientError, OSError) as error:
            raise self._failure(error) from None

    def _failure(self, error: Exception) -> Exception:
        """Return what to raise for an error of the connection, without the address in it."""
        reason = getattr(getattr(error, "os_error", error), "strerror", None) or type(error).__name__
        if isinstance(error, aiohttp.ClientConnectionError | OSError):
            return ServerUnreachable(f"{self} cannot be reached: {reason}")
        return WrongAnswer(f"{self} sent an answer that cannot be read: {reason}")

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            traced = aiohttp.TraceConfig()
            traced.on_request_redirect.append(self._refuse_redirect)
            self._session = aiohttp.ClientSession(
                # Each conversation has cookies of its own.
                cookie_jar=aiohttp.DummyCookieJar(),
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                # A small body could unpack to any size.
                auto_decompress=False,
                trace_configs=[traced],
            )
        return self._session

    async def _refuse_redirect(self, *_: Any) -> None:
        """Refuse the redirect of a session, which `ws_connect` would follow with the headers."""
        raise WrongAnswer(f"{self} redirects, which is not followed because the headers must not go elsewhere")

    def _at(self, path: str) -> str:
        return urlunsplit(self._url._replace(path=self._url.path.rstrip("/") + path, fragment=""))


class ServerSocket:
    """A WebSocket connection on which every message is answered by one.

    Its messages are read all the time, because pings that a server sends between turns are answered only then.

    Args:
        server: The server.
        socket: The connection.
    """

    def __init__(self, server: EnvironmentServer, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._server = server
        self._socket = socket
        self._messages: asyncio.Queue[aiohttp.WSMessage] = asyncio.Queue(2)
        self._has_asked = False
        self._listening = asyncio.get_running_loop().create_task(self._listen())

    async def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a message.

        Raises:
            ServerUnreachable: If the connection ends.
            WrongAnswer: If the answer is not a JSON object of at most `MAX_ANSWER` bytes, or came before the question.
        """
        # The first answer may precede its question: a server without room sends its refusal unasked.
        if self._has_asked and not self._messages.empty():
            raise self._ending(self._messages.get_nowait()) or WrongAnswer(f"{self._server} sent an unasked message")
        self._has_asked = True
        with contextlib.suppress(ConnectionError, aiohttp.ClientError):
            await self._socket.send_str(json.dumps(message))
        answer = await self._messages.get()
        if ending := self._ending(answer):
            raise ending
        if answer.type is not aiohttp.WSMsgType.TEXT:
            raise WrongAnswer(f"{self._server} sent a binary message")
        return read_object(answer.data)

    async def close(self) -> None:
        """End the session."""
        self._listening.cancel()
        await asyncio.wait([self._listening])
        with contextlib.suppress(aiohttp.ClientError, OSError):
            await self._socket.close()

    async def _listen(self) -> None:
        while True:
            message = await self._socket.receive()
            await self._messages.put(message)
            if message.type not in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
                return

    def _ending(self, message: aiohttp.WSMessage) -> Exception | None:
        """Return what to raise if a message is the end of the connection."""
        match message.type:
            case aiohttp.WSMsgType.TEXT | aiohttp.WSMsgType.BINARY:
                return None
            case aiohttp.WSMsgType.ERROR if isinstance(message.data, aiohttp.WebSocketError):
                return WrongAnswer(f"{self._server} broke the WebSocket protocol: {str(message.data)[:MAX_REASON]}")
        return ServerUnreachable(f"{self._server} closed the session")


async def patiently(attempt: Callable[[], Awaitable[T]], patience_s: float) -> T:
    """Return the result of an attempt that may be repeated while the server is unreachable.

    Args:
        attempt: Makes one attempt.
        patience_s: Seconds in which another one may begin.

    Raises:
        ServerUnreachable: If the last one has failed.
    """
    loop = asyncio.get_running_loop()
    end, pause = loop.time() + patience_s, 0.1
    while True:
        try:
            return await attempt()
        except ServerUnreachable:
            if loop.time() + pause > end:
                raise
        await asyncio.sleep(pause)
        pause = min(2 * pause, 5.0)


def read_object(text: str | bytes) -> dict[str, Any]:
    """Return the object of a JSON text. Raises `WrongAnswer` if it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise WrongAnswer(f"an answer of the server is not a JSON object: {text[:MAX_REASON]!r}")
    return value


def read_reward(value: Any) -> float:
    """Return a reward, 0 for None. Raises `WrongAnswer` if it is not a finite number."""
    if value is None:
        return 0.0
    with contextlib.suppress(OverflowError):
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    raise WrongAnswer(f"a reward of the server is not a finite number: {repr(value)[:MAX_REASON]}")


def as_shown(value: Any) -> str:
    """Return a value as the policy reads it: a string as it is, anything else as JSON."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text[:MAX_TEXT].encode("utf-8", "replace").decode()
