import dataclasses
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import counting_run as counting
import numpy as np
import pytest

from rl_algos.data.stream import Stream
from rl_algos.grpo.config import GRPOConfig
from rl_algos.grpo.loop import train
from rl_algos.losses.policy import PolicyLoss
from rl_algos.policy_gradient.objective import Objective
from rl_algos.rollouts.driver.source import PacedRolloutSource
from rl_algos.rollouts.driver.steps import RolloutSteps
from rl_algos.rollouts.driver.validation import Validation
from rl_core.data.batch import RemoteRows
from rl_core.errors import RunDirectoryError, WorkerDied
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.record import write_records
from rl_core.rollouts.rollout import Prompt, Rollout, Turn, WeightSpan
from rl_core.testing.exhaustive import partly_exhaustive
from rl_core.testing.fakes import FakeModel, FakeWeights
from rl_launch.run_session import RunSession, newest_checkpoint
from rl_launch.run_session.directory.run_folder import RunFolder
from rl_launch.run_session.directory.run_state import RunState
from rl_launch.run_session.rollouts.run_files import MAX_STEPS, RolloutFiles
from rl_launch.run_session.stop import StepAbandoned, StopRequest


@pytest.fixture
def whole(tmp_path):
    """Metrics of a run that nothing interrupted."""
    counting.run(tmp_path / "whole", counting.config())
    return counting.metrics(tmp_path / "whole")


def start(run_dir: Path, kill_at: int, kill_in: str) -> subprocess.Popen:
    script = Path(counting.__file__)
    return subprocess.Popen(
        [sys.executable, str(script), str(run_dir), str(kill_at), kill_in], stdout=subprocess.PIPE, text=True
    )


def test_a_run_leaves_what_the_layout_says(tmp_path, whole):
    run_dir = tmp_path / "whole"
    assert [row["step"] for row in whole] == [1, 2, 3, 4, 5, 6]
    assert {path.name for path in run_dir.iterdir()} >= {
        "config.yaml",
        "metrics.jsonl",
        "rollouts",
        "checkpoints",
        "logs",
    }
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["step_2", "step_4", "step_6"]
    exported = json.loads((run_dir / "checkpoints/step_6/hf/config.json").read_text())
    assert exported["weights"] == [whole[-1]["train/loss"]]
    assert newest_checkpoint(run_dir) == run_dir / "checkpoints/step_6"


def test_every_step_says_how_long_it_and_its_phases_took(tmp_path):
    counting.run(tmp_path, counting.config(max_num_steps=1))
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert 0 < row["time/training"] <= row["time/step"]


KILLED = [(1, "step"), (4, "step"), (1, "save"), (4, "save"), (3, "background"), (5, "background")]


@pytest.mark.parametrize(
    ("kill_at", "kill_in"), partly_exhaustive(KILLED, always=[(4, "step"), (4, "save"), (5, "background")])
)
def test_a_killed_run_resumes_to_the_same_numbers(tmp_path, whole, kill_at, kill_in):
    process = start(tmp_path / "killed", kill_at, kill_in)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    resumed = counting.run(tmp_path / "killed", counting.config())
    assert resumed.completed == 6
    assert counting.metrics(tmp_path / "killed") == whole


@pytest.mark.parametrize("number", partly_exhaustive([signal.SIGKILL, signal.SIGTERM], always=[signal.SIGKILL]))
def test_a_run_that_is_ended_before_any_of_its_renames_resumes_to_the_same_numbers(tmp_path, whole, number):
    command = [sys.executable, counting.__file__, str(tmp_path / "runs"), "renames", str(int(number))]
    made = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    runs = sorted((tmp_path / "runs").iterdir())
    assert len(runs) == int(made.stdout) + 1 > 10
    for folder in runs:
        counting.run(folder, counting.config())
        assert counting.metrics(folder) == whole
        assert not list(folder.rglob("*.part"))
        assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step_2", "step_4", "step_6"]


def test_a_terminated_run_saves_and_resumes_to_the_same_numbers(tmp_path, whole):
    process = start(tmp_path / "run", 0, "never")
    assert process.stdout is not None
    while process.stdout.readline().strip() != "3":
        pass
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert newest_checkpoint(tmp_path / "run").name == "step_3"
    counting.run(tmp_path / "run", counting.config())
    assert counting.metrics(tmp_path / "run") == whole


