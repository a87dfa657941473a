"""The losses of drafts of a head of any kind, which begin at each token: one pass for each token of a draft."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig

from rl_core.torch.files.file_names import FilePiece
from rl_core.torch.heads import logprobs
from rl_dtensor.model.kernels import Attend, Softmax
from rl_dtensor.model.layout import RowLayout, Segments

CHUNK = 512
"""Number of queries for which the mask is in memory at a time."""

KeysAndValues = tuple[Tensor, Tensor]
"""Keys and values, each `[1, heads, tokens, head_dim]`."""


class PolicyStates:
    """States of a policy that its head reads, at the tokens of some rows.

    It is not a dataclass on purpose: FSDP rebuilds every dataclass among the arguments of a module.

    Args:
        entered: `[tokens, num_layers * hidden]`, hidden states that enter the layers that the head reads.
        last: `[tokens, hidden]`, at index i the hidden state of the distribution of token i.
        embedding: `[vocabulary, hidden]`, the policy's embedding; None if the head has one.
        head: Output layer of the policy, whole.
        draft_ids: Int64 `[draft vocabulary]`, the token of each output of the draft head; None if they are the same.
    """

    def __init__(
        self, entered: Tensor, last: Tensor, embedding: Tensor | None, head: logprobs.Head, draft_ids: Tensor | None
    ) -> None:
        self.entered, self.last, self.embedding = entered, last, embedding
        self.head, self.draft_ids = head, draft_ids

    @torch.no_grad()
    def probabilities(self, hidden: Tensor) -> Tensor:
        """Return probabilities of the tokens that can be drafted, float32 `[n, draft vocabulary]`.

        Those of a reduced vocabulary do not sum to 1.

        Args:
            hidden: `[n, hidden]`, after the policy's last norm.
        """
        products = F.linear(hidden.to(self.head.weight.dtype), self.head.weight, self.head.bias)
        found = self.head.transform(_wide(products)).softmax(-1)
        return found if self.draft_ids is None else found[:, self.draft_ids]


class Head(nn.Module):
    """A head, whose forward pass gives the losses of drafts that begin at every token.

    `pieces` gives the file names of its parameters. Its forward pass is the pass of an
    FSDP root, so all weights are gathered while the losses are computed.

    Attributes:
        kind: Its kind, for messages.
        config: Its `transformers` config.
        layers: Numbers of layers of the policy, in ascending order; the head reads the hidden states that enter them,
            and the ones that leave the last layer if the number is the number of all layers.
        chunk_size: Number of positions whose logits exist at one time; None for the default.
        rotary_emb: Rotary embedding of places, whose tensors no file has.
        own_embedding: `[vocabulary, hidden]`; None if it reads the policy's embedding.
        own_output: `[draft vocabulary, hidden]`; None if it uses the policy's output layer.
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
        return None

    @property
    def own_output(self) -> Tensor | None:
        return None

    def begin(self, policy: PolicyStates) -> Tensor:
        """Return the hidden state of each token that the first pass reads, `[1, tokens, hidden]`."""
        raise NotImplementedError

    def advance(
        self, embedded: Tensor, hidden: Tensor, places: Tensor, past: list[KeysAndValues], layout: RowLayout
    ) -> Tensor:
        """Return hidden states before the last norm, `[1, tokens, hidden]`.

        Args:
            embedded: `[1, tokens, hidden]`, embeddings of the tokens.
            hidden: `[1, tokens, hidden]`, hidden states of the tokens before them.
            places: int64 `[1, tokens]`, places of the tokens before them in their rows.
            past: Keys and values of earlier passes; this pass adds its own.
            layout: Rows of the pass.
        """
        raise NotImplementedError

    def last_norm(self, hidden: Tensor) -> Tensor:
        """Return the hidden states for the logits."""
        raise NotImplementedError

    def pieces(self, name: str, shape: tuple[int, ...]) -> Iterator[FilePiece]:
        """Yield the tensors of the files that make up a parameter or a persistent buffer."""
        raise NotImplementedError

    def names_among(self, names: Collection[str]) -> set[str]:
        """Return the head's own tensors among the tensors of a folder, by name."""
        raise NotImplementedError

    def rebuild_rotary(self, device: torch.device) -> None:
        """Compute the tensors that no file has."""
        self.rotary_emb = type(self.rotary_emb)(self.config).to(device)

    def forward(self, policy: PolicyStates, layout: RowLayout, wanted: Tensor, num_tokens: int) -> Tensor:
        """Compute losses of drafts, float32 `[tokens, num_tokens]`, as the read `draft_losses` has them.

        The first pass joins the hidden state of each token with the embedding of the next, at the place of the former,
        and predicts the token after the latter. Each later pass reads, in place of the policy's hidden states, the
        results of the pass before it, with the embedding and the place of the token that follows.

        Args:
            policy: States of the policy.
            layout: The rows, packed.
            wanted: Bool `[tokens]`, tokens whose losses are computed.
            num_tokens: Tokens of a draft.
        """
        tokens, places = layout.input_ids, layout.position_ids
        embedding = policy.embedding if self.own_embedding is None else self.own_embedding
        weight = policy.head.weight if self.own_output is None else self.own_output
        assert embedding is not None, "the policy's embedding is given to heads without one"
        hidden = self.begin(policy)
        past: list[KeysAndValues] = []
        columns = []
        for step in range(num_tokens):
            # Tokens beyond a row's end come from the next row; no wanted loss depends on them.
            following = tokens.roll(-1 - step, 1)
            hidden = self.advance(F.embedding(following, embedding), hidden, places + step, past, layout)
            normed = self.last_norm(hidden)[0]
            # A draft begins two tokens, and one more for each step, before its token.
            targets = (wanted & (places[0] >= step + 2)).nonzero()[:, 0]
            losses = cross_entropy(
                normed[targets - step - 2], weight, policy.last[targets], policy, chunk_size=self.chunk_size
            )
            columns.append(losses.new_zeros(len(wanted)).index_copy(0, targets, losses))
        return torch.stack(columns, 1)


