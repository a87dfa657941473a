"""How a backend's self-check is asked, and how its answer is told."""

import json
import math
import os
import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from rl_core.errors import ConfigError, RLError
from rl_core.plugins import POLICIES, plugin
from rl_core.selfcheck.cases import FamilyCase
from rl_launch.cli import app
from rl_launch.doctor import family

CHECKS = """
import sys
from rl_core.errors import ConfigError
from rl_core.selfcheck.cases import FamilyCase

def some(model, only):
    print("compiling kernels for", model)
    yield FamilyCase("1", "packed, full", "exact", {"loss": 1e-7, "grad_norm": 0.0, "weights": 0.0})
    yield FamilyCase("tp2", "packed, full", "off", {"loss": float("nan")}, names=("lm_head.weight",))
    yield FamilyCase("ep2", "padded, full", "refused", reason="no experts to spread")

def unknown(model, only):
    raise ConfigError(model + " is of no family")
    yield

def crashing(model, only):
    yield FamilyCase("1", "packed, full", "exact")
    raise RuntimeError("no such kernel")

def dying(model, only):
    yield FamilyCase("1", "packed, full", "exact")
    sys.stdout.flush()
    import os
    os.abort()
"""


@pytest.fixture(autouse=True)
def checks(tmp_path, monkeypatch):
    """A package that only the worker's process can import."""
    (tmp_path / "some_backend.py").write_text(CHECKS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)


@pytest.fixture
def folder(tmp_path):
    """Of a model, as far as rl-launch looks."""
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text("{}")
    return made


@pytest.fixture
def checked_by(monkeypatch):
    """Has `rl doctor model` ask another check, in this interpreter."""

    def choose(check):
        monkeypatch.setattr(family, "check_model", lambda model, backend: family.cases(sys.executable, check, model))

    return choose


def asked(check):
    return list(family.cases(sys.executable, f"some_backend:{check}", "some/model"))


def test_cases_come_back_from_the_worker_environment_one_by_one():
    exact, off, refused = asked("some")
    assert exact == FamilyCase("1", "packed, full", "exact", {"loss": 1e-7, "grad_norm": 0.0, "weights": 0.0})
    assert math.isnan(off.differences["loss"])
    assert off.names == ("lm_head.weight",)
    assert refused.reason == "no experts to spread"


def test_a_family_that_is_unknown_is_the_users_affair():
    with pytest.raises(ConfigError, match=r"^some/model is of no family$"):
        asked("unknown")


@pytest.mark.parametrize(("check", "said"), [("crashing", "no such kernel"), ("dying", "exit code -6")])
def test_a_check_that_ends_early_is_an_error_after_the_cases_it_made(check, said):
    found = family.cases(sys.executable, f"some_backend:{check}", "some/model")
    assert next(found).verdict == "exact"
    with pytest.raises(RLError, match=said):
        next(found)


def test_a_caller_that_stops_early_ends_the_process():
    found = family.cases(sys.executable, "some_backend:some", "some/model")
    next(found)
    found.close()


def test_lines_name_the_mesh_and_the_numbers_or_the_reason():
    exact, off, refused = (family.described(case) for case in asked("some"))
    assert exact == f"exact    {'1, packed, full':<30} loss 1.0e-07, grad norm 0.0e+00, weights 0.0e+00"
    assert off.endswith("loss nan, the weight stream gets wrong: lm_head.weight")
    assert refused.endswith("no experts to spread")


def test_what_is_off_is_exit_code_1(checked_by, folder):
    checked_by("some_backend:some")
    answer = CliRunner().invoke(app, ["doctor", "model", str(folder)])
    assert answer.exit_code == 1
    assert answer.stdout.splitlines()[-1] == f"{folder} differs in 1 of 3 cases."
    seen = json.loads(CliRunner().invoke(app, ["doctor", "model", str(folder), "--json"]).stdout)
    assert set(seen) == {"schema", "model", "backend", "is_right", "cases"}
    assert seen["is_right"] is False
    assert seen["cases"][1] == {
        "mesh": "tp2",
        "layout": "packed, full",
        "verdict": "off",
        "differences": {"loss": None},
        "names": ["lm_head.weight"],
        "reason": "",
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["./nowhere"], "./nowhere"),
        (["EMPTY"], "config.json"),
        (["MODEL", "--backend=nonesuch"], "there is no training backend 'nonesuch'"),
    ],
)
def test_what_cannot_be_checked_is_one_message(tmp_path, folder, arguments, said):
    (tmp_path / "empty").mkdir()
    places = {"EMPTY": str(tmp_path / "empty"), "MODEL": str(folder)}
    answer = CliRunner().invoke(app, ["doctor", "model", *(places.get(each, each) for each in arguments)])
    assert answer.exit_code == 2
    assert said in answer.stderr
    assert answer.stderr.startswith("error: ")


def test_a_backend_without_a_self_check_says_so(monkeypatch, folder):
    silent = replace(plugin(POLICIES, "dtensor"), name="silent", selfcheck="")
    monkeypatch.setattr(family, "plugin", lambda group, name: silent)
    with pytest.raises(ConfigError, match="the backend silent has no self-check"):
        next(family.check_model(str(folder), "silent"))
