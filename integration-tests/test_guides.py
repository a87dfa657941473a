"""Blocks of the guides run as printed; apart from other documents, for another worker of xdist to run them."""

import pytest
from document_runs import GUIDES, name_of, parameters


@pytest.mark.parametrize("path", parameters(GUIDES), ids=name_of)
def test_blocks_run_as_printed(path, worked):
    worked(path)
