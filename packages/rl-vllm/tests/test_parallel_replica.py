"""A replica of several engines that share the experts of a mixture."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rl_core.errors import GeneratorError
from rl_core.model_config import GenerationConfig
from rl_core.rollouts.generation import Placement
from rl_core.testing.weights import model_config
from rl_vllm import VllmConfig, VllmGenerator


def test_several_engines_are_refused_on_cpus(tmp_path: Path) -> None:
    backend = VllmConfig(data_parallel_size=2)
    generator = VllmGenerator(GenerationConfig(), backend, model_config(tmp_path), Placement("cpu"))
    with pytest.raises(GeneratorError, match=r"data_parallel_size=2: on cpu vLLM does not exchange .* Set it to 1"):
        asyncio.run(generator.start())
