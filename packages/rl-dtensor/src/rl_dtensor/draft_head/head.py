"""The losses of a head of any kind, of drafts that begin at each token: one pass for each token of a draft."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from rl_dtensor.draft_head.attention import KeysAndValues
from rl_dtensor.draft_head.losses import PolicyHead, cross_entropy
from rl_dtensor.model.layout import Layout
from rl_dtensor.model.names import Piece


class PolicyStates:
    """States of a policy that its head reads, at the tokens of some rows.

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


class Head(nn.Module):
    """A head, whose forward pass gives the losses of drafts that begin at every token.

    The names of its parameters are those of the files, as `pieces` has them. Its forward pass is that of an FSDP root,
    so all weights are gathered while the losses are computed.

    Attributes:
        kind: Its kind, for messages.
        config: Its `transformers` config.
        layers: Numbers of layers of the policy, in ascending order; the head reads the hidden states that enter them,
            and those that leave the last layer if the number is that of all layers.
        chunk_size: Number of positions whose logits exist at one time; None for the default.
        rotary_emb: Rotary embedding of places, whose tensors no file has.
    """

    kind: ClassVar[str]
    config: PreTrainedConfig
    layers: tuple[int, ...] = ()
    rotary_emb: nn.Module

    def __init__(self, *, chunk_size: int | None) -> None:
        super().__init__()
        self.chunk_size = chunk_size

    @property
    def own_embedding(self) -> Tensor | None:
        """Return `[vocabulary, hidden]`; None if it reads the policy's."""
        return None

    @property
    def own_output(self) -> Tensor | None:
        """Return `[draft vocabulary, hidden]`; None if it uses the policy's output layer."""
        return None

    def begin(self, policy: PolicyStates) -> Tensor:
        """The hidden state of each token that the first pass reads, `[1, tokens, hidden]`."""
        raise NotImplementedError

    def advance(
        self, embedded: Tensor, hidden: Tensor, places: Tensor, past: list[KeysAndValues], layout: Layout
    ) -> Tensor:
        """Hidden states before the last norm, `[1, tokens, hidden]`.

        Args:
            embedded: `[1, tokens, hidden]`, embeddings of the tokens.
            hidden: `[1, tokens, hidden]`, hidden states of the tokens before them.
            places: int64 `[1, tokens]`, places of the latter in their rows.
            past: Keys and values of earlier passes; those of this pass are added.
            layout: Rows of the pass.
        """
        raise NotImplementedError

    def last_norm(self, hidden: Tensor) -> Tensor:
        """Hidden states that logits are made from."""
        raise NotImplementedError

    def pieces(self, name: str, shape: tuple[int, ...]) -> Iterator[Piece]:
        """The tensors of the files that make up a parameter or a persistent buffer."""
        raise NotImplementedError

    def names_among(self, names: Collection[str]) -> set[str]:
        """Those of the names of a folder's tensors that are the head's own."""
        raise NotImplementedError

    def rebuild_rotary(self, device: torch.device) -> None:
        """Compute the tensors that no file has."""
        self.rotary_emb = type(self.rotary_emb)(self.config).to(device)

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
        embedding = policy.embedding if self.own_embedding is None else self.own_embedding
        weight = policy.head.head.weight if self.own_output is None else self.own_output
        assert embedding is not None, "the policy's embedding is given to heads without one"
        hidden = self.begin(policy)
        past: list[KeysAndValues] = []
        columns = []
        for step in range(num_tokens):
            # tokens beyond a row's end come from the next row; nothing that is wanted depends on them
            following = tokens.roll(-1 - step, 1)
            embedded = nn.functional.embedding(following, embedding)
            hidden = self.advance(embedded, hidden, places + step, past, layout)
            normed = self.last_norm(hidden)[0]
            # the token of a draft that begins two tokens, and one more for each step, before it
            targets = (wanted & (places[0] >= step + 2)).nonzero()[:, 0]
            losses = cross_entropy(
                normed[targets - step - 2], weight, policy.last[targets], policy.head, chunk_size=self.chunk_size
            )
            columns.append(losses.new_zeros(len(wanted)).index_copy(0, targets, losses))
        return torch.stack(columns, 1)
