"""Pages that `rl plan` writes are current, and a finished run teaches it."""

import subprocess
import sys

import pytest
from document_checks import ROOT

from rl_launch.commands.planning import plan_recipe
from rl_launch.planning.learned import measured_seconds
from rl_launch.planning.workload import Lengths
from rl_launch.run_session.directory.run_folder import RunFolder


def test_the_pages_of_models_and_gpus_are_current():
    done = subprocess.run(
        [sys.executable, "tools/write_models_page.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_finished_run_with_rollouts_teaches_its_times_and_is_simulated(quickstart, tmp_path, monkeypatch):
    monkeypatch.setenv("RL_HOME", str(tmp_path))
    run = quickstart / "grpo"
    found = plan_recipe("", (), device=None, lengths=Lengths(), searches=False, run=str(run), learns=True)
    rows = RunFolder(run).metrics()
    phases = ("generation", "logprobs", "training", "weight_sync")
    assert {name: found.plan.seconds[name] for name in phases} == pytest.approx(
        {name: measured_seconds(rows)[name] for name in phases}
    )
    steps = [row for row in rows if row["step"]]
    assert all(row["memory/policy/training_gib"] > 0 and row["plan/step"] > 0 for row in steps)
    # What the run took is shown next to its plan.
    assert found.took.seconds["training"] == measured_seconds(rows)["training"]
    assert found.took.memory["policy", "training"] > 0
    assert found.simulation.problem == ""
    assert len(found.simulation.cases) >= 5
