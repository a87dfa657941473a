import pytest

from rl_algos.rollouts.worker.program import MultiTurnProgram
from rl_algos.rollouts.worker.programs import PROGRAMS, program_named
from rl_core.plugins import resolve
from rl_core.user_code import FromFile


def test_installed_programs_are_found_by_name():
    assert resolve(program_named("multi_turn")) is MultiTurnProgram
    assert all(resolve(path) for path in PROGRAMS.values())


def test_programs_of_ones_own_are_named_by_module_or_file(tmp_path):
    (tmp_path / "agent.py").write_text("import not_installed\nclass Agent: ...\n")
    found = program_named(f"{tmp_path}/agent.py:Agent")
    assert isinstance(found, FromFile)
    assert program_named("rl_algos.rollouts.worker.program:MultiTurnProgram") == PROGRAMS["multi_turn"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("multi_turns", "did you mean multi_turn"),
        ("no_such.module:Agent", "module no_such.module .*not installed"),
        ("no_such_file.py:Agent", "cannot be read"),
    ],
)
def test_a_program_that_does_not_exist_is_refused(name, problem):
    with pytest.raises(ValueError, match=problem):
        program_named(name)