def test_a_save_behind_the_steps_counts_once_it_is_whole(tmp_path, whole):
    seen = {}

    def look(session, step):
        seen[step] = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())

    model = counting.PatientModel(num_asks=2)
    session = counting.run(tmp_path / "run", counting.config(async_save=True), at_step=look, model=model)
    assert seen == {
        1: [],
        2: [],
        3: [".step_2.saving"],
        4: [".step_2.saving"],
        5: [".step_4.saving", "step_2"],
        6: [".step_4.saving", "step_2"],
    }
    names = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert names == ["step_2", "step_4", "step_6"]
    assert session.saved == 6
    assert counting.metrics(tmp_path / "run") == whole
    for later in ("step_6", "step_4"):
        weights = tmp_path / f"run/checkpoints/{later}/policy/weights.npy"
        weights.write_bytes(weights.read_bytes()[:-3])
    counting.run(tmp_path / "run", counting.config())
    assert counting.metrics(tmp_path / "run") == whole


def test_the_next_save_waits_for_the_one_before(tmp_path, whole):
    model = counting.PatientModel(num_asks=100)
    counting.run(tmp_path / "run", counting.config(async_save=True), model=model)
    names = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert (names, model.num_saves) == (["step_2", "step_4", "step_6"], 3)


def test_a_run_told_to_end_waits_for_the_save_behind_it(tmp_path):
    def end(session, step):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    model = counting.PatientModel(num_asks=100)
    counting.run(tmp_path, counting.config(async_save=True), at_step=end, model=model)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_2", "step_3"]


