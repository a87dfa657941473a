"""A replica of vLLM's asynchronous engine."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_core.errors import GeneratorError, RequestRefused, WeightSyncError
from rl_core.model_config import GenerationConfig, ModelConfig
from rl_core.rollouts.delivery import QUANTISATION_NOISE, quantisation_noise
from rl_core.rollouts.generation import GenerationRequest, PauseMode, Placement
from rl_core.rollouts.lifecycle import PARTS, Lifecycle
from rl_core.rollouts.rollout import Completion, WeightSpan
from rl_core.tracing.profiling import ProfileOrder, ProfileReport
from rl_core.weights import Manifest, Transport, WeightTarget
from rl_vllm.config import VllmConfig
from rl_vllm.engine import process_env
from rl_vllm.plugin import adapter_problem, image_problem, routing_problem

if TYPE_CHECKING:
    from rl_vllm.engine.engine import Engine
    from rl_vllm.weights.file_weights import FileWeights

_log = logging.getLogger(__name__)


class VllmGenerator:
    """A `Generator` on vLLM: its engine in its own processes or, for one rank on CPU, in a thread of this one.

    Completions carry float32 logprobs after temperature, top-p and top-k. Only the request's stop tokens and strings
    end a completion; the model's own end of sequence counts if it is among them. Requests in flight finish or are
    interrupted before a pause takes hold, so that a completion has one weight version. Version 0 is the loaded weights;
    it is served unless weights are awaited. `score` is answered during a pause, for the canary of a weight sync.

    On CPU sleeping frees nothing, because vLLM cannot; it is accepted and still keeps requests waiting. A rehearsal
    needs the weights again as GPUs do.

    Several engines of one process (`Placement.num_engines`) run in separate processes, with equal shares of the
    memory.

    If `lora_sync` is `adapter`, weights may arrive without their adapters, which follow separately: the engine then
    applies the newest adapters to every request. It keeps the weights in sleep.

    Args:
        config: Neutral settings of generation.
        backend: Settings of vLLM.
        model: Model to load.
        placement: Device, GPUs and threads of this replica's ranks on its first node. On other nodes there is a
            `rl_vllm.follower.VllmFollower` for the ranks.
    """

    worker_extension = "rl_vllm.engine_worker.EngineWorker"

    def __init__(self, config: GenerationConfig, backend: VllmConfig, model: ModelConfig, placement: Placement) -> None:
        placement.claim(backend.num_ranks)
        self._config, self._backend, self._model = config, backend, model
        self._placement = placement
        self._max_len = backend.max_model_len or model.max_total_sequence_length
        self._engine: Engine | None = None
        self._lifecycle = Lifecycle()
        self._applies_adapters = config.lora_sync == "adapter"
        drops_weights = placement.awaits_weights and not self._applies_adapters
        has_drafter = backend.speculation is not None and backend.speculation.has_weights
        keeps_weights = placement.keeps_weights or has_drafter
        self._sleep_level = 1 if keeps_weights else backend.sleep_level or (2 if drops_weights else 1)
        self._num_completions = 0
        self._num_syncs = 0
        self._quantisation_noise: float | None = None

    @property
    def num_ranks(self) -> int:
        """Engine ranks of this replica, each a receiver in a weight transfer."""
        return self._backend.num_ranks

    async def start(self) -> None:
        """Load the engine.

        Raises:
            GeneratorError: With the reason, if it does not come up or does not support the settings.
        """
        self._check_settings()
        backend, placement = self._backend, self._placement
        eager = backend.is_eager(placement.kind)
        own_process = placement.num_engines > 1 or backend.has_own_process(placement.kind)
        process_env.apply(
            placement,
            eager=eager,
            num_ranks=self.num_ranks,
            own_process=own_process,
            environ=os.environ,
            quantises=backend.quantization is not None,
        )
        # vLLM reads the environment when it is imported.
        from rl_vllm.engine.arguments import engine_arguments, image_token_of, starts_empty
        from rl_vllm.engine.memory import memory_share

        if backend.reduced_precision:
            from rl_vllm.engine.quantisation_kernels import quantisation_problems

            if problems := quantisation_problems(backend.quantization, backend.kv_cache_dtype):
                raise GeneratorError("; ".join(f"vllm_cfg.{problem}" for problem in problems))
        # vLLM changes classes of transformers that it runs itself, so the files are read before.
        loaded = self._loaded_files(with_policy=not starts_empty(backend, placement))
        further = None
        if placement.meeting is not None:
            from rl_vllm.engine.nodes import FurtherNodes

            further = await asyncio.to_thread(FurtherNodes.accept, placement.meeting, placement.num_nodes)
        arguments = engine_arguments(
            backend,
            self._model,
            placement,
            max_len=self._max_len,
            eager=eager,
            extension=self.worker_extension,
            memory_share=memory_share(backend, self._model, placement),
            applies_adapters=self._applies_adapters,
            ports=None if further is None else further.ports,
        )
        if own_process:
            from rl_vllm.engine.process_engine import ProcessEngine

            self._engine = await ProcessEngine.start(arguments, further)
        else:
            from rl_vllm.engine.local_engine import LocalEngine

            self._engine = await LocalEngine.start(arguments, placement.cpu_threads)
        process_env.forget_semaphores()
        for target, weights in loaded.items():
            await self._compare_with_files(target, weights)
        if placement.keeps_cache:
            self._engine.require_prefix_cache()
        if self._model.vision.enabled:
            self._engine.take_images(image_token=image_token_of(self._model), max_images=self._model.vision.max_images)
        self._lifecycle.load(awaits_weights=self._placement.awaits_weights)

    def _check_settings(self) -> None:
        backend, device = self._backend, self._placement.kind
        found = {}
        if self._placement.reports_routing:
            found["the routing of experts is not reported"] = routing_problem(backend, device)
        if self._applies_adapters:
            found["adapters cannot be sent separately"] = adapter_problem(backend, self._model, device)
        if self._model.vision.enabled:
            found["the model cannot be served with images"] = image_problem(backend, self._model, device)
        for consequence, problem in found.items():
            if problem:
                raise GeneratorError(f"{consequence}: {problem}")
        if self._placement.num_engines > 1 and self._placement.num_nodes > 1:
            raise GeneratorError(
                "a replica with opponents or judges has several engines, which must be on one node: lower the parallel "
                "sizes of policy.generation.vllm_cfg, or increase the number of GPUs per node"
            )
        # Engines in threads of one process would share vLLM's global state.
        if self._placement.num_engines > 1 and backend.own_process is False:
            raise GeneratorError(
                "vllm_cfg.own_process=false: a replica with opponents has several engines, each in its own process. "
                "Remove this key"
            )

    def _loaded_files(self, *, with_policy: bool) -> dict[WeightTarget, FileWeights]:
        """Read the headers of the files that the engine loads, by the model that they are for."""
        from rl_vllm.weights.file_weights import FileWeights

        models: dict[WeightTarget, ModelConfig] = {"policy": self._model} if with_policy else {}
        speculation = self._backend.speculation
        if speculation is not None and speculation.method == "draft_model":
            models["drafter"] = ModelConfig(model_name=str(Path(speculation.model or "").expanduser()))
        found: dict[WeightTarget, FileWeights] = {}
        for target, model in models.items():
            try:
                found[target] = FileWeights.of(model, target=target)
            except Exception as error:  # noqa: BLE001 - vLLM may load files that transformers does not
                _log.warning("the weights in %s are not compared with those of vLLM: %s", model.model_name, error)
        return found

    async def _compare_with_files(self, target: WeightTarget, weights: FileWeights) -> None:
        """Compare the weights in files with the weights that the engine has loaded.

        Raises:
            GeneratorError: If the engine computes another model; it is closed then.
        """
        try:
            plans = await self._on_every_rank("compare_with_files", pickle.dumps(weights.manifest))
        except WeightSyncError as error:
            _log.warning("the weights in %s were not compared with those of vLLM: %s", weights.folder, error)
            return
        if problem := weights.problem(*_left_out(plans)):
            await self.close()
            raise GeneratorError(f"{weights.folder}: {problem}")

    async def generate(self, request: GenerationRequest) -> Completion:
        """Generate one completion; concurrent calls are batched by the engine.

        Raises:
            RequestRefused: If the prompt leaves no room for a completion, or the engine refuses the request.
            GeneratorError: If the engine died, or has no whole weights.
        """
        num_prompt_tokens = len(request.token_ids)
        room = self._max_len - num_prompt_tokens
        if num_prompt_tokens < 1 or room < 1:
            raise RequestRefused(
                f"a prompt of {num_prompt_tokens} tokens leaves no room for a completion; it may have 1 to "
                f"{self._max_len - 1}"
            )
        if self._backend.speculation is not None and request.sampling.min_p:
            raise RequestRefused("vLLM does not apply min_p to drafts (vllm_cfg.speculation); use top_p or top_k")
        max_tokens = min(request.sampling.max_new_tokens, room)
        async with self._lifecycle.request():
            version = self._lifecycle.version
            salt = self._salt(request.first_version)
            output = await self._running().generate(request, max_tokens=max_tokens, salt=salt)
        return self._completion(output, version, num_prompt_tokens)

    async def score(self, token_ids: np.ndarray, adapter: str | None = None) -> np.ndarray:
        """Return float32 `[tokens]`, logprobs of given tokens at temperature 1; index i belongs to token i, the first
        is 0.

        Args:
            token_ids: The tokens.
            adapter: As `GenerationRequest.adapter`.

        Raises:
            RequestRefused: For more tokens than the engine was set up for.
            GeneratorError: If the engine died, or has no whole weights.
        """
        if len(token_ids) > self._max_len:
            raise RequestRefused(f"got {len(token_ids)} tokens; max_model_len is {self._max_len}")
        scores = np.zeros(len(token_ids), dtype=np.float32)
        async with self._lifecycle.request(while_paused=True):
            if len(token_ids) > 1:
                scores[1:] = await self._running().score(token_ids, salt=self._salt(None), adapter=adapter)
        return scores

    async def pause(self, mode: PauseMode = "finish") -> None:
        """Stop once no request is in flight; later ones wait. With `interrupt` they end with the tokens they have."""
        await self._lifecycle.admission.pause(self._running().interrupt if mode == "interrupt" else None)

    async def resume(self) -> None:
        """Serve again, once awake."""
        self._lifecycle.admission.resume()

    async def sleep(self) -> bool:
        """Free the device, after requests in flight are done; later ones wait until both parts are awake.

        Frees nothing on CPU. Returns whether the weights are kept; if not, they must be sent again.

        Raises:
            GeneratorError: If the replica was placed on GPUs for itself, whose engine cannot sleep.
        """
        await self._lifecycle.admission.hold()
        if not self._placement.kind.has_gpus:
            self._lifecycle.sleep()
            return True
        if not self._placement.shares_devices:
            raise GeneratorError("a replica that does not share its GPUs cannot sleep (Placement.shares_devices)")
        # The KV cache may sleep already, after a weight sync that broke off.
        if "weights" not in self._lifecycle.asleep:
            await self._running().forget_images()
            await self._running().sleep(self._sleep_level)
            self._lifecycle.sleep()
        if self._sleep_level == 1:
            return True
        self._lifecycle.drop_weights()
        return False

    async def wake(self, parts: Sequence[str] = PARTS) -> None:
        """Take device memory for these parts again; a woken KV cache is empty."""
        unknown = set(parts) - set(PARTS)
        if unknown:
            raise ValueError(f"parts to wake are {', '.join(PARTS)}; got {', '.join(sorted(unknown))}")
        woken = [part for part in PARTS if part in parts and part in self._lifecycle.asleep]
        if woken and self._placement.kind.has_gpus:
            await self._running().wake(woken)
        if "kv_cache" in woken:
            await self._running().forget_prefixes()
        self._lifecycle.wake(woken)

    async def begin(self, manifest: Manifest) -> None:
        """Prepare for these weights; nothing is served from here until a `commit` succeeds.

        Raises:
            WeightSyncError: If the engine does not know tensors, or its parameters need others, with their names; or if
                adapters are announced without weights that it does not have.
            GeneratorError: If requests are in flight; pause first.
        """
        self._lifecycle.begin(manifest)
        quantization = self._backend.quantization
        uses_oracle = quantization is not None and self._num_syncs % quantization.oracle_every == 0
        plans = await self._on_every_rank(
            "begin_receiving", pickle.dumps((manifest, self._model.lora_cfg)), uses_oracle
        )
        unknown, missing = _left_out(plans)
        if unknown or missing:
            reasons = [f"{name} ({reason})" for name, reason in unknown.items()]
            problems = {"unknown to the engine": reasons, "missing": missing}
            text = "; ".join(f"{problem}: {', '.join(names)}" for problem, names in problems.items() if names)
            raise WeightSyncError(
                f"the manifest of version {manifest.version} does not fit: {text}", (*unknown, *missing)
            )
        self._lifecycle.receive(manifest)

    async def receive(self, transport: Transport, first_rank: int) -> Sequence[str]:
        """Receive all tensors as receivers `first_rank`, `first_rank + 1`, ...; return their digest per engine rank.

        Raises:
            WeightSyncError: If the transfer fails, with rank and phase, or with tensors.
            GeneratorError: If the weights are asleep.
        """
        if "weights" in self._lifecycle.asleep:
            raise GeneratorError("the weights are asleep: wake them before a transfer")
        order = pickle.dumps((transport, self._placement.kind))
        return await self._on_every_rank("receive_weights", order, first_rank)

    async def commit(self, version: int) -> None:
        """Check that every layer computes with the received tensors, empty the prefix cache unless it is to be kept,
        then serve this version.

        Raises:
            WeightSyncError: If tensors are stale, with their names; nothing is served then until a transfer succeeds.
        """
        manifest = self._lifecycle.announced(version)
        if self._backend.quantization is not None:
            errors = await self._on_every_rank("quantisation_error")
            num_layers, squares = sum(count for count, _ in errors), [found for _, found in errors if found is not None]
            if not num_layers:
                raise WeightSyncError(
                    "vllm_cfg.quantization is set, but no linear layer of this model is quantised: its names match "
                    "ignored_layers, or vLLM does not quantise this family's layers. Remove vllm_cfg.quantization"
                )
            if squares:
                # Tensor-parallel ranks have parts of the same layers, and parallel engines copies.
                backend = self._backend
                num_matrices = num_layers // (backend.tensor_parallel_size * backend.data_parallel_size)
                self._quantisation_noise = quantisation_noise((sum(squares) / num_layers) ** 0.5, num_matrices)
        stale = await self._on_every_rank("check_received")
        names = tuple(dict.fromkeys(name for found in stale for name in found))
        if names:
            raise WeightSyncError(
                f"weight version {version}: the engine does not compute with {', '.join(names)}", names
            )
        if not self._placement.keeps_cache:
            await self._running().forget_prefixes()
        await self._running().forget_images()
        self._running().use_adapter(version if manifest.num_factors else None)
        self._lifecycle.commit(version)
        self._num_syncs += 1

    async def start_profile(self, order: ProfileOrder) -> ProfileReport:
        """Begin to record every rank of the engine, in the process and thread that compute.

        vLLM's own `start_profile` is not used: it needs `profiler_config` at the start of the engine and writes only
        files of torch, under other names.
        """
        return _joined(await self._on_every_rank("start_recording", pickle.dumps(order), self.num_ranks))

    async def stop_profile(self) -> ProfileReport:
        """End the recording, and write its files."""
        return _joined(await self._on_every_rank("stop_recording"))

    async def health(self) -> Mapping[str, Any]:
        """Return numbers worth logging. An engine that has requests and samples nothing hangs. Raises `GeneratorError`
        if it is dead.
        """
        await self._running().check()
        load = self._running().load if self._placement.reports_load else {}
        speculation = self._backend.speculation
        return {
            "weight_version": self._lifecycle.version,
            "num_requests": self._lifecycle.admission.num_inside,
            "num_completions": self._num_completions,
            "num_sampled": self._running().num_sampled,
            **load,
            # Requests wait to be let in, as during a pause, and in the engine's queue.
            "num_waiting": self._lifecycle.admission.num_waiting + load.get("num_waiting", 0),
            **({} if self._quantisation_noise is None else {QUANTISATION_NOISE: self._quantisation_noise}),
            **({} if speculation is None else self._running().speculation(speculation.min_tokens_per_step).as_health()),
        }

    async def close(self) -> None:
        """End the engine and all its processes; requests in flight or waiting end with `GeneratorError`."""
        engine, self._engine = self._engine, None
        self._lifecycle.close()
        if engine is not None:
            await engine.end()

    def _completion(self, output: Any, version: int, num_prompt_tokens: int) -> Completion:
        if output.finish_reason not in ("stop", "length", "abort"):
            raise GeneratorError(f"the engine ended a request with {output.finish_reason!r}")
        tokens = np.array(output.token_ids, dtype=np.int32)
        self._num_completions += 1
        routed_experts = None
        if self._placement.reports_routing and len(tokens):
            # int16 `[computed, layers, experts per token]` of all tokens except the last one sampled, or of fewer if
            # the request was interrupted.
            routed, num_computed = output.routed_experts, num_prompt_tokens + len(tokens) - 1
            num_reported = 0 if routed is None else len(routed)
            if output.finish_reason != "abort" and num_reported < num_computed:
                raise GeneratorError(f"the engine reported the routing of {num_reported} of {num_computed} tokens")
            routed_experts = None if routed is None else np.asarray(routed[:num_computed]).astype(np.int16)
        return Completion(
            token_ids=tokens,
            logprobs=np.array(output.logprobs.logprobs, dtype=np.float32),
            stop_reason=output.finish_reason,
            spans=(WeightSpan(version, len(tokens)),) if len(tokens) else (),
            routed_experts=routed_experts,
        )

    def _salt(self, first_version: int | None) -> str | None:
        """Return the salt of a request's keys and values in the prefix cache; None unless it has several versions."""
        if not self._placement.keeps_cache:
            return None
        return f"weight version {self._lifecycle.version if first_version is None else first_version}"

    async def _on_every_rank(self, method: str, *args: Any) -> list[Any]:
        reports = await self._running().call(method, *args)
        failed = [report for report in reports if "error" in report]
        if failed:
            names = tuple(dict.fromkeys(name for report in failed for name in report["tensors"]))
            raise WeightSyncError("; ".join(report["error"] for report in failed), names)
        return [report["value"] for report in reports]

    def _running(self) -> Engine:
        if self._engine is None:
            raise GeneratorError(self._lifecycle.admission.refusal or "the engine has not been started")
        return self._engine


def _left_out(plans: Sequence[Mapping[str, Any]]) -> tuple[dict[str, str], list[str]]:
    """Return the tensors that no rank takes, to the reason, and the tensors that parameters of some rank need. With
    pipeline parallelism each rank knows only its own layers."""
    first = plans[0]["unknown"]
    unknown = {name: reason for name, reason in first.items() if all(name in plan["unknown"] for plan in plans)}
    return unknown, list(dict.fromkeys(name for plan in plans for name in plan["missing"]))


def _joined(ranks: Sequence[tuple[Sequence[str], Sequence[str]]]) -> ProfileReport:
    """Return the report of all ranks, from the files and the problems of each."""
    return ProfileReport.joined([ProfileReport(tuple(files), tuple(problems)) for files, problems in ranks])
