"""Tools of servers that speak the Model Context Protocol, for `rl_core.ToolEnvironment`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import textwrap
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from rl_core import ServerFailed
from rl_envs.sandbox.config import SandboxConfig
from rl_envs.sandbox.program import Program, read_frame, request_of, write_frame
from rl_envs.sandbox.runner import SandboxFailed
from rl_envs.sandbox.sandbox import Sandbox, outcome_of

MAX_MESSAGE = 4 * 2**20
"""Maximum number of bytes of a message of a server."""
MAX_REASON = 500
"""Maximum number of characters that a server adds to a message about its failure."""
MAX_PAGES = 100
"""Maximum number of pages of a server's list of tools."""
FOLDER = "{folder}"
"""Stands for the folder of a session in commands and variables."""
INHERITED = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "USER")
"""Environment variables of this process that a server gets."""
END_S = 2.0
"""Seconds that a server has to end after its input is closed."""


class MCPServer:
    """The tools of an MCP server, with a session of its own for every conversation.

    A server by `command` runs as a process of the conversation, which starts with the first call of one of its tools;
    one by `url` is running already. In a user's file::

        server = MCPServer(["npx", "-y", "@modelcontextprotocol/server-memory"])
        environment = ToolEnvironment([server], reward=score)

    Args:
        command: Command of a server that reads and writes messages on its standard input and output. `{folder}` in it,
            and in `variables`, is an empty folder of the session, in which the server starts and which is removed at
            its end.
        url: URL of a server over HTTP, instead of a command.
        only: Names of the tools to offer; all of them if unset.
        variables: Further environment variables of the server; of this process's it has `INHERITED` alone.
        headers: Further headers of requests to `url`, such as one with a key that is read from `os.environ`.
        timeout_s: Maximum number of seconds of a call, and of a start. The policy reads that a call took longer; a
            start that does fails its rollout.
        sandbox: Sandbox of the server, whose limits are for a whole conversation: a `Program` with `command`, and
            `{folder}` is its scratch folder. None to run it as the environment runs.
        is_shared: True if all conversations of an environment's process share one session, which suits servers that
            keep nothing between calls and take long to start.

    Raises:
        ValueError: If there is neither a command nor a URL, or both, or an argument that the other one would need.
    """

    def __init__(
        self,
        command: Sequence[str] | None = None,
        *,
        url: str | None = None,
        only: Sequence[str] | None = None,
        variables: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        sandbox: SandboxConfig | None = None,
        is_shared: bool = False,
    ) -> None:
        if (not command) == (not url):
            raise ValueError("an MCP server needs either a command or a url")
        if isinstance(command, str):
            raise ValueError(f"the command of an MCP server is a list of words, got {command!r}")
        if url and variables:
            raise ValueError("`variables` are those of a command; a server by url has its own")
        if command and headers:
            raise ValueError("`headers` are those of requests to a url; give a command its keys as `variables`")
        if sandbox is not None and (url or sandbox.url or sandbox.service):
            raise ValueError(
                "the sandbox of an MCP server is on this machine, and for a command; leave its url and service unset"
            )
        self.command = tuple(command or ())
        self.url = url
        self.variables = dict(variables or {})
        self.headers = dict(headers or {})
        self.timeout_s = timeout_s
        self._only = None if only is None else tuple(only)
        self._shared: _Session | None = None
        self._is_shared = is_shared
        self._sandbox = sandbox
        self._opened: Sandbox | None = None

    def __str__(self) -> str:
        # The path and the query of an address may hold a key.
        place = urlsplit(self.url).netloc.rpartition("@")[2] if self.url else " ".join(self.command)
        return f"the MCP server {textwrap.shorten(place, 100)}"

    async def schemas(self) -> list[Mapping[str, Any]]:
        """Return the schemas of the tools; a server by command is started for it.

        Raises:
            ServerFailed: If the server does not start or answer as it should, or lacks a tool of `only`.
        """
        session = await self.open()
        try:
            found = {schema["function"]["name"]: schema for schema in await session.schemas()}
        finally:
            await session.close()
        names = found if self._only is None else self._only
        if missing := [name for name in names if name not in found]:
            raise ServerFailed(f"{self} has no tool {missing[0]!r}; it has {', '.join(found) or 'none'}")
        return [found[name] for name in names]

    async def open(self) -> _Session:
        """Return a session for a conversation.

        Raises:
            ServerFailed: If the server does not start, or does not answer as it should.
        """
        if not self._is_shared:
            return await _Session(self).started()
        if self._shared is None or self._shared.has_ended:
            self._shared = _Session(self, is_shared=True)
        return await self._shared.started()

    def start(self, folder: str) -> _LocalProcess | _SandboxedProcess:
        """Start the server in a folder, in its sandbox if it has one."""
        here = "." if self._sandbox else folder
        words = [word.replace(FOLDER, here) for word in self.command]
        variables = {name: value.replace(FOLDER, here) for name, value in self.variables.items()}
        if self._sandbox is None:
            inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
            return _LocalProcess(words, {**inherited, **variables}, folder)
        if self._opened is None:
            config = self._sandbox
            self._opened = Sandbox(
                config.isolation, limits=config.limits, python_path=config.python_path, commands=config.commands
            )
        return _SandboxedProcess(self._opened, Program(command=tuple(words), variables=variables, interactive=True))


