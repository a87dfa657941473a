"""The folder of a run's images."""

import os

from rl_core.images import STORE_VARIABLE
from rl_core.model_config import VisionConfig
from rl_launch.session.directory.row_files import names_of_run
from rl_launch.session.directory.run_images import name_images
from rl_launch.worker_envs.variables import forwarded_variables


def test_workers_are_told_the_folder_if_the_policy_sees_images(tmp_path, monkeypatch):
    monkeypatch.setenv(STORE_VARIABLE, "of another run")
    name_images(VisionConfig(enabled=True), tmp_path / "run")
    assert os.environ[STORE_VARIABLE] == str(tmp_path / "run" / "images")
    assert forwarded_variables()[STORE_VARIABLE] == os.environ[STORE_VARIABLE]
    name_images(VisionConfig(), tmp_path / "run")
    assert STORE_VARIABLE not in forwarded_variables()


def test_images_may_be_there_before_their_run(tmp_path):
    (tmp_path / "images").mkdir()
    assert names_of_run(tmp_path) == set()
