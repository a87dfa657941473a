"""Weight sync: from the policy to the generators, verified before a version is served."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import ray

from rl_core import spans
from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.errors import GeneratorError, Origin, RLError, WeightSyncError, WorkerDied, WorkerError, WorkerStalled
from rl_core.model import LOGPROBS
from rl_core.ray.calls import gather, settle
from rl_core.ray.model import RemoteModel
from rl_core.rollouts.delivery import Delivery, Taken
from rl_core.weights import Manifest, Transport, TransportKind, WeightForm, WeightUpdate
from rl_launch.placement.residency import Residency
from rl_launch.placement.topology import GENERATION
from rl_launch.root_config import POLICY
from rl_launch.runtime.canary import CANARY, Canary

_log = logging.getLogger(__name__)

WEIGHT_SYNC = "weight sync"
"""Track of its spans in the driver."""

ATTEMPTS = 2
"""A transfer that arrives broken is tried once more before the run stops."""


GRACE_S = 30.0
"""After a first failure in a transfer, how long the other side may take to end, so that both are heard."""


class Receiver(Protocol):
    """A replica, as weight sync calls it."""

    num_ranks: int
    num_starts: int

    def call(self, method: str, *args: Any) -> ray.ObjectRef:
        """Call the replica's rollout worker."""
        ...

    def generator(self, method: str, *args: Any) -> ray.ObjectRef:
        """Call the replica itself."""
        ...

    def origin(self, phase: str) -> Origin:
        """The replica and a phase of its work, for messages."""
        ...


@dataclass(frozen=True)
class WrittenWeights:
    """One weight version in a folder.

    Args:
        manifest: Its tensors, in the order in which they were written.
        digest: Digest of all of them.
        bucket_bytes: Maximum number of bytes of a bucket.
        canary: Int32 token rows.
        expected: Float32, the policy's logprobs of these rows with this version.
    """

    manifest: Manifest
    digest: str
    bucket_bytes: int
    canary: Ragged
    expected: Ragged


