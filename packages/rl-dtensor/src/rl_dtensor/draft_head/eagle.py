"""An EAGLE-3 head of a Llama layer, as vLLM computes `LlamaForCausalLMEagle3`, over the tokens of whole drafts."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from rl_dtensor.draft_head.attention import KeysAndValues, attending_from_drafts
from rl_dtensor.draft_head.eagle_shape import DRAFT_TO_TARGET, TARGET_TO_DRAFT, HeadShape
from rl_dtensor.draft_head.head import Head, PolicyStates
from rl_dtensor.model.kernels import Attend, Softmax
from rl_dtensor.model.layout import Layout
from rl_dtensor.model.names import Piece


class DraftLayer(nn.Module):
    """The layer of a head: a Llama layer that attends from the embedding and the hidden state of a token together."""

    def __init__(self, config: LlamaConfig, *, norms_residual: bool) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.norms_residual = norms_residual
        self.hidden_norm = LlamaRMSNorm(width, eps)
        self.input_layernorm = LlamaRMSNorm(width, eps)
        self.post_attention_layernorm = LlamaRMSNorm(width, eps)
        self.self_attn = DraftAttention(config)
        self.mlp = LlamaMLP(config)

    def forward(
        self,
        embedded: Tensor,
        hidden: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        past: list[KeysAndValues],
        layout: Layout,
    ) -> Tensor:
        """Hidden states before the last norm, `[1, tokens, hidden]`.

        Args:
            embedded: `[1, tokens, hidden]`, embeddings of the tokens.
            hidden: `[1, tokens, hidden]`, hidden states of the tokens before them.
            cos_sin: Rotary embedding of the places of the latter.
            past: Keys and values of earlier passes; those of this pass are added.
            layout: Rows of the pass.
        """
        normed = self.hidden_norm(hidden)
        residual = normed if self.norms_residual else hidden
        both = torch.cat([self.input_layernorm(embedded), normed], -1)
        residual = residual + self.self_attn(both, cos_sin, past, layout)
        out: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return out


class DraftAttention(nn.Module):
    """Attention of a head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim: int = config.head_dim or config.hidden_size // config.num_attention_heads
        heads = config.num_attention_heads * self.head_dim
        kv_heads = (config.num_key_value_heads or config.num_attention_heads) * self.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, heads, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv_heads, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv_heads, bias=False)
        self.o_proj = nn.Linear(heads, config.hidden_size, bias=False)
        self.attend: Attend | None = None

    def forward(
        self, hidden: Tensor, cos_sin: tuple[Tensor, Tensor], past: list[KeysAndValues], layout: Layout
    ) -> Tensor:
        """Attend to the row in the first pass, and in later ones also to the tokens of the same draft; see
        `DraftLayer.forward`."""
        assert self.attend is not None, "the kernel is set when the head is built"
        query, key, value = (
            project(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *cos_sin)
        out = attending_from_drafts(self.attend, past)(query, key, value, layout.segments, Softmax())
        attended: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return attended


class EagleHead(Head):
    """An EAGLE-3 head.

    Args:
        shape: Its form.
        attend: Kernel of its attention.
        chunk_size: See `Head`.
    """

    kind: ClassVar[str] = "an EAGLE-3 head"

    def __init__(self, shape: HeadShape, *, attend: Attend, chunk_size: int | None) -> None:
        super().__init__(chunk_size=chunk_size)
        config = shape.config
        self.shape = shape
        self.config = config
        self.layers = shape.layers
        self.fc = nn.Linear(len(shape.layers) * shape.policy_width, config.hidden_size, bias=False)
        self.midlayer = DraftLayer(config, norms_residual=shape.norms_residual)
        self.midlayer.self_attn.attend = attend
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        if shape.has_head:
            self.lm_head = nn.Linear(config.hidden_size, shape.draft_vocabulary, bias=False)
        if shape.has_embedding:
            self.embed_tokens = nn.Embedding(shape.vocabulary, config.hidden_size).requires_grad_(False)
        self.rotary_emb = LlamaRotaryEmbedding(config)

    @property
    def own_embedding(self) -> Tensor | None:
        return self.embed_tokens.weight if self.shape.has_embedding else None

    @property
    def own_output(self) -> Tensor | None:
        return self.lm_head.weight if self.shape.has_head else None

    def begin(self, policy: PolicyStates) -> Tensor:
        hidden: Tensor = self.fc(policy.entered)[None]
        return hidden

    def advance(
        self, embedded: Tensor, hidden: Tensor, places: Tensor, past: list[KeysAndValues], layout: Layout
    ) -> Tensor:
        out: Tensor = self.midlayer(embedded, hidden, self.rotary_emb(hidden, places), past, layout)
        return out

    def last_norm(self, hidden: Tensor) -> Tensor:
        normed: Tensor = self.norm(hidden)
        return normed

    def pieces(self, name: str, shape: tuple[int, ...]) -> Iterator[Piece]:
        yield Piece(self.shape.in_files(name), (), shape)

    def names_among(self, names: Collection[str]) -> set[str]:
        return set(names) - {DRAFT_TO_TARGET, TARGET_TO_DRAFT}
