"""Ways of an agent to pass its tests without a solution: those that do not work, and those that are documented."""

from __future__ import annotations

import importlib
import importlib._bootstrap_external as pyc  # type: ignore[import-not-found]
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from rl_core.testing.exhaustive import exhaustive, partly_exhaustive
from rl_envs.repository.job import Score, score
from rl_envs.repository.plugin import RepositoryConfig
from rl_envs.repository.solution import SolutionFiles, installed_modules
from rl_envs.repository.task import read_task
from rl_envs.repository.working_copy import overlaid
from rl_envs.sandbox.program import Cancellation, Limits
from rl_envs.sandbox.sandbox import Sandbox, SandboxUnavailable
from rl_envs.sandbox.tree import TreeEntry

PYTEST, UNITTEST = "python -m pytest -q", "python -m unittest"
LIMITS = Limits(cpu_s=30.0, wall_s=120.0, scratch_mib=4)
CONFIG = RepositoryConfig()
READS_TOML = pytest.version_tuple >= (9,)

REPOSITORY = {
    "answer.py": "def add(a, b):\n    return 0\n",
    "conftest.py": "",
    "pyproject.toml": "[project]\nname = 'answer'\nversion = '1'\n",
    "tests/test_old.py": "def test():\n    pass\n",
    "checks.py": "assert 'a + b' in open('answer.py').read()\n",
    "run.sh": "grep 'a + b' answer.py\n",
    "Makefile": "test:\n\tpython3 checks.py\n",
    "README.md": ">>> 'a + b' in open('answer.py').read()\nTrue\n",
    "package.json": '{"scripts": {"test": "jest"}}',
    "sum.test.js": "test('sum', () => expect(require('./sum').add(2, 3)).toBe(5))",
}
# One hidden test reads the solution, the other imports it. Tests import much of the library, such as colorsys.
READS = """
import colorsys, unittest

class Test(unittest.TestCase):
    def test(self):
        self.assertIn("a + b", open("answer.py").read())
"""
IMPORTS = """
import unittest
from answer import add

class Test(unittest.TestCase):
    def test(self):
        self.assertEqual(add(2, 3), 5)
"""
# Python that turns failures into passes, in any process of pytest or unittest.
TAMPER = """
import unittest
unittest.TestResult.wasSuccessful = lambda self: True
try:
    from _pytest.main import Session
    Session.testsfailed = property(lambda self: 0, lambda self, value: None)
except ImportError:
    pass
"""
COLLECT_ONLY = "addopts = --collect-only\n"
ENTRY = "[pytest11]\nevil = evil\n"


def _pyc(source: str) -> bytes:
    """Compiled code that Python loads without a look at the source."""
    return bytes(pyc._code_to_hash_pyc(compile(source, "x.py", "exec"), bytes(8), False))


@dataclass(frozen=True)
class Way:
    """Files that an agent leaves instead of a solution.

    Args:
        name: Its name in the table.
        files: Contents by path, or a target after `->` for a link.
        command: Test command.
        hidden: The hidden test.
        is_held: True if it does not pass; the documentation has the others.
        works: True if it would pass without the rule, with the programs that a test has.
    """

    name: str
    files: Mapping[str, str | bytes]
    command: str = PYTEST
    hidden: str = READS
    test_file: str = "test_answer.py"
    is_held: bool = True
    works: bool = True

    @property
    def entries(self) -> list[TreeEntry]:
        """The working copy that the agent leaves."""
        changed = [
            TreeEntry(path, link=content[2:])
            if isinstance(content, str) and content.startswith("->")
            else TreeEntry(path, content.encode() if isinstance(content, str) else content)
            for path, content in self.files.items()
        ]
        return overlaid(texts(REPOSITORY), changed)


def _solution(name: str, source: str, command: str = UNITTEST, *, is_held: bool = False) -> Way:
    return Way(name, {"answer.py": source}, command, IMPORTS, is_held=is_held, works=not is_held)


def _elsewhere(name: str, files: Mapping[str, str], command: str) -> Way:
    """A way with programs that the sandbox of the tests does not have."""
    return Way(name, files, command, works=False)


