"""The evaluation that a command line of `rl eval` asks for: a model, a run, a recipe, or an earlier evaluation."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from rl_algos.data.sources.files import kind_of
from rl_core.config import option
from rl_core.errors import ConfigError, RunDirectoryError
from rl_core.model_config import ModelConfig
from rl_launch.evaluation.folder import is_evaluation
from rl_launch.model_files.local_models import MADE_HERE, absent_run
from rl_launch.model_files.model_facts import longest_of
from rl_launch.root_config import RunConfig
from rl_launch.run_config.plan import RunPlan
from rl_launch.run_config.reading import read_plan, read_raw
from rl_launch.run_config.root_types import algorithm_of
from rl_launch.run_session.checkpoints.checkpoints import EXPORT, exported_model, saved_checkpoints
from rl_launch.run_session.directory.checkpoint_name import CheckpointName
from rl_launch.run_session.directory.run_folder import RunFolder

ALGORITHM = "evaluation"
"""Algorithm of the evaluation of a model without a run."""

RUN_DIR = "run_dir="
"""Start of the override that chooses the folder of results."""

_MODEL = "policy.model_name="
_NO_CALLBACKS = "callbacks=[]"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_KEPT = ("tokenizer", "precision", "max_total_sequence_length", "hf_config_overrides")
"""Keys of `policy` that an evaluation takes from a run whose algorithm generates nothing."""


class GivenEvaluation(NamedTuple):
    """An evaluation as the user asked for it.

    Args:
        plan: Plan of the evaluation, or of the run that is evaluated.
        folder: Folder for its results, which can already contain some of them.
        run: Folder of the run that trained the model; None if no run is named.
    """

    plan: RunPlan
    folder: Path
    run: Path | None = None

    def training(self) -> RunPlan:
        """Return the plan with the rows that the model was trained on; raise a `ConfigError` if none is known."""
        plan = self.plan
        if self.run is not None and not hasattr(plan.config, "data"):
            plan = read_plan(self.run, [_NO_CALLBACKS])
        if not hasattr(plan.config, "data"):
            name = option("--contamination", "contamination=True")
            raise ConfigError(f"{name} compares prompts with training rows. Evaluate a run or a recipe that has data")
        return plan


def evaluation_of(
    source: str | Mapping[str, Any], overrides: Sequence[str] = (), tasks: Sequence[str] = ()
) -> GivenEvaluation:
    """Return the evaluation that the user requested.

    Args:
        source: A model's folder or hub name, a run directory, `RUN:STEP`, `RUN:best` or a checkpoint, the folder of an
            evaluation to resume, a recipe's name, a YAML file, or nested values as in such a file.
        overrides: Keys to set.
        tasks: Names of tasks; the tasks of the source if empty.

    Raises:
        ConfigError: If the config has problems; lists all of them.
        RunDirectoryError: If there is no such run, or it has no such checkpoint.
    """
    if tasks:
        overrides = [f"eval.tasks={json.dumps(list(tasks))}", *overrides]
    if isinstance(source, Mapping):
        plan = read_plan(source, overrides)
        return GivenEvaluation(plan, _folder(plan.config, overrides, plan.config.algorithm))
    if not source or ("=" in source and not Path(source).exists()):
        name = option("rl eval", "evaluate")
        raise ConfigError(f"{name} needs a model, a run, a recipe or a YAML file; got {source!r} in its place")
    if source.startswith(("http://", "https://")):
        raise ConfigError(
            f"{source} is an address, and an evaluation needs the name of a model, whose tokenizer and files it reads. "
            f"For a server of vLLM or SGLang: rl eval MODEL policy.generation.backend=server "
            f"policy.generation.server_cfg.urls=[{source}]. Other APIs return no token ids; they can be judges"
        )
    path = Path(source).expanduser()
    if is_evaluation(path):
        return GivenEvaluation(read_plan(path / "config.yaml", overrides), path)
    if path.is_file() and kind_of(path.name):
        raise ConfigError(
            f"{source} is data, and an evaluation needs the model to score on it. Write "
            f"{option(f'rl eval MODEL --tasks {source}', f'evaluate(MODEL, tasks=[{source!r}])')}, with "
            "eval.default.env_name=ENVIRONMENT for rows that do not name their environment"
        )
    named = CheckpointName.parse(source)
    if problem := absent_run(source):
        raise RunDirectoryError(problem.message)
    run: Path | None = None
    if named is not None and not is_model(source):
        run, plan, name = _of_run(named, overrides)
    elif is_model(source):
        policy: dict[str, Any] = {"model_name": source}
        limit = longest_of(source)
        if limit is not None and limit < ModelConfig(model_name=source).max_total_sequence_length:
            policy["max_total_sequence_length"] = limit
        plan, name = read_plan({"algorithm": ALGORITHM, "policy": policy}, overrides), path.name
    else:
        plan, name = read_plan(source, overrides), path.stem
    return GivenEvaluation(plan, _folder(plan.config, overrides, name), run)


def new_checkpoints(path: Path, *, poll_s: float = 5.0) -> Iterator[int]:
    """Yield the steps of a run's checkpoints with Hugging Face files, as they are saved, until the run ends.

    Args:
        path: Folder of the run.
        poll_s: Seconds between looks at the folder.

    Raises:
        RunDirectoryError: If there is no such run.
    """
    run = RunFolder(path)
    last = 0
    while True:
        # The state is read first, so that the last checkpoint of a run that ends meanwhile is found.
        is_running = run.state().status == "running"
        steps = [step for step, path in saved_checkpoints(run.path / "checkpoints") if (path / EXPORT).is_dir()]
        newer = [step for step in sorted(steps) if step > last]
        if newer:
            last = newer[0]
            yield last
        elif not is_running:
            return
        else:
            time.sleep(poll_s)


def is_model(source: str) -> bool:
    """Return whether a string is a model: a folder with Hugging Face files, a hub name, or a built-in tiny model."""
    path = Path(source).expanduser()
    if path.is_dir():
        return (path / "config.json").is_file()
    is_file = path.suffix in (".yaml", ".yml")
    return source in MADE_HERE or bool(_HUB_NAME.fullmatch(source) and not is_file and not source.startswith("."))


def _of_run(named: CheckpointName, overrides: Sequence[str]) -> tuple[Path, RunPlan, str]:
    """Return the folder of a run, the plan of an evaluation of its checkpoint, and the name of the evaluation."""
    run = RunFolder(named.run)
    name = run.path.resolve().name
    if any(override.startswith(_MODEL) for override in overrides):
        model = []
    else:
        checkpoint = named.checkpoint()
        name, model = f"{name}-{checkpoint.name}", [f"{_MODEL}{exported_model(checkpoint)}"]
    raw = read_raw(run.path)
    if algorithm_of(raw).evaluates:
        # training alone calls callbacks, whose files may not be here
        return run.path, read_plan(run.path, [*model, _NO_CALLBACKS, *overrides]), name
    written = run.config()
    policy = {key: value for key, value in written.get("policy", {}).items() if key in _KEPT}
    values: dict[str, Any] = {"algorithm": ALGORITHM, "policy": {"model_name": run.description().model, **policy}}
    if "cluster" in written:
        values["cluster"] = written["cluster"]
    return run.path, read_plan(values, [*model, *overrides]), name


def _folder(config: RunConfig, overrides: Sequence[str], name: str) -> Path:
    """Return the folder of the results: the folder of its run, unless the config is one of an evaluation."""
    is_given = config.algorithm == ALGORITHM or any(override.startswith(RUN_DIR) for override in overrides)
    if is_given and config.run_dir:
        return Path(config.run_dir).expanduser()
    return Path(f"runs/eval-{name}-{datetime.now():%Y%m%d-%H%M%S}")
