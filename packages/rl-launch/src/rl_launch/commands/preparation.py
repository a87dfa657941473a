"""The preparation of a run: everything that precedes the start of Ray, as one list of checks.

`rl train` makes the checks in their order and stops at the first that fails. `rl doctor` makes the same checks, reports
each that fails, and leaves out those that would first download rows, build an environment or train a model.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from rl_algos.data.config import DataConfig
from rl_algos.rollouts.config import RolloutConfig
from rl_core.algorithm import AlgorithmEvaluation
from rl_core.config import locale_problem, option
from rl_core.devices import Device
from rl_core.environments.trial import Trial
from rl_core.errors import ConfigError, ConfigProblems, DataChanged, RLError, RunDirectoryError
from rl_core.plugins import BackendPlugin, MeshCase, RolloutNeeds
from rl_core.selfcheck.cases import FamilyCase
from rl_launch.cluster.device import check_devices
from rl_launch.cluster.machine import check_ray_address
from rl_launch.doctor.checks import processes_problem, ranks_keys
from rl_launch.doctor.family import FamilyTable, cases, described, kind_of
from rl_launch.doctor.machine import Machine
from rl_launch.doctor.needs import needs_of_plan
from rl_launch.model_files.local_models import MADE_HERE, untrained_model
from rl_launch.model_files.model_facts import check_tokenizer
from rl_launch.model_files.model_folder import adapter_problems, config_folder, hf_config_fields, whole_config_fields
from rl_launch.monitoring.run_monitoring import check_monitoring
from rl_launch.placement.topology import GENERATION
from rl_launch.push.pusher import Pusher, pusher_of
from rl_launch.root_config import with_section, with_values
from rl_launch.run_config.checks import check_models, check_placement
from rl_launch.run_config.inputs import check_inputs, check_profiling
from rl_launch.run_config.plan import RunPlan
from rl_launch.run_config.reading import RunRecording, recorded_environments
from rl_launch.run_session import RunDirectory
from rl_launch.run_session.callbacks import MadeCallback, make_callbacks
from rl_launch.run_session.checkpoints.checkpoints import saved_state
from rl_launch.run_session.directory.branch import Branch, BranchPoint
from rl_launch.run_session.directory.lock import FILE_NAME as LOCK
from rl_launch.run_session.directory.remedies import train_command
from rl_launch.run_session.directory.row_files import name_images, names_of_run
from rl_launch.run_session.directory.run_folder import CONFIG, RunFolder, is_run
from rl_launch.run_session.directory.writable import check_writable
from rl_launch.run_session.tracking.trackers import check_mlflow_store
from rl_launch.run_session.tracking.writers import check_writers
from rl_launch.runtime.role_envs import load_agent_in, role_specs, trials_of, try_here, try_in
from rl_launch.worker_envs.node_build import default_root
from rl_launch.worker_envs.provision import DriverEnvs, availability_of, check_home
from rl_launch.worker_envs.variables import worker_process_environment

_log = logging.getLogger(__name__)

_VERSIONS = """
from importlib.metadata import distributions
print("\\n".join(sorted({f"{each.name}=={each.version}" for each in distributions()})))
"""


def prove_family(section: Any, key: str, plugin: BackendPlugin, python: str) -> None:
    """Check that a model's family trains correctly on its mesh, unless tests or an earlier check cover it.

    A mesh that computes slightly wrong results trains all the same, unnoticed. The check trains a tiny random model of
    the family on the run's own axes, two ranks on each, and compares it with one process. It takes seconds to a minute
    and is kept under `RL_HOME`, by family, mesh and the versions installed in the trainer's environment. Families that
    the backend ships results for, in its table, are not checked again.

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
    if section.trust_remote_code is not None:
        _log.warning("%s has code of its own, which has not been checked on %s", model, case)
        return
    if section.family_check == "off":
        _log.warning("%s has not been checked on %s, because %s is off", family, case, switch)
        return
    installed = _versions(python)
    table, found = FamilyTable.of(plugin), None
    if section.vision.enabled:
        seen = str(whole_config_fields(model).get("model_type", ""))
        found = table.find(fields, case, plugin.config, installed, seen)
    found = found or table.find(fields, case, plugin.config, installed)
    if found is None:
        # the result depends on the model's kinds of layers, and not on their sizes
        text = json.dumps([plugin.name, kind_of(fields), asdict(case), installed], sort_keys=True)
        file = f"{family}-{hashlib.sha256(text.encode()).hexdigest()[:20]}.json"
        found = _proof(default_root().parent / "proofs" / file, plugin, model, case, python, switch)
    if found.verdict != "exact":
        raise ConfigError(
            f"a tiny model of the family {family} does not train correctly with the {plugin.name} backend on this "
            f"mesh: {' '.join(described(found).split())}. Choose another mesh or backend (rl doctor model {model} "
            f"--backend {plugin.name} tries all of them), or set {switch}=off to train anyway"
        )


