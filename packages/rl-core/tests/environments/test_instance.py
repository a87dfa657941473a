"""Environments by the names that data gives them."""

import dataclasses
import pickle

import pytest

from rl_core.config import ProblemError, assemble
from rl_core.environments.config import EnvironmentConfig
from rl_core.environments.instance import environment_types, instance_of, problem_with
from rl_core.plugins import EnvironmentPlugin, Requirement
from rl_core.user_code import FromFile


class JudgeConfig(EnvironmentConfig):
    strict: bool = False


JUDGE = EnvironmentPlugin("judge", JudgeConfig, "judges:Judge", Requirement("judges"))
FILE = """
from dataclasses import dataclass

def score(response): return 0.0

class Guess:
    def __init__(self, *, low: int = 1, high: int): ...

@dataclass
class Maze:
    size: int = 5

class Positional:
    def __init__(self, size): ...
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    return str(tmp_path / "mine.py")


@pytest.fixture(autouse=True)
def _installed(monkeypatch):
    monkeypatch.setattr("rl_core.environments.instance.plugin", lambda group, name: {"judge": JUDGE}[name])


def env(**written):
    """The section as a run has it."""
    types = environment_types(written, {"judge": JUDGE})
    return assemble("Environments", types).model_validate(written)


def test_an_installed_environment_has_the_section_of_its_name():
    instance = instance_of(env(judge={"strict": True}), "judge")
    assert (instance.environment, instance.config.strict, instance.label) == ("judges:Judge", True, "judge")
    assert instance.requirement == JUDGE.requirement


def test_the_same_type_may_be_there_twice_with_other_settings():
    settings = env(judge={"strict": True}, lenient={"type": "judge"})
    assert [instance_of(settings, name).config.strict for name in ("judge", "lenient")] == [True, False]
    assert instance_of(settings, "lenient").environment == "judges:Judge"


def test_a_function_in_a_file_needs_no_section(file):
    instance = instance_of(env(), f"{file}:score")
    assert isinstance(instance.environment, FromFile)
    assert (instance.config, instance.label) == (EnvironmentConfig(), "mine.py:score")


def test_a_function_in_a_file_may_have_a_section(file):
    instance = instance_of(env(brevity={"type": f"{file}:score", "deadline_s": 2.0}), "brevity")
    assert (str(instance.environment), instance.config.deadline_s) == ("mine.py:score", 2.0)
    assert instance.label == "brevity"


@pytest.mark.parametrize(
    ("name", "written", "value"), [("Guess", {"high": 9}, {"low": 1, "high": 9}), ("Maze", {"size": 3}, {"size": 3})]
)
def test_settings_of_a_class_are_keys_that_travel(file, name, written, value):
    config = instance_of(env(game={"type": f"{file}:{name}", **written}), "game").config
    travelled = pickle.loads(pickle.dumps(config))
    assert {key: getattr(travelled, key) for key in value} == value


@pytest.mark.parametrize(
    ("written", "key", "says"),
    [
        ({"juge": {}}, "juge", r"did you mean judge\?.*file\.py:function, given as `type`"),
        ({"mine": {"type": "juge"}}, "mine.type", r"'juge'.*did you mean judge\?"),
        ({"mine": {"type": "no_such.py:score"}}, "mine.type", "cannot be read: No such file"),
        ({"mine": {"type": "FILE:scor"}}, "mine.type", r"has no 'scor'; did you mean score\?"),
        ({"mine": {"type": "FILE:Positional"}}, "mine.type", "takes size by position; make its settings keyword-only"),
        ({"mine": {"type": "no_such_package:score"}}, "mine.type", "No module named"),
        (
            {"mine": {"type": "rl_core.reward_parts:thinking_format"}},
            "mine.type",
            "No module named 'rl_core.reward_parts'; use rl_core:thinking_format",
        ),
    ],
)
def test_a_section_of_no_environment_is_refused(file, written, key, says):
    written = {name: {k: v.replace("FILE", file) for k, v in section.items()} for name, section in written.items()}
    with pytest.raises(ProblemError, match=says) as caught:
        env(**written)
    assert [problem.key for problem in caught.value.problems] == [key]


def test_a_name_that_moved_is_answered_with_the_public_one():
    rewards = env(mine={"rewards": ["rl_core.reward_parts:thinking_format"]})
    assert "use rl_core:thinking_format" in problem_with("mine", rewards)
    assert "use rl_core:thinking_format" in problem_with("rl_core.reward_parts:thinking_format", env())
    assert problem_with("mine", env(mine={"rewards": ["rl_core:thinking_format"]})) == ""


def test_what_data_cannot_name_is_known_before_anything_runs(file):
    settings = env(brevity={"type": f"{file}:score"})
    assert [problem_with(name, settings) for name in ("judge", "brevity", f"{file}:score", "json:dumps")] == [""] * 4
    assert "did you mean brevity?" in problem_with("brevty", settings)
    unknown = problem_with("zzz", settings)
    assert "'zzz'" in unknown
    assert "brevity" in unknown
    assert "judge" in unknown
    assert "file.py:function" in unknown
    assert "has no 'scor'" in problem_with(f"{file}:scor", settings)
    assert "the module no_such_module is not installed" in problem_with("no_such_module:score", settings)


def test_the_settings_that_every_environment_has_are_a_dataclass_of_nothing_else():
    assert "type" in EnvironmentConfig.model_fields
    assert not dataclasses.is_dataclass(EnvironmentConfig)
