import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import counting_run as counting
import pytest

from rl_core.errors import RunDirectoryError
from rl_launch.run_session import RunSession
from rl_launch.run_session.directory.run_folder import RunFolder, find_runs
from rl_launch.run_session.directory.run_state import Best, BestSoFar, RunState
from rl_launch.run_session.rollouts.run_files import MetricsFile


def state(path):
    return RunFolder(path).state()


def test_a_run_that_made_all_its_steps_is_finished(tmp_path):
    counting.run(tmp_path, counting.config())
    found = state(tmp_path)
    assert (found.status, found.step, found.max_steps, found.reason) == ("finished", 6, 6, "")
    assert found.best == Best("val/accuracy", 1.0, 1)


def test_a_run_that_met_its_goal_is_finished_and_says_so(tmp_path):
    counting.run(tmp_path, counting.config(), at_step=lambda run, step: step == 3 and run.stop("good enough"))
    found = state(tmp_path)
    assert (found.status, found.step, found.max_steps, found.reason) == ("finished", 3, 6, "good enough")


def test_a_run_that_a_signal_ended_is_interrupted_and_says_by_what(tmp_path):
    counting.run(
        tmp_path, counting.config(), at_step=lambda run, step: step == 3 and os.kill(os.getpid(), signal.SIGTERM)
    )
    found = state(tmp_path)
    assert (found.status, found.step, found.reason) == ("interrupted", 3, "SIGTERM")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_one_signal_ended_while_it_started_says_so(tmp_path, number):
    with pytest.raises((SystemExit, KeyboardInterrupt)), RunSession(tmp_path, counting.config()):
        os.kill(os.getpid(), number)
    assert state(tmp_path).reason == f"{number.name} while it started"


def test_a_run_that_a_second_signal_ended_names_both(tmp_path):
    def twice(session, step):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        counting.run(tmp_path, counting.config(), at_step=twice)
    assert state(tmp_path).reason == "SIGTERM, then SIGINT ended it immediately"


def test_a_run_that_failed_says_why_and_runs_on_when_it_is_resumed(tmp_path):
    seen = []

    def fail(run, step):
        if step == 5:
            raise RuntimeError("the disk is on fire\nand more")

    with pytest.raises(RuntimeError):
        counting.run(tmp_path, counting.config(), at_step=fail)
    found = state(tmp_path)
    assert (found.status, found.step, found.reason) == ("failed", 4, "the disk is on fire")
    counting.run(tmp_path, counting.config(), at_step=lambda run, step: seen.append(state(tmp_path)))
    assert [(each.status, each.step) for each in seen] == [("running", 4), ("running", 5)]
    assert state(tmp_path).status == "finished"


def test_a_start_that_fails_keeps_what_the_state_said_of_steps(tmp_path):
    counting.run(tmp_path, counting.config(), at_step=lambda run, step: step == 3 and run.stop("good enough"))
    with pytest.raises(RuntimeError), RunSession(tmp_path, counting.config()):
        raise RuntimeError("no GPU")
    found = state(tmp_path)
    assert (found.status, found.step, found.max_steps) == ("failed", 3, 6)
    assert found.best == Best("val/accuracy", 1.0, 1)


def test_a_killed_run_does_not_run(tmp_path):
    process = subprocess.run([sys.executable, counting.__file__, str(tmp_path), "5", "step"], check=False)
    assert process.returncode == -signal.SIGKILL
    found = state(tmp_path)
    assert (found.status, found.step) == ("interrupted", 4)
    assert "process ended" in found.reason


def test_a_process_that_has_the_number_of_one_that_is_gone_does_not_count(tmp_path):
    counting.run(tmp_path, counting.config())
    lock, long_ago = json.loads("{}"), "2001-01-01T00:00:00+00:00"
    lock |= {"pid": os.getpid(), "host": os.uname().nodename, "since": long_ago}
    (tmp_path / "run.lock").write_text(json.dumps(lock))
    written = json.loads((tmp_path / "state.json").read_text())
    (tmp_path / "state.json").write_text(json.dumps({**written, "status": "running"}))
    assert state(tmp_path).status == "interrupted"


def test_the_best_value_of_the_metric_that_ranks_checkpoints_is_kept_over_a_resume(tmp_path):
    counting.run(tmp_path, counting.config(max_num_steps=4, metric_name="train:loss", higher_is_better=False))
    first = state(tmp_path).best
    counting.run(tmp_path, counting.config(metric_name="train:loss", higher_is_better=False))
    rows = counting.metrics(tmp_path)
    least = min(rows, key=lambda row: row["train/loss"])
    assert state(tmp_path).best == Best("train/loss", least["train/loss"], least["step"])
    assert first is not None
    assert first.metric == "train/loss"


def test_a_value_that_is_not_finite_is_never_the_best():
    best = BestSoFar(None)
    for step, value in enumerate([float("nan"), None, float("-inf"), 0.5]):
        best.add(step, {"val/loss": value})
    assert best.best == Best("val/loss", 0.5, 3)


def test_what_a_run_holds_is_read_as_it_was_written(tmp_path):
    counting.run(tmp_path, counting.config())
    (tmp_path / "rollouts/step_2.jsonl").write_text('{"prompt_id": "a"}\n{"pro\n{"prompt_id": "b"}\n{"prom')
    run = RunFolder(tmp_path)
    assert run.config()["loop"] == {"max_num_steps": 6, "learning_rate": 0.1}
    assert run.config()["run_dir"] is None
    assert [row["step"] for row in run.metrics()] == [1, 2, 3, 4, 5, 6]
    assert run.last_metrics() == run.metrics()[-1]
    assert run.rollout_steps() == [2]
    assert [each["prompt_id"] for each in run.rollouts(2)] == ["a", "b"]
    assert [each.step for each in run.checkpoints()] == run.checkpoint_steps() == [2, 4, 6]
    assert run.checkpoints()[1].metrics["val/accuracy"] == 0.25
    times = run.timings()
    assert list(times) == ["step", "training"]
    assert times["training"] == pytest.approx(sum(row["time/training"] for row in run.metrics()))
    with pytest.raises(RunDirectoryError, match=r"no rollouts of step 3; .* 2 to 2"):
        list(run.rollouts(3))


