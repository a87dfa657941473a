"""Bad input ends `rl train` with one message that shows the remedy, before a Ray process starts."""

import json
import logging
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from bad_input_cases import CASES as BAD_INPUT
from bad_input_cases import Case
from broken_data_cases import CASES as BROKEN_DATA
from typer.testing import CliRunner

from rl_core.testing.exhaustive import partly_exhaustive
from rl_launch.cli import app
from rl_launch.commands.preparation import START_CHECKS

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

# none of its commands needs Ray
COMMANDS = """
import json, os, sys
from typer.testing import CliRunner
from rl_launch.cli import app
for line in sys.stdin:
    folder, variables, arguments = json.loads(line)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    answer = CliRunner().invoke(app, ["train", *arguments])
    print(json.dumps([answer.exit_code, answer.stdout, answer.stderr, "ray" in sys.modules]), flush=True)
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


@pytest.fixture(scope="module")
def fresh_interpreter():
    """An interpreter that has imported nothing but the command line, and runs one command after another."""
    command = [sys.executable, "-c", COMMANDS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def run(*arguments):
            process.stdin.write(json.dumps([os.getcwd(), dict(os.environ), arguments]) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield run
        process.stdin.close()


FIRST = (
    "unknown key",
    "missing data file",
    "a reward that is None",
    "busy run directory",
    "batch sizes that do not divide",
)


@pytest.mark.parametrize("name", partly_exhaustive(IN_A_FRESH_INTERPRETER, always=FIRST))
def test_no_ray_is_loaded_for_bad_input(name, fresh_interpreter, tmp_path):
    case = next(case for case in CASES if case.name == name)
    kept = case.files(tmp_path / "work")
    code, printed, said, has_ray = fresh_interpreter(*case.arguments)
    _check(case, code, said)
    assert printed == ""
    assert not has_ray
    del kept


DOCTOR_FIRST = (
    "unknown key",
    "missing data file",
    "malformed JSONL line",
    "invalid pattern in a row",
    "a reward that is None",
    "a mesh that does not divide a model that is made here",
    "prompts longer than the limit",
    "tokenizer without a chat template",
    "CUDA without a GPU",
    "foreign run directory",
    "no such class of torch",
)
# `rl doctor` has no options of a run, and a default recipe
TAKEN_BY_DOCTOR = [
    case.name
    for case in CASES
    if not any(each.startswith("-") for each in case.arguments) and "=" not in case.arguments[0]
]


@pytest.mark.parametrize("name", partly_exhaustive(TAKEN_BY_DOCTOR, always=DOCTOR_FIRST))
def test_doctor_reports_what_train_refuses(name, monkeypatch, tmp_path):
    case = next(case for case in CASES if case.name == name)
    kept = case.files(tmp_path / "work")
    # an earlier command of this process logs to an output that is closed
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [each for each in root.handlers if each.name != "rl-console"])
    monkeypatch.setattr("rl_launch.commands.diagnosis.CHECKS", {})
    # without the imports of engines, which find nothing in these cases
    before_engines = [check for check in START_CHECKS if "worker environments" not in (check.name, *check.after)]
    monkeypatch.setattr("rl_launch.commands.preparation.START_CHECKS", tuple(before_engines))
    answer = CliRunner().invoke(app, ["doctor", *case.arguments])
    assert answer.exit_code in (1, 2), answer.output
    assert "Traceback" not in answer.output
    assert case.key in answer.output
    assert not replace(case, key="", shows=(*case.shows, " ")).missing_from(answer.output), answer.output
    del kept


def _check(case: Case, code: int, said: str) -> None:
    # the first is printed after some seconds, which any step can take on a busy machine
    said = re.sub(r"[\d:]+ (trying the environment .* takes more than|making tiny-).*\n", "", said)
    assert code == 2, said
    assert said.startswith("error: ")
    assert said.count("error: ") == 1
    assert "Traceback" not in said
    assert not case.missing_from(said), said


def _contents(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
