"""The Hugging Face generator keeps the contract of every generator."""

from __future__ import annotations

from pathlib import Path

import torch

from rl_core.model_config import GenerationConfig
from rl_core.rollouts.generation import Generator, Placement
from rl_core.testing.generator import GeneratorSuite
from rl_core.testing.weights import model_config
from rl_dtensor.generation.generator import HFGenerator
from rl_dtensor.generation.plugin import HFConfig


class TestHFGenerator(GeneratorSuite):
    draws_by_place = True
    tolerance = 1e-5

    @classmethod
    def make_generator(cls, model_dir: Path) -> Generator:
        return HFGenerator(
            GenerationConfig(backend="hf"), HFConfig(max_batch_size=16), model_config(model_dir), Placement("cpu")
        )

    @classmethod
    async def make_head_stale(cls, generator: Generator) -> None:
        assert isinstance(generator, HFGenerator)
        head = generator._engine.model.module.lm_head
        head.weight = torch.nn.Parameter(head.weight.detach() + 1)