# lines of metrics as a crash leaves them, and the steps that are read
CUT_LINES = {
    "at the end": ('{"step": 1}\n{"step": 2, "a', [1]),
    "in the middle": ('{"step": 1}\n{"step": 2, "a\n{"step": 3}\n', [1, 3]),
    "in the middle, without its end": ('{"step": 1}\n{"step": 2, "a{"step": 3, "a": 1}\n{"step": 4}\n', [1, 3, 4]),
    "zeros of a power cut": ('{"step": 1}\n\0\0\0\0\n{"step": 3}\n', [1, 3]),
    "half a character": ('{"step": 1}\n{"step": 2, "\udcc3\n{"step": 3}\n', [1, 3]),
    "not an object": ('{"step": 1}\n12\n[1]\n{"a": 1}\n\n{"step": 3}\n', [1, 3]),
}  # fmt: skip


@pytest.mark.parametrize("case", CUT_LINES)
def test_a_line_that_was_cut_short_hides_no_other(tmp_path, case):
    text, steps = CUT_LINES[case]
    file = MetricsFile(tmp_path / "metrics.jsonl")
    (tmp_path / "metrics.jsonl").write_bytes(text.encode(errors="surrogateescape"))
    assert [row["step"] for row in file.read()] == steps
    file.cut_back(2)
    file.append(3, {"a": float("nan")})
    assert [row["step"] for row in file.read()] == [*(step for step in steps if step <= 2), 3]


def test_a_line_that_is_half_written_is_not_the_last(tmp_path):
    counting.run(tmp_path, counting.config())
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "train/l')
    assert RunFolder(tmp_path).last_metrics()["step"] == 6


def test_a_run_without_a_state_is_known_by_its_checkpoints(tmp_path):
    counting.run(tmp_path, counting.config())
    (tmp_path / "state.json").unlink()
    assert state(tmp_path).step == 6


@pytest.mark.parametrize("broken", ["", "{", "[1]", '{"status": "running", "who": 1}', '{"best": 3}'])
def test_a_state_that_cannot_be_read_is_none(tmp_path, broken):
    counting.run(tmp_path, counting.config())
    (tmp_path / "state.json").write_text(broken)
    assert state(tmp_path).status == "interrupted"


def test_a_folder_that_is_not_a_run_is_refused(tmp_path):
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        RunFolder(tmp_path)
    with pytest.raises(RunDirectoryError, match=f" {tmp_path}/nowhere"):
        RunFolder(tmp_path / "nowhere")


def test_runs_are_found_in_folders_of_folders(tmp_path):
    for name in ("b", "quick/sft", "quick/grpo"):
        counting.run(tmp_path / name, counting.config())
    (tmp_path / "notes").mkdir()
    found = [run.path.relative_to(tmp_path) for run in find_runs(tmp_path)]
    assert found == [Path("b"), Path("quick/grpo"), Path("quick/sft")]
    assert [run.path for run in find_runs(tmp_path / "b")] == [tmp_path / "b"]
    assert [run.path for run in find_runs(str(tmp_path))] == [run.path for run in find_runs(tmp_path)]


@pytest.mark.parametrize("name", ["nosuch", "file"])
def test_what_is_not_a_folder_has_no_runs(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match=f"{name} is not a folder. Pass a run, or a folder that contains runs"):
        find_runs(str(tmp_path / name))


def test_a_run_is_displayed_with_its_state_and_step(tmp_path):
    counting.run(tmp_path / "mine", counting.config())
    assert repr(RunFolder(tmp_path / "mine")) == f"RunFolder('{tmp_path / 'mine'}', finished, step 6 of 6)"


READERS = {
    "state.json": lambda run: run.state(),
    "metrics.jsonl": lambda run: run.metrics(),
    "metrics.jsonl, its end": lambda run: run.last_metrics(),
    "run.json": lambda run: run.description(),
    "config.yaml": lambda run: run.config(),
    "checkpoints/step_2/manifest.json": lambda run: run.checkpoints(),
    "checkpoints/step_2/manifest.json, the best": lambda run: run.best_checkpoint(),
    "rollouts/step_1.jsonl": lambda run: list(run.rollouts(1)),
}


@pytest.mark.parametrize("case", READERS)
def test_a_file_that_cannot_be_read_is_named_and_is_not_taken_for_an_empty_one(tmp_path, case):
    counting.run(tmp_path, counting.config(2))
    file = tmp_path / case.partition(",")[0]
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    file.symlink_to("/proc/self/mem")  # can be opened, and its first read is an input/output error
    with pytest.raises(OSError, match=f"(Input/output error|Invalid argument): '{file}'"):
        READERS[case](RunFolder(tmp_path))


def test_a_state_displays_how_far_the_run_has_come():
    state = RunState(
        "finished", 12, 12, goals={"sft.max_num_steps": 12}, best=Best("val/loss", 0.4, 12), saved=12, at="x"
    )
    assert repr(state) == (
        "RunState(status='finished', step=12, max_steps=12, reason='', "
        "best=Best(metric='val/loss', value=0.4, step=12))"
    )
