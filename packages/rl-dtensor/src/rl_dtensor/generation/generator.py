"""A generator on a Hugging Face model, in this process: the model, the rows that it decodes, and its new weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

from rl_core.devices import Device
from rl_core.errors import ConfigError, RequestRefused
from rl_core.model_config import GenerationConfig, ModelConfig
from rl_core.rollouts.generation import Placement
from rl_core.torch.files.file_names import FileNames
from rl_core.torch.files.model_files import model_folder
from rl_core.torch.generation.decoder import refuse_tensors
from rl_core.torch.generation.generator import LocalGenerator
from rl_core.torch.generation.row import Row
from rl_core.torch.heads.logprobs import CHUNK_SIZE, logprobs_of
from rl_core.torch.kernels.exact import exact_rows
from rl_core.torch.residency import ModuleResidency
from rl_core.torch.transport.digest import digest
from rl_core.weights import Manifest
from rl_dtensor.generation.batch import DecodingBatch, WholeRowBatch
from rl_dtensor.generation.cache import Kind, RowCache, has_states
from rl_dtensor.generation.decoding_pass import DecodingPass
from rl_dtensor.generation.exact_pass import ExactPass
from rl_dtensor.generation.images import PromptImages
from rl_dtensor.generation.loading import cache_layers, decoding_pass, load_model
from rl_dtensor.generation.plugin import HFConfig, exact_problem
from rl_dtensor.model.layers.replay import RoutingRecorder


class HFDecoder:
    """A `Decoder` on one device; rows join and leave between steps.

    Args:
        module: Module in its precision, without dropout.
        kinds: Kinds of the layers of its cache; None if it is decoded without one.
        chunk_size: Tokens whose logits exist at one time when given ones are scored; None for the default.
        recorder: Recorder of the experts that tokens are sent to; None if they are not reported.
        images: Reader of the images of prompts; None for a language model.
        decoding_pass: Pass over one token of every row; None to run the module.
        exact: Pass that computes the trainer's bits, for a module with a cache; None for none.
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
        decoding_pass: DecodingPass | None = None,
        exact: ExactPass | None = None,
    ) -> None:
        self.module = module
        self._exact, self._arithmetic = exact, nullcontext if exact is None else exact_rows
        self._config = config
        self._device = device.torch_device
        self._chunk_size = chunk_size or CHUNK_SIZE
        self._kinds = kinds
        self._images = images
        self._pass = decoding_pass
        self._batch: DecodingBatch | WholeRowBatch
        if kinds is None:
            self._batch = WholeRowBatch(module, self._device, recorder, max_tokens=config.max_prefill_tokens)
        else:
            self._batch = DecodingBatch(module, kinds, self._device, recorder, images, decoding_pass, exact)
        self._residency = ModuleResidency(module, device)
        self.drop_cancelled = self._batch.drop_cancelled
        self.clear: Callable[[], list[Row]] = self._batch.clear

    @property
    def vocab_size(self) -> int:
        """Number of tokens that the model knows."""
        return cast("nn.Embedding", self.module.get_input_embeddings()).num_embeddings

    @property
    def rows(self) -> Sequence[Row]:
        """Rows that are being decoded."""
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
                with self._arithmetic():
                    self._batch.join(joining, version)
        return num_joined

    def _accepts(self, row: Row) -> bool:
        """Return whether a row's images can be read; a row whose images cannot be read fails."""
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
        with self._arithmetic():
            self._batch.step(version)
        return num_rows

    @torch.inference_mode()
    def score(self, token_ids: np.ndarray) -> np.ndarray:
        """Return float32 `[tokens]`, logprobs of given tokens at temperature 1; the first is 0."""
        tokens = torch.from_numpy(token_ids.astype(np.int64)).to(self._device)
        logprobs = torch.zeros(len(tokens), dtype=torch.float32, device=self._device)
        with self._arithmetic():
            for start, logits in self._chunks(tokens[:-1]):
                following = tokens[start + 1 : start + 1 + len(logits)]
                logprobs[start + 1 : start + 1 + len(logits)] = logprobs_of(logits.float(), following)
        return logprobs.cpu().numpy()

    def _chunks(self, tokens: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield logits `[tokens, vocab]` of one row in parts, each with the place where it starts. Without a cache
        there is one part."""
        if self._kinds is None:
            if len(tokens):
                yield 0, self.module(input_ids=tokens[None], use_cache=False).logits[0]
            return
        cache = RowCache(self._kinds)
        # The logits of a whole long row may be larger than the model. Code of some families (Jamba) ignores the state
        # when it reads several tokens, so these continue with one token at a time.
        following_size = 1 if has_states(self._kinds) else self._chunk_size
        start, size = 0, self._chunk_size
        while start < len(tokens):
            part = tokens[start : start + size]
            places = torch.arange(start, start + len(part), device=self._device)[None]
            if self._exact is not None:
                yield start, self._exact(part[None], [start + len(part)], cache, places, num_last=len(part))[0]
            else:
                output = self.module(input_ids=part[None], position_ids=places, past_key_values=cache, use_cache=True)
                yield start, output.logits[0]
            start, size = start + len(part), following_size

    def adoption(self, manifest: Manifest) -> WeightAdoption:
        """Prepare for these weights, which come in the parts of the model's files."""
        if self._pass is not None:
            self._pass.share_weights()
        return WeightAdoption(self.module, manifest, FileNames(self.module))

    def offload(self) -> None:
        """Free the device of the weights."""
        self._residency.offload(("parameters",))

    def onload(self) -> None:
        """Bring the weights back to the device."""
        self._residency.onload(("parameters",))

    def close(self) -> None:
        """Do nothing: garbage collection finds all of the decoder."""


class WeightAdoption:
    """One weight version on its way into a model, whose tensors are overwritten in place and checked before use.

    Args:
        names: Tensors of its files, which may hold parts of the model's; None if they are the same.

    Raises:
        WeightSyncError: Naming tensors that the model does not have, that the manifest leaves out, of another shape, or
            sent apart though the model has them tied.
    """

    def __init__(self, model: nn.Module, manifest: Manifest, names: FileNames | None = None) -> None:
        self._model = model
        self._manifest = manifest
        self._names = names
        self._digests: dict[str, str] = {}
        tensors = self._split(model.state_dict())
        shapes = {spec.name: spec.shape for spec in manifest.tensors}
        sources = {name: name for name in shapes} | dict(manifest.tied)
        refuse_tensors(manifest, [name for name in sources if name not in tensors], "the engine has no")
        wrong = [name for name, source in sources.items() if tuple(tensors[name].shape) != shapes.get(source)]
        refuse_tensors(manifest, wrong, "the engine has another shape for")
        parameters = self._split(dict(model.named_parameters(remove_duplicate=False)))
        by_memory: dict[int, list[str]] = {}
        for name, tensor in tensors.items():
            by_memory.setdefault(tensor.data_ptr(), []).append(name)
        for tied in by_memory.values():
            sent = [name for name in tied if name in shapes]
            refuse_tensors(manifest, sent[1:] and sent, "tied in the engine, yet sent apart:")
            covered = {sources[name] for name in tied if name in sources}
            refuse_tensors(manifest, [] if covered or not parameters.keys() & set(tied) else tied[:1], "it leaves out")
            for name in tied if covered else ():
                sources.setdefault(name, next(iter(covered)))
        self._sources = sources
        self._targets: dict[str, list[Tensor]] = {}
        for name, source in sources.items():
            self._targets.setdefault(source, []).append(tensors[name])

    @torch.no_grad()
    def take(self, name: str, tensor: Tensor) -> None:
        """Overwrite the tensor of this name, and tensors equal to it, converting to the model's precision."""
        for target in self._targets[name]:
            target.copy_(tensor)
        self._digests[name] = digest(tensor.to(self._targets[name][0].dtype))

    def verify(self) -> None:
        """Check that every tensor the model computes with is the one that arrived.

        Raises:
            WeightSyncError: Naming stale tensors, under every name a module reads them by.
        """
        current = self._split(self._model.state_dict())
        # A source that never arrived has no digest, and no tensor equals that.
        stale = [name for name, source in self._sources.items() if digest(current[name]) != self._digests.get(source)]
        refuse_tensors(self._manifest, stale, "the engine computes with a stale")

    def _split(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors of the model by file name."""
        if self._names is None:
            return dict(tensors)
        return {
            piece.name: tensor[piece.region] if piece.region else tensor
            for name, tensor in tensors.items()
            for piece in self._names.pieces(name, tuple(tensor.shape))
        }


class HFGenerator(LocalGenerator[HFDecoder]):
    """`rl_core.Generator` on a model of `transformers`, batched continuously."""

    def __init__(self, config: GenerationConfig, backend: HFConfig, model: ModelConfig, placement: Placement) -> None:
        # Every request carries its own sampling parameters.
        device, is_exact = placement.kind, config.exact
        if is_exact and (problem := exact_problem(backend, model, device)):
            raise ConfigError(f"policy.generation.exact: {problem}")

        def load() -> HFDecoder:
            module = load_model(model, backend.attn_implementation, device.torch_device)
            kinds = cache_layers(module, model.model_name)
            exact = ExactPass(module, kinds, model.model_name) if is_exact else None
            has_pass = kinds and not model.vision.enabled and exact is None
            own_pass = decoding_pass(module, kinds, model.model_name) if has_pass else None
            recorder = RoutingRecorder(module) if placement.reports_routing else None
            images = None
            if model.vision.enabled:
                if kinds is None:
                    raise ConfigError(f"hf decodes {model.model_name} without a cache, and shows it no images")
                images = PromptImages(module, model_folder(model.model_name), model.vision)
            size = model.logprob_chunk_size
            return HFDecoder(
                module,
                kinds,
                backend,
                device,
                chunk_size=size,
                recorder=recorder,
                images=images,
                decoding_pass=own_pass,
                exact=exact,
            )

        # Its `decode` returns a string for one sequence, which its type does not show.
        load_tokenizer: Any = partial(AutoTokenizer.from_pretrained, trust_remote_code=False)
        super().__init__(load, load_tokenizer, model, placement)
