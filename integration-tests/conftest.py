"""One quickstart for all tests: the product's main command, run as a user runs it."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class CommandResult:
    code: int
    output: str


def run_rl(*arguments: str, timeout: float = 840, **variables: str) -> CommandResult:
    """The `rl` command of the driver's environment; its output and exit code."""
    rl = Path(sys.executable).with_name("rl")
    environment = {**os.environ, **variables}
    environment.pop("OMP_NUM_THREADS", None)
    done = subprocess.run(
        [str(rl), *arguments],
        env=environment,
        text=True,
        timeout=timeout,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return CommandResult(done.returncode, done.stdout)


def read_metrics(run_dir: Path) -> list[dict]:
    """The lines of a run's `metrics.jsonl`."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def pytest_addoption(parser):
    parser.addoption("--quickstart", metavar="DIR", help="a finished quickstart to test, in the place of a new one")
    parser.addoption("--kills", type=int, default=1, help="how often a run is killed and resumed")


@pytest.fixture(scope="session")
def num_kills(pytestconfig) -> int:
    return pytestconfig.getoption("kills")


@pytest.fixture(scope="session")
def rl():
    return run_rl


@pytest.fixture(scope="session")
def metrics():
    return read_metrics


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory, pytestconfig) -> Path:
    """Folder of a finished quickstart."""
    if pytestconfig.getoption("quickstart"):
        return Path(pytestconfig.getoption("quickstart")).absolute()
    folder = tmp_path_factory.mktemp("quickstart") / "run"
    result = run_rl("quickstart", f"run_dir={folder}")
    assert result.code == 0, result.output
    return folder


@pytest.fixture(scope="session")
def warm_model(quickstart) -> Path:
    """The quickstart's model after SFT, in Hugging Face format."""
    return next((quickstart / "sft" / "checkpoints").glob("step_*")) / "hf"
