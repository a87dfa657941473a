"""New weights for a loaded model: converted as they arrive by name, and checked before they are served."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_core.torch.generation.decoder import refuse_tensors
from rl_core.torch.transport.digest import digest
from rl_core.weights import Manifest
from rl_megatron.conversion.weight_map import WeightMap
from rl_megatron.model.model import LM_HEAD, ReadingModel
from rl_megatron.training.weights import Weights


class WeightAdoption:
    """One weight version on its way into a model on one rank, whose tensors are overwritten in place.

    A parameter made of several Hugging Face tensors is written once all of them are there.

    Raises:
        WeightSyncError: Naming tensors that the model does not have, that the manifest leaves out, of another shape, or
            that only one of the two has tied.
    """

    def __init__(self, model: ReadingModel, weights: Weights, manifest: Manifest) -> None:
        self._model = model
        self._held = weights.held
        self._manifest = manifest
        self._maps = [entry for entry in weights.maps if entry.copy_of is None]
        self._map_of = {source.name: entry for entry in self._maps for source in entry.sources}
        self._arrived: dict[str, dict[str, Tensor]] = {}
        self._digests: dict[str, str] = {}
        shapes = {spec.name: spec.shape for spec in manifest.tensors}
        expected = {source.name: source.shape for entry in self._maps for source in entry.sources}
        tied = {name for name, source in manifest.tied.items() if weights.tied.get(name) != source}
        refuse_tensors(manifest, tied, "tied by the sender, and not in the engine:")
        refuse_tensors(manifest, set(shapes) & set(weights.tied), "tied in the engine, yet sent apart:")
        refuse_tensors(manifest, set(shapes) - set(expected), "the engine has no")
        refuse_tensors(manifest, set(expected) - set(shapes), "it leaves out")
        refuse_tensors(
            manifest,
            [name for name, shape in shapes.items() if shape != expected[name]],
            "the engine has another shape for",
        )

    @torch.no_grad()
    def take(self, name: str, tensor: Tensor) -> None:
        """Write the parameter that is made of the tensor of this name, once its other tensors are there too."""
        entry = self._map_of[name]
        target = self._held[entry.target]
        wanted = tensor.to(target.dtype)
        self._digests[name] = digest(wanted)
        arrived = self._arrived.setdefault(entry.target, {})
        # the sender's buffer is overwritten once this returns
        arrived[name] = wanted.clone() if len(entry.sources) > 1 else wanted
        if len(arrived) == len(entry.sources):
            del self._arrived[entry.target]
            sources = [arrived[source.name] for source in entry.sources]
            target.copy_(entry.split.part(lambda index, slices: sources[index][slices], 0, 1))
        head = self._model.head_parameter()
        if self._manifest.tied.get(LM_HEAD) == name and head is not target:
            head.copy_(wanted)

    @torch.no_grad()
    def verify(self) -> None:
        """Check that every parameter is made of what arrived, and that the head is the one that the model reads.

        Raises:
            WeightSyncError: Naming the Hugging Face tensors that are not.
        """
        stale = [name for entry in self._maps for name, found in self._computed(entry) if self._is_stale(name, found)]
        head = self._model.head_parameter()
        if digest(head.detach()) != self._digests.get(self._manifest.tied.get(LM_HEAD, LM_HEAD)):
            stale.append(LM_HEAD)
        refuse_tensors(self._manifest, set(stale), "the engine computes with a stale")

    def _computed(self, entry: WeightMap) -> list[tuple[str, Tensor]]:
        joined = entry.split.join([self._held[entry.target].detach()])
        return [(source.name, tensor) for source, tensor in zip(entry.sources, joined, strict=True)]

    def _is_stale(self, name: str, found: Tensor) -> bool:
        # a tensor that never arrived has no digest, so that no tensor equals it
        return digest(found.contiguous()) != self._digests.get(name)
