"""What processes that send weights are forks of, and how many of the cases of this package run."""

from rl_core.selfcheck.rank_pool import preload
from rl_core.testing.exhaustive import pytest_addoption, pytest_collection_modifyitems, pytest_configure

__all__ = ["pytest_addoption", "pytest_collection_modifyitems", "pytest_configure"]

preload("rl_core.testing.torch.weight_sender")
