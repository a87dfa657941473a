"""The states of a replica: the weights it serves, if any, the parts of it that sleep, and the admission of requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Literal, NamedTuple

from rl_core.errors import GeneratorError, WeightSyncError
from rl_core.weights import Manifest

INTERRUPT_AGAIN_S = 0.05
"""Time in seconds between two interruptions of requests that have not ended."""


class Admission:
    """Admits requests, keeps them waiting (paused, asleep) or refuses them (no weights fit to serve).

    Args:
        refusal: Reason why no request is admitted yet.

    Attributes:
        num_inside: Requests in flight.
        num_waiting: Requests that wait until they are let in.
    """

    def __init__(self, refusal: str) -> None:
        self.refusal = refusal
        self.num_inside = 0
        self.num_waiting = 0
        self._paused = False
        self._held = False
        self._closed = False
        self._open = asyncio.Event()
        self._empty = asyncio.Event()
        self._open.set()
        self._empty.set()

    @asynccontextmanager
    async def passage(self, *, while_paused: bool = False) -> AsyncIterator[None]:
        """Count as a request in flight for the length of the block.

        Waits first while admission is paused or held; with `while_paused` only while it is held.

        Raises:
            GeneratorError: If requests are refused.
        """
        if not (self._open.is_set() or (while_paused and not self._held)):
            self.num_waiting += 1
            try:
                while not self._open.is_set():
                    await self._open.wait()
            finally:
                self.num_waiting -= 1
        if self.refusal:
            raise GeneratorError(f"the generator serves nothing: {self.refusal}")
        self.num_inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self.num_inside -= 1
            if not self.num_inside:
                self._empty.set()

    async def pause(self, interrupt: Callable[[], Awaitable[None]] | None = None) -> None:
        """Admit nothing until `resume`, and wait for the requests in flight.

        Args:
            interrupt: Ends the requests that the engine has; called until none is in flight, because some may be on
                their way into the engine. None lets them finish.
        """
        self._update(paused=True)
        while interrupt is not None and not self._empty.is_set():
            await interrupt()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), INTERRUPT_AGAIN_S)
        await self._empty.wait()

    def resume(self) -> None:
        """Admit requests again, once `release` has been called after a `hold`."""
        self._update(paused=False)

    async def hold(self) -> None:
        """Admit nothing until `release`, and wait for the requests in flight."""
        self._update(held=True)
        await self._empty.wait()

    def release(self) -> None:
        """Admit requests again, once `resume` has been called after a `pause`."""
        self._update(held=False)

    def refuse(self, reason: str) -> None:
        """Refuse every request, with a reason; an empty reason serves requests again."""
        if not self._closed:
            self.refusal = reason

    def close(self, reason: str) -> None:
        """Refuse every request for good, including waiting ones."""
        self.refusal = reason
        self._update(closed=True)

    def _update(self, *, paused: bool | None = None, held: bool | None = None, closed: bool = False) -> None:
        self._paused = self._paused if paused is None else paused
        self._held = self._held if held is None else held
        self._closed = self._closed or closed
        if self._closed or not (self._paused or self._held):
            self._open.set()
        else:
            self._open.clear()


EnginePart = Literal["weights", "kv_cache"]
PARTS: tuple[EnginePart, ...] = ("weights", "kv_cache")


class State(NamedTuple):
    """A state of a replica. Without a refusal, it answers requests with the newest version that was committed, or with
    the weights that were loaded.

    Attributes:
        refusal: Reason why no request is answered; empty if requests are answered.
        has_weights: True if the engine has whole weights, which adapters need.
        manifest: Manifest of the weights that arrive, all of whose tensors the engine knows; None if none arrive.
    """

    refusal: str = ""
    has_weights: bool = False
    manifest: Manifest | None = None


SERVING = State(has_weights=True)


class Lifecycle:
    """The state of a replica, all its transitions, and the admission of requests that follows from it.

    ====================  =============================================  ====================
    from                  event                                          to
    ====================  =============================================  ====================
    (new)                                                                Refusing
    Refusing              `load`: the engine is there                    Serving, or Refusing
                                                                         if weights are awaited
    any                   `begin`: a weight version is announced         Refusing
    Refusing              `receive`: its tensors fit the engine          Receiving
    Receiving             `commit`: the engine computes with them        Serving
    any                   `drop_weights`: sleep did not keep them        Refusing
    any                   `close`                                        Refusing, for good
    ====================  =============================================  ====================

    Apart from that, requests wait: while the replica is paused, from `pause` to `resume`; and while a part of it
    sleeps, from `hold` to `wake` of the last part. `score` is answered while the replica is paused, but not in sleep. A
    request that is let in is refused in the states other than Serving.

    Attributes:
        state: The state.
        version: Weight version that was last committed; 0 for the weights that were loaded.
        asleep: Parts that sleep.
        admission: Admission of requests, which can be paused and resumed.
    """

    def __init__(self) -> None:
        self.state = State("the engine has not been started")
        self.version = 0
        self.asleep: frozenset[EnginePart] = frozenset()
        self.admission = Admission(self.state.refusal)

    def request(self, *, while_paused: bool = False) -> AbstractAsyncContextManager[None]:
        """Return the context of a request in flight, which is entered when it is let in.

        Args:
            while_paused: Let it in during a pause, too, unless a part of the replica sleeps.

        Raises:
            GeneratorError: If the state refuses it.
        """
        return self.admission.passage(while_paused=while_paused and not self.asleep)

    def load(self, *, awaits_weights: bool) -> None:
        """Note that the engine is there, with its weights or with random ones."""
        self._enter(State("no weights have been sent to it yet") if awaits_weights else SERVING)

    def begin(self, manifest: Manifest) -> None:
        """Refuse all requests, because a weight version replaces the one that is served.

        Raises:
            GeneratorError: If requests are in flight.
            WeightSyncError: If the version has adapters only, and their base weights are missing.
        """
        if count := self.admission.num_inside:
            raise GeneratorError(f"{count} requests are in flight: pause before a weight sync")
        keeps_weights = self.state.has_weights and manifest.form == "adapter"
        self._enter(State(f"weight version {manifest.version} has not been loaded completely", keeps_weights))
        if manifest.form == "adapter" and not keeps_weights:
            raise WeightSyncError(
                f"weight version {manifest.version} contains adapters only, but the engine has no base weights yet"
            )

    def receive(self, manifest: Manifest) -> None:
        """Note that the tensors of the version that was begun fit the engine."""
        assert self.state.refusal, "a transfer begins with `begin`"
        self._enter(self.state._replace(manifest=manifest))

    def announced(self, version: int) -> Manifest:
        """Return the manifest of the version that is being received.

        Raises:
            WeightSyncError: If it is another version, or none.
        """
        manifest = self.state.manifest
        if manifest is None or version != manifest.version:
            announced = "none" if manifest is None else str(manifest.version)
            raise WeightSyncError(f"cannot commit weight version {version}: the one announced is {announced}")
        return manifest

    def commit(self, version: int) -> None:
        """Serve the version that was received."""
        self.version = self.announced(version).version
        self._enter(SERVING)

    def drop_weights(self) -> None:
        """Note that the weights were not kept in sleep."""
        self._enter(State("its weights were dropped in sleep and have not been sent again"))

    def sleep(self) -> None:
        """Note that both parts sleep; requests wait already."""
        self.asleep = frozenset(PARTS)

    def wake(self, parts: Sequence[EnginePart]) -> None:
        """Note that parts are awake again; once all are, requests are let in."""
        self.asleep -= frozenset(parts)
        if not self.asleep:
            self.admission.release()

    def close(self) -> None:
        """Refuse all requests for good, including waiting ones."""
        self.state = State("the generator is closed")
        self.admission.close(self.state.refusal)

    def _enter(self, state: State) -> None:
        self.state = state
        self.admission.refuse(state.refusal)
