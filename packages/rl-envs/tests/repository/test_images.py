"""Agents and tests have the same results on this machine, on a server and in containers; a repository in an image."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rl_core.rollouts.environment import (
    AgentRun,
    Conversation,
    EnvironmentFailure,
    StepResult,
    UnusableAnswer,
    this_network,
)
from rl_envs.repository.environment import RepositoryEnvironment, check_row
from rl_envs.repository.plugin import RepositoryConfig
from rl_envs.repository.task import load
from rl_envs.sandbox.program import Limits
from rl_envs.sandbox.sandbox import Sandbox, SandboxUnavailable
from rl_envs.sandbox.server import SandboxServer

ENGINE = Path(__file__).parents[1] / "sandbox" / "scripted_engine.py"
CALC = "def add(a, b):\n    return a - b\n"
TEST = "import unittest, calc\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(calc.add(1, 2), 3)\n"
TESTS = ["python -m unittest", "python -c 'import calc; assert calc.add(2, 2) == 4'"]
INFO = {"repository": {"calc.py": CALC, "test_calc.py": TEST}, "tests": TESTS}
AGENTS = {
    "solves it": ("open('calc.py', 'w').write('def add(a, b): return a + b')", 1.0),
    "does nothing": ("pass", 0.0),
    "ends the tests": ("open('calc.py', 'w').write('import sys; sys.exit(0)')", 0.0),
    "changes the tests": ("open('test_calc.py', 'w').write('')", 0.0),
    "fails": ("raise SystemExit(2)", None),
}


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `docker` that runs containers as processes."""
    folder = tmp_path / "engine"
    folder.mkdir()
    (folder / "docker").write_text(f"#!{sys.executable} -S\n{ENGINE.read_text()}")
    (folder / "docker").chmod(0o755)
    for name in ("python", "python3"):
        (folder / name).symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def _played(sandbox: Mapping[str, Any], info: Mapping[str, Any], agent: str) -> StepResult | EnvironmentFailure:
    environment = RepositoryEnvironment(RepositoryConfig.model_validate({"sandbox": sandbox}))
    run = AgentRun(
        ("python", "agent.py"), {"agent.py": agent.encode()}, {}, "http://127.0.0.1:9/rollouts/a", "key", this_network()
    )
    asked = Conversation("a", ({"role": "user", "content": "Fix it."},), info, "", agent_run=run)
    state = None
    while True:
        [result] = environment.step([asked], [state])
        if isinstance(result, EnvironmentFailure) or result.done:
            return result
        state = result.state
        time.sleep(0.01)


def _verdict(result: StepResult | EnvironmentFailure) -> tuple[object, ...]:
    assert isinstance(result, StepResult), result
    info = result.info
    return (result.reward, bool(info["agent_failure"]), info.get("problem"), info.get("ignored"))


def test_agents_have_the_same_rewards_on_this_machine_and_on_a_server() -> None:
    try:
        Sandbox("namespaces").close()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    with Sandbox("limits", limits=Limits(cpu_s=60.0, wall_s=120.0, processes=64)) as sandbox:
        server = SandboxServer(sandbox)
        with server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            for agent, reward in AGENTS.values():
                here, there = (_verdict(_played(each, INFO, agent)) for each in ({}, {"url": server.url}))
                assert here == there
                assert here[0] == (0.0 if reward is None else {"reward": reward, "passed": reward})
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("agent", ["solves it", "ends the tests"])
def test_an_agent_changes_the_repository_of_an_image_where_it_is(agent: str, tmp_path: Path, engine: Path) -> None:
    place = tmp_path / "testbed"
    (place / ".git").mkdir(parents=True)
    (place / "calc.py").write_text(CALC)
    (place / "test_calc.py").write_text(TEST)
    tests = [TESTS[0], f"python -c 'import calc; assert calc.__file__ == \"{place}/calc.py\"; calc.add'"]
    info = {"image": "an-image", "image_folder": str(place), "tests": tests}
    source, reward = AGENTS[agent]
    source = f"import os; assert os.getcwd() == {str(place)!r} and not os.path.exists('.git'); {source}"
    assert _verdict(_played({"service": "docker"}, info, source))[0] == {"reward": reward, "passed": reward}


def test_a_container_that_fails_begins_the_rollout_again(engine: Path) -> None:
    failed = _played({"service": "docker"}, {**INFO, "image": "engine-fails"}, "pass")
    assert isinstance(failed, EnvironmentFailure)
    assert failed.fault == "process"
    assert "the daemon is away" in failed.reason


def test_an_image_without_the_folder_is_reported(engine: Path) -> None:
    failed = _played({"service": "docker"}, {"image": "i", "image_folder": "/nowhere", "tests": "python -m x"}, "pass")
    assert isinstance(failed, StepResult)
    assert "/nowhere of the image i cannot be used: it is not a folder" in failed.info["agent_failure"]


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"image": "i"}, "needs the field `repository`"),
        ({"image_folder": "/testbed"}, "image_folder"),
        ({"image": "i", "image_folder": "testbed"}, "absolute folder"),
        ({"image": "i", "image_folder": "/a:/etc"}, "absolute folder"),
        ({"image": "i", "image_folder": "/a", "repository": {"x": ""}}, "leave it or `repository` out"),
    ],
)
def test_rows_with_a_wrong_image_are_refused(info: dict[str, Any], message: str) -> None:
    config = RepositoryConfig.model_validate({"sandbox": {"service": "docker"}})
    with pytest.raises(UnusableAnswer, match=message):
        check_row({"tests": TESTS, **info}, config)
    with pytest.raises(UnusableAnswer, match=r"set sandbox\.service"):
        check_row({**INFO, "image": "i"}, RepositoryConfig())


def test_rows_of_a_file_bring_their_images(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"issue": "Fix it.", "image": "i", "image_folder": "/testbed", "tests": "python -m unittest"}\n')
    [row] = load({"path": str(path)}, "train")
    assert row["info"] == {"image": "i", "image_folder": "/testbed", "tests": "python -m unittest"}
