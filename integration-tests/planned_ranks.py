"""Ranks whose bytes are counted while they train, for comparison with a plan."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl_core.data.batch import Batch
from rl_core.data.microbatch import shard
from rl_core.images import STORE_VARIABLE, ImageStore
from rl_core.model import ModelSpec
from rl_core.model_config import ModelConfig
from rl_core.plugins import POLICIES, plugin, resolve
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.rank_pool import Rank
from rl_core.testing.model_worker import make_batch
from rl_core.testing.torch.vision_rows import Rows


def _bytes(tensors: Any) -> int:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def image_rows(folder: str, images: str) -> Batch:
    """Return equal rows with two images each."""
    return Rows(Path(folder), ImageStore(Path(images))).batch([0] * 4)


class KeptBytes(TorchDispatchMode):
    """Bytes of the tensors that a forward pass makes and that are still there when its backward pass begins.

    Attributes:
        kept: Maximum number of bytes, of one microbatch after another.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept = 0
        self._live: dict[int, StorageWeakRef] = {}
        self._was_forward = True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_forward = torch._C._current_graph_task_id() < 0
        if self._was_forward and not is_forward:
            self.kept = max(self.kept, self.live())
        self._was_forward = is_forward
        given = {each._cdata for each in _storages((args, kwargs or {}))}
        result = function(*args, **(kwargs or {}))
        if is_forward:
            made = _storages(result)
            self._live |= {each._cdata: StorageWeakRef(each) for each in made if each._cdata not in given}
        return result

    def live(self, besides: Sequence[Tensor] = ()) -> int:
        """Return the bytes that are still there, without those of some tensors."""
        known = {each.untyped_storage()._cdata for each in besides}
        live = (each.cdata for key, each in self._live.items() if key not in known)
        found = (torch.UntypedStorage._new_with_weak_ptr(each) for each in live)
        return sum(each.nbytes() for each in found if each is not None)


def _storages(values: Any) -> list[torch.UntypedStorage]:
    """Return the storages of the tensors with data among nested values."""
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and not leaf.is_meta)
    return [_local(each).untyped_storage() for each in tensors]


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    for name in ("_local_tensor", "elem"):
        tensor = getattr(tensor, name, tensor)
    return tensor


def trained_bytes(
    rank: Rank,
    backend: str,
    settings: dict[str, Any],
    config: ModelConfig,
    lengths: tuple[int, ...],
    folder: str,
    images: str = "",
) -> dict[str, float]:
    """Train a step, save it, and return the bytes of this rank: `weights`, `gradients`, `optimizer`, `kept` for the
    backward pass, `copied` to be written in the background, and `checkpoint` of all ranks.

    Args:
        rank: This rank.
        backend: Name of the training backend.
        settings: Its settings.
        config: Section of the model.
        lengths: Lengths of rows without images.
        folder: Folder to save to.
        images: Folder of images; rows then have some.
    """
    os.environ[STORE_VARIABLE] = images
    found = plugin(POLICIES, backend)
    worker = resolve(found.worker)(config, found.config(**settings), ModelSpec(), rank.rendezvous)
    try:
        coordinates = worker.coordinates()
        batch = image_rows(config.model_name, images) if images else make_batch(lengths, vocab=45)
        rows = shard(batch.lengths, coordinates.along("dp"))[coordinates.on("dp")]
        residency = worker._residency
        with KeptBytes() as kept:
            worker.accumulate(batch.select(rows), TokenLoss())
        grads = [*residency.lost("parameters"), *residency.lost("optimizer")]
        for chunk in getattr(residency, "_models", ()):
            grads += [_local(each.grad) for each in chunk.parameters() if each.grad is not None]
        gradients = _bytes(grads)
        worker.apply()
        weights, state = _bytes(residency.kept("parameters")), _bytes(residency.kept("optimizer"))
        with KeptBytes() as copied:
            worker.save(folder, wait=False)
        copies = copied.live([*residency.kept("parameters"), *residency.kept("optimizer")])
        worker.finish_save()
        worker.export(f"{folder}/hf")
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        return {
            "weights": weights,
            "gradients": gradients,
            "optimizer": state,
            "kept": kept.kept,
            "copied": copies,
            "checkpoint": size,
        }
    finally:
        worker.close()
