"""The HTTP server that agents call instead of a language model's."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

from aiohttp import web

from rl_algos.agents.calls import CallRefused, ModelAnswer, ModelCall, StreamEvent
from rl_algos.agents.dialects.completions import ChatCompletions, Completions
from rl_algos.agents.dialects.messages import Messages
from rl_algos.agents.dialects.responses import Responses
from rl_algos.agents.session import LARGE, AgentSession
from rl_algos.agents.task_board import Address, TaskBoard
from rl_algos.connections import BodyTooLarge, Connections, SparingLog, receive, within_limit
from rl_algos.host_header import host_name

_log = logging.getLogger(__name__)

MAX_BODY = 8 * 2**20
"""Maximum number of bytes of a request of the longest conversations: reading its JSON takes less than 0.1 s."""

BODY_BASE = 2**20
BODY_PER_TOKEN = 32
"""Maximum number of bytes of a request, and the number that each token of `policy.max_total_sequence_length` adds.
Text has about 4 bytes for each token, and 12 if its characters are escaped."""

HEARTBEAT_S = 0.75
"""Maximum number of seconds without a byte while a stream waits for its answer."""

MODEL = "policy"
"""Name of the model in lists of models; requests may ask for any name."""

_ROLLOUT = re.compile(r"/rollouts/([0-9a-f]{16})(?:/agents/([A-Za-z_][A-Za-z0-9_]{0,63}))?/v1/(.+)")
"""Path of a request of a rollout, or of one of its agents."""

_WAIT_S = 60.0
"""Maximum number of seconds for which a request for a rollout waits."""

_MAX_LARGE = 8
"""Maximum number of large bodies in memory at a time."""

_MAX_REWARDS = 100
"""Maximum number of names of rewards, and of characters of each."""

_RETRIES = "x-stainless-retry-count"
"""Header of the clients of OpenAI and Anthropic that counts how often they have sent a request before."""

_KEY = "Idempotency-Key"
"""Header that identifies a request over all tries of it, for clients that set one."""


Dialect = ChatCompletions | Completions | Messages | Responses
"""A wire format: how requests are read, how answers and errors are written, and the part of a stream that clients
ignore (`heartbeat`), which is sent while they wait for the first event."""


DIALECTS: Mapping[str, Dialect] = {
    "chat/completions": ChatCompletions(),
    "completions": Completions(),
    "responses": Responses(),
    "messages": Messages(),
}
"""Wire formats of calls of the policy, by their paths below `/v1/`."""


class Asked(NamedTuple):
    """A request.

    Args:
        request: Request, whose body has not been read.
        dialect: Wire format of the answer.
        rollout: Id of the rollout in its path; empty if it has none.
        agent: Name of the agent in its path; empty if it has none.
    """

    request: web.BaseRequest
    dialect: Dialect
    rollout: str = ""
    agent: str = ""


Serve = Callable[[Asked], Awaitable[web.StreamResponse]]


class AgentEndpoint:
    """Serves all rollouts of one worker, each at a separate URL.

    Args:
        host: Address to listen at. One that is not the loopback address is reached by agents on other machines.
        board: Rollouts for agents that run elsewhere; None if they are not served.
        max_tokens: Maximum number of tokens of a conversation, which bounds the size of a request.
        port: Port to listen at, which other processes of this user may listen at too; 0 for one that is free.
        takes_images: True if requests may have images, and be as large as those of the longest conversations.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        board: TaskBoard | None = None,
        max_tokens: int = 2**20,
        *,
        port: int = 0,
        takes_images: bool = False,
    ) -> None:
        self._host = host
        self._given_port = port
        self._board = board
        self._board_key = f"rl-agents-{secrets.token_urlsafe(24)}" if board is not None else ""
        self._max_body = MAX_BODY if takes_images else min(MAX_BODY, BODY_BASE + BODY_PER_TOKEN * max_tokens)
        self._max_brackets = 50_000 + 2 * max_tokens
        self._open: dict[str, tuple[AgentSession, Address]] = {}
        self._runner: web.ServerRunner | None = None
        self._port = 0
        self._large = asyncio.Semaphore(_MAX_LARGE)
        self._failures = SparingLog(_log, "%d requests of agents failed, the last one because of %s")
        chat, messages = DIALECTS["chat/completions"], DIALECTS["messages"]
        self._paths: dict[str, tuple[str, Dialect, Serve]] = {
            **{path: ("POST", dialect, self._calls) for path, dialect in DIALECTS.items()},
            "messages/count_tokens": ("POST", messages, self._count_tokens),
            "models": ("GET", chat, self._models),
            "reward": ("POST", chat, self._reward),
        }
        if board is not None:
            self._paths |= {"end": ("POST", chat, self._end), "renew": ("POST", chat, self._end)}

    async def start(self) -> None:
        """Listen at the port.

        Raises:
            OSError: If somebody else listens there.
        """
        self._connections = Connections(self._serve, _refusal_of_http)
        self._runner = web.ServerRunner(self._connections, shutdown_timeout=5.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._given_port, reuse_port=self._given_port > 0).start()
        self._port = self._runner.addresses[0][1]

    @property
    def url(self) -> str:
        """URL of the server."""
        return f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{self._port}"

    @property
    def board_key(self) -> str:
        """Key that agents which run elsewhere take rollouts with; empty if none may."""
        return self._board_key

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    @asynccontextmanager
    async def opened(self, session: AgentSession, *, takes_rewards: bool = False) -> AsyncIterator[Address]:
        """Serve a rollout until the end of the context; then its key is refused and its calls are cancelled.

        Args:
            session: Session that answers the calls of the rollout.
            takes_rewards: True if the holder of `Address.reward_key` may post rewards.
        """
        rollout = secrets.token_hex(8)
        reward_key = f"rl-reward-{secrets.token_urlsafe(24)}" if takes_rewards else ""
        api_key = f"rl-{secrets.token_urlsafe(24)}"
        address = Address(rollout, f"{self.url}/rollouts/{rollout}", api_key, reward_key)
        self._open[rollout] = session, address
        try:
            yield address
        finally:
            del self._open[rollout]
            session.close()

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        asked, serve = self._routed(request)
        try:
            # A page in a browser may have bound its name to this address, so other names are refused.
            own = request.transport.get_extra_info("sockname")[0] if request.transport is not None else ""
            name = host_name(request.headers.getall("Host", []))
            if name not in (self._host.lower(), own, "localhost"):
                problem = f"the host {name[:100]!r} is not served; use the URL that the agent is given"
                raise CallRefused(problem, status=403, code="forbidden_host")
            return await serve(asked)
        except ConnectionError:
            raise
        except Exception as error:  # noqa: BLE001 - the client gets an error that it can read
            # A local name for the refusal would keep it, and the request in its traceback, in a cycle.
            return _refusal(asked.dialect, self._refused(error))

    def _routed(self, request: web.BaseRequest) -> tuple[Asked, Serve]:
        """Return a request with its wire format, and the method that answers it."""
        found = _ROLLOUT.fullmatch(request.path)
        serve: Serve
        chat = self._paths["models"][1]
        if found is None and request.path == "/rollouts" and self._board is not None:
            path, rollout, agent, (method, dialect, serve) = "rollouts", "", "", ("POST", chat, self._take)
        else:
            rollout, agent, path = found.groups(default="") if found is not None else ("", "", request.path)
            default = self._paths["messages"][1] if "anthropic-version" in request.headers else chat
            method, dialect, serve = self._paths.get(path, (request.method, default, self._refuse_path))
        if request.method not in (method, "HEAD" if method == "GET" else method):
            serve = _refuse_method
        return Asked(request, dialect, rollout, agent), serve

    async def _refuse_path(self, asked: Asked) -> web.StreamResponse:
        path = asked.request.path.rpartition("/v1/")[2] if asked.rollout else asked.request.path
        served = ", ".join(self._paths)
        problem = f"{path[:100]} is not served; a rollout has {served} below its own URL, which its agent is given"
        raise CallRefused(problem, status=404, code="not_found")

    def _refused(self, error: Exception) -> CallRefused:
        """Return an error as the client reads it."""
        match error:
            case CallRefused():
                return error
            case RecursionError():
                return CallRefused("the request is nested too deeply", code="invalid_json")
            case web.RequestPayloadError():
                return CallRefused("the body of the request is incomplete", code="invalid_body")
        cause = f"{type(error).__name__}: {error}"[:200]
        self._failures.note(cause, error)
        return CallRefused(f"the policy could not answer: {cause}", status=500, code="server_error")

    def _too_large(self) -> CallRefused:
        limit = f"{self._max_body} bytes, the maximum for conversations of policy.max_total_sequence_length tokens"
        problem = f"the request is larger than {limit}; shorten the conversation, or reduce its images"
        return CallRefused(problem, status=413, code="request_too_large")

    def _session(self, asked: Asked, *, posts_rewards: bool = False) -> AgentSession:
        if asked.rollout not in self._open:
            raise CallRefused("this rollout does not exist or has ended", status=410, code="rollout_ended")
        session, address = self._open[asked.rollout]
        key = address.reward_key if posts_rewards else address.api_key
        if not key:
            raise CallRefused("rewards cannot be posted for this rollout", status=403, code="rewards_not_taken")
        check_key(asked.request, key)
        if self._board is not None:
            self._board.renew(address.rollout)
        return session.of_agent(asked.agent)

    async def _call(self, asked: Asked, session: AgentSession, **set_by_us: Any) -> ModelCall:
        """Receive a request for a completion."""
        sent = await self._received(asked.request)

        def read() -> ModelCall:
            return asked.dialect.read({**parsed(sent, self._max_brackets), **set_by_us})

        return replace(await session.off_loop(len(sent), read), size=len(sent))

    def _room_for(self, request: web.BaseRequest) -> AbstractAsyncContextManager[None]:
        """Return a context for a body in memory; few of them may be large at a time."""
        is_small = request.content_length is not None and request.content_length <= LARGE
        return nullcontext() if is_small else self._large

    async def _received(self, request: web.BaseRequest) -> bytearray:
        try:
            return await receive(request, self._max_body)
        except BodyTooLarge:
            raise self._too_large() from None
        except TimeoutError as error:
            raise CallRefused(str(error), status=408, code="timeout") from None

    async def _calls(self, asked: Asked) -> web.StreamResponse:
        session = self._session(asked)
        with nullcontext() if self._board is None else self._board.calling(asked.rollout):
            headers = asked.request.headers
            is_retry = headers.get(_RETRIES, "0") not in ("", "0")
            async with session.admitted(), self._room_for(asked.request):
                call = await self._call(asked, session)
                answering = await session.begin(call, is_retry=is_retry, key=headers.get(_KEY, ""))
            send = self._stream if call.is_streamed else self._send
            return await send(asked, session, call, answering)

    async def _send(
        self, asked: Asked, session: AgentSession, call: ModelCall, answering: Coroutine[Any, Any, ModelAnswer]
    ) -> web.StreamResponse:
        answer = await answering
        try:
            await self._connections.pace.turn()
            body = await session.off_loop(_size(call, answer), lambda: json.dumps(asked.dialect.answer(call, answer)))
            response = web.Response(text=body, content_type="application/json")
            await within_limit(response.prepare(asked.request))
            await within_limit(response.write_eof())
        except BaseException:
            session.delivered(answer, is_delivered=False)
            raise
        session.delivered(answer)
        return response

    async def _stream(
        self, asked: Asked, session: AgentSession, call: ModelCall, answering: Coroutine[Any, Any, ModelAnswer]
    ) -> web.StreamResponse:
        dialect, stream = asked.dialect, _EventStream(asked.request)
        waiting = asyncio.ensure_future(answering)
        is_delivered = False
        try:
            while not (await asyncio.wait([waiting], timeout=HEARTBEAT_S))[0]:
                await self._connections.pace.turn()
                await stream.write(dialect.heartbeat)
            answer = waiting.result()
            await self._connections.pace.turn()
            size = _size(call, answer)
            events = dialect.events(call, answer)
            await stream.write(await session.off_loop(size, lambda: b"".join(map(_written, events))))
            await stream.end()
            is_delivered = True
        except Exception as error:
            # An answer that has begun cannot get another status.
            if not stream.response.prepared or isinstance(error, ConnectionError):
                raise
            await stream.write(_written(StreamEvent(dialect.error(self._refused(error)), "error")))
            await stream.end()
        finally:
            waiting.cancel()
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                session.delivered(waiting.result(), is_delivered=is_delivered)
            del waiting  # `AgentSession.off_loop` explains this.
        return stream.response

    async def _count_tokens(self, asked: Asked) -> web.StreamResponse:
        session = self._session(asked)
        async with session.admitted(), self._room_for(asked.request):
            num_tokens = await session.num_tokens(await self._call(asked, session, max_tokens=1))
        return web.json_response({"input_tokens": num_tokens})

    async def _models(self, asked: Asked) -> web.StreamResponse:
        self._session(asked)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rl"}
        return web.json_response({"object": "list", "data": [model]})

    async def _reward(self, asked: Asked) -> web.StreamResponse:
        session = self._session(asked, posts_rewards=True)
        body = parsed(await self._received(asked.request), self._max_brackets)
        call, choice = body.get("call", ""), body.get("choice", 0)
        if not isinstance(call, str) or not isinstance(choice, int):
            raise CallRefused("`call` must be the id of an answer, and `choice` an integer", param="call")
        session.add_rewards(rewards_of(body.get("reward")), call, choice)
        return web.json_response({})

    async def _end(self, asked: Asked) -> web.StreamResponse:
        """End a rollout, or renew its lease; every request of a rollout renews it."""
        self._session(asked)
        if self._board is not None and asked.request.path.endswith("/end"):
            self._board.end(asked.rollout)
        return web.json_response({})

    async def _take(self, asked: Asked) -> web.StreamResponse:
        assert self._board is not None
        check_key(asked.request, self._board_key)
        body = parsed(await self._received(asked.request), self._max_brackets)
        wait_s = body.get("wait_s", _WAIT_S)
        if not isinstance(wait_s, int | float) or not 0 <= wait_s <= _WAIT_S:
            raise CallRefused(f"wait_s must be from 0 to {_WAIT_S:g}, got {wait_s!r:.40}", param="wait_s")
        return web.json_response(await self._board.take(float(wait_s), asked.request.headers.get(_KEY, "")))