def test_a_save_behind_the_steps_that_fails_ends_the_run_and_leaves_nothing(tmp_path):
    model = counting.PatientModel(failure=OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(OSError, match="No space left"):
        counting.run(tmp_path, counting.config(async_save=True), model=model)
    assert not list((tmp_path / "checkpoints").iterdir())
    assert len(counting.metrics(tmp_path)) == 4


@pytest.mark.parametrize(
    ("error", "left"),
    [(RuntimeError("lost"), ["step_2"]), (WorkerDied("the process ended"), []), (KeyboardInterrupt(), [])],
)
def test_an_error_in_a_step_lets_the_save_behind_it_end_where_it_can(tmp_path, error, left):
    def fail(session, step):
        if step == 3:
            raise error

    with pytest.raises(type(error)):
        counting.run(tmp_path, counting.config(async_save=True), at_step=fail, model=counting.PatientModel())
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == left


def test_an_error_in_a_step_is_the_one_that_is_raised_where_the_save_behind_it_fails_too(tmp_path, caplog):
    def fail(session, step):
        if step == 3:
            raise RuntimeError("lost")

    model = counting.PatientModel(failure=OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(RuntimeError, match="lost"):
        counting.run(tmp_path, counting.config(async_save=True), at_step=fail, model=model)
    assert "the checkpoint of step 2 was not completed: [Errno 28]" in caplog.text
    assert not list((tmp_path / "checkpoints").iterdir())


def test_what_is_left_is_saved_before_the_models_go(tmp_path):
    model = counting.CountingModel()
    with RunSession(tmp_path, counting.config()) as session:
        with session.with_models():
            steps = session.steps(6, models={"policy": model}, state={})
            for step in steps:
                if step == 4:
                    break
        model.save = lambda path, *, wait=True: pytest.fail("the model is gone")
    assert newest_checkpoint(tmp_path).name == "step_3"


def test_a_step_that_waits_for_what_may_never_come_is_left_on_a_signal_and_the_steps_before_it_are_saved(tmp_path):
    with RunSession(tmp_path, counting.config()) as session, session.with_models():
        for step in session.steps(6, models={"policy": counting.CountingModel()}, state={}):
            if step == 4:
                os.kill(os.getpid(), signal.SIGTERM)
                raise StepAbandoned("8 rollouts that no agent has taken")
    assert newest_checkpoint(tmp_path).name == "step_3"
    state = RunFolder(tmp_path).state()
    assert (state.status, state.reason, session.stop_request.signal) == ("interrupted", "SIGTERM", signal.SIGTERM)


def test_the_time_limit_leaves_room_for_a_save_that_is_under_way():
    def stop_after(*, saves):
        request = StopRequest(100.0, time.monotonic() - 90.0)
        request.after_save(4.0)
        request.after_step(1.0, saves=saves)
        return bool(request.reason)

    assert not stop_after(saves=False)
    assert stop_after(saves=True)


def test_a_second_signal_ends_at_once(tmp_path):
    def twice(session, step):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        counting.run(tmp_path, counting.config(), at_step=twice)
    assert signal.getsignal(signal.SIGINT) is before
    assert not list((tmp_path / "checkpoints").iterdir())


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_before_the_first_step_unwinds(tmp_path, number, error):
    with pytest.raises(error), RunSession(tmp_path, counting.config()):
        os.kill(os.getpid(), number)


def test_the_exit_code_is_that_of_the_signal_although_ray_raises_another(tmp_path):
    def wait_of_rays():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except SystemExit:
            raise SystemExit(1) from None

    with pytest.raises(SystemExit) as ended, RunSession(tmp_path, counting.config()):
        wait_of_rays()
    assert ended.value.code == 128 + signal.SIGTERM


def test_a_handler_that_a_library_sets_meanwhile_does_not_win(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with RunSession(tmp_path, counting.config()) as session:
        signal.signal(signal.SIGTERM, lambda number, frame: pytest.fail("killed without saving"))
        for _ in session.steps(6, models={"policy": counting.CountingModel()}, state={}):
            os.kill(os.getpid(), signal.SIGTERM)
    assert (session.completed, session.stop_request.reason, session.stop_request.signal) == (
        1,
        "SIGTERM",
        signal.SIGTERM,
    )
    assert not session.is_finished
    assert newest_checkpoint(tmp_path).name == "step_1"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_run_that_reached_its_goal_saves_and_stays_there(tmp_path):
    session = counting.run(
        tmp_path, counting.config(), at_step=lambda run, step: run.stop("good enough") if step == 3 else None
    )
    assert (session.completed, session.stop_request.reason) == (3, "good enough")
    assert newest_checkpoint(tmp_path).name == "step_3"


def exported(folder):
    """Steps whose checkpoint has Hugging Face files, and all others."""
    steps = sorted((folder / "checkpoints").iterdir())
    having = [path.name for path in steps if (path / "hf").is_dir()]
    return having, [path.name for path in steps if path.name not in having]


@pytest.mark.parametrize(
    ("period", "having"), [(None, ["step_2", "step_4", "step_6"]), (4, ["step_4", "step_6"]), (0, ["step_6"])]
)
def test_a_period_of_exports_leaves_them_out_of_checkpoints_but_the_last(tmp_path, whole, period, having):
    run, settings = tmp_path / "run", counting.config(export_period=period)
    counting.run(run, settings)
    assert exported(run) == (having, [name for name in ("step_2", "step_4", "step_6") if name not in having])
    assert newest_checkpoint(run).name == "step_6"
    shutil.rmtree(run / "checkpoints" / "step_6")
    counting.run(run, settings)  # from a checkpoint without them
    assert counting.metrics(run) == whole
    assert exported(run)[0] == having


def test_an_interrupted_run_exports_when_it_is_finished(tmp_path):
    def end(session, step):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    settings = counting.config(export_period=0)
    counting.run(tmp_path, settings, at_step=end)
    assert exported(tmp_path) == ([], ["step_2", "step_3"])
    counting.run(tmp_path, settings)
    assert exported(tmp_path) == (["step_6"], ["step_3", "step_4"])


@pytest.mark.parametrize("step", [3, 4], ids=["in a step without a checkpoint", "in one with"])
def test_a_goal_that_is_met_is_exported(tmp_path, step):
    settings = counting.config(export_period=0)
    counting.run(tmp_path, settings, at_step=lambda run, at: run.stop("good enough") if at == step else None)
    assert exported(tmp_path) == ([f"step_{step}"], ["step_2"])


def test_data_that_ends_after_a_checkpoint_without_files_gets_them_written(tmp_path):
    with RunSession(tmp_path, counting.config(export_period=0)) as session:
        for step in session.steps(6, models={"policy": counting.CountingModel()}, state={}):
            if step == 5:
                session.stop("the data has ended")
                break
            session.record(step, {"train/loss": 0.0})
    assert exported(tmp_path) == (["step_4"], ["step_2"])


def test_a_loop_that_breaks_saves_its_last_whole_step(tmp_path):
    model, draws = counting.CountingModel(), counting.Draws()
    with RunSession(tmp_path, counting.config()) as session:
        for step in session.steps(6, models={"policy": model}, state={"draws": draws}):
            if step == 4:
                session.stop("the data has ended")
                break
            session.record(step, {"train/loss": 0.0})
    assert newest_checkpoint(tmp_path).name == "step_3"
    assert [row["step"] for row in counting.metrics(tmp_path)] == [1, 2, 3]


def test_the_end_of_a_run_names_the_folder_of_its_adapters_once(tmp_path, caplog):
    class Adapted(counting.CountingModel):
        def export_adapter(self, path):
            Path(path).mkdir()
            return (counting.written(Path(path) / "factors.npy", self.weights),)

    caplog.set_level("INFO", logger="rl_launch")
    counting.run(tmp_path, counting.config(), model=Adapted())
    named = [record.getMessage() for record in caplog.records if "adapters" in record.getMessage()]
    assert named == [f"adapters, for peft: {tmp_path / 'checkpoints/step_6/adapter'}"]


def test_models_that_do_not_train_are_not_in_checkpoints(tmp_path):
    for last in (2, 4):
        models = {role: counting.CountingModel() for role in ("policy", "critic", "teacher")}
        models["teacher"].trains = False
        models["teacher"].weights += 5
        with RunSession(tmp_path, counting.config(last)) as session:
            steps = session.steps(last, models=models, state={})
            assert models["critic"].weights == (0 if last == 2 else 2.5)
            for step in steps:
                models["critic"].train(1.0)
                session.record(step, {"train/loss": 0.0})
        assert models["teacher"].weights == 5
        assert sorted(entry.name for entry in newest_checkpoint(tmp_path).iterdir() if entry.is_dir()) == [
            "critic",
            "hf",
            "policy",
        ]


def test_the_time_limit_ends_a_run_in_time(tmp_path, whole):
    settings = counting.config(checkpoint_must_save_by="00:00:00:01")
    session = counting.run(tmp_path / "limited", settings, at_step=lambda run, step: time.sleep(0.3))
    assert 1 <= session.completed < 4
    assert not session.is_finished
    assert newest_checkpoint(tmp_path / "limited").name == f"step_{session.completed}"
    counting.run(tmp_path / "limited", counting.config())
    assert counting.metrics(tmp_path / "limited") == whole


def test_an_error_saves_nothing_and_says_where_it_happened(tmp_path):
    def fail(session, step):
        if step == 4:
            with session.phase("weight_sync"):
                raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost") as caught:
        counting.run(tmp_path, counting.config(), at_step=fail)
    assert caught.value.__notes__ == ["in step 4 of 6, weight_sync"]
    assert newest_checkpoint(tmp_path).name == "step_2"


def test_a_damaged_checkpoint_is_passed_over(tmp_path, whole, caplog):
    counting.run(tmp_path / "run", counting.config())
    weights = tmp_path / "run/checkpoints/step_6/policy/weights.npy"
    weights.write_bytes(weights.read_bytes()[:-3])
    resumed = counting.run(tmp_path / "run", counting.config())
    assert "step_6 is damaged: policy/weights.npy has" in caplog.text
    assert resumed.completed == 6
    assert counting.metrics(tmp_path / "run") == whole


def test_a_run_goes_on_when_it_is_given_more_steps(tmp_path):
    counting.run(tmp_path / "grown", counting.config(max_num_steps=3))
    counting.run(tmp_path / "grown", counting.config(max_num_steps=6))
    counting.run(tmp_path / "once", counting.config(max_num_steps=6))
    assert counting.metrics(tmp_path / "grown") == counting.metrics(tmp_path / "once")


def test_a_finished_run_does_nothing_more(tmp_path, whole):
    model = counting.CountingModel()
    counting.run(tmp_path / "whole", counting.config(), model=model)
    assert model.num_saves == 0
    assert counting.metrics(tmp_path / "whole") == whole


def test_a_run_without_checkpoints_is_not_overwritten(tmp_path):
    counting.run(tmp_path, counting.config(enabled=False))
    with pytest.raises(RunDirectoryError, match="without checkpoints"):
        counting.run(tmp_path, counting.config(enabled=False))
    assert len(counting.metrics(tmp_path)) == 6


def test_what_is_due(tmp_path):
    with RunSession(tmp_path, counting.config()) as session:
        list(session.steps(0, models={}, state={}))
        session.steps(5, models={}, state={})
        assert [step for step in range(1, 6) if session.due(2, step)] == [2, 4]
        assert [step for step in range(1, 6) if session.due(2, step, at_end=True)] == [2, 4, 5]
        assert not any(session.due(0, step) for step in range(1, 6))


def test_rates_follow_from_counts_and_phases(tmp_path):
    with RunSession(tmp_path, counting.config()) as session:
        for step in session.steps(1, models={}, state={}):
            with session.phase("generation"):
                pass
            session.record(step, {"generation/num_tokens": 640.0})
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert row["generation/tokens_per_second"] == pytest.approx(640.0 / row["time/generation"])


def test_tokens_that_were_sampled_during_the_whole_step_are_counted_over_it(tmp_path):
    with RunSession(tmp_path, counting.config()) as session:
        for step in session.steps(1, models={}, state={}):
            with session.phase("generation"):
                pass
            session.record(step, {"generation/num_tokens": 640.0, "idle/trainer": 0.0})
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert row["generation/tokens_per_second"] == pytest.approx(640.0 / row["time/step"])


def test_metrics_before_the_first_step_have_a_line_of_their_own(tmp_path):
    with RunSession(tmp_path, counting.config()) as session:
        for step in session.steps(1, models={}, state={}):
            session.record(0, {"val/accuracy": 0.25})
            session.record(step, {"val/accuracy": 0.5})
            session.record(step, {"train/loss": float("nan")})
    rows = counting.metrics(tmp_path)
    assert rows == [{"step": 0, "val/accuracy": 0.25}, {"step": 1, "val/accuracy": 0.5, "train/loss": None}]


def test_a_metric_that_validation_never_records_is_told_once(tmp_path, caplog):
    config = counting.config()
    section = config.checkpointing.model_copy(update={"metric_name": "val:accuracy"})
    config = config.model_copy(update={"checkpointing": section})
    with RunSession(tmp_path, config) as session:
        for step in session.steps(2, models={}, state={}):
            session.record(step, {"val/reward": 0.5, "train/loss": 1.0})
    said = [each.getMessage() for each in caplog.records if "metric_name" in each.getMessage()]
    (message,) = said
    assert "does not record val/accuracy, so the newest checkpoints are kept; it has val/reward" in message


def rollout_group(num_rollouts: int) -> RolloutGroup:
    prompt = Prompt("p0", ({"role": "user", "content": "1+2="},), np.array([5, 6], np.int32), "math", {"answer": "3"})
    rollout = Rollout(
        prompt_id="p0",
        tokens=np.array([5, 6, 7], np.int32),
        loss_mask=np.array([0, 0, 1], np.uint8),
        generation_logprobs=np.zeros(3, np.float32),
        spans=(WeightSpan(3, 1),),
        turns=(Turn("3", None, {"reward": 1.0}),),
        rewards={"reward": 1.0},
        stop_reason="stop",
        info={"seen": np.float32(0.5)},
    )
    return RolloutGroup.of(prompt, [rollout] * num_rollouts)


def test_rollouts_are_one_line_each_with_their_advantage(tmp_path):
    with RunSession(tmp_path, counting.config()) as session:
        for step in session.steps(1, models={}, state={}):
            session.record_rollouts(step, [rollout_group(2), rollout_group(1)], np.array([0.5, -0.5]))
    rows = [json.loads(line) for line in (tmp_path / "rollouts/step_1.jsonl").read_text().splitlines()]
    assert [row["advantage"] for row in rows] == [0.5, -0.5, None]
    assert rows[0]["prompt"] == [{"role": "user", "content": "1+2="}]
    assert rows[0]["turns"] == [{"text": "3", "observation": None, "rewards": {"reward": 1.0}}]
    assert (rows[0]["weight_versions"], rows[0]["stop_reason"], rows[0]["info"]) == ([3], "stop", {"seen": 0.5})


def test_rollouts_of_a_validation_have_files_of_their_own_which_a_later_one_replaces(tmp_path):
    with RunSession(tmp_path, counting.config()) as session:
        for step in session.steps(1, models={}, state={}):
            session.record_validation(0, [rollout_group(3)])
            session.record_rollouts(step, [rollout_group(2)], np.zeros(2))
            session.record_validation(step, [rollout_group(3)])
            session.record_validation(step, [rollout_group(1)])
    found = RunFolder(tmp_path)
    assert found.rollout_steps("val") == [0, 1]
    assert len(list(found.rollouts(0, "val"))) == 3
    (row,) = found.rollouts(1, "val")
    assert (row["row"], row["advantage"]) == ({"answer": "3"}, None)
    assert len(list(found.rollouts(1))) == 2
    with pytest.raises(RunDirectoryError, match=r"no validation rollouts of step 7; .* 0 to 1"):
        list(found.rollouts(7, "val"))


class Texts:
    """Records that lie elsewhere, and come once they may."""

    def __init__(self, *, error=None, held=False):
        self.may_come = threading.Event()
        self.error = error
        if not held:
            self.may_come.set()

    def fetch(self):
        assert self.may_come.wait(120)
        if self.error is not None:
            raise self.error
        return rollout_group(1).columns

    def group(self):
        group = rollout_group(1)
        columns = group.columns.with_columns(RemoteRows.of(self, group.columns.lengths).columns(["record"]))
        return dataclasses.replace(group, columns=columns)


def test_rollouts_are_written_beside_the_steps_and_before_a_checkpoint(tmp_path):
    texts = Texts(held=True)
    written = tmp_path / "rollouts/step_1.jsonl"
    with RunSession(tmp_path, counting.config()) as session:
        steps = session.steps(2, models={"policy": counting.CountingModel()}, state={"draws": counting.Draws()})
        session.record_rollouts(next(steps), [texts.group()], np.zeros(1))
        next(steps)
        assert not written.exists() or not written.read_text()
        texts.may_come.set()
        assert next(steps, None) is None
        assert len(written.read_text().splitlines()) == 1


def test_a_step_waits_for_rollouts_of_much_earlier_ones(tmp_path):
    files = RolloutFiles(tmp_path)
    texts = Texts(held=True)
    for step in range(MAX_STEPS):
        files.append(step, [texts.group()], np.zeros(1))
    waiting = threading.Thread(target=files.append, args=(MAX_STEPS, [texts.group()], np.zeros(1)))
    waiting.start()
    assert waiting.is_alive()
    texts.may_come.set()
    waiting.join(120)
    files.flush()
    assert [len((tmp_path / f"step_{step}.jsonl").read_text().splitlines()) for step in range(MAX_STEPS + 1)] == [1] * 3
    files.close()


def test_rollouts_of_opponents_follow_those_of_their_group_without_an_advantage(tmp_path):
    prompt = rollout_group(1).prompt
    rollouts = [
        dataclasses.replace(
            Rollout.failed(prompt, ""), status="ok", agent=agent, play=play, is_opponent=agent == "second"
        )
        for play in range(2)
        for agent in ("first", "second")
    ]
    groups = [RolloutGroup.of(prompt, rollouts), rollout_group(1)]
    files = RolloutFiles(tmp_path)
    files.append(3, groups, np.array([0.5, -0.5, 0.25]))
    files.flush()
    files.close()
    written = [json.loads(line) for line in (tmp_path / "step_3.jsonl").read_text().splitlines()]
    assert [(row.get("agent"), row["advantage"]) for row in written] == [
        ("first", 0.5),
        ("first", -0.5),
        ("second", None),
        ("second", None),
        (None, 0.25),
    ]


def test_rollouts_that_cannot_be_written_end_the_run(tmp_path):
    def lose_the_folder(session, step):
        shutil.rmtree(tmp_path / "rollouts", ignore_errors=True)
        session.record_rollouts(step, [rollout_group(1)], np.zeros(1))

    with pytest.raises(FileNotFoundError):
        counting.run(tmp_path, counting.config(), at_step=lose_the_folder)
    assert not (tmp_path / "checkpoints/step_2").exists()


def test_texts_that_were_lost_with_a_node_cost_only_themselves(tmp_path, caplog):
    files = RolloutFiles(tmp_path)
    files.append(1, [Texts(error=WorkerDied("its node died")).group(), rollout_group(2)], np.array([1.0, 2.0, 3.0]))
    files.flush()
    rows = [json.loads(line) for line in (tmp_path / "step_1.jsonl").read_text().splitlines()]
    assert [row["advantage"] for row in rows] == [2.0, 3.0]
    assert "step 1: the messages of prompt p0 are lost: its node died" in caplog.text
    files.close()


def write_here(path, rows, advantages):
    """Stand-in for a process that sees the run's folder."""
    write_records(Path(path), zip(rows.fetch_all(["record"])["record"], advantages, strict=True))


def test_rollouts_whose_texts_lie_elsewhere_are_written_there(tmp_path):
    paths = []

    def write(path, rows, advantages):
        paths.append(Path(path))
        write_here(path, rows, advantages)

    files = RolloutFiles(tmp_path)
    files.write_elsewhere = write
    files.append(1, [Texts().group(), Texts().group()], np.array([1.5]))
    files.append(2, [rollout_group(1)], np.zeros(1))
    files.flush()
    rows = [json.loads(line) for line in (tmp_path / "step_1.jsonl").read_text().splitlines()]
    assert [row["advantage"] for row in rows] == [1.5, None]
    assert len(paths) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1.jsonl", "step_2.jsonl"]
    files.close()


def test_rollouts_that_nobody_else_writes_are_written_here(tmp_path, caplog):
    def die(path, rows, advantages):
        write_here(path, rows, advantages)
        raise WorkerDied("the process ended")

    files = RolloutFiles(tmp_path)
    files.write_elsewhere = die
    files.append(1, [Texts().group()], np.array([2.0]))
    files.flush()
    (row,) = [json.loads(line) for line in (tmp_path / "step_1.jsonl").read_text().splitlines()]
    assert row["advantage"] == 2.0
    assert re.search("step_1.jsonl: .*: the process ended", caplog.text)
    assert [path.name for path in tmp_path.iterdir()] == ["step_1.jsonl"]
    files.close()


def test_rollouts_of_steps_that_come_again_are_dropped(tmp_path):
    def fail_at_four(session, step):
        session.record_rollouts(step, [rollout_group(1)], np.zeros(1))
        if step == 4:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        counting.run(tmp_path, counting.config(), at_step=fail_at_four)
    with RunSession(tmp_path, counting.config()) as session:
        session.steps(6, models={"policy": counting.CountingModel()}, state={"draws": counting.Draws()})
        assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == ["step_1.jsonl", "step_2.jsonl"]


def flip_a_byte(path):
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_a_checkpoint_that_turns_out_to_be_damaged_is_set_aside_for_the_one_before(tmp_path, whole):
    run_dir = tmp_path / "run"
    counting.run(run_dir, counting.config(max_num_steps=4))
    flip_a_byte(run_dir / "checkpoints/step_4/policy/weights.npy")
    counting.run(run_dir, counting.config())
    assert counting.metrics(run_dir) == whole
    assert (run_dir / "checkpoints/damaged_step_4").is_dir()


def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_anew(tmp_path):
    counting.run(tmp_path, counting.config(max_num_steps=4))
    for step in (2, 4):
        flip_a_byte(tmp_path / f"checkpoints/step_{step}/policy/weights.npy")
    with pytest.raises(RunDirectoryError, match=r"weights.npy has other contents .*\n(.*\n)?No complete checkpoint"):
        counting.run(tmp_path, counting.config())


class EchoPool:
    """Answers every prompt with its own tokens."""

    num_replicas = 1

    def __init__(self):
        self.asked = []
        self.tasks = []

    def speculation(self):
        return None

    def submit(self, tasks):
        self.asked += [task.prompt.id for task in tasks]
        self.tasks += tasks
        return list(range(len(self.asked) - len(tasks), len(self.asked)))

    def next_done(self):
        task = self.tasks.pop(0)
        ticket = len(self.asked) - len(self.tasks) - 1
        return ticket, RolloutGroup.of(task.prompt, tuple(self._rollout(task.prompt, seed) for seed in task.seeds))

    def adopt(self, update, *, in_flight=False):
        self.version = update.version

    def _rollout(self, prompt, seed):
        return Rollout(
            prompt_id=prompt.id,
            tokens=np.array([1, 2, 3], np.int32),
            loss_mask=np.array([0, 1, 1], np.uint8),
            generation_logprobs=np.zeros(3, np.float32),
            spans=(WeightSpan(self.version, 2),),
            turns=(Turn("2 3", None, {"reward": float(seed % 2)}),),
            rewards={"reward": float(seed % 2)},
            stop_reason="stop",
        )


@pytest.mark.parametrize("is_recorded", [True, False])
@pytest.mark.parametrize("gone", ["removed", "not mounted"])
@pytest.mark.parametrize("ending", ["finished", "killed"])
def test_a_run_whose_checkpoints_are_gone_is_not_started_anew(tmp_path, gone, is_recorded, ending):
    folder = tmp_path / "run"
    counting.run(folder, counting.config())
    state = json.loads((folder / "state.json").read_text())
    if ending == "killed":
        state |= {"status": "running", "step": 5, "saved": 4}
    if not is_recorded:  # as an earlier version left it
        del state["saved"]
    (folder / "state.json").write_text(json.dumps(state))
    shutil.rmtree(folder / "checkpoints")
    if gone == "not mounted":
        (folder / "checkpoints").symlink_to(tmp_path / "disk")
    before = counting.metrics(folder)
    with pytest.raises(RunDirectoryError, match=r"contains no checkpoint|is a link to \S+disk, which does not exist"):
        counting.run(folder, counting.config(8))
    assert counting.metrics(folder) == before


def test_a_run_that_ended_before_its_first_save_says_that_its_steps_are_made_again(tmp_path, whole, caplog):
    def fail(_, step):
        if step == 2:
            raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        counting.run(tmp_path / "run", counting.config(), at_step=fail)
    counting.run(tmp_path / "run", counting.config())
    assert "no checkpoint was saved yet, so steps 1 to 1 are made again" in caplog.text
    assert counting.metrics(tmp_path / "run") == whole


def test_steps_that_are_made_again_because_a_checkpoint_was_removed_are_told(tmp_path, whole, caplog):
    folder = tmp_path / "run"
    counting.run(folder, counting.config())
    shutil.rmtree(folder / "checkpoints" / "step_6")
    counting.run(folder, counting.config())
    assert "the checkpoint of step 6 is gone; steps 5 to 6 are made again" in caplog.text
    assert counting.metrics(folder) == whole


@pytest.mark.parametrize("name", ["checkpoints", "rollouts", "logs"])
def test_a_folder_of_a_run_that_takes_no_files_is_refused_before_a_step(tmp_path, name):
    folder, made = tmp_path / "run", []
    counting.run(folder, counting.config(4))
    if (folder / name).exists():
        (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to("/proc/self")
    with pytest.raises(RunDirectoryError, match=f"{name} cannot be written to: .* Make it writable"):
        counting.run(folder, counting.config(6), at_step=lambda *_: made.append(1))
    assert not made


def test_prompts_that_are_too_few_for_a_step_come_again_with_another_epoch(tmp_path):
    prompts = [Prompt(f"p{i}", (), np.array([1], np.int32), "math") for i in range(7)]
    trained = []
    for epochs in (1, 2):
        settings = GRPOConfig(num_prompts_per_step=2, num_generations_per_prompt=2, max_num_steps=50)
        sampling = SamplingParams(max_new_tokens=2)
        pool, policy = EchoPool(), FakeModel()
        source = PacedRolloutSource(
            pool, Stream([prompts], seed=3, max_num_epochs=epochs), sampling=sampling, num_generations=2, seed=0
        )
        with RunSession(tmp_path / "run", counting.CountingConfig()) as session:
            validation = Validation([], sampling, settings)
            steps = RolloutSteps(settings, source, FakeWeights(policy), validation, session)
            train(settings, Objective(PolicyLoss()), policy=policy, steps=steps, rows_per_minibatch=4)
        trained += pool.asked[: 6 if epochs == 1 else 8]
    assert session.completed == 7
    assert sorted(trained) == sorted(2 * [prompt.id for prompt in prompts])


def test_the_state_of_an_earlier_session_is_kept_until_steps_are_made(tmp_path):
    counting.run(tmp_path, counting.config(max_num_steps=2))
    before = RunState.read(tmp_path)
    with RunSession(tmp_path, counting.config(max_num_steps=2)):
        state = RunState.read(tmp_path)
    assert (state.status, state.reason, state.step) == ("running", "", 2)
    assert (state.max_steps, state.goals, state.best, state.saved) == (2, before.goals, before.best, before.saved)
    assert before.best is not None
    assert before.saved == 2
