"""The answers that a model must give, computed row by row in float64 by transformers on one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rl_core.data.batch import TOKENS, Batch
from rl_core.model import Loss, Read, Role, read_columns
from rl_core.model_config import OptimizerConfig
from rl_core.plugins import resolve
from rl_core.token_filter import TokenFilter
from rl_core.torch.loss import Rows
from rl_core.torch.rows import to_rows
from rl_core.user_code import implementation_name


class Oracle:
    """A model of a role in float64, each row passed through `transformers` alone, whole logits and all.

    Args:
        folder: Hugging Face files.

    Attributes:
        optimizer: Steps the model; None until it is built, at the latest by the first step.
    """

    def __init__(self, folder: Path, role: Role = "policy") -> None:
        has_score_head = role in ("critic", "reward_model")
        auto = AutoModelForSequenceClassification if has_score_head else AutoModelForCausalLM
        labels = {"num_labels": 1} if has_score_head else {}
        # eager experts too: the grouped product of matrices takes no float64
        eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
        self.model = auto.from_pretrained(folder, dtype=torch.float64, **eager, **labels).eval()
        self.role = role
        self.optimizer: torch.optim.Optimizer | None = None

    def infer(self, batch: Batch, reads: Sequence[Read], temperature: float = 1.0) -> dict[str, np.ndarray]:
        """Return the columns of the reads, rows end to end."""
        with torch.no_grad():
            columns = self._reads(batch, reads, temperature)
        return {name: column.numpy() for name, column in columns.items()}

    def loss(self, batch: Batch, loss: Loss) -> Tensor:
        """Return the loss over the whole batch, with gradients."""
        rows = to_rows(batch.only([TOKENS, *loss.columns]), torch.device("cpu"))
        wide = {name: each.double() if each.is_floating_point() else each for name, each in rows.columns.items()}
        rows = Rows(rows.offsets, wide)
        compute = resolve(implementation_name(loss, loss.implementation))
        sums = compute(loss, self._reads(batch, loss.reads, loss.temperature), rows)
        return sums.loss(loss.totals(batch))

    def train_step(
        self, batch: Batch, loss: Loss, optimizer: OptimizerConfig, max_grad_norm: float | None
    ) -> dict[str, float]:
        """Make one step of a torch optimizer, kept from call to call.

        Returns:
            `loss` and `grad_norm` as a worker reports them.
        """
        if self.optimizer is None:
            self.optimizer = _class_of(optimizer)(self.model.parameters(), **optimizer.kwargs)
        self.optimizer.zero_grad()
        value = self.loss(batch, loss)
        value.backward()
        grads = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt().item()
        if max_grad_norm is not None and norm > max_grad_norm:
            for grad in grads:
                grad *= max_grad_norm / norm
        self.optimizer.step()
        return {"loss": value.item(), "grad_norm": norm}

    def decay_matrices_alone(self, optimizer: OptimizerConfig) -> None:
        """Build the optimizer with norms and biases, known by name, in a group without weight decay."""
        named = dict(self.model.named_parameters())
        kept = {name: parameter for name, parameter in named.items() if "norm" in name or "bias" in name}
        decayed = [parameter for name, parameter in named.items() if name not in kept]
        assert kept
        assert decayed
        groups = [{"params": decayed}, {"params": list(kept.values()), "weight_decay": 0.0}]
        self.optimizer = _class_of(optimizer)(groups, **optimizer.kwargs)

    def _reads(self, batch: Batch, reads: Sequence[Read], temperature: float) -> Mapping[str, Tensor]:
        names = (TOKENS, *read_columns(reads))
        parts = [
            self._row({name: torch.as_tensor(batch.ragged(name)[row]).long() for name in names}, reads, temperature)
            for row in range(len(batch))
        ]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _row(self, row: Mapping[str, Tensor], reads: Sequence[Read], temperature: float) -> dict[str, Tensor]:
        tokens = row[TOKENS]
        if self.role in ("critic", "reward_model"):
            hidden = self.model.base_model(input_ids=tokens[None]).last_hidden_state[0]
            heads = self.model.score(hidden)[:, 0]
            return {"scores": heads[-1:], "values": _after_first(heads[:-1])}
        logits = self.model(input_ids=tokens[None]).logits[0, :-1] / temperature
        token_filter = next((read.token_filter for read in reads if read.token_filter is not None), None)
        logprobs = (logits if token_filter is None else _kept_only(logits, tokens[1:], token_filter)).log_softmax(-1)
        columns = {
            "logprobs": logprobs.gather(1, tokens[1:, None])[:, 0],
            "entropy": -(logprobs.exp() * logprobs).sum(-1),
            "collision": logprobs.exp().square().sum(-1),
        }
        k = max((read.k for read in reads), default=0)
        below = max((read.below for read in reads), default=0) or logprobs.shape[1]
        columns["topk_logprobs"], columns["topk_ids"] = logprobs[:, :below].topk(k)
        for name in read_columns(reads):
            ids = row[name][1:]
            columns["logprobs_at"] = logprobs.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, 0.0)
        return {name: _after_first(columns[name]) for read in reads for name in read.columns}


def _class_of(optimizer: OptimizerConfig) -> Any:
    return resolve(":".join(optimizer.name.rsplit(".", 1)))


def _kept_only(logits: Tensor, tokens: Tensor, token_filter: TokenFilter) -> Tensor:
    """Return logits `[n, vocab]` with the tokens that a filter leaves out, except `tokens` `[n]`, so low that
    their probability is 0; written as the definition."""
    is_kept = torch.zeros_like(logits, dtype=torch.bool)
    for place, row in enumerate(logits.detach()):
        falling = row.argsort(descending=True)
        probabilities = row.softmax(-1)[falling]
        falling = falling[probabilities >= token_filter.min_p * probabilities[0]]
        falling = _with_ties(row, falling, token_filter.top_k or len(falling))
        held = row[falling].softmax(-1).cumsum(0)
        num_kept = len(falling) if token_filter.top_p == 1 else 1 + int((held < token_filter.top_p).sum())
        is_kept[place, _with_ties(row, falling, num_kept)] = True
        is_kept[place, tokens[place]] = True
    return logits.masked_fill(~is_kept, -1e30)


def _with_ties(row: Tensor, falling: Tensor, num: int) -> Tensor:
    """Return the first ids of logits in descending order, and those whose logits equal the last one's."""
    return falling[row[falling] >= row[falling[min(num, len(falling)) - 1]]]


def _after_first(values: Tensor) -> Tensor:
    """Return the results of the tokens that follow another, after a 0 for the first."""
    return torch.cat([values.new_zeros((1, *values.shape[1:])), values])
