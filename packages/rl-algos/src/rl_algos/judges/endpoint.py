"""A judge behind a URL that understands OpenAI's chat completions, which may be slow, broken or hostile."""

from __future__ import annotations

import asyncio
import email.utils
import json
import random
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

from rl_algos.judges.answers import REDRAW_TEMPERATURE, JudgeAnswer, max_tokens_of, one_line
from rl_algos.judges.config import EndpointJudgeConfig
from rl_algos.judges.limits import JudgeClock, RequestLimits, SentRequest, SpentTokens
from rl_core.rollouts.judging import Question
from rl_core.rollouts.model_json import MalformedJson, read_model_json

MAX_ANSWER_BYTES = 2**20
"""Maximum size of the body of an answer."""

MAX_TOKEN_CHARACTERS = 128
"""Upper bound of the characters of a token. An answer with more is longer than it was asked to be."""

MAX_PAUSE_S = 600.0
"""Longest time that an endpoint may ask to wait for at once. A question that would wait longer has no answer."""

MAX_WAITED_S = 3600.0
"""Longest time that one question waits in all because the endpoint asks for it."""

_FIRST_WAIT_S, _MAX_WAIT_S = 0.5, 30.0
_TRIED_AGAIN = frozenset({408, 425, 429, *range(500, 600)})
_MIN_HIDDEN = 8
"""Minimum length of a key that is hidden wherever it occurs; a shorter one is no secret, and may be a word."""


class _TryAgain(Exception):
    """A request without an answer that another request may have.

    Args:
        reason: Reason in one line.
        is_limit: True if the endpoint has too many requests, rather than a fault.
        pause_s: Seconds that the endpoint asks to wait; None if it does not.
    """

    def __init__(self, reason: str, *, is_limit: bool = False, pause_s: float | None = None) -> None:
        super().__init__(reason)
        self.is_limit, self.pause_s = is_limit, pause_s


