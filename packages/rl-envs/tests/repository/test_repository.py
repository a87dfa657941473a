"""Rows, working copies and scores of the environment `repository`, without an agent."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rl_core.errors import DataError
from rl_core.rollouts.environment import AgentRun, Conversation, StepResult, UnusableAnswer, this_network
from rl_envs.calculations import load as calculations
from rl_envs.repository.environment import RepositoryEnvironment, check_row
from rl_envs.repository.job import AgentUnreachable, check_reached_from, relay_to, score
from rl_envs.repository.plugin import RUN_FILES, SOURCE_FILES, TEST_FILES, RepositoryConfig
from rl_envs.repository.solution import SolutionFiles, installed_modules
from rl_envs.repository.task import load, read_task
from rl_envs.repository.working_copy import Repositories, RepositoryUnreadable
from rl_envs.sandbox.program import Cancellation, Limits
from rl_envs.sandbox.sandbox import Sandbox, SandboxUnavailable
from rl_envs.sandbox.tree import TreeEntry

LIMITS = Limits(cpu_s=20.0, wall_s=120.0, scratch_mib=4)
AGENT = AgentRun(("python", "agent.py"), {"agent.py": b""}, {}, "http://127.0.0.1:9/rollouts/a", "key")
ROW = {"repository": {"a.py": "A = 1\n"}, "tests": "python -m unittest"}


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    try:
        with Sandbox("namespaces", limits=LIMITS) as opened:
            yield opened
    except SandboxUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("info", "says"),
    [
        ({}, "needs the field `repository`"),
        ({"repository": {"a": "b"}}, "needs the field `tests`"),
        ({**ROW, "tests": []}, "needs the field `tests`"),
        ({**ROW, "tests": ["-m"]}, "must be a command"),
        ({**ROW, "tests": "python '"}, "cannot be read"),
        ({**ROW, "tests": [["python", 3]]}, "must be a command"),
        ({**ROW, "commit": "main"}, "history"),
        ({**ROW, "repository": "missing"}, "is neither"),
        ({**ROW, "repository": ".", "commit": "--output=x"}, "commit"),
        ({**ROW, "repository": {"../a": "b"}}, "relative paths"),
        ({**ROW, "repository": {"/a": "b"}}, "relative paths"),
        ({**ROW, "test_files": {"a": 1}}, "relative paths and strings"),
    ],
)
def test_a_row_that_cannot_be_scored_is_refused(info: dict[str, Any], says: str) -> None:
    with pytest.raises(UnusableAnswer, match=says):
        check_row(info, RepositoryConfig())


def test_a_command_is_a_string_or_a_list_of_arguments() -> None:
    info = {**ROW, "tests": ["python -m unittest 'a b'", ["python", "x y.py"]]}
    assert read_task(info, Path()).commands == (("python", "-m", "unittest", "a b"), ("python", "x y.py"))


@pytest.mark.parametrize("isolation", ["landlock", "limits"])
def test_a_level_that_cannot_contain_an_agent_is_refused(isolation: str) -> None:
    with pytest.raises(ValidationError, match=r"sandbox\.isolation"):
        RepositoryConfig.model_validate({"sandbox": {"isolation": isolation}})


def test_rows_of_a_file_find_repositories_beside_it(tmp_path: Path) -> None:
    (tmp_path / "repository").mkdir()
    file = tmp_path / "tasks.jsonl"
    row = {"issue": "Repair it.", "repository": "repository", "tests": "python -m unittest", "solution": "secret"}
    file.write_text(json.dumps(row) + "\n")
    [found] = load({"path": str(file)}, "train")
    assert found["info"] == {"repository": str(tmp_path / "repository"), "tests": "python -m unittest"}
    assert (found["environment"], found["messages"][0]["content"]) == ("repository", "Repair it.")
    check_row(found["info"], RepositoryConfig())
    file.write_text('{"repository": "x"}\n')
    with pytest.raises(DataError, match=r"tasks\.jsonl:1"):
        load({"path": str(file)}, "train")


@pytest.mark.parametrize(
    ("path", "counts"),
    [
        ("main.py", True),
        ("src/latest_a.py", True),
        ("contests/a.py", True),
        ("package/new/__init__.py", True),
        ("package/types.py", True),
        ("new/json/decoder.js", True),
        ("docs/page.html", True),
        ("docs/page.md", False),
        ("testing/a.py", False),
        ("src/test_a.py", False),
        ("src/tests/deep/data.py", False),
        ("src/types.py", False),
        ("src/json/a.py", False),
        ("src/sitecustomize.py", False),
        (".git/config.py", False),
        ("data.json", False),
        ("Makefile", False),
    ],
)
def test_new_sources_count_unless_a_tool_runs_them_or_they_replace_a_module(path: str, counts: bool) -> None:
    base = [TreeEntry("package/__init__.py", b""), TreeEntry("src/a.py", b""), TreeEntry("tests/test_a.py", b"")]
    seen, ignored = _seen(base, [*base, TreeEntry(path, b"new")])
    assert (path in {entry.path for entry in seen}, ignored) == (counts, [] if counts else [path])


def _seen(
    base: list[TreeEntry], left: list[TreeEntry], solution: tuple[str, ...] = SOURCE_FILES
) -> tuple[list[TreeEntry], list[str]]:
    task = read_task(ROW, Path())
    return SolutionFiles(base, task, solution, [*TEST_FILES, *RUN_FILES], installed_modules([])).working_copy(left)


@pytest.mark.parametrize(
    "settings",
    [
        {"pyproject.toml": '[tool.pytest.ini_options]\npython_files = ["exam_*.py",\n "quiz.py"]\nname = "x"'},
        {"pytest.ini": "[pytest]\npython_files =\n    exam_*.py\n    quiz.py\naddopts = -q"},
        {"setup.cfg": "[tool:pytest]\npython_files = exam_*.py quiz.py\n"},
    ],
)
def test_files_that_the_settings_of_pytest_name_as_tests_are_protected(settings: dict[str, str]) -> None:
    base = [TreeEntry("quiz.py", b"old"), *(TreeEntry(path, text.encode()) for path, text in settings.items())]
    left = [*base[1:], TreeEntry("quiz.py", b"new"), TreeEntry("exam_more.py", b""), TreeEntry("x.py", b"")]
    assert _seen(base, left)[1] == ["exam_more.py", "quiz.py"]


def test_a_word_that_begins_with_test_is_not_a_test() -> None:
    left = [
        TreeEntry(path, b"")
        for path in ("testimonials/views.py", "src/Testimonial.vue", "attestation.go", "contest.py")
    ]
    rule = SolutionFiles(
        [], read_task({**ROW, "tests": "python -m pytest"}, Path()), SOURCE_FILES, TEST_FILES, installed_modules([])
    )
    assert rule.working_copy(left)[1] == []


def test_the_subject_of_a_command_is_not_its_test() -> None:
    base = [TreeEntry(f"{name}.py", b"") for name in ("answer", "plugin", "check")]
    left = [TreeEntry(entry.path, b"new") for entry in base]
    commands = ["python -m pytest --cov answer -p plugin check.py::test", "python -c 'import answer'", "mypy answer.py"]
    rule = SolutionFiles(base, read_task({**ROW, "tests": commands}, Path()), SOURCE_FILES, [], installed_modules([]))
    assert rule.working_copy(left)[1] == ["check.py", "plugin.py"]


def test_other_files_are_those_of_the_repository() -> None:
    base = [
        TreeEntry("a.py", b"1"),
        TreeEntry("gone.py", b"2"),
        TreeEntry("tests/test_a.py", b"3"),
        TreeEntry("test_b.py", b"4"),
        TreeEntry("link.py", link="a.py"),
        TreeEntry("data.json", b"5"),
    ]
    left = [
        TreeEntry("a.py", b"changed"),
        TreeEntry("new.py", b"new"),
        TreeEntry("tests", link="new.py"),
        TreeEntry("test_b.py/inside.py", b"5"),
        TreeEntry("conftest.py", b"6"),
        TreeEntry("link.py", b"7"),
        TreeEntry("other.py", link="a.py"),
        TreeEntry("data.json", b"8"),
    ]
    own = {("tests/test_a.py", b"3"), ("test_b.py", b"4"), ("link.py", None), ("data.json", b"5")}
    solved = {("a.py", b"changed"), ("new.py", b"new")}
    seen, ignored = _seen(base, left)
    assert {(entry.path, entry.content) for entry in seen} == own | solved
    assert ignored == ["conftest.py", "data.json", "link.py", "other.py", "test_b.py/inside.py", "tests"]
    wider = {(entry.path, entry.content) for entry in _seen(base, left, (*SOURCE_FILES, "*.json"))[0]}
    assert wider == own - {("data.json", b"5")} | solved | {("data.json", b"8")}


def test_commits_of_a_repository_are_read_without_its_history(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        author = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *author, "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    git("init", "-q")
    for text in ("first", "second"):
        (tmp_path / "a.txt").write_text(text)
        git("add", "a.txt")
        git("commit", "-q", "-m", text)
    (tmp_path / "a.txt").write_text("not committed")
    repositories = Repositories(100)

    def contents(commit: str) -> list[tuple[str, bytes | None]]:
        task = read_task({**ROW, "repository": str(tmp_path), "commit": commit}, Path())
        return [(entry.path, entry.content) for entry in repositories.entries(task)]

    assert contents("HEAD") == [("a.txt", b"second")]
    assert contents("HEAD~1") == [("a.txt", b"first")]
    assert contents("") == [("a.txt", b"not committed")]
    with pytest.raises(RepositoryUnreadable, match="git could not read"):
        contents("no-such-branch")
    (tmp_path / "large").write_bytes(bytes(1000))
    with pytest.raises(RepositoryUnreadable, match="scratch_mib"):
        Repositories(100).entries(read_task({**ROW, "repository": str(tmp_path)}, Path()))


def _score(sandbox: Sandbox, answer: str, tests: Any, *, stop_early: bool = False) -> Any:
    [row] = calculations({"form": "repository", "size": 1}, "train")
    task = read_task({**row["info"], "tests": tests}, Path())
    files = [TreeEntry("answer.py", answer.format(_sum(row)).encode())]
    return score(files, task, sandbox, LIMITS, Cancellation(), stop_early=stop_early)


def _sum(row: dict[str, Any]) -> int:
    a, b = row["messages"][0]["content"].rstrip("=").split("+")
    return int(a) + int(b)


def test_a_score_is_the_number_of_commands_that_succeed(sandbox: Sandbox) -> None:
    tests = ["python -c 'import answer; answer.ANSWER + 1'", "python -m unittest test_answer", "python -c 1/0"]
    found = _score(sandbox, "ANSWER = {}", tests)
    assert (found.num_passed, found.num_tests) == (2, 3)
    assert found.problem.startswith("python -c 1/0: it ended with exit code 1")
    assert _score(sandbox, "ANSWER = -1", tests, stop_early=True).num_passed == 1
    assert _score(sandbox, "import os; os._exit(0)", tests[:2]).num_passed == 0
    assert _score(sandbox, "raise SystemExit(0)", tests[1:2]).num_passed == 0


def _played(environment: RepositoryEnvironment, conversation: Conversation) -> StepResult:
    state = None
    while not (result := environment.step([conversation], [state])[0]).done:
        state = result.state
        time.sleep(0.01)
    return result


def test_an_environment_without_an_agent_says_what_it_needs(sandbox: Sandbox) -> None:
    environment = RepositoryEnvironment(RepositoryConfig())
    with pytest.raises(UnusableAnswer, match="place: environment"):
        environment.step([Conversation("a", (), ROW, "text")], [None])


def test_a_failed_agent_has_a_reason_and_no_reward(sandbox: Sandbox) -> None:
    environment = RepositoryEnvironment(RepositoryConfig())
    agent = AgentRun(
        ("python", "agent.py"),
        {"agent.py": b"print('before'); 1 / 0"},
        {},
        "http://127.0.0.1:9/rollouts/a",
        "key",
        this_network(),
    )
    result = _played(environment, Conversation("a", (), ROW, "", agent_run=agent))
    assert result.rewards() == {"reward": 0.0}
    assert "ZeroDivisionError" in result.info["agent_failure"]
    assert result.info["agent_output"].startswith("before\n")


def test_a_policy_on_the_loopback_address_of_another_machine_is_refused() -> None:
    with pytest.raises(AgentUnreachable, match="another node"):
        relay_to(AGENT)
    with pytest.raises(AgentUnreachable, match="cannot reach"):
        check_reached_from("the sandbox server", "http://sandboxes:8080", AGENT)
    check_reached_from("the sandbox server", "http://127.0.0.1:8080", AGENT)


def test_the_key_of_a_rollout_is_not_shown() -> None:
    assert "key" not in repr(AGENT).replace("api_key", "")
