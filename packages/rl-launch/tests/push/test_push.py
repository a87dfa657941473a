"""Pushes of checkpoints: to a folder through fsspec, and to a stand-in for the hub's API."""

import errno
import io
import json
import logging
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import counting_run as counting
import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError
from rich.console import Console

from rl_core.errors import ConfigError, RunDirectoryError
from rl_launch.push.destinations import destination_of
from rl_launch.push.pusher import Pusher, push, pusher_of
from rl_launch.push.staging import base_model
from rl_launch.run_session import CheckpointingConfig, RunSession
from rl_launch.run_session.checkpoints.manifest import CheckpointManifest
from rl_launch.run_session.directory.run_state import RunState


@pytest.fixture(autouse=True)
def told(caplog):
    caplog.set_level(logging.INFO, "rl_launch")


class Api:
    """Records what is uploaded; answers with an error as long as there are some."""

    def __init__(self) -> None:
        self.repositories: dict[str, bool] = {}
        self.commits: list[tuple[str, str, dict[str, str]]] = []
        self.patterns: list[str] = []
        self.errors: list[Exception] = []
        self.hold = threading.Event()
        self.hold.set()

    def create_repo(self, name, *, private, exist_ok):
        assert exist_ok
        if self.errors:
            raise self.errors.pop(0)
        self.repositories.setdefault(name, private)

    def upload_folder(self, *, repo_id, folder_path, commit_message, delete_patterns):
        self.hold.wait(10)
        files = {each.name: each.read_text() for each in Path(folder_path).iterdir()}
        self.patterns = delete_patterns
        self.commits.append((repo_id, commit_message, files))


@pytest.fixture
def api(monkeypatch):
    fake = Api()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
    monkeypatch.setenv("HF_TOKEN", "secret")
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    return fake


def refused(status):
    request = SimpleNamespace(method="POST", url="https://huggingface.co")
    response = SimpleNamespace(status_code=status, headers={}, request=request, text="", json=dict)
    return HfHubHTTPError(f"{status} of the hub", response=response)


def run(folder, *, max_num_steps=6, at_step=lambda session, step: None, attempts_after_s=(), wait_s=5.0, **keys):
    """A run without engines that pushes, saving every second step."""
    settings = counting.config(max_num_steps, **keys)
    pusher = pusher_of(settings.checkpointing)
    assert pusher is not None
    pusher = Pusher(
        settings.checkpointing, pusher._destination, attempts_after_s=attempts_after_s, unfinished_wait_s=wait_s
    )
    model = counting.CountingModel()
    with RunSession(folder, settings, console=Console(file=io.StringIO()), pusher=pusher) as session:
        for step in session.steps(max_num_steps, models={"policy": model}, state={}):
            session.record(step, {"train/loss": model.train(1.0), "val/accuracy": 1.0 / step, "time/x": 1.0})
            at_step(session, step)


def exported(path):
    return json.loads((path / "config.json").read_text())["weights"]


def weights_at(folder, step):
    return exported(folder / f"checkpoints/step_{step}/hf")


def test_every_checkpoint_is_pushed_into_a_folder_of_its_step(tmp_path, caplog):
    run(tmp_path / "run", push_to=f"file://{tmp_path}/store", push_checkpoints="every", keep_top_k=1)
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["step_2", "step_4", "step_6"]
    # those of steps 2 and 4 were removed here meanwhile
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step_6"]
    assert exported(tmp_path / "store/step_6") == weights_at(tmp_path / "run", 6)
    assert exported(tmp_path / "store/step_2") != exported(tmp_path / "store/step_6")
    assert f"pushed to file://{tmp_path}/store: steps 2, 4, 6" in caplog.text


def test_the_last_checkpoint_is_pushed_when_the_run_has_finished(tmp_path):
    url = f"file://{tmp_path}/store"
    run(tmp_path / "run", max_num_steps=4, push_to=url)
    assert exported(tmp_path / "store") == weights_at(tmp_path / "run", 4)
    run(tmp_path / "run", max_num_steps=6, push_to=url)
    assert exported(tmp_path / "store") == weights_at(tmp_path / "run", 6)
    assert json.loads((tmp_path / "store/pushed.json").read_text())["step"] == 6


def test_an_interrupted_run_has_no_last_checkpoint_to_push(tmp_path):
    run(
        tmp_path / "run",
        push_to=f"file://{tmp_path}/store",
        at_step=lambda session, step: session.stop_request.ask("SIGTERM"),
    )
    assert not (tmp_path / "store/config.json").exists()
    assert (tmp_path / "run/checkpoints/step_1").is_dir()


