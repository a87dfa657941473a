"""A package whose plugins are broken is named, and only the commands that use one of them are refused."""

import importlib
import json

import pytest
from typer.testing import CliRunner

import rl_core.plugins.registry
from rl_core.plugins import KINDS, plugins
from rl_launch.cli import app


def described(kind):
    return f"entry point bad ({kind}) of mydata-pkg 0.1.0 cannot be loaded: RuntimeError: no licence: uninstall or"


@pytest.fixture(autouse=True)
def _broken_package(tmp_path, monkeypatch):
    """A package with a broken plugin of each kind, as pip leaves it."""
    about = tmp_path / "mydata_pkg-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mydata-pkg\nVersion: 0.1.0\n")
    entries = "".join(f"[{kind}]\nbad = mydata_pkg_bad:PLUGIN\n" for kind in KINDS)
    (about / "entry_points.txt").write_text(entries)
    (tmp_path / "mydata_pkg_bad.py").write_text("raise RuntimeError('no licence')\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    for each in (rl_core.plugins.registry._entries, plugins):
        each.cache_clear()
    yield
    monkeypatch.undo()
    for each in (rl_core.plugins.registry._entries, plugins):
        each.cache_clear()


def ran(*arguments):
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(
    ("arguments", "shows"),
    [
        (["config", "show", "grpo-arithmetic"], "algorithm: grpo"),
        (["config", "explain", "grpo.seed"], "grpo.seed"),
        (["config", "explain", "data.train.settings"], "max_operand"),
        (["env", "list"], "reasoning_gym"),
        (["data", "list"], "arithmetic"),
        (["recipes", "arithmetic"], "grpo-arithmetic"),
    ],
)
def test_a_command_that_uses_none_of_them_answers_and_warns_once(arguments, shows, caplog):
    answer = ran(*arguments)
    assert (answer.exit_code, shows in answer.stdout) == (0, True), answer.output
    warnings = [record.message for record in caplog.records if "mydata-pkg" in record.message]
    assert len(warnings) == len(set(warnings))


def test_the_schema_is_that_of_the_algorithms_that_load(caplog):
    schema = json.loads(ran("config", "schema").stdout)
    assert "grpo" in schema["title"]
    assert "bad" not in schema["title"]
    assert described("rl.algorithms") in caplog.text


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (["config", "show", "grpo-arithmetic", "env.bad.x=1"], "rl.environments"),
        (["config", "show", "grpo-arithmetic", "env.other.type=bad"], "rl.environments"),
        (["config", "show", "grpo-arithmetic", "data.train.env_name=bad"], "rl.environments"),
        (["env", "list", "bad"], "rl.environments"),
        (["env", "check", "bad"], "rl.environments"),
        (["config", "show", "grpo-arithmetic", "policy.generation.backend=bad"], "rl.generators"),
        (["config", "show", "grpo-arithmetic", "algorithm=bad"], "rl.algorithms"),
        (["data", "show", "arithmetic", "--algorithm", "bad"], "rl.algorithms"),
        (["data", "list", "bad"], "rl.datasets"),
        (["data", "show", "bad"], "rl.datasets"),
        (["train", "sft-arithmetic", "data.train.dataset_name=bad"], "rl.datasets"),
        (["convert", "nothing", "new", "--to", "bad"], "rl.policies"),
    ],
)
def test_a_command_that_uses_one_of_them_is_refused_with_its_package(arguments, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer = ran(*arguments)
    assert answer.exit_code == 2, answer.output
    (error,) = [line for line in answer.stderr.splitlines() if line.startswith("error: ")]
    assert described(kind) in error
