import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import counting_run as counting
import pytest

from rl_core.errors import RunDirectoryError
from rl_launch.run_session import LoggerConfig
from rl_launch.run_session.directory import writable
from rl_launch.run_session.directory.writable import careful_umask, check_writable


def test_a_folder_that_can_be_made_is_left_unmade(tmp_path):
    check_writable(tmp_path / "a/b/c")
    check_writable(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_file_is_refused_also_above_the_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match="file cannot be made: it is a file"):
        check_writable(tmp_path / "file")
    with pytest.raises(RunDirectoryError, match=r"run cannot be made: \S*/file is a file"):
        check_writable(tmp_path / "file/deep/run")


def test_a_place_that_takes_no_files_is_refused():
    # not even root may write there
    with pytest.raises(RunDirectoryError, match=r"/proc/run cannot be made in /proc: .*Choose another run_dir"):
        check_writable(Path("/proc/run"))


def test_a_full_disk_is_refused_with_what_is_free(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    with pytest.raises(RunDirectoryError, match=r"is full: 1.0 MiB are free"):
        check_writable(tmp_path)


FSTAB = """# <file system> <mount point> <type> <options>
UUID=1 / ext4 defaults 0 1
UUID=2 none swap sw 0 0
server:/export {mounted} nfs defaults 0 0
UUID=3 {absent} ext4 defaults,nofail 0 2
UUID=4 {spaced} ext4 defaults 0 2
UUID=5 {manual} ext4 noauto,user 0 2
"""


@pytest.mark.parametrize(
    ("place", "is_refused"),
    [
        ("absent", True),
        ("with space", True),
        ("not there", True),
        ("manual", False),
        ("other", False),
        ("absently", False),
    ],
)
def test_a_disk_that_is_not_mounted_is_refused_and_not_replaced_by_a_folder(tmp_path, monkeypatch, place, is_refused):
    for name in ("absent", "with space", "manual", "other", "absently"):
        (tmp_path / name).mkdir()
    fstab = tmp_path / "fstab"
    absent = tmp_path / ("not there" if place == "not there" else "absent")
    spaced = str(tmp_path / "with space").replace(" ", "\\040")
    fstab.write_text(
        FSTAB.format(
            mounted="/proc", absent=str(absent).replace(" ", "\\040"), spaced=spaced, manual=tmp_path / "manual"
        )
    )
    monkeypatch.setattr(writable, "_FSTAB", fstab)
    if not is_refused:
        check_writable(tmp_path / place / "runs/mine")
        return
    with pytest.raises(
        RunDirectoryError, match=f"is on a disk that is not mounted: /etc/fstab has {tmp_path / place}, "
    ):
        check_writable(tmp_path / place / "runs/mine")


@pytest.mark.parametrize("text", ["", "one two", "\xff"])
def test_a_table_of_file_systems_that_has_no_meaning_is_ignored(tmp_path, monkeypatch, text):
    fstab = tmp_path / "fstab"
    fstab.write_text(text, encoding="latin-1")
    monkeypatch.setattr(writable, "_FSTAB", fstab)
    check_writable(tmp_path / "run")


@pytest.mark.parametrize(
    ("umask", "kept"), [(0o000, 0o022), (0o020, 0o022), (0o002, 0o002), (0o077, 0o077), (0o027, 0o027)]
)
def test_a_umask_that_lets_everybody_write_is_replaced_for_a_time(umask, kept):
    before = os.umask(umask)
    try:
        with careful_umask():
            os.umask(inside := os.umask(0))
        os.umask(after := os.umask(0))
    finally:
        os.umask(before)
    assert (inside, after) == (kept, umask)


def test_nothing_below_a_run_directory_can_be_written_by_others_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        counting.run(tmp_path / "run", counting.CountingConfig(logger=LoggerConfig(run_dir_access="all")))
    finally:
        os.umask(before)
    found = [path for path in (tmp_path / "run").rglob("*") if path.stat().st_mode & 0o022]
    assert not found
