"""A Megatron model and the rows that it decodes."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Sequence

import numpy as np

from rl_core.data.batch import TOKENS, Batch
from rl_core.data.microbatch import Batching
from rl_core.data.ragged import Ragged
from rl_core.devices import Device
from rl_core.model import LOGPROBS
from rl_core.model_config import ModelConfig
from rl_core.torch.generation.row import Row
from rl_core.torch.training.step import run_reads
from rl_core.weights import Manifest
from rl_megatron.generation.batch import StaticBatch
from rl_megatron.generation.config import MegatronGenerationConfig
from rl_megatron.generation.loading import join_alone, load_model
from rl_megatron.generation.weights import WeightAdoption
from rl_megatron.model.model import forget_embeddings
from rl_megatron.model.replay import RoutingRecorder
from rl_megatron.parallel.mesh import leave_groups
from rl_megatron.training.residency import ModelResidency
from rl_megatron.training.step import MegatronModel

ONE_ROW = Batching(packed=False, max_tokens=None, max_rows=1)


class MegatronDecoder:
    """A `Decoder` on one device.

    Args:
        config: Config of the generator.
        model: What is generated with.
        reports_routing: True if completions carry the experts that tokens were sent to.

    Raises:
        ValueError: If the model's files and config do not fit together, its family has no weight mapping, or it has no
            experts to report.
    """

    def __init__(
        self, config: MegatronGenerationConfig, model: ModelConfig, device: Device, *, reports_routing: bool
    ) -> None:
        self._config = config
        self._mesh = join_alone(device)
        try:
            self.model, self._weights = load_model(model, self._mesh)
            recorder = RoutingRecorder(self.model.chunks[0], self.model.config) if reports_routing else None
        except BaseException:
            leave_groups()
            raise
        self._residency = ModelResidency(self.model, None, device)
        self._batch = StaticBatch(
            self.model, device.torch_device, max_prefill_tokens=config.max_prefill_tokens, recorder=recorder
        )

    @property
    def vocab_size(self) -> int:
        """Tokens that the model knows."""
        return int(self.model.hf.vocab_size)

    @property
    def rows(self) -> Sequence[Row]:
        """Rows under way."""
        return self._batch.rows

    def admit(self, waiting: deque[Row], version: int) -> int:
        """Start a batch if none is under way: of the request that has waited longest and of others whose prompts are
        about as long."""
        if self.rows:
            return 0
        chosen = next_batch(waiting, self._config.max_batch_size)
        return self._batch.start(chosen, version) if chosen else 0

    def step(self, version: int) -> int:
        """Go on by one column."""
        return self._batch.step(version)

    def drop_cancelled(self) -> None:
        """Drop rows that nobody waits for any longer."""
        self._batch.drop_cancelled()

    def clear(self) -> list[Row]:
        """Drop all rows and their cache; the rows that were there."""
        return self._batch.clear()

    def score(self, token_ids: np.ndarray) -> np.ndarray:
        """float32 `[tokens]`, logprobs of given tokens at temperature 1; the first is 0."""
        batch = Batch({TOKENS: Ragged.from_rows([token_ids])})
        model = MegatronModel(self.model, [], self._weights, self._mesh, shape=None, reports_layers=False)
        found = run_reads(model, batch, [LOGPROBS], temperature=1.0, batching=ONE_ROW, mesh=self._mesh)
        assert found is not None
        return np.asarray(found.ragged(LOGPROBS.name).values, dtype=np.float32)

    def adoption(self, manifest: Manifest) -> WeightAdoption:
        """Make ready for these weights."""
        return WeightAdoption(self.model, self._weights, manifest)

    def offload(self) -> None:
        """Free the device of the weights."""
        self._residency.offload(["parameters"])

    def onload(self) -> None:
        """Bring the weights back to the device."""
        self._residency.onload(["parameters"])

    def close(self) -> None:
        """Leave the process groups."""
        del self._batch, self._weights, self._residency, self.model
        forget_embeddings()
        gc.collect()
        leave_groups()


def next_batch(waiting: deque[Row], max_rows: int) -> list[Row]:
    """Take the next batch out of the rows that wait, in their order.

    If two prompts differ in length, the difference is read column by column. A row joins the one that has waited
    longest if that takes fewer steps than to decode it after the others.
    """
    while waiting and waiting[0].future.cancelled():
        waiting.popleft()
    if not waiting:
        return []
    oldest = waiting[0].num_prompt_tokens
    chosen: list[Row] = []
    left: list[Row] = []
    for row in waiting:
        joins = len(chosen) < max_rows and abs(row.num_prompt_tokens - oldest) <= row.limit
        if not row.future.cancelled():
            (chosen if joins else left).append(row)
    waiting.clear()
    waiting.extend(left)
    return chosen
