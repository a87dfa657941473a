"""Heads of one output: the values of a critic, the scores of a reward model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rl_core.model import Read, Role
from rl_core.torch.heads.reads import score_reads, value_reads
from rl_core.torch.loss import Rows


def scalar_reads(outputs: Tensor, rows: Rows, reads: Sequence[Read]) -> Mapping[str, Tensor]:
    """Columns of `values` `[tokens]` and `scores` `[rows]`, those that are asked for.

    Args:
        outputs: `[tokens]`, of the head.
        rows: Rows that the tokens belong to.
        reads: Reads named `values` or `scores`.
    """
    columns = {"values": value_reads, "scores": score_reads}
    return {read.name: columns[read.name](outputs, rows)[read.name] for read in reads}


def new_head(role: Role, shape: Sequence[int], *, std: float, seed: int) -> Tensor:
    """Weights `[1, hidden]` of a head that the model's files do not have, the same whatever the number of ranks.

    That of a critic is zero, so that its first values are 0 and the first advantages only those of the rewards; that
    of a reward model, which could not tell two responses apart with zeros, is drawn from N(0, std).
    """
    if role == "critic":
        return torch.zeros(*shape)
    return torch.empty(*shape).normal_(0.0, std, generator=torch.Generator().manual_seed(seed))
