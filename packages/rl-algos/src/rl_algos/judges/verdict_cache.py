"""Answers of judges on disk, so that no question is asked twice."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

from rl_core.rollouts.json_schema import satisfies
from rl_core.rollouts.model_json import MalformedJson, read_model_json

_log = logging.getLogger(__name__)

MAX_ENTRY_BYTES = 2**22
"""Maximum size of an entry."""

MAX_UNUSED_S = 90 * 86400.0
"""Seconds after which an entry that nobody has read is removed."""

_FORM = {
    "type": "object",
    "properties": {
        "question": {"type": "string"},
        "text": {"type": "string"},
        "failure": {"type": "string"},
        "run": {"type": "string"},
    },
    "required": ["question", "text", "failure", "run"],
}


@dataclass(frozen=True)
class CachedAnswer:
    """An answer of a judge.

    Args:
        text: Its text.
        failure: Reason that it could not be read as an answer at all; empty if it could.
        run: The run that may use it, if it is not a verdict; empty if all runs may.
    """

    text: str
    failure: str = ""
    run: str = ""


class VerdictCache:
    """A folder with a file for each answer, which many processes may read and write.

    A file is complete or not there, whenever a process is killed, because it is renamed to its place. Its content is
    checked, so that a file that was damaged otherwise is a question that nobody has asked.

    Args:
        folder: The folder, made by the first answer.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_broken = False

    def read(self, judge: str, question: str) -> CachedAnswer | None:
        """Return the answer to a question; None if there is none.

        Args:
            judge: Digest of the judge's identity.
            question: Digest of the question.
        """
        try:
            with self._path(judge, question).open("rb") as file:
                content = file.read(MAX_ENTRY_BYTES + 1)
                with suppress(OSError):  # A folder of another user cannot be changed, and its owner keeps it small.
                    os.utime(file.fileno())
        except OSError:
            return None
        digest, _, entry = content.partition(b"\n")
        if len(content) > MAX_ENTRY_BYTES or digest.decode("ascii", "replace") != hashlib.sha256(entry).hexdigest():
            return None
        try:
            found = read_model_json(entry.decode())
        except (UnicodeDecodeError, MalformedJson):
            return None
        if not satisfies(found, _FORM) or found["question"] != f"{judge}/{question}":
            return None
        return CachedAnswer(found["text"], found["failure"], found["run"])

    def write(self, judge: str, question: str, answer: CachedAnswer) -> None:
        """Keep the answer to a question. A folder that cannot be written costs the cache, not the run."""
        found = {"question": f"{judge}/{question}", **asdict(answer)}
        entry = json.dumps(found).encode()
        path = self._path(judge, question)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
                file.write(hashlib.sha256(entry).hexdigest().encode() + b"\n" + entry)
            Path(file.name).replace(path)
        except OSError as error:
            if not self._is_broken:
                _log.warning("verdicts are not kept in %s, so they may be asked again: %s", self._folder, error)
            self._is_broken = True

    def prune(self) -> None:
        """Remove the answers that nobody has written or read for `MAX_UNUSED_S`, and what killed processes left."""
        oldest = time.time() - MAX_UNUSED_S
        for path in self._folder.glob("*/*/*"):
            with suppress(OSError):  # Another process may have removed it.
                if path.stat().st_mtime < oldest:
                    path.unlink()

    def _path(self, judge: str, question: str) -> Path:
        return self._folder / judge[:16] / question[:2] / question
