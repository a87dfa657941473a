"""Weight sync: from the policy to the generators, verified before a version is served."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.errors import WeightSyncError
from rl_core.model import LOGPROBS
from rl_core.ray.calls import gather
from rl_core.tracing import spans
from rl_core.weights import Manifest, WeightForm, WeightUpdate
from rl_launch.placement.residency import Residency
from rl_launch.placement.topology import GENERATION
from rl_launch.runtime.canary import CANARY, Canary
from rl_launch.runtime.weight_transfer import SYNC_TIMEOUT_S, WEIGHT_SYNC, Receiver, WeightTransfer, started

_log = logging.getLogger(__name__)

ATTEMPTS = 2
"""A transfer that arrives broken is tried once more before the run stops."""


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

    A replica takes a version over in one call, up to its canary if it has its own devices.

    A new version is served only when every receiver acknowledged every tensor's digest, the engine's own check of its
    copies passed, and the canary's logprobs agree with the policy's. A version can be sent until the policy steps. The
    weights of a drafter follow those of the policy, before anything is served.

    Args:
        policy: The policy's weights on their way.
        canary: What both sides must agree on.
        residency: Residency of the devices that policy and replicas share; None if they share none.
        drafter: Weights of a draft model or draft head that trains with the policy; None without one.
        sends_adapters: True if the adapters of the policy travel by themselves: beside the weights that they sit on
            to replicas that do not have these yet, and alone in every later transfer.
        timeout_s: Bound of each phase.
    """

    def __init__(
        self,
        policy: WeightTransfer,
        *,
        canary: Canary,
        residency: Residency | None,
        drafter: WeightTransfer | None = None,
        sends_adapters: bool = False,
        timeout_s: float = SYNC_TIMEOUT_S,
    ) -> None:
        self._policy = policy
        self._drafter = drafter
        self.canary = canary
        self._residency = residency
        self._sends_adapters = sends_adapters
        self._timeout_s = timeout_s
        self._version = 0
        self._last_form: WeightForm = "merged"
        self._served: list[tuple[Receiver, int]] = []

    @property
    def version(self) -> int:
        """The last version given."""
        return self._version

    def publish(self) -> WeightUpdate:
        """Give the policy's present weights the next version."""
        self._version += 1
        return WeightUpdate(self._version, self._policy.model.revision)

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
        with self._policy.hold():
            finish = self._start_canary()
            manifest = self._policy.manifest("merged", update.version)
            digest = self._policy.write(manifest, folder)
            return WrittenWeights(manifest, digest, self._policy.bucket_bytes, self.canary.rows, finish())

    def _check_current(self, update: WeightUpdate) -> None:
        if (update.version, update.revision) != (self._version, self._policy.model.revision):
            raise WeightSyncError(
                f"weight version {update.version} is stale: the policy has stepped, loaded a checkpoint or published "
                "again since then. Publish the current weights and adopt that version"
            )

    def _transfer(self, update: WeightUpdate, replicas: Sequence[Receiver], *, in_flight: bool) -> None:
        takes_turns = self._residency is not None
        with self._policy.hold():
            # before the weights are sent: the replicas, which may have the same cores or memory, work behind that
            finish = self._start_canary()
            self._policy.leave("optimizer")
            manifest = self._manifest(self._form(replicas), update.version)
        self._served = []  # after a failure everything is sent again
        rows = tuple(self.canary.rows)
        taken = self._policy.send(manifest, replicas, canary=rows, takes_turns=takes_turns, in_flight=in_flight)
        expected = finish()
        scores = [found.scores for found in taken]
        drafter = self._drafter
        has_head = drafter is not None and drafter.tenant == self._policy.tenant
        if not has_head:  # which leaves with its policy
            self._policy.leave("parameters")
        if drafter is not None:
            self._send_drafter(drafter, update.version, replicas)
        if self._residency:
            self._residency.hand_over(GENERATION)
            scores = self._all(replicas, "score_canary", rows)
        noise = max((found.quantisation_noise for found in taken), default=0.0)
        origins = [replica.origin(CANARY) for replica in replicas]
        self.canary.check(update.version, expected, origins, scores, quantisation_noise=noise)
        refs = [replica.generator("resume") for replica in replicas]
        gather(refs, [replica.origin("weight sync (resume)") for replica in replicas], self._timeout_s)
        self._served = started(replicas)

    def _send_drafter(self, drafter: WeightTransfer, version: int, replicas: Sequence[Receiver]) -> None:
        """Bring the drafters of the replicas, which have taken over a version of the policy, to the trained one."""
        with drafter.hold():
            drafter.leave("optimizer")
            manifest = drafter.manifest("merged", version)
        drafter.send(manifest, replicas, takes_turns=self._residency is not None)
        drafter.leave("parameters")

    def _form(self, replicas: Sequence[Receiver]) -> WeightForm:
        """Form in which the weights travel to these replicas."""
        if not self._sends_adapters:
            return "merged"
        return "adapter" if started(replicas) == self._served else "factored"

    def _manifest(self, form: WeightForm, version: int) -> Manifest:
        """Return the policy's manifest of a form; a change of the form is logged."""
        manifest = self._policy.manifest(form, version)
        if form != self._last_form:
            self._last_form = form
            sent = "the adapters alone" if form == "adapter" else "all weights and their adapters"
            _log.info("weight version %d: sending %s, %d bytes", version, sent, manifest.num_bytes)
        return manifest

    def _start_canary(self) -> Callable[[], Ragged]:
        """Start the policy's scoring of the canary; the returned function waits for its logprobs."""
        finish = self._policy.model.start_infer(Batch({"tokens": self.canary.rows}), [LOGPROBS])
        return lambda: finish().ragged("logprobs")

    def _all(self, replicas: Sequence[Receiver], method: str, *args: Any) -> list[Any]:
        refs = [replica.call(method, *args) for replica in replicas]
        return gather(refs, [replica.origin(f"weight sync ({method})") for replica in replicas], self._timeout_s)
