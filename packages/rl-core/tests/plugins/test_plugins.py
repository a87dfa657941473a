from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import rl_core.plugins.registry
from rl_core.errors import ConfigError
from rl_core.model import ModelSpec
from rl_core.plugins import (
    DATASETS,
    ENVIRONMENTS,
    ModelNeed,
    Requirement,
    algorithm_named,
    export_suffixes,
    implementation_of,
    names,
    plugin,
    plugins,
    requirement_of,
    resolve,
)

INSTALLED = [
    EntryPoint("square", "test_plugins:INSTALLED", ENVIRONMENTS),
    EntryPoint("broken", "no_such_module:PLUGIN", ENVIRONMENTS),
]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    entries = list(INSTALLED)
    registry = rl_core.plugins.registry
    monkeypatch.setattr(registry, "entry_points", lambda group: [e for e in entries if e.group == group])
    registry._entries.cache_clear()
    yield entries
    registry._entries.cache_clear()


def test_names_are_known_without_importing_anything(installed: list[EntryPoint]) -> None:
    assert names(ENVIRONMENTS) == ["broken", "square"]
    assert names("rl.other") == []


def test_a_plugin_is_loaded_by_name(installed: list[EntryPoint]) -> None:
    assert [entry.name for entry in plugin(ENVIRONMENTS, "square")] == ["square", "broken"]
    del installed[1]
    rl_core.plugins.registry._entries.cache_clear()
    assert list(plugins(ENVIRONMENTS)) == ["square"]


def test_an_unknown_name_is_an_error_with_the_nearest(installed: list[EntryPoint]) -> None:
    with pytest.raises(
        ConfigError, match=r"there is no \S.* 'sqare'; did you mean square\? installed are broken, square"
    ):
        plugin(ENVIRONMENTS, "sqare")
    with pytest.raises(ConfigError, match=r"'zzz'; installed are none"):
        plugin(DATASETS, "zzz")


def test_two_packages_cannot_offer_one_name(installed: list[EntryPoint]) -> None:
    installed.append(EntryPoint("square", "another_package:PLUGIN", ENVIRONMENTS))
    with pytest.raises(ConfigError, match="test_plugins:INSTALLED and another_package:PLUGIN"):
        names(ENVIRONMENTS)


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
    assert resolve("rl_core:thinking_format") is resolve("rl_core.environments.reward_parts:thinking_format")


def test_a_module_that_has_moved_is_answered_with_the_public_name() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"'rl_core\.reward_parts'; use rl_core:thinking_format"):
        resolve("rl_core.reward_parts:thinking_format")
    with pytest.raises(ValueError, match="has no 'thinking'; use rl_core:language_consistency or rl_core:length_pen"):
        resolve("rl_core.environments.reward_parts:thinking")


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
        "from rl_core.plugins import Algorithm\n\nclass Mine(Algorithm):\n"
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
