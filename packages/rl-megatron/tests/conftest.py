"""One pool of ranks for the whole suite: starting one and importing Megatron takes longer than most tests do."""

import pytest

from rl_core.selfcheck.rank_pool import RankPool, preload
from rl_core.testing.exhaustive import pytest_addoption, pytest_collection_modifyitems, pytest_configure

__all__ = ["pytest_addoption", "pytest_collection_modifyitems", "pytest_configure"]

preload("rl_megatron.worker")

KERNELS = ("permute", "permute_with_probs", "sort_chunks_by_index", "sort_chunks_by_index_with_probs", "unpermute")


@pytest.fixture(scope="session")
def ranks():
    with RankPool(8) as pool:
        yield pool


@pytest.fixture
def engine_kernels(monkeypatch):
    """What megatron-core would have imported from Transformer Engine, so that configs with it can be made."""
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.moe import moe_utils

    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", object(), raising=False)
    for name in KERNELS:
        monkeypatch.setattr(moe_utils, f"fused_{name}", object(), raising=False)
