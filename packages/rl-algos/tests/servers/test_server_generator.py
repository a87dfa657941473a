"""A replica that is a server elsewhere: its weights, its versions, and whatever a broken or hostile server answers."""

import asyncio
import socket
import time
from contextlib import closing, contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from aiohttp import web
from safetensors.torch import load_file

from rl_algos.servers.config import ServerConfig
from rl_algos.servers.engine_server import EngineServer
from rl_algos.servers.preflight import problems
from rl_algos.torch.server_generator import ServerGenerator
from rl_core.devices import CPU
from rl_core.errors import GeneratorError, RequestRefused, WeightSyncError
from rl_core.model_config import GenerationConfig
from rl_core.rollouts.generation import GenerationRequest, Placement, SamplingParams
from rl_core.testing.torch.engine_server import ScriptedEngineServer
from rl_core.testing.torch.reference_model import VOCAB_SIZE, ReferenceModel, write_reference_model
from rl_core.testing.torch.weight_sender import digest_of, manifest_of
from rl_core.testing.weights import model_config, prompt
from rl_core.torch.transport import open_sender
from rl_core.weights import Transport

KEY = "very-secret-key-of-the-servers"
PROTOCOLS = ("vllm", "sglang")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return [write_reference_model(tmp_path_factory.mktemp(f"model-{seed}"), seed=seed) for seed in (1, 2)]


@contextmanager
def serving(protocol, folder, *, awaits_weights=True, key=None):
    """A server, its generator after the start, and the loop that it is called on."""
    with closing(ScriptedEngineServer(protocol, folder)) as server, asyncio.Runner() as runner:
        settings = ServerConfig(engine=protocol, urls=["http://127.0.0.1:9", server.url], api_key_env=key)
        placement = Placement("cpu", awaits_weights=awaits_weights, replica=1)
        generator = ServerGenerator(GenerationConfig(backend="server"), settings, model_config(folder), placement)
        try:
            runner.run(generator.start())
            yield server, generator, runner.run
        finally:
            runner.run(generator.close())


@contextmanager
def written(folder, version, shared):
    """The weights of a folder as a policy writes them: their manifest, and the transport."""
    manifest = manifest_of(folder, version)
    transport = Transport("disk", str(shared), 1, 64 * 1024, 30.0)
    tensors = load_file(folder / "model.safetensors")
    with open_sender(manifest, transport, CPU) as sender:
        for spec in manifest.tensors:
            sender.put(spec.name, tensors[spec.name])
        sender.finish()
        yield manifest, transport


async def deliver(generator, folder, version, shared, *, mode="finish"):
    with written(folder, version, shared) as (manifest, transport):
        await generator.pause(mode)
        await generator.begin(manifest)
        received = await generator.receive(transport, 1)
        assert received == [digest_of(folder, manifest, transport.bucket_bytes)]
        await generator.commit(version)
        await generator.resume()


