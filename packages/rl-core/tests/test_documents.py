from pathlib import Path

from rl_core.testing.documents import EngineDocumentsSuite, read_document
from rl_core.testing.torch import plain_backend

ROOT = Path(__file__).parents[3]


class TestDocuments(EngineDocumentsSuite):
    package = "rl-core"
    root = ROOT


def test_the_blocks_of_the_page_about_backends_are_the_backend_that_the_suite_of_model_workers_tests():
    blocks = read_document(ROOT / "docs" / "adding-a-backend.md").blocks
    pieces = [block.text.strip() for block in blocks if block.package == "rl-core" and not block.file]
    assert len(pieces) > 5
    source = Path(plain_backend.__file__).read_text(encoding="utf-8")
    assert [line for line in "\n".join(pieces).splitlines() if line] == [line for line in source.splitlines() if line]
