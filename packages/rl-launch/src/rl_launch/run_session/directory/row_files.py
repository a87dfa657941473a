"""Rows and images of data, as files of a run's folder."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rl_core.images import STORE_VARIABLE
from rl_core.model_config import VisionConfig
from rl_launch.run_session.checkpoints.manifest import replaced
from rl_launch.run_session.config import Access
from rl_launch.run_session.directory import lock
from rl_launch.run_session.directory.run_folder import CONFIG
from rl_launch.run_session.directory.writable import careful_umask, check_writable, make_folder

IMAGES = "images"
"""In the folder of a run or an evaluation."""


FOLDER = "data"
"""In the folder of a run or an evaluation."""

JOBS = "jobs"
"""Folder of a run that holds the files of its jobs in a queue. It may exist before the run."""

_NAME = re.compile(r"[\w-]+-[0-9a-f]{16}\.(jsonl|arrow)(\.part)?")


def name_images(vision: VisionConfig, folder: str | Path) -> None:
    """Set the folder of the images of this process and of the workers that it starts (`rl_core.images`).

    Args:
        vision: Config section of the policy. Without images the folder has no name, so that nothing can use it.
        folder: Folder of the run or the evaluation.
    """
    if vision.enabled:
        os.environ[STORE_VARIABLE] = str(Path(folder).expanduser().absolute() / IMAGES)
    else:
        os.environ.pop(STORE_VARIABLE, None)


def text_of_content(content: Any) -> str:
    """Return a message's content for people, each image as its size and its file in the folder of the run.

    Args:
        content: A string, or a list of parts.
    """
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_text_of_part(part) for part in content)
    return "" if content is None else str(content)


def _text_of_part(part: Any) -> str:
    if not isinstance(part, Mapping):
        return str(part)
    digest = part.get("image")
    if part.get("type") != "image" or not isinstance(digest, str):
        return str(part.get("text", ""))
    size = f"{part.get('width', '?')} x {part.get('height', '?')}"
    return f"[image of {size}: {IMAGES}/{digest[:2]}/{digest}]"


@dataclass(frozen=True)
class RowFile:
    """A file of rows that is not written yet.

    Args:
        name: File name with a digest of the content, so that equal rows have equal names.
        content: The whole content.
    """

    name: str
    content: IO[bytes]

    def write(self, folder: Path) -> None:
        """Write the file unless the folder has it."""
        path = folder / self.name
        if path.is_file():
            return
        self.content.seek(0)
        with replaced(path) as file:
            shutil.copyfileobj(self.content, file)


@contextmanager
def kept(files: Sequence[RowFile], folder: Path, access: Access) -> Iterator[None]:
    """Write files into the folder of a run or an evaluation for the time of its start.

    A folder that holds something else is left alone: the start refuses it. If the start fails, files that the config in
    the folder does not use are removed.

    Args:
        files: Files of rows that the config refers to.
        folder: Folder of the run or the evaluation.
        access: Readers of the folder if it does not exist yet.

    Raises:
        RunDirectoryError: If the folder cannot be written.
    """
    names = names_of_run(folder) if folder.is_dir() else set()
    is_other = bool(names) and CONFIG not in names and not any(map(lock.is_own, names))
    if not files or is_other:
        yield
        return
    check_writable(folder.absolute())
    existed = folder.is_dir()
    make_folder(folder, access)
    place = folder / FOLDER
    try:
        with careful_umask():
            place.mkdir(exist_ok=True)
            for file in files:
                file.write(place)
        yield
    except BaseException:
        config = folder / CONFIG
        named = config.read_text(encoding="utf-8") if config.is_file() else ""
        for file in files:
            if file.name not in named:
                for name in (file.name, f"{file.name}.part"):
                    (folder / FOLDER / name).unlink(missing_ok=True)
        with suppress(OSError):  # not empty
            (folder / FOLDER).rmdir()
            if not existed:
                folder.rmdir()
        raise


def holds_only_rows(folder: Path) -> bool:
    """Return whether a folder is the one that `kept` writes into, with nothing else in it."""
    return folder.name == FOLDER and folder.is_dir() and all(_NAME.fullmatch(entry.name) for entry in folder.iterdir())


def names_without_rows(folder: Path) -> set[str]:
    """Return the entries of a folder of a run, except a folder of images, which exists before the run, and a folder of
    rows that a start which was killed has left."""
    names = {entry.name for entry in folder.iterdir()} - {IMAGES}
    return names - {FOLDER} if holds_only_rows(folder / FOLDER) else names


def names_of_run(folder: Path) -> set[str]:
    """Return the entries that make a folder the folder of a run, or something else: entries that may exist before a
    run are left out."""
    return names_without_rows(folder) - {JOBS}
