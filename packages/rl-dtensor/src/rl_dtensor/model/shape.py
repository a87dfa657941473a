"""The shape of a whole model, from which a step's operations follow."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from rl_core.torch.training.flops import ModelShape, attention_shapes, setting
from rl_dtensor.parallel.body import body_of, is_composite
from rl_dtensor.parallel.experts import expert_modules


def shape_of(hf: PreTrainedModel) -> ModelShape:
    """The shape of a model with its adapters, before anything is split; it may be on `meta`. A vision tower, whose work
    does not follow from the tokens, is left out."""
    config = hf.config.get_text_config()
    stacked = {id(module) for module in expert_modules(hf)}
    matrices = trained = 0
    seen = [hf] if not is_composite(hf) else [body_of(hf), hf.get_output_embeddings()]
    for module in (module for part in seen for module in part.modules()):
        if isinstance(module, nn.Embedding):  # looked up; a tied head multiplies with it under its own name
            continue
        for parameter in module._parameters.values():
            if parameter is None or parameter.dim() < 2:
                continue
            entries = parameter.numel()
            if id(module) in stacked:
                entries = _of_one_token(parameter, config)
            matrices += entries
            trained += entries if parameter.requires_grad else 0
    return ModelShape(matrices, trained, attention_shapes(config))


def _of_one_token(parameter: nn.Parameter, config: PreTrainedConfig) -> int:
    """Entries of the experts that a token is sent to; biases are not multiplied with."""
    if parameter.dim() < 3:
        return 0
    num_experts = parameter.shape[0]
    return parameter.numel() // num_experts * int(setting(config, "num_experts_per_tok") or num_experts)
