"""Checks that a model family trains correctly: a backend's own self-check, run in its worker's environment, and the
tables of families that a backend has checked before, which ship with it."""

from __future__ import annotations

import json
import math
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from rl_algos import hub
from rl_algos.requirement import LOSSES
from rl_core.config import Config
from rl_core.errors import ConfigError, RLError
from rl_core.plugins import POLICIES, BackendPlugin, MeshCase, plugin
from rl_core.selfcheck.cases import FamilyCase
from rl_launch.model_files.local_models import model_of_run
from rl_launch.model_files.model_folder import MODEL_FILES, folder_problems
from rl_launch.worker_envs.provision import provision
from rl_launch.worker_envs.spec import worker_env
from rl_launch.worker_envs.variables import worker_process_environment

SCHEMA = 1
"""Version of `as_json`; raised when a key changes its meaning or is removed."""

_CHECK = """
import json, sys
from dataclasses import asdict
from rl_core.errors import ConfigError
from rl_core import resolve
from rl_core.plugins import MeshCase
try:
    only = json.loads(sys.argv[3])
    for case in resolve(sys.argv[1])(sys.argv[2], MeshCase(**only) if only else None):
        print("\\ncase " + json.dumps(asdict(case)), flush=True)
except ConfigError as error:
    print("\\nproblem " + json.dumps(str(error)), flush=True)
"""
_CONFIG_FILE = MODEL_FILES[:1]

NO_KIND = frozenset(
    {"_name_or_path", "architectures", "dtype", "model_type", "torch_dtype", "transformers_version", "use_cache"}
)
"""Fields of a Hugging Face config that do not change which code a model runs."""

DECIDED = ("exact", "off", "refused")


def check_model(model: str, backend: str) -> Iterator[FamilyCase]:
    """Yield the cases of a model's family, each as soon as it is done.

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
        model: Model for the check.
        only: The one case to check; all of them if None.

    Raises:
        ConfigError: If the check refuses the model.
        RLError: If the check does not finish.
    """
    only_case = json.dumps(only and asdict(only))
    for kind, answer in worker_answers(python, _CHECK, check, model, only_case, what=check):
        if kind == "problem":
            raise ConfigError(json.loads(answer))
        if kind == "case":
            fields = json.loads(answer)
            yield FamilyCase(**{**fields, "names": tuple(fields["names"])})


def worker_answers(
    python: str, code: str, *arguments: str, what: str, on_gpus: bool = False
) -> Iterator[tuple[str, str]]:
    """Run code in a worker's environment, and yield the first word and the rest of each line that it writes.

    Args:
        python: Interpreter of that environment.
        code: Python code.
        arguments: Its arguments, from `sys.argv[1]` on.
        what: Name of the code, for messages.
        on_gpus: True if it sees the GPUs of this machine.

    Raises:
        RLError: If it does not finish.
    """
    # Processes that share the CPU have one thread each, also on a machine with GPUs.
    hidden = {} if on_gpus else {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as complaints:
        process = subprocess.Popen(
            [python, "-c", code, *arguments],
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            env={**worker_process_environment(python), **hidden},
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                kind, _, answer = line.partition(" ")
                yield kind, answer
            if process.wait():
                complaints.seek(0)
                output = complaints.read().strip()
                raise RLError(f"{what} ended with exit code {process.returncode} in {python}:\n{output}")
        finally:
            process.terminate()
            process.stdout.close()
            process.wait()


def as_json(model: str, backend: str, found: Sequence[FamilyCase]) -> dict[str, Any]:
    """Return `schema` (1), `model`, `backend`, `is_right` (no case is off), and `cases`.

    A case has the fields of `FamilyCase`, with null for a difference that is not a number.
    """
    shown = []
    for case in found:
        finite = {name: value if math.isfinite(value) else None for name, value in case.differences.items()}
        shown.append(asdict(case) | {"differences": finite})
    is_right = all(case.verdict != "off" for case in found)
    return {"schema": SCHEMA, "model": model, "backend": backend, "is_right": is_right, "cases": shown}


def described(case: FamilyCase) -> str:
    """Return a case in one line."""
    parts = [f"{name.replace('_', ' ')} {value:.1e}" for name, value in case.differences.items()]
    if case.names:
        parts.append(f"the weight stream gets wrong: {', '.join(case.names)}")
    if case.reason:
        parts.append(" ".join(case.reason.split()))
    return f"{case.verdict:<8} {case.mesh + ', ' + case.layout:<30} {', '.join(parts)}"


def kind_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a Hugging Face config that choose among a family's kinds of layers, without sizes."""
    made_of: dict[str, Any] = {
        name: value for name, value in fields.items() if isinstance(value, bool | str | None) and name not in NO_KIND
    }
    made_of["layer_types"] = sorted(set(fields.get("layer_types") or ()))
    return made_of


class FamilyTable(NamedTuple):
    """Results of a training backend's self-check for tiny models of families.

    Attributes:
        versions: Versions of the packages that decide them.
        families: Model type to `kind`, as `kind_of` gives it for the model that was checked, and `cases`, each of them
            the fields of a `MeshCase` with `verdict` and `reason`.
        images: The same for models that train with images, by the type of the whole model.
    """

    versions: Mapping[str, str]
    families: Mapping[str, Mapping[str, Any]]
    images: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, plugin: BackendPlugin) -> FamilyTable:
        """Return the table that a backend ships; an empty one if it has none."""
        if not plugin.family_table:
            return cls({}, {}, {})
        package, _, name = plugin.family_table.partition(":")
        held = json.loads(files(package).joinpath(name).read_text(encoding="utf-8"))
        return cls(held["versions"], held["families"], held.get("images", {}))

    def find(
        self,
        fields: Mapping[str, Any],
        case: MeshCase,
        config: type[Config],
        installed: Mapping[str, str],
        with_images: str = "",
    ) -> FamilyCase | None:
        """Return the result for a model of the same kind, mesh and versions; None if there is none.

        Args:
            fields: Fields of the model's Hugging Face config.
            case: Mesh, layout of rows and weights that train.
            config: Config type of the backend, which has the defaults of the settings.
            installed: Version of each package in the trainer's environment.
            with_images: Type of the whole model if it trains with images; empty otherwise.
        """
        family = self.images.get(with_images) if with_images else self.families.get(str(fields.get("model_type")))
        # The part of a version that identifies a build does not count.
        are_versions = all(
            installed.get(name, "").partition("+")[0] == own.partition("+")[0] for name, own in self.versions.items()
        )
        if family is None or not are_versions:
            return None
        # Missing fields have their defaults, in the kind as well.
        asked, kind = kind_of(fields), family["kind"]
        types = asked.pop("layer_types")
        is_alike = all(name in kind and kind[name] == value for name, value in asked.items())
        if not is_alike or (types and types != kind["layer_types"]):
            return None
        for entry in family["cases"]:
            same_rows = (entry["is_packed"], entry["has_adapters"]) == (case.is_packed, case.has_adapters)
            same_mesh = config(**entry["settings"]) == config(**case.settings)
            if same_rows and same_mesh and entry["num_ranks"] == case.num_ranks and entry["verdict"] in DECIDED:
                return FamilyCase(case.mesh, case.layout, entry["verdict"], reason=entry["reason"])
        return None