def test_the_best_checkpoint_is_pushed_when_there_is_another(tmp_path, caplog):
    keys = {"push_checkpoints": "best", "metric_name": "val:accuracy"}
    run(tmp_path / "run", push_to=f"file://{tmp_path}/store", **keys)
    assert exported(tmp_path / "store") == weights_at(tmp_path / "run", 2)
    assert f"pushed to file://{tmp_path}/store: step 2" in caplog.text
    run(tmp_path / "other", push_to=f"file://{tmp_path}/store", higher_is_better=False, **keys)
    assert exported(tmp_path / "store") == weights_at(tmp_path / "other", 6)


@pytest.mark.parametrize(("pushed", "step"), [("best", 4), ("last", 6)])
def test_a_checkpoint_that_cannot_be_read_is_not_pushed_and_the_run_finishes(
    tmp_path, monkeypatch, caplog, pushed, step
):
    read = CheckpointManifest.read

    def unreadable(folder):
        if folder.name == f"step_{step}":
            raise OSError(errno.EIO, "Input/output error", str(folder))
        return read(folder)

    monkeypatch.setattr(CheckpointManifest, "read", unreadable)
    keys = {"push_checkpoints": pushed, "metric_name": "val:accuracy"}
    run(tmp_path / "run", push_to=f"file://{tmp_path}/store", **keys)
    assert RunState.read(tmp_path / "run").status == "finished"
    assert f"Input/output error: '{tmp_path}/run/checkpoints/step_{step}'" in caplog.text


def test_a_push_removes_what_an_earlier_one_left_and_nothing_else(tmp_path):
    store, folder = tmp_path / "store", tmp_path / "files"
    folder.mkdir()
    destination = destination_of(f"file://{store}")
    destination.check()
    (store / "mine.txt").write_text("stays")
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "config.json"):
        (folder / name).write_text(name)
    destination.upload(folder, step=1, title="Step 1")
    (folder / "model-00002-of-00002.safetensors").unlink()
    destination.upload(folder, step=2, title="Step 2")
    found = sorted(path.name for path in store.iterdir())
    assert found == ["config.json", "mine.txt", "model-00001-of-00002.safetensors", "pushed.json"]


def test_the_hub_gets_a_commit_of_each_checkpoint_with_a_card(tmp_path, api):
    run(tmp_path / "run", push_to="hf://me/model", push_checkpoints="every", max_num_steps=4)
    assert api.repositories == {"me/model": True}
    assert [(name, title) for name, title, _ in api.commits] == [("me/model", "Step 2"), ("me/model", "Step 4")]
    assert api.patterns == ["*.safetensors", "*.safetensors.index.json"]
    card = api.commits[1][2]["README.md"]
    assert '"me/model"' in card
    assert "| step | 4 of 4 |" in card
    assert "| val/accuracy | 0.25 |" in card
    assert "time/x" not in card
    assert str(tmp_path) not in card
    assert "secret" not in card


def test_a_push_does_not_hold_up_the_steps(tmp_path, api):
    api.hold.clear()
    seen = []

    def look(session, step):
        seen.append(len(api.commits))
        if step == 6:
            api.hold.set()

    run(tmp_path / "run", push_to="hf://me/model", push_checkpoints="every", at_step=look)
    assert seen[:5] == [0] * 5
    assert [title for _, title, _ in api.commits] == ["Step 2", "Step 4", "Step 6"]


def test_an_attempt_that_fails_is_made_again(tmp_path, api, caplog):
    def fail(session, step):
        if step == 1:
            api.errors = [refused(503), ConnectionError("reset")]

    keys = {"push_to": "hf://me/model", "push_checkpoints": "every", "max_num_steps": 2}
    run(tmp_path / "run", at_step=fail, attempts_after_s=(0.0, 0.0), **keys)
    assert [title for _, title, _ in api.commits] == ["Step 2"]
    assert caplog.text.count("trying again") == 2


def test_a_push_that_fails_is_reported_with_the_command_that_makes_it(tmp_path, api, caplog):
    def fail(session, step):
        if step == 1:
            api.errors = [refused(403)]

    keys = {"push_to": "hf://me/model", "push_checkpoints": "every", "max_num_steps": 4}
    run(tmp_path / "run", at_step=fail, attempts_after_s=(60.0,), **keys)
    assert [title for _, title, _ in api.commits] == ["Step 4"]
    command = f"rl push {tmp_path / 'run'}:2 hf://me/model"
    assert f"step 2 was not pushed (HfHubHTTPError: 403 of the hub); push it by: {command}" in caplog.text


def test_a_run_that_is_interrupted_waits_for_a_limited_time(tmp_path, api, caplog):
    api.hold.clear()

    def end(session, step):
        if step == 2:
            session.stop_request.ask("SIGTERM")

    run(tmp_path / "run", push_to="hf://me/model", push_checkpoints="every", at_step=end, wait_s=0.05)
    assert "step 2 was not pushed (the run ended first)" in caplog.text
    api.hold.set()


