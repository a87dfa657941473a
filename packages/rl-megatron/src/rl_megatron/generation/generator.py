"""A generator on megatron-core's static inference context, in this process.

Of megatron-core 0.16's inference engine this runs the parts that need no GPU kernels: `StaticInferenceContext`, the
key-value cache of one batch, and `GPTInferenceWrapper`, the forward pass over it. Its controller is left out: it draws
all requests of a batch with the same parameters from one random generator, reports logprobs before temperature and
filters, and knows no stop strings. Its dynamic engine needs flash-attn, and a GPU.
"""

from __future__ import annotations

import gc
import socket
from collections import deque
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from rl_core.data.batch import TOKENS, Batch
from rl_core.data.microbatch import Batching
from rl_core.data.ragged import Ragged
from rl_core.devices import Device
from rl_core.model import LOGPROBS, ModelSpec, Rendezvous
from rl_core.model_config import GenerationConfig, LoraConfig, ModelConfig
from rl_core.rollouts.generation import Placement
from rl_core.torch.files.model_files import WeightFiles, model_folder
from rl_core.torch.generation.decoder import refuse_tensors
from rl_core.torch.generation.generator import LocalGenerator
from rl_core.torch.generation.row import Row
from rl_core.torch.training.lora import InitialFactors
from rl_core.torch.training.step import run_reads
from rl_core.torch.transport.digest import digest
from rl_core.weights import Manifest
from rl_megatron import cpu_shim
from rl_megatron.config import MegatronConfig
from rl_megatron.conversion.weight_map import WeightMap, by_tensor, whole_tensors
from rl_megatron.generation.batch import StaticBatch
from rl_megatron.generation.plugin import LINEAR_PROBLEM, MegatronGenerationConfig
from rl_megatron.model.build import build_model
from rl_megatron.model.model import LM_HEAD, ReadingModel, forget_embeddings
from rl_megatron.model.routing import MegatronRoutingRecorder
from rl_megatron.parallel.mesh import MegatronMesh
from rl_megatron.training.residency import MegatronResidency
from rl_megatron.training.step import MegatronModel
from rl_megatron.training.weights import MegatronWeights

ONE_ROW = Batching(packed=False, max_tokens=None, max_rows=1)


class MegatronDecoder(StaticBatch):
    """A `Decoder` on one device.

    Args:
        config: Config of the generator.
        model: Config of the model.
        reports_routing: True if completions carry the experts that tokens were sent to.

    Raises:
        ValueError: If the model's files and config do not fit together, its family has no weight mapping, or it has no
            experts to report.
    """

    def __init__(
        self, config: MegatronGenerationConfig, model: ModelConfig, device: Device, *, reports_routing: bool
    ) -> None:
        self._config = config
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self._mesh = MegatronMesh.join(Rendezvous(0, 1, 0, "127.0.0.1", port, device.name), MegatronConfig())
        try:
            loaded, self._weights = load_model(model, self._mesh)
            recorder = MegatronRoutingRecorder(loaded.chunks[0], loaded.config) if reports_routing else None
        except BaseException:
            self._mesh.leave()
            raise
        self._residency = MegatronResidency(loaded, None, device)
        prefill = config.max_prefill_tokens
        super().__init__(loaded, device.torch_device, max_prefill_tokens=prefill, recorder=recorder)

    @property
    def vocab_size(self) -> int:
        """Number of tokens that the model knows."""
        return int(self.model.hf.vocab_size)

    def admit(self, waiting: deque[Row], version: int) -> int:
        """Start a batch if no row is being decoded: the request that has waited longest, and others whose prompts are
        about as long."""
        if self.rows:
            return 0
        chosen = next_batch(waiting, self._config.max_batch_size)
        return self.start(chosen, version) if chosen else 0

    def score(self, token_ids: np.ndarray) -> np.ndarray:
        """Return float32 `[tokens]`, logprobs of given tokens at temperature 1; the first is 0."""
        batch = Batch({TOKENS: Ragged.from_rows([token_ids])})
        model = MegatronModel(self.model, [], self._weights, self._mesh, shape=None, reports_layers=False)
        found = run_reads(model, batch, [LOGPROBS], temperature=1.0, batching=ONE_ROW, mesh=self._mesh)
        assert found is not None
        return np.asarray(found.ragged(LOGPROBS.name).values, dtype=np.float32)

    def adoption(self, manifest: Manifest) -> MegatronAdoption:
        """Prepare for these weights."""
        return MegatronAdoption(self.model, self._weights, manifest)

    def offload(self) -> None:
        """Free the device of the weights."""
        self._residency.offload(["parameters"])

    def onload(self) -> None:
        """Bring the weights back to the device."""
        self._residency.onload(["parameters"])

    def close(self) -> None:
        """Leave the process groups."""
        vars(self).clear()
        forget_embeddings()
        gc.collect()
        MegatronMesh.leave()


