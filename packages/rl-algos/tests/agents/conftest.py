"""A policy that says what it is told to, behind the endpoint that agents call."""

import numpy as np
import pytest

from rl_algos.rollouts.worker import worker as worker_module
from rl_algos.rollouts.worker.worker import RolloutWorker, RolloutWorkerSpec
from rl_algos.tiny_model import make_tokenizer
from rl_core.model_config import TokenizerConfig
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.pool import RolloutTask
from rl_core.rollouts.rollout import Completion, Prompt, WeightSpan


class Scripted:
    """A generator that answers each prompt with a text that follows from it and from the seed."""

    num_ranks = 1

    def __init__(self, reply, tokenizer):
        self.reply, self.tokenizer, self.requests, self.completions = reply, tokenizer, [], []

    async def start(self):
        pass

    async def close(self):
        pass

    async def generate(self, request):
        self.requests.append(request)
        prompt = self.tokenizer.decode(request.token_ids.tolist(), skip_special_tokens=False)
        text = self.reply(prompt, request.seed) + self.tokenizer.eos_token
        ends = [text.index(stop) + len(stop) for stop in request.sampling.stop_strings if stop in text]
        text = text[: min(ends, default=None)]
        tokens = np.array(self.tokenizer.encode(text, add_special_tokens=False), np.int32)
        logprobs = -np.arange(1, len(tokens) + 1, dtype=np.float32) / 8
        self.completions.append(Completion(tokens, logprobs, "stop", (WeightSpan(3, len(tokens)),)))
        return self.completions[-1]


def prompt(text="2+3", number=0):
    tokens = np.array(make_tokenizer().encode(text), np.int32)
    return Prompt(f"p{number}", ({"role": "user", "content": text},), tokens, "agent", {"answer": 5})


@pytest.fixture
def make_worker(monkeypatch, tmp_path):
    """A rollout worker whose program is an agent, over a scripted generator."""
    real = worker_module.resolve
    monkeypatch.setattr(worker_module, "resolve", lambda path: Scripted if path == "scripted" else real(path))

    def make(config, reply=lambda prompt, seed: "5", *, function=None, files=None, environments=None, **settings):
        tokenizer = settings.pop("chat", None) or make_tokenizer()
        max_tokens = settings.pop("max_tokens", 512)
        monkeypatch.setattr(worker_module, "load_tokenizer", lambda *_: tokenizer)
        spec = RolloutWorkerSpec(
            generator="scripted",
            generator_args=(reply, tokenizer),
            program="rl_algos.agents.program:AgentProgram",
            program_args={"config": config, "function": function, "max_tokens": max_tokens, "files": files},
            tokenizer=TokenizerConfig(),
            model_name="none",
            logs=str(tmp_path),
            **settings,
        )
        return RolloutWorker(spec, environments or {})

    return make


@pytest.fixture
def play():
    """Rollouts of a prompt by a worker, in the order of their seeds."""

    async def rollouts(worker, seeds=(1,), turns=(), asked=None, max_new_tokens=32):
        await worker.start()
        try:
            task = RolloutTask(asked or prompt(), SamplingParams(max_new_tokens), tuple(seeds), turns=turns)
            await worker.begin([(0, task)])
            await worker._any_finished.wait()
            sampled = await worker.turns()
            _, (_, found) = worker._take()
            return found, sampled.get(0, ())
        finally:
            await worker.close()

    return rollouts
