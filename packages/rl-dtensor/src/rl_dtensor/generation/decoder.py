"""A Hugging Face model and the rows that it decodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from rl_core.devices import Device
from rl_core.torch.generation.row import Row
from rl_core.torch.residency.module_residency import ModuleResidency
from rl_core.weights import Manifest
from rl_dtensor.generation.batch import DecodingBatch
from rl_dtensor.generation.cache import RowCache, has_states, row_layers
from rl_dtensor.generation.config import HFConfig
from rl_dtensor.generation.weights import WeightAdoption
from rl_dtensor.names import FileNames
from rl_dtensor.replay import RoutingRecorder


class HFDecoder:
    """A `Decoder` on one device; rows join and leave between steps.

    Args:
        module: in its precision, without dropout.
        chunk_size: tokens whose logits exist at one time when given ones are scored.
        recorder: of the experts that tokens are sent to; None if they are not reported.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        config: HFConfig,
        device: Device,
        *,
        chunk_size: int,
        recorder: RoutingRecorder | None,
    ) -> None:
        self.module = module
        self._config = config
        self._device = device.torch_device
        self._chunk_size = chunk_size
        self._batch = DecodingBatch(module, self._device, recorder)
        self._residency = ModuleResidency(module, device)

    @property
    def vocab_size(self) -> int:
        """Tokens that the model knows."""
        return int(self.module.get_input_embeddings().num_embeddings)

    @property
    def rows(self) -> Sequence[Row]:
        """Rows under way."""
        return self._batch.rows

    def admit(self, waiting: deque[Row], version: int) -> int:
        """Give waiting rows, in order, the free places of the batch."""
        num_joined = 0
        while waiting and len(self.rows) < self._config.max_batch_size:
            joining: list[Row] = []
            longest = 0
            while waiting and len(self.rows) + len(joining) < self._config.max_batch_size:
                row = waiting[0]
                padded = max(longest, row.num_prompt_tokens) * (len(joining) + 1)
                if joining and padded > self._config.max_prefill_tokens:
                    break
                waiting.popleft()
                if row.future.cancelled():
                    continue
                joining.append(row)
                longest = max(longest, row.num_prompt_tokens)
            if joining:
                num_joined += len(joining)
                self._batch.join(joining, version)
        return num_joined

    def step(self, version: int) -> int:
        """Sample one token for every row."""
        num_rows = len(self.rows)
        self._batch.step(version)
        return num_rows

    def drop_cancelled(self) -> None:
        """Drop rows that nobody waits for any longer."""
        self._batch.drop_cancelled()

    def clear(self) -> list[Row]:
        """Drop all rows and their cache; the rows that were there."""
        return self._batch.clear()

    @torch.inference_mode()
    def score(self, token_ids: np.ndarray) -> np.ndarray:
        """float32 `[tokens]`, logprobs of given tokens at temperature 1; the first is 0."""
        tokens = torch.from_numpy(token_ids.astype(np.int64)).to(self._device)
        logprobs = torch.zeros(len(tokens), dtype=torch.float32, device=self._device)
        kinds = row_layers(self.module.config)
        cache = RowCache(kinds)
        # in chunks, as the logits of a whole long row may be larger than the model; code of some families (Jamba) reads
        # several tokens behind a state as if there were none
        following_size = 1 if has_states(kinds) else self._chunk_size
        end = 0
        while end < len(tokens) - 1:
            start, size = end, following_size if end else self._chunk_size
            end = min(start + size, len(tokens) - 1)
            logits = self.module(
                input_ids=tokens[None, start:end],
                position_ids=torch.arange(start, end, device=self._device)[None],
                past_key_values=cache,
                use_cache=True,
            ).logits[0]
            following = tokens[start + 1 : end + 1, None]
            logprobs[start + 1 : end + 1] = logits.float().log_softmax(dim=-1).gather(1, following)[:, 0]
        return logprobs.cpu().numpy()

    def adoption(self, manifest: Manifest) -> WeightAdoption:
        """Make ready for these weights, which come by the names and in the parts that the model's files have."""
        return WeightAdoption(self.module, manifest, FileNames(self.module))

    def offload(self) -> None:
        """Free the device of the weights."""
        self._residency.offload(("parameters",))

    def onload(self) -> None:
        """Bring the weights back to the device."""
        self._residency.onload(("parameters",))

    def close(self) -> None:
        """Nothing outlives the object."""