def request(num_tokens=6, **sampling):
    return GenerationRequest(prompt(12), SamplingParams(num_tokens, **sampling), seed=5)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_weights_reach_the_server_and_completions_show_their_version(protocol, folders, tmp_path):
    with serving(protocol, folders[0]) as (_, generator, run):
        with pytest.raises(GeneratorError, match="no weights have been sent"):
            run(generator.generate(request()))
        for version, folder in ((1, folders[1]), (2, folders[0])):
            run(deliver(generator, folder, version, tmp_path))
            reference = ReferenceModel(folder)
            np.testing.assert_allclose(run(generator.score(prompt(20))), reference.score(prompt(20)), atol=1e-5)
            asked = request(temperature=0.7)
            found = run(generator.generate(asked))
            expected = reference.completion_logprobs(asked.token_ids, found.token_ids, asked.sampling)
            np.testing.assert_allclose(found.logprobs, expected, atol=1e-5)
            assert [(span.version, span.num_tokens) for span in found.spans] == [(version, 6)]
            assert run(generator.generate(asked)).token_ids.tolist() == found.token_ids.tolist()
        assert run(generator.health())["weight_version"] == 2


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_completions_end_at_the_stop_tokens_of_the_run_and_not_at_those_of_the_model(protocol, folders):
    expected = ReferenceModel(folders[0]).greedy(prompt(12), 8)
    assert len(set(expected[:4])) == 4
    with serving(protocol, folders[0], awaits_weights=False) as (server, generator, run):
        server.eos_token_id = expected[1]
        found = run(generator.generate(request(8, temperature=0.0, stop_token_ids=(expected[3],))))
        assert (found.token_ids.tolist(), found.stop_reason) == (expected[:4], "stop")
        assert len(found.logprobs) == 4
        found = run(generator.generate(request(2, temperature=0.0, stop_token_ids=(expected[3],))))
        assert (found.token_ids.tolist(), found.stop_reason) == (expected[:2], "length")
        assert run(generator.generate(request(8, temperature=0.0))).token_ids.tolist() == expected


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_without_updates_the_server_is_given_the_files_of_the_model(protocol, folders):
    with serving(protocol, folders[0], awaits_weights=False) as (server, generator, run):
        server.first = folders[1]
        np.testing.assert_allclose(
            run(generator.score(prompt(9))), ReferenceModel(folders[0]).score(prompt(9)), atol=1e-5
        )
        assert run(generator.generate(request())).spans[0].version == 0


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_interrupted_requests_keep_their_tokens_and_others_finish(protocol, folders, tmp_path):
    async def interrupted(generator):
        long, stops = request(200), request(30, stop_strings=("never",))
        asked = [asyncio.create_task(generator.generate(each)) for each in (long, stops)]
        await asyncio.sleep(0.2)
        await deliver(generator, folders[1], 2, tmp_path, mode="interrupt")
        return await asyncio.gather(*asked)

    with serving(protocol, folders[0]) as (_, generator, run):
        run(deliver(generator, folders[0], 1, tmp_path))
        long, stops = run(interrupted(generator))
    assert long.stop_reason == "abort"
    assert 0 < len(long.token_ids) < 200
    assert (stops.stop_reason, len(stops.token_ids)) == ("length", 30)
    assert {span.version for each in (long, stops) for span in each.spans} == {1}


def first_token(change):
    """Change the first sampled token of an answer."""

    def twist(path, answer):
        if path == "/inference/v1/generate":
            choice = answer["choices"][0]
            entry = choice["logprobs"]["content"][0]
            pair = change([entry["logprob"], entry["token_id"]])
            entry["logprob"], entry["token_id"] = pair
            choice["token_ids"][0] = pair[1]
        elif path == "/generate":
            pairs = answer["meta_info"]["output_token_logprobs"]
            pairs[0][:2] = change(pairs[0][:2])
        return answer

    return twist


def one_more(path, answer):
    """Answer with more tokens than were asked for."""
    if path == "/inference/v1/generate":
        choice = answer["choices"][0]
        choice["token_ids"] *= 2
        choice["logprobs"]["content"] *= 2
    elif path == "/generate":
        answer["meta_info"]["output_token_logprobs"] *= 2
    return answer


def without_version(path, answer):
    """Leave out the version that sampled the tokens."""
    if path == "/inference/v1/generate":
        answer["choices"][0]["weight_versions"] = None
    elif path == "/generate":
        answer["meta_info"]["weight_versions"] = None
    return answer


def ended(path, answer):
    """End as if the server's own end of sequence had been sampled."""
    if path == "/inference/v1/generate":
        answer["choices"][0]["finish_reason"] = "stop"
    elif path == "/generate":
        answer["meta_info"]["finish_reason"]["type"] = "stop"
    return answer


def of_generation(make):
    """Send another response in the place of completions."""
    return lambda path, answer: make() if path.endswith("/generate") else answer


