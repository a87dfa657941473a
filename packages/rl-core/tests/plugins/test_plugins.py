from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint, distribution
from pathlib import Path

import pytest

import rl_core.plugins.registry
from rl_core.algorithm import implementation_of
from rl_core.environments.config import EnvironmentConfig
from rl_core.errors import ConfigError, PluginError
from rl_core.model import ModelSpec
from rl_core.plugins import (
    ALGORITHMS,
    DATASETS,
    ENVIRONMENTS,
    GENERATORS,
    KINDS,
    POLICIES,
    EnvironmentPlugin,
    ModelNeed,
    Requirement,
    algorithm_named,
    export_suffixes,
    load_problem,
    names,
    plugin,
    plugin_packages,
    plugins,
    requirement_of,
    resolve,
)

SQUARE = EnvironmentPlugin("square", EnvironmentConfig, "test_plugins:Square", Requirement("square"))
INSTALLED = [
    EntryPoint("square", "test_plugins:SQUARE", ENVIRONMENTS),
    EntryPoint("broken", "no_such_module:PLUGIN", ENVIRONMENTS),
]


def forget() -> None:
    rl_core.plugins.registry._entries.cache_clear()
    plugins.cache_clear()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    entries = list(INSTALLED)
    registry = rl_core.plugins.registry
    monkeypatch.setattr(registry, "entry_points", lambda group: [e for e in entries if e.group == group])
    forget()
    yield entries
    forget()


def test_names_are_known_without_importing_anything(installed: list[EntryPoint]) -> None:
    assert names(ENVIRONMENTS) == ["broken", "square"]
    assert names("rl.other") == []


def test_a_plugin_is_loaded_by_name(installed: list[EntryPoint]) -> None:
    assert plugin(ENVIRONMENTS, "square") is SQUARE
    assert plugins(ENVIRONMENTS) == {"square": SQUARE}


def test_an_unknown_name_is_an_error_with_the_nearest(installed: list[EntryPoint]) -> None:
    with pytest.raises(
        ConfigError, match=r"there is no \S.* 'sqare'; did you mean square\? installed are broken, square"
    ):
        plugin(ENVIRONMENTS, "sqare")
    with pytest.raises(ConfigError, match=r"'zzz'; installed are none"):
        plugin(DATASETS, "zzz")


def test_a_name_that_two_packages_offer_cannot_be_used_and_others_can(installed: list[EntryPoint]) -> None:
    installed.append(EntryPoint("broken", "another_package:PLUGIN", ENVIRONMENTS))
    with pytest.raises(PluginError, match="no_such_module:PLUGIN and another_package:PLUGIN; uninstall one"):
        plugin(ENVIRONMENTS, "broken")
    assert list(plugins(ENVIRONMENTS)) == ["square"]


BROKEN = {
    "an error": ("raise RuntimeError('no licence\\nsecond line')", r"RuntimeError: no licence: uninstall"),
    "an exit": ("raise SystemExit(3)", "SystemExit: 3: uninstall"),
    "a missing module": ("import no_such_engine", "ModuleNotFoundError: No module named 'no_such_engine'"),
    "a syntax error": ("def broken(:", "SyntaxError: "),
    "a missing attribute": ("OTHER = 1", "AttributeError: .*'PLUGIN'"),
    "an object of another type": ("PLUGIN = {}", r"must be an rl_core\.plugins\.\w+Plugin, got dict"),
    "an argument that the class lacks": ("from rl_core.plugins import *\nPLUGIN = {}(nme='bad')", "TypeError: .*'nme'"),
}
CLASSES = {
    POLICIES: "BackendPlugin",
    GENERATORS: "BackendPlugin",
    ENVIRONMENTS: "EnvironmentPlugin",
    ALGORITHMS: "AlgorithmPlugin",
    DATASETS: "DatasetPlugin",
}


