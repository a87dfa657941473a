"""HTTP servers of vLLM and SGLang as generators, beside `transformers`."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
from safetensors.torch import load_file

from gpu_check.generator import EXACT, PROMPTS, random_prompts
from gpu_check.generator_process import complete
from gpu_check.oracle import PlainModel
from gpu_check.report import Report
from gpu_check.setup import Setup
from gpu_check.workers import config_of
from rl_algos.servers.config import ServerConfig
from rl_algos.torch.server_generator import ServerGenerator
from rl_core.devices import CPU
from rl_core.model_config import GenerationConfig
from rl_core.rollouts.generation import GenerationRequest, Placement, SamplingParams
from rl_core.selfcheck.rank_pool import free_port
from rl_core.torch.transport import open_sender
from rl_core.weights import Manifest, TensorSpec, Transport

LENGTH = 256
START_S = 500.0
"""Seconds that a server may take to start."""

COMMANDS = {
    "vllm": (
        *("vllm.entrypoints.openai.api_server", "--model", "{folder}", "--max-model-len", str(LENGTH)),
        *("--dtype", "float32", "--enforce-eager", "--enable-scale-out", "--logprobs-mode", "processed_logprobs"),
        *("--gpu-memory-utilization", "0.3"),
    ),
    "sglang": (
        *("sglang.launch_server", "--model-path", "{folder}", "--context-length", str(LENGTH)),
        *("--dtype", "float32", "--enable-deterministic-inference", "--mem-fraction-static", "0.3"),
    ),
}
"""Module and arguments of each engine's server."""


def check(setup: Setup, report: Report) -> None:
    """Serve two versions of weights on the server of each installed engine: scores, samples, interruption."""
    for engine in COMMANDS:
        if importlib.util.find_spec(engine) is None:
            report.skip(engine, f"{engine} is not installed")
            continue
        with report.attempt(engine):
            asyncio.run(_check(engine, setup, report))


@asynccontextmanager
async def _server(engine: str, folder: Path) -> AsyncIterator[str]:
    """Yield the address of a server that has been started."""
    port = free_port()
    arguments = [each.format(folder=folder) for each in COMMANDS[engine]]
    command = [sys.executable, "-m", *arguments, "--host", "127.0.0.1", "--port", str(port)]
    variables = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with tempfile.TemporaryFile() as log, subprocess.Popen(command, env=variables, stdout=log, stderr=log) as server:
        try:
            end = time.monotonic() + START_S
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except OSError:
                    if server.poll() is not None or time.monotonic() > end:
                        log.seek(0)
                        raise RuntimeError(log.read()[-2000:].decode("utf-8", "replace")) from None
                    await asyncio.sleep(0.5)
                    continue
                writer.close()
                break
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


async def _check(engine: str, setup: Setup, report: Report) -> None:
    folders = [setup.folder(setup.parity, seed=seed) for seed in (0, 1)]
    prompts = random_prompts(PROMPTS, setup.parity.vocab)
    model = config_of(folders[0], LENGTH, precision="float32")
    async with _server(engine, folders[0]) as url:
        backend = ServerConfig.model_validate({"engine": engine, "urls": [url]})
        generator = ServerGenerator(
            GenerationConfig(backend="server"), backend, model, Placement("cpu", awaits_weights=True)
        )
        await generator.start()
        try:
            for version, folder in enumerate([*folders, folders[0]], 1):
                begun = time.perf_counter()
                await _deliver(generator, folder, version)
                seconds = time.perf_counter() - begun
                await _compare(f"{engine}, version {version}", generator, folder, prompts, setup, report)
            report.figures(f"{engine}, last weights", ("s",), [(f"{seconds:.2f}",)])
            await _interrupt(engine, generator, prompts, report)
        finally:
            await generator.close()


async def _deliver(generator: ServerGenerator, folder: Path, version: int) -> None:
    tensors = load_file(folder / "model.safetensors")
    specs = [
        TensorSpec(name, tuple(each.shape), str(each.dtype).removeprefix("torch.")) for name, each in tensors.items()
    ]
    manifest = Manifest(version, tuple(specs))
    with tempfile.TemporaryDirectory() as shared:
        transport = Transport("disk", shared, num_receivers=1)
        with open_sender(manifest, transport, CPU) as sender:
            for name, tensor in tensors.items():
                sender.put(name, tensor)
            sender.finish()
            await generator.pause()
            await generator.begin(manifest)
            await generator.receive(transport, 1)
            await generator.commit(version)
            await generator.resume()


async def _compare(
    subject: str, generator: ServerGenerator, folder: Path, prompts: Sequence[np.ndarray], setup: Setup, report: Report
) -> None:
    for temperature in (1.0, 0.6):
        sampling = SamplingParams(24, temperature=temperature)
        first, second = [await complete(generator, prompts, sampling) for _ in range(2)]
        rows = [np.concatenate([prompt, one.token_ids]) for prompt, one in zip(prompts, first, strict=True)]
        if temperature == 1.0:
            oracle = PlainModel(folder, setup.torch_device).logprobs(rows)
            pairs = zip(first, oracle, strict=True)
            error = max(float(np.abs(one.logprobs - theirs[-len(one.token_ids) :]).max()) for one, theirs in pairs)
            report.within(f"{subject}, logprobs of sampled tokens", "transformers, row by row", error, EXACT)
            scores = [await generator.score(row) for row in rows]
            error = max(float(np.abs(ours - theirs).max()) for ours, theirs in zip(scores, oracle, strict=True))
            report.within(f"{subject}, scores", "transformers, row by row", error, EXACT)
        same = sum(one.token_ids.tolist() == two.token_ids.tolist() for one, two in zip(first, second, strict=True))
        found = f"{same} of {len(prompts)} equal"
        report.holds(f"{subject}, seeds at temperature {temperature}", "the same requests", same == len(prompts), found)


async def _interrupt(engine: str, generator: ServerGenerator, prompts: Sequence[np.ndarray], report: Report) -> None:
    long = GenerationRequest(prompts[0], SamplingParams(LENGTH - len(prompts[0])), seed=1)
    running = asyncio.create_task(generator.generate(long))
    await asyncio.sleep(0.3)
    begun = time.perf_counter()
    await generator.pause("interrupt")
    found = await running
    await generator.resume()
    ended = f"{found.stop_reason} after {len(found.token_ids)} tokens, {time.perf_counter() - begun:.2f} s"
    is_so = found.stop_reason in ("abort", "length") and len(found.logprobs) == len(found.token_ids)
    report.holds(f"{engine}, an interrupted request", "keeps its tokens", is_so, ended)
