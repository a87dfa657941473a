"""The HTTP server that users of a run call, each with conversations of their own."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import secrets
import sqlite3
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

from rl_algos.agents.calls import CallRefused, ModelAnswer, ModelCall
from rl_algos.agents.endpoint import DIALECTS, MODEL, AgentEndpoint, Asked, Serve, check_key, parsed, rewards_of
from rl_algos.agents.session import AgentSession
from rl_algos.connections import SparingLog
from rl_algos.rollouts.config import AgentConfig, LiveConfig
from rl_core.rollouts.rollout import Completion

_log = logging.getLogger(__name__)

CONVERSATION, TASK, TRAIN = "X-RL-Conversation", "X-RL-Task", "X-RL-Train"
"""Headers with the client's name of a conversation, with the name of its task, and with `no` to leave it out."""

MAX_NAME = 200
"""Maximum number of characters of a name that a client gives."""

_PATH = re.compile(r"/v1/(.+)")


@dataclass(frozen=True)
class LiveKeys:
    """Keys of a run's users.

    Args:
        key: Key for calls whose conversations are trained on.
        private_key: Key for calls that are answered and not kept.
        reward_key: Key for posting rewards.
    """

    key: str
    private_key: str
    reward_key: str

    @classmethod
    def of_run(cls, path: Path) -> LiveKeys:
        """Return the keys in a file, which is written if there is none. Only its owner may read it."""
        names = ("key", "private_key", "reward_key")
        made = {name: f"rl-{name.removesuffix('key')}{secrets.token_urlsafe(24)}".replace("_-", "-") for name in names}
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        with os.fdopen(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="utf-8") as file:
            json.dump(made, file)
        try:
            os.link(draft, path)  # Of several rollout workers, the first one's keys are everybody's.
        except FileExistsError:
            pass
        finally:
            draft.unlink()
        return cls(**json.loads(path.read_text(encoding="utf-8")))


@dataclass(eq=False)
class OpenConversation:
    """A conversation in memory.

    Args:
        id: Its id.
        session: Session that answers its calls.
        completions: Returns the completions of its calls, by the digests of their requests.
        num_calls: Number of its calls that the store has.
        stored: Digests of the completions that the store has.
        is_kept: False if nothing of it is stored.
    """

    id: str
    session: AgentSession
    completions: Callable[[], Mapping[str, Completion]]
    num_calls: int = 0
    stored: set[str] = field(default_factory=set)
    is_kept: bool = True


class LiveDesk(Protocol):
    """The conversations behind the endpoint."""

    async def conversation_of(self, call: ModelCall, name: str, task: str, *, is_kept: bool) -> OpenConversation:
        """Return the conversation that a call belongs to, or a new one; raises a `CallRefused` if it must not open."""

    def aside(self) -> OpenConversation:
        """Return a conversation that is not kept and continues no other."""

    async def keep(self, opened: OpenConversation, path: str, body: bytes, answer: ModelAnswer) -> None:
        """Keep a call that was answered; `path` is the path of the request below `/v1/`."""

    async def reward(self, answer: str, name: str, rewards: Mapping[str, float]) -> bool:
        """Reward a conversation by the id of one of its answers or by its name; return True if it has these rewards
        already. Raises a `CallRefused` if it gets none."""


