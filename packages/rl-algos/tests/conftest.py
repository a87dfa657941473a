import pytest

from rl_algos.tiny_model import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    """A tokenizer of single characters with a chat template that marks what the assistant says."""
    return make_tokenizer()
