import json
import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rl_core.config import Config
from rl_core.errors import ConfigError
from rl_core.plugins import BackendPlugin, Requirement
from rl_core.selfcheck import MeshCase
from rl_launch.commands.family_proof import prove_family

CHECK = """
from pathlib import Path
from rl_core.errors import ConfigError
from rl_core.selfcheck import FamilyCase

def check(model, only):
    calls = Path(model, "calls")
    calls.write_text(calls.read_text() + "x" if calls.exists() else "x")
    verdict = Path(model, "verdict").read_text()
    if verdict == "unknown":
        raise ConfigError("a tiny strange model cannot be made")
    yield FamilyCase(only.mesh, only.layout, verdict, {"grad_norm": 0.37})
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A folder with the config of a model, and a backend whose check says what its file `verdict` says."""
    (tmp_path / "some_check.py").write_text(CHECK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("RL_HOME", str(tmp_path / "home"))
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps({"model_type": "strange", "hidden_size": 8, "has_bias": True}))
    (made / "verdict").write_text("exact")
    return made


def backend(mesh="tp2", held=()):
    return BackendPlugin(
        name="some",
        key="some_cfg",
        config=Config,
        worker="",
        requirement=Requirement("some"),
        ranks=lambda config: 1,
        selfcheck="some_check:check",
        mesh_case=lambda section: MeshCase(mesh, 2, {"split": 2}, is_packed=True, has_adapters=False),
        held_families=frozenset(held),
    )


def prove(model, plugin, family_check="auto"):
    section = SimpleNamespace(model_name=str(model), family_check=family_check)
    prove_family(section, "policy", plugin, sys.executable)


def num_checks(model):
    calls = model / "calls"
    return len(calls.read_text()) if calls.exists() else 0


def test_a_family_is_proven_once_for_each_mesh_and_make(model):
    prove(model, backend())
    prove(model, backend())
    assert num_checks(model) == 1
    prove(model, backend(mesh="pp2"))
    assert num_checks(model) == 2
    fields = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**fields, "hidden_size": 64}))
    prove(model, backend())
    assert num_checks(model) == 2
    (model / "config.json").write_text(json.dumps({**fields, "has_bias": False}))
    prove(model, backend())
    assert num_checks(model) == 3


def test_a_family_that_is_off_is_refused_each_time_with_what_differs(model):
    (model / "verdict").write_text("off")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"family strange does not train correctly .* grad norm 3\.7e-01.*=off"):
            prove(model, backend())
    assert num_checks(model) == 1


def test_a_family_that_cannot_be_checked_is_refused_and_not_remembered(model):
    (model / "verdict").write_text("unknown")
    with pytest.raises(ConfigError, match=r"cannot be made\. Set policy.family_check=off"):
        prove(model, backend())
    (model / "verdict").write_text("exact")
    prove(model, backend())


def test_families_of_the_suites_and_those_told_to_go_unproven_are_not_checked(model, caplog):
    prove(model, backend(held=["strange"]))
    assert not caplog.records
    prove(model, backend(), family_check="off")
    assert "strange has not been checked on tp2" in caplog.text
    prove(model, replace(backend(), selfcheck=""))
    assert num_checks(model) == 0
