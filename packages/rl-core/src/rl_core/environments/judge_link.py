"""Judges as an environment's process reaches them: through the pool that called it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rl_core.environments.messages import Ask, write_ask
from rl_core.rollouts.judging import JudgeFailed, Question
from rl_core.rollouts.rollout import Message

if TYPE_CHECKING:
    import asyncio


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
        """Note that a call of `step` begins."""
        self._call += 1

    async def ask(self, judge: str, question: Question) -> Any:
        """Return the verdict of a judge.

        Raises:
            JudgeFailed: If there is none.
            TypeError, ValueError: If the question holds something that is not a plain value, or is too long.
        """
        import asyncio

        loop = asyncio.get_running_loop()
        if any(each.get_loop() is not loop for each in self._waiting.values()):
            raise RuntimeError("judges are asked from one event loop at a time; await them in the reward function")
        self._number += 1
        data = write_ask(Ask(self._call, self._number, judge, question))
        if not self._waiting:
            loop.add_reader(self._connection, self._read)
        number, answer = self._number, loop.create_future()
        self._waiting[number] = answer
        try:
            self._send(data)
            return await answer
        finally:
            del self._waiting[number]
            if not self._waiting:
                loop.remove_reader(self._connection)

    def _read(self) -> None:
        match self._receive():
            case "verdict", number, value, failure:
                answer = self._waiting.get(number)
                if answer is None or answer.done():
                    return
                if failure:
                    answer.set_exception(JudgeFailed(failure))
                else:
                    answer.set_result(value)
            case _:
                # The pool has closed the stream, and nobody reads what this process would do next.
                os._exit(0)


class AskedJudge:
    """A judge of a reward function; see `rl_core.rollouts.judging.Judge`.

    Args:
        name: Name of the judge.
        link: Connection to it.
    """

    def __init__(self, name: str, link: JudgeLink) -> None:
        self._name = name
        self._link = link

    async def ask(self, prompt: str | Sequence[Message], form: Mapping[str, Any] | None = None) -> Any:
        messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else tuple(prompt)
        return await self._link.ask(self._name, Question(messages, form))

    async def score(self, messages: Sequence[Message]) -> float:
        raise JudgeFailed(
            f"{self._name} has no scores in a reward function. Add its score to the rewards of the environment: "
            f"env.NAME.rewards.{self._name}={{judge: {self._name}}}"
        )
