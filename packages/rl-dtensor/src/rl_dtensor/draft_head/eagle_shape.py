"""The kind of an EAGLE-3 head, from its config and the names in its files."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from rl_core.torch.files.model_files import CONFIG
from rl_dtensor.draft_head.settings import KEY

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
"""Architectures that vLLM serves as `Eagle3LlamaForCausalLM`."""

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
DRAFT_TO_TARGET, TARGET_TO_DRAFT = "d2t", "t2d"
LAYER = "midlayer"
"""Name of the layer; some files call it `layers.0`."""

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
"""Fields by which heads compute something else, and the only value that is trained."""


@dataclass(frozen=True)
class HeadShape:
    """The form of a head.

    Args:
        config: Its `transformers` config.
        layers: Numbers of layers of the policy, in ascending order; the head reads the hidden states that enter them,
            and those that leave the last layer if the number is that of all layers.
        policy_width: Hidden size of the policy.
        draft_vocabulary: Number of tokens that the head can draft.
        vocabulary: Number of tokens of the policy.
        has_embedding: True if it has an embedding of its own, which is not trained; otherwise it reads the policy's.
        has_head: True if it has an output layer of its own; otherwise it uses the policy's.
        norms_residual: True if the normed hidden state is what the layer adds to.
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
            names: Names of the tensors in them.
            num_layers: Number of layers of the policy.
            policy_width: Hidden size of the policy.
            vocabulary: Number of tokens of the policy.

        Raises:
            ValueError: If it is not a head of this policy, or of a form that is not trained.
        """
        fields = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        nested = fields.get("eagle_config") or {}
        _check_form(folder, {**fields, **nested})
        draft_vocabulary = fields.get("draft_vocab_size") or fields["vocab_size"]
        config = LlamaConfig.from_dict(fields)
        chosen = fields.get("eagle_aux_hidden_state_layer_ids") or nested.get("eagle_aux_hidden_state_layer_ids")
        layers = tuple(sorted(set(chosen or (2, num_layers // 2, num_layers - 3))))
        shape = cls(
            config,
            layers,
            policy_width,
            draft_vocabulary,
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

    def in_files(self, name: str) -> str:
        """Name in the files of a parameter of the module."""
        return name.replace(LAYER, self.layer_name, 1)

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
        raise ValueError(f"{KEY}: {folder} does not fit the policy: {reason}. Choose a head of this policy")


def _check_form(folder: Path, fields: dict[str, Any]) -> None:
    for name, allowed in _FORMS.items():
        if fields.get(name, allowed) != allowed:
            raise ValueError(
                f"{KEY}: heads with {name}={fields[name]!r} in config.json are not trained, only those with "
                f"{allowed!r}. Remove draft_head, so that the head stays as it is"
            )
    if set(fields.get("layer_types") or ()) - {"full_attention"} or fields.get("use_sliding_window"):
        raise ValueError(f"{KEY}: only heads whose layer attends to the whole row are trained. Remove draft_head")