def _versions(python: str) -> dict[str, str]:
    """Return the version of each package in an environment."""
    command, variables = [python, "-c", _VERSIONS], worker_process_environment(python)
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        raise RLError(f"{python} does not list its packages: {done.stderr.strip()}")
    return dict(line.split("==", 1) for line in done.stdout.splitlines())


def _proof(path: Path, plugin: BackendPlugin, model: str, case: MeshCase, python: str, switch: str) -> FamilyCase:
    """Return the stored result, or a new one after storing it."""
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


@dataclass
class Preparation:
    """A run that is being prepared, with the results of its checks.

    Args:
        written: Plan of the run, as the user wrote it.
        run_dir: Folder of the run, made or resumed once it starts.
        local: Function that replaces each model made on this machine by its folder.
        fresh: Refuse to resume an earlier run.
        branch_point: The run and step that a new run starts from.
        known_device: The device if it is known; otherwise the machine, or the cluster at RAY_ADDRESS, is asked.
    """

    written: RunPlan
    run_dir: str | Path
    local: Callable[[RunPlan], RunPlan]
    fresh: bool = False
    branch_point: BranchPoint | None = None
    known_device: Device | None = None

    branch: Branch | None = field(init=False, default=None)
    loaded: Any = field(init=False, default=None)
    evaluation: AlgorithmEvaluation | None = field(init=False, default=None)
    untried: Sequence[Trial] = field(init=False, default=())
    callbacks: list[MadeCallback] = field(init=False, default_factory=list)
    pusher: Pusher | None = field(init=False, default=None)
    plan: RunPlan = field(init=False)
    tokenizer: Any = field(init=False, default=None)
    data: Any = field(init=False, default=None)
    needs: RolloutNeeds | None = field(init=False, default=None)
    evaluated: Any = field(init=False, default=None)
    envs: DriverEnvs = field(init=False)

    def __post_init__(self) -> None:
        self.plan = self.written

    @cached_property
    def device(self) -> Device:
        """Device of the models."""
        return self.known_device or self.written.device

    @property
    def evaluates(self) -> bool:
        """True if the run scores tasks as it trains."""
        plugin = self.written.plugin
        return plugin.evaluates_in_training is not None and plugin.evaluates_in_training(self.written.config)

    def take(self, checks: Sequence[StartCheck]) -> None:
        """Make checks in their order; the first that fails raises."""
        for check in checks:
            check.look(self)


@dataclass(frozen=True)
class StartCheck:
    """A check before the start of Ray.

    Args:
        name: Name in the report of `rl doctor`.
        look: Makes the check and keeps its result; raises an `RLError` for a problem that the user has to solve.
        after: Names of checks whose results it needs.
        waits: Function to the reason why `rl doctor` cannot make it yet; empty if it can.
        machine: Names of findings on the machine that report the same in more detail.
    """

    name: str
    look: Callable[[Preparation], None]
    after: tuple[str, ...] = ()
    waits: Callable[[Preparation], str] = lambda _: ""
    machine: tuple[str, ...] = ()


