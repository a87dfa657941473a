"""A corpus of texts on this machine, searched by BM25 (sqlite's FTS5)."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from rl_core.errors import DataError

_WORD = re.compile(r"\w+")
MAX_WORDS = 32
"""Maximum number of words of a query that count."""


class Corpus:
    """Documents of a JSON Lines file, each with a `text` and perhaps a `title`, indexed in memory.

    Raises:
        DataError: If the file cannot be read, naming the line.
    """

    def __init__(self, path: str | Path) -> None:
        self._index = sqlite3.connect(":memory:", check_same_thread=False)
        self._index.execute("CREATE VIRTUAL TABLE documents USING fts5(title, text, tokenize='porter unicode61')")
        with self._index:
            self._index.executemany("INSERT INTO documents VALUES (?, ?)", _documents(Path(path)))
        [(self.num_documents,)] = self._index.execute("SELECT count(*) FROM documents")
        if not self.num_documents:
            raise DataError(f"the corpus {path} has no documents")

    def search(self, query: str, num_results: int) -> list[tuple[str, str]]:
        """Title and text of the best documents, best first; any word of the query may be in them."""
        words = _WORD.findall(query)[:MAX_WORDS]
        if not words:
            return []
        match = " OR ".join(f'"{word}"' for word in words)
        select = "SELECT title, text FROM documents WHERE documents MATCH ? ORDER BY rank, rowid LIMIT ?"
        return [(title, text) for title, text in self._index.execute(select, (match, num_results))]


def _documents(path: Path) -> Iterator[tuple[str, str]]:
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _document(line, f"{path}:{number}")
    except OSError as error:
        raise DataError(f"the corpus {path} cannot be read: {error.strerror or error}") from None


def _document(line: str, place: str) -> tuple[str, str]:
    try:
        row = json.loads(line)
        return str(row.get("title") or ""), row["text"]
    except (ValueError, AttributeError, KeyError, TypeError):
        raise DataError(f"{place}: a document must be an object with `text`, got {line!r:.60}") from None