WAYS = [
    # settings of pytest
    Way("pytest.toml", {"pytest.toml": '[pytest]\naddopts = ["--collect-only"]\n'}, works=READS_TOML),
    Way(".pytest.toml", {".pytest.toml": '[pytest]\naddopts = ["--collect-only"]\n'}, works=READS_TOML),
    Way(
        "pytest.toml with a plugin",
        {"pytest.toml": '[pytest]\naddopts = ["-p", "evil"]\n', "evil.py": TAMPER},
        works=READS_TOML,
    ),
    Way("pytest.ini", {"pytest.ini": f"[pytest]\n{COLLECT_ONLY}"}),
    Way(".pytest.ini", {".pytest.ini": f"[pytest]\n{COLLECT_ONLY}"}),
    Way("pyproject.toml", {"pyproject.toml": "[tool.pytest.ini_options]\naddopts = '--collect-only'\n"}),
    Way("tox.ini", {"tox.ini": f"[pytest]\n{COLLECT_ONLY}"}),
    Way("setup.cfg", {"setup.cfg": f"[tool:pytest]\n{COLLECT_ONLY}", "pyproject.toml": ""}),
    # plugins of pytest
    Way("entry point in dist-info", {"evil-1.dist-info/entry_points.txt": ENTRY, "evil.py": TAMPER}),
    Way("entry point in egg-info", {"evil.egg-info/entry_points.txt": ENTRY, "evil.py": TAMPER}),
    Way("conftest.py", {"conftest.py": TAMPER}),
    Way("conftest.py in a folder", {"more/conftest.py": TAMPER, "more/test_more.py": ""}),
    Way("package conftest", {"conftest/__init__.py": f"__file__ = __path__[0] + '.py'\n{TAMPER}"}),
    # tests
    Way("another test file", {"test_more.py": TAMPER}),
    Way("another test in a folder", {"tests/deep/test_more.py": TAMPER}),
    Way("tests.py for unittest", {"tests.py": TAMPER}, UNITTEST),
    Way("testing.py for unittest", {"testing.py": TAMPER}, UNITTEST),
    Way("testmore.py for unittest", {"testmore.py": TAMPER}, UNITTEST),
    Way("package instead of a hidden test", {"test_answer/__init__.py": "def test(): pass\n"}, UNITTEST, works=False),
    Way(
        "package instead of a test that is named", {"check/__init__.py": ""}, f"{UNITTEST} check", test_file="check.py"
    ),
    Way("folder of tests becomes a link", {"tests": "->easy", "easy/test_old.py": TAMPER}),
    Way("__init__.py next to tests", {"__init__.py": TAMPER}),
    Way("compiled test", {"__pycache__/test_answer.cpython-311.pyc": _pyc("")}, UNITTEST, works=False),
    # modules in the place of others
    Way("module of the library", {"colorsys.py": TAMPER}),
    Way("package of the library", {"colorsys/__init__.py": TAMPER}),
    Way("module of the library, compiled", {"colorsys.pyc": _pyc(TAMPER)}),
    Way("module that the library misses", {"org/python/core.py": TAMPER}, works=False),
    Way("pytest.py", {"pytest.py": TAMPER}, works=False),
    Way("_pytest/__init__.py", {"_pytest/__init__.py": TAMPER}, works=False),
    Way("unittest.py", {"unittest.py": "raise SystemExit(0)"}, UNITTEST, works=False),
    Way("sitecustomize.py, usercustomize.py", {"sitecustomize.py": TAMPER, "usercustomize.py": TAMPER}, works=False),
    Way("a .pth file", {"evil.pth": "import evil", "evil.py": TAMPER}, works=False),
    # files that the command itself runs
    Way("file of the command", {"checks.py": ""}, "python checks.py"),
    Way("module of the command", {"checks.py": ""}, "python -m checks"),
    Way(
        "package instead of the module of the command",
        {"checks/__init__.py": "", "checks/__main__.py": ""},
        "python -m checks",
    ),
    _elsewhere("script of the command", {"run.sh": "true"}, "bash run.sh"),
    Way("file of unittest's pattern", {"exam_more.py": TAMPER}, f"{UNITTEST} discover -p *_*.py"),
    Way("file of pytest's option", {"exam_more.py": TAMPER}, f"{PYTEST} -o 'python_files=exam_*.py test_*.py'"),
    Way("examples in a document", {"README.md": ""}, "python -m doctest README.md"),
    # settings of other tools
    _elsewhere(".coveragerc", {".coveragerc": "[run]\nplugins = evil\n"}, f"{PYTEST} --cov"),
    _elsewhere(".env of pytest-dotenv", {".env": "PYTEST_ADDOPTS=--collect-only"}, PYTEST),
    _elsewhere("hooks of git", {".git/hooks/post-checkout": "true"}, PYTEST),
    _elsewhere("toxfile.py, noxfile.py", {"toxfile.py": TAMPER, "noxfile.py": TAMPER}, "tox"),
    _elsewhere("setup.py", {"setup.py": TAMPER}, "python setup.py test"),
    _elsewhere("Makefile", {"Makefile": "test:\n\ttrue\n"}, "make test"),
    _elsewhere("GNUmakefile before Makefile", {"GNUmakefile": "test:\n\ttrue\n"}, "make test"),
    _elsewhere("package.json, .npmrc", {"package.json": '{"scripts": {"test": "true"}}', ".npmrc": ""}, "npm test"),
    _elsewhere("jest.config.js", {"jest.config.js": "module.exports = {testMatch: []}"}, "npm test"),
    _elsewhere("vitest.config.ts, .mocharc.cjs", {"vitest.config.ts": "", ".mocharc.cjs": ""}, "npx vitest run"),
    _elsewhere("tests in JavaScript", {"sum.test.js": "", "src/__tests__/sum.js": "", "a.spec.ts": ""}, "npm test"),
    _elsewhere("node_modules, __mocks__", {"node_modules/jest/bin/jest.js": "", "__mocks__/a.js": ""}, "npm test"),
    _elsewhere("tests in Go", {"sum_test.go": "package sum"}, "go test ./..."),
    _elsewhere("go.mod, go.work, vendor", {"go.mod": "", "go.work": "", "vendor/a/a.go": ""}, "go test ./..."),
    _elsewhere(
        "Cargo.toml, build.rs, .cargo", {"Cargo.toml": "", "build.rs": "", ".cargo/config.toml": ""}, "cargo test"
    ),
    _elsewhere("CMakeLists.txt, CTestTestfile.cmake", {"CMakeLists.txt": "", "CTestTestfile.cmake": ""}, "ctest"),
    _elsewhere("spec_helper.rb, .rspec, Rakefile", {"spec/spec_helper.rb": "", ".rspec": "", "Rakefile": ""}, "rspec"),
    _elsewhere("SumTest.java, pom.xml", {"src/test/java/SumTest.java": "", "pom.xml": ""}, "mvn test"),
    _elsewhere("plugin of minitest", {"lib/minitest/evil_plugin.rb": ""}, "rake test"),
    _elsewhere("buildSrc, project/Build.scala", {"buildSrc/src/A.java": "", "project/Build.scala": ""}, "gradle test"),
    _elsewhere("user.clj", {"src/user.clj": ""}, "lein test"),
    _elsewhere("expected results", {"expected.json": "5"}, "bash -c 'python3 answer.py | diff - expected.json'"),
    _elsewhere("programs in the working copy", {"bin/python3": "#!/bin/sh\n", "pytest": "#!/bin/sh\n"}, PYTEST),
    # solutions that tests import
    _solution("ends by os._exit", "import os\nos._exit(0)", is_held=True),
    _solution("ends by sys.exit", "import sys\nsys.exit(0)", is_held=True),
    _solution("replaces os._exit", "import os\nleave = os._exit\nos._exit = lambda code: leave(0)", is_held=True),
    _solution(
        "calls os._exit at Python's end", "import atexit, os\natexit.register(os._exit, 0)\nadd = min", is_held=True
    ),
    _solution("changes unittest", f"{TAMPER}\nadd = min"),
    _solution("changes pytest", f"{TAMPER}\nadd = min", PYTEST),
    _solution("equals everything", "class Any:\n    __eq__ = lambda *_: True\nadd = lambda a, b: Any()"),
    _solution("skips its tests", "import unittest\ndef add(a, b):\n    raise unittest.SkipTest"),
    _solution(
        "reads the test",
        "import re\nadd = lambda a, b: int(re.search(r'\\), (\\d)', open('test_answer.py').read())[1])",
    ),
    _solution(
        "finds the mark of the end",
        "import os, sys\nframe = sys._getframe()\nwhile 'completed' not in frame.f_locals:\n    frame = frame.f_back\n"
        "frame.f_locals['completed']()\nos._exit(0)",
    ),
    Way("package that unittest imports", {"new/__init__.py": TAMPER}, UNITTEST, is_held=False),
    Way("module that pytest searches for examples", {"new.py": TAMPER}, f"{PYTEST} --doctest-modules", is_held=False),
]

