import errno
import shutil
from pathlib import Path

import counting_run as counting
import pytest

from rl_core.errors import CheckpointDamaged, RunDirectoryError
from rl_core.model import SavedFile
from rl_launch.run_session.checkpoints import manifest
from rl_launch.run_session.checkpoints.checkpoints import Checkpoints, checkpoint_at, newest_checkpoint
from rl_launch.run_session.config import CheckpointingConfig


def save_all(folder, values, **config):
    checkpoints = Checkpoints(folder, CheckpointingConfig(**config))
    for step, value in enumerate(values, 1):
        metrics = {} if value is None else {"val/accuracy": value}
        checkpoints.save(step, models={"policy": counting.CountingModel()}, state={}, metrics=metrics)
    return checkpoints


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_stay_where_no_metric_ranks_them(tmp_path):
    save_all(tmp_path, [0.1, 0.9, 0.2, 0.3], keep_top_k=2)
    assert names(tmp_path) == ["step_3", "step_4"]


def test_the_best_stay_and_always_the_newest(tmp_path):
    save_all(tmp_path, [0.1, 0.9, 0.8, 0.3], keep_top_k=2, metric_name="val:accuracy")
    assert names(tmp_path) == ["step_2", "step_3", "step_4"]


def test_the_log_says_which_are_removed(tmp_path, caplog):
    with caplog.at_level("INFO"):
        save_all(tmp_path, [0.1, 0.9, 0.2, 0.3], keep_top_k=3)
    assert "removed checkpoint step_1: checkpointing.keep_top_k is 3" in caplog.messages


def test_lower_can_be_better(tmp_path):
    save_all(tmp_path, [0.1, 0.9, 0.8], keep_top_k=1, metric_name="val:accuracy", higher_is_better=False)
    assert names(tmp_path) == ["step_1", "step_3"]


def test_one_without_the_metric_ranks_last(tmp_path):
    save_all(tmp_path, [None, -5.0, float("nan"), 0.0], keep_top_k=2, metric_name="val:accuracy")
    assert names(tmp_path) == ["step_2", "step_4"]


def test_all_stay_where_no_number_is_given(tmp_path):
    save_all(tmp_path, [0.1] * 5, keep_top_k=None)
    assert len(names(tmp_path)) == 5


@pytest.mark.parametrize("damage", ["truncate", "remove", "manifest"])
def test_the_newest_whole_one_is_found(tmp_path, damage):
    checkpoints = save_all(tmp_path, [0.1, 0.2])
    weights = tmp_path / "step_2/policy/weights.npy"
    content = weights.read_bytes()
    match damage:
        case "truncate":
            weights.write_bytes(content[:-1])
        case "remove":
            weights.unlink()
        case "manifest":
            (tmp_path / "step_2/manifest.json").write_text("{")
    assert checkpoints.newest() == (1, tmp_path / "step_1")
    assert names(tmp_path) == ["step_1", "step_2"]
    checkpoints.tidy(1)
    assert names(tmp_path) == ["damaged_step_2", "step_1"]


def test_the_driver_reads_nothing_that_a_rank_wrote(tmp_path, monkeypatch):
    digested, digest = [], manifest._digest

    def noted(path):
        digested.append(path.relative_to(tmp_path).parts[1])
        return digest(path)

    monkeypatch.setattr(manifest, "_digest", noted)
    checkpoints = Checkpoints(tmp_path, CheckpointingConfig())
    model, draws = counting.CountingModel(), counting.Draws()
    saved = checkpoints.save(1, models={"policy": model}, state={"draws": draws}, metrics={})
    assert set(digested) == {"state"}
    digested.clear()
    assert checkpoints.newest() == (1, saved)
    assert digested == []
    checkpoints.restore(saved, models={"policy": model}, state={"draws": draws})
    assert set(digested) == {"state"}


