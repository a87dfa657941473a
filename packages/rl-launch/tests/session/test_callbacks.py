"""Callbacks of a run, on a run without engines."""

import inspect
import io
import json
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import counting_run as counting
import pytest
from rich.console import Console

from rl_core import Callback
from rl_core.errors import CallbackFailed, ConfigError, WorkerDied
from rl_core.run import HOOKS
from rl_core.testing.exhaustive import exhaustive
from rl_launch.api.api import with_names
from rl_launch.run_session import RunSession
from rl_launch.run_session.callbacks import callback_problems, make_callbacks
from rl_launch.run_session.config import CallbackConfig
from rl_launch.run_session.directory.run_state import RunState

FILE = """
    from dataclasses import dataclass
    from rl_core import Callback

    @dataclass
    class Watch(Callback):
        log: str
        patience: int = 2

        def __post_init__(self):
            self.seen = []

        def on_start(self, run):
            self.seen.append(("start", run.step, run.max_steps, len(run.history), run.config["loop"]["learning_rate"]))

        def on_step(self, step, metrics):
            self.seen.append(("step", step, metrics["train/loss"]))
            return {"watch/double": 2 * metrics["train/loss"]}

        def on_evaluation(self, step, metrics):
            self.seen.append(("evaluation", step, dict(metrics)))
            if step >= self.patience:
                self.run.stop("patience is over")

        def on_save(self, step, checkpoint_path):
            self.seen.append(("save", step, checkpoint_path.name))

        def on_end(self, state):
            self.seen.append(("end", state.status, state.step, state.reason))

    class Broken(Callback):
        def on_step(self, step, metrics):
            if step == 2:
                raise KeyError("reward")
            return {"broken/steps": step}

    class Typo(Callback):
        def on_stpe(self, step, metrics): ...

    class Idle(Callback): ...

    class Arguments(Callback):
        def on_step(self, step): ...

    class Positional(Callback):
        def __init__(self, limit): ...
        def on_step(self, step, metrics): ...

    class Clash(Callback):
        def on_step(self, step, metrics):
            return {"train/loss": 0.0}

    def function(step): ...
"""


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(FILE))
    return path


def run(folder, callbacks, *, max_num_steps=3, at_step=lambda session, step: None):
    """Run with callbacks; return their instances."""
    settings = counting.config(max_num_steps)
    made = make_callbacks(callbacks)
    model, draws = counting.CountingModel(), counting.Draws()
    console = Console(file=io.StringIO())
    with RunSession(folder, settings, console=console, callbacks=made) as session:
        for step in session.steps(max_num_steps, models={"policy": model}, state={"draws": draws}):
            session.record(step, {"train/loss": model.train(draws.draw()), "val/accuracy": 1.0 / step})
            at_step(session, step)
    return [each.callback for each in made]


def problems(*callbacks):
    sections = [each if isinstance(each, str) else CallbackConfig.model_validate(each) for each in callbacks]
    return list(callback_problems(SimpleNamespace(callbacks=sections)))


def section(file, name, **settings):
    return CallbackConfig(type=f"{file}:{name}", **settings)


def test_hooks_are_called_in_order_and_their_metrics_are_recorded(tmp_path, file):
    settings = {"log": "x", "patience": 9}
    (watch,) = run(tmp_path / "run", [section(file, "Watch", settings=settings)])
    rows = counting.metrics(tmp_path / "run")
    losses = [row["train/loss"] for row in rows]
    assert watch.seen == [
        ("start", 0, 3, 0, 0.1),
        ("evaluation", 1, {"val/accuracy": 1.0}),
        ("step", 1, losses[0]),
        ("evaluation", 2, {"val/accuracy": 0.5}),
        ("step", 2, losses[1]),
        ("save", 2, "step_2"),
        ("evaluation", 3, {"val/accuracy": 1 / 3}),
        ("step", 3, losses[2]),
        ("save", 3, "step_3"),
        ("end", "finished", 3, ""),
    ]
    assert [row["watch/double"] for row in rows] == [2 * loss for loss in losses]
    whole = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all(row["time/callbacks"] >= 0 for row in whole)


def test_a_callback_stops_the_run_saved_and_finished(tmp_path, file):
    (watch,) = run(tmp_path / "run", [section(file, "Watch", settings={"log": "x", "patience": 2})])
    assert watch.seen[-2:] == [("save", 2, "step_2"), ("end", "finished", 2, "patience is over")]
    assert len(counting.metrics(tmp_path / "run")) == 2