def check_run_dir(
    run_dir: str | Path, plan: RunPlan, *, fresh: bool, branch_point: BranchPoint | None = None
) -> Branch | None:
    """Refuse a folder that the run cannot use, and return the start of a new branch. A folder that does not exist, is
    empty, or holds an interrupted start is left as it is: it becomes a run after all other checks.

    Raises:
        RunDirectoryError: As `RunDirectory.open`, and if a branch is to begin in the folder of another run.
        ConfigError: If a branch changes keys that it cannot change.
    """
    path = Path(run_dir).expanduser().absolute()
    if problem := locale_problem(str(path)):
        raise RunDirectoryError(f"run_dir: {problem.message}.")
    check_home()
    recording = RunRecording(recorded_environments(path / CONFIG) if is_run(path) else None)
    directory = RunDirectory(path, recording)
    if is_run(path) and branch_point is not None:
        known = directory.branch
        if known is None or not branch_point.is_of(known):
            raise RunDirectoryError(
                f"{run_dir} already holds a run that did not branch from {branch_point}. Choose another run_dir for "
                f"the branch; to resume that run, leave {option('--from', 'branch_from')} out."
            )
    names = names_of_run(path) if path.is_dir() else set()
    if names and (LOCK not in names or directory.config.is_file()):
        directory.open(plan.root, fresh=fresh)
        directory.close()
    else:
        check_writable(path)
    if branch_point is None or is_run(path):
        return None
    recording = RunRecording(recorded_environments(branch_point.run.path / CONFIG))
    return branch_point.branch(plan.root, recording)


def check_adapters_of_made_models(plan: RunPlan) -> None:
    """Refuse adapters on layers that a model made on this machine does not have, as `read_plan` does for folders.

    Raises:
        ConfigError: If there are any; lists the layers.
    """
    for key in plan.model_sections:
        section, lora = plan.section(key), plan.section(key).lora_cfg
        if section.model_name in MADE_HERE and lora.enabled and lora.target_modules and not lora.match_all_linear:
            # the warmed-up model, which takes minutes to make, has the same layers
            folder = str(untrained_model(section.model_name))
            problems = list(adapter_problems(f"{key}.lora_cfg.target_modules", folder, lora.target_modules))
            if problems:
                raise ConfigProblems("\n".join(f"{each.key}: {each.message}" for each in problems), problems)


def _take_run_dir(run: Preparation) -> None:
    if not run.written.plugin.trains:
        raise ConfigError(
            f"algorithm: {run.written.plugin.name} does not train. Run this config with "
            f"{option('rl eval', 'rl_launch.evaluate')}"
        )
    run.branch = check_run_dir(run.run_dir, run.written, fresh=run.fresh, branch_point=run.branch_point)


def _check_trackers(run: Preparation) -> None:
    logger = run.written.config.logger
    check_writers(logger)
    check_monitoring(logger)
    check_mlflow_store(logger)


def _check_devices(run: Preparation) -> None:
    check_ray_address()
    check_devices(run.written.config.cluster)


def _check_memory(run: Preparation) -> None:
    if os.environ.get("RAY_ADDRESS"):
        return  # the processes run elsewhere
    memory, needs = Machine().memory_bytes, needs_of_plan(run.written, "", num_gpus=int(run.device.runs_on_gpus))
    if problem := processes_problem(memory, needs):
        raise ConfigError(f"cluster: {problem} of memory, and this machine has less. Lower {ranks_keys(needs)}")


def _read_rows(run: Preparation) -> None:
    name_images(run.written.config.policy.vision, run.run_dir)
    run.loaded = run.written.algorithm.load(run.written.config)
    if run.evaluates:
        run.evaluation = run.written.algorithm.evaluation(run.written.config)