@pytest.mark.parametrize("group", KINDS)
@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_plugin_is_named_with_its_package_and_harms_no_other(
    group: str,
    fault: str,
    installed: list[EntryPoint],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source, says = BROKEN[fault]
    (tmp_path / "mydata_pkg_bad.py").write_text(source.replace("{}(", f"{CLASSES[group]}("))
    (tmp_path / "mydata_pkg-0.1.0.dist-info").mkdir()
    (tmp_path / "mydata_pkg-0.1.0.dist-info" / "METADATA").write_text("Name: mydata-pkg\nVersion: 0.1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mydata_pkg_bad", raising=False)
    entry = EntryPoint("bad", "mydata_pkg_bad:PLUGIN", group)
    vars(entry)["dist"] = distribution("mydata-pkg")
    installed.append(entry)
    described = rf"entry point bad \({group}\) of mydata-pkg 0\.1\.0 cannot be loaded: .*{says}"
    with pytest.raises(PluginError, match=described):
        plugin(group, "bad")
    assert re.match(described, load_problem(group, "bad"))
    for _ in range(2):
        assert list(plugins(group)) == (["square"] if group == ENVIRONMENTS else [])
    (warning,) = [record.message for record in caplog.records if "mydata-pkg" in record.message]
    assert re.match(described, warning)
    assert "\n" not in warning


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (replace(SQUARE, name="circle"), "has the name 'circle', which must be the name of the entry point"),
        (replace(SQUARE, config=dict), "must have a subclass of rl_core.config.Config for its settings"),  # type: ignore[type-var]
    ],
)
def test_a_plugin_that_contradicts_itself_is_refused(
    found: EnvironmentPlugin, says: str, installed: list[EntryPoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SQUARE", found)
    with pytest.raises(PluginError, match=says):
        plugin(ENVIRONMENTS, "square")


def test_a_malformed_entry_point_is_named_and_its_package_is_still_known(installed: list[EntryPoint]) -> None:
    installed.append(EntryPoint("odd", "not a path", ENVIRONMENTS))
    assert "entry point odd (rl.environments) cannot be loaded" in load_problem(ENVIRONMENTS, "odd")
    assert plugin_packages() == ["no_such_module", "not a path", "test_plugins"]


def test_output_of_an_import_does_not_reach_the_output_of_a_command(
    installed: list[EntryPoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "talkative.py").write_text("print('welcome')\nfrom test_plugins import SQUARE\n")
    monkeypatch.syspath_prepend(tmp_path)
    installed[0] = EntryPoint("square", "talkative:SQUARE", ENVIRONMENTS)
    plugin(ENVIRONMENTS, "square")
    assert capsys.readouterr() == ("", "welcome\n")


def test_a_plugin_whose_import_is_slow_is_reported(
    installed: list[EntryPoint], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rl_core.plugins.registry, "SLOW_IMPORT_S", -1.0)
    plugin(ENVIRONMENTS, "square")
    assert "entry point square (rl.environments) took 0 s to import" in caplog.text


def test_resolve_finds_classes_and_what_is_in_them() -> None:
    assert resolve("rl_core.plugins:resolve") is resolve
    assert resolve("rl_core.data.ragged:Ragged.concat")([resolve("rl_core.data.ragged:Ragged").from_rows([[1]])])[
        0
    ].tolist() == [1]


@pytest.mark.parametrize(
    ("path", "says"),
    [("rl_core.data.ragged", "package.module:Name"), (":Ragged", "got"), ("rl_core.data.ragged:Raged", "'Raged'")],
)
def test_resolve_says_what_is_wrong_with_a_path(path: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        resolve(path)


def test_a_public_name_is_found_in_its_package() -> None:
    assert resolve("rl_core:thinking_format") is resolve("rl_core.environments.rewards:thinking_format")


def test_a_module_that_has_moved_is_answered_with_the_public_name() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"'rl_core\.reward_parts'; use rl_core:thinking_format"):
        resolve("rl_core.reward_parts:thinking_format")
    with pytest.raises(ValueError, match="has no 'thinking'; use rl_core:language_consistency or rl_core:length_pen"):
        resolve("rl_core.environments.rewards:thinking")


def test_a_module_that_is_not_installed_is_named() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        resolve("no_such_module:Name")


ALGORITHM = """
from rl_core.plugins import AlgorithmPlugin

PLUGIN = AlgorithmPlugin(
    name="mine", sections={}, implementation="beside.py:Mine", generates=False, models=dict
)
WRONG = AlgorithmPlugin(name="wrong", sections={}, implementation="algorithm.py:OTHER", generates=False, models=dict)
OTHER = 3
"""


def test_an_algorithm_in_a_file_finds_its_class_from_the_folder_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "algorithm.py").write_text(ALGORITHM)
    (tmp_path / "beside.py").write_text(
        "from rl_core import Algorithm\n\nclass Mine(Algorithm):\n"
        "    def load(self, config):\n        return 'loaded'\n"
    )
    found = algorithm_named(f"{tmp_path}/algorithm.py:PLUGIN")
    assert found.name == "mine"
    made = implementation_of(found)
    assert made.load(None) == "loaded"
    with pytest.raises(NotImplementedError, match="Mine trains, so it must define run"):
        made.run(None, None, None)
    assert algorithm_named(f"{tmp_path}/algorithm.py:PLUGIN") is found


def test_an_algorithm_that_is_not_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "algorithm.py").write_text(ALGORITHM)
    found = algorithm_named(f"{tmp_path}/algorithm.py:WRONG")
    with pytest.raises(ConfigError, match=r"wrong: .*py:OTHER must be a subclass of rl_core.Algorithm"):
        implementation_of(found)
    absent = replace(found, implementation=f"{tmp_path}/algorithm.py:Absent")
    with pytest.raises(ConfigError, match=r"implementation of wrong: .*Absent"):
        implementation_of(absent)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("algorithm.py:PLUGING", "did you mean PLUGIN?"),
        ("algorithm.py:OTHER", "must be an rl_core.AlgorithmPlugin, got int"),
        ("nothing.py:PLUGIN", "cannot be read"),
    ],
)
def test_what_is_not_an_algorithm_in_a_file_is_refused(name: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "algorithm.py").write_text(ALGORITHM)
    with pytest.raises(ConfigError, match=says):
        algorithm_named(f"{tmp_path}/{name}")


def test_the_policy_is_exported_and_other_roles_that_ask_for_it() -> None:
    kept, exported = ModelNeed("value", ModelSpec(role="critic")), ModelNeed("rm", ModelSpec(), exported=True)
    assert export_suffixes({"policy": exported, "critic": kept, "judge": exported}) == {"policy": "", "judge": "_judge"}
    assert export_suffixes({}) == {"policy": ""}


def test_a_path_requires_the_distribution_that_has_its_package() -> None:
    assert requirement_of("yaml.nodes:Node") == Requirement("PyYAML", imports=("yaml",))


def test_a_package_of_no_distribution_must_be_importable() -> None:
    assert requirement_of("of_no_distribution.losses:Loss") == Requirement("rl-core", imports=("of_no_distribution",))
