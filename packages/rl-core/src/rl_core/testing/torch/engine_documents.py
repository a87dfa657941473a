"""The suite of a package that runs the blocks of the project's documents which need its engine."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from rl_core.testing.documents import Workbook, add_to_hub, documents_for
from rl_core.testing.torch.reference_model import write_reference_model

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
"""Name of the tiny model of documents on the hub."""


class EngineDocumentsSuite:
    """Subclass it with the package whose blocks (`in=PACKAGE`) run."""

    package: ClassVar[str]
    root: ClassVar[Path]
    """The checkout."""

    @pytest.fixture(scope="class")
    @classmethod
    def hub(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Return a cache of the hub that holds a tiny model."""
        folder = tmp_path_factory.mktemp("hub")

        def write(snapshot: Path) -> None:
            write_reference_model(snapshot, seed=0)

        add_to_hub(folder, MODEL, write)
        return folder

    def test_blocks_run_as_printed(self, hub: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
        """Each new interpreter imports the engine again, so only blocks that compute get one."""
        documents = documents_for(self.package, self.root)
        assert documents
        for document in documents:
            folder = tmp_path_factory.mktemp(document.path.stem)
            workbook = Workbook(folder, {"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1"}, timeout=240)
            for number, block in enumerate(document.blocks, 1):
                if block.is_run_by(document.blocks[number:]):
                    workbook.write(block)
                elif block.language == "python" and block.checked and not block.file:
                    block.import_here()
                else:
                    workbook.run(block)
