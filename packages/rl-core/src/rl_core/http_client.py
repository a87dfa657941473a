"""A client of servers that somebody else runs, which decide neither its memory nor where its headers go.

It needs aiohttp, which the packages that call it depend on.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

if TYPE_CHECKING:
    import aiohttp

MAX_ANSWER = 4 * 2**20
"""Maximum number of bytes of an answer, unless the client sets another."""
MAX_REASON = 300
"""Maximum number of characters that a server adds to a message about its failure."""
CONNECT_S = 10.0
"""Timeout in seconds of a connection."""
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


class RemoteServer:
    """A server by its address. Everything but `__str__` is called on one event loop.

    Args:
        url: Address; its path is the beginning of all paths.
        headers: Headers of every request.
        max_answer: Maximum number of bytes of an answer.
    """

    def __init__(self, url: str, headers: Mapping[str, str], *, max_answer: int = MAX_ANSWER) -> None:
        self._url = urlsplit(url)
        self.headers = {"Accept-Encoding": "identity", **headers}
        self._max_answer = max_answer
        self._session: aiohttp.ClientSession | None = None

    def __str__(self) -> str:
        # The path and the query of an address may hold a key.
        host = self._url.hostname or ""
        host = f"[{host}]" if ":" in host else host
        return f"the server {self._url.scheme}://{host}{f':{self._url.port}' if self._url.port else ''}"

    async def get(self, path: str) -> HTTPAnswer:
        """Return the answer to `GET`. Raises as `post` does."""
        return await self._request("GET", path, None, {})

    async def post(self, path: str, body: Any, cookies: Mapping[str, str] | None = None) -> HTTPAnswer:
        """Return the answer to a JSON body, whatever its status.

        Raises:
            ServerUnreachable: If there is no connection, or it ends.
            WrongAnswer: If the answer is not HTTP, or too long.
        """
        return await self._request("POST", path, json.dumps(body).encode("utf-8", "replace"), cookies or {})

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _request(self, method: str, path: str, body: bytes | None, cookies: Mapping[str, str]) -> HTTPAnswer:
        import aiohttp

        headers = dict(self.headers)
        if body is not None:
            headers["Content-Type"] = "application/json"
        if cookies:
            headers["Cookie"] = "; ".join(f"{name}={value}" for name, value in cookies.items())
        try:
            # A redirect could lead the headers to someone else.
            async with self.opened().request(
                method, self.at(path), data=body, headers=headers, allow_redirects=False
            ) as response:
                content = bytearray()
                async for chunk in response.content.iter_chunked(2**16):
                    content += chunk
                    if len(content) > self._max_answer:
                        raise WrongAnswer(f"{self} sent an answer of more than {self._max_answer} bytes")
                set_cookies = {name: morsel.value for name, morsel in response.cookies.items()}
                return HTTPAnswer(response.status, bytes(content), set_cookies)
        except (aiohttp.ClientError, OSError) as error:
            raise self.failure(error) from None

    def failure(self, error: Exception) -> Exception:
        """Return the exception to raise for an error of the connection, without the address in it."""
        import aiohttp

        reason = getattr(getattr(error, "os_error", error), "strerror", None) or type(error).__name__
        if isinstance(error, aiohttp.ClientConnectionError | OSError):
            return ServerUnreachable(f"{self} cannot be reached: {reason}")
        return WrongAnswer(f"{self} sent an answer that cannot be read: {reason}")

    def opened(self) -> aiohttp.ClientSession:
        """Return the session of all connections."""
        import aiohttp

        if self._session is None:
            traced = aiohttp.TraceConfig()
            traced.on_request_redirect.append(self._refuse_redirect)
            self._session = aiohttp.ClientSession(
                # Cookies belong to a conversation, not to the client.
                cookie_jar=aiohttp.DummyCookieJar(),
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                # A small body could unpack to any size.
                auto_decompress=False,
                trace_configs=[traced],
            )
        return self._session

    async def _refuse_redirect(self, *_: Any) -> None:
        """Refuse the redirect of a WebSocket, which aiohttp would follow with the headers."""
        raise WrongAnswer(f"{self} redirects, which is not followed because the headers must not go elsewhere")

    def at(self, path: str) -> str:
        """Return the address of a path."""
        return urlunsplit(self._url._replace(path=self._url.path.rstrip("/") + path, fragment=""))


def read_object(text: str | bytes) -> dict[str, Any]:
    """Return the object of a JSON text. Raises `WrongAnswer` if it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise WrongAnswer(f"an answer of the server is not a JSON object: {text[:MAX_REASON]!r}")
    return value


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
