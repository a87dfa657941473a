import os
import stat
import subprocess
import sys

import counting_run as counting
import pytest

from rl_core.config import load, resolve
from rl_core.errors import RunDirectoryError
from rl_launch.run_session import RunDirectory


def opened(path, config=None, *, fresh=False):
    directory = RunDirectory(path)
    try:
        return directory.open(config or counting.config(), fresh=fresh)
    finally:
        directory.close()


def test_a_new_folder_becomes_a_run_and_then_resumes(tmp_path):
    assert opened(tmp_path / "a/b") is False
    assert opened(tmp_path / "a/b") is True


# who may read a new folder, the umask, whether it exists before, and the mode
MODES = {
    "owner": ("owner", 0o022, False, 0o700),
    "group": ("group", 0o022, False, 0o750),
    "group, with a strict umask": ("group", 0o077, False, 0o750),
    "all": ("all", 0o022, False, 0o755),
    "existing": ("owner", 0o022, True, 0o755),
}


@pytest.mark.parametrize("case", MODES)
def test_a_folder_that_the_run_makes_is_open_to_its_readers_only(tmp_path, case):
    access, umask, exists, mode = MODES[case]
    earlier = os.umask(umask)
    try:
        if exists:
            (tmp_path / "run").mkdir()
        directory = RunDirectory(tmp_path / "run")
        directory.open(counting.config(), access=access)
        directory.close()
    finally:
        os.umask(earlier)
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == mode


def test_the_config_in_it_loads_back(tmp_path):
    opened(tmp_path)
    assert resolve(load(tmp_path / "config.yaml"), counting.CountingConfig).config == counting.config()


def test_the_config_is_on_the_disk_before_it_takes_its_name(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def noted(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    opened(tmp_path)
    part = str(tmp_path / "config.yaml.part")
    assert part in synced
    assert str(tmp_path) in synced[synced.index(part) :]


def test_a_foreign_folder_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("words")
    with pytest.raises(RunDirectoryError, match=r"do not belong to a run \(thesis.tex\)"):
        opened(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_with_a_config_of_something_else_is_refused(tmp_path):
    (tmp_path / "config.yaml").write_text("port: 80\n")
    with pytest.raises(RunDirectoryError, match="do not belong to a run"):
        opened(tmp_path)
    assert (tmp_path / "config.yaml").read_text() == "port: 80\n"


def test_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match="cannot be made"):
        opened(tmp_path / "file")


def test_a_changed_config_is_refused_with_the_difference(tmp_path):
    opened(tmp_path)
    changed = counting.CountingConfig(loop=counting.LoopConfig(learning_rate=0.2))
    with pytest.raises(RunDirectoryError, match=r"loop.learning_rate: 0.1 -> 0.2"):
        opened(tmp_path, changed)
    assert opened(tmp_path)


class CodedConfig(counting.CountingConfig):
    rewards: list[dict[str, str]] = []


def coded(*files):
    return CodedConfig(rewards=[{"function": f"{file}:score"} for file in files])


def begun_with(run, *files):
    opened(run, coded(*files))
    (run / "checkpoints" / "step_2").mkdir()


def test_code_that_the_config_names_is_kept_by_path_and_goes_on_unchanged(tmp_path):
    run, one, two = tmp_path / "run", tmp_path / "one" / "rewards.py", tmp_path / "two" / "rewards.py"
    for file in (one, two):
        file.parent.mkdir()
        file.write_text(f"score = {file.parent.name!r}\n")
    begun_with(run, one, two)
    assert {path.read_text() for path in (run / "code").iterdir()} == {"score = 'one'\n", "score = 'two'\n"}
    assert opened(run, coded(one, two))


def test_a_run_with_a_checkpoint_does_not_go_on_with_other_code(tmp_path):
    run, file = tmp_path / "run", tmp_path / "rewards.py"
    file.write_text("scale = 1\nscore = len\n")
    begun_with(run, file)
    file.write_text("scale = 1\nscore = max\n")
    (copy,) = (run / "code").iterdir()
    refusal = rf"{file} differs from its copy {copy} from line 2 on\n.*Copy these back to resume it, or choose another"
    with pytest.raises(RunDirectoryError, match=refusal):
        opened(run, coded(file))
    file.write_text(copy.read_text())
    assert opened(run, coded(file))


def test_code_may_change_until_there_is_a_checkpoint(tmp_path):
    run, file = tmp_path / "run", tmp_path / "rewards.py"
    file.write_text("score = 1 / 0\n")
    opened(run, coded(file))
    file.write_text("score = len\n")
    assert opened(run, coded(file))
    assert [path.read_text() for path in (run / "code").iterdir()] == ["score = len\n"]


def test_a_start_that_was_cut_short_may_have_left_code(tmp_path):
    file = tmp_path / "rewards.py"
    file.write_text("score = len\n")
    run = tmp_path / "run"
    (run / "code").mkdir(parents=True)
    (run / "run.lock").write_text("")
    (run / "code" / "rewards-12345678.py.part").write_text("sco")
    assert opened(run, coded(file), fresh=True) is False


def test_steps_saving_and_logging_may_change(tmp_path):
    opened(tmp_path)
    changed = counting.config(max_num_steps=9, keep_top_k=1)
    assert opened(tmp_path, changed)
    assert resolve(load(tmp_path / "config.yaml"), counting.CountingConfig).config == changed


def test_fresh_demands_an_empty_folder(tmp_path):
    assert opened(tmp_path / "run", fresh=True) is False
    with pytest.raises(RunDirectoryError, match="--fresh"):
        opened(tmp_path / "run", fresh=True)


def test_a_start_that_was_cut_short_counts_as_empty(tmp_path):
    for name in ("checkpoints", "logs", "rollouts"):
        (tmp_path / name).mkdir()
    (tmp_path / "config.yaml.part").write_text("half")
    (tmp_path / "run.lock").write_text("")
    assert opened(tmp_path, fresh=True) is False


def test_a_busy_folder_is_refused_naming_the_process_and_free_when_that_dies(tmp_path):
    script = (
        "import sys, time, counting_run; from rl_launch.run_session import RunDirectory; "
        f"d = RunDirectory({str(tmp_path)!r}); d.open(counting_run.config()); print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {script}"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunDirectoryError, match=f"in use by process {holder.pid} on "):
            opened(tmp_path)
    finally:
        holder.kill()
        holder.communicate()
    assert opened(tmp_path)


def test_a_secret_from_the_environment_is_not_in_the_run_directory_and_may_change(tmp_path, monkeypatch):
    written = {"logger": {"mlflow": {"tracking_uri": "https://user:${oc.env:TEST_SECRET}@host"}}}
    for secret in ("hunter2-of-the-test", "another-one"):
        monkeypatch.setenv("TEST_SECRET", secret)
        config = resolve(load(written), counting.CountingConfig).config
        assert secret in config.logger.mlflow.tracking_uri
        assert opened(tmp_path, config) is (secret == "another-one")
        assert not any(secret.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    again = resolve(load(tmp_path / "config.yaml"), counting.CountingConfig).config
    assert again.logger.mlflow.tracking_uri == "https://user:another-one@host"