class _EventStream:
    """The events of an answer, whose headers are sent with the first.

    Args:
        request: Request that is answered.
    """

    def __init__(self, request: web.BaseRequest) -> None:
        self._request = request
        self.response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})

    async def write(self, events: bytes) -> None:
        """Send events.

        Raises:
            ConnectionError: If the client does not read them.
        """
        if not self.response.prepared:
            await within_limit(self.response.prepare(self._request))
        await within_limit(self.response.write(events))

    async def end(self) -> None:
        """Send the end of the answer."""
        await within_limit(self.response.write_eof())


async def _refuse_method(asked: Asked) -> web.StreamResponse:
    raise CallRefused(f"{asked.request.method[:20]} is not allowed here", status=405, code="method_not_allowed")


def _refusal(dialect: Dialect, refused: CallRefused) -> web.StreamResponse:
    after = refused.retry_after_s
    headers = {} if after is None else {"Retry-After": str(math.ceil(after))}
    return web.json_response(dialect.error(refused), status=refused.status, headers=headers)


def _refusal_of_http(status: int, message: str) -> web.StreamResponse:
    return _refusal(ChatCompletions(), CallRefused(message, status=status, code="invalid_http"))


def _size(call: ModelCall, answer: ModelAnswer) -> int:
    """Estimate the characters of an answer: the logprob of a token is an object, and some dialects repeat the call."""
    return max(call.size, answer.num_sampled * (64 if call.wants_logprobs else 4))


