"""The folder of a run's images."""

import os

from rl_core.images import STORE_VARIABLE, ImageStore
from rl_core.model_config import VisionConfig
from rl_launch.run_session.directory.row_files import name_images, names_of_run, text_of_content
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


def test_records_name_images_by_their_file_in_the_folder_of_the_run():
    digest = "ab" + "0" * 30
    content = [{"type": "image", "image": digest, "width": 8, "height": 4}, {"type": "text", "text": "How many?"}]
    assert text_of_content(content) == f"[image of 8 x 4: images/ab/{digest}]\nHow many?"
    file = ImageStore("run/images").path(digest).relative_to("run")
    assert f": {file.as_posix()}]" in text_of_content(content)
    assert text_of_content("plain") == "plain"
    assert text_of_content(None) == ""
