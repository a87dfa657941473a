"""Models that are made on this machine."""

import pytest

from rl_core.errors import RunDirectoryError
from rl_launch.model_files.local_models import check_home, untrained_model
from rl_launch.worker_envs import EnvPlan, build


def test_a_home_that_cannot_be_written_to_is_answered_with_its_variable(tmp_path, monkeypatch):
    (tmp_path / "home").write_text("a file")
    monkeypatch.setenv("RL_HOME", str(tmp_path / "home"))
    with pytest.raises(RunDirectoryError, match=r"home is a file\. Set RL_HOME to a folder that you may write to"):
        untrained_model("tiny-arithmetic")


@pytest.mark.parametrize("variable", ["", "RL_HOME", "XDG_CACHE_HOME"])
def test_a_home_that_does_not_exist_is_not_made(tmp_path, monkeypatch, variable):
    for name in ("RL_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    if variable:
        monkeypatch.setenv(variable, str(tmp_path / "chosen"))
        check_home()
        return
    for refused in (check_home, lambda: untrained_model("tiny-arithmetic")):
        with pytest.raises(RunDirectoryError, match=r"the home folder does not exist: .*nobody\. Set HOME, or RL_HOME"):
            refused()
    with pytest.raises(FileNotFoundError, match="the home folder does not exist"):
        build(EnvPlan("math", "0" * 16, (), "3.11", "2", ()))
    assert not list(tmp_path.iterdir())
