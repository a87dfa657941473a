"""A client of environments' servers over HTTP and WebSocket, whose memory and time no server decides."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Mapping
from typing import Any

import aiohttp

from rl_core.http_client import MAX_ANSWER, MAX_REASON, RemoteServer, ServerUnreachable, WrongAnswer, read_object

MAX_TEXT = 20_000
"""Maximum number of characters of a server that the policy reads."""
CLOSE_S = 2.0
"""Seconds that a server has to agree to the end of a session."""
HEARTBEAT_S = 30.0
"""Seconds between pings that show whether the other end of a session is still there."""


class EnvironmentServer(RemoteServer):
    """A server of environments, with WebSockets."""

    async def connect(self, path: str) -> ServerSocket:
        """Return a WebSocket connection.

        Raises:
            ServerUnreachable: If there is no connection, or the server is too busy.
            WrongAnswer: If the server has no WebSocket there, or refuses the headers.
        """
        try:
            socket = await self.opened().ws_connect(
                self.at(path),
                headers=self.headers,
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
            raise self.failure(error) from None
        return ServerSocket(self, socket)


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