def test_changed_contents_are_found_by_whoever_loads_them(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointingConfig())
    model, draws = counting.CountingModel(), counting.Draws()
    for name in ("policy/weights.npy", "state/draws.json"):
        saved = checkpoints.save(1, models={"policy": model}, state={"draws": draws}, metrics={})
        content = (saved / name).read_bytes()
        (saved / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert checkpoints.newest() == (1, saved)
        with pytest.raises(CheckpointDamaged, match=Path(name).name):
            checkpoints.restore(saved, models={"policy": model}, state={"draws": draws})


def test_adapters_are_in_a_folder_of_their_own_that_the_manifest_knows(tmp_path):
    class Adapted(counting.CountingModel):
        def export_adapter(self, path):
            Path(path).mkdir()
            return (counting.written(Path(path) / "factors.npy", self.weights),)

    checkpoints = Checkpoints(tmp_path, CheckpointingConfig())
    saved = checkpoints.save(1, models={"policy": Adapted()}, state={}, metrics={})
    assert checkpoints.newest() == (1, saved)
    (saved / "adapter/factors.npy").unlink()
    with pytest.raises(RunDirectoryError, match=r"adapter/factors.npy is missing"):
        checkpoints.newest()
    plain = checkpoints.save(2, models={"policy": counting.CountingModel()}, state={}, metrics={})
    assert not (plain / "adapter").exists()


def test_a_file_that_the_driver_does_not_see_is_named_with_the_rank_that_wrote_it(tmp_path):
    class Elsewhere(counting.CountingModel):
        def finish_save(self, *, wait=True):
            return (*super().finish_save(wait=wait), SavedFile("shards/__3_0.distcp", 8, "0" * 64, 3))

    checkpoints = save_all(tmp_path, [0.1])
    with pytest.raises(RunDirectoryError, match=r"policy/shards/__3_0.distcp, written by rank 3, is not in .*run_dir"):
        checkpoints.save(2, models={"policy": Elsewhere()}, state={}, metrics={})
    assert names(tmp_path) == ["step_1"]


def test_no_whole_one_left_is_an_error_and_not_a_new_start(tmp_path):
    checkpoints = save_all(tmp_path, [0.1])
    (tmp_path / "step_1/policy/weights.npy").unlink()
    with pytest.raises(RunDirectoryError, match=r"policy/weights.npy is missing"):
        checkpoints.newest()


def test_leftovers_of_a_killed_save_are_no_checkpoint(tmp_path):
    checkpoints = save_all(tmp_path, [0.1])
    (tmp_path / "step_1").rename(tmp_path / ".step_2.saving")
    assert checkpoints.newest() is None
    checkpoints.tidy(0)
    assert names(tmp_path) == []


def test_a_save_that_fails_leaves_no_files_and_the_one_before(tmp_path):
    class OnAFullDisk(counting.CountingModel):
        def save(self, path, *, wait=True):
            (Path(path) / "half").write_text("half")
            raise OSError(errno.ENOSPC, "No space left on device")

    checkpoints = save_all(tmp_path, [0.1])
    with pytest.raises(OSError, match="No space left"):
        checkpoints.save(2, models={"policy": OnAFullDisk()}, state={}, metrics={})
    assert names(tmp_path) == ["step_1"]


@pytest.mark.parametrize(("free", "kind"), [(0, OSError), (2**30, RuntimeError)])
def test_a_save_that_fails_for_want_of_room_says_so_in_the_systems_words(tmp_path, monkeypatch, free, kind):
    class Odd(counting.CountingModel):
        def save(self, path, *, wait=True):
            raise RuntimeError("unexpected pos 704 vs 598")

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))
    checkpoints = save_all(tmp_path, [0.1])
    with pytest.raises(kind) as failure:
        checkpoints.save(2, models={"policy": Odd()}, state={}, metrics={})
    assert ("No space left on device" in str(failure.value)) == (kind is OSError)
    assert names(tmp_path) == ["step_1"]


def test_a_checkpoint_of_another_kind_of_run_is_refused(tmp_path):
    checkpoints = save_all(tmp_path, [0.1])
    with pytest.raises(RunDirectoryError, match=r"no critic, state/draws.json"):
        checkpoints.restore(
            tmp_path / "step_1", models={"critic": counting.CountingModel()}, state={"draws": counting.Draws()}
        )


def test_models_are_exported_by_role_each_into_folders_of_its_own(tmp_path):
    models = {role: counting.CountingModel() for role in ("policy", "critic", "judge")}
    Checkpoints(tmp_path, CheckpointingConfig(), exports={"policy": "", "critic": "_critic"}).save(
        1, models=models, state={}, metrics={}
    )
    files = manifest.CheckpointManifest.read(tmp_path / "step_1").files
    assert {name.partition("/")[0] for name in files} == {*models, "hf", "hf_critic"}
    assert (tmp_path / "step_1" / "hf_critic" / "config.json").is_file()


BAD = Path("/proc/self/mem")
"""A file that can be opened, and whose first read is an input/output error."""


@pytest.mark.parametrize(
    "read",
    [
        lambda run: Checkpoints(run / "checkpoints", CheckpointingConfig()).newest(),
        lambda run: newest_checkpoint(run),
        lambda run: checkpoint_at(run, 2),
    ],
)
def test_a_manifest_that_cannot_be_read_is_not_damaged(tmp_path, read):
    save_all(tmp_path / "checkpoints", [0.1, 0.2])
    file = tmp_path / "checkpoints/step_2/manifest.json"
    file.unlink()
    file.symlink_to(BAD)
    with pytest.raises(OSError, match=f"Input/output error: '{file}'"):
        read(tmp_path)


def test_a_file_whose_size_cannot_be_told_is_not_missing(tmp_path):
    checkpoints = save_all(tmp_path, [0.1, 0.2])
    file = tmp_path / "step_2/policy/weights.npy"
    file.unlink()
    file.symlink_to(file)
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        checkpoints.newest()


def test_a_folder_of_checkpoints_that_cannot_be_read_is_not_empty(tmp_path):
    (tmp_path / "checkpoints").symlink_to(tmp_path / "checkpoints")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        Checkpoints(tmp_path / "checkpoints", CheckpointingConfig()).newest()


def test_no_checkpoint_is_removed_while_one_cannot_be_ranked(tmp_path, caplog):
    checkpoints = save_all(tmp_path, [0.9, 0.1, 0.2], keep_top_k=3, metric_name="val:accuracy")
    file = tmp_path / "step_1/manifest.json"
    text = file.read_text()
    file.unlink()
    file.symlink_to(BAD)
    state = {"models": {"policy": counting.CountingModel()}, "state": {}}
    checkpoints.save(4, **state, metrics={"val/accuracy": 0.3})
    assert names(tmp_path) == ["step_1", "step_2", "step_3", "step_4"]
    assert f"checkpoints were not removed: [Errno 5] Input/output error: '{file}'" in caplog.text
    file.unlink()
    file.write_text(text)
    checkpoints.save(5, **state, metrics={"val/accuracy": 0.4})
    assert names(tmp_path) == ["step_1", "step_4", "step_5"]
