"""An EAGLE-3 head of a Llama layer, as vLLM computes `LlamaForCausalLMEagle3`, over the tokens of whole drafts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from rl_dtensor.draft_head.attention import KeysAndValues, draft_attention
from rl_dtensor.draft_head.losses import PolicyHead, cross_entropy
from rl_dtensor.draft_head.shape import HeadShape
from rl_dtensor.model.kernels import Attend, Softmax
from rl_dtensor.model.layout import Layout


class PolicyStates:
    """What a head reads of its policy, at the tokens of some rows.

    It is not a dataclass on purpose: FSDP rebuilds every dataclass among the arguments of a module.

    Args:
        entered: `[tokens, num_layers * hidden]`, hidden states that enter the layers that the head reads.
        last: `[tokens, hidden]`: at index i the hidden state that the distribution of token i is made from.
        embedding: `[vocabulary, hidden]`, the policy's embedding; None if the head has one.
        head: Output layer of the policy.
    """

    def __init__(self, entered: Tensor, last: Tensor, embedding: Tensor | None, head: PolicyHead) -> None:
        self.entered = entered
        self.last = last
        self.embedding = embedding
        self.head = head


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
        past.append((key, value))
        if len(past) == 1:
            out = self.attend(query, key, value, layout.segments, Softmax())
        else:
            row, *drafted = past
            out = draft_attention(query, row, drafted, layout.segments.lengths[0], scaling=self.head_dim**-0.5)
        attended: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return attended


class EagleHead(nn.Module):
    """A head, whose forward pass gives the losses of drafts that begin at every token.

    The names of its parameters are those of the files. Its forward pass is that of an FSDP root, so all weights are
    gathered while the losses are computed.

    Args:
        shape: Its form.
        chunk_size: Number of positions whose logits exist at one time; None for the default.
    """

    def __init__(self, shape: HeadShape, *, attend: Attend, chunk_size: int | None) -> None:
        super().__init__()
        config = shape.config
        self.shape = shape
        self.chunk_size = chunk_size
        self.fc = nn.Linear(len(shape.layers) * shape.policy_width, config.hidden_size, bias=False)
        self.midlayer = DraftLayer(config, norms_residual=shape.norms_residual)
        self.midlayer.self_attn.attend = attend
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        if shape.has_head:
            self.lm_head = nn.Linear(config.hidden_size, shape.draft_vocabulary, bias=False)
        if shape.has_embedding:
            self.embed_tokens = nn.Embedding(shape.vocabulary, config.hidden_size).requires_grad_(False)
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def forward(self, policy: PolicyStates, layout: Layout, wanted: Tensor, num_tokens: int) -> Tensor:
        """Losses of drafts, float32 `[tokens, num_tokens]`, as the read `draft_losses` has them.

        The first pass joins the hidden state of each token with the embedding of the next, at the place of the former,
        and predicts the token after that. Each later pass reads, in place of the policy's hidden states, those that the
        pass before it gave, with the embedding and the place of the token that follows.

        Args:
            policy: What the head reads of the policy.
            layout: The rows, packed.
            wanted: Bool `[tokens]`, tokens whose losses are computed.
            num_tokens: Tokens of a draft.
        """
        tokens, places = layout.input_ids, layout.position_ids
        embedding = self.embed_tokens.weight if self.shape.has_embedding else policy.embedding
        weight = self.lm_head.weight if self.shape.has_head else policy.head.head.weight
        assert embedding is not None, "the policy's embedding is given to heads without one"
        hidden = self.fc(policy.entered)[None]
        past: list[KeysAndValues] = []
        columns = []
        for step in range(num_tokens):
            # tokens beyond a row's end come from the next row; nothing that is wanted depends on them
            following = tokens.roll(-1 - step, 1)
            embedded = nn.functional.embedding(following, embedding)
            hidden = self.midlayer(embedded, hidden, self.rotary_emb(hidden, places + step), past, layout)
            normed = self.norm(hidden)[0]
            # the token of a draft that begins two tokens, and one more for each step, before it
            targets = (wanted & (places[0] >= step + 2)).nonzero()[:, 0]
            losses = cross_entropy(
                normed[targets - step - 2], weight, policy.last[targets], policy.head, chunk_size=self.chunk_size
            )
            columns.append(losses.new_zeros(len(wanted)).index_copy(0, targets, losses))
        return torch.stack(columns, 1)