class MegatronAdoption:
    """One weight version on its way into a model on one rank, whose tensors are overwritten in place: converted as they
    arrive by name, and checked before they are served.

    A parameter made of several Hugging Face tensors is written once all of them are there.

    Raises:
        WeightSyncError: If tensors are missing in the model or the manifest, have another shape, or are tied in only
            one of the two.
    """

    def __init__(self, model: ReadingModel, weights: MegatronWeights, manifest: Manifest) -> None:
        self._model = model
        self._held = weights.held
        self._manifest = manifest
        self._maps = [entry for entry in weights.maps if entry.copy_of is None]
        self._maps_of: dict[str, list[WeightMap]] = {}
        for entry in self._maps:
            for source in entry.sources:
                self._maps_of.setdefault(source.name, []).append(entry)
        self._arrived: dict[str, dict[str, Tensor]] = {}
        self._digests: dict[str, str] = {}
        shapes = {spec.name: spec.shape for spec in manifest.tensors}
        expected = {source.name: source.shape for entry in self._maps for source in entry.sources}
        tied = {name for name, source in manifest.tied.items() if weights.tied.get(name) != source}
        refuse_tensors(manifest, tied, "tied by the sender, and not in the engine:")
        refuse_tensors(manifest, set(shapes) & set(weights.tied), "tied in the engine, yet sent apart:")
        refuse_tensors(manifest, set(shapes) - set(expected), "the engine has no")
        refuse_tensors(manifest, set(expected) - set(shapes), "it leaves out")
        others = [name for name, shape in shapes.items() if shape != expected[name]]
        refuse_tensors(manifest, others, "the engine has another shape for")

    @torch.no_grad()
    def take(self, name: str, tensor: Tensor) -> None:
        """Write the parameter that is made of the tensor of this name, once its other tensors are there too."""
        entry, *others = self._maps_of[name]
        target = self._held[entry.target]
        wanted = tensor.to(target.dtype)
        self._digests[name] = digest(wanted)
        for each in (entry, *others):
            self._write(each, name, wanted)
        head = self._model.head_parameter()
        if self._manifest.tied.get(LM_HEAD) == name and head is not target:
            head.copy_(wanted)

    def _write(self, entry: WeightMap, name: str, wanted: Tensor) -> None:
        """Write a parameter of this tensor, once its other tensors are there too."""
        arrived = self._arrived.setdefault(entry.target, {})
        # The sender's buffer is overwritten after this call.
        arrived[name] = wanted.clone() if len(entry.sources) > 1 else wanted
        if len(arrived) == len(entry.sources):
            del self._arrived[entry.target]
            parts = [source.part_of(arrived[source.name]) for source in entry.sources]
            self._held[entry.target].copy_(entry.split.part(lambda index, slices: parts[index][slices], 0, 1))

    @torch.no_grad()
    def verify(self) -> None:
        """Check that every parameter is made of the tensors that arrived, and that the head is the one that the model
        reads.

        Raises:
            WeightSyncError: If one is not, with the names of its Hugging Face tensors.
        """
        stale = set()
        for group in by_tensor(self._maps):
            joined = whole_tensors(group, [each.split.join([self._held[each.target].detach()]) for each in group])
            for source, found in zip(group[0].sources, joined, strict=True):
                # A tensor that never arrived has no digest, so that no tensor equals it.
                if digest(found.contiguous()) != self._digests.get(source.name):
                    stale.add(source.name)
        head = self._model.head_parameter()
        if digest(head.detach()) != self._digests.get(self._manifest.tied.get(LM_HEAD, LM_HEAD)):
            stale.add(LM_HEAD)
        refuse_tensors(self._manifest, stale, "the engine computes with a stale")


class MegatronGenerator(LocalGenerator[MegatronDecoder]):
    """`rl_core.Generator` on a model of megatron-core, batched statically. One process holds one,
    and no model worker next to it: Megatron keeps its process groups per process.
    """

    def __init__(
        self, config: GenerationConfig, backend: MegatronGenerationConfig, model: ModelConfig, placement: Placement
    ) -> None:
        del config  # Every request carries its own sampling parameters.
        device = placement.kind
        if device.kernels == "cpu":
            cpu_shim.install()
        build = partial(MegatronDecoder, backend, model, device, reports_routing=placement.reports_routing)
        # Its `decode` gives a string for one sequence.
        load_tokenizer: Any = partial(AutoTokenizer.from_pretrained, trust_remote_code=False)
        super().__init__(build, load_tokenizer, model, placement)


def load_model(config: ModelConfig, mesh: MegatronMesh) -> tuple[ReadingModel, MegatronWeights]:
    """Return the model and its weights, in its precision, without dropout and gradients. Adapters are left out: weights
    arrive with them merged in.

    Raises:
        ValueError: If the files, the config and the family do not fit together, or the cache does not hold the state of
            the model's layers.
    """
    folder = model_folder(config.model_name)
    plain = config.model_copy(update={"lora_cfg": LoraConfig()})
    spec = ModelSpec(role="policy", trains=False)
    mesh.seed(spec.seed)
    # Only the local layers' attention reads a static batch's cache.
    backend = MegatronConfig(transformer_engine=False)
    model = build_model(plain, backend, spec, folder=folder, is_packed=False, mesh=mesh)
    if model.config.linear_attention_freq is not None:
        raise ValueError(f"{LINEAR_PROBLEM.key}: {LINEAR_PROBLEM.message}")
    weights = MegatronWeights(model, WeightFiles.of(folder), mesh)
    weights.load(InitialFactors(spec.seed))
    model.train(False)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model, weights


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