def check_key(request: web.BaseRequest, key: str) -> None:
    """Refuse a request without this key.

    Raises:
        CallRefused: If it has another key or none.
    """
    kind, _, bearer = request.headers.get("Authorization", "").partition(" ")
    given = bearer.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "")
    # A header may have any bytes.
    if not hmac.compare_digest(given.encode(errors="surrogateescape"), key.encode()):
        raise CallRefused("the API key is not the one that this URL takes", status=401, code="invalid_api_key")


def rewards_of(given: Any) -> Mapping[str, float]:
    """Return rewards by name from a number, or from numbers by name.

    Raises:
        CallRefused: If it is neither.
    """
    named = given if isinstance(given, Mapping) else {"reward": given}
    if len(named) > _MAX_REWARDS or any(len(str(name)) > _MAX_REWARDS for name in named):
        raise CallRefused(f"at most {_MAX_REWARDS} rewards with names of {_MAX_REWARDS} characters", param="reward")
    rewards = {}
    for name, value in named.items():
        try:
            reward = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
        except OverflowError:
            reward = math.inf
        if not math.isfinite(reward):
            problem = f"the reward {str(name)!r} must be a finite number, got {value!r:.60}"
            raise CallRefused(problem, param="reward")
        rewards[str(name)] = reward
    return rewards


def parsed(sent: bytearray, max_brackets: int) -> Mapping[str, Any]:
    """Return the object of a request.

    Args:
        sent: Body of the request.
        max_brackets: Maximum number of its brackets, in strings too: each may begin a list or an object, which takes
            many times as long as a character.
    """
    if sent.count(b"[") + sent.count(b"{") > max_brackets:
        raise CallRefused(f"the request has more than {max_brackets} lists and objects", status=413, code="too_large")
    try:
        body = json.loads(sent)
        if b"\\ud" in sent.lower():
            # Halves of characters are valid JSON, and neither tokenizers nor answers can hold them.
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise CallRefused(f"the request is not valid JSON: {str(error)[:200]}", code="invalid_json") from None
    if not isinstance(body, Mapping):
        raise CallRefused("the request must be a JSON object")
    return body


def _written(event: StreamEvent) -> bytes:
    name = f"event: {event.name}\n" if event.name else ""
    data = "[DONE]" if event.data is None else json.dumps(event.data, ensure_ascii=False)
    return f"{name}data: {data}\n\n".encode()
