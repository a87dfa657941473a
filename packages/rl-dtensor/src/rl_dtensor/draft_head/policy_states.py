"""Passes of a policy that leave what a draft head reads of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rl_core.model import HIDDEN
from rl_core.torch.heads import logprobs
from rl_core.torch.heads.split_reads import join_tokens
from rl_core.torch.loss import Rows
from rl_dtensor.draft_head.head import Head, PolicyStates
from rl_dtensor.draft_head.losses import PolicyHead
from rl_dtensor.model.build import decoder_layers
from rl_dtensor.model.model import ReadingModel, ShardedModel
from rl_dtensor.parallel.fsdp import whole


class PolicyReader:
    """Reads a policy for its head, without gradients and without dropout.

    Its embedding and its output layer are gathered when it is made: make it anew after a step of the policy. Making it
    and reading are collective.

    Args:
        policy: Whole layers of a policy, which no rank shares.
        head: The head.
        draft_ids: Int64 `[draft vocabulary]`, the token of each output of the head; None if they are the same.
    """

    def __init__(self, policy: ShardedModel, head: Head, draft_ids: Tensor | None) -> None:
        (self._chunk,) = policy.chunks
        self._policy = policy
        self._read = head.layers
        self._layers = decoder_layers(self._chunk.hf)
        self._embedding = None
        if head.own_embedding is None:
            layer: Any = self._chunk.hf.get_input_embeddings()
            self._embedding = whole(layer.weight, policy.compute)
        self._head = PolicyHead(_whole_head(self._chunk, policy.compute), draft_ids)
        policy.train(False)

    @torch.no_grad()
    def read(self, rows: Rows) -> PolicyStates:
        """Hidden states at the tokens of rows; collective."""
        layout = self._policy.lay_out(rows)
        with self._watching() as seen:
            last = self._chunk(layout, None, [HIDDEN], 1.0)["hidden"]
        held = layout.held
        entered = [
            join_tokens(seen[layer].flatten(0, 1)[held.positions], held.tokens, rows.num_tokens, None)
            for layer in self._read
        ]
        joined = torch.cat(entered, -1).to(self._policy.compute) if entered else last[:, :0]
        return PolicyStates(joined, last, self._embedding, self._head)

    @contextmanager
    def _watching(self) -> Iterator[dict[int, Tensor]]:
        """Context that keeps the hidden states `[batch, seq, hidden]` that enter the layers of a pass."""
        seen: dict[int, Tensor] = {}
        hooks = [self._watch(layer, seen) for layer in self._read]
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()

    def _watch(self, layer: int, seen: dict[int, Tensor]) -> RemovableHandle:
        if layer == len(self._layers):
            return self._layers[-1].register_forward_hook(partial(_keep_output, seen, layer))
        return self._layers[layer].register_forward_pre_hook(partial(_keep_input, seen, layer), with_kwargs=True)


def _keep_input(
    seen: dict[int, Tensor], layer: int, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    seen[layer] = args[0] if args else kwargs["hidden_states"]


def _keep_output(seen: dict[int, Tensor], layer: int, module: nn.Module, args: Sequence[Any], output: Any) -> None:
    seen[layer] = output if isinstance(output, Tensor) else output[0]


def _whole_head(chunk: ReadingModel, compute: torch.dtype) -> logprobs.Head:
    layer: Any = chunk.hf.get_output_embeddings()
    bias = None if layer.bias is None else whole(layer.bias, compute)
    return logprobs.Head(whole(layer.weight, compute), bias, chunk.transform)
