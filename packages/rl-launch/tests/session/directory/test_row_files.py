"""Files of rows in the folders of runs and evaluations."""

import io

import pytest

from rl_core.config import Config
from rl_core.errors import RunDirectoryError
from rl_launch.evaluation.folder import EvaluationFolder
from rl_launch.run_session.directory.row_files import RowFile, kept
from rl_launch.run_session.directory.run_directory import RunDirectory

FILE = RowFile("train-0123456789abcdef.jsonl", io.BytesIO(b'{"prompt": "?"}\n'))


class Settings(Config):
    algorithm: str = "sft"


def started(folder):
    """The folder with the rows of a start that was killed."""
    (folder / "data").mkdir(parents=True)
    FILE.write(folder / "data")
    return folder


def test_a_folder_that_has_only_rows_may_become_a_run(tmp_path):
    directory = RunDirectory(started(tmp_path / "run"))
    assert directory.open(Settings(), fresh=True) is False
    directory.close()
    assert directory.open(Settings()) is True
    directory.close()


def test_a_folder_that_has_only_rows_may_become_an_evaluation(tmp_path):
    EvaluationFolder(started(tmp_path / "eval")).check()


@pytest.mark.parametrize("name", ["data/other.csv", "notes.txt"])
def test_a_folder_of_something_else_is_left_alone(tmp_path, name):
    (tmp_path / "data").mkdir()
    (tmp_path / name).write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with kept([FILE], tmp_path, "owner"):
        assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(RunDirectoryError, match="holds files that do not belong"):
        RunDirectory(tmp_path).open(Settings())


def test_a_refused_start_removes_rows_that_no_config_names(tmp_path):
    named = RowFile("train-aaaaaaaaaaaaaaaa.jsonl", io.BytesIO(b"{}\n"))
    (tmp_path / "config.yaml").write_text(f"data: {{train: {{data_path: data/{named.name}}}}}\n")

    def refused():
        with kept([FILE, named], tmp_path, "owner"):
            assert (tmp_path / "data" / FILE.name).is_file()
            raise RunDirectoryError("another config")

    with pytest.raises(RunDirectoryError, match="another config"):
        refused()
    assert [path.name for path in (tmp_path / "data").iterdir()] == [named.name]
