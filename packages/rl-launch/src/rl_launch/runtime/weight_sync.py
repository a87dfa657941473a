"""Weight sync: from the policy to the generators, verified before a version is served."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.errors import FailureOrigin, WeightSyncError
from rl_core.model import LOGPROBS
from rl_core.ray.calls import gather
from rl_core.tracing import spans
from rl_core.weights import Manifest, WeightForm, WeightUpdate
from rl_launch.placement.residency import TenantResidency
from rl_launch.placement.topology import GENERATION
from rl_launch.runtime.replica import Replica
from rl_launch.runtime.weight_transfer import SYNC_TIMEOUT_S, WEIGHT_SYNC, WeightTransfer, started

_log = logging.getLogger(__name__)

ATTEMPTS = 2
"""Maximum number of transfers of a version, before broken weights stop the run."""


MAX_ROWS = 4
"""Maximum number of prompts in a canary."""

MAX_LENGTH = 64
"""Maximum number of tokens of a row."""

MIN_TOKENS = 16
"""Minimum number of tokens of all prompts. With fewer, random rows are the better canary."""

FACTOR = 3.0
"""Maximum difference of later versions, as a multiple of the first version's difference."""

CEILING = 10.0
"""Maximum tolerance, as a multiple of the configured one. An engine without a layer's weights differs by more."""


