"""A generator on a Hugging Face model, in this process."""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import AutoTokenizer

from rl_core.errors import ConfigError
from rl_core.model_config import GenerationConfig, ModelConfig
from rl_core.rollouts.generation import Placement
from rl_core.torch.files.model_files import model_folder
from rl_core.torch.generation.generator import LocalGenerator
from rl_dtensor.generation.config import HFConfig
from rl_dtensor.generation.decoder import HFDecoder
from rl_dtensor.generation.images import PromptImages
from rl_dtensor.generation.loading import cache_layers, load_model
from rl_dtensor.model.replay import RoutingRecorder


class HFGenerator(LocalGenerator[HFDecoder]):
    """`rl_core.Generator` on a model of `transformers`, batched continuously."""

    def __init__(self, config: GenerationConfig, backend: HFConfig, model: ModelConfig, placement: Placement) -> None:
        del config  # every request carries its own sampling parameters
        device = placement.kind

        def load() -> HFDecoder:
            module = load_model(model, backend.attn_implementation, device.torch_device)
            kinds = cache_layers(module, model.model_name)
            recorder = RoutingRecorder(module) if placement.reports_routing else None
            images = None
            if model.vision.enabled:
                if kinds is None:
                    raise ConfigError(f"hf decodes {model.model_name} without a cache, and shows it no images")
                images = PromptImages(module, model_folder(model.model_name), model.vision)
            size = model.logprob_chunk_size
            return HFDecoder(module, kinds, backend, device, chunk_size=size, recorder=recorder, images=images)

        # its `decode` gives a string for one sequence
        load_tokenizer: Any = partial(AutoTokenizer.from_pretrained, trust_remote_code=False)
        super().__init__(load, load_tokenizer, model, placement)