def _try_environments(run: Preparation) -> None:
    trials = trials_of(run.written, run.loaded, run.evaluation)
    run.untried = try_here(trials, run.written.config.cluster.worker_envs)


def _make_callbacks(run: Preparation) -> None:
    run.callbacks = make_callbacks(run.written.config.callbacks)


def _open_destination(run: Preparation) -> None:
    run.pusher = pusher_of(run.written.config.checkpointing)


def _load_tokenizer(run: Preparation) -> None:
    # imports transformers, which takes a second
    from rl_algos.tokenizer import load_tokenizer

    run.plan = run.local(run.written)
    policy = run.plan.config.policy
    run.tokenizer = load_tokenizer(policy.tokenizer, policy.model_name, policy.vision)
    check_tokenizer(run.tokenizer, policy)


def _check_models(run: Preparation) -> None:
    config, names = run.plan.config, dict[str, str]()
    for key in run.plan.model_sections:
        section = run.plan.section(key)
        folder = str(config_folder(section.model_name))
        names[folder] = run.written.section(key).model_name
        config = with_section(config, key, with_values(section, {"model_name": folder}))
    check_models(run.plan.with_config(config), names)


def _prepare_prompts(run: Preparation) -> None:
    plan = run.plan
    run.data = plan.algorithm.prepare(plan.config, run.tokenizer, run.loaded)
    run.needs = plan.algorithm.rollouts(plan.config, run.data) if plan.plugin.generates else None
    run.evaluated = None if run.evaluation is None else run.evaluation.plan(run.tokenizer)
    if run.evaluated is not None and run.needs is not None:
        run.needs = replace(run.needs, environments=run.needs.environments | run.evaluated.needs.environments)


def _compare_data(run: Preparation) -> None:
    """Refuse to resume in the middle of other data; a new branch starts at the beginning of them."""
    folder = Path(run.run_dir).expanduser()
    branch = RunDirectory(folder).branch if is_run(folder) else run.branch
    found = branch.checkpoint if branch is not None and branch.keeps_position else None
    if is_run(folder) and (steps := RunFolder(folder).checkpoint_steps()):
        found = folder / "checkpoints" / f"step_{steps[-1]}"
    if found is None:
        return
    try:
        run.plan.algorithm.check_data(run.data, partial(saved_state, found))
    except DataChanged as error:
        if run.branch is None:
            command = train_command(str(found.parent.parent), (), {}, branches=True)
            raise DataChanged(
                f"{error}. To resume {run.run_dir}, restore the data and its settings. To continue training with the "
                f"data as it is, from its beginning, start a new run from this one:\n  {command}"
            ) from None
        run.branch = replace(run.branch, keeps_position=False)
    except (OSError, ValueError, KeyError):
        return  # the restore reports the missing parts of the checkpoint


def _check_placement(run: Preparation) -> None:
    check_placement(run.plan, run.device)
    check_profiling(run.plan, run.device)


def _provide_environments(run: Preparation) -> None:
    from rl_launch.runtime.processes import provision_workers

    run.envs = provision_workers(run.plan, run.needs, run.device)
    try_in(run.envs.interpreters, run.untried)


def _load_agent(run: Preparation) -> None:
    played_by = {} if run.needs is None else run.needs.program_args
    if function := played_by.get("function"):
        load_agent_in(
            f"{run.plan.plugin.name}.agent", run.envs.interpreters[GENERATION], function, played_by["config"].env
        )


def _check_engines(run: Preparation) -> None:
    from rl_launch.runtime.processes import check_engines

    check_engines(run.plan, run.envs, run.device)


def _prove_families(run: Preparation) -> None:
    for role, model in run.plan.backends.models.items():
        section = run.plan.section(model.section)
        prove_family(section, model.section, model.plugin, run.envs.interpreters[role])