FAULTS = {
    "dies in the middle of a request": (of_generation(ConnectionError), "cannot be reached"),
    "redirects": (
        of_generation(lambda: web.Response(status=307, headers={"Location": "http://127.0.0.1:9/elsewhere"})),
        r"redirects \(HTTP 307\), which is not followed because the key must not go elsewhere",
    ),
    "floods": (of_generation(lambda: web.Response(body=b" " * 2**22)), r"sent an answer of more than \d+ bytes"),
    "fails": (of_generation(lambda: web.Response(status=500, text="engine is dead")), "HTTP 500: engine is dead"),
    "is no engine": (of_generation(lambda: web.Response(text="<html>")), "not a JSON object"),
    "forgets its fields": (of_generation(dict), "sent an answer of"),
    "refuses the key": (of_generation(lambda: web.Response(status=401, text=KEY)), r"HTTP 401: \[api_key\]"),
    "a token outside the vocabulary": (
        first_token(lambda pair: [pair[0], VOCAB_SIZE]),
        f"token id {VOCAB_SIZE}, outside the policy's vocabulary of {VOCAB_SIZE} tokens",
    ),
    "no probability": (first_token(lambda pair: [0.5, pair[1]]), "a logprob that is not one"),
    "a number beyond all floats": (first_token(lambda pair: [10**400, pair[1]]), "sent an answer of"),
    "no version": (without_version, "answered with weight version (none|None) instead of"),
    "more tokens": (one_more, "12 tokens for a request of at most 6"),
    "another end": (ended, "which is not a stop token of the request"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_broken_server_is_lost_with_one_message(protocol, fault, folders, tmp_path, monkeypatch):
    monkeypatch.setenv("SERVER_KEY", KEY)
    twist, message = FAULTS[fault]
    with serving(protocol, folders[0], key="SERVER_KEY") as (server, generator, run):
        run(deliver(generator, folders[0], 1, tmp_path))
        run(generator.generate(request()))
        assert server.headers["Authorization"] == f"Bearer {KEY}"
        server.twist = twist
        with pytest.raises(GeneratorError, match=message) as caught:
            run(generator.generate(request()))
        assert not isinstance(caught.value, RequestRefused)
        assert KEY not in str(caught.value)
        assert "\n" not in str(caught.value)
        # It is not called again, and the run replaces it.
        server.twist, count = None, server.num_requests
        for call in (generator.health(), generator.generate(request()), generator.score(prompt(5))):
            with pytest.raises(GeneratorError, match=message):
                run(call)
        assert server.num_requests == count


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_server_that_was_restarted_gets_the_weights_before_it_is_used(protocol, folders, tmp_path):
    with serving(protocol, folders[0]) as (server, generator, run):
        run(deliver(generator, folders[1], 3, tmp_path))
        server.restart()
        with pytest.raises(GeneratorError, match=r"weight version default instead of .*-3: it was restarted"):
            run(generator.generate(request()))
        settings = ServerConfig(engine=protocol, urls=[server.url])
        placement = Placement("cpu", awaits_weights=True)
        again = ServerGenerator(GenerationConfig(backend="server"), settings, model_config(folders[0]), placement)
        run(again.start())
        with pytest.raises(GeneratorError, match="no weights have been sent"):
            run(again.generate(request()))
        run(deliver(again, folders[1], 3, tmp_path))
        np.testing.assert_allclose(run(again.score(prompt(9))), ReferenceModel(folders[1]).score(prompt(9)), atol=1e-5)
        run(again.close())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_refused_request_costs_only_itself_and_a_busy_server_is_asked_again(protocol, folders, tmp_path):
    answers = [web.Response(status=400, text="no"), web.Response(status=503, text="full"), None]

    def twist(path, answer):
        found = answers.pop(0) if path.endswith("/generate") else None
        return answer if found is None else found

    with serving(protocol, folders[0]) as (server, generator, run):
        run(deliver(generator, folders[0], 1, tmp_path))
        server.twist = twist
        with pytest.raises(RequestRefused, match="refuses a request: no"):
            run(generator.generate(request()))
        began = time.monotonic()
        assert len(run(generator.generate(request())).token_ids) == 6
        assert time.monotonic() - began > 0.4
        assert not answers
        for tokens in (np.array([VOCAB_SIZE], np.int32), np.array([], np.int32), prompt(256)):
            with pytest.raises(RequestRefused):
                run(generator.generate(GenerationRequest(tokens, SamplingParams(4), seed=0)))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_weights_that_the_server_does_not_take_are_never_served(protocol, folders, tmp_path):
    def keeps_version(path, answer):
        return {"weight_version": "another-1"} if path in ("/weight_info", "/model_info") else answer

    with serving(protocol, folders[0]) as (server, generator, run):
        server.twist = keeps_version
        with pytest.raises(GeneratorError, match=r"reports weight version another-1 after .*-1 was loaded"):
            run(deliver(generator, folders[1], 1, tmp_path))
    with serving(protocol, folders[0]) as (server, generator, run):
        server._take = lambda folder: (_ for _ in ()).throw(OSError("no such folder"))
        with pytest.raises(GeneratorError, match=r"no such folder.*which it must reach by this path"):
            run(deliver(generator, folders[1], 1, tmp_path))


def test_files_that_differ_from_the_policys_are_not_given_to_the_server(folders, tmp_path):
    with serving("vllm", folders[0]) as (server, generator, run), written(folders[1], 1, tmp_path) as (_, transport):
        (shard, *_) = tmp_path.glob("*/*.safetensors")
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)
        run(generator.pause())
        run(generator.begin(manifest_of(folders[1], 1)))
        with pytest.raises(WeightSyncError, match="differ"):
            run(generator.receive(transport, 1))
        assert server.version == "default"
        with pytest.raises(GeneratorError, match="not been loaded completely"):
            run(generator.score(prompt(5)))


def section(server, folder, **settings):
    return {
        "model_name": str(folder),
        "precision": "float32",
        "max_total_sequence_length": 256,
        "generation": {"server_cfg": {"urls": [server.url], **settings}},
    }


@pytest.mark.parametrize(
    ("protocol", "reported", "message"),
    [
        ("vllm", {"logprobs_mode": "raw_logprobs"}, "use --logprobs-mode processed_logprobs"),
        ("vllm", {"dtype": "torch.bfloat16"}, "use --dtype float32"),
        ("vllm", {"quantization": "fp8"}, "has quantization=fp8"),
        ("vllm", {"max_model_len": 100}, "use --max-model-len 256"),
        ("vllm", {"device_type": "cpu"}, "a model with its own head"),
        ("sglang", {"context_length": 100}, "use --context-length 256"),
        ("sglang", {"dtype": "bfloat16"}, "use --dtype float32"),
        ("sglang", {"quantization": "fp8"}, "has quantised weights"),
    ],
)
def test_a_server_that_was_started_otherwise_is_refused_before_the_run(protocol, reported, message, folders):
    with closing(ScriptedEngineServer(protocol, folders[0])) as server:
        assert problems(section(server, folders[0], engine=protocol)) == []
        server.settings = reported
        (found,) = problems(section(server, folders[0], engine=protocol))
        assert found.startswith("generation.server_cfg.urls.0: the server http://127.0.0.1:")
        assert message in found


def test_what_is_not_there_is_named_before_the_run(folders, monkeypatch):
    monkeypatch.delenv("NO_KEY", raising=False)
    with closing(ScriptedEngineServer("sglang", folders[0])) as server:
        (found,) = problems(section(server, folders[0], engine="vllm"))
        assert "Start it with VLLM_SERVER_DEV_MODE=1 vllm serve" in found
        (found,) = problems(section(server, folders[0], engine="sglang", api_key_env="NO_KEY"))
        assert found.startswith("generation.server_cfg.api_key_env: the environment variable NO_KEY is not set")
        url = server.url
    (found,) = problems(section(server, folders[0], engine="sglang", urls=[url]))
    assert "cannot be reached" in found


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_server_that_never_answers_is_not_waited_for(protocol, folders, monkeypatch):
    monkeypatch.setattr(EngineServer.ask, "__kwdefaults__", {"timeout_s": 0.3})
    monkeypatch.setattr(EngineServer.asked, "__kwdefaults__", {"timeout_s": 0.3})
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        (found,) = problems(section(SimpleNamespace(url=url), folders[0], engine=protocol))
    assert "did not answer /server_info" in found
    assert found.endswith("within 0.3 s")
