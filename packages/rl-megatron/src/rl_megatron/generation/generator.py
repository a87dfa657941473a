"""A generator on megatron-core's static inference context, in this process.

Of megatron-core 0.16's inference engine this runs the parts that need no GPU kernels: `StaticInferenceContext`, the
key-value cache of one batch, and `GPTInferenceWrapper`, the forward pass over it. Its controller is left out: it draws
all requests of a batch with the same parameters from one random generator, reports logprobs before temperature and
filters, and knows no stop strings. Its dynamic engine needs flash-attn, and a GPU.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import AutoTokenizer

from rl_core.model_config import GenerationConfig, ModelConfig
from rl_core.rollouts.generation import Placement
from rl_core.torch.generation.generator import LocalGenerator
from rl_megatron import cpu_shim
from rl_megatron.generation.config import MegatronGenerationConfig
from rl_megatron.generation.decoder import MegatronDecoder


class MegatronGenerator(LocalGenerator[MegatronDecoder]):
    """`rl_core.Generator` on a model of megatron-core, batched statically. One process holds one,
    and no model worker next to it: Megatron keeps its process groups per process.
    """

    def __init__(
        self, config: GenerationConfig, backend: MegatronGenerationConfig, model: ModelConfig, placement: Placement
    ) -> None:
        del config  # every request carries its own sampling parameters
        device = placement.kind
        if device.kernels == "cpu":
            cpu_shim.install()
        reports = placement.reports_routing
        # its `decode` gives a string for one sequence
        load_tokenizer: Any = partial(AutoTokenizer.from_pretrained, trust_remote_code=False)
        super().__init__(
            lambda: MegatronDecoder(backend, model, device, reports_routing=reports),
            load_tokenizer,
            model,
            placement,
        )