class _Session:
    """A connection to a server, and its process. One task enters and leaves it, as the client requires."""

    def __init__(self, server: MCPServer, *, is_shared: bool = False) -> None:
        self._server = server
        self._is_shared = is_shared
        self._client: Any = None
        self._reason = ""
        self._has_started, self._is_closing = asyncio.Event(), asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._live())

    @property
    def has_ended(self) -> bool:
        """Return whether no call can be made any more."""
        return self._task.done() or bool(self._reason)

    async def started(self) -> _Session:
        """Wait for the server and return this session. Raises `ServerFailed`."""
        await self._has_started.wait()
        if self._client is None:
            raise ServerFailed(f"{self._server} does not start: {self._reason}")
        return self

    async def schemas(self) -> list[dict[str, Any]]:
        """Return the schemas of all tools. Raises `ServerFailed`."""
        schemas: list[dict[str, Any]] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page = await self._answer(self._client.list_tools(cursor=cursor))
            for tool in page.tools:
                described = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
                schemas.append({"type": "function", "function": described})
            if (cursor := page.next_cursor) is None:
                return schemas
        raise ServerFailed(f"{self._server} has more than {MAX_PAGES} pages of tools")

    async def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[Any, bool]:
        """Return the result of a tool as text, or as parts with images, and whether it is an error.

        A shared session may have ended by the call of another conversation. Its server keeps nothing between calls, so
        a call of this one is made again: in the session that follows, or alone if this call may be the one.
        """
        if not self._is_shared:
            return await self._called(name, arguments)
        if self.has_ended:
            return await (await self._server.open()).call(name, arguments)
        begun = asyncio.get_running_loop().time()
        try:
            return await self._called(name, arguments)
        except ServerFailed as error:
            if not self.has_ended:
                raise
            failed = error
        alone, left_s = _Session(self._server), self._server.timeout_s - asyncio.get_running_loop().time() + begun
        try:
            async with asyncio.timeout(left_s):
                return await (await alone.started())._called(name, arguments)
        except TimeoutError:
            alone._task.cancel()
            raise failed from None
        finally:
            await alone.close()

    async def _called(self, name: str, arguments: Mapping[str, Any]) -> tuple[Any, bool]:
        from mcp import MCPError
        from mcp.types import REQUEST_TIMEOUT

        try:
            result = await self._answer(self._client.call_tool(name, dict(arguments)))
        except MCPError as error:
            if error.code == REQUEST_TIMEOUT:
                return f"Error: no result within {self._server.timeout_s:g} s", True
            return f"Error: {error}", True
        parts = [_part(content) for content in result.content]
        if not parts and result.structured_content is not None:
            parts = [json.dumps(result.structured_content, ensure_ascii=False)]
        texts = [part for part in parts if isinstance(part, str)]
        return ("\n".join(texts) if len(texts) == len(parts) else parts), bool(result.is_error)

    async def close(self) -> None:
        """End the session and its process; a session that others share continues."""
        if self._is_shared and not self.has_ended:
            return
        self._is_closing.set()
        await asyncio.wait([self._task])

    async def _answer(self, request: Any) -> Any:
        """Return the answer to a request.

        Raises:
            ServerFailed: If the connection has ended, or the answer is not one.
            MCPError: If the server refuses the request or takes too long.
        """
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        try:
            return await request
        except MCPError as error:
            if error.code != CONNECTION_CLOSED and not self._reason:
                raise
            raise ServerFailed(f"{self._server} failed: {self._reason or 'it closed the connection'}") from None
        except Exception as error:  # noqa: BLE001 - the client raises what it finds wrong with an answer
            raise ServerFailed(f"{self._server} failed: {type(error).__name__}: {str(error)[:MAX_REASON]}") from None

    async def _live(self) -> None:
        folder = tempfile.mkdtemp(prefix="rl-mcp-")
        try:
            try:
                from mcp import Client
            except ImportError:
                raise ServerFailed("the package mcp is not installed; pip install 'rl-envs[mcp]'") from None
            transport = self._http() if self._server.url else self._process(folder)
            client = Client(transport, read_timeout_seconds=self._server.timeout_s, cache=None)
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(self._server.timeout_s):
                    self._client = await stack.enter_async_context(client)
                self._has_started.set()
                await self._is_closing.wait()
        except TimeoutError:
            self._reason = self._reason or f"it did not answer within {self._server.timeout_s:g} s"
        except Exception as error:  # noqa: BLE001 - whatever a server does fails the rollouts that need it, and nothing else
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            name = "" if isinstance(error, ServerFailed) else f"{type(error).__name__}: "
            self._reason = self._reason or f"{name}{str(error)[:MAX_REASON]}"
        finally:
            self._has_started.set()
            shutil.rmtree(folder, ignore_errors=True)

    @contextlib.asynccontextmanager
    async def _process(self, folder: str) -> AsyncIterator[tuple[Any, Any]]:
        """Connect to the process of a server, whose messages are lines of at most `MAX_MESSAGE` bytes."""
        import anyio
        from mcp.shared.message import SessionMessage
        from mcp.types import jsonrpc_message_adapter

        process = self._server.start(folder)
        last_words = b""
        loop = asyncio.get_running_loop()
        stdout, stderr = asyncio.StreamReader(limit=MAX_MESSAGE), asyncio.StreamReader()
        pipes = [
            (await loop.connect_read_pipe(partial(asyncio.StreamReaderProtocol, reader), pipe))[0]
            for reader, pipe in ((stdout, process.stdout), (stderr, process.stderr))
        ]
        stdin = asyncio.StreamWriter(
            *await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, process.stdin), None, loop
        )
        received, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        outgoing, sending = anyio.create_memory_object_stream[SessionMessage](0)

        async def listen() -> None:
            nonlocal last_words
            while chunk := await stderr.read(2**16):
                last_words = (last_words + chunk)[-MAX_REASON:]

        async def read() -> None:
            async with received:
                while True:
                    try:
                        line = await stdout.readline()
                    except ValueError:
                        self._reason = f"it wrote a message of more than {MAX_MESSAGE} bytes"
                        return
                    if not line:
                        await asyncio.wait([listening], timeout=END_S)
                        said = last_words.decode(errors="replace").strip()
                        self._reason = f"it ended{said and f' ({said})'}"
                        return
                    try:
                        message: SessionMessage | Exception = SessionMessage(
                            jsonrpc_message_adapter.validate_json(line, by_name=False)
                        )
                    except ValueError as error:
                        message = error
                    with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                        await received.send(message)

        async def write() -> None:
            async with sending:
                async for message in sending:
                    line = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                    stdin.write(line.encode() + b"\n")
                    await stdin.drain()

        listening = asyncio.create_task(listen())
        tasks = [listening, asyncio.create_task(read()), asyncio.create_task(write())]
        try:
            yield incoming, outgoing
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            closing: list[Any] = [received, incoming, outgoing, sending, stdin, *pipes]
            for stream in closing:
                stream.close()
            process.end()

    @contextlib.asynccontextmanager
    async def _http(self) -> AsyncIterator[tuple[Any, Any]]:
        """Connect to a server over HTTP, whose responses have at most `MAX_MESSAGE` bytes."""
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        async def bound(response: httpx2.Response) -> None:
            # The client bounds the events of a stream by itself.
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                response.stream = _bounded(response.stream)

        def _bounded(stream: Any) -> httpx2.AsyncByteStream:
            session = self

            class Bounded(httpx2.AsyncByteStream):
                async def __aiter__(self) -> AsyncIterator[bytes]:
                    size = 0
                    async for chunk in stream:
                        size += len(chunk)
                        if size > MAX_MESSAGE:
                            session._reason = f"it wrote a message of more than {MAX_MESSAGE} bytes"
                            raise ServerFailed(session._reason)
                        yield chunk

                async def aclose(self) -> None:
                    # The server may have ended the connection already.
                    with contextlib.suppress(httpx2.HTTPError):
                        await stream.aclose()

            return Bounded()

        assert self._server.url is not None
        timeout = httpx2.Timeout(self._server.timeout_s)
        hooks = {"response": [bound]}
        async with (
            httpx2.AsyncClient(headers=self._server.headers, timeout=timeout, event_hooks=hooks) as client,
            streamable_http_client(self._server.url, http_client=client, max_sse_event_size=MAX_MESSAGE) as streams,
        ):
            yield streams


