"""Bad input ends `rl train` with one message that names the remedy, before a Ray process starts."""

import os
import re
import resource
import subprocess
import sys

import pytest
from bad_input_cases import CASES as BAD_INPUT
from bad_input_cases import Case
from broken_data_cases import CASES as BROKEN_DATA
from typer.testing import CliRunner

from rl_launch.cli import app

CASES = (*BAD_INPUT, *BROKEN_DATA)

ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}

IN_A_FRESH_INTERPRETER = (
    "unknown key",
    "duplicated key",
    "interpolation in a circle",
    "two training backends",
    "unknown dataset",
    "missing data file",
    "malformed JSONL line",
    "missing column",
    "a reward that is None",
    "a reward that hangs",
    "a processor with another signature",
    "prompts longer than the limit",
    "model folder without weights",
    "tokenizer without a chat template",
    "batch sizes that do not divide",
    "CUDA without a GPU",
    "foreign run directory",
    "busy run directory",
    "run directory of another config",
)

# says at its end whether Ray was so much as imported
COMMAND = """
import atexit, sys
from rl_launch.cli import main
atexit.register(lambda: print("ray" in sys.modules))
main()
"""


@pytest.fixture(autouse=True)
def _surroundings(tmp_path, monkeypatch):
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    for name, value in {**ENVIRONMENT, "RL_HOME": str(tmp_path / "home")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_every_case_has_a_name_of_its_own():
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.name for case in CASES} >= set(IN_A_FRESH_INTERPRETER)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input_is_one_message_that_names_the_remedy(case, tmp_path):
    folder = tmp_path / "work"
    kept = case.files(folder)
    before = _contents(folder)
    answer = CliRunner().invoke(app, ["train", *case.arguments])
    _check(case, answer.exit_code, answer.stderr)
    assert answer.stdout == ""
    assert _contents(folder) == before
    del kept


@pytest.mark.parametrize("name", IN_A_FRESH_INTERPRETER)
def test_no_ray_is_loaded_for_bad_input(name, tmp_path):
    case = next(case for case in CASES if case.name == name)
    kept = case.files(tmp_path / "work")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", COMMAND, "train", *case.arguments]
    answer = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    _check(case, answer.returncode, answer.stderr)
    assert answer.stdout == "False\n"
    print(f"{name}: {after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime:.2f} s of CPU")  # noqa: T201
    del kept


def _check(case: Case, code: int, said: str) -> None:
    # told of after some seconds, which a busy machine takes for anything
    said = re.sub(r"[\d:]+ trying the environment .* takes more than .*\n", "", said)
    assert code == 2, said
    assert said.startswith("error: ")
    assert said.count("error: ") == 1
    assert "Traceback" not in said
    assert re.search(case.message, said, re.DOTALL), said


def _contents(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