def test_a_resumed_run_gives_the_metrics_of_earlier_steps(tmp_path, file):
    settings = {"log": "x", "patience": 9}
    run(tmp_path / "run", [], max_num_steps=2)
    (watch,) = run(tmp_path / "run", [section(file, "Watch", settings=settings)], max_num_steps=3)
    assert watch.seen[0] == ("start", 2, 3, 2, 0.1)
    assert [each[1] for each in watch.seen if each[0] == "step"] == [3]


def test_the_validation_before_the_first_step_is_told_as_step_0(tmp_path, file):
    def at_step(session, step):
        if step == 1:
            session.record(0, {"val/accuracy": 0.1})

    (watch,) = run(tmp_path / "run", [section(file, "Watch", settings={"log": "x", "patience": 9})], at_step=at_step)
    assert watch.seen[1:3] == [("evaluation", 0, {"val/accuracy": 0.1}), ("evaluation", 1, {"val/accuracy": 1.0})]
    first = counting.metrics(tmp_path / "run")[0]
    assert first == {"step": 0, "val/accuracy": 0.1}


def test_a_run_without_callbacks_records_no_time_of_them(tmp_path):
    run(tmp_path / "run", [])
    assert "time/callbacks" not in (tmp_path / "run/metrics.jsonl").read_text()


def test_one_that_raises_is_turned_off_and_the_run_goes_on(tmp_path, file, caplog):
    settings = {"log": "x", "patience": 9}
    watch = run(tmp_path / "run", [section(file, "Broken"), section(file, "Watch", settings=settings)])[1]
    rows = counting.metrics(tmp_path / "run")
    assert [row.get("broken/steps") for row in rows] == [1.0, None, None]
    assert (
        f"{file}:Broken failed in on_step at step 2, mine.py:34, and is turned off (KeyError: 'reward')" in caplog.text
    )
    assert watch.seen[-1] == ("end", "finished", 3, "")


def test_one_that_must_not_fail_ends_the_run_with_a_checkpoint(tmp_path, file):
    with pytest.raises(CallbackFailed, match=r"Broken failed in on_step at step 2, mine\.py:34: KeyError: 'reward'"):
        run(tmp_path / "run", [section(file, "Broken", on_error="stop")])
    state = RunState.read(tmp_path / "run")
    assert (state.status, state.step) == ("failed", 2)
    assert (tmp_path / "run/checkpoints/step_2").is_dir()
    run(tmp_path / "run", [])
    assert len(counting.metrics(tmp_path / "run")) == 3


def test_a_metric_of_the_step_cannot_be_replaced(tmp_path, file, caplog):
    run(tmp_path / "run", [section(file, "Clash")])
    assert "the step already has a metric train/loss" in caplog.text
    assert counting.metrics(tmp_path / "run")[0]["train/loss"] != 0


ENDS = """
from pathlib import Path
from rl_core import Callback

class Ends(Callback):
    def __init__(self, *, file: str):
        self.file = file

    def on_end(self, state):
        Path(self.file).write_text(f"{state.status} {state.step} {state.reason}")
"""


def test_the_end_of_a_failed_run_is_told(tmp_path):
    def fail(session, step):
        raise WorkerDied("the process ended")

    (tmp_path / "ends.py").write_text(ENDS)
    callback = section(tmp_path / "ends.py", "Ends", settings={"file": str(tmp_path / "end.txt")})
    with pytest.raises(WorkerDied):
        run(tmp_path / "run", [callback], at_step=fail)
    assert (tmp_path / "end.txt").read_text() == "failed 0 the process ended"


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("Typo", r"on_stpe.* on_step\?.* on_start"),
        ("Idle", "mine.py:Idle .*on_start, .*on_end"),
        ("Arguments", r"Arguments\.on_step\(self, step\) .*def on_step\(self, step, metrics\)"),
        ("function", r"mine.py:function .*class function\(Callback\)"),
        ("Wach", r"'Wach'.* Watch\?"),
        ("Positional", "Positional .*limit .*keyword-only"),
        ("Watch", r"callbacks\[0\]\.settings\.log: must be set"),
    ],
)
def test_what_cannot_be_called_is_refused_before_the_start(file, written, problem):
    (found,) = problems(f"{file}:{written}")
    assert re.search(problem, f"{found.key}: {found.reason}"), found