def test_a_run_that_is_told_to_end_at_once_waits_for_nothing(tmp_path, api, caplog):
    api.hold.clear()

    def end(session, step):
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", push_to="hf://me/model", push_checkpoints="every", at_step=end, wait_s=3600.0)
    assert "step 2 was not pushed (the run ended first); push it by: rl push" in caplog.text
    api.hold.set()


def test_what_is_missing_is_refused_before_the_run(tmp_path, api, monkeypatch):
    config = CheckpointingConfig(push_to="hf://me/model")
    api.errors = [refused(401)]
    with pytest.raises(ConfigError, match=r"checkpointing\.push_to: hf://me/model cannot be written to: 401"):
        pusher_of(config)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(ConfigError, match=r"needs a token.*HF_TOKEN.*hf auth login"):
        pusher_of(config)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE"):
        pusher_of(config)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ConfigError, match=r"s3://bucket/x needs a library that is not installed: .*install s3fs"):
        pusher_of(CheckpointingConfig(push_to="s3://bucket/x"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written to"):
        pusher_of(CheckpointingConfig(push_to=f"file://{tmp_path}/file/below"))
    assert pusher_of(CheckpointingConfig()) is None


@pytest.mark.parametrize("url", ["runs/out", "hf://me", "hf://me/model/x", "/tmp/x", "file://"])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ValueError, match="allowed: hf://OWNER/NAME"):
        CheckpointingConfig(push_to=url)


def test_a_checkpoint_is_pushed_by_hand(tmp_path, api):
    counting.run(tmp_path / "run", counting.config())
    assert push(f"{tmp_path}/run:4", f"file://{tmp_path}/store", adapter=False, private=True)
    assert exported(tmp_path / "store") == weights_at(tmp_path / "run", 4)
    assert push(f"{tmp_path}/run", "hf://me/model", adapter=False, private=False).endswith("/me/model")
    assert api.repositories == {"me/model": False}
    assert json.loads(api.commits[0][2]["config.json"])["weights"] == weights_at(tmp_path / "run", 6)
    with pytest.raises(RunDirectoryError, match="has no adapters"):
        push(f"{tmp_path}/run", f"file://{tmp_path}/store", adapter=True, private=True)
    (tmp_path / "run/checkpoints/step_6/hf/config.json").write_text("{")
    with pytest.raises(RunDirectoryError, match=r"step_6 is damaged: hf/config\.json has 1 of"):
        push(f"{tmp_path}/run/checkpoints/step_6", f"file://{tmp_path}/store", adapter=False, private=True)
    names = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert names == ["step_2", "step_4", "step_6"]


def test_the_base_model_is_found_through_the_runs_in_between(tmp_path):
    for name, model in (("sft", "Qwen/Qwen2.5-0.5B"), ("grpo", str(tmp_path / "sft/checkpoints/step_2/hf"))):
        (tmp_path / name / "checkpoints/step_2/hf").mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text("")
        (tmp_path / name / "run.json").write_text(json.dumps({"algorithm": name, "model": model}))
    assert base_model(str(tmp_path / "grpo/checkpoints/step_2/hf")) == "Qwen/Qwen2.5-0.5B"
    assert base_model("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"
    (tmp_path / "mine").mkdir()
    assert base_model(str(tmp_path / "mine")) == base_model("/not/here") == base_model("") == ""


def test_configs_of_pushed_files_name_no_folder_of_this_machine(tmp_path, api):
    counting.run(tmp_path / "run", counting.config(2))
    adapter = tmp_path / "run/checkpoints/step_2/adapter"
    adapter.mkdir()
    written = {"base_model_name_or_path": str(tmp_path), "r": 8}
    (adapter / "adapter_config.json").write_text(json.dumps(written))
    push(f"{tmp_path}/run", "hf://me/model", adapter=True, private=True)
    files = api.commits[0][2]
    assert json.loads(files["adapter_config.json"]) == {"base_model_name_or_path": None, "r": 8}
    assert json.loads((adapter / "adapter_config.json").read_text()) == written
    assert "library_name: peft" in files["README.md"]
    assert str(tmp_path) not in "".join(files.values())


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3://key:hunter2@bucket/folder", "contains a password"),
        ("hf://user:hunter2@owner/name", "contains a password"),
        ("abfs://c/f?sig=hunter2", "contains a password"),
        ("s3://bucket/f?AWS_SECRET=hunter2", "contains a password"),
        ("hf://../..", "allowed: hf://OWNER/NAME"),
        ("hf://owner/.name", "allowed: hf://OWNER/NAME"),
        ("memory://folder", "end with the process"),
        ("zip://a::file:///tmp/b.zip", "chains"),
        ("simplecache::s3://bucket/f", "chains"),
        ("file:///a\nb", "control characters"),
        ("file:///a\0b", "control characters"),
    ],
)
def test_a_target_that_hides_something_is_refused_and_no_secret_is_shown(url, says):
    with pytest.raises(ValueError, match=re.escape(says)) as refused:
        destination_of(url)
    assert "hunter2" not in str(refused.value)
