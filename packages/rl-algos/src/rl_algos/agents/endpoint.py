"""The HTTP server that agents call instead of a language model's."""

from __future__ import annotations

import hmac
import json
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from aiohttp import web

from rl_algos.agents.address import Address
from rl_algos.agents.calls import CallRefused, Dialect, Event
from rl_algos.agents.dialects.chat_completions import ChatCompletions
from rl_algos.agents.dialects.completions import Completions
from rl_algos.agents.dialects.messages import Messages
from rl_algos.agents.dialects.responses import Responses
from rl_algos.agents.session import AgentSession
from rl_algos.agents.task_board import TaskBoard

_log = logging.getLogger(__name__)

MAX_BODY = 16 * 2**20
"""Maximum number of bytes of a request."""

MODEL = "policy"
"""Name of the model in lists of models; requests may ask for any name."""

_ROLLOUT = "/rollouts/{rollout}"
"""Path of a rollout. The path of one of its agents appends `/agents/NAME`."""

_WAIT_S = 60.0
"""Maximum number of seconds for which a request for a rollout waits."""

_RETRIES = "x-stainless-retry-count"
"""Header in which the clients of OpenAI and Anthropic count how often they have sent a request before."""

_KEY = "Idempotency-Key"
"""Header that identifies a request over all tries of it, for clients that set one."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class _Open:
    session: AgentSession
    address: Address


class AgentEndpoint:
    """Serves all rollouts of one worker, each at a URL of its own.

    Args:
        host: Address to listen at. One that is not the loopback address is reached by agents on other machines.
        board: Rollouts for agents that run elsewhere; None if they are not served.
    """

    def __init__(self, host: str = "127.0.0.1", board: TaskBoard | None = None) -> None:
        self._host = host
        self._board = board
        self._board_key = f"rl-agents-{secrets.token_urlsafe(24)}" if board is not None else ""
        self._open: dict[str, _Open] = {}
        self._runner: web.AppRunner | None = None
        self._port = 0

    async def start(self) -> None:
        """Listen at a port that is free."""
        app = web.Application(client_max_size=MAX_BODY)
        dialects: Mapping[str, Dialect] = {
            "chat/completions": ChatCompletions(),
            "completions": Completions(),
            "responses": Responses(),
            "messages": Messages(),
        }
        openai = dialects["chat/completions"]
        for at in (f"{_ROLLOUT}/v1", f"{_ROLLOUT}/agents/{{agent:[A-Za-z_][A-Za-z0-9_]*}}/v1"):
            for path, dialect in dialects.items():
                app.router.add_post(f"{at}/{path}", self._handler(dialect, self._calls))
            app.router.add_post(f"{at}/messages/count_tokens", self._handler(dialects["messages"], self._count_tokens))
            app.router.add_get(f"{at}/models", self._handler(openai, self._models))
            app.router.add_post(f"{at}/reward", self._handler(openai, self._reward))
        if self._board is not None:
            app.router.add_post("/rollouts", self._handler(openai, self._take))
            app.router.add_post(f"{_ROLLOUT}/v1/end", self._handler(openai, self._end))
            app.router.add_post(f"{_ROLLOUT}/v1/renew", self._handler(openai, self._renew))
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, 0)
        await site.start()
        self._port = self._runner.addresses[0][1]

    @property
    def url(self) -> str:
        """URL of the server."""
        return f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{self._port}"

    @property
    def board_key(self) -> str:
        """Key with which agents that run elsewhere take rollouts; empty if none may."""
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
        address = Address(
            rollout=rollout,
            root_url=f"{self.url}/rollouts/{rollout}",
            api_key=f"rl-{secrets.token_urlsafe(24)}",
            reward_key=f"rl-reward-{secrets.token_urlsafe(24)}" if takes_rewards else "",
        )
        self._open[rollout] = _Open(session, address)
        try:
            yield address
        finally:
            del self._open[rollout]
            session.close()

    def _handler(
        self, dialect: Dialect, serve: Callable[[web.Request, Dialect], Awaitable[web.StreamResponse]]
    ) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                self._check_host(request)
                return await serve(request, dialect)
            except CallRefused as error:
                refused = error
            except RecursionError:
                refused = CallRefused("the request is nested too deeply", code="invalid_json")
            except web.HTTPRequestEntityTooLarge:
                refused = CallRefused(f"the request is larger than {MAX_BODY} bytes", status=413, code="too_large")
            return web.json_response(dialect.error(refused), status=refused.status)

        return handle

    def _check_host(self, request: web.Request) -> None:
        """Refuse requests to another name than this server's, such as those of a page in a browser whose name was bound
        to this address."""
        name = request.host.rpartition(":")[0] if ":" in request.host else request.host
        try:
            ip_address(name.strip("[]"))
        except ValueError:
            if name not in ("localhost", self._host):
                raise CallRefused(f"the host {name!r} is not served", status=403, code="forbidden_host") from None

    def _session(self, request: web.Request, *, posts_rewards: bool = False) -> AgentSession:
        found = self._open.get(request.match_info["rollout"])
        if found is None:
            raise CallRefused("this rollout does not exist or has ended", status=410, code="rollout_ended")
        key = found.address.reward_key if posts_rewards else found.address.api_key
        if not key:
            raise CallRefused("rewards cannot be posted for this rollout", status=403, code="rewards_not_taken")
        _check_key(request, key)
        if self._board is not None:
            self._board.renew(found.address.rollout)
        return found.session.of_agent(request.match_info.get("agent", ""))

    async def _calls(self, request: web.Request, dialect: Dialect) -> web.StreamResponse:
        session = self._session(request)
        with nullcontext() if self._board is None else self._board.calling(request.match_info["rollout"]):
            return await self._answered(request, dialect, session)

    async def _answered(self, request: web.Request, dialect: Dialect, session: AgentSession) -> web.StreamResponse:
        call = dialect.read(await _body(request))
        is_retry = request.headers.get(_RETRIES, "0") not in ("", "0")
        answer = await session.answer(call, is_retry=is_retry, key=request.headers.get(_KEY, ""))
        try:
            if call.is_streamed:
                response = await _stream(request, dialect.events(call, answer))
            else:
                response = web.json_response(dialect.answer(call, answer))
                await response.prepare(request)
                await response.write_eof()
        except BaseException:
            session.delivered(answer, is_delivered=False)
            raise
        session.delivered(answer)
        return response

    async def _count_tokens(self, request: web.Request, dialect: Dialect) -> web.StreamResponse:
        session = self._session(request)
        call = dialect.read({**await _body(request), "max_tokens": 1})
        return web.json_response({"input_tokens": await session.num_tokens(call)})

    async def _models(self, request: web.Request, _: Dialect) -> web.StreamResponse:
        self._session(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rl"}
        return web.json_response({"object": "list", "data": [model]})

    async def _reward(self, request: web.Request, _: Dialect) -> web.StreamResponse:
        session = self._session(request, posts_rewards=True)
        body = await _body(request)
        call, choice = body.get("call", ""), body.get("choice", 0)
        if not isinstance(call, str) or not isinstance(choice, int):
            raise CallRefused("`call` must be the id of an answer, and `choice` an integer", param="call")
        session.add_rewards(rewards_of(body.get("reward")), call, choice)
        return web.json_response({})

    async def _end(self, request: web.Request, _: Dialect) -> web.StreamResponse:
        assert self._board is not None
        self._session(request)
        self._board.end(request.match_info["rollout"])
        return web.json_response({})

    async def _renew(self, request: web.Request, _: Dialect) -> web.StreamResponse:
        self._session(request)
        return web.json_response({})

    async def _take(self, request: web.Request, _: Dialect) -> web.StreamResponse:
        assert self._board is not None
        _check_key(request, self._board_key)
        body = await _body(request)
        wait_s = body.get("wait_s", _WAIT_S)
        if not isinstance(wait_s, int | float) or not 0 <= wait_s <= _WAIT_S:
            raise CallRefused(f"wait_s must be from 0 to {_WAIT_S:g}, got {wait_s!r}", param="wait_s")
        return web.json_response(await self._board.take(float(wait_s), request.headers.get(_KEY, "")))


def _check_key(request: web.Request, key: str) -> None:
    kind, _, bearer = request.headers.get("Authorization", "").partition(" ")
    given = bearer.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "")
    # a header may have any bytes
    if not hmac.compare_digest(given.encode(errors="surrogateescape"), key.encode()):
        raise CallRefused("the API key is not the one that this URL takes", status=401, code="invalid_api_key")


def rewards_of(given: Any) -> Mapping[str, float]:
    """Return rewards by name from a number, or from numbers by name.

    Raises:
        CallRefused: If it is neither.
    """
    named = given if isinstance(given, Mapping) else {"reward": given}
    rewards = {}
    for name, value in named.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or value != value or value in (float("inf"), float("-inf")):
            raise CallRefused(f"the reward {name!r} must be a finite number, got {value!r}", param="reward")
        rewards[str(name)] = float(value)
    return rewards


async def _body(request: web.Request) -> Mapping[str, Any]:
    sent = await request.read()
    try:
        body = json.loads(sent)
        if b"\\ud" in sent.lower():
            # halves of characters are valid JSON, and neither tokenizers nor answers can hold them
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise CallRefused(f"the request is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(body, Mapping):
        raise CallRefused("the request must be a JSON object")
    return body


async def _stream(request: web.Request, events: Any) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    await response.write(b"".join(map(_written, events)))
    await response.write_eof()
    return response


def _written(event: Event) -> bytes:
    name = f"event: {event.name}\n" if event.name else ""
    data = "[DONE]" if event.data is None else json.dumps(event.data, ensure_ascii=False)
    return f"{name}data: {data}\n\n".encode()
