"""vLLM's HTTP server (0.32 or newer): tokens in and out, and the endpoints of its development mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from rl_algos.servers.engine_server import ANSWER_S, EngineServer, SampledTokens, whole_numbers
from rl_core.errors import GeneratorError
from rl_core.rollouts.generation import GenerationRequest

GENERATE = "/inference/v1/generate"

PREFIX = "generate-tokens-"
"""Beginning of the ids that vLLM gives to requests."""


class VllmServer(EngineServer):
    """A server that was started by `vllm serve`."""

    how_to_start: ClassVar[str] = (
        "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --logprobs-mode processed_logprobs"
    )

    async def check(self) -> None:
        """See `EngineServer`."""
        reported = (await self.asked("GET", "/server_info?config_format=json")).get("vllm_config")
        found = reported if isinstance(reported, dict) else {}
        model, device = found.get("model_config"), found.get("device_config")
        if not isinstance(model, dict):
            raise GeneratorError(f"{self} does not report its settings. Start it with {self.how_to_start}")
        longest, precision = self._model.max_total_sequence_length, self._model.precision
        wanted = {
            "logprobs_mode": ("processed_logprobs", "--logprobs-mode processed_logprobs"),
            "dtype": (f"torch.{precision}", f"--dtype {precision}"),
            "quantization": (None, "a model whose weights are not quantised"),
        }
        for name, (value, argument) in wanted.items():
            if (has := model.get(name)) != value:
                raise GeneratorError(f"{self} has {name}={str(has)[:100]}, but the run needs {value}: use {argument}")
        room = model.get("max_model_len")
        if type(room) is not int or room < longest:
            raise GeneratorError(
                f"{self} has max_model_len={str(room)[:100]}, but policy.max_total_sequence_length is {longest}: use "
                f"--max-model-len {longest}"
            )
        if isinstance(device, dict) and device.get("device_type") == "cpu" and self._has_tied_head:
            raise GeneratorError(
                f"{self} runs on a CPU, where vLLM computes a head that is tied to the embedding with a copy that has "
                "the old values after a load. Use a GPU, a model with its own head, or backend=vllm"
            )
        body = {"token_ids": [0], "sampling_params": {"max_tokens": 1, "temperature": 0.0, "detokenize": False}}
        await self.requested(GENERATE, body, timeout_s=ANSWER_S)

    async def load(self, folder: str, version: str, timeout_s: float) -> None:
        """See `EngineServer`. Requests of others finish first."""
        await self._do("/pause?mode=wait")
        order = {"method": "reload_weights", "kwargs": {"weights_path": folder}, "timeout": timeout_s}
        await self._do("/collective_rpc", order)
        if (await self.asked("POST", "/reset_prefix_cache", {})).get("success") is not True:
            raise GeneratorError(f"{self} kept the keys and values of old weights")
        await self._do("/update_weight_version", {"new_version": version})
        await self._do("/resume")

    async def _do(self, path: str, body: dict[str, Any] | None = None) -> None:
        answer = await self.ask("POST", path, body or {}, timeout_s=None)
        if answer.status != 200:
            self.object_of(answer, path)

    async def version(self) -> str:
        """See `EngineServer`."""
        return str((await self.asked("GET", "/weight_info")).get("weight_version"))

    async def generate(self, name: str, request: GenerationRequest, max_tokens: int) -> SampledTokens:
        """See `EngineServer`."""
        sampling = request.sampling
        params = {
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "stop_token_ids": list(sampling.stop_token_ids),
            "stop": list(sampling.stop_strings),
            # A stop string may be the text of a special token.
            "skip_special_tokens": False,
            "ignore_eos": True,
            "detokenize": bool(sampling.stop_strings),
            "seed": request.draw_seed,
            "logprobs": 0,
        }
        if sampling.grammar:
            params["structured_outputs"] = {"structural_tag": sampling.grammar}
        body = {"request_id": name, "token_ids": request.token_ids.tolist(), "sampling_params": params}
        answer = await self.requested(GENERATE, body)
        try:
            choice = answer["choices"][0]
            tokens = whole_numbers(choice["token_ids"])
            content = choice["logprobs"]["content"] if choice["logprobs"] is not None else []
            if tokens != [entry["token_id"] for entry in content]:
                raise ValueError
            versions = frozenset(str(span["version"]) for span in choice["weight_versions"] or ())
            logprobs = [float(entry["logprob"]) for entry in content]
            return SampledTokens(tokens, logprobs, str(choice["finish_reason"]), versions)
        except (ArithmeticError, LookupError, TypeError, ValueError):
            raise GeneratorError(f"{self} sent an answer of {GENERATE} that is not a completion") from None

    async def score(self, token_ids: Sequence[int]) -> Sequence[float]:
        """See `EngineServer`."""
        params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "ignore_eos": True, "detokenize": False}
        answer = await self.requested(GENERATE, {"token_ids": list(token_ids), "sampling_params": params})
        try:
            entries = answer["prompt_logprobs"][1:]
            return [float(entry[str(token)]["logprob"]) for entry, token in zip(entries, token_ids[1:], strict=True)]
        except (ArithmeticError, LookupError, TypeError, ValueError):
            raise GeneratorError(f"{self} sent an answer of {GENERATE} without the logprobs of a prompt") from None

    async def interrupt(self, names: Sequence[str]) -> None:
        """See `EngineServer`."""
        await self._do("/abort_requests", {"request_ids": [f"{PREFIX}{name}" for name in names]})

    async def num_sampled(self) -> int | None:
        """See `EngineServer`."""
        answer = await self.ask("GET", "/health")
        if answer.status != 200:
            raise GeneratorError(f"{self} reports that its engine is dead (HTTP {answer.status} at /health)")
        metrics = (await self.ask("GET", "/metrics")).body.decode("utf-8", "replace")
        counts = [
            line.rpartition(" ")[2] for line in metrics.splitlines() if line.startswith("vllm:generation_tokens_total")
        ]
        try:
            return sum(int(float(count)) for count in counts) if counts else None
        except (ValueError, OverflowError):
            return None
