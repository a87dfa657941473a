"""Checks that a model family trains correctly: a backend's own self-check, run in its worker's environment."""

from __future__ import annotations

import json
import math
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rl_algos import hub
from rl_algos.requirement import LOSSES
from rl_core.errors import ConfigError, RLError
from rl_core.plugins import POLICIES, BackendPlugin, MeshCase, plugin
from rl_core.selfcheck.cases import FamilyCase
from rl_launch.model_files.model_folder import MODEL_FILES, folder_problems
from rl_launch.model_files.run_models import model_of_run
from rl_launch.worker_envs import provision, worker_env
from rl_launch.worker_envs.variables import worker_process_environment

SCHEMA = 1
"""Version of `as_json`; raised when a key changes its meaning or is removed."""

_CHECK = """
import json, sys
from dataclasses import asdict
from rl_core.errors import ConfigError
from rl_core.plugins import resolve
from rl_core.plugins import MeshCase
try:
    only = json.loads(sys.argv[3])
    for case in resolve(sys.argv[1])(sys.argv[2], MeshCase(**only) if only else None):
        print("\\ncase " + json.dumps(asdict(case)), flush=True)
except ConfigError as error:
    print("\\nproblem " + json.dumps(str(error)), flush=True)
"""
_CONFIG_FILE = MODEL_FILES[:1]


def check_model(model: str, backend: str) -> Iterator[FamilyCase]:
    """The cases of a model's family, each as soon as it is done.

    Args:
        model: A folder with a `config.json`, a checkpoint of a run, or a hub name.
        backend: Name of a training backend.

    Raises:
        ConfigError: If there is no such folder, family or backend, or the backend has no self-check.
        WorkerEnvironmentError: If the backend's environment is unavailable.
        RLError: If the check itself does not run.
    """
    model = str(model_of_run(model) or model)
    problems = [problem.message for problem in folder_problems("model", model, _CONFIG_FILE)]
    if problems:
        raise ConfigError("\n".join(problems))
    if not Path(model).expanduser().is_dir() and (problem := hub.problem("model", model)):
        raise ConfigError(f"{model!r} is {problem}")
    found: BackendPlugin = plugin(POLICIES, backend)
    if not found.selfcheck:
        raise ConfigError(f"the backend {backend} has no self-check of model families")
    spec = worker_env(found.requirement, "cpu", also=(LOSSES,))
    python = provision([spec])[spec]
    folder = Path(model).expanduser()
    return cases(python, found.selfcheck, str(folder.absolute()) if folder.is_dir() else model)


def cases(python: str, check: str, model: str, only: MeshCase | None = None) -> Iterator[FamilyCase]:
    """Run a self-check in a worker's environment, on the CPU, and yield its cases.

    Args:
        python: Interpreter of that environment.
        check: `"package.module:function"`.
        model: As the check takes it.
        only: The one case to check; all of them if None.

    Raises:
        ConfigError: If the check refuses the model.
        RLError: If the check does not finish.
    """
    with tempfile.TemporaryFile("w+") as complaints:
        process = subprocess.Popen(
            [python, "-c", _CHECK, check, model, json.dumps(only and asdict(only))],
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            # also on a machine with GPUs: the ranks of a check are processes that share the CPU
            env={**worker_process_environment(python), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                kind, _, answer = line.partition(" ")
                if kind == "problem":
                    raise ConfigError(json.loads(answer))
                if kind == "case":
                    yield _read(json.loads(answer))
            if process.wait():
                complaints.seek(0)
                said = complaints.read().strip()
                raise RLError(f"{check} ended with exit code {process.returncode} in {python}:\n{said}")
        finally:
            process.terminate()
            process.stdout.close()
            process.wait()


def as_json(model: str, backend: str, found: Sequence[FamilyCase]) -> dict[str, Any]:
    """`schema` (1), `model`, `backend`, `is_right` (no case is off), and `cases`: the fields of `FamilyCase`, with null
    for a difference that is not a number."""
    return {
        "schema": SCHEMA,
        "model": model,
        "backend": backend,
        "is_right": all(case.verdict != "off" for case in found),
        "cases": [asdict(case) | {"differences": _finite(case)} for case in found],
    }


def described(case: FamilyCase) -> str:
    """A case in one line."""
    parts = [f"{name.replace('_', ' ')} {value:.1e}" for name, value in case.differences.items()]
    if case.names:
        parts.append(f"the weight stream gets wrong: {', '.join(case.names)}")
    if case.reason:
        parts.append(" ".join(case.reason.split()))
    return f"{case.verdict:<8} {case.mesh + ', ' + case.layout:<30} {', '.join(parts)}"


def _read(fields: dict[str, Any]) -> FamilyCase:
    return FamilyCase(**{**fields, "names": tuple(fields["names"])})


def _finite(case: FamilyCase) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in case.differences.items()}
