"""A session with SGLang 0.5.23's server, which was recorded on a CPU with torch's operators, is still the same.

`python test_recorded_sglang.py URL FIRST SECOND` records it again: a server of the folder FIRST is at URL, and both
folders are of `write_reference_model`, with seeds 1 and 2.
"""

import asyncio
import json
import sys
import tempfile
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from safetensors.torch import load_file

from rl_algos.servers.config import ServerConfig
from rl_algos.torch.server_generator import ServerGenerator
from rl_core.devices import CPU
from rl_core.errors import GeneratorError, RequestRefused
from rl_core.model_config import GenerationConfig
from rl_core.rollouts.generation import GenerationRequest, Placement, SamplingParams
from rl_core.testing.torch.reference_model import ReferenceModel, write_reference_model
from rl_core.testing.torch.weight_sender import manifest_of
from rl_core.testing.weights import model_config, prompt
from rl_core.torch.transport import open_sender
from rl_core.weights import Transport

RECORDED = Path(__file__).with_name("sglang_0_5_23.json")
READ = {
    "/server_info": ("dtype", "quantization", "context_length", "enable_deterministic_inference", "version"),
    "/model_info": ("weight_version",),
}
"""Fields that are kept of answers with many."""
OF_A_RUN = ("rid", "model_path")
"""Fields of requests that differ between runs."""


async def deliver(generator, folder, version, shared, mode="finish"):
    manifest, tensors = manifest_of(folder, version), load_file(folder / "model.safetensors")
    transport = Transport("disk", shared, 1, 64 * 1024, 30.0)
    with open_sender(manifest, transport, CPU) as sender:
        for spec in manifest.tensors:
            sender.put(spec.name, tensors[spec.name])
        sender.finish()
        await generator.pause(mode)
        await generator.begin(manifest)
        await generator.receive(transport, 1)
        await generator.commit(version)
        await generator.resume()


async def session(url, folders, shared):
    """Weights, completions, scores, an interruption and a refusal; the completions by name, checked."""
    settings, placement = ServerConfig(engine="sglang", urls=[url]), Placement("cpu", awaits_weights=True)
    generator = ServerGenerator(GenerationConfig(backend="server"), settings, model_config(folders[0]), placement)
    generator._mark, found = "recorded", {}
    try:
        await generator.start()
        await exchange_with(generator, folders, shared, found)
    finally:
        await generator.close()
    return found


async def exchange_with(generator, folders, shared, found):
    for version, folder in ((1, folders[1]), (2, folders[0])):
        await deliver(generator, folder, version, shared)
        reference = ReferenceModel(folder)
        greedy = reference.greedy(prompt(12), 6)
        for name, sampling in (
            ("sampled", SamplingParams(6, temperature=0.7)),
            ("greedy", SamplingParams(6, temperature=0.0)),
            ("stop token", SamplingParams(6, temperature=0.0, stop_token_ids=(greedy[2],))),
            ("stop string", SamplingParams(16, stop_strings=("a",))),
        ):
            asked = GenerationRequest(prompt(12), sampling, seed=5)
            completion = found[name, version] = await generator.generate(asked)
            if sampling.temperature:
                own = reference.completion_logprobs(asked.token_ids, completion.token_ids, sampling)
                np.testing.assert_allclose(completion.logprobs, own, atol=2e-5)
        assert found["greedy", version].token_ids.tolist() == greedy
        assert found["stop token", version].token_ids.tolist() == greedy[:3]
        assert found["stop token", version].stop_reason == "stop"
        texts = [reference.decode(found["stop string", version].token_ids[:end].tolist()) for end in (-1, None)]
        assert ["a" in text for text in texts] == [False, found["stop string", version].stop_reason == "stop"]
        np.testing.assert_allclose(await generator.score(prompt(20)), reference.score(prompt(20)), atol=2e-5)
    long = asyncio.create_task(generator.generate(GenerationRequest(prompt(12), SamplingParams(200), seed=5)))
    await asyncio.sleep(0.1)
    await deliver(generator, folders[1], 3, shared, "interrupt")
    found["interrupted"] = await long
    with pytest.raises(RequestRefused, match="Failed to compile structural_tag grammar"):
        await generator.generate(GenerationRequest(prompt(12), SamplingParams(4, grammar="{not a grammar"), seed=5))
    await generator.health()


async def handled(request, exchange):
    body = await request.json() if request.can_read_body else None
    status, answer = await exchange(request.method, request.path, body)
    return web.json_response(answer, status=status)


async def in_between(exchange, folders, shared):
    """The session with a server that answers by a function."""
    application = web.Application(client_max_size=2**26)
    application.router.add_route("*", "/{path:.*}", lambda request: handled(request, exchange))
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        return await session(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}", folders, shared)
    finally:
        await runner.cleanup()


def comparable(body):
    return None if body is None else {name: value for name, value in body.items() if name not in OF_A_RUN}


def test_the_requests_are_those_that_sglang_answered_and_its_answers_are_understood(tmp_path):
    folders = [write_reference_model(tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    left, aborted = json.loads(RECORDED.read_text()), asyncio.Event()

    async def replay(method, path, body):
        asked = [method, path, comparable(body)]
        entry = next(entry for entry in left if entry[:3] == asked)
        left.remove(entry)
        _, _, _, status, answer = entry
        if path == "/abort_request":
            aborted.set()
        elif path == "/generate" and status == 200 and answer["meta_info"]["finish_reason"]["type"] == "abort":
            await aborted.wait()
        return status, answer

    found = asyncio.run(in_between(replay, folders, str(tmp_path / "shared")))
    assert left == []
    assert found["interrupted"].stop_reason == "abort"
    assert 0 < len(found["interrupted"].token_ids) < 200
    assert {span.version for span in found["interrupted"].spans} == {2}


def test_another_version_in_an_answer_of_sglang_is_found(tmp_path):
    folders = [write_reference_model(tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    left = json.loads(RECORDED.read_text())

    async def replay(method, path, body):
        entry = next(entry for entry in left if entry[:3] == [method, path, comparable(body)])
        left.remove(entry)
        if path == "/generate":
            entry[4]["meta_info"]["weight_versions"][0]["version"] = "default"
        return entry[3:]

    with pytest.raises(GeneratorError, match="answered with weight version default instead of recorded-1"):
        asyncio.run(in_between(replay, folders, str(tmp_path / "shared")))


async def _record(url, folders):
    recorded = []

    async def forward(method, path, body):
        entry = [method, path, comparable(body)]
        recorded.append(entry)
        async with aiohttp.ClientSession() as client, client.request(method, url + path, json=body) as response:
            text = await response.text()
        try:
            answer = json.loads(text)
        except ValueError:
            answer = text
        if path in READ:
            answer = {name: answer.get(name) for name in READ[path]}
        if path == "/generate" and response.status == 200:
            names = ("finish_reason", "output_token_logprobs", "input_token_logprobs", "weight_version")
            meta = {name: answer["meta_info"].get(name) for name in (*names, "weight_versions")}
            answer = {"output_ids": answer["output_ids"], "meta_info": meta}
        entry += [response.status, answer]
        return response.status, answer

    with tempfile.TemporaryDirectory() as shared:
        await in_between(forward, folders, shared)
    lines = ",\n".join(json.dumps(entry) for entry in recorded)
    RECORDED.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    asyncio.run(_record(sys.argv[1], [Path(each) for each in sys.argv[2:4]]))
