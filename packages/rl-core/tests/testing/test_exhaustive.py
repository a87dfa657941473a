"""Cases that are left out are so only without the option."""

import subprocess
import sys

import pytest

CONFTEST = """
from rl_core.testing.exhaustive import pytest_addoption, pytest_collection_modifyitems, pytest_configure
"""
TESTS = """
import pytest
from rl_core.testing.exhaustive import exhaustive, partly_exhaustive, with_exhaustive

@exhaustive
def test_alone():
    pass

@pytest.mark.parametrize("letter", partly_exhaustive(["a", "b"], always=["b"]))
def test_letters(letter):
    pass

@pytest.mark.parametrize(("letter", "number"), partly_exhaustive([("c", 1), ("d", 2)], always=[("c", 1)]))
def test_pairs(letter, number):
    assert (letter, number) in {("c", 1), ("d", 2)}

class Suite:
    @pytest.mark.parametrize("number", [1, 2])
    def test_inherited(self, number):
        pass

class TestAll(Suite):
    pass

@with_exhaustive("test_inherited")
class TestFew(Suite):
    def test_own(self):
        pass

@with_exhaustive("test_own")
class TestFewer(TestFew):
    pass
"""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            [],
            [
                *("test_letters[b]", "test_pairs[c-1]"),
                *(f"TestAll::test_inherited[{number}]" for number in (1, 2)),
                "TestFew::test_own",
            ],
        ),
        (
            ["--every-case"],
            [
                *("test_alone", "test_letters[a]", "test_letters[b]", "test_pairs[c-1]", "test_pairs[d-2]"),
                *(f"{suite}::test_inherited[{number}]" for suite in ("TestAll", "TestFew") for number in (1, 2)),
                # the inherited ones first, as without the decorator
                "TestFew::test_own",
                *(f"TestFewer::test_inherited[{number}]" for number in (1, 2)),
                "TestFewer::test_own",
            ],
        ),
    ],
)
def test_exhaustive_cases_run_with_the_option_alone(tmp_path, options, expected):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_cases.py").write_text(TESTS)
    (tmp_path / "pytest.ini").touch()
    command = [sys.executable, "-m", "pytest", "-v", "--strict-markers", "-p", "no:cacheprovider", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = [line.partition("::")[2].split()[0] for line in done.stdout.splitlines() if " PASSED" in line]
    assert passed == expected
