"""Fixtures that tests share: one quickstart, the product's main command, and one undisturbed run of each kind."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from document_runs import commands, worked
from driver_process import CommandResult, DriverProcess
from faults import FAULT
from runs import NUM_PROMPTS, STARTED, lines_of

from rl_algos.tiny_model import make_tiny_model
from rl_core.testing import exhaustive
from rl_core.testing.documents import add_to_hub
from rl_core.testing.exhaustive import pytest_configure

__all__ = ["commands", "pytest_configure", "worked"]

# Its cases are exhaustive and need all packages with their engines in one environment: `uv sync --group cpu`.
collect_ignore = [] if find_spec("vllm") else ["test_mismatch_doctor.py"]

LONGEST_FIRST = (
    "test_quickstart",
    # these need no quickstart, which the first makes and those after them wait for
    "test_algorithms",
    "test_faults",
    "test_several_agents",
    "test_code_agents",
    "test_slurm",
    "test_rehearsal",
    "test_gpu_check",
    "test_surroundings",
    "test_data_plugins",
    "test_document_checks",
    "test_saved_conversations",
    "test_asynchronous",
    "test_guides",
    "test_preferences",
    "test_documents",
    "test_backends",
    "test_evaluations",
)
"""Modules in the order in which they begin, before all others: those that take most of a minute or more, each of which
would keep a single processor busy if it began last, and those that need not wait for the quickstart."""


HUB_MODELS = ("Qwen/Qwen2.5-0.5B-Instruct",)
"""Models that documents train; a tiny model of this machine has these names."""


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


def _long_tiny_model(folder: Path) -> None:
    """A tiny model with as many positions as the model whose name it has."""
    make_tiny_model(folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 32768}))


def pytest_collection_modifyitems(config, items):
    exhaustive.pytest_collection_modifyitems(config, items)
    ranks = {name: rank for rank, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))


def pytest_addoption(parser):
    exhaustive.pytest_addoption(parser)
    parser.addoption("--quickstart", metavar="DIR", help="a finished quickstart to test instead of a new one")
    parser.addoption("--kills", type=int, default=1, help="how often a run is killed and resumed")


@pytest.fixture(autouse=True)
def started_runs() -> Iterator[None]:
    """Ends the runs that a test which failed has left behind, which would hold up the next tests."""
    yield
    while STARTED:
        run = STARTED.pop()
        if run.process.poll() is None:
            run.kill_all()


@pytest.fixture(scope="session", autouse=True)
def variables(once) -> Iterator[None]:
    """Environment variables of every test, which readers of the documents have. Workers with equal variables share the
    import of their engine.
    """

    def make(folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        for name in HUB_MODELS:
            add_to_hub(folder, name, _long_tiny_model)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_CACHE", str(once("hub", make)))
        patch.setenv("HF_TOKEN", "none")
        yield


def pytest_terminal_summary(terminalreporter):
    """Print the table of faults: fault, step, seconds until noticed, message, exit code, proof after a resume."""
    for report in terminalreporter.stats.get("passed", []):
        for name, row in report.user_properties:
            if name == FAULT:
                terminalreporter.write_line("| " + " | ".join(row) + " |")


@pytest.fixture(scope="session")
def num_kills(pytestconfig) -> int:
    return pytestconfig.getoption("kills")


@pytest.fixture(scope="session")
def rl():
    return run_rl


@pytest.fixture(scope="session")
def metrics():
    return lines_of


@pytest.fixture(scope="session")
def driver(tmp_path_factory) -> Iterator[DriverProcess]:
    """Makes the undisturbed runs and commands of all modules, one after another in one process and one Ray."""
    process = DriverProcess(tmp_path_factory.mktemp("driver") / "log")
    yield process
    process.close()


@pytest.fixture(scope="session")
def once(tmp_path_factory) -> Callable[[str, Callable[[Path], None]], Path]:
    """Makes a folder that all processes of these tests share: the first that needs it makes it, others wait."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent

    def made(name: str, make: Callable[[Path], None]) -> Path:
        folder, done = shared / name, shared / f"{name}.done"
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                make(folder)
                done.touch()
        return folder

    return made


@pytest.fixture(scope="session")
def quickstart(once, pytestconfig) -> Path:
    """Folder of a finished quickstart."""
    if pytestconfig.getoption("quickstart"):
        return Path(pytestconfig.getoption("quickstart")).absolute()

    def make(folder: Path) -> None:
        result = run_rl("quickstart", f"run_dir={folder}")
        assert result.code == 0, result.output

    return once("quickstart", make)


@pytest.fixture(scope="session")
def warm_model(quickstart) -> Path:
    """The quickstart's model after SFT, in Hugging Face format."""
    return next((quickstart / "sft" / "checkpoints").glob("step_*")) / "hf"


@pytest.fixture(scope="session")
def sft() -> tuple[str, ...]:
    """Arguments of a short SFT run of 30 steps on two data-parallel ranks."""
    return ("sft-arithmetic", "sft.max_num_steps=30", "sft.val_period=5", "checkpointing.save_period=4")


@pytest.fixture(scope="session")
def grpo(warm_model) -> tuple[str, ...]:
    """Arguments of a short GRPO run of 12 steps on two data-parallel ranks, with vLLM beside them."""
    return (
        "grpo-arithmetic",
        f"policy.model_name={warm_model}",
        # two updates a step
        f"grpo.num_prompts_per_step={NUM_PROMPTS}",
        f"policy.train_global_batch_size={4 * NUM_PROMPTS}",
        "grpo.max_num_steps=12",
        "grpo.val_period=0",
        "checkpointing.metric_name=null",
        "checkpointing.save_period=3",
    )


@pytest.fixture(scope="session")
def whole_sft(once, driver, sft) -> Path:
    """Folder of the SFT run that nothing happened to."""
    return once("whole-sft", lambda folder: driver.train(folder, *sft))


@pytest.fixture(scope="session")
def few_steps(pytestconfig) -> tuple[str, ...]:
    """Steps of the GRPO runs that nothing happens to: only exhaustive tests need all of them."""
    return () if pytestconfig.getoption("--every-case") else ("grpo.max_num_steps=4",)


@pytest.fixture(scope="session")
def whole_grpo(once, driver, grpo, few_steps) -> Path:
    """Folder of the GRPO run that nothing happened to."""
    return once("whole-grpo", lambda folder: driver.train(folder, *grpo, *few_steps))


@pytest.fixture(scope="session")
def whole_hf(once, driver, grpo, few_steps) -> Path:
    """Folder of that run with the trainer's own generator, on the CPU."""
    settings = ("policy.generation.backend=hf", "cluster.device=cpu")
    return once("whole-hf", lambda folder: driver.train(folder, *grpo, *few_steps, *settings))
