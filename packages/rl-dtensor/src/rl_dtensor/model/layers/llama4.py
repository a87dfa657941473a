"""Code of Llama 4 in `transformers` that computes with the layout of rows and with the experts that tokens choose.

Its own code passes every token through every expert, scaled by a score that is 0 for experts that the token did not
choose, and counts the places of tokens over all rows that lie end to end.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import grouped_mm_experts_forward
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention, Llama4TextExperts, Llama4TextMoe

from rl_core.facts.hf_config import HFConfig


def patch_llama4(hf: PreTrainedModel) -> None:
    """Make a model on `meta` compute the same by rows and chosen experts; nothing changes in other families."""
    for module in hf.modules():
        if isinstance(module, Llama4TextMoe):
            _send_to_chosen(module, hf.config.get_text_config())
        elif isinstance(module, Llama4TextAttention) and module.attn_temperature_tuning and not module.use_rope:
            _scale_by_place(module)


class ChosenExperts(Llama4TextExperts):
    """The same parameters, called with tokens and the experts that these choose."""

    def __init__(self, config: HFConfig) -> None:
        super().__init__(config)
        self._is_expert_parallel = False

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute `[tokens, hidden]`, as experts of other families do."""

        def gated(gate_up: Tensor) -> Tensor:
            gate, up = gate_up.chunk(2, dim=-1)
            return cast("Tensor", up * self.act_fn(gate))

        # This is not an attribute of the module: peft takes experts without `is_transposed` for
        # `[experts, outputs, inputs]`.
        layout: Any = SimpleNamespace(
            has_gate=True,
            has_bias=False,
            is_transposed=True,
            gate_up_proj=self.gate_up_proj,
            down_proj=self.down_proj,
            num_experts=self.num_experts,
            _is_expert_parallel=self._is_expert_parallel,
            _apply_gate=gated,
        )
        return cast("Tensor", grouped_mm_experts_forward(layout, hidden_states, top_k_index, top_k_weights))


def _send_to_chosen(moe: Any, config: HFConfig) -> None:
    with torch.device("meta"):
        moe.experts = ChosenExperts(config).to(moe.experts.gate_up_proj.dtype)

    def forward(hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        hidden = hidden_states.reshape(-1, moe.hidden_dim)
        scores, logits = moe.router(hidden)
        weights, chosen = scores.topk(moe.top_k, dim=-1)  # The scores of the others are 0.
        # Scores scale the inputs of an expert, not its outputs.
        scaled = (hidden[:, None] * weights[..., None]).flatten(0, 1)
        routed = moe.experts(scaled, chosen.view(-1, 1), torch.ones_like(weights).view(-1, 1))
        return moe.shared_expert(hidden) + routed.view(-1, moe.top_k, moe.hidden_dim).sum(1), logits

    moe.forward = forward


def _scale_by_place(attention: Llama4TextAttention) -> None:
    """Scale queries by the place in their row, where the code would count over all rows (arXiv:2501.19399)."""
    attention.attn_temperature_tuning = False
    floor_scale, attn_scale = attention.floor_scale, attention.attn_scale

    def scale(places: Tensor) -> Tensor:
        return torch.log1p(torch.floor((places.float() + 1.0) / floor_scale)) * attn_scale + 1.0

    def add_scale(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return args, {**kwargs, "query_scale": scale}

    attention.register_forward_pre_hook(add_scale, with_kwargs=True)
