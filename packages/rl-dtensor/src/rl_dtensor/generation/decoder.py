"""A Hugging Face model and the rows that it decodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rl_core.devices import Device
from rl_core.errors import RequestRefused
from rl_core.torch.generation.row import Row
from rl_core.torch.heads.logprobs import CHUNK_SIZE
from rl_core.torch.residency.module_residency import ModuleResidency
from rl_core.weights import Manifest
from rl_dtensor.generation.batch import DecodingBatch
from rl_dtensor.generation.cache import Kind, RowCache, has_states
from rl_dtensor.generation.config import HFConfig
from rl_dtensor.generation.images import PromptImages
from rl_dtensor.generation.weights import WeightAdoption
from rl_dtensor.generation.whole_rows import WholeRowBatch
from rl_dtensor.model.names import FileNames
from rl_dtensor.model.replay import RoutingRecorder


class HFDecoder:
    """A `Decoder` on one device; rows join and leave between steps.

    Args:
        module: Module in its precision, without dropout.
        kinds: Kinds of the layers of its cache; None if it is decoded without one.
        chunk_size: Tokens whose logits exist at one time when given ones are scored; None for the default.
        recorder: Recorder of the experts that tokens are sent to; None if they are not reported.
        images: Reader of the images of prompts; None for a language model.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        kinds: Sequence[Kind] | None,
        config: HFConfig,
        device: Device,
        *,
        chunk_size: int | None,
        recorder: RoutingRecorder | None,
        images: PromptImages | None = None,
    ) -> None:
        self.module = module
        self._config = config
        self._device = device.torch_device
        self._chunk_size = chunk_size or CHUNK_SIZE
        self._kinds = kinds
        self._images = images
        self._batch: DecodingBatch | WholeRowBatch = (
            WholeRowBatch(module, self._device, recorder, most_tokens=config.max_prefill_tokens)
            if kinds is None
            else DecodingBatch(module, kinds, self._device, recorder, images)
        )
        self._residency = ModuleResidency(module, device)

    @property
    def vocab_size(self) -> int:
        """Tokens that the model knows."""
        return cast("nn.Embedding", self.module.get_input_embeddings()).num_embeddings

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
                if row.future.cancelled() or not self._accepts(row):
                    continue
                joining.append(row)
                longest = max(longest, row.num_prompt_tokens)
            if joining:
                num_joined += len(joining)
                self._batch.join(joining, version)
        return num_joined

    def _accepts(self, row: Row) -> bool:
        """Return whether a row's images can be read; one whose images cannot fails."""
        try:
            if self._images is not None:
                self._images.check(row.request)
            elif row.request.images:
                raise RequestRefused(
                    "the request has images, but the engine serves a language model only; set policy.vision.enabled"
                )
        except RequestRefused as error:
            if row.future.set_running_or_notify_cancel():
                row.future.set_exception(error)
            return False
        return True

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
        for start, logits in self._chunks(tokens[:-1]):
            following = tokens[start + 1 : start + 1 + len(logits), None]
            chunk = logits.float().log_softmax(dim=-1).gather(1, following)[:, 0]
            logprobs[start + 1 : start + 1 + len(logits)] = chunk
        return logprobs.cpu().numpy()

    def _chunks(self, tokens: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Logits `[tokens, vocab]` of one row in parts, each with the place where it starts. Without a cache there is
        one part."""
        if self._kinds is None:
            if len(tokens):
                yield 0, self.module(input_ids=tokens[None], use_cache=False).logits[0]
            return
        cache = RowCache(self._kinds)
        # the logits of a whole long row may be larger than the model; code of some families (Jamba) reads several
        # tokens behind a state as if there were none
        following_size = 1 if has_states(self._kinds) else self._chunk_size
        start, size = 0, self._chunk_size
        while start < len(tokens):
            part = tokens[start : start + size]
            places = torch.arange(start, start + len(part), device=self._device)
            output = self.module(input_ids=part[None], position_ids=places[None], past_key_values=cache, use_cache=True)
            yield start, output.logits[0]
            start, size = start + len(part), following_size

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
