"""The states of a replica: which weights it serves, if any, and which parts of it sleep."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal

from rl_core.errors import GeneratorError, WeightSyncError
from rl_core.weights import Manifest
from rl_vllm.engine.admission import Admission

Part = Literal["weights", "kv_cache"]
PARTS: tuple[Part, ...] = ("weights", "kv_cache")


@dataclass(frozen=True)
class Serving:
    """Requests are answered with the newest version that was committed, or with what was loaded."""

    refusal = ""
    has_weights = True


@dataclass(frozen=True)
class Refusing:
    """Nothing is answered.

    Args:
        refusal: Why.
        has_weights: Whether the engine has whole weights, on which adapters can sit.
    """

    refusal: str
    has_weights: bool = False


@dataclass(frozen=True)
class Receiving:
    """Nothing is answered while the weights of a manifest arrive, all of whose tensors the engine knows.

    Args:
        manifest: The tensors.
        has_weights: See `Refusing`.
    """

    manifest: Manifest
    has_weights: bool

    @property
    def refusal(self) -> str:
        """Why nothing is answered."""
        return _not_whole(self.manifest)


State = Serving | Refusing | Receiving


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
    """

    def __init__(self) -> None:
        self.state: State = Refusing("the engine has not been started")
        self.version = 0
        self.asleep: frozenset[Part] = frozenset()
        self._admission = Admission(self.state.refusal)

    @property
    def refusal(self) -> str:
        """Why no request is answered; empty while it serves."""
        return self._admission.refusal

    @property
    def num_requests(self) -> int:
        """Requests in flight."""
        return self._admission.num_inside

    @property
    def num_waiting(self) -> int:
        """Requests that wait until they are let in."""
        return self._admission.num_waiting

    def request(self, *, while_paused: bool = False) -> AbstractAsyncContextManager[None]:
        """Context of a request in flight, which is entered when it is let in.

        Args:
            while_paused: Let it in during a pause, too, unless a part of the replica sleeps.

        Raises:
            GeneratorError: If the state refuses it.
        """
        return self._admission.passage(while_paused=while_paused and not self.asleep)

    @property
    def admission(self) -> Admission:
        """Pauses and resumes the admission of requests."""
        return self._admission

    def load(self, *, awaits_weights: bool) -> None:
        """Note that the engine is there, with its weights or with random ones."""
        self._enter(Refusing("no weights have been sent to it yet") if awaits_weights else Serving())

    def begin(self, manifest: Manifest) -> None:
        """Refuse all requests, because a weight version replaces the one that is served.

        Raises:
            GeneratorError: If requests are in flight.
            WeightSyncError: If the version has adapters only, and there are no weights that they sit on.
        """
        if self.num_requests:
            raise GeneratorError(f"{self.num_requests} requests are in flight: pause before a weight sync")
        keeps_weights = self.state.has_weights and manifest.form == "adapter"
        self._enter(Refusing(_not_whole(manifest), has_weights=keeps_weights))
        if manifest.form == "adapter" and not keeps_weights:
            raise WeightSyncError(
                f"weight version {manifest.version} contains adapters only, but the engine has no base weights yet"
            )

    def receive(self, manifest: Manifest) -> None:
        """Note that the tensors of the version that was begun fit the engine."""
        assert isinstance(self.state, Refusing), "a transfer begins with `begin`"
        self._enter(Receiving(manifest, self.state.has_weights))

    def announced(self, version: int) -> Manifest:
        """Return the manifest of the version that is being received.

        Raises:
            WeightSyncError: If it is another version, or none.
        """
        manifest = self.state.manifest if isinstance(self.state, Receiving) else None
        if manifest is None or version != manifest.version:
            announced = "none" if manifest is None else str(manifest.version)
            raise WeightSyncError(f"cannot commit weight version {version}: the one announced is {announced}")
        return manifest

    def commit(self, version: int) -> None:
        """Serve the version that was received."""
        self.version = self.announced(version).version
        self._enter(Serving())

    def drop_weights(self) -> None:
        """Note that the weights were not kept in sleep."""
        self._enter(Refusing("its weights were dropped in sleep and have not been sent again"))

    def sleep(self) -> None:
        """Note that both parts sleep; requests are held already."""
        self.asleep = frozenset(PARTS)

    def wake(self, parts: Sequence[Part]) -> None:
        """Note that parts are awake again; once all are, requests are let in."""
        self.asleep -= frozenset(parts)
        if not self.asleep:
            self._admission.release()

    def close(self) -> None:
        """Refuse all requests for good, those that wait included."""
        self.state = Refusing("the generator is closed")
        self._admission.close(self.state.refusal)

    def _enter(self, state: State) -> None:
        self.state = state
        if state.refusal:
            self._admission.refuse(state.refusal)
        else:
            self._admission.serve()


def _not_whole(manifest: Manifest) -> str:
    return f"weight version {manifest.version} has not been loaded completely"
