"""Benchmarks call functions and attributes that exist: few of them run in CI."""

import re
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
CODES = ("attr-defined", "call-arg", "name-defined")
SCRIPTS_OF_PACKAGES = ("gpu_check.py", "ledger.py")
"""Scripts with the name of the package beside them, which mypy takes for one module."""


def test_benchmarks_call_what_there_is():
    folder = CHECKOUT / "benchmarks"
    scripts = sorted(path.name for path in folder.glob("*.py") if path.name not in SCRIPTS_OF_PACKAGES)
    command = [sys.executable, "-m", "mypy", "--config-file", str(CHECKOUT / "pyproject.toml")]
    done = subprocess.run([*command, "gpu_check", "ledger", *scripts], cwd=folder, capture_output=True, text=True)
    assert "checked" in done.stdout, done.stdout + done.stderr
    wrong = [line for line in done.stdout.splitlines() if re.search(rf"\[({'|'.join(CODES)})\]$", line)]
    assert not wrong, "\n".join(wrong)


def test_every_method_of_the_learning_page_has_a_recipe_a_test_and_a_case():
    folder, recipes = CHECKOUT / "benchmarks", CHECKOUT / "packages/rl-launch/src/rl_launch/recipes"
    cases = set(re.findall(r'^    "([a-z0-9+-]+)": ', (folder / "learning.py").read_text(), re.MULTILINE))
    page = (folder / "results/learning.md").read_text()
    head, _, *rows = re.findall(r"^\|(.*)\|$", page[page.index("| method |") :], re.MULTILINE)
    assert [each.strip() for each in head.split("|")] == ["method", "keys", "recipe", "test", "case"]
    assert len(rows) > 10
    for row in rows:
        method, _, recipe, test, case = (each.strip(" `") for each in row.split("|"))
        assert not recipe or (recipes / f"{recipe}.yaml").is_file(), method
        assert (CHECKOUT / test).is_file(), method
        assert not case or case in cases, method
