"""A mixture of experts whose tokens go to given experts, computed row by row in float64 by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rl_core.data.batch import TOKENS, Batch
from rl_core.data.ragged import Ragged
from rl_core.rollouts.generation import GenerationRequest
from rl_core.rollouts.group import GENERATION_LOGPROBS, ROUTED_EXPERTS
from rl_core.rollouts.rollout import Completion, unknown_routing
from rl_core.selfcheck.torch.oracle import Oracle


def with_random_routing(batch: Batch, num_layers: int, num_experts: int, num_chosen: int) -> Batch:
    """Return the rows with random experts for each token; for some tokens none, which the router then chooses for."""
    tokens = batch.ragged(TOKENS)
    rng = np.random.default_rng(7)
    shape = (len(tokens.values), num_layers, num_experts)
    experts = rng.random(shape).argsort(-1)[..., :num_chosen].astype(np.int16)
    experts[rng.random(len(tokens.values)) < 0.3] = -1
    return batch.with_columns({ROUTED_EXPERTS: tokens.like(experts)})


def routing_of(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """Return int64 `[tokens, layers, experts per token]`, in ascending order, to which transformers sends the tokens of
    a row; -1 in layers without experts."""
    model = Oracle(folder).model
    found = np.full((len(tokens), model.config.num_hidden_layers, model.config.num_experts_per_tok), -1)

    def take(layer: int) -> Any:
        def hook(router: nn.Module, inputs: Any, outputs: tuple[Tensor, Tensor, Tensor]) -> None:
            found[:, layer] = outputs[2].sort(-1).values.numpy()

        return hook

    for number, layer in enumerate(model.model.layers):
        if "gate" in dict(layer.mlp.named_children()):
            layer.mlp.gate.register_forward_hook(take(number))
    with torch.no_grad():
        model(torch.from_numpy(tokens.astype(np.int64))[None])
    return found


def batch_of(requests: Sequence[GenerationRequest], completions: Sequence[Completion]) -> Batch:
    """Return rows of `tokens`, `generation_logprobs` (NaN for prompts) and `routed_experts`, as a rollout makes them."""
    rows = []
    for request, completion in zip(requests, completions, strict=True):
        assert completion.routed_experts is not None
        tokens = np.concatenate([request.token_ids, completion.token_ids])
        logprobs = np.concatenate([np.full(len(request.token_ids), np.nan), completion.logprobs])
        missing = unknown_routing(len(tokens) - len(completion.routed_experts), completion.routed_experts.shape[1:])
        rows.append((tokens, logprobs, np.concatenate([completion.routed_experts, missing])))
    tokens, logprobs, experts = zip(*rows, strict=True)
    return Batch(
        {
            TOKENS: Ragged.from_rows(tokens, np.int32),
            GENERATION_LOGPROBS: Ragged.from_rows(logprobs, np.float32),
            ROUTED_EXPERTS: Ragged.from_rows(experts, np.int16, experts[0].shape[1:]),
        }
    )


class RoutedOracle(Oracle):
    """Overrules the routers of transformers' Qwen3-MoE, and so of models of its form that normalise the weights of the
    chosen experts.

    Args:
        folder: Hugging Face files.
        batch: Batch with `routed_experts` of every row that it is asked for; rows differ.
    """

    def __init__(self, folder: Path, batch: Batch) -> None:
        super().__init__(folder)
        both = zip(batch.ragged(TOKENS), batch.ragged(ROUTED_EXPERTS), strict=True)
        rows = {tuple(tokens.tolist()): experts for tokens, experts in both}
        self._given = torch.zeros(0)

        def remember(module: nn.Module, args: Any, kwargs: Any) -> None:
            tokens = tuple(kwargs["input_ids"][0].tolist())
            self._given = torch.from_numpy(np.asarray(rows[tokens])).long()

        self.model.register_forward_pre_hook(remember, with_kwargs=True)
        for number, layer in enumerate(self.model.model.layers):
            if "gate" in dict(layer.mlp.named_children()):
                layer.mlp.gate.register_forward_hook(self._overrule(number))

    def _overrule(self, layer: int) -> Any:
        def hook(router: nn.Module, inputs: Any, outputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
            logits, _, own = outputs
            given = self._given[:, layer]
            experts = torch.where(given < 0, own, given)
            weights = logits.softmax(-1).gather(1, experts)
            return logits, weights / weights.sum(-1, keepdim=True), experts

        return hook
