"""The part of a replica of vLLM on a node after its first one."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import replace
from typing import Any, Protocol

from rl_core.model_config import GenerationConfig, ModelConfig
from rl_core.rollouts.generation import Placement
from rl_vllm.config import VllmConfig
from rl_vllm.engine import process_env
from rl_vllm.generator import VllmGenerator

_log = logging.getLogger(__name__)


class FirstPlace(Protocol):
    """The place of the first node, as `rl_core.ray.host.Place`."""

    address: str
    port: int


class VllmFollower:
    """Ranks of an engine whose front is on another node. They receive requests and weights from that engine, and end
    with it; if one of them ends, the whole replica does.

    Args:
        config: Neutral settings of generation.
        backend: Settings of vLLM.
        model: Model to load.
        placement: Device, GPUs and threads of the ranks on this node.
        first: Place of the replica's first node.
    """

    def __init__(
        self, config: GenerationConfig, backend: VllmConfig, model: ModelConfig, placement: Placement, first: FirstPlace
    ) -> None:
        placement.claim(backend.num_ranks)
        self._config, self._backend, self._model = config, backend, model
        self._placement = replace(placement, meeting=(first.address, first.port))
        self._ranks: Any = None

    async def start(self) -> None:
        """Load the ranks.

        Raises:
            GeneratorError: If the first node is not found.
        """
        backend, placement = self._backend, self._placement
        eager = backend.is_eager(placement.kind)
        process_env.apply(
            placement,
            eager=eager,
            num_ranks=backend.num_ranks,
            own_process=True,
            environ=os.environ,
            quantises=backend.quantization is not None,
        )
        # vLLM reads the environment when it is imported.
        from rl_vllm.engine.arguments import engine_arguments
        from rl_vllm.engine.headless_ranks import HeadlessRanks
        from rl_vllm.engine.memory import memory_share
        from rl_vllm.engine.nodes import FirstNode

        assert placement.meeting is not None
        first = await asyncio.to_thread(FirstNode.find, placement.meeting, placement.node)
        arguments = engine_arguments(
            backend,
            self._model,
            placement,
            max_len=backend.max_model_len or self._model.max_total_sequence_length,
            eager=eager,
            extension=VllmGenerator.worker_extension,
            memory_share=memory_share(backend, self._model, placement),
            applies_adapters=self._config.lora_sync == "adapter",
            ports=first.ports,
        )
        self._ranks = await asyncio.to_thread(HeadlessRanks.start, arguments, first)