class EndpointJudge:
    """Asks an endpoint. Whatever that does, a question takes bounded time and memory, and has an answer or a reason.

    Args:
        name: Name of the judge.
        config: Its settings.
        spent: Tokens that the run has spent.
        clock: Time of limits and waits.
    """

    def __init__(self, name: str, config: EndpointJudgeConfig, spent: SpentTokens, clock: JudgeClock) -> None:
        self._config, self._clock = config, clock
        self._limits = RequestLimits(name, config.limits, spent, clock)
        self._session: aiohttp.ClientSession | None = None
        self._url = f"{config.base_url.rstrip('/')}/chat/completions"
        parts = urlsplit(self._url)
        self._proxy = None if proxy_bypass(parts.netloc) else getproxies().get(parts.scheme)
        self.num_requests = 0
        self.seconds = 0.0

    async def ask(self, question: Question) -> JudgeAnswer:
        """Return the answer to a question. Failed requests are repeated, within the limits.

        Raises:
            JudgeBudgetSpent: If the budget does not have the tokens that it may take.
        """
        tokens = max_tokens_of(question, self._config.max_new_tokens)
        limit = self._config.limits.tokens_per_minute
        if limit is not None and tokens > limit:
            reason = f"the question and its answer may take {tokens} tokens, but limits.tokens_per_minute is {limit}"
            return JudgeAnswer(failure=reason, is_final=True)
        body = json.dumps(self._request(question)).encode()
        num_sent = num_failed = 0
        waited_s = 0.0
        while True:
            try:
                async with self._limits.admitted(tokens) as request:
                    num_sent += 1
                    return await self._answer(body, request)
            except _TryAgain as error:
                failed = error
            growing_s = min(_FIRST_WAIT_S * 2 ** min(num_sent - 1, 16), _MAX_WAIT_S) * random.uniform(0.5, 1.0)
            if failed.is_limit or failed.pause_s is not None:
                # The limit is the endpoint's, not the question's: all questions wait, and it is not a failed try.
                pause_s = growing_s if failed.pause_s is None else max(failed.pause_s, _FIRST_WAIT_S)
                waited_s += pause_s
                if pause_s > MAX_PAUSE_S or waited_s > MAX_WAITED_S:
                    reason = (
                        f"{failed}, and asks to wait for {pause_s:.0f} s, after {waited_s - pause_s:.0f} s of waiting"
                    )
                    return JudgeAnswer(failure=reason, is_final=True)
                self._limits.pause(pause_s)
                continue
            num_failed += 1
            if num_failed >= self._config.max_tries:
                return JudgeAnswer(failure=f"{failed}, after {num_sent} requests", is_final=True)
            await self._clock.sleep(growing_s)

    def _request(self, question: Question) -> dict[str, Any]:
        """Return the body of the request for a question."""
        config, temperature = self._config, self._config.temperature
        if question.draw and temperature is not None:
            temperature = max(temperature, REDRAW_TEMPERATURE)
        fields: dict[str, Any] = {
            "model": config.model,
            "messages": [dict(message) for message in question.messages],
            config.tokens_field: config.max_new_tokens,
            "temperature": temperature,
            # Another draw is another seed, so that an answer that cannot be read is not just repeated.
            "seed": int(question.digest[:7], 16),
        }
        if question.form is not None and config.structured_output == "json_schema":
            schema = {"name": "verdict", "strict": True, "schema": question.form}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif question.form is not None and config.structured_output == "json_object":
            fields["response_format"] = {"type": "json_object"}
        return {key: value for key, value in {**fields, **config.request}.items() if value is not None}

    async def _answer(self, body: bytes, request: SentRequest) -> JudgeAnswer:
        """Send a request and return its answer.

        Raises:
            _TryAgain: If another request may have an answer.
        """
        begun, self.num_requests = time.monotonic(), self.num_requests + 1
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self._config.api_key:
            headers["Authorization"] = f"Bearer {self._config.api_key}"
        try:
            async with asyncio.timeout(self._config.timeout_s / self._clock.speed):
                # The key must not follow a redirect, and a small body could unpack to any size.
                async with self._opened().post(
                    self._url, data=body, headers=headers, allow_redirects=False, proxy=self._proxy
                ) as response:
                    return self._read(response.status, response.headers, await self._body(response), request)
        except _TryAgain:
            raise
        except aiohttp.ClientConnectorCertificateError as error:
            request.tokens = 0
            reason = f"the certificate of {self._host} is not valid ({self._shown(str(error.certificate_error))})"
            return JudgeAnswer(failure=reason, is_final=True)
        except aiohttp.ClientConnectorError as error:
            request.tokens = 0  # Nothing was sent.
            # The causes of errors of aiohttp have the headers of the request, and with them the key.
            raise _TryAgain(f"{self._host} cannot be reached ({self._shown(str(error.os_error))})") from None
        except TimeoutError:
            raise _TryAgain(f"no answer within {self._config.timeout_s:g} s") from None
        except Exception as error:  # noqa: BLE001  # whatever the endpoint sends must not end the run
            raise _TryAgain(f"the connection or the answer is broken ({type(error).__name__})") from None
        finally:
            self.seconds += time.monotonic() - begun

    async def _body(self, response: aiohttp.ClientResponse) -> bytes | None:
        """Return the body of an answer; None if it is larger than any answer."""
        content = bytearray()
        async for chunk in response.content.iter_any():
            content += chunk
            if len(content) > MAX_ANSWER_BYTES:
                response.close()
                return None
        return bytes(content)

    def _read(self, status: int, headers: Mapping[str, str], body: bytes | None, request: SentRequest) -> JudgeAnswer:
        """Return the answer of a response, and set the tokens of its request.

        Raises:
            _TryAgain: If another request may have an answer.
        """
        if status != 200:
            request.tokens = 0
            said = one_line(self._hidden((body or b"").decode("utf-8", "replace")))
            reason = f"HTTP {status}" + (f" ({said})" if said else "")
            if 300 <= status < 400:
                reason = f"HTTP {status}: redirects are not followed, because the key must not go elsewhere"
                return JudgeAnswer(failure=f"{reason}. Set base_url to the address", is_final=True)
            if status in _TRIED_AGAIN:
                raise _TryAgain(reason, is_limit=status == 429, pause_s=_pause_s(headers.get("Retry-After")))
            return JudgeAnswer(failure=reason, is_final=True)
        if headers.get("Content-Encoding", "identity") != "identity":
            return JudgeAnswer(num_tokens=request.tokens, failure="the answer is compressed, which was not asked for")
        if body is None:
            return JudgeAnswer(num_tokens=request.tokens, failure=f"the answer has more than {MAX_ANSWER_BYTES} bytes")
        try:
            found = read_model_json(self._hidden(body.decode()), max_depth=64)
        except (UnicodeDecodeError, MalformedJson) as error:
            reason = "is not UTF-8" if isinstance(error, UnicodeDecodeError) else self._shown(str(error))
            return JudgeAnswer(num_tokens=request.tokens, failure=f"the answer cannot be read: {reason}")
        # Tokens that the question cannot have taken are not believed: they would end the run.
        used = _at(found, "usage", "total_tokens")
        if isinstance(used, int) and not isinstance(used, bool) and 0 < used <= request.tokens:
            request.tokens = used
        text, finish = _at(found, "choices", 0, "message", "content"), _at(found, "choices", 0, "finish_reason")
        if not isinstance(text, str):
            refused = _at(found, "choices", 0, "message", "refusal")
            reason = f"it refuses ({self._shown(refused)})" if isinstance(refused, str) else "it has no text"
            return JudgeAnswer(num_tokens=request.tokens, failure=f"the answer cannot be read: {reason}")
        if finish == "length":
            limit = f"max_new_tokens={self._config.max_new_tokens}"
            return JudgeAnswer(num_tokens=request.tokens, failure=f"the answer ended at {limit}")
        if len(text) > self._config.max_new_tokens * MAX_TOKEN_CHARACTERS:
            limit = f"more than max_new_tokens={self._config.max_new_tokens} can be"
            return JudgeAnswer(num_tokens=request.tokens, failure=f"the answer has {len(text)} characters, {limit}")
        return JudgeAnswer(self._hidden(text), request.tokens)

    @property
    def _host(self) -> str:
        return urlsplit(self._url).netloc

    def _hidden(self, text: str) -> str:
        """Return a text of the endpoint without the key, which it may repeat."""
        key = self._config.api_key or ""
        return text.replace(key, "[api_key]") if len(key) >= _MIN_HIDDEN else text

    def _shown(self, text: str) -> str:
        return one_line(self._hidden(text))

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            jar, no_limit = aiohttp.DummyCookieJar(), aiohttp.ClientTimeout(total=None, sock_connect=None)
            self._session = aiohttp.ClientSession(
                connector=connector, cookie_jar=jar, timeout=no_limit, auto_decompress=False
            )
        return self._session

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()


def _pause_s(retry_after: str | None) -> float | None:
    """Return the seconds of a `Retry-After` header, in seconds or as a date; None if there is none that can be read."""
    if retry_after is None:
        return None
    text = retry_after.strip()
    if text.isascii() and text.isdigit():
        return float(text[:12])
    try:
        return max(email.utils.parsedate_to_datetime(text).timestamp() - time.time(), 0.0)
    except (ValueError, OverflowError, TypeError):
        return None


def _at(value: Any, *path: str | int) -> Any:
    """Return the value at a path in JSON; None if there is none."""
    for key in path:
        if isinstance(key, int):
            value = value[key] if isinstance(value, list) and len(value) > key else None
        else:
            value = value.get(key) if isinstance(value, dict) else None
    return value