IMPORTED = [way for way in WAYS if way.hidden == IMPORTS]


def _named(way: Way) -> str:
    return way.name


@pytest.fixture(scope="module")
def site() -> Iterator[Path]:
    """A folder with pytest and the packages that it needs, which the users of programs may read."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        source = Path(str(importlib.import_module(name).__file__)).parent
        shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(str(importlib.import_module("py").__file__), folder)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def sandbox(site: Path) -> Iterator[Sandbox]:
    try:
        with Sandbox("namespaces", limits=LIMITS, python_path=[str(site)]) as opened:
            yield opened
    except SandboxUnavailable as error:
        pytest.skip(str(error))


def _rule(way: Way, site: Path) -> SolutionFiles:
    task = read_task(
        {"repository": REPOSITORY, "tests": way.command, "test_files": {way.test_file: way.hidden}}, Path()
    )
    return SolutionFiles(texts(REPOSITORY), task, CONFIG.solution, CONFIG.protected, installed_modules([str(site)]))


def texts(files: dict[str, str]) -> list[TreeEntry]:
    return [TreeEntry(path, text.encode()) for path, text in files.items()]


def _scored(files: list[TreeEntry], way: Way, sandbox: Sandbox) -> Score:
    task = read_task(
        {"repository": REPOSITORY, "tests": way.command, "test_files": {way.test_file: way.hidden}}, Path()
    )
    return score(files, task, sandbox, LIMITS, Cancellation(), stop_early=False)


@pytest.mark.parametrize("way", [way for way in WAYS if way.hidden == READS], ids=_named)
def test_files_that_a_test_command_reads_by_itself_do_not_count(way: Way, site: Path) -> None:
    seen, _ = _rule(way, site).working_copy(way.entries)
    # a module with an ordinary name counts: without the file that has it loaded it does nothing
    strange = {entry for entry in way.entries if entry.path in set(way.files) - {"evil.py"}}
    assert strange.intersection(seen) == (set() if way.is_held else strange)
    assert {entry.path for entry in seen} >= set(REPOSITORY)


def test_all_files_that_do_not_count_together_change_no_verdict(site: Path, sandbox: Sandbox) -> None:
    for command in (PYTEST, UNITTEST):
        ways = [way for way in WAYS if way.is_held and (way.command, way.hidden) == (command, READS)]
        left = texts(REPOSITORY)
        for way in ways:
            left = overlaid(left, [entry for entry in way.entries if entry.path in way.files])
        found = _scored(_rule(ways[0], site).working_copy(left)[0], ways[0], sandbox)
        assert (found.num_passed, found.problem.endswith(("code 1", "(failures=1)"))) == (0, True), found


@pytest.mark.parametrize(
    "way", partly_exhaustive(IMPORTED, always=[way for way in IMPORTED if way.name == "replaces os._exit"]), ids=_named
)
def test_a_solution_that_tests_import(way: Way, site: Path, sandbox: Sandbox) -> None:
    assert _scored(_rule(way, site).working_copy(way.entries)[0], way, sandbox).num_passed == (not way.is_held)


@exhaustive
@pytest.mark.parametrize("way", [way for way in WAYS if way.hidden == READS and way.works], ids=_named)
def test_each_way_passes_without_the_rule(way: Way, site: Path, sandbox: Sandbox) -> None:
    assert _scored(way.entries, way, sandbox).num_passed == 1
    assert _scored(_rule(way, site).working_copy(way.entries)[0], way, sandbox).num_passed == (not way.is_held)


@exhaustive
@pytest.mark.parametrize("way", [way for way in WAYS if way.command.startswith(("bash run", "make"))], ids=_named)
def test_each_way_with_a_program_of_the_machine_passes_without_the_rule(way: Way, site: Path, sandbox: Sandbox) -> None:
    if shutil.which(way.command.split()[0]) is None:
        pytest.skip(f"needs {way.command}")
    with Sandbox("namespaces", limits=LIMITS, commands=["/usr/bin", "/bin"]) as machine:
        assert _scored(way.entries, way, machine).num_passed == 1
        assert _scored(_rule(way, site).working_copy(way.entries)[0], way, machine).num_passed == 0


def test_a_solution_passes(site: Path, sandbox: Sandbox) -> None:
    for hidden in (READS, IMPORTS):
        way = Way(
            "solution",
            {"answer.py": "from more.add import add  # a + b", "more/add.py": "add = int.__add__"},
            hidden=hidden,
        )
        seen, ignored = _rule(way, site).working_copy(way.entries)
        assert ignored == []
        assert _scored(seen, way, sandbox).num_passed == 1
