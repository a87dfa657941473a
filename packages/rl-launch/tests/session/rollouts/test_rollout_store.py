"""Rollouts of many steps: files of their own, then members of archives."""

import contextlib
import json

import pytest

from rl_launch.run_session.rollouts import rollout_store
from rl_launch.run_session.rollouts.rollout_store import archive_before, cut_back, open_step, steps_in
from rl_launch.run_session.rollouts.run_files import RolloutFiles


class KilledError(BaseException):
    """The end of the process."""


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(rollout_store, "STEPS_PER_ARCHIVE", 4)
    monkeypatch.setattr(rollout_store, "NUM_RECENT", 2)


def write(folder, steps):
    for step in steps:
        (folder / f"step_{step}.jsonl").write_text(json.dumps({"step": step}) + "\n")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def contents(folder):
    found = {}
    for step in steps_in(folder):
        with open_step(folder, step) as file:
            found[step] = [json.loads(line)["step"] for line in file]
    return found


def loose(*steps):
    return [f"step_{step}.jsonl" for step in sorted(steps, key=str)]


# steps that have rollouts, the last step that was made, and the files afterwards
ARCHIVED = {
    "too early": (range(1, 6), 5, loose(1, 2, 3, 4, 5)),
    "one range": (range(1, 7), 6, [*loose(5, 6), "steps_1-4.zip"]),
    "two ranges": (range(1, 12), 11, [*loose(9, 10, 11), "steps_1-4.zip", "steps_5-8.zip"]),
    "every third step": (range(3, 12, 3), 12, [*loose(9), "steps_1-4.zip", "steps_5-8.zip"]),
    "a branch": (range(7, 12), 12, [*loose(9, 10, 11), "steps_5-8.zip"]),
    "step 0": (range(3), 9, [*loose(0), "steps_1-4.zip"]),
    "no steps": ((), 9, []),
}


@pytest.mark.parametrize("case", ARCHIVED)
def test_files_of_earlier_steps_move_into_archives(tmp_path, case):
    steps, made, expected = ARCHIVED[case]
    write(tmp_path, steps)
    archive_before(tmp_path, made)
    assert names(tmp_path) == expected
    assert contents(tmp_path) == {step: [step] for step in steps}


@pytest.mark.parametrize("step", [0, 1, 3, 4, 5, 8, 9, 11, 12])
def test_a_resumed_run_keeps_exactly_the_steps_of_its_checkpoint(tmp_path, step):
    write(tmp_path, range(1, 12))
    archive_before(tmp_path, 11)
    (tmp_path / ".step_12.ab12.part").touch()
    (tmp_path / ".steps_9-12.zip.part").touch()
    cut_back(tmp_path, step)
    assert contents(tmp_path) == {each: [each] for each in range(1, min(step, 11) + 1)}
    assert not list(tmp_path.glob("*.part"))
    write(tmp_path, range(min(step, 11) + 1, 15))
    archive_before(tmp_path, 14)
    assert contents(tmp_path) == {each: [each] for each in range(1, 15)}


@pytest.mark.parametrize("kill", range(9))
@pytest.mark.parametrize("work", [lambda folder: archive_before(folder, 11), lambda folder: cut_back(folder, 7)])
def test_a_kill_in_the_middle_loses_no_step(tmp_path, monkeypatch, work, kill):
    write(tmp_path, range(1, 12))
    if kill % 2:
        archive_before(tmp_path, 11)
    count = 0

    def counted(original):
        def call(*arguments, **options):
            nonlocal count
            count += 1
            if count > kill:
                raise KilledError
            return original(*arguments, **options)

        return call

    with monkeypatch.context() as patched:
        for name in ("replace", "unlink"):
            patched.setattr(rollout_store.Path, name, counted(getattr(rollout_store.Path, name)))
        with contextlib.suppress(KilledError):
            work(tmp_path)
    assert contents(tmp_path).items() >= {step: [step] for step in range(1, 8)}.items()
    cut_back(tmp_path, 11)
    archive_before(tmp_path, 11)
    assert contents(tmp_path).items() >= {step: [step] for step in range(1, 8)}.items()
    assert not list(tmp_path.glob(".*"))


def test_a_step_without_rollouts_is_not_found(tmp_path):
    write(tmp_path, [1, 2, 4])
    archive_before(tmp_path, 8)
    for step in (3, 9):
        with pytest.raises(FileNotFoundError):
            open_step(tmp_path, step)


def test_archives_that_fail_do_not_end_the_run(tmp_path, monkeypatch, caplog):
    def fail(folder, step):
        raise OSError("no space is left")

    monkeypatch.setattr(rollout_store, "archive_before", fail)
    files = RolloutFiles(tmp_path)
    for step in range(1, 9):
        files.append(step, [], [])
        files.flush()
        if files._archiving is not None:
            files._archiving.exception()
    files.close()
    assert "rollouts of earlier steps were not archived: no space is left" in caplog.text


def test_validations_move_into_archives_and_back_with_their_steps(tmp_path):
    write(tmp_path, range(1, 8))
    for step in (0, 2, 4, 6):
        (tmp_path / f"val_{step}.jsonl").write_text(json.dumps({"validated": step}) + "\n")
    archive_before(tmp_path, 7)
    assert names(tmp_path) == [*loose(5, 6, 7), "steps_1-4.zip", "val_0.jsonl", "val_6.jsonl"]
    assert steps_in(tmp_path, "val") == [0, 2, 4, 6]
    assert steps_in(tmp_path) == list(range(1, 8))
    with open_step(tmp_path, 2, "val") as file:
        assert json.loads(file.readline()) == {"validated": 2}
    with pytest.raises(FileNotFoundError):
        open_step(tmp_path, 3, "val")
    cut_back(tmp_path, 3)
    assert names(tmp_path) == [*loose(1, 2, 3), "val_0.jsonl", "val_2.jsonl"]
    # a run that begins anew validates before its first step anew
    cut_back(tmp_path, -1)
    assert names(tmp_path) == []
