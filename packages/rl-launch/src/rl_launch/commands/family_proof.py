"""The check of a model family on a mesh that the project's tests do not cover, before a run trains on it.

A mesh that computes slightly wrong results trains all the same, unnoticed. The check trains a tiny random model of the
family on the run's own axes, two ranks on each, and compares it with one process. It takes seconds to a minute and is
kept under `RL_HOME`, by family, mesh and the versions installed in the trainer's environment. Families that the backend
ships results for, in its table, are not checked again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rl_core.errors import ConfigError, RLError
from rl_core.plugins import BackendPlugin, MeshCase
from rl_core.selfcheck.cases import FamilyCase
from rl_launch.doctor.family import cases, described
from rl_launch.doctor.family_table import FamilyTable, kind_of
from rl_launch.model_files.model_folder import hf_config_fields
from rl_launch.worker_envs.node_build import default_root
from rl_launch.worker_envs.variables import worker_process_environment

_log = logging.getLogger(__name__)

_VERSIONS = """
from importlib.metadata import distributions
print("\\n".join(sorted({f"{each.name}=={each.version}" for each in distributions()})))
"""


def prove_family(section: Any, key: str, plugin: BackendPlugin, python: str) -> None:
    """Check that a model's family trains correctly on its mesh, unless tests or an earlier check cover it.

    Args:
        section: The model's section of a resolved config, with a folder or a hub name.
        key: Dotted key of that section.
        plugin: Plugin of the training backend.
        python: Interpreter of the trainer's environment.

    Raises:
        ConfigError: If the family is off on this mesh, or cannot be checked.
    """
    if not plugin.selfcheck or plugin.mesh_case is None:
        return
    model, switch = section.model_name, f"{key}.family_check"
    fields = hf_config_fields(model)
    family = str(fields.get("model_type", ""))
    if family in plugin.held_families:
        return
    case = plugin.mesh_case(section)
    if section.family_check == "off":
        _log.warning("%s has not been checked on %s, because %s is off", family, case, switch)
        return
    installed = _versions(python)
    found = FamilyTable.of(plugin).find(fields, case, plugin.config, installed)
    if found is None:
        found = _proof(_path(plugin, family, fields, case, installed), plugin, model, case, python, switch)
    if found.verdict != "exact":
        raise ConfigError(
            f"a tiny model of the family {family} does not train correctly with the {plugin.name} backend on this "
            f"mesh: {' '.join(described(found).split())}. Choose another mesh or backend (rl doctor model {model} "
            f"--backend {plugin.name} tries all of them), or set {switch}=off to train anyway"
        )


def _path(
    plugin: BackendPlugin, family: str, fields: Mapping[str, Any], case: MeshCase, installed: Mapping[str, str]
) -> Path:
    """The file of the result. It depends on the model's kinds of layers, and not on their sizes."""
    text = json.dumps([plugin.name, kind_of(fields), asdict(case), installed], sort_keys=True)
    return default_root().parent / "proofs" / f"{family}-{hashlib.sha256(text.encode()).hexdigest()[:20]}.json"


def _versions(python: str) -> dict[str, str]:
    """Version of each package in an environment."""
    done = subprocess.run(
        [python, "-c", _VERSIONS],
        env=worker_process_environment(python),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if done.returncode:
        raise RLError(f"{python} does not list its packages: {done.stderr.strip()}")
    return dict(line.split("==", 1) for line in done.stdout.splitlines())


def _proof(path: Path, plugin: BackendPlugin, model: str, case: MeshCase, python: str, switch: str) -> FamilyCase:
    """The stored result, or a new one, which is then stored."""
    if path.is_file():
        kept = json.loads(path.read_text(encoding="utf-8"))
        return FamilyCase(**{**kept, "names": tuple(kept["names"])})
    started = time.monotonic()
    _log.info(
        "the project's tests do not cover this model's family on %s: checking a tiny model of this family once", case
    )
    try:
        (found,) = cases(python, plugin.selfcheck, model, case)
    except ConfigError as error:
        raise ConfigError(f"{error}. Set {switch}=off to train without this check") from None
    _log.info("checked in %.0f s: %s", time.monotonic() - started, " ".join(described(found).split()))
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps(asdict(found)), encoding="utf-8")
    aside.rename(path)
    return found