def _to_download(run: Preparation) -> str:
    """Return why the rows of a run cannot be read without a download; empty if they can."""
    # imports tokenizers
    from rl_algos.data.inputs import network_sources
    from rl_algos.evaluation.tasks import task_of

    config: Any = run.written.config
    data = config.data if "data" in type(config).model_fields else None
    if not isinstance(data, DataConfig):
        return ""
    datasets = [*data.train_datasets, *data.validation_datasets]
    if run.evaluates:
        datasets += [task_of(each, config.eval, data).dataset for each in config.eval.tasks]
    for section in vars(config).values():
        datasets += section.further_datasets if isinstance(section, RolloutConfig) else ()
    remote = network_sources(datasets)
    return f"{', '.join(remote)} would be downloaded (rl data show reads rows)" if remote else ""


def _to_build(run: Preparation) -> str:
    """Return which environments of workers have to be built first; empty if all exist."""
    specs = role_specs(run.plan.backends, (), run.device)
    found = availability_of(specs.values(), run.plan.config.cluster.worker_envs)
    missing = [role for role, spec in specs.items() if not found[spec].python]
    return f"the environments of {', '.join(missing)} are not built yet (rl worker-envs builds them)" if missing else ""


def _to_push(run: Preparation) -> str:
    """Return why the destination of pushes is not tried; empty if there is none."""
    url = run.written.config.checkpointing.push_to
    return f"the run proves when it starts that {url} can be written to" if url else ""


FOLDER = StartCheck("run directory", _take_run_dir)
"""The first check; a finished run needs no other."""

DATA_CHECKS = (
    StartCheck("trackers", _check_trackers),
    StartCheck("devices", _check_devices, machine=("ray", "gpus")),
    StartCheck("memory", _check_memory, after=("devices",), machine=("memory",)),
    StartCheck("inputs", lambda run: check_inputs(run.written)),
    StartCheck("adapters", lambda run: check_adapters_of_made_models(run.written)),
    StartCheck("rows", _read_rows, after=("inputs",), waits=_to_download),
    StartCheck("rewards", _try_environments, after=("rows",)),
    StartCheck("callbacks", _make_callbacks),
    StartCheck("push", _open_destination, waits=_to_push),
)
"""Checks that a command makes once."""

ROW_CHECKS = (
    StartCheck("prompts", _prepare_prompts, after=("rows", "tokenizer")),
    StartCheck("data", _compare_data, after=("prompts", "run directory")),
)
"""Checks of the rows of a run with its tokenizer."""

MODEL_CHECKS = (
    StartCheck("tokenizer", _load_tokenizer, after=("inputs",)),
    StartCheck("models", _check_models, after=("tokenizer",)),
)
"""Checks of the files of models."""

WORKER_CHECKS = (
    StartCheck("placement", _check_placement, after=("devices",)),
    StartCheck("worker environments", _provide_environments, after=("models", "placement"), waits=_to_build),
    StartCheck("agent", _load_agent, after=("worker environments",)),
    StartCheck("engines", _check_engines, after=("worker environments",)),
    StartCheck("model families", _prove_families, after=("engines",)),
)
"""Checks of the processes of a run."""

START_CHECKS = (*MODEL_CHECKS, *ROW_CHECKS, *WORKER_CHECKS)
"""Checks before each start, also before a start after a loss."""

EVALUATION_CHECKS = (
    StartCheck("devices", _check_devices, machine=("ray", "gpus")),
    StartCheck("inputs", lambda run: check_inputs(run.written, is_evaluation=True)),
)
"""Checks of a config that only evaluates."""


def checks_of(plan: RunPlan) -> tuple[StartCheck, ...]:
    """Return the checks that `rl train`, or `rl eval` for a config that does not train, makes before it starts Ray."""
    return (FOLDER, *DATA_CHECKS, *START_CHECKS) if plan.plugin.trains else EVALUATION_CHECKS