class LiveEndpoint(AgentEndpoint):
    """Serves the users of a run at one URL.

    Args:
        desk: The conversations.
        keys: Keys of the run.
        config: Settings of the agent.
        max_tokens: Maximum number of tokens of a conversation.
        clock: Seconds.
        takes_images: True if the policy reads images.
    """

    def __init__(
        self,
        desk: LiveDesk,
        keys: LiveKeys,
        config: AgentConfig,
        max_tokens: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        takes_images: bool = False,
    ) -> None:
        assert config.live is not None, "users are served with agent.live only"
        super().__init__(config.host, max_tokens=max_tokens, port=config.live.port, takes_images=takes_images)
        self._desk, self._keys, self._limits = desk, keys, config.live
        self._bucket = TokenBucket(self._limits.requests_per_minute, clock)
        self._num_requests = 0
        self._unkept = SparingLog(_log, "%d calls of users were answered and not kept, the last one because of %s")
        chat, messages = DIALECTS["chat/completions"], DIALECTS["messages"]
        self._paths = {
            **{path: ("POST", dialect, self._user_calls) for path, dialect in DIALECTS.items()},
            "messages/count_tokens": ("POST", messages, self._user_counts),
            "models": ("GET", chat, self._user_models),
            "reward": ("POST", chat, self._user_rewards),
        }

    def _routed(self, request: web.BaseRequest) -> tuple[Asked, Serve]:
        found = _PATH.fullmatch(request.path)
        asked, serve = super()._routed(request)
        if found is None or found[1] not in self._paths:
            return asked, serve
        method, dialect, own = self._paths[found[1]]
        asked = Asked(request, dialect)
        return (asked, own) if request.method == method else (asked, serve)

    @contextmanager
    def _admitted_user(self, asked: Asked) -> Iterator[bool]:
        """Admit a request within the limits; the value is False if its conversation is left out."""
        headers = asked.request.headers
        is_private = True
        try:
            check_key(asked.request, self._keys.private_key)
        except CallRefused:
            check_key(asked.request, self._keys.key)
            is_private = False
        train = headers.get(TRAIN, "yes").strip().lower()
        if train not in ("yes", "no"):
            raise CallRefused(f"{TRAIN} must be yes or no, got {train[:40]!r}", param=TRAIN)
        wait_s = self._bucket.wait_s()
        if wait_s > 0:
            limit = f"{self._limits.requests_per_minute} requests a minute (agent.live.requests_per_minute)"
            raise _busy(f"more than {limit}", wait_s)
        if self._num_requests >= self._limits.max_requests:
            raise _busy(f"{self._num_requests} requests are in progress, the maximum (agent.live.max_requests)", 1.0)
        self._num_requests += 1
        try:
            yield not is_private and train == "yes"
        finally:
            self._num_requests -= 1

    async def _user_calls(self, asked: Asked) -> web.StreamResponse:
        headers = asked.request.headers
        with self._admitted_user(asked) as is_kept:
            path = asked.request.path.removeprefix("/v1/")
            name, task = _named(headers, CONVERSATION), _named(headers, TASK)
            is_retry = headers.get("x-stainless-retry-count", "0") not in ("", "0")
            async with self._room_for(asked.request):
                body = bytes(await self._received(asked.request))
                call = await self._user_call(asked, body)
                try:
                    opened = await self._desk.conversation_of(call, name, task, is_kept=is_kept)
                except sqlite3.Error as error:
                    # Users are answered although a disk is full; there is nothing to train on then.
                    self._unkept.note(f"{type(error).__name__}: {error}"[:200], error)
                    opened = self._desk.aside()
                async with opened.session.admitted():
                    answering = await opened.session.begin(
                        call, is_retry=is_retry, key=headers.get("Idempotency-Key", "")
                    )
            send = self._stream if call.is_streamed else self._send
            return await send(asked, opened.session, call, self._kept(opened, path, body, answering))

    async def _kept(
        self, opened: OpenConversation, path: str, body: bytes, answering: Coroutine[Any, Any, ModelAnswer]
    ) -> ModelAnswer:
        """Return an answer once it is stored; if the store fails, at once."""
        answer = await answering
        if opened.is_kept:
            try:
                await self._desk.keep(opened, path, body, answer)
            except sqlite3.Error as error:
                self._unkept.note(f"{type(error).__name__}: {error}"[:200], error)
        return answer

    async def _user_call(self, asked: Asked, body: bytes, **set_by_us: Any) -> ModelCall:
        def read() -> ModelCall:
            return asked.dialect.read({**parsed(bytearray(body), self._max_brackets), **set_by_us})

        call = await asyncio.to_thread(read)
        return replace(call, size=len(body))

    async def _user_counts(self, asked: Asked) -> web.StreamResponse:
        with self._admitted_user(asked):
            async with self._room_for(asked.request):
                call = await self._user_call(asked, bytes(await self._received(asked.request)), max_tokens=1)
                num_tokens = await self._desk.aside().session.num_tokens(call)
        return web.json_response({"input_tokens": num_tokens})

    async def _user_models(self, asked: Asked) -> web.StreamResponse:
        with self._admitted_user(asked):
            model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rl"}
            return web.json_response({"object": "list", "data": [model]})

    async def _user_rewards(self, asked: Asked) -> web.StreamResponse:
        check_key(asked.request, self._keys.reward_key)
        body = parsed(await self._received(asked.request), self._max_brackets)
        call, name = body.get("call", ""), body.get("conversation", "")
        if not isinstance(call, str) or not isinstance(name, str) or bool(call) == bool(name):
            problem = "name the conversation: `call` is the id of one of its answers, `conversation` is the name of the"
            raise CallRefused(f"{problem} header {CONVERSATION}; pass one of the two", param="call")
        is_repeated = await self._desk.reward(call, name, rewards_of(body.get("reward")))
        return web.json_response({"status": "repeated" if is_repeated else "accepted"})

    def describe(self, path: Path) -> None:
        """Write URL and keys into a file that only its owner may read."""
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        with os.fdopen(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="utf-8") as file:
            json.dump({"url": self.url, **asdict(self._keys)}, file)
        draft.replace(path)


class TokenBucket:
    """Limits a rate: a minute's number may come at once, and then as many as become free.

    Args:
        per_minute: Maximum number in a minute; None for no limit.
        clock: Seconds.
    """

    def __init__(self, per_minute: int | None, clock: Callable[[], float]) -> None:
        self._per_minute, self._clock = per_minute, clock
        self._left, self._at = float(per_minute or 0), clock()

    def wait_s(self) -> float:
        """Take one, and return 0; or return the seconds until there is one again."""
        if self._per_minute is None:
            return 0.0
        now, rate = self._clock(), self._per_minute / 60
        self._left, self._at = min(float(self._per_minute), self._left + (now - self._at) * rate), now
        if self._left < 1:
            return (1 - self._left) / rate
        self._left -= 1
        return 0.0


def _busy(problem: str, retry_after_s: float) -> CallRefused:
    remedy = "try again after the seconds of the header Retry-After"
    return CallRefused(f"{problem}; {remedy}", status=429, code="rate_limit_exceeded", retry_after_s=retry_after_s)


def too_many_open(limits: LiveConfig) -> CallRefused:
    """Return the refusal of a new conversation while as many as allowed are open."""
    return _busy(f"{limits.max_open} conversations are open, the maximum (agent.live.max_open)", 60.0)


def _named(headers: Mapping[str, str], header: str) -> str:
    name = headers.get(header, "").strip()
    if len(name) > MAX_NAME or not name.isprintable():
        raise CallRefused(f"{header} must be at most {MAX_NAME} printable characters", param=header)
    return name
