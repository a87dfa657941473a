"""A layer for multi-token prediction (arXiv:2412.19437, section 2.2), as vLLM computes it for DeepSeek-V3 and
GLM-4.5."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from rl_core.torch.files.file_names import FileNames, FilePiece
from rl_dtensor.draft_head.head import Head, KeysAndValues, PolicyStates, attending_from_drafts
from rl_dtensor.model.kernels import Attend
from rl_dtensor.model.layout import RowLayout
from rl_dtensor.model.settings import DRAFT_KEY
from rl_dtensor.model.whole import decoder_layers

FAMILIES = ("deepseek_v3", "glm4_moe")
"""Types of the models whose files may hold one."""

COUNT = "num_nextn_predict_layers"
"""Field of the config: number of such layers in the files, after the layers of the model."""

OF_THE_POLICY = ("embed_tokens.weight", "shared_head.head.weight")
"""Tensors that the files have for the layer too, and that engines take from the model."""


class MtpHead(Head):
    """A layer for multi-token prediction, which reads the output of the policy's last layer.

    Args:
        policy: The policy with one more layer, which becomes the layer of the head.
        attend: Kernel of its attention.
        chunk_size: See `Head`.
    """

    kind: ClassVar[str] = "a layer for multi-token prediction"

    def __init__(self, policy: PreTrainedModel, *, attend: Attend, chunk_size: int | None) -> None:
        super().__init__(chunk_size=chunk_size)
        config: Any = policy.config
        width = config.hidden_size
        self.config = config
        self.attend = attend
        self.layer: Any = decoder_layers(policy)[-1]
        kind: Any = type(self.layer.input_layernorm)
        norm: Any = partial(kind, width, eps=config.rms_norm_eps)
        self.enorm, self.hnorm = norm(), norm()
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.shared_head = nn.ModuleDict({"norm": norm()})
        self.rotary_emb: Any = policy.get_submodule("model.rotary_emb")
        self.prefix = f"model.layers.{config.num_hidden_layers - 1}."
        self._names = FileNames(policy)

    def begin(self, policy: PolicyStates) -> Tensor:
        return policy.last.roll(-1, 0)[None]

    def advance(
        self, embedded: Tensor, hidden: Tensor, places: Tensor, past: list[KeysAndValues], layout: RowLayout
    ) -> Tensor:
        # Engines mask the first token of a row in the same way.
        embedded = embedded.masked_fill(places[..., None] == 0, 0.0)
        joined = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))
        out = self.layer(
            joined,
            position_embeddings=self.rotary_emb(joined, places),
            layout=layout,
            attend=attending_from_drafts(self.attend, past),
        )
        return out if isinstance(out, Tensor) else out[0]

    def last_norm(self, hidden: Tensor) -> Tensor:
        return cast("Tensor", self.shared_head["norm"](hidden))

    def pieces(self, name: str, shape: tuple[int, ...]) -> Iterator[FilePiece]:
        own = name.removeprefix("layer.")
        if own == name:
            yield FilePiece(self.prefix + name, (), shape)
        else:
            yield from self._names.pieces(self.prefix + own, shape)

    def names_among(self, names: Collection[str]) -> set[str]:
        own = {name for name in names if name.startswith(self.prefix)}
        return own - {self.prefix + name for name in OF_THE_POLICY}


def with_one_more_layer(config: PreTrainedConfig, folder: Path, fields: Mapping[str, Any]) -> PreTrainedConfig:
    """Return the config of a policy with its head as its last layer.

    Args:
        config: Config of the policy.
        folder: Folder of the head's files.
        fields: Their config.

    Raises:
        ValueError: If the files belong to another model, or do not have exactly one such layer.
    """
    names = ("model_type", "num_hidden_layers", "hidden_size", "vocab_size")
    other = [name for name in names if fields.get(name) != getattr(config, name)]
    if other:
        name = other[0]
        raise ValueError(
            f"{DRAFT_KEY}: {folder} does not fit the policy: its {name} is {fields.get(name)} and the policy's "
            f"{getattr(config, name)}. Choose the files of this policy"
        )
    if fields.get(COUNT) != 1:
        raise ValueError(
            f"{DRAFT_KEY}: the config.json in {folder} has {COUNT}={fields.get(COUNT)}; heads with one layer for "
            "multi-token prediction are trained. Remove draft_head"
        )
    longer = deepcopy(config)
    longer.num_hidden_layers += 1
    return longer
