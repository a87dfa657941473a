"""A replica of the generation that is a server elsewhere."""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np

from rl_algos.servers.config import ServerConfig
from rl_algos.servers.engines import server_of
from rl_core.devices import device_named
from rl_core.errors import ConfigError, GeneratorError, RequestRefused, WeightSyncError
from rl_core.model_config import GenerationConfig, ModelConfig, local_hf_config
from rl_core.rollouts.generation import GenerationRequest, PauseMode, Placement, refuse_adapter
from rl_core.rollouts.lifecycle import PARTS, Lifecycle
from rl_core.rollouts.rollout import Completion, StopReason, WeightSpan
from rl_core.torch.files.model_files import model_folder
from rl_core.torch.transport import ReceivingEnd, version_folder
from rl_core.tracing.profiling import ProfileOrder, ProfileReport
from rl_core.weights import Manifest, Transport

LOAD_TIMEOUT_S = 600.0
"""Timeout in seconds of the load of weights by a server, unless a transfer has its own."""


class ServerGenerator:
    """A `Generator` that calls one server. Weights reach it as files, which are compared with the policy's digests here
    before the server is told to load them.

    Every completion shows the weight version that sampled it. A server that fails, was restarted or answers nonsense is
    not called again: every later call raises `GeneratorError`, and the run replaces this object, which loads the
    weights anew.

    Args:
        config: Neutral settings of generation.
        backend: The servers.
        model: Model that they serve.
        placement: Part of the run; `replica` is the position of the server among the addresses.

    Raises:
        ConfigError: If the replica has further engines.
    """

    num_ranks = 1

    def __init__(
        self, config: GenerationConfig, backend: ServerConfig, model: ModelConfig, placement: Placement
    ) -> None:
        if placement.num_engines > 1:
            raise ConfigError(
                "policy.generation.backend=server: opponents and judges need engines of the run next to the policy's. "
                "Set backend to vllm or hf"
            )
        self._model, self._awaits_weights = model, placement.awaits_weights
        self._folder = Path(model.model_name)
        self._backend, self._place = backend, placement.replica
        self._receiving = ReceivingEnd(device_named("cpu"))
        self._lifecycle = Lifecycle()
        self._failure = ""
        self._mark = secrets.token_hex(4)
        self._version = ""
        self._load_timeout_s = LOAD_TIMEOUT_S
        self._interruptible: set[str] = set()
        self._num_sampled = 0

    async def start(self) -> None:
        """Compare the server's settings with the run's, and load the model's files unless weights are awaited.

        Raises:
            GeneratorError: If the server does not answer, or cannot serve this run.
        """
        self._folder = await asyncio.to_thread(model_folder, self._model.model_name)
        fields = local_hf_config(self._model.model_copy(update={"model_name": str(self._folder)}))
        self._vocab_size = int(fields["vocab_size"])
        self._server = server_of(self._backend, self._place, self._model, self._vocab_size)
        async with self._called():
            await self._server.check()
            if not self._awaits_weights:
                await self._load(0)
        self._lifecycle.load(awaits_weights=self._awaits_weights)

    async def generate(self, request: GenerationRequest) -> Completion:
        """Return one completion.

        Raises:
            RequestRefused: If the prompt leaves no room, or the server refuses the request.
            GeneratorError: If the server is lost or has no whole weights.
        """
        room = self._model.max_total_sequence_length - len(request.token_ids)
        if not len(request.token_ids) or room < 1:
            raise RequestRefused(f"a prompt of {len(request.token_ids)} tokens leaves no room for a completion")
        if request.token_ids.min() < 0 or request.token_ids.max() >= self._vocab_size:
            raise RequestRefused(f"token ids of a request must be between 0 and {self._vocab_size - 1}")
        refuse_adapter(request)
        if request.images:
            raise RequestRefused("servers (policy.generation.backend=server) are sent no images")
        max_tokens, name = min(request.sampling.max_new_tokens, room), uuid.uuid4().hex
        async with self._lifecycle.request(), self._called():
            # Servers continue neither a grammar nor the search for a stop string in another request.
            if not (request.sampling.grammar or request.sampling.stop_strings):
                self._interruptible.add(name)
            try:
                found = await self._server.generate(name, request, max_tokens)
            finally:
                self._interruptible.discard(name)
            self._server.verify(request, max_tokens, found, version=self._version)
            version = self._lifecycle.version
        self._num_sampled += len(found.token_ids)
        tokens = np.array(found.token_ids, dtype=np.int32)
        spans = (WeightSpan(version, len(tokens)),) if len(tokens) else ()
        return Completion(
            tokens, np.array(found.logprobs, dtype=np.float32), cast("StopReason", found.stop_reason), spans
        )

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        """Return float32 `[tokens]`, logprobs at temperature 1, the first 0. Raises as `generate`."""
        if len(token_ids) > self._model.max_total_sequence_length:
            raise RequestRefused(f"got {len(token_ids)} tokens, more than policy.max_total_sequence_length")
        scores = np.zeros(len(token_ids), dtype=np.float32)
        async with self._lifecycle.request(while_paused=True), self._called():
            if len(token_ids) > 1:
                scores[1:] = await self._server.score(token_ids.tolist())
        return scores

    async def pause(self, mode: PauseMode = "finish") -> None:
        """Stop once no request is in flight; later ones wait. With `interrupt` they end with the tokens they have."""
        await self._lifecycle.admission.pause(self._interrupt if mode == "interrupt" else None)

    async def _interrupt(self) -> None:
        if names := sorted(self._interruptible):
            async with self._called():
                await self._server.interrupt(names)

    async def resume(self) -> None:
        """Serve again."""
        self._lifecycle.admission.resume()

    async def sleep(self) -> bool:
        """Keep requests waiting; the server keeps its weights, because it has its own devices."""
        await self._lifecycle.admission.hold()
        self._lifecycle.sleep()
        return True

    async def wake(self, parts: Sequence[str] = PARTS) -> None:
        """Let requests in again, once both parts are awake."""
        self._lifecycle.wake([part for part in PARTS if part in parts])

    async def begin(self, manifest: Manifest) -> None:
        """Prepare for these weights; nothing is served from here until a `commit` succeeds.

        Raises:
            WeightSyncError: If they are adapters, which are not sent to servers.
            GeneratorError: If requests are in flight; pause first.
        """
        self._lifecycle.begin(manifest)
        if manifest.form != "merged":
            raise WeightSyncError("servers are sent whole weights only (policy.generation.lora_sync=merged)")
        self._lifecycle.receive(manifest)

    async def receive(self, transport: Transport, first_rank: int) -> Sequence[str]:
        """Read the files that the policy wrote; return the digest of all tensors.

        Raises:
            WeightSyncError: If files are missing, or tensors differ from the policy's.
        """
        manifest = self._lifecycle.state.manifest
        if manifest is None or transport.kind != "disk":
            raise WeightSyncError(f"a server has its weights from files that were announced, not by {transport.kind}")

        def read() -> str:
            with self._receiving.transfer(manifest, transport, first_rank) as receiver:
                for _ in receiver:
                    pass
            return receiver.digest

        digest = await asyncio.to_thread(read)
        self._folder, self._load_timeout_s = version_folder(manifest, transport), transport.timeout_s
        return [digest]

    async def commit(self, version: int) -> None:
        """Make the server compute with the received weights, and serve this version.

        Raises:
            GeneratorError: If the server does not load them, or reports another version afterwards.
        """
        self._lifecycle.announced(version)
        async with self._called():
            await self._load(version)
        self._lifecycle.commit(version)

    async def _load(self, version: int) -> None:
        server, name = self._server, f"{self._mark}-{version}"
        try:
            async with asyncio.timeout(self._load_timeout_s):
                await server.load(str(self._folder.resolve()), name, self._load_timeout_s)
        except TimeoutError:
            raise GeneratorError(f"{server} did not load {self._folder} within {self._load_timeout_s:g} s") from None
        except GeneratorError as error:
            raise GeneratorError(f"{error}; it was loading {self._folder}, which it must reach by this path") from None
        if (found := await server.version()) != name:
            raise GeneratorError(f"{server} reports weight version {found[:100]} after {name} was loaded")
        self._version = name

    async def start_profile(self, order: ProfileOrder) -> ProfileReport:
        """Record nothing, and report so: the server is not a process of this run."""
        return ProfileReport((), (f"{self._server} is not a process of this run, and was not recorded",))

    async def stop_profile(self) -> ProfileReport:
        """Return an empty report."""
        return ProfileReport()

    async def health(self) -> Mapping[str, Any]:
        """Return numbers worth logging. Raises `GeneratorError` if the server is lost."""
        async with self._called():
            sampled = await self._server.num_sampled()
        return {
            "weight_version": self._lifecycle.version,
            "num_requests": self._lifecycle.admission.num_inside,
            "num_running": self._lifecycle.admission.num_inside,
            "num_waiting": self._lifecycle.admission.num_waiting,
            "num_sampled": self._num_sampled if sampled is None else sampled,
        }

    async def close(self) -> None:
        """Close the connections; requests in flight or waiting end with `GeneratorError`. The server continues."""
        self._failure = self._failure or "the generator is closed"
        self._lifecycle.close()
        self._receiving.close()
        if hasattr(self, "_server"):
            await self._server.server.close()

    @asynccontextmanager
    async def _called(self) -> AsyncIterator[None]:
        """Call the server in the block, unless it is lost; it is lost after any error but a refused request."""
        if self._failure:
            raise GeneratorError(self._failure)
        try:
            yield
        except RequestRefused:
            raise
        except GeneratorError as error:
            self._failure = str(error)
            self._lifecycle.admission.close(self._failure)
            raise
