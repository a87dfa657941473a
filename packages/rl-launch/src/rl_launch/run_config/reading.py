"""Read configs into plans, from recipes, YAML files, run directories and Python values."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from rl_algos.data.sources.files import kind_of
from rl_core.config import Config, Problem, RawConfig, assemble, load, plain, refusal, resolve
from rl_core.errors import ConfigError, ConfigProblems
from rl_core.plugins import ALGORITHMS, ENVIRONMENTS, AlgorithmPlugin, names, plugin, plugins
from rl_launch.foreign_keys.hints import ForeignHints
from rl_launch.model_files.local_models import absent_run, with_models_of_runs
from rl_launch.recipes import RECIPES
from rl_launch.root_config import EVAL, POLICY, ClusterConfig, RunConfig
from rl_launch.run_config.checks import PlanChecks, model_checks
from rl_launch.run_config.plan import RunPlan, without
from rl_launch.run_config.root_types import algorithm_of, policy_type, root_type, type_of
from rl_launch.run_session.directory.checkpoint_name import CheckpointName
from rl_launch.run_session.directory.recording import Recording
from rl_launch.run_session.directory.run_folder import CONFIG, DESCRIPTION, RunFolder, is_run

_log = logging.getLogger(__name__)

_GENERATION = f"{POLICY}.generation"


def read_plan(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> RunPlan:
    """Read the config of a run from a recipe, a YAML file, a run directory or nested values, apply overrides, run all
    checks that do not need an engine, and plan the run.

    Raises:
        ConfigError: If there are problems; lists all of them.
    """
    raw = read_raw(source, overrides)
    if raw.select("algorithm") is None:
        guesses = [name for name in names(ALGORITHMS) if name in raw.plain()]
        if len(guesses) == 1:
            raise _without_algorithm(raw, guesses[0])
    return _read(raw, source)


def _read(raw: RawConfig, source: str | Path | Mapping[str, Any]) -> RunPlan:
    algorithm = algorithm_of(raw)
    hints = ForeignHints(algorithm.name)

    def hint(key: str, value: Any) -> str:
        return _of_another_algorithm(key, algorithm) or hints(key, value)

    if algorithm.generates and not isinstance(source, Mapping) and is_run(Path(source).expanduser()):
        check_environments(raw)
    checks = PlanChecks(raw)
    try:
        resolved = resolve(raw, root_type(algorithm, raw, of_run=True), checks=[checks], hint=hint)
    except ConfigProblems as error:
        remarks = hints.remarks(raw.name) if raw.files else []
        if raw.files and len(keys := raw.upgraded(root_type(algorithm, raw), is_whole=False)[1].renamed) > 2:
            rewrite = f"To rewrite a file that has them: rl config upgrade {raw.files[-1]} --output FILE"
            remarks.append(f"{len(keys)} keys are those of an earlier version. {rewrite}")
        raise ConfigProblems("\n".join([str(error), *remarks]), error.problems) from None
    return checks.planned(resolved)


def changed_plan(plan: RunPlan, values: Mapping[str, Any], origin: str) -> RunPlan:
    """Return the plan of a config with other values of some keys; the same plan if there are none.

    Args:
        plan: Plan of a config that was read.
        values: Values by dotted key.
        origin: Origin of the values, for messages.

    Raises:
        ConfigError: If the changed config has problems; lists all of them.
    """
    if not values:
        return plan
    assert plan.raw is not None, "the plan of a config that was read"
    raw = plan.raw
    for key, value in values.items():
        nested = value
        for name in reversed(key.split(".")):
            nested = {name: nested}
        raw = raw.with_values(nested, origin)
    return _read(raw, plan.raw.plain())


def _of_another_algorithm(key: str, algorithm: AlgorithmPlugin) -> str:
    """Return the explanation of a key whose section other algorithms have; empty if none has it."""
    section = key.partition(".")[0]
    further = algorithm.scoring
    of_tasks = set() if further is None else {*further.root_keys} - {*algorithm.root_keys}
    if section in of_tasks or (further is not None and key.startswith(_GENERATION)):
        return (
            f"{algorithm.name} generates only to score tasks as it trains, and this config has none. Add them with "
            "eval.tasks and eval.period, or remove this key"
        )
    owners = [name for name, other in plugins(ALGORITHMS).items() if section in other.root_keys]
    if not owners or algorithm.name in owners:
        return ""
    if section == EVAL:
        # Users look for it with every algorithm that trains.
        remedy = "Validate it on rows instead: data.validation takes several datasets"
        return f"the model of {algorithm.name} generates nothing, so no tasks can score it. {remedy}"
    belongs = f"the algorithm{'s' if len(owners) > 1 else ''} {', '.join(owners)}"
    return (
        f"the section {section} belongs to {belongs}, and this config has algorithm: {algorithm.name}. Remove it, or "
        "choose another recipe (rl recipes lists them with their algorithms)"
    )


def _without_algorithm(raw: RawConfig, guess: str) -> ConfigProblems:
    """Return the error of a config without an algorithm. Its other problems are found with the algorithm of its
    sections."""
    remedy = f"The section {guess} suggests algorithm: {guess}"
    missing = Problem("algorithm", "must be set", allowed=", ".join(names(ALGORITHMS)), remedy=remedy)
    others: tuple[Problem, ...] = ()
    remarks: list[str] = []
    try:
        _read(raw.with_values({"algorithm": guess}, "guessed"), {})
    except ConfigProblems as error:
        others, remarks = error.problems, ForeignHints.remarks_in(str(error))
    except ConfigError as error:
        remarks = [str(error)]
    whole = refusal([missing, *others], raw)
    return ConfigProblems("\n".join([str(whole), *remarks]), whole.problems)


def read_model_plan(source: Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> RunPlan:
    """Read the config of a run, or of a single model, to start the policy only. The settings of generation do not have
    to match the devices.

    Args:
        source: YAML file of a resolved config, or plain values of `policy` and `cluster`.
        overrides: Keys to set, as `key=value`.

    Raises:
        ConfigError: If there are problems; lists all of them.
    """
    raw = load(source, overrides)
    sections: dict[str, Any] = {"policy": policy_type(generates=False), "cluster": ClusterConfig}
    if raw.select("algorithm") is None:
        kind = assemble("Model", sections)
        raw = of_this_version(raw, kind, source) if isinstance(source, Path) else raw
    else:
        raw = of_this_version(raw, type_of(raw), source) if isinstance(source, Path) else raw
        kind = type_of(raw, of_run=True)
    checks = PlanChecks(raw, (), (model_checks,))
    return checks.planned(resolve(raw, kind, checks=[checks]))


def read_raw(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> RawConfig:
    """Return the values that the user wrote, before they are validated. Keys of a validation that a later layer turns
    off with `data.validation: null` are left out.
    """
    found: str | Path | Mapping[str, Any] = source
    if not isinstance(source, Mapping):
        if problem := absent_run(str(source)):
            raise ConfigError(problem.message)
        named = CheckpointName.parse(source)
        if named is None and (reason := _no_config(str(source))):
            raise ConfigError(reason)
        folder = Path(source).expanduser() if named is None else named.run
        written = folder / CONFIG
        found = written if folder.is_dir() and written.is_file() else source
    raw = load(found, overrides, search=[RECIPES])
    if not isinstance(found, Mapping) and _is_recorded(Path(found).expanduser()):
        with suppress(ConfigError):  # reported when the config is read
            raw = of_this_version(raw, type_of(raw), Path(found).expanduser())
        if raw.origin("run_dir").source == raw.name:  # the folder may have been copied or moved
            raw = raw.with_values({"run_dir": str(Path(found).expanduser().absolute().parent)}, raw.name)
    raw = with_models_of_runs(raw)
    with suppress(ConfigError):  # reported when the config is read
        return without_validation(raw)
    return raw


def of_this_version(raw: RawConfig, root: type[Config], path: Path) -> RawConfig:
    """Return a recorded config under the keys of this version, and log its version if they are others. The type of the
    result may be another, because the names of some sections' types are among the values.

    Args:
        raw: Values of the file.
        root: Type of the config, by these values.
        path: The `config.yaml` of a run or a checkpoint.
    """
    upgraded, upgrade = raw.upgraded(root)
    if upgrade.renamed:
        _log_version(path.parent.absolute(), len(upgrade.renamed))
    return upgraded


def _is_recorded(path: Path) -> bool:
    """Return whether a file is the config that a run or an evaluation wrote into its folder."""
    beside = (DESCRIPTION, "plan.json", "eval.json")
    return path.name == CONFIG and any((path.parent / name).is_file() for name in beside)


@lru_cache
def _log_version(folder: Path, num_keys: int) -> None:
    # This is cached, because a command reads the config of a run several times.
    version = RunFolder(folder).description().versions.get("rl-launch") if is_run(folder) else None
    written_by = f"version {version}" if version else "an earlier version"
    keys = "1 key is read under its new name" if num_keys == 1 else f"{num_keys} keys are read under their new names"
    _log.warning("%s was written by %s; %s", folder, written_by, keys)


def _no_config(source: str) -> str:
    """Return what a file or folder in the place of a recipe is instead; empty if it can hold a config."""
    path = Path(source).expanduser()
    if path.is_dir() and not (path / "config.yaml").is_file():
        if (path / "config.json").is_file():
            return f"{source} is the folder of a model. Pass a recipe, and set policy.model_name={source}"
        return f"{source} is a folder without the config.yaml of a run. Pass a recipe, a YAML file or a run directory"
    if path.is_file() and kind_of(path.name):
        return f"{source} is data. Pass a recipe, and set data.train.data_path={source}"
    return ""


def check_environments(raw: RawConfig) -> None:
    """Refuse the config of a run that uses an environment which is not installed.

    Raises:
        ConfigError: If an environment is missing; contains its name.
    """
    known = names(ENVIRONMENTS)
    sections = raw.select("env") or {}
    own = [name for name, section in sections.items() if section and (section.get("type") or section.get("rewards"))]
    missing = [name for name in sections if name not in known and name not in own]
    if missing:
        listed = ", ".join(map(repr, missing))
        verb = "is" if len(missing) == 1 else "are"
        raise ConfigError(
            f"environment {listed} {verb} not installed, but {raw.name} has settings for it. Install the package that "
            f"the run was started with (installed environments: {', '.join(known) or 'none'})"
        )


_ENV = "env"
_DATA, _METRIC = "data.validation", "checkpointing.metric_name"


def without_validation(raw: RawConfig) -> RawConfig:
    """Return a config that has `data.validation: null`, and holds out no rows of training data to validate on, with the
    inherited keys off that ask for a validation or need one; other configs unchanged. Keys that were written together
    with `data.validation`, or over it, stay, and the checks refuse them.
    """
    data = raw.plain().get("data")
    if not isinstance(data, Mapping) or data.get("validation", data) is not None:
        return raw
    train = data.get("train")
    several = train if isinstance(train, list) else [train]
    if any(isinstance(each, Mapping) and each.get("split_validation_size") for each in several):
        return raw
    off: dict[str, Any] = dict(algorithm_of(raw).without_validation)
    checkpointing = raw.plain().get("checkpointing")
    metric = checkpointing.get("metric_name") if isinstance(checkpointing, Mapping) else None
    if str(metric).startswith(("val:", "val/")):
        off[_METRIC] = None
    place = raw.layer(_DATA)
    for key, value in off.items():
        if raw.is_written(key) and raw.layer(key) < place:
            *sections, name = key.split(".")
            nested: dict[str, Any] = {name: value}
            for section in reversed(sections):
                nested = {section: nested}
            raw = raw.with_values(nested, f"{_DATA}: null")
    return raw


class RunRecording(Recording):
    """Keep the sections of the training backends, the generation engine and the environments that a run uses. A driver
    with other installed plugins can then resume it.

    Args:
        environments: Names of the environments that the run uses; None to keep all while they are not known.
    """

    def __init__(self, environments: Collection[str] | None = None) -> None:
        self._environments = environments

    def used(self, config: RunConfig, tree: dict[str, Any]) -> dict[str, Any]:
        """Return the tree without the sections of plugins that the run does not use; the backend that trains a model is
        enabled in it."""
        plan = RunPlan.of(config)
        tree = plan.without_unused(tree)
        used = self._environments
        for name in names(ENVIRONMENTS) if used is not None else ():
            if used is not None and name not in used:
                tree = without(tree, (_ENV, name))
            elif name not in tree[_ENV]:
                # Only rows name it. The recorded defaults keep the run as it is if a later version has others.
                tree = _with(tree, (_ENV, name), plain(plugin(ENVIRONMENTS, name).config()))
        for model in plan.backends.models.values():
            tree = _with(tree, (*model.section.split("."), model.plugin.key, "enabled"), True)
        return tree

    def read(self, path: Path, like: Config) -> Config:
        """Return the config in the file, with the type of its own algorithm.

        Raises:
            ConfigError: If it uses a plugin that is not installed, or does not fit.
        """
        raw = load(path)
        check_environments(raw)
        raw = of_this_version(raw, type_of(raw), path)
        return resolve(raw, type_of(raw, of_run=True)).config


def recorded_environments(path: Path) -> list[str] | None:
    """Return the environments that a `config.yaml` has settings for; None if it cannot be read."""
    try:
        return list(load(path).select(_ENV) or {})
    except ConfigError:
        return None


def _with(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    head, *rest = path
    return {**tree, head: _with(tree[head], tuple(rest), value) if rest else value}
