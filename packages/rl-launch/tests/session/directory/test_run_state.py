"""Labels of a run come from its config, and stay as they were edited when it is resumed."""

import counting_run as counting
import pytest

from rl_launch.run_session import LoggerConfig, RunDirectory
from rl_launch.run_session.directory.run_folder import DESCRIPTION, RunFolder
from rl_launch.run_session.directory.run_state import FILE_NAME, Labels, RunState, write_labels


def settings(**labels):
    return counting.CountingConfig(logger=LoggerConfig(tensorboard_enabled=False, **labels))


def opened(path, config):
    directory = RunDirectory(path)
    directory.open(config)
    directory.close()
    return RunFolder(path).description().labels


def test_a_new_run_has_the_labels_of_its_config(tmp_path):
    labels = opened(tmp_path, settings(name="n", group="g", tags=["a", "b"], notes="why"))
    assert labels == Labels("n", "g", ("a", "b"), "why")
    assert opened(tmp_path / "other", settings()) == Labels()


def test_labels_that_were_edited_stay_unless_their_key_is_changed(tmp_path):
    opened(tmp_path, settings(group="g", tags=["a"]))
    write_labels(tmp_path / DESCRIPTION, Labels(group="edited", tags=("edited",), notes="edited"))
    assert opened(tmp_path, settings(group="g", tags=["a"])) == Labels("", "edited", ("edited",), "edited")
    assert opened(tmp_path, settings(group="g", tags=["a", "b"])) == Labels("", "edited", ("a", "b"), "edited")
    # and a key that is changed back counts as changed
    assert opened(tmp_path, settings(group="g", tags=["a"])).tags == ("a",)


def test_an_empty_tag_is_refused():
    with pytest.raises(ValueError, match="at least 1 character"):
        LoggerConfig(tags=[""])


def test_a_state_in_a_folder_that_is_gone_is_reported(tmp_path, caplog):
    RunState("running").write(tmp_path / "gone")
    assert f"{tmp_path / 'gone' / FILE_NAME} was not written" in caplog.text
