"""An EAGLE-3 head of a Llama layer, as vLLM computes `LlamaForCausalLMEagle3`, over the tokens of whole drafts."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from rl_core.torch.files.file_names import FilePiece
from rl_core.torch.files.model_files import CONFIG
from rl_dtensor.draft_head.head import Head, KeysAndValues, PolicyStates, attending_from_drafts
from rl_dtensor.model.kernels import Attend, Softmax
from rl_dtensor.model.layout import RowLayout
from rl_dtensor.model.settings import DRAFT_KEY

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
"""Architectures that vLLM serves as `Eagle3LlamaForCausalLM`."""

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
DRAFT_TO_TARGET, TARGET_TO_DRAFT = "d2t", "t2d"
LAYER = "midlayer"
"""Name of the layer; it is `layers.0` in some files."""

_FORMS = {
    "attention_bias": False,
    "fc_norm": False,
    "logit_scale": 1.0,
    "mlp_bias": False,
    "norm_before_fc": False,
    "norm_output": False,
    "num_hidden_layers": 1,
    "use_aux_hidden_state": True,
}
"""Fields that change the computation of heads, and the only value that is trained."""


@dataclass(frozen=True)
class HeadShape:
    """The form of a head.

    Args:
        config: Its `transformers` config.
        layers: Numbers of layers of the policy, in ascending order; the head reads the hidden states that enter them,
            and the ones that leave the last layer if the number is the number of all layers.
        policy_width: Hidden size of the policy.
        draft_vocabulary: Number of tokens that the head can draft.
        vocabulary: Number of tokens of the policy.
        has_embedding: True if it has its own embedding, which is not trained; otherwise it reads the policy's.
        has_head: True if it has its own output layer; otherwise it uses the policy's.
        norms_residual: True if the layer adds to the normed hidden state.
        layer_name: Name of its layer in the files.
    """

    config: LlamaConfig
    layers: tuple[int, ...]
    policy_width: int
    draft_vocabulary: int
    vocabulary: int
    has_embedding: bool
    has_head: bool
    norms_residual: bool
    layer_name: str

    @classmethod
    def of(
        cls, folder: Path, names: Collection[str], *, num_layers: int, policy_width: int, vocabulary: int
    ) -> HeadShape:
        """Read the shape of the head in a folder.

        Args:
            folder: Folder of its files.
            names: Tensors in them.
            num_layers: Number of layers of the policy.
            policy_width: Hidden size of the policy.
            vocabulary: Number of tokens of the policy.

        Raises:
            ValueError: If it is not a head of this policy, or of a form that is not trained.
        """
        fields = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        nested = fields.get("eagle_config") or {}
        form = {**fields, **nested}
        for name, allowed in _FORMS.items():
            if form.get(name, allowed) != allowed:
                raise ValueError(
                    f"{DRAFT_KEY}: heads with {name}={form[name]!r} in config.json are not trained, only those with "
                    f"{allowed!r}. Remove draft_head, so that the head stays as it is"
                )
        if set(form.get("layer_types") or ()) - {"full_attention"} or form.get("use_sliding_window"):
            raise ValueError(
                f"{DRAFT_KEY}: only heads whose layer attends to the whole row are trained. Remove draft_head"
            )
        chosen = fields.get("eagle_aux_hidden_state_layer_ids") or nested.get("eagle_aux_hidden_state_layer_ids")
        shape = cls(
            LlamaConfig.from_dict(fields),
            tuple(sorted(set(chosen or (2, num_layers // 2, num_layers - 3)))),
            policy_width,
            fields.get("draft_vocab_size") or fields["vocab_size"],
            vocabulary,
            has_embedding=EMBEDDING in names,
            has_head=HEAD in names,
            norms_residual=bool(fields.get("norm_before_residual", False)),
            layer_name=LAYER if any(name.startswith(f"{LAYER}.") for name in names) else "layers.0",
        )
        shape._check_policy(folder, num_layers, DRAFT_TO_TARGET in names)
        return shape

    @property
    def is_reduced(self) -> bool:
        """Return whether it drafts only some of the policy's tokens."""
        return self.draft_vocabulary != self.vocabulary

    def _check_policy(self, folder: Path, num_layers: int, has_map: bool) -> None:
        if self.config.vocab_size != self.vocabulary:
            reason = f"the head knows {self.config.vocab_size} tokens and the policy {self.vocabulary}"
        elif not all(0 <= layer <= num_layers for layer in self.layers):
            reason = f"the head reads layers {list(self.layers)}, but the policy has {num_layers}"
        elif self.is_reduced and not has_map:
            reason = f"the head drafts {self.draft_vocabulary} of {self.vocabulary} tokens, and its files have no d2t"
        elif self.is_reduced and not self.has_head:
            reason = f"the head drafts {self.draft_vocabulary} tokens, and its files have no {HEAD}"
        elif self.config.hidden_size != self.policy_width and not (self.has_embedding and self.has_head):
            reason = (
                f"the hidden size of the head is {self.config.hidden_size} and the policy's {self.policy_width}, so it "
                f"needs its own {EMBEDDING} and {HEAD}"
            )
        else:
            return
        raise ValueError(f"{DRAFT_KEY}: {folder} does not fit the policy: {reason}. Choose a head of this policy")


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
        layout: RowLayout,
    ) -> Tensor:
        """Return hidden states before the last norm, `[1, tokens, hidden]`.

        Args:
            embedded: `[1, tokens, hidden]`, embeddings of the tokens.
            hidden: `[1, tokens, hidden]`, hidden states of the tokens before them.
            cos_sin: Rotary embedding of the places of the tokens before them.
            past: Keys and values of earlier passes; this pass adds its own.
            layout: Rows of the pass.
        """
        normed = self.hidden_norm(hidden)
        residual = normed if self.norms_residual else hidden
        both = torch.cat([self.input_layernorm(embedded), normed], -1)
        residual = residual + self.self_attn(both, cos_sin, past, layout)
        return residual + self.mlp(self.post_attention_layernorm(residual))


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
        self, hidden: Tensor, cos_sin: tuple[Tensor, Tensor], past: list[KeysAndValues], layout: RowLayout
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
        return cast("Tensor", self.o_proj(out.transpose(1, 2).flatten(2)))


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
        return cast("Tensor", self.fc(policy.entered)[None])

    def advance(
        self, embedded: Tensor, hidden: Tensor, places: Tensor, past: list[KeysAndValues], layout: RowLayout
    ) -> Tensor:
        return cast("Tensor", self.midlayer(embedded, hidden, self.rotary_emb(hidden, places), past, layout))

    def last_norm(self, hidden: Tensor) -> Tensor:
        return cast("Tensor", self.norm(hidden))

    def pieces(self, name: str, shape: tuple[int, ...]) -> Iterator[FilePiece]:
        yield FilePiece(name.replace(LAYER, self.shape.layer_name, 1), (), shape)

    def names_among(self, names: Collection[str]) -> set[str]:
        return set(names) - {DRAFT_TO_TARGET, TARGET_TO_DRAFT}
