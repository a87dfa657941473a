"""One weight version on its way into one rank of an engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rl_core.errors import WeightSyncError
from rl_core.weights import Manifest
from rl_vllm.patches.direct_copies import keeps_direct_copies
from rl_vllm.patches.expert_layers import packs_experts
from rl_vllm.weights.load_plan import LoadPlan, fed_names
from rl_vllm.weights.planned_load import PlannedLoad
from rl_vllm.weights.probe import WeightProbe
from rl_vllm.weights.quantisation_check import QuantisationCheck, QuantisationError


class WeightReceiver:
    """Takes in and checks the weights of one manifest.

    Args:
        model: This rank's part of the engine's model.
        model_config: VLLM's.
        manifest: Manifest of only the weights, without factors of adapters.
        plan: Plan of the load into this rank's model.
        planned: That load, if the plan is all it takes.
        uses_oracle: Compare quantised weights in float64 with those that arrived.

    Attributes:
        parts: Parts of the tensors, that this rank keeps.
    """

    def __init__(
        self,
        model: nn.Module,
        model_config: ModelConfig,
        manifest: Manifest,
        plan: LoadPlan,
        planned: PlannedLoad | None,
        *,
        uses_oracle: bool = False,
    ) -> None:
        self._model = model
        self._model_config = model_config
        self._manifest = manifest
        self.plan = plan
        self._planned = planned
        self.parts = plan.parts(manifest)
        self._probe: WeightProbe | None = None
        self._quantisation = QuantisationCheck(model, manifest.version, uses_oracle=uses_oracle)

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load the weights as they arrive, by the names that they are sent under; each lasts until its turn is over."""
        self._probe = WeightProbe(self._model, self.plan, self._manifest.version)
        sampled = self._sampled(tensors)
        with self._quantisation.watching():
            if self._planned is None:
                self._reload(sampled)
            else:
                self._planned.load(sampled)
        self.repack_tied()

    def _reload(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Hand tensors, under their Hugging Face names, to the engine's loaders."""
        with packs_experts(self._model):
            initialize_layerwise_reload(self._model)
            with keeps_direct_copies(self._model):
                try:
                    self._model.load_weights(self._kept(tensors))
                finally:
                    # also after a failure: the engine must be able to load the next version
                    finalize_layerwise_reload(self._model, self._model_config)

    def repack_tied(self) -> None:
        """Pack tied heads again: some loaders skip them, and on CPU they compute with their own packed copy."""
        owner: dict[int, nn.Module] = {}
        for layer in self._model.modules():
            if isinstance(layer, VocabParallelEmbedding) and owner.setdefault(id(layer.weight), layer) is not layer:
                layer.quant_method.process_weights_after_loading(layer)

    @property
    def quantisation_error(self) -> QuantisationError:
        """The error of the layers that quantise their weights."""
        return self._quantisation.error

    def stale(self) -> list[str]:
        """Hugging Face names of the tensors that this rank does not compute with.

        Raises:
            WeightSyncError: If nothing was received, or naming layers that do not hold what their recipe of
                quantisation makes of the weights that were received.
        """
        if self._probe is None:
            raise WeightSyncError(f"weight version {self._manifest.version} was announced but never received")
        faults = self._quantisation.faults()
        if faults:
            reasons = "; ".join(f"{path} ({', '.join(found)})" for path, found in faults.items())
            raise WeightSyncError(
                f"weight version {self._manifest.version}: quantised weights are wrong in {reasons}",
                tuple(self._fused_names(faults)),
            )
        return self._probe.stale()

    def _fused_names(self, paths: Iterable[str]) -> Iterator[str]:
        """Hugging Face names of the weights of layers of the engine."""
        for path in paths:
            yield from dict.fromkeys(piece.name for piece in self.plan.pieces.get(f"{path}.weight", ()))

    def _sampled(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        assert self._probe is not None
        for source, tensor in tensors:
            self._probe.take(source, tensor)
            yield source, tensor

    def _kept(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Tensors under every name that this rank loads them under."""
        names = fed_names(self._manifest)
        for source, tensor in tensors:
            # loaders keep a tensor until its layer is complete, the transport only until its next bucket
            kept = tensor.clone(memory_format=torch.contiguous_format)
            for name in names[source]:
                if name not in self.plan.unfed:
                    yield name, kept
