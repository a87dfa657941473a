import pytest

from rl_algos.tiny_model import make_tokenizer
from rl_core.testing.exhaustive import pytest_addoption, pytest_collection_modifyitems, pytest_configure

__all__ = ["pytest_addoption", "pytest_collection_modifyitems", "pytest_configure"]


@pytest.fixture(scope="session")
def tokenizer():
    """A tokenizer of single characters with a chat template that marks what the assistant says."""
    return make_tokenizer()


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path_factory):
    """A cache of data of the test's own."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "rl" / "data"
