"""Runs whose rollouts come from servers that the run has not started."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack, contextmanager

import pyarrow.parquet
import pytest
from runs import Run, rollouts_of, steps_of
from safetensors.numpy import load_file, save_file

from rl_algos.tiny_model import make_tiny_model
from rl_core.testing.exhaustive import exhaustive
from rl_launch.run_session.directory.exactly_once import prove
from rl_launch.run_session.directory.run_folder import RunFolder

pytestmark = pytest.mark.timeout(1200)

STEPS = 4
APART = ("policy.generation.backend=server", "policy.generation.colocated.enabled=false")
REWARD = """
def score(response):
    return response.count("1") + 0.1 * (len(response) % 7)
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def process(*command, port, **variables):
    """A server in a process of its own, once it answers."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-m", *command], env={**os.environ, **variables}, **quiet) as server:
        try:
            deadline = time.monotonic() + 800
            while True:
                assert server.poll() is None
                assert time.monotonic() < deadline
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                    break
                except OSError:
                    time.sleep(0.5)
            yield server
        finally:
            server.kill()


def with_own_head(folder):
    """Give a model a head with the values of its embedding, which trains apart."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def arguments(tmp_path):
    make_tiny_model(tmp_path / "model")
    # vLLM's server loads no tied head on a CPU.
    with_own_head(tmp_path / "model")
    (tmp_path / "reward.py").write_text(REWARD)
    return (
        "grpo-arithmetic",
        f"policy.model_name={tmp_path}/model",
        f"data.train.env_name={tmp_path}/reward.py:score",
        "data.validation=null",
        f"grpo.max_num_steps={STEPS}",
        "grpo.num_prompts_per_step=8",
        "grpo.num_generations_per_prompt=4",
        "grpo.val_period=0",
        "policy.train_global_batch_size=16",
        "policy.train_micro_batch_size=16",
        "policy.optimizer.kwargs.lr=2e-3",
        "checkpointing.enabled=false",
        "checkpointing.metric_name=null",
        "cluster.cpu_ranks_per_node=1",
    )


def urls(*ports):
    return f"policy.generation.server_cfg.urls=[{','.join(f'http://127.0.0.1:{port}' for port in ports)}]"


def sampled(folder):
    """Sampled tokens and their logprobs, by step."""
    names = ["prompt_id", "index", "token_id", "weight_version", "generation_logprob"]
    paths = [folder / f"rollouts/tokens_{step}.parquet" for step in range(1, STEPS + 1)]
    return [pyarrow.parquet.read_table(path, columns=names).to_pydict() for path in paths]


@exhaustive
def test_a_vllm_server_samples_what_our_own_engine_samples(arguments, driver, tmp_path):
    port = free_port()
    vllm = ("vllm.entrypoints.openai.api_server", f"--model={tmp_path}/model", "--host=127.0.0.1", f"--port={port}")
    settings = ("--dtype=float32", "--max-model-len=32", "--enforce-eager", "--enable-scale-out")
    variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    with process(*vllm, *settings, "--logprobs-mode=processed_logprobs", port=port, **variables):
        driver.train(tmp_path / "server", *arguments, *APART, urls(port))
    driver.train(tmp_path / "own", *arguments)
    assert sampled(tmp_path / "server") == sampled(tmp_path / "own")
    steps = steps_of(tmp_path / "server")
    assert max(line["mismatch/max"] for line in steps) < 1e-4
    assert min(line["train/grad_norm"] for line in steps) > 0


@exhaustive
def test_a_server_that_dies_leaves_its_prompts_to_another_and_comes_back_with_the_right_weights(arguments, tmp_path):
    ports = free_port(), free_port()
    module, ahead = "rl_core.testing.torch.engine_server", "grpo.max_num_steps=500"

    def server(port):
        return process(module, "vllm", str(tmp_path / "model"), str(port), port=port)

    with ExitStack() as stack:
        first, _ = (stack.enter_context(server(port)) for port in ports)
        saved = ("checkpointing.enabled=true", "checkpointing.save_period=1")
        run = Run.start(tmp_path / "run", *arguments, *APART, urls(*ports), ahead, *saved)
        run.await_step(2)
        first.kill()
        run.await_log("1 replicas remain; replacements will join")
        stack.enter_context(server(ports[0]))
        run.await_log("joins; replicas: 2")
        run.await_step(len(steps_of(run.folder)) + 2)
        run.kill_all()
    prompts = [row["prompt_id"] for rows in rollouts_of(run.folder).values() for row in rows if row["index"] == 0]
    assert len(set(prompts)) == len(prompts) >= 8 * len(steps_of(run.folder))
    proof = prove(RunFolder(run.folder))
    assert (proof.contradictions, proof.gaps) == ((), ())
    replicas = [line["generation/replicas"] for line in steps_of(run.folder)]
    assert {replicas[0], min(replicas), replicas[-1]} == {1, 2}
    assert max(line["mismatch/max"] for line in steps_of(run.folder)) < 1e-4


@exhaustive
@pytest.mark.parametrize("num_honest", [0, 1])
def test_a_server_that_lies_about_its_version_is_found_by_the_canary(num_honest, arguments, tmp_path):
    from rl_core.testing.torch.engine_server import ScriptedEngineServer  # It needs torch.

    servers = [ScriptedEngineServer("sglang", tmp_path / "model") for _ in range(num_honest + 1)]
    liar, taken = servers[-1], []
    take = liar._take
    liar._take = lambda folder: (taken.append(folder), take(folder) if len(taken) == 1 else None)
    ports = [each.url.rpartition(":")[2] for each in servers]
    run = Run.start(tmp_path / "run", *arguments, *APART, urls(*ports), "policy.generation.server_cfg.engine=sglang")
    run.finish(code=1 - num_honest)
    assert "differ from the policy's by" in run.output
    if num_honest:
        assert len(steps_of(run.folder)) == STEPS
        assert "is left out" in run.output
        assert max(line["mismatch/max"] for line in steps_of(run.folder)) < 1e-4
    else:
        assert len(steps_of(run.folder)) < STEPS
