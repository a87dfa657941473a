"""Blocks of the project's documents that need this package's engine."""

from pathlib import Path

import pytest

from rl_core.testing.documents import Workbook, blocks_for

BLOCKS = blocks_for("rl-dtensor", Path(__file__).parents[3])


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_it_runs_as_printed(block, tmp_path):
    Workbook(tmp_path).run(block)
