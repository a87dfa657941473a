"""Costs of bringing a microbatch to the device, and of all that its reads do around the head."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ledger.answers import Answers
from ledger.costs import Costs
from ledger.counter import CostCounter
from rl_core.data.batch import TOKENS, Batch
from rl_core.data.ragged import Ragged
from rl_core.model import LOGPROBS
from rl_core.torch.heads.logprobs import Head
from rl_core.torch.heads.reads import split_language_reads
from rl_core.torch.rows import to_rows
from rl_dtensor.model.layout import Alignment, lay_out

DEVICE = torch.device("meta")
HIDDEN, VOCAB = 64, 256
"""Sizes of a head that waits do not depend on."""


def layout_costs(lengths: Sequence[int], columns: Sequence[str] = ()) -> Costs:
    """Return the costs of laying out a microbatch of packed rows, of reading logprobs and of their gradient.

    Args:
        lengths: Number of tokens of each row.
        columns: Columns of floats, one for each token, that the loss takes.
    """
    total = sum(lengths)

    def read(asked: Tensor) -> Tensor:
        if asked.shape == (len(lengths),):
            return torch.tensor(lengths)
        return torch.tensor(total if asked.dtype != torch.bool else False)

    tokens = Ragged(np.zeros(total, dtype=np.int32), np.cumsum([0, *lengths]))
    floats = tokens.like(np.zeros(total, dtype=np.float32))
    batch = Batch({TOKENS: tokens, **dict.fromkeys(columns, floats)})
    hidden = torch.empty(total, HIDDEN, device=DEVICE, requires_grad=True)
    head = Head(torch.empty(VOCAB, HIDDEN, device=DEVICE, requires_grad=True))
    with Answers(read, total), CostCounter(DEVICE.type) as counter:
        rows = to_rows(batch, DEVICE)
        layout = lay_out(rows, Alignment(), is_packed=True)
        reads = split_language_reads(
            hidden, layout.held, rows, head, [LOGPROBS], temperature=1.0, chunk_size=max(total, 1)
        )
        torch.autograd.backward([column.sum() for column in reads.values()])
    return counter.costs
