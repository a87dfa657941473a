"""A small server with the protocols of vLLM's and SGLang's, whose answers are computed by plain forward passes.

`python -m rl_core.testing.torch.engine_server PROTOCOL FOLDER PORT` serves a model's folder until it is killed.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aiohttp import web
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

Twist = Callable[[str, dict[str, Any]], Any]
"""From a path and the answer of an honest server to the answer that is sent: JSON, or a whole response."""


class ScriptedEngineServer:
    """A server in a thread of this process, which may be made to lie.

    Args:
        protocol: `vllm` or `sglang`.
        folder: Folder of the model that it starts with.
        port: Port on loopback; 0 for a free one.

    Attributes:
        version: Weight version that it reports.
        twist: Changes its answers; None for an honest server.
        headers: Headers of the last request.
        num_requests: Number of requests so far.
        eos_token_id: Token at which the model's own completions end.
        settings: Settings that it reports about its start, in addition to the honest settings.
    """

    def __init__(self, protocol: str, folder: Path, port: int = 0) -> None:
        self._protocol, self._port, self.first = protocol, port, folder
        self.twist: Twist | None = None
        self.headers: Mapping[str, str] = {}
        self.settings: dict[str, Any] = {}
        self.num_requests = self.num_sampled = 0
        self._aborted: set[str] = set()
        self.eos_token_id: int = -1
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self.restart()
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._ready.wait()

    def restart(self) -> None:
        """Be as a server that was started again: with the weights of its files and without the run's version."""
        self.version = "default"
        self._take(self.first)

    def _take(self, folder: Path) -> None:
        tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
        missing = self.model.load_state_dict(tensors, strict=False).missing_keys
        if not tensors or set(missing) - {"lm_head.weight"}:
            raise OSError(f"{folder} has no whole model")
        self.model.tie_weights()

    def close(self) -> None:
        """End the thread and its connections."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        application = web.Application(client_max_size=2**26)
        application.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", self._port)
        self._loop.run_until_complete(site.start())
        server: Any = site._server
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.headers, self.num_requests = dict(request.headers), self.num_requests + 1
        body = await request.json() if request.can_read_body else {}
        answers: Mapping[str, Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]]
        answers = self._vllm if self._protocol == "vllm" else self._sglang
        if request.path not in answers:
            return web.json_response({"error": "not found"}, status=404)
        try:
            answer = await answers[request.path](body)
        except OSError as error:
            return web.json_response({"error": str(error)}, status=500)
        found = answer if self.twist is None else self.twist(request.path, answer)
        if isinstance(found, Exception):
            # The connection ends without an answer, as when a process is killed.
            assert request.transport is not None
            request.transport.close()
        return found if isinstance(found, web.StreamResponse) else web.json_response(found)

    async def _sample(self, name: str, tokens: list[int], params: Mapping[str, Any]) -> tuple[list[Any], str]:
        """Return pairs of a token and its logprob, and the reason of the end."""
        most = params.get("max_tokens", params.get("max_new_tokens"))
        draws = np.random.default_rng(params.get("seed", params.get("sampling_seed", 0)))
        found: list[tuple[int, float]] = []
        for _ in range(most):
            await asyncio.sleep(0)
            if name in self._aborted:
                return found, "abort"
            row = tokens + [token for token, _ in found]
            logprobs = self._logprobs(row, params["temperature"] or 1.0)[-1]
            gumbel = draws.gumbel(size=len(logprobs)) if params["temperature"] else 0.0
            token = int(np.argmax(logprobs + gumbel))
            found.append((token, float(logprobs[token])))
            self.num_sampled += 1
            ends = () if params.get("ignore_eos") and self._protocol == "sglang" else params.get("stop_token_ids", ())
            if token in ends or (not params.get("ignore_eos") and token == self.eos_token_id):
                return found, "stop"
        return found, "length"

    def _logprobs(self, row: list[int], temperature: float) -> np.ndarray:
        with torch.no_grad():
            logits = self.model(torch.tensor([row])).logits[0].double() / temperature
        return torch.log_softmax(logits, -1).numpy()

    def _scores(self, row: list[int]) -> list[float]:
        logprobs = self._logprobs(row, 1.0)
        return [float(logprobs[place, token]) for place, token in enumerate(row[1:])]

    async def _nothing(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"success": True}

    async def _info(self, body: dict[str, Any]) -> dict[str, Any]:
        model = {"logprobs_mode": "processed_logprobs", "dtype": "torch.float32", "max_model_len": 4096}
        flat = {"dtype": "float32", "context_length": 4096, "enable_deterministic_inference": True}
        device = {"device_type": self.settings.get("device_type", "cuda")}
        whole = {"model_config": {**model, **self.settings}, "device_config": device}
        return {"vllm_config": whole, **flat, **self.settings}

    async def _report(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"weight_version": self.version}

    async def _load(self, body: dict[str, Any]) -> dict[str, Any]:
        self._take(Path(body["model_path"] if "model_path" in body else body["kwargs"]["weights_path"]))
        self.version = body.get("weight_version", self.version)
        return {"success": True, "results": [None]}

    async def _name(self, body: dict[str, Any]) -> dict[str, Any]:
        self.version = body["new_version"]
        return {"success": True}

    async def _abort(self, body: dict[str, Any]) -> dict[str, Any]:
        named = body.get("request_ids", [body.get("rid")])
        self._aborted |= {str(name).removeprefix("generate-tokens-") for name in named}
        return {}

    async def _vllm_generate(self, body: dict[str, Any]) -> dict[str, Any]:
        tokens, params = body["token_ids"], body["sampling_params"]
        found, reason = await self._sample(body.get("request_id", ""), tokens, params)
        prompt = None
        if "prompt_logprobs" in params:
            scores = zip(tokens[1:], self._scores(tokens), strict=True)
            prompt = [None, *({str(token): {"logprob": score}} for token, score in scores)]
        choice = {
            "finish_reason": reason,
            "token_ids": [token for token, _ in found],
            "logprobs": {"content": [{"token_id": token, "logprob": logprob} for token, logprob in found]},
            "weight_versions": [{"version": self.version, "start": 0, "end": len(found)}],
        }
        return {"choices": [choice], "prompt_logprobs": prompt}

    async def _sglang_generate(self, body: dict[str, Any]) -> dict[str, Any]:
        tokens = body["input_ids"]
        found, reason = await self._sample(body.get("rid", ""), tokens, body["sampling_params"])
        scores = [None, *self._scores(tokens)] if body.get("logprob_start_len") == 0 else []
        meta = {
            "finish_reason": {"type": reason, **({"matched": found[-1][0]} if reason == "stop" else {})},
            "output_token_logprobs": [[logprob, token, None] for token, logprob in found],
            "input_token_logprobs": [[score, tokens[place], None] for place, score in enumerate(scores)],
            "weight_versions": [{"version": self.version, "start": 0, "end": len(found)}],
        }
        return {"output_ids": [token for token, _ in found], "meta_info": meta}

    @property
    def _vllm(self) -> dict[str, Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]]:
        quiet = ("/pause", "/resume", "/reset_prefix_cache", "/health", "/metrics")
        return {
            **dict.fromkeys(quiet, self._nothing),
            "/server_info": self._info,
            "/inference/v1/generate": self._vllm_generate,
            "/collective_rpc": self._load,
            "/update_weight_version": self._name,
            "/weight_info": self._report,
            "/abort_requests": self._abort,
        }

    @property
    def _sglang(self) -> dict[str, Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]]:
        return {
            "/health": self._nothing,
            "/server_info": self._info,
            "/model_info": self._report,
            "/generate": self._sglang_generate,
            "/update_weights_from_disk": self._load,
            "/abort_request": self._abort,
        }


if __name__ == "__main__":
    ScriptedEngineServer(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
    threading.Event().wait()
