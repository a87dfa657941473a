"""New weights for a loaded model: taken in by name, and checked before they are served."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rl_core.torch.generation.decoder import refuse_tensors
from rl_core.torch.transport.digest import digest
from rl_core.weights import Manifest
from rl_dtensor.model.names import FileNames


class WeightAdoption:
    """One weight version on its way into a model, whose tensors are overwritten in place.

    Args:
        names: Names of its tensors in its files, which may hold parts of them; None if they are those of the model.

    Raises:
        WeightSyncError: Naming tensors that the model does not have, that the manifest leaves out, of another shape, or
            sent apart though the model has them tied.
    """

    def __init__(self, model: nn.Module, manifest: Manifest, names: FileNames | None = None) -> None:
        self._model = model
        self._manifest = manifest
        self._names = names
        self._digests: dict[str, str] = {}
        tensors = self._tensors()
        shapes = {spec.name: spec.shape for spec in manifest.tensors}
        sources = {name: name for name in shapes} | dict(manifest.tied)
        refuse_tensors(manifest, [name for name in sources if name not in tensors], "the engine has no")
        wrong = [name for name, source in sources.items() if tuple(tensors[name].shape) != shapes.get(source)]
        refuse_tensors(manifest, wrong, "the engine has another shape for")
        parameters = self._split(dict(model.named_parameters(remove_duplicate=False)))
        for tied in _tied_names(tensors):
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
        """Overwrite the tensor of this name, and those equal to it, converting to the model's precision."""
        for target in self._targets[name]:
            target.copy_(tensor)
        self._digests[name] = digest(tensor.to(self._targets[name][0].dtype))

    def verify(self) -> None:
        """Check that every tensor the model computes with is the one that arrived.

        Raises:
            WeightSyncError: Naming those that are not, under every name a module reads them by.
        """
        current = self._tensors()
        # a source that never arrived has no digest, which no tensor equals
        stale = [name for name, source in self._sources.items() if digest(current[name]) != self._digests.get(source)]
        refuse_tensors(self._manifest, stale, "the engine computes with a stale")

    def _tensors(self) -> dict[str, Tensor]:
        """The tensors that the model computes with, by the names in its files."""
        return self._split(self._model.state_dict())

    def _split(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self._names is None:
            return dict(tensors)
        return {
            piece.name: tensor[piece.region] if piece.region else tensor
            for name, tensor in tensors.items()
            for piece in self._names.pieces(name, tuple(tensor.shape))
        }


def _tied_names(tensors: dict[str, Tensor]) -> list[list[str]]:
    """Names that share memory, together; every name is in one list."""
    groups: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(tensor.data_ptr(), []).append(name)
    return list(groups.values())
