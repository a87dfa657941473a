"""Tasks that are listed without importing reasoning-gym."""

from dataclasses import MISSING, fields

import pytest

from rl_core.testing.isolation import loaded_by
from rl_envs.reasoning_gym.dataset import tasks, tasks_in

SOURCE = '''
NAME = "sums"

@dataclass
class SumsConfig:
    """Settings."""
    terms: int = 2
    digits: list[int] = field(default_factory=lambda: [1, 2])
    operators: tuple = ("+", "-")
    seed: Optional[int] = None
    size: int = 500

class SumsDataset(ProceduralDataset):
    """Generates sums

    of numbers."""

register_dataset(NAME, SumsDataset, SumsConfig, SumsCurriculum)
'''


def test_a_task_is_read_from_source() -> None:
    (task,) = tasks_in(SOURCE)
    assert (task.name, task.doc) == ("sums", "Generates sums")
    assert task.settings == {
        "terms": ("int", "2"),
        "digits": ("list[int]", "[1, 2]"),
        "operators": ("tuple", "('+', '-')"),
    }


def test_all_tasks_are_found_as_reasoning_gym_registers_them() -> None:
    factory = pytest.importorskip("reasoning_gym.factory")
    found = {task.name: task for task in tasks()}
    assert set(found) == set(factory.DATASETS)
    for name, (_, config) in factory.DATASETS.items():
        expected = {field.name for field in fields(config)} - {"seed", "size"}
        assert set(found[name].settings) == expected, name
        for field in fields(config):
            if field.name in expected and field.default is MISSING and field.default_factory is MISSING:
                assert found[name].settings[field.name][1] == "", name


def test_listing_imports_no_task() -> None:
    assert "reasoning_gym" not in loaded_by("rl_envs.reasoning_gym.dataset", "rl_envs.reasoning_gym.plugin")
