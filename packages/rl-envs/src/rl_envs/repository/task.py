"""Tasks on repositories: a row with a repository and its tests, and rows from a file."""

from __future__ import annotations

import json
import posixpath
import shlex
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from rl_core.errors import DataError
from rl_core.rollouts.environment import UnusableAnswer
from rl_envs.grader import fields_of
from rl_envs.repository.plugin import RepositoryTasksSettings

FIELDS = ("repository", "commit", "tests", "test_files", "image", "image_folder")
"""Fields of a row that agents do not see."""


class RepositoryTask(NamedTuple):
    """What an agent changes, and how the result is scored.

    Args:
        source: Path of a folder or of a git bundle; None for files in the row.
        commit: Commit of a bundle or of a git repository; empty for the newest one, or a folder as it is.
        files: Contents of a repository in the row, by path.
        commands: Commands that must succeed in the changed repository.
        test_files: Files that replace the repository's before the commands run, by path. Agents do not see them.
        image: Image of the machines of the agent and of the tests; empty for the image of the settings.
        image_folder: Folder of the image that has the repository; empty if the row has it.
    """

    source: Path | None
    commit: str
    files: Mapping[str, str]
    commands: tuple[tuple[str, ...], ...]
    test_files: Mapping[str, str]
    image: str = ""
    image_folder: str = ""


def read_task(info: Mapping[str, Any], folder: Path) -> RepositoryTask:
    """Return the task in a prompt's info.

    The info has these fields:

    - `repository`: path of a folder, or of a git bundle (`.bundle`); or files as an object of paths and strings.
    - `commit` (optional): branch, tag or commit of a bundle or of a folder that is a git repository.
    - `tests`: a command as a string, or a list of commands, each a string or a list of its arguments.
    - `test_files` (optional): an object of paths and contents that only the tests see.
    - `image` (optional): image of the machines, and `image_folder`, its folder with the repository instead of
      `repository`.

    Args:
        info: Info of the prompt.
        folder: Base of relative paths.

    Raises:
        UnusableAnswer: If a field is missing or has another form.
    """
    image, place = info.get("image") or "", info.get("image_folder") or ""
    for name in ("image_folder" if place else "repository", "tests"):
        if not info.get(name):
            raise UnusableAnswer(f"the row needs the field `{name}`; its fields are {fields_of(info)}")
    if place and (not image or info.get("repository") or not _is_folder(place)):
        raise UnusableAnswer(
            f"`image_folder` must be an absolute folder of `image` with the repository, got {place!r:.80} with the "
            f"image {image!r:.80}; leave it or `repository` out"
        )
    given, commit = info.get("repository") or {}, info.get("commit") or ""
    if not isinstance(commit, str) or commit.startswith("-"):
        raise UnusableAnswer(f"`commit` must be a branch, a tag or a commit, got {commit!r:.80}")
    if isinstance(given, str):
        source, files = folder / Path(given).expanduser(), {}
    else:
        source, files = None, _files("repository", given)
        if commit:
            raise UnusableAnswer("`commit` needs a repository with history; files in the row have none")
    test_files = _files("test_files", info.get("test_files") or {})
    return RepositoryTask(source, commit, files, _commands(info["tests"]), test_files, image, place)


def _is_folder(place: Any) -> bool:
    is_path = isinstance(place, str) and place.startswith("/") and posixpath.normpath(place) == place
    return is_path and place != "/" and ":" not in place and "," not in place


def is_python(command: Sequence[str]) -> bool:
    """Return whether a command runs in the interpreter of its sandbox, which reports whether it came to its end."""
    return command[0].rpartition("/")[2].startswith("python")


def check_source(task: RepositoryTask) -> None:
    """Raise an `UnusableAnswer` if the repository is not there."""
    source = task.source
    if source is not None and not (source.is_dir() or (source.is_file() and source.suffix == ".bundle")):
        raise UnusableAnswer(
            f"`repository` must be a folder or a git bundle (.bundle), and {source} is neither; relative paths begin "
            "in env.repository.folder, or in the folder of the file of repository_tasks"
        )


def _commands(given: Any) -> tuple[tuple[str, ...], ...]:
    listed = [given] if isinstance(given, str) else given
    if not isinstance(listed, list | tuple) or not listed:
        raise UnusableAnswer(f"`tests` must be a command, or a list of commands, got {given!r:.80}")
    commands = []
    for each in listed:
        try:
            arguments = shlex.split(each) if isinstance(each, str) else each
        except ValueError as error:
            raise UnusableAnswer(f"the command {each!r:.80} of `tests` cannot be read: {error}") from None
        is_list = isinstance(arguments, list | tuple) and arguments and all(isinstance(word, str) for word in arguments)
        if not is_list or arguments[0].startswith("-"):
            raise UnusableAnswer(
                f"each of `tests` must be a command such as 'python -m unittest', or a list of its arguments, got "
                f"{each!r:.80}"
            )
        commands.append(tuple(arguments))
    return tuple(commands)


def _files(name: str, given: Any) -> dict[str, str]:
    if not isinstance(given, Mapping) or not all(
        isinstance(path, str)
        and isinstance(text, str)
        and (bool(path) and posixpath.normpath(path) == path and not path.startswith(("/", "..")) and path != ".")
        for path, text in given.items()
    ):
        raise UnusableAnswer(f"`{name}` must be an object of relative paths and strings, got {given!r:.80}")
    return dict(given)


def load(settings: Mapping[str, Any], split: str) -> list[dict[str, Any]]:
    """Return rows with `messages`, `info` (repository and tests) and `environment`; the file is all of the split.

    Raises:
        DataError: If the file cannot be read, naming the line.
    """
    config = RepositoryTasksSettings.model_validate(dict(settings))
    path = Path(config.path).expanduser().absolute()
    rows = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(islice(lines, config.max_rows), 1):
                if line.strip():
                    rows.append(_row(line, path, number))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    return rows


def _row(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path}:{number} is not valid JSON: {error}") from None
    if not isinstance(row, dict) or not isinstance(row.get("issue"), str) or not row["issue"].strip():
        raise DataError(f"{path}:{number} must be an object with the task in words as `issue`, got {line!r:.60}")
    info = {name: row[name] for name in FIELDS if name in row}
    if isinstance(info.get("repository"), str):
        info["repository"] = str(path.parent / Path(info["repository"]).expanduser())
    return {"messages": [{"role": "user", "content": row["issue"]}], "info": info, "environment": "repository"}
