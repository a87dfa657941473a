import sys

import pytest

from rl_core.config import Config
from rl_core.errors import WorkerEnvironmentError
from rl_launch.worker_envs import engine_problems


class Root(Config):
    optimizer: str = "torch.optim.Adm"


@pytest.fixture(autouse=True)
def engine(tmp_path, monkeypatch):
    """A package that only the worker's process can import."""
    (tmp_path / "some_engine.py").write_text(
        "import sys\n"
        "def check(config):\n"
        "    print('loading kernels')\n"
        "    return [] if config['optimizer'] == 'known' else [config['optimizer'] + ' is unknown']\n"
        "def count(config):\n"
        "    with open(config['optimizer'], 'a') as calls:\n"
        "        calls.write('.')\n"
        "    return [] if calls.name.endswith('known') else ['it is unknown']\n"
        "def crash(config):\n"
        "    raise RuntimeError('no driver')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_problems_come_back_from_the_worker_environment():
    assert engine_problems(sys.executable, "some_engine:check", Root()) == ["torch.optim.Adm is unknown"]
    assert engine_problems(sys.executable, "some_engine:check", Root(optimizer="known")) == []


@pytest.mark.parametrize(("name", "num_calls"), [("known", 1), ("missing", 2)])
def test_only_a_check_that_found_a_problem_is_repeated_for_the_same_section(tmp_path, name, num_calls):
    calls = tmp_path / name
    section = Root(optimizer=str(calls))
    first = engine_problems(sys.executable, "some_engine:count", section)
    assert engine_problems(sys.executable, "some_engine:count", section) == first
    assert len(calls.read_text()) == num_calls


@pytest.mark.parametrize(
    ("check", "said"), [("some_engine:crash", "no driver"), ("no_engine:check", "No module named")]
)
def test_a_check_that_does_not_run_is_an_error(check, said):
    with pytest.raises(WorkerEnvironmentError, match=said):
        engine_problems(sys.executable, check, Root())
