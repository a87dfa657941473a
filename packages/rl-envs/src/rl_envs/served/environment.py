"""The part that environments behind a server share: conversations side by side, each with a failure of its own."""

from __future__ import annotations

import asyncio
import atexit
import threading
import traceback
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, Protocol, TypeVar

from rl_core.http_client import MAX_REASON, ServerUnreachable, WrongAnswer
from rl_core.rollouts.environment import Conversation, EnvironmentFailure, StepResult
from rl_envs.served.client import EnvironmentServer
from rl_envs.served.plugin import ServedConfig

TURN_SHARE = 0.9
"""Share of the deadline of a call in which a turn must be answered: after the deadline the process would end."""
PATIENCE_SHARE = 0.5
"""Share of the deadline in which a conversation that begins tries an unreachable server again."""


class ServedPlay(Protocol):
    """A conversation in progress, as `ServedEnvironment` needs it."""

    def save(self) -> bytes:
        """Return the state, from which the conversation continues in another process."""

    async def close(self) -> None:
        """End its session with the server."""


C = TypeVar("C", bound=ServedConfig)
P = TypeVar("P", bound=ServedPlay)
T = TypeVar("T")


class ServedEnvironment(Generic[C, P]):
    """Plays conversations on a server. A failure costs the conversation that it happens to.

    Args:
        config: Its settings.
    """

    def __init__(self, config: C) -> None:
        self._config = config
        self.server = EnvironmentServer(config.address, config.headers)
        # Sessions are kept alive between calls, so their loop runs in a thread.
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        atexit.register(lambda: self._run(self.server.close()))

    async def begin(self, conversation: Conversation) -> P:
        """Return a new conversation, whose session has begun."""
        raise NotImplementedError

    async def turn(self, conversation: Conversation, play: P) -> StepResult:
        """Return the answer to a turn; its session ends if that is the last one.

        Raises:
            ServerUnreachable: If the server has gone.
            WrongAnswer: If it does not answer as it should.
        """
        raise NotImplementedError

    def read(self, saved: bytes) -> P:
        """Return the conversation of `ServedPlay.save`."""
        raise NotImplementedError

    def step(
        self, conversations: Sequence[Conversation], states: Sequence[Any]
    ) -> list[StepResult | EnvironmentFailure]:
        """Answer each turn, side by side."""

        async def answered() -> list[StepResult | EnvironmentFailure]:
            return await asyncio.gather(*map(self._answer, conversations, states))

        return self._run(answered())

    def close(self, states: Sequence[Any]) -> None:
        """End the sessions of these conversations."""

        async def closed() -> None:
            await asyncio.gather(*(_closed(play) for play in states if play is not None))

        self._run(closed())

    def save(self, states: Sequence[Any]) -> list[bytes | None]:
        """Return the states of conversations in progress."""
        return [play.save() for play in states]

    def restore(self, saved: Sequence[bytes]) -> list[P]:
        """Return conversations as they were saved."""
        return [self.read(data) for data in saved]

    async def _answer(self, conversation: Conversation, play: P | None) -> StepResult | EnvironmentFailure:
        limit_s = TURN_SHARE * self._config.deadline_s
        try:
            async with asyncio.timeout(limit_s):
                play = play or await self.begin(conversation)
                result = await self.turn(conversation, play)
            if result.done:
                await _closed(play)
            return result
        except TimeoutError:
            failure = EnvironmentFailure(f"{self.server} has not answered within {limit_s:g} s", "deadline")
        except ServerUnreachable as error:
            failure = EnvironmentFailure(str(error), "process")
        except WrongAnswer as error:
            failure = EnvironmentFailure(str(error), "raised")
        if play is not None:
            await _closed(play)
        return failure

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


async def _closed(play: ServedPlay) -> None:
    """End a session in the time that it has for that."""
    try:
        async with asyncio.timeout(5.0):
            await play.close()
    except (TimeoutError, ServerUnreachable, WrongAnswer):
        pass


def called(function: Callable[[Any], T], argument: Any) -> T:
    """Return the result of a function of the user's.

    Args:
        function: The function.
        argument: Its argument.

    Raises:
        ValueError: If it raises one.
        WrongAnswer: If it raises anything else.
    """
    try:
        return function(argument)
    except ValueError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {str(error)[:MAX_REASON]} (line {frame.lineno} of {frame.filename})"
        raise WrongAnswer(f"{function.__qualname__} raised {reason}") from error