class WeightSync:
    """The one sequence in which weights travel: pause, make room, transfer, verify, commit, make room, canary, resume.

    A replica takes a version over in one call, up to its canary if it has its own devices. All transfers use one
    connection and its buffers; another one is opened after a failure, and once a replica has been started anew.

    A new version is served only when every receiver acknowledged every tensor's digest, the engine's own check of its
    copies passed, and the canary's logprobs agree with the policy's. A version can be sent until the policy steps.

    Args:
        policy: The sender.
        kind: Kind of transport.
        meet: Makes the address at which sender and receivers meet, or the folder that they share.
        canary: What both sides must agree on.
        residency: Residency of the devices that policy and replicas share; None if they share none.
        bucket_bytes: Most bytes in flight at a time.
        sends_changes: True if a transfer carries only what changed since the one before, to the same replicas.
        sends_adapters: True if the adapters of the policy travel by themselves: beside the weights that they sit on
            to replicas that do not have these yet, and alone in every later transfer.
        timeout_s: Bound of each phase.
    """

    def __init__(
        self,
        policy: RemoteModel,
        *,
        kind: TransportKind,
        meet: Callable[[], str],
        canary: Canary,
        residency: Residency | None,
        bucket_bytes: int,
        sends_changes: bool = False,
        sends_adapters: bool = False,
        timeout_s: float = 600.0,
    ) -> None:
        self._policy = policy
        self._kind: TransportKind = kind
        self._meet = meet
        self.canary = canary
        self._residency = residency
        self._bucket_bytes = bucket_bytes
        self._sends_changes = sends_changes
        self._sends_adapters = sends_adapters
        self._timeout_s = timeout_s
        self._version = 0
        self._manifests: dict[WeightForm, Manifest] = {}
        self._last_form: WeightForm = "merged"
        self._transport: Transport | None = None
        self._receivers: list[tuple[Receiver, int]] = []
        self._served: list[tuple[Receiver, int]] = []

    @property
    def version(self) -> int:
        """The last version given."""
        return self._version

    def publish(self) -> WeightUpdate:
        """Give the policy's present weights the next version."""
        self._version += 1
        return WeightUpdate(self._version, self._policy.revision)

    def state(self) -> Mapping[str, Any]:
        """Version of the weights that are saved next to it, and what the first version showed."""
        return {"version": self._version, "canary": self.canary.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on so that the restored weights are published under the version they had."""
        self._version = state["version"] - 1
        if "canary" in state:  # checkpoints of 0.1.0 have none
            self.canary.restore(state["canary"])

    def send(self, update: WeightUpdate, replicas: Sequence[Receiver], *, in_flight: bool = False) -> None:
        """Bring the replicas to the published version, verified.

        Args:
            update: The last update that was published.
            replicas: The receivers.
            in_flight: Interrupt the requests of the replicas, which then continue with these weights.

        Raises:
            WeightSyncError: If the update is stale, or naming what did not arrive; the replicas then serve nothing.
            WorkerDied, GeneratorError: If a process or an engine ended meanwhile.
        """
        self._check_current(update)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                with spans.span(WEIGHT_SYNC, f"version {update.version}"):
                    self._transfer(update, replicas, in_flight=in_flight)
                return
            except WeightSyncError as error:
                if attempt == ATTEMPTS:
                    raise
                _log.warning("%s; resending version %d", error, update.version)

    def write(self, update: WeightUpdate, folder: str) -> WrittenWeights:
        """Write the published version into a folder that all nodes share, whole, for engines that load it later.

        Args:
            update: The last update that was published.
            folder: Made, or emptied; the files are removed from it when weights are next sent or written.

        Raises:
            WeightSyncError: If the update is stale, or the files cannot be written.
        """
        self._check_current(update)
        with self._residency.hold(POLICY) if self._residency else nullcontext():
            finish = self._start_canary()
            manifest = self._of_form("merged", update.version)
            transport = Transport(
                "disk", folder, num_receivers=1, bucket_bytes=self._bucket_bytes, timeout_s=self._timeout_s
            )
            self._transport = None  # the policy has one connection at a time
            sending, senders = self._policy.start_send(ray.put(manifest), transport)
            answers = self._settled(sending, senders, manifest, transport)
            (digest,) = {digest for digests in answers for digest in digests}
            return WrittenWeights(manifest, digest, self._bucket_bytes, self.canary.rows, finish())

    def _check_current(self, update: WeightUpdate) -> None:
        if (update.version, update.revision) != (self._version, self._policy.revision):
            raise WeightSyncError(
                f"weight version {update.version} is stale: the policy has stepped, loaded a checkpoint or published "
                "again since then. Publish the current weights and adopt that version"
            )

    def _transfer(self, update: WeightUpdate, replicas: Sequence[Receiver], *, in_flight: bool) -> None:
        with self._residency.hold(POLICY) if self._residency else nullcontext():
            # before the weights are sent: the replicas, which may have the same cores or memory, work behind that
            finish = self._start_canary()
            if self._residency:
                self._policy.offload(["optimizer"])
            manifest = self._manifest(self._form(replicas), update.version)
        self._served = []  # after a failure everything is sent again
        transport = self._connected(replicas)
        self._transport = None  # until this transfer has succeeded
        shared = ray.put(manifest)
        sending = self._policy.start_send(shared, transport)
        with spans.span(WEIGHT_SYNC, "transfer"):
            taken = self._exchange(manifest, shared, sending, transport, replicas, in_flight=in_flight)
        self._transport = transport
        expected = finish()
        scores = [found.scores for found in taken]
        if self._residency:
            self._policy.offload(["parameters"])
            self._residency.hand_over(GENERATION)
            scores = self._all(replicas, "score_canary", tuple(self.canary.rows))
        noise = max((found.quantisation_noise for found in taken), default=0.0)
        origins = [replica.origin(CANARY) for replica in replicas]
        self.canary.check(update.version, expected, origins, scores, quantisation_noise=noise)
        refs = [replica.generator("resume") for replica in replicas]
        gather(refs, [replica.origin("weight sync (resume)") for replica in replicas], self._timeout_s)
        self._served = _started(replicas)

    def _form(self, replicas: Sequence[Receiver]) -> WeightForm:
        """Form in which the weights travel to these replicas."""
        if not self._sends_adapters:
            return "merged"
        return "adapter" if _started(replicas) == self._served else "factored"

    def _manifest(self, form: WeightForm, version: int) -> Manifest:
        """Return the manifest of a form, which the policy has to make only once: versions differ in their values."""
        manifest = self._of_form(form, version)
        if form != self._last_form:
            self._last_form = form
            sent = "the adapters alone" if form == "adapter" else "all weights and their adapters"
            _log.info("weight version %d: sending %s, %d bytes", version, sent, manifest.num_bytes)
        return manifest

    def _of_form(self, form: WeightForm, version: int) -> Manifest:
        if form not in self._manifests:
            self._manifests[form] = self._policy.manifest(version, form)
        return replace(self._manifests[form], version=version)

    def _start_canary(self) -> Callable[[], Ragged]:
        """Start the policy's scoring of the canary; the returned function waits for its logprobs."""
        finish = self._policy.start_infer(Batch({"tokens": self.canary.rows}), [LOGPROBS])
        return lambda: finish().ragged("logprobs")

    def _exchange(
        self,
        manifest: Manifest,
        shared: ray.ObjectRef,
        sent_by: tuple[Sequence[ray.ObjectRef], Sequence[Origin]],
        transport: Transport,
        replicas: Sequence[Receiver],
        *,
        in_flight: bool,
    ) -> list[Taken]:
        """Receive the policy's weights on the replicas, watch both sides at the same time, and compare their answers.

        Args:
            manifest: Tensors of this version, in the order they are sent.
            shared: Reference to the manifest in Ray's object store.
            sent_by: The policy's calls, as `RemoteModel.start_send` returns them.
            transport: How the weights travel.
            replicas: Replicas that receive the weights.
            in_flight: True to interrupt requests, which then continue with the new weights.

        Raises:
            RLError: The cause of the failure, followed by what the other side said.
        """
        sending, senders = sent_by
        if not transport.ends_meet:
            self._settled(sending, senders, manifest, transport)
        first_ranks = np.cumsum([1] + [replica.num_ranks for replica in replicas])
        canary, takes_turns = tuple(self.canary.rows), self._residency is not None
        taking = [
            replica.call("take_over", shared, Delivery(transport, int(first), canary, takes_turns, in_flight))
            for replica, first in zip(replicas, first_ranks, strict=False)
        ]
        takers = [replica.origin("weight sync (take over)") for replica in replicas]
        answers = self._settled([*taking, *sending], [*takers, *senders], manifest, transport)
        taken: list[Taken] = answers[: len(taking)]
        by_rank = {tuple(digests) for digests in answers[len(taking) :] if digests}
        # receivers that keep other parts have other digests, but every rank that sends must have sent the same
        sent: set[str] = set(*by_rank) if len(by_rank) == 1 else set()
        for found, origin in zip(taken, takers, strict=True):
            for rank, digest in enumerate(found.digests):
                if digest not in sent:
                    listed = ", ".join(sorted({digest for digests in by_rank for digest in digests})) or "none"
                    raise WeightSyncError(
                        f"{origin}: engine rank {rank} received weights with digest {digest}; sent as version "
                        f"{manifest.version} were {listed}"
                    )
        return taken

    def _settled(
        self, refs: Sequence[ray.ObjectRef], origins: Sequence[Origin], manifest: Manifest, transport: Transport
    ) -> list[Any]:
        """Answers of senders, of receivers or of both."""

        def give_up(error: RLError) -> None:
            stacks = f"; {self._policy.write_stacks()}" if isinstance(error, WorkerStalled) else ""
            _log.warning("weight version %d: %s%s", manifest.version, error, stacks)
            self._policy.interrupt_send(transport, f"another part of the transfer failed: {error}")

        answers, failures = settle(refs, origins, 2 * self._timeout_s, grace_s=GRACE_S, on_failure=give_up)
        if failures:
            raise joined(failures)
        return answers

    def _connected(self, replicas: Sequence[Receiver]) -> Transport:
        """The transport of the last transfer if the same processes are at its ends, or another one.

        The memory of a GPU is accessible only from that GPU, so every rank of the policy sends to the engine rank on
        the same GPU.
        """
        receivers = _started(replicas)
        if self._transport is not None and receivers == self._receivers:
            return self._transport
        self._receivers = receivers
        per_gpu = self._kind == "ipc" and self._residency is not None
        return Transport(
            self._kind,
            self._meet(),
            1 if per_gpu else sum(replica.num_ranks for replica in replicas),
            bucket_bytes=self._bucket_bytes,
            every_rank_sends=per_gpu,
            timeout_s=self._timeout_s,
            sends_changes=self._sends_changes,
        )

    def _all(self, replicas: Sequence[Receiver], method: str, *args: Any) -> list[Any]:
        refs = [replica.call(method, *args) for replica in replicas]
        return gather(refs, [replica.origin(f"weight sync ({method})") for replica in replicas], self._timeout_s)


def _started(replicas: Sequence[Receiver]) -> list[tuple[Receiver, int]]:
    """Replicas with how often each was started, which tells its processes apart."""
    return [(replica, replica.num_starts) for replica in replicas]


def joined(failures: Sequence[RLError]) -> RLError:
    """One error for the failures of a transfer, in the order in which they happened: the cause, then the others.

    A process or an engine that ended is the cause, even if another failure was noticed first.
    """
    cause = min(failures, key=_rank)
    others = [str(error) for error in failures if str(cause) not in str(error)]
    if not others:
        return cause
    besides = f"; besides: {'; '.join(dict.fromkeys(others))}"
    match cause:
        case WorkerDied():
            return type(cause)(f"{cause.args[0]}{besides}", cause.origin)
        case WeightSyncError():
            return WeightSyncError(f"{cause}{besides}", cause.tensors)
        case WorkerError():
            return WorkerError(cause.kind, f"{cause.message}{besides}", cause.traceback, cause.origin)
        case GeneratorError():
            return GeneratorError(f"{cause}{besides}")
        case _:
            return RLError(f"{cause}{besides}")


def _rank(error: RLError) -> int:
    if isinstance(error, WorkerDied) and not isinstance(error, WorkerStalled):
        return 0
    # ranks that only repeat another's failure come last
    return {GeneratorError: 1, WeightSyncError: 2, WorkerError: 2, WorkerStalled: 3}.get(type(error), 4)
