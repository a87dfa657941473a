"""A model of `transformers` in float32, one row at a time, with whole logits and eager attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl_core.data.batch import TOKENS, Batch
from rl_core.model_config import OptimizerConfig
from rl_core.plugins import resolve


@dataclass(frozen=True)
class Step:
    """Loss and gradient norm of a step, before it was taken."""

    loss: float
    grad_norm: float


class PlainModel:
    """The mean negative logprob of next tokens, its gradient and plain optimizer steps.

    Args:
        folder: Hugging Face files.
        device: on which it computes, in products of full float32.
    """

    def __init__(self, folder: Path, device: torch.device, optimizer: OptimizerConfig | None = None) -> None:
        self._device = device
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self.model = self.model.to(device).eval()
        self._optimizer = None
        if optimizer is not None:
            maker = resolve(":".join(optimizer.name.rsplit(".", 1)))
            self._optimizer = maker(self.model.parameters(), **optimizer.kwargs)

    def logprobs(self, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return float32 logprobs `[tokens]` of each row, the first 0."""
        with torch.no_grad():
            return [np.concatenate([[0.0], self._row(row).cpu().numpy()]) for row in rows]

    def step(self, batch: Batch) -> Step:
        """Return the loss and gradient over the whole batch; step the optimizer if there is one."""
        rows = batch.ragged(TOKENS)
        count = float((rows.lengths - 1).sum())
        self.model.zero_grad()
        loss = 0.0
        for row in rows:
            if len(row) > 1:
                share = -self._row(row).sum() / count
                share.backward()
                loss += share.item()
        grads = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        norm = torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt().item()
        if self._optimizer is not None:
            self._optimizer.step()
        return Step(loss, norm)

    def _row(self, row: np.ndarray) -> Tensor:
        """Return the logprobs `[tokens - 1]` of the tokens that follow another."""
        tokens = torch.as_tensor(np.asarray(row, dtype=np.int64), device=self._device)
        logprobs = self.model(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
        return logprobs.gather(1, tokens[1:, None])[:, 0]


def relative(found: float, expected: float) -> float:
    """Return the difference as a share of the expected value."""
    return abs(found - expected) / max(abs(expected), 1e-12)
