"""The memory of engines that `rl plan` states is what real engines hold."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

pytest.importorskip("torch", reason="it starts engines: run it in an environment with the backends (--group cpu)")

from counted_engine import CountedGenerator
from transformers import AutoModelForCausalLM

from rl_algos.tiny_model import make_tiny_model
from rl_core.devices import CPU
from rl_core.model_config import GenerationConfig, ModelConfig
from rl_core.plugins import GENERATORS, plugin
from rl_core.rollouts.generation import GenerationRequest, Placement, SamplingParams
from rl_dtensor.generation.generator import HFGenerator
from rl_launch.planning.accelerators import accelerator_named
from rl_launch.planning.memory import EngineRank
from rl_launch.planning.shapes import Shape

ROWS, PROMPT, TOKENS = 8, 64, 448


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, hidden_size=256, num_layers=4, num_heads=8, num_key_value_heads=4)
    return folder


def planned(folder, generator, **settings):
    found = plugin(GENERATORS, generator)
    config = ModelConfig(model_name=str(folder), precision="float32", max_total_sequence_length=PROMPT + TOKENS)
    own = found.config(**settings)
    layout = found.engine_layout(config, own, CPU, is_shared=False)
    shape = Shape.of(AutoModelForCausalLM.from_pretrained(folder).config.to_dict())
    rank = EngineRank(layout, shape, shape.size, is_shared=False)
    return config, own, rank.parts(accelerator_named("cpu"), CPU, PROMPT + TOKENS)


def test_vllm_holds_the_cache_that_the_config_gives_it(model):
    config, own, expected = planned(model, "vllm", kv_cache_gib=0.25)

    async def held():
        generator = CountedGenerator(GenerationConfig(), own, config, Placement("cpu"))
        await generator.start()
        try:
            return await generator.cache_bytes()
        finally:
            await generator.close()

    assert asyncio.run(held()) == [pytest.approx(expected["KV cache"], rel=0.01)]


def test_the_cache_of_the_hf_backend_grows_to_the_size_of_its_rows(model):
    config, own, expected = planned(model, "hf", max_batch_size=ROWS)
    generator = HFGenerator(GenerationConfig(backend="hf"), own, config, Placement("cpu"))
    sizes = {"KV cache": 0}

    async def generate():
        await generator.start()
        weights = sum(each.numel() * each.element_size() for each in generator._engine.model.module.parameters())
        prompts = np.random.default_rng(0).integers(3, 40, (ROWS, PROMPT)).astype(np.int32)
        requests = [GenerationRequest(row, SamplingParams(TOKENS), seed) for seed, row in enumerate(prompts)]
        tasks = [asyncio.create_task(generator.generate(each)) for each in requests]
        while not all(task.done() for task in tasks):
            layers = generator._engine.model._batch._cache.layers
            sizes["KV cache"] = max(sizes["KV cache"], sum(page.nbytes for each in layers for page in each._pages))
            await asyncio.sleep(0.005)
        await generator.close()
        return {"weights": weights, **sizes}

    assert asyncio.run(generate()) == pytest.approx(expected, rel=0.1)