def _part(content: Any) -> Any:
    """Return a part of a tool's result: text, or an image as in messages."""
    match content.type:
        case "text":
            return content.text
        case "image":
            return {"type": "image", "image": f"data:{content.mime_type};base64,{content.data}"}
        case "resource" if getattr(content.resource, "text", None) is not None:
            return content.resource.text
        case "resource_link":
            return f"{content.name}: {content.uri}"
    return f"({content.type}, which cannot be shown)"


class _LocalProcess:
    """A server as a process of this machine. It is in the group of this process, and ends with it, however that ends.

    Args:
        words: Its command.
        variables: Its environment variables.
        folder: Its current folder.
    """

    def __init__(self, words: Sequence[str], variables: Mapping[str, str], folder: str) -> None:
        pipe = subprocess.PIPE
        self._popen = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, env=variables, cwd=folder)
        self.stdin, self.stdout, self.stderr = self._popen.stdin, self._popen.stdout, self._popen.stderr

    def end(self) -> None:
        """Kill the server, whose input is closed, and what it has started, if it does not end by itself.

        Nobody waits: the call in which a conversation ends has others to answer, and the next one may be far away.
        """
        import psutil

        started: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            started = psutil.Process(self._popen.pid).children(recursive=True)

        def wait_and_kill() -> None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(END_S)
            self._popen.kill()
            for each in started:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            self._popen.wait()

        threading.Thread(target=wait_and_kill, daemon=True).start()


