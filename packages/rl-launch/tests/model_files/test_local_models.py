"""Models that are made on this machine."""

import pytest

from rl_core.errors import RunDirectoryError
from rl_launch.model_files.local_models import untrained_model


def test_a_home_that_cannot_be_written_to_is_answered_with_its_variable(tmp_path, monkeypatch):
    (tmp_path / "home").write_text("a file")
    monkeypatch.setenv("RL_HOME", str(tmp_path / "home"))
    with pytest.raises(RunDirectoryError, match=r"home is a file\. Set RL_HOME to a folder that you may write to"):
        untrained_model("tiny-arithmetic")
