"""The end of building a model: short passes that verify it."""

from __future__ import annotations

import math

import torch
from transformers import PreTrainedConfig

from rl_core.data.batch import TOKENS
from rl_core.model import LOGPROBS
from rl_core.torch.loss import Rows
from rl_dtensor.model.model import ShardedModel
from rl_dtensor.parallel.fsdp import local
from rl_dtensor.parallel.mesh import DTensorMesh

MAX_LOGIT_ERROR = 0.05
"""Relative; rounding in half precision stays below a fifth of it."""

MAX_PACKING_ERROR = 0.15
"""Relative; in half precision tokens may also go to other experts after another row."""


def check_logits(model: ShardedModel, mesh: DTensorMesh) -> None:
    """Compare a few tokens' logits with the logits of the model's own forward pass, on the ranks that hold the head."""
    last = model.chunks[-1]
    if not last.is_last:
        return
    layout = model.lay_out(probe_row(model.hf.config, mesh.device))
    entered = None
    if model.num_stages > 1:
        shape = model.hidden_shape(layout)
        entered = torch.linspace(-1, 1, shape[1] * shape[2], device=mesh.device).view(1, *shape[1:]).to(model.compute)
    model.train(False)
    with torch.no_grad():
        error = last(layout, entered, (), 1.0, checks_logits=True)["logit_error"].item()
    model.reshard_all()
    broken: list[str] = []
    if not math.isfinite(error):
        broken = [name for name, tensor in model.weights.held.items() if not bool(local(tensor).isfinite().all())]
    if broken:
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        raise ValueError(
            f"weights of the model are not finite: {broken[0]}{more}; its files are damaged, or were saved from a run "
            "that diverged: choose an earlier checkpoint or another copy"
        )
    if not error < MAX_LOGIT_ERROR:
        kind = last.hf.config.model_type
        raise ValueError(
            f"logits of {kind} models are not a scaled or capped product with the head (off by {error:.2g})"
        )


def check_packing(model: ShardedModel, mesh: DTensorMesh) -> None:
    """Compare the reads of a row that follows another with its reads as the only row.

    Runs only if one rank sees whole rows and all layers.
    """
    chunk = model.chunks[0]
    if not chunk.is_packed or chunk.alignment.context is not None or model.num_stages > 1:
        return
    row = probe_row(model.hf.config, mesh.device)
    tokens, count = row.columns[TOKENS], len(row.columns[TOKENS])
    ends = torch.tensor([0, count - 1, 2 * count - 1], device=mesh.device)
    both = Rows(ends, {TOKENS: torch.cat([tokens.flip(0)[:-1], tokens])})
    model.train(False)
    with torch.no_grad():
        read = [chunk(model.lay_out(rows), None, (LOGPROBS,), 1.0)["logprobs"][-count:] for rows in (row, both)]
    model.reshard_all()
    first, second = (logprobs.float() for logprobs in read)
    error = ((first - second).abs().max() / first.abs().max().clamp(min=1e-6)).item()
    if not error < MAX_PACKING_ERROR:
        raise ValueError(
            f"rows of {model.hf.config.model_type} models cannot be packed: one changes another (by {error:.2g}); set "
            "sequence_packing.enabled=false"
        )


def probe_row(config: PreTrainedConfig, device: torch.device) -> Rows:
    """Return a row of different tokens; padding would have an embedding of zeros."""
    tokens = torch.arange(1, 5, device=device) % config.get_text_config().vocab_size
    return Rows(torch.tensor([0, len(tokens)], device=device), {TOKENS: tokens})
