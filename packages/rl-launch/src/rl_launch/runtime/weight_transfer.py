"""The transfer of one model's weights to the generators."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import ray

from rl_core.errors import (
    FailureOrigin,
    GeneratorError,
    RLError,
    WeightSyncError,
    WorkerDied,
    WorkerError,
    WorkerStalled,
)
from rl_core.model import ModelPart
from rl_core.ray.calls import settle
from rl_core.ray.model import RemoteModel
from rl_core.rollouts.delivery import Delivery, Taken
from rl_core.tracing import spans
from rl_core.weights import Manifest, Transport, TransportKind, WeightForm, WeightSyncEncoding, WeightTarget
from rl_launch.placement.residency import TenantResidency
from rl_launch.runtime.replica import Replica

_log = logging.getLogger(__name__)

WEIGHT_SYNC = "weight sync"
"""Track of spans of weight sync in the driver."""

SYNC_TIMEOUT_S = 600.0
"""Maximum time in seconds for one phase of a weight sync; `policy.worker_timeout_s` may be shorter."""

GRACE_S = 30.0
"""Seconds that the other side of a transfer may take to end after a first failure, so that both errors are reported."""


class WeightTransfer:
    """Sends the weights of one model to replicas. All transfers use one connection and its buffers. After a failure or
    the restart of a replica, a new connection is opened.

    Args:
        model: The sender.
        target: The generators' model that receives the weights.
        kind: Kind of transport.
        meet: Returns the address where sender and receivers connect, or the folder that they share.
        residency: Residency of the devices that the sender shares with others; None if it shares none.
        gives_way: True if the sender shares devices with replicas, and frees them for the replicas part by part.
        bucket_bytes: Maximum number of bytes in flight at a time.
        tenant: Role that holds the devices if it is not the target: a draft head shares the devices of its policy.
        encoding: Values that a transfer carries.
        timeout_s: Timeout in seconds of each phase.
    """

    def __init__(
        self,
        model: RemoteModel,
        target: WeightTarget,
        *,
        kind: TransportKind,
        meet: Callable[[], str],
        residency: TenantResidency | None,
        gives_way: bool,
        bucket_bytes: int,
        tenant: str = "",
        encoding: WeightSyncEncoding = "full",
        timeout_s: float = SYNC_TIMEOUT_S,
    ) -> None:
        self.model = model
        self.bucket_bytes = bucket_bytes
        self.tenant = tenant or target
        self._target: WeightTarget = target
        self._kind: TransportKind = kind
        self._meet = meet
        self._residency = residency
        self._gives_way = gives_way
        self._encoding: WeightSyncEncoding = encoding
        self._timeout_s = timeout_s
        self._manifests: dict[WeightForm, Manifest] = {}
        self._transport: Transport | None = None
        self._receivers: list[tuple[Replica, int]] = []

    def hold(self) -> AbstractContextManager[None]:
        """Return a context that brings the model to its devices. It stays there until another model needs them."""
        return self._residency.hold(self.tenant) if self._residency else nullcontext()

    def leave(self, part: ModelPart) -> None:
        """Free the devices of a part of the model for the replicas, if they share them."""
        if self._gives_way:
            self.model.offload([part])

    def manifest(self, form: WeightForm, version: int) -> Manifest:
        """Return the manifest of a form. The model makes it only once, because versions differ only in their values."""
        if form not in self._manifests:
            self._manifests[form] = self.model.manifest(version, form)
        made = self._manifests[form]
        # Only files have changes of whole tensors, because one rank writes them for all.
        wants_parts = self._encoding == "parts" or (self._encoding == "changes" and self._kind != "disk")
        by_parts = made.is_held_in_parts and wants_parts
        return replace(made, version=version, target=self._target, is_held_in_parts=by_parts)

    def send(
        self,
        manifest: Manifest,
        replicas: Sequence[Replica],
        *,
        canary: Sequence[np.ndarray] = (),
        takes_turns: bool = False,
        in_flight: bool = False,
    ) -> list[Taken]:
        """Send the weights, watch both sides at the same time, and compare the sent digests with the received ones.

        Args:
            manifest: Tensors of this version, in the order of the transfer.
            replicas: Replicas that receive the weights.
            canary: Token rows that the replicas score with them.
            takes_turns: See `Delivery.takes_turns`.
            in_flight: See `Delivery.in_flight`.

        Raises:
            RLError: The cause of the failure, followed by the errors of the other side.
        """
        transport = self._connected(replicas, manifest)
        # The connection is kept only after a success.
        self._transport = None
        shared = ray.put(manifest)
        sending, senders = self.model.start_send(shared, transport)
        with spans.span(WEIGHT_SYNC, "transfer" if self._target == "policy" else f"transfer of the {self._target}"):
            if not transport.ends_meet:
                self._settled(sending, senders, manifest, transport)
            first_ranks = np.cumsum([1] + [replica.num_ranks for replica in replicas])
            taking = [
                replica.call(
                    "take_over", shared, Delivery(transport, int(first), tuple(canary), takes_turns, in_flight)
                )
                for replica, first in zip(replicas, first_ranks, strict=False)
            ]
            takers = [replica.origin("weight sync (take over)") for replica in replicas]
            answers = self._settled([*taking, *sending], [*takers, *senders], manifest, transport)
        taken: list[Taken] = answers[: len(taking)]
        digests = {digest for found in answers[len(taking) :] for digest in found}
        # Receivers that keep different parts have different digests, but ranks that send the same parts must have sent
        # the same values.
        num_values = Counter(digest.rpartition("-")[0] for digest in digests)
        sent = {digest for digest in digests if num_values[digest.rpartition("-")[0]] == 1}
        for found, origin in zip(taken, takers, strict=True):
            for rank, digest in enumerate(found.digests):
                if digest not in sent:
                    listed = ", ".join(sorted(digests)) or "none"
                    raise WeightSyncError(
                        f"{origin}: engine rank {rank} received weights with digest {digest}; sent as version "
                        f"{manifest.version} were {listed}"
                    )
        self._transport = transport
        return taken

    def write(self, manifest: Manifest, folder: str) -> str:
        """Write the weights into a folder that all nodes share; return their common digest."""
        transport = Transport(
            "disk", folder, num_receivers=1, bucket_bytes=self.bucket_bytes, timeout_s=self._timeout_s
        )
        # The model has one connection at a time.
        self._transport = None
        sending, senders = self.model.start_send(ray.put(manifest), transport)
        answers = self._settled(sending, senders, manifest, transport)
        (digest,) = {digest for digests in answers for digest in digests}
        return digest

    def _settled(
        self, refs: Sequence[ray.ObjectRef], origins: Sequence[FailureOrigin], manifest: Manifest, transport: Transport
    ) -> list[Any]:
        """Return the answers of senders, of receivers or of both."""

        def give_up(error: RLError) -> None:
            stacks = f"; {self.model.write_stacks()}" if isinstance(error, WorkerStalled) else ""
            _log.warning("weight version %d: %s%s", manifest.version, error, stacks)
            self.model.interrupt_send(transport, f"another part of the transfer failed: {error}")

        answers, failures = settle(refs, origins, 2 * self._timeout_s, grace_s=GRACE_S, on_failure=give_up)
        if failures:
            raise joined(failures)
        return answers

    def _connected(self, replicas: Sequence[Replica], manifest: Manifest) -> Transport:
        """Return the transport of the last transfer if both ends are the same processes, otherwise a new transport.

        The memory of a GPU is accessible only from the same GPU, so with `ipc` every rank of the model sends to the
        engine rank on its GPU. Over `collective` every rank sends the parts that it holds, if the manifest has them.
        """
        receivers = started(replicas)
        per_gpu = self._kind == "ipc" and self._gives_way
        every_rank_sends = per_gpu or (self._kind == "collective" and manifest.is_held_in_parts)
        known = self._transport
        if known is not None and receivers == self._receivers and known.every_rank_sends == every_rank_sends:
            return known
        self._receivers = receivers
        return Transport(
            self._kind,
            self._meet(),
            1 if per_gpu else sum(replica.num_ranks for replica in replicas),
            bucket_bytes=self.bucket_bytes,
            every_rank_sends=every_rank_sends,
            timeout_s=self._timeout_s,
            sends_changes=self._encoding == "changes" and (per_gpu or self._kind != "ipc"),
        )


def started(replicas: Sequence[Replica]) -> list[tuple[Replica, int]]:
    """Return the replicas with the number of their starts, which differs between the processes of a replica."""
    return [(replica, replica.num_starts) for replica in replicas]


def joined(failures: Sequence[RLError]) -> RLError:
    """Return one error for the failures of a transfer: the cause, then the others in the order of their occurrence.

    A process or an engine that ended is the cause, even if another failure was noticed first.
    """

    def rank(error: RLError) -> int:
        if isinstance(error, WorkerDied) and not isinstance(error, WorkerStalled):
            return 0
        # Ranks that only repeat the failure of another rank come last.
        return {GeneratorError: 1, WeightSyncError: 2, WorkerError: 2, WorkerStalled: 3}.get(type(error), 4)

    cause = min(failures, key=rank)
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
