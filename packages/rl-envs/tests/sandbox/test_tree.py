"""Trees that enter and leave a sandbox: what is in them stays in their folder."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from rl_envs.sandbox import keeper, tree
from rl_envs.sandbox.program import Limits, Program
from rl_envs.sandbox.tree import TreeEntry, UnusableTree

ENTRIES = [
    TreeEntry("src"),
    TreeEntry("src/main.py", b"print(1)", is_executable=True),
    TreeEntry("src/again.py", link="main.py"),
    TreeEntry("empty", b""),
]


def test_a_tree_comes_back_from_an_archive_and_from_a_folder(tmp_path: Path) -> None:
    assert tree.unpack(tree.pack(ENTRIES), 8) == ENTRIES
    tree.write(ENTRIES, str(tmp_path), os.getuid())
    assert sorted(tree.read(str(tmp_path), 8), key=lambda entry: entry.path) == sorted(
        ENTRIES, key=lambda entry: entry.path
    )


def _archive(*members: tuple[str, bytes, str]) -> bytes:
    """An archive of members that are name, type and target of a link."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        for name, kind, target in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            archive.addfile(info)
    return written.getvalue()


@pytest.mark.parametrize(
    "archive",
    [
        pytest.param(_archive(("/etc/passwd", tarfile.REGTYPE, "")), id="an absolute path"),
        pytest.param(_archive(("../a", tarfile.REGTYPE, "")), id="a path above"),
        pytest.param(_archive(("a/../../b", tarfile.REGTYPE, "")), id="a path around"),
        pytest.param(_archive(("a", tarfile.SYMTYPE, "/etc")), id="an absolute link"),
        pytest.param(_archive(("a/b", tarfile.SYMTYPE, "../../c")), id="a link above"),
        pytest.param(_archive(("a", tarfile.SYMTYPE, "."), ("a/b", tarfile.REGTYPE, "")), id="a file below a link"),
        pytest.param(_archive(("a", tarfile.LNKTYPE, "/etc/passwd")), id="a hard link"),
        pytest.param(_archive(("a", tarfile.FIFOTYPE, "")), id="a pipe"),
        pytest.param(_archive(("a", tarfile.CHRTYPE, "")), id="a device"),
        pytest.param(_archive(("a", tarfile.REGTYPE, ""), ("a", tarfile.REGTYPE, "")), id="a file twice"),
        pytest.param(_archive(("a" * 2000, tarfile.REGTYPE, "")), id="a long path"),
        pytest.param(tree.pack([TreeEntry("a", b"123456789")]), id="more than the limit"),
        pytest.param(b"x" * 700, id="not an archive"),
    ],
)
def test_an_archive_that_leads_out_of_its_folder_or_is_malformed_is_refused(archive: bytes) -> None:
    with pytest.raises(UnusableTree):
        tree.unpack(archive, 8)


def test_what_a_folder_has_beside_files_is_left_out_and_nothing_outside_is_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "above").symlink_to("../secret")
    (inside / "absolute").symlink_to(tmp_path / "secret")
    (inside / "folder").symlink_to("..")
    os.mkfifo(inside / "pipe")
    (inside / "file").write_text("file")
    assert list(tree.read(str(inside), 100)) == [TreeEntry("file", b"file")]


def test_holes_of_sparse_files_count(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(UnusableTree, match="bytes"):
        list(tree.read(str(tmp_path), 2**20))


def test_a_snapshot_that_does_not_fit_a_message_is_a_problem_of_the_program(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("file")
    snapshot, problem = keeper._snapshot(Program(snapshot="."), str(tmp_path), Limits(output_kib=2**17))
    assert snapshot == b""
    assert "too many for a message" in problem
