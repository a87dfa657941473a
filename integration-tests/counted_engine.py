"""An engine whose ranks count the bytes of their KV cache."""

from __future__ import annotations

from torch.utils._pytree import tree_leaves

from rl_vllm import VllmGenerator
from rl_vllm.engine_worker import EngineWorker


class CountedWorker(EngineWorker):
    """Counts what it holds."""

    def cache_bytes(self) -> int:
        """Return the bytes of the KV cache."""
        caches = [each.untyped_storage() for each in tree_leaves(self.model_runner.kv_caches)]
        return sum({each._cdata: each.nbytes() for each in caches}.values())


class CountedGenerator(VllmGenerator):
    """Generates with ranks that count their bytes."""

    worker_extension = "counted_engine.CountedWorker"

    async def cache_bytes(self) -> list[int]:
        """Return the bytes of the KV cache of each rank."""
        return await self._running().call("cache_bytes")
