"""Blocks of the project's documents that need this package's engine."""

from functools import partial
from pathlib import Path

import pytest

from rl_core.testing.documents import Workbook, add_to_hub, documents_for
from rl_core.testing.torch.reference_model import write_reference_model

DOCUMENTS = documents_for("rl-vllm", Path(__file__).parents[3])


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A cache of the hub that holds a tiny model."""
    folder = tmp_path_factory.mktemp("hub")
    add_to_hub(folder, "Qwen/Qwen2.5-0.5B-Instruct", partial(write_reference_model, seed=0))
    return folder


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.path.name)
def test_blocks_run_as_printed(document, hub, tmp_path):
    workbook = Workbook(tmp_path, {"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1"}, timeout=240)
    for block in document.blocks:
        workbook.run(block)