def test_settings_are_checked(file):
    written = {"type": f"{file}:Watch", "settings": {"log": "x", "patiense": 3}}
    (found,) = problems(written)
    assert (found.key, found.allowed) == ("callbacks[0].settings.patiense", "log, patience")
    assert "patience?" in found.remedy
    (found,) = problems({**written, "settings": {"log": "x", "patience": "long"}})
    assert (found.key, found.got) == ("callbacks[0].settings.patience", "long")
    (found,) = problems({**written, "settings": {}})
    assert found.key == "callbacks[0].settings.log"
    assert problems({**written, "settings": {"log": "x", "patience": 3}}) == []
    assert "cannot be read" in problems("absent.py:Watch")[0].reason
    assert "No module named" in problems("no_such_package.mine:Watch")[0].reason


@dataclass
class Written(Callback):
    patience: int = 3

    def on_step(self, step, metrics): ...


class Plain(Callback):
    def on_step(self, step, metrics): ...


def test_python_gives_classes_and_instances():
    here = Path(__file__).absolute()
    named = with_names({"callbacks": [Plain, Written(patience=5)]})
    assert named == {"callbacks": [f"{here}:Plain", {"type": f"{here}:Written", "settings": {"patience": 5}}]}
    assert problems(*named["callbacks"]) == []
    with pytest.raises(ValueError, match=r"callbacks\[0\]: got an instance of Plain.*give the class"):
        with_names({"callbacks": [Plain()]})


HOSTILE = {
    "exits": "sys.exit(3)",
    "interrupts itself": "raise KeyboardInterrupt",
    "raises a BaseException": "raise BaseException('mine')",
    "ends a generator": "raise GeneratorExit",
}
HANGING = {
    "sleeps": "time.sleep(10**6)",
    "waits": "threading.Event().wait()",
    "loops": "[0 for _ in iter(int, 1)]",
    "waits for a program": "subprocess.run(['sleep', '1000'])",
    "catches every Exception": """while True:
                try: time.sleep(10**6)
                except Exception: pass""",
}
HOSTILE_HOOKS = [
    pytest.param(case, hook, marks=() if hook == "on_step" or case in ("exits", "sleeps") else exhaustive)
    for hook in HOOKS
    for case in (*HOSTILE, *HANGING)
]


@pytest.mark.parametrize(("case", "hook"), HOSTILE_HOOKS)
def test_no_hook_can_end_or_stop_a_run(tmp_path, caplog, case, hook):
    file = tmp_path / "hostile.py"
    file.write_text(
        f"""
import subprocess, sys, threading, time
from rl_core import Callback

class Hostile(Callback):
    def {hook}(self, {", ".join(list(inspect.signature(getattr(Callback, hook)).parameters)[1:])}):
            {HOSTILE.get(case) or HANGING[case]}
"""
    )
    entry = {"type": f"{file}:Hostile", "timeout_s": 60 if case in HOSTILE else 0.1}
    run(tmp_path / "run", [CallbackConfig.model_validate(entry)])
    assert [row["step"] for row in counting.metrics(tmp_path / "run")] == [1, 2, 3]
    assert RunState.read(tmp_path / "run").status == "finished"
    [told] = [message for message in caplog.messages if "Hostile failed in" in message]
    assert f"failed in {hook} " in told
    assert ("hostile.py:7" if case in HOSTILE else "it took longer than 0.1 s (timeout_s)") in told


def test_a_second_signal_during_a_hook_ends_the_run(tmp_path):
    file = tmp_path / "slow.py"
    file.write_text(
        """
import os, signal
from rl_core import Callback

class Slow(Callback):
    def on_step(self, step, metrics):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
"""
    )
    with pytest.raises(SystemExit):
        run(tmp_path / "run", [CallbackConfig(type=f"{file}:Slow")])
    assert RunState.read(tmp_path / "run").status == "interrupted"


@pytest.mark.parametrize("statement", ["sys.exit(3)", "raise RuntimeError('no')", "time.sleep(10**6)"])
def test_a_callback_that_cannot_be_made_is_refused_with_the_line(tmp_path, statement):
    file = tmp_path / "hostile.py"
    file.write_text(
        f"""
import sys, time
from rl_core import Callback

class Hostile(Callback):
    def __init__(self):
        {statement}
    def on_step(self, step, metrics): ...
"""
    )
    with pytest.raises(ConfigError, match=r"callbacks\[0\]: no instance of .*:Hostile could be created .*: "):
        make_callbacks([CallbackConfig(type=f"{file}:Hostile", timeout_s=0.02)])