class WrittenWeights(NamedTuple):
    """One weight version in a folder.

    Args:
        manifest: Its tensors, in the order of the file.
        digest: Digest of all tensors.
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
    """Brings weights to replicas, always in this sequence: pause, make room, transfer, verify, commit, make room,
    canary, resume. A replica takes over a version in one call, up to its canary if it has its own devices.

    A new version is served only when every receiver has acknowledged every tensor's digest, the engine's own check of
    its copies has passed, and the canary's logprobs agree with the policy's. A version can be sent until the policy
    steps. The weights of a drafter are sent after the policy's weights, before anything is served.

    Args:
        policy: Transfer of the policy's weights.
        canary: Check that both sides compute the same logprobs.
        residency: Residency of the devices that policy and replicas share; None if they share none.
        drafter: Transfer of the weights of a draft model or draft head that trains with the policy; None without one.
        sends_adapters: True if the adapters of the policy are sent as separate tensors: together with their base
            weights to replicas that do not have these yet, and without them in every later transfer.
        timeout_s: Timeout in seconds of each phase.
    """

    def __init__(
        self,
        policy: WeightTransfer,
        *,
        canary: Canary,
        residency: TenantResidency | None,
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
        self._served: list[tuple[Replica, int]] = []

    @property
    def version(self) -> int:
        """The last published version."""
        return self._version

    def publish(self) -> WeightUpdate:
        """Publish the policy's present weights as the next version."""
        self._version += 1
        return WeightUpdate(self._version, self._policy.model.revision)

    def state(self) -> Mapping[str, Any]:
        """Return the version of the weights in the same checkpoint, and the state of the canary."""
        return {"version": self._version, "canary": self.canary.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue so that the restored weights are published with their old version."""
        self._version = state["version"] - 1
        if "canary" in state:  # Checkpoints of 0.1.0 have none.
            self.canary.restore(state["canary"])

    def send(self, update: WeightUpdate, replicas: Sequence[Replica], *, in_flight: bool = False) -> None:
        """Bring the replicas to the published version, verified.

        Args:
            update: The last update that was published.
            replicas: The receivers.
            in_flight: Interrupt the requests of the replicas, which then continue with these weights.

        Raises:
            WeightSyncError: If the update is stale, or weights did not arrive, with their names. The replicas then
                serve nothing.
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
        """Write the complete published version into a folder that all nodes share, for engines that load it later.

        Args:
            update: The last update that was published.
            folder: Folder that is created or emptied. Its files are removed when weights are next sent or written.

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

    def _transfer(self, update: WeightUpdate, replicas: Sequence[Replica], *, in_flight: bool) -> None:
        takes_turns = self._residency is not None
        with self._policy.hold():
            # The policy scores before it sends, because the replicas may then need the same cores or memory.
            finish = self._start_canary()
            self._policy.leave("optimizer")
            form: WeightForm = "merged"
            if self._sends_adapters:
                form = "adapter" if started(replicas) == self._served else "factored"
            manifest = self._policy.manifest(form, update.version)
        if form != self._last_form:
            self._last_form = form
            sent = "the adapters alone" if form == "adapter" else "all weights and their adapters"
            _log.info("weight version %d: sending %s, %d bytes", update.version, sent, manifest.num_bytes)
        # After a failure everything is sent again.
        self._served = []
        rows = tuple(self.canary.rows)
        taken = self._policy.send(manifest, replicas, canary=rows, takes_turns=takes_turns, in_flight=in_flight)
        expected = finish()
        scores = [found.scores for found in taken]
        drafter = self._drafter
        # A draft head leaves the devices together with its policy.
        if drafter is None or drafter.tenant != self._policy.tenant:
            self._policy.leave("parameters")
        if drafter is not None:
            with drafter.hold():
                drafter.leave("optimizer")
                of_drafter = drafter.manifest("merged", update.version)
            drafter.send(of_drafter, replicas, takes_turns=takes_turns)
            drafter.leave("parameters")
        if self._residency:
            self._residency.hand_over(GENERATION)
            refs = [replica.call("score_canary", rows) for replica in replicas]
            scores = gather(refs, [each.origin("weight sync (score_canary)") for each in replicas], self._timeout_s)
        noise = max((found.quantisation_noise for found in taken), default=0.0)
        origins = [replica.origin("weight sync canary") for replica in replicas]
        self.canary.check(update.version, expected, origins, scores, quantisation_noise=noise)
        refs = [replica.generator("resume") for replica in replicas]
        gather(refs, [replica.origin("weight sync (resume)") for replica in replicas], self._timeout_s)
        self._served = started(replicas)

    def _start_canary(self) -> Callable[[], Ragged]:
        """Start to score the canary with the policy. The returned function waits for the logprobs."""
        finish = self._policy.model.start_infer(Batch({"tokens": self.canary.rows}), [LOGPROBS])
        return lambda: finish().ragged("logprobs")


class Canary:
    """Token rows whose logprobs the generators must agree on with the policy.

    Policy and engine compute with different kernels, so their logprobs differ. The difference is larger for a mixture
    of experts than for a dense model: a router that rounds differently sends a token to other experts. For the first
    version, both sides have loaded the weights from the same files, so its difference is only this noise. Later
    versions may differ by `FACTOR` times as much, or by the configured tolerance if it is larger, but no version by
    more than `CEILING` times the configured tolerance. Differences above the configured tolerance are logged.

    An engine that quantises its weights reports the change of its logits, relative to their spread. It estimates the
    change from the error that it measured on the weights of a sync (`rl_core.rollouts.delivery`). The tolerance
    grows by this estimate times the spread of the policy's logprobs, which equals the spread of its logits.

    Args:
        rows: Int32, fixed for the run.
        tolerance: Mean absolute difference of logprobs that is accepted of any version.
    """

    def __init__(self, rows: Ragged, tolerance: float) -> None:
        self.rows = rows
        self.tolerance = tolerance
        self._first: float | None = None
        self._largest = tolerance

    @classmethod
    def of(
        cls,
        vocabulary: int,
        *,
        precision: str,
        tolerance: float | None = None,
        prompts: Sequence[Sequence[int]] = (),
        num_rows: int = 2,
        length: int = 24,
        image_token: int | None = None,
    ) -> Canary:
        """Return a canary of the first tokens of the run's own prompts, which are as likely as the tokens of rollouts.
        If there are too few, it has random tokens: their logprobs are so low that rounding changes them more.

        Args:
            vocabulary: Number of token ids to draw from.
            precision: Precision of the policy, which determines the default tolerance.
            tolerance: Accepted mean difference of logprobs; None for the tolerance of the precision.
            prompts: Token ids of prompts of the run.
            num_rows: Number of random rows.
            length: Number of tokens of each random row.
            image_token: Id of the placeholder tokens of images. They are left out, because the rows have no images.
                The weights of the vision tower are compared when they arrive, like all other weights.
        """

        def without_images(row: np.ndarray) -> np.ndarray:
            return row if image_token is None else row[row != image_token]

        own = [np.asarray(prompt, dtype=np.int32) for prompt in prompts[:MAX_ROWS]]
        rows = [row for prompt in own if len(row := without_images(prompt)[:MAX_LENGTH])]
        if sum(map(len, rows)) < MIN_TOKENS:
            drawn = np.random.default_rng(0).integers(0, vocabulary, (num_rows, length), dtype=np.int32)
            rows = [without_images(row) for row in drawn]
        default = {"float32": 1e-3}.get(precision, 0.1)
        return cls(Ragged.from_rows(rows), default if tolerance is None else tolerance)

    @property
    def limit(self) -> float:
        """Mean absolute difference of logprobs above which a version is refused."""
        most = CEILING * self.tolerance
        return most if self._first is None else min(most, max(self.tolerance, FACTOR * self._first))

    def state(self) -> Mapping[str, Any]:
        """Return the difference of the first version, which also limits the differences of a resumed run."""
        return {"first": self._first}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Use the first version of the saved run."""
        self._first = state["first"]

    def check(
        self,
        version: int,
        expected: Ragged,
        origins: Sequence[FailureOrigin],
        scores: Sequence[Sequence[np.ndarray]],
        *,
        quantisation_noise: float = 0.0,
    ) -> None:
        """Compare logprobs of the rows.

        Args:
            version: Weight version that the engines serve.
            expected: Logprobs of the policy with this version.
            origins: Engines that scored the rows.
            scores: Their logprobs.
            quantisation_noise: Relative error of logits by the quantisation of weights; 0 without it.

        Raises:
            WeightSyncError: If an engine computes something else, with its origin.
        """

        def difference(rows: Sequence[np.ndarray]) -> float:
            # The row that differs most counts; NaN if one has a NaN.
            return float(np.max([np.abs(score - wanted).mean() for score, wanted in zip(rows, expected, strict=True)]))

        found = {origin: difference(rows) for origin, rows in zip(origins, scores, strict=True)}
        # The first token of a row has no logprob.
        quantised = quantisation_noise * float(np.concatenate([row[1:] for row in expected]).std())
        limit = self.limit + quantised
        if self._first is None:
            reason = f"{CEILING:g} times policy.generation.canary_tolerance"
        elif self.limit == self.tolerance:
            reason = "policy.generation.canary_tolerance"
        else:
            reason = f"the first version differed by {self._first:.3g}"
        further = f", and {quantised:.3g} for the measured error of quantised weights" if quantised else ""
        for origin, by in found.items():
            if not by <= limit:
                raise WeightSyncError(
                    f"{origin}: logprobs with weight version {version} differ from the policy's by {by:.3g} on "
                    f"average, more than {limit:.3g} ({reason}{further}); the engine does not compute the "
                    "same results as the policy. If it quantises the KV cache, increase "
                    "policy.generation.canary_tolerance",
                    origins=tuple(each for each, differs in found.items() if not differs <= limit),
                )
        largest = max(found.values(), default=0.0)
        if largest - quantised > self._largest:
            self._largest = largest - quantised
            _log.warning(
                "logprobs of the engine with weight version %d differ from the policy's by %.3g on average, more than "
                "policy.generation.canary_tolerance (%g); up to %.3g is accepted, as engines and trainers round "
                "differently, most of all in mixtures of experts. See mismatch/mean for what it does to training",
                version,
                largest,
                self.tolerance,
                limit,
            )
        if self._first is None and found:
            self._first = max(largest - quantised, 0.0)
