"""Trees of files that enter and leave a sandbox, as tar archives whose every member is checked."""

from __future__ import annotations

import io
import os
import posixpath
import stat
import tarfile
from collections.abc import Iterable, Iterator
from typing import NamedTuple

MAX_ENTRIES = 100_000
"""Maximum number of files and folders of a tree."""
MAX_PATH = 1024
"""Maximum number of characters of a path in a tree."""


class UnusableTree(ValueError):
    """Raised if an archive is malformed or too large, or a member of it would be outside its folder."""


class TreeEntry(NamedTuple):
    """A file, a link or a folder of a tree.

    Args:
        path: Path in the tree, with slashes.
        content: Contents of a file; None for a folder or a link.
        link: Target of a symbolic link; empty for a file or a folder.
        is_executable: True for a file that its owner may execute.
    """

    path: str
    content: bytes | None = None
    link: str = ""
    is_executable: bool = False


def pack(entries: Iterable[TreeEntry]) -> bytes:
    """Return the entries as a tar archive, in their order.

    Raises:
        UnusableTree: If a path or a link leads out of the tree.
    """
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in _checked(entries):
            info = tarfile.TarInfo(entry.path)
            info.mode = 0o755 if entry.is_executable or entry.content is None else 0o644
            if entry.link:
                info.type, info.linkname = tarfile.SYMTYPE, entry.link
            elif entry.content is None:
                info.type = tarfile.DIRTYPE
            else:
                info.size = len(entry.content)
            archive.addfile(info, io.BytesIO(entry.content or b""))
    return written.getvalue()


def unpack(data: bytes, max_bytes: int) -> list[TreeEntry]:
    """Return the entries of a tar archive, which may come from anybody.

    Args:
        data: The archive, not compressed.
        max_bytes: Maximum number of bytes of all files together.

    Raises:
        UnusableTree: If it is not such an archive, is larger, has a device, a pipe or a hard link, or a path or a link
            that leads out of the tree.
    """
    return list(_checked(_members(data, max_bytes)))


def write(entries: Iterable[TreeEntry], folder: str, uid: int) -> None:
    """Write a tree into an empty folder.

    Args:
        entries: Entries from `unpack`.
        folder: An existing folder.
        uid: User that owns the files.
    """
    made = {""}
    for entry in entries:
        path = os.path.join(folder, entry.path)
        is_folder = entry.content is None and not entry.link
        for parent in [*parents(entry.path), *([entry.path] if is_folder else [])]:
            if parent not in made:
                made.add(parent)
                os.mkdir(os.path.join(folder, parent), 0o700)
                os.chown(os.path.join(folder, parent), uid, -1)
        if entry.link:
            os.symlink(entry.link, path)
            os.lchown(path, uid, -1)
        elif entry.content is not None:
            with open(path, "xb") as file:
                file.write(entry.content)
                os.fchmod(file.fileno(), 0o700 if entry.is_executable else 0o600)
                os.fchown(file.fileno(), uid, -1)


def read(folder: str, max_bytes: int, left_out: frozenset[str] = frozenset()) -> Iterator[TreeEntry]:
    """Yield the tree below a folder that nobody writes to meanwhile; nothing outside it is read.

    Links that lead out of it, pipes and devices are left out.

    Args:
        folder: The folder.
        max_bytes: Maximum number of bytes of all files together, holes of sparse files included.
        left_out: Names of folders that are left out wherever they are.

    Raises:
        UnusableTree: If there is more, or a path is too long.
    """
    waiting, room, count = [""], max_bytes, 0
    while waiting:
        below = waiting.pop()
        for name in sorted(os.listdir(os.path.join(folder, below))):
            path = f"{below}/{name}" if below else name
            count += 1
            if len(path) > MAX_PATH or count > MAX_ENTRIES:
                raise UnusableTree(f"it has more than {MAX_ENTRIES} files, or paths of more than {MAX_PATH} characters")
            full = os.path.join(folder, path)
            status = os.lstat(full)
            if stat.S_ISDIR(status.st_mode):
                if name not in left_out:
                    yield TreeEntry(path)
                    waiting.append(path)
            elif stat.S_ISLNK(status.st_mode):
                target = os.readlink(full)
                if target and _stays(path, target):
                    yield TreeEntry(path, link=target)
            elif stat.S_ISREG(status.st_mode):
                room -= status.st_size
                if room < 0:
                    raise UnusableTree(f"its files have more than {max_bytes} bytes")
                with open(os.open(full, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                    content = file.read(status.st_size)
                yield TreeEntry(path, content, is_executable=bool(status.st_mode & 0o100))


def _members(data: bytes, max_bytes: int) -> Iterator[TreeEntry]:
    room = max_bytes
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            for count, member in enumerate(archive):
                if member.isdir() and posixpath.normpath(member.name) == ".":
                    continue
                if count > MAX_ENTRIES:
                    raise UnusableTree(f"it has more than {MAX_ENTRIES} files")
                path = member.name.removeprefix("./")
                if member.isdir():
                    yield TreeEntry(path.rstrip("/"))
                elif member.issym():
                    yield TreeEntry(path, link=member.linkname)
                elif member.isreg():
                    room -= member.size
                    if room < 0:
                        raise UnusableTree(f"its files have more than {max_bytes} bytes")
                    file = archive.extractfile(member)
                    assert file is not None
                    yield TreeEntry(path, file.read(), is_executable=bool(member.mode & 0o100))
                else:
                    raise UnusableTree(f"{path!r:.200} is neither a file nor a folder nor a symbolic link")
    # The parser raises other errors than its own for bytes that are no archive.
    except (tarfile.TarError, OverflowError, UnicodeError, EOFError) as error:
        raise UnusableTree(f"it is not a tar archive: {error}") from None


def _checked(entries: Iterable[TreeEntry]) -> Iterator[TreeEntry]:
    links: set[str] = set()
    known: set[str] = set()
    for entry in entries:
        path = entry.path
        if not path or path != posixpath.normpath(path) or path.startswith(("/", "../")) or path in (".", ".."):
            raise UnusableTree(f"{path!r:.200} is not a path in the tree")
        if len(path) > MAX_PATH or "\0" in path + entry.link:
            raise UnusableTree(f"{path!r:.200} is not a path of at most {MAX_PATH} characters")
        if entry.link and not _stays(path, entry.link):
            raise UnusableTree(f"the link {path!r:.200} leads out of the tree, to {entry.link!r:.200}")
        if path in known or links.intersection(parents(path)):
            raise UnusableTree(f"{path!r:.200} is there twice, or below a link")
        known.add(path)
        if entry.link:
            links.add(path)
        yield entry


def _stays(path: str, target: str) -> bool:
    """Return whether the target of a link at a path is in the tree."""
    if target.startswith("/"):
        return False
    reached = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    return reached != ".." and not reached.startswith("../")


def parents(path: str) -> list[str]:
    """Return the folders around a path, outermost first."""
    parts = path.split("/")[:-1]
    return ["/".join(parts[: depth + 1]) for depth in range(len(parts))]
