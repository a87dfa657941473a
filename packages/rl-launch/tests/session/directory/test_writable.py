import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl_core.errors import RunDirectoryError
from rl_launch.session.directory.writable import check_writable


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
