from pathlib import Path

from rl_core.testing.documents import EngineDocumentsSuite


class TestDocuments(EngineDocumentsSuite):
    package = "rl-vllm"
    root = Path(__file__).parents[3]