class _SandboxedProcess:
    """A server as a program of a sandbox, which ends when its connection is closed.

    Args:
        sandbox: The sandbox.
        program: The program.
    """

    def __init__(self, sandbox: Sandbox, program: Program) -> None:
        stack = contextlib.ExitStack()
        self._connection = stack.enter_context(sandbox.connect())
        self._close = stack.close
        write_frame(self._connection, *request_of(program, sandbox.limits))
        (to_program, stdin), (stdout, from_program), (stderr, words) = os.pipe(), os.pipe(), os.pipe()
        self.stdin, self.stdout, self.stderr = (
            os.fdopen(end, mode, 0) for end, mode in ((stdin, "wb"), (stdout, "rb"), (stderr, "rb"))
        )

        def pass_input() -> None:
            with open(to_program, "rb", 0) as source, contextlib.suppress(OSError):
                while data := source.read(2**16):
                    write_frame(self._connection, {}, [data])

        def pass_output() -> None:
            with open(from_program, "wb", 0) as output, open(words, "wb", 0) as last, contextlib.suppress(OSError):
                while True:
                    header, parts = read_frame(self._connection)
                    if not header.get("output"):
                        try:
                            outcome = outcome_of(header, parts)
                            said = outcome.stderr.strip() if outcome.ending == "exit" else b""
                            last.write(said or outcome.describe(sandbox.limits).encode())
                        except SandboxFailed as error:
                            last.write(str(error).encode())
                        return
                    output.write(parts[0])

        for run in (pass_input, pass_output):
            threading.Thread(target=run, daemon=True).start()

    def end(self) -> None:
        """End the program."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._close()
