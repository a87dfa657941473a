"""Logprobs of the reference policy, read when a batch needs them."""

from __future__ import annotations

import numpy as np

from rl_algos.images.columns import seen_columns
from rl_algos.preference.rows import ID
from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.model import LOGPROBS, Model

REF_LOGPROBS = "ref_logprobs"


class ReferenceLogprobs:
    """Adds the column `ref_logprobs` to batches.

    Args:
        cached: Keep what was read, by row, so that later epochs and validations do not read it again. It takes 4 bytes
            for each token of the data, in the driver's memory.
    """

    def __init__(self, *, cached: bool = False) -> None:
        self._kept: dict[str, np.ndarray] | None = {} if cached else None

    def __call__(self, batch: Batch, policy: Model) -> Batch:
        """The batch with the column."""
        if self._kept is None:
            return batch.with_columns({REF_LOGPROBS: _read(batch, policy).columns["logprobs"]})
        ids = batch.array(ID).tolist()
        missing = [row for row, id in enumerate(ids) if id not in self._kept]
        if missing:
            read = _read(batch.select(missing), policy).ragged("logprobs")
            self._kept.update((ids[row], np.array(read[place])) for place, row in enumerate(missing))
        return batch.with_columns({REF_LOGPROBS: Ragged.from_rows([self._kept[id] for id in ids], dtype=np.float32)})


def _read(batch: Batch, policy: Model) -> Batch:
    return policy.infer(seen_columns(batch), [LOGPROBS], reference=True)
