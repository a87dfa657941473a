"""Models that are made on this machine."""

import pytest

from rl_core.errors import RunDirectoryError, WorkerEnvironmentError
from rl_core.plugins import Requirement
from rl_launch.model_files.local_models import untrained_model
from rl_launch.worker_envs.provision import check_home, provision
from rl_launch.worker_envs.spec import worker_env

MATH = worker_env(Requirement("rl-envs"), "cpu")


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
    for refused in (check_home, lambda: untrained_model("tiny-arithmetic"), lambda: provision([MATH], "isolated")):
        with pytest.raises(
            WorkerEnvironmentError, match=r"the home folder .*nobody does not exist\. Set HOME, or RL_HOME"
        ):
            refused()
    assert not list(tmp_path.iterdir())
