"""Ranks whose bytes are counted while they train, for comparison with a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_core.data.microbatch import shard
from rl_core.model import ModelSpec
from rl_core.model_config import ModelConfig
from rl_core.plugins import POLICIES, plugin, resolve
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.rank_pool import Rank
from rl_core.testing.model_worker import make_batch


def _bytes(tensors: Any) -> int:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


class SavedBytes:
    """Bytes of the storages that autograd keeps for a backward pass, without those of parameters.

    Attributes:
        peak: Maximum number of bytes, of one microbatch after another.
    """

    def __init__(self, parameters: set[int], module: Any) -> None:
        self._known = parameters
        self._alive: dict[int, Tensor] = {}
        self.peak = 0

    def pack(self, tensor: Tensor) -> Tensor:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.untyped_storage()
        if storage._cdata not in self._known and not local.is_meta:
            self._alive[storage._cdata] = local
            self.peak = sum(each.untyped_storage().nbytes() for each in self._alive.values())
        return tensor


def trained_bytes(
    rank: Rank, backend: str, settings: dict[str, Any], config: ModelConfig, lengths: tuple[int, ...], folder: str
) -> dict[str, float]:
    """Train a step, save it, and return the bytes of this rank: `weights`, `gradients`, `optimizer`, `saved` for the
    backward pass, and `checkpoint` of all ranks on rank 0."""
    found = plugin(POLICIES, backend)
    worker = resolve(found.worker)(config, found.config(**settings), ModelSpec(), rank.rendezvous)
    try:
        coordinates = worker.coordinates()
        batch = make_batch(lengths, vocab=45)
        rows = shard(batch.lengths, coordinates.along("dp"))[coordinates.on("dp")]
        residency, parameters = worker._residency, worker._residency.kept("parameters")
        saved = SavedBytes({each.untyped_storage()._cdata for each in parameters}, worker)
        grads: dict[str, int] = {"gradients": 0}
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
            worker.accumulate(batch.select(rows), TokenLoss())
        held = {each.untyped_storage()._cdata: each for each in residency.lost("parameters")}
        for chunk in worker._residency._models if hasattr(worker._residency, "_models") else ():
            for parameter in chunk.parameters():
                grad = parameter.grad
                if grad is not None:
                    local = grad.to_local() if hasattr(grad, "to_local") else grad
                    held[local.untyped_storage()._cdata] = local
        grads["gradients"] = _bytes([*held.values(), *residency.lost("optimizer")])
        worker.apply()
        weights, state = _bytes(residency.kept("parameters")), _bytes(residency.kept("optimizer"))
        worker.save(folder)
        worker.export(f"{folder}/hf")
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        return {"weights": weights, **grads, "optimizer": state, "saved": saved.peak, "checkpoint": size}
    finally:
        worker.close()
