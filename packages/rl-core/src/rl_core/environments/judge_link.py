"""Judges as an environment's process reaches them: through the pool that called it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from rl_core.environments.messages import Ask, write_ask
from rl_core.rollouts.judging import JudgeFailed, Question
from rl_core.rollouts.rollout import Message

if TYPE_CHECKING:
    import asyncio


GIVEN: ContextVar[list[dict[str, Any]] | None] = ContextVar("GIVEN", default=None)
"""Records of the verdicts on the conversation that a function scores; None in a call that scores several."""


class JudgeLink:
    """Sends questions to the pool while a call of `step` is in progress, and reads the answers as they come.

    Args:
        connection: Stream to the pool.
        receive: Reads the next message of the pool; None at the end of the stream.
        send: Sends bytes to the pool.
    """

    def __init__(self, connection: socket.socket, receive: Callable[[], Any], send: Callable[[bytes], None]) -> None:
        self._connection = connection
        self._receive = receive
        self._send = send
        self._call = self._number = 0
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    def begin(self) -> None:
        """Note that a call of `step` begins; what earlier calls have left waiting is cancelled."""
        self._call += 1
        self._forget()

    async def ask(self, judge: str, question: Question) -> tuple[Any, bool]:
        """Return the verdict of a judge, and whether nobody had to be asked.

        Raises:
            JudgeFailed: If there is none.
            TypeError, ValueError: If the question holds something that is not a plain value, or is too long.
        """
        import asyncio

        loop = asyncio.get_running_loop()
        others = {each.get_loop() for each in self._waiting.values()} - {loop}
        if any(each.is_running() for each in others):
            raise RuntimeError("judges are asked from one event loop at a time; await them in the reward function")
        if others:  # A function has ended without waiting for all of its questions, such as when one of them failed.
            self._forget()
        self._number += 1
        data = write_ask(Ask(self._call, self._number, judge, question))
        if not self._waiting:
            loop.add_reader(self._connection, self._read)
        number, answer = self._number, loop.create_future()
        self._waiting[number] = answer
        try:
            self._send(data)
            value, is_cached = await answer
            return value, is_cached
        finally:
            if self._waiting.pop(number, None) is not None and not self._waiting:
                loop.remove_reader(self._connection)

    def _forget(self) -> None:
        for answer in self._waiting.values():
            loop = answer.get_loop()
            if not loop.is_closed():
                loop.remove_reader(self._connection)
                answer.cancel()
        self._waiting.clear()

    def _read(self) -> None:
        match self._receive():
            case "verdict", number, value, failure, is_cached:
                answer = self._waiting.get(number)
                if answer is None or answer.done():
                    return
                if failure:
                    answer.set_exception(JudgeFailed(failure))
                else:
                    answer.set_result((value, is_cached))
            case _:
                # The pool has closed the stream, and nobody reads what this process would do next.
                os._exit(0)


class AskedJudge:
    """A judge of a reward function; see `rl_core.rollouts.judging.Judge`.

    Args:
        name: Name of the judge.
        link: Connection to it.
        gives_scores: True if it is a reward model.
    """

    def __init__(self, name: str, link: JudgeLink, *, gives_scores: bool = False) -> None:
        self._name = name
        self._link = link
        self._gives_scores = gives_scores

    async def ask(self, prompt: str | Sequence[Message], form: Mapping[str, Any] | None = None) -> Any:
        if self._gives_scores:
            raise JudgeFailed(f"{self._name} is a reward model, which has scores: await {self._name}.score(messages)")
        messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else tuple(prompt)
        return await self._verdict(Question(messages, form))

    async def score(self, messages: Sequence[Message]) -> float:
        if not self._gives_scores:
            raise JudgeFailed(f"{self._name} is a language model, which has no scores: await {self._name}.ask(prompt)")
        return float(await self._verdict(Question(tuple(messages))))

    async def _verdict(self, question: Question) -> Any:
        record: dict[str, Any] = {"judge": self._name}
        # Records are in the order of the questions, and not of their answers.
        given = GIVEN.get()
        if given is not None:
            given.append(record)
        try:
            value, is_cached = await self._link.ask(self._name, question)
        except BaseException:
            if given is not None:
                given[:] = [each for each in given if each is not record]
            raise
        answer = "" if self._gives_scores else json.dumps(value)
        record.update(question=question.digest, answer=answer, value=value, cached=is_cached)
        return value