def cross_entropy(
    hidden: Tensor, weight: Tensor, policy_hidden: Tensor, policy: PolicyStates, *, chunk_size: int | None = None
) -> Tensor:
    """Compute the cross-entropy of the head's distribution from the policy's at each position, float32 `[n]`.

    It is differentiable by the hidden states and the weight of the head. At most `[chunk_size, vocabulary]` logits of
    each exist; the backward pass computes them again.

    Args:
        hidden: `[n, hidden]`, after the head's last norm.
        weight: `[draft vocabulary, hidden]`, output layer of the head.
        policy_hidden: `[n, policy hidden]`, after the policy's last norm.
        policy: Distributions of the policy.
        chunk_size: Number of positions whose logits exist at one time; None for the default.
    """

    def chunk(hidden: Tensor, weight: Tensor, policy_hidden: Tensor) -> Tensor:
        own = _wide(F.linear(hidden, weight)).log_softmax(-1)
        return -(policy.probabilities(policy_hidden) * own).sum(-1)

    size = chunk_size or logprobs.CHUNK_SIZE
    parts = [
        checkpoint(chunk, own, weight, others, use_reentrant=False)
        for own, others in zip(hidden.split(size), policy_hidden.split(size), strict=True)
    ]
    return torch.cat(parts)


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def attending_from_drafts(attend: Attend, past: list[KeysAndValues]) -> Attend:
    """Return the attention of one pass of a head: over the row in the first pass, and in later ones also over the
    tokens of the same draft.

    Args:
        attend: Kernel of the first pass.
        past: Keys and values of earlier passes; this pass adds its own.
    """

    def attended(query: Tensor, key: Tensor, value: Tensor, segments: Segments, softmax: Softmax) -> Tensor:
        past.append((key, value))
        if len(past) == 1:
            return attend(query, key, value, segments, softmax)
        row, *drafted = past
        scaling = query.shape[-1] ** -0.5 if softmax.scaling is None else softmax.scaling
        return _draft_attention(query, row, drafted, segments.lengths[0], scaling=scaling)

    return attended


def _draft_attention(
    query: Tensor, row: KeysAndValues, drafted: Sequence[KeysAndValues], lengths: Sequence[int], *, scaling: float
) -> Tensor:
    """Attend from a token of a draft to the row up to where the draft begins, and to the tokens of the same draft up to
    itself.

    Every token of the rows begins a draft, so all tensors have the rows' tokens.

    Args:
        query: `[1, heads, tokens, head_dim]`; the token of the draft that begins at each token.
        row: Keys and values of the first pass, over the row.
        drafted: Keys and values of each later pass until this one, over the drafts.
        lengths: Tokens of each row.
        scaling: Scaling of the products.

    Returns:
        `[1, heads, tokens, head_dim]`.
    """
    outputs, start = [], 0
    repeats = query.shape[1] // row[0].shape[1]
    for length in lengths:
        for first in range(start, start + length, CHUNK):
            own = slice(first, min(first + CHUNK, start + length))
            seen = slice(start, own.stop)
            parts = [(row[0][:, :, seen], row[1][:, :, seen])]
            parts += [(keys[:, :, own], values[:, :, own]) for keys, values in drafted]
            keys, values = (torch.cat(each, 2).repeat_interleave(repeats, 1) for each in zip(*parts, strict=True))
            # A query sees the keys of the row up to its own place, and of each later pass only its own key.
            before, count = first - start, own.stop - first
            of_row = torch.ones(count, before + count, dtype=torch.bool, device=query.device).tril(before)
            itself = torch.eye(count, dtype=torch.bool, device=query.device)
            mask = torch.cat([of_row, *[itself] * len(drafted)], 1)
            attend = F.scaled_dot_product_attention
            outputs.append(attend(query[:, :, own], keys, values, attn_mask=mask, scale=scaling))
        start += length
    return torch.cat(outputs, 2)
