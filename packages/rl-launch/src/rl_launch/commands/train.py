"""`rl train`: one run of an algorithm, from its resolved config to its last checkpoint."""

from __future__ import annotations

import hashlib
import logging
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rl_core.config import to_yaml
from rl_core.environments.trial import Trial
from rl_core.errors import ConfigError, RLError, RunDirectoryError
from rl_core.plugins import AlgorithmEvaluation, export_suffixes
from rl_launch.cluster.device import check_devices
from rl_launch.cluster.ray_address import check_ray_address
from rl_launch.model_files.local_models import MADE_HERE, TINY, TINY_VISION, WARMED_UP, models_folder, untrained_model
from rl_launch.model_files.model_facts import check_tokenizer
from rl_launch.model_files.model_folder import adapter_problems
from rl_launch.monitoring.run_monitoring import RunMonitoring, check_monitoring
from rl_launch.placement.bundles import PlacementError
from rl_launch.push.pusher import pusher_of
from rl_launch.root_config import DRAFTER, with_section, with_values
from rl_launch.run_config.checks import check_placement
from rl_launch.run_config.inputs import check_inputs
from rl_launch.run_config.plan import RunPlan
from rl_launch.run_config.profiling_checks import check_profiling
from rl_launch.run_config.reading import read_plan
from rl_launch.run_config.run_recording import RunRecording, recorded_environments
from rl_launch.runtime.environment_trials import trials_of, try_here, try_in
from rl_launch.runtime.restoration import Restoration
from rl_launch.session import RunDirectory, RunSession
from rl_launch.session.callbacks.callback_classes import make_callbacks
from rl_launch.session.checkpoints.checkpoints import newest_checkpoint
from rl_launch.session.directory.branch import Branch, BranchPoint
from rl_launch.session.directory.lock import FILE_NAME as LOCK
from rl_launch.session.directory.lock import holder
from rl_launch.session.directory.origins import write_origins
from rl_launch.session.directory.remedies import finished
from rl_launch.session.directory.row_files import names_of_run
from rl_launch.session.directory.run_folder import CONFIG, RunFolder, is_run
from rl_launch.session.directory.run_images import name_images
from rl_launch.session.directory.writable import check_writable
from rl_launch.session.tracking.trackers import check_mlflow_store
from rl_launch.session.tracking.writers import check_writers
from rl_launch.show.advice import advice

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """The end of a run.

    Args:
        metrics: Metrics of its last step.
        stop_signal: The signal that ended it, saved, before its last step; None if none did.
        is_finished: False if a signal or a time limit ended it before its last step; the same command resumes it.
    """

    metrics: Mapping[str, float]
    stop_signal: signal.Signals | None = None
    is_finished: bool = True

    def exit_if_stopped(self) -> None:
        """If a signal ended the run, end this process as the signal would have: later stages need a finished run.

        Raises:
            SystemExit: With exit code 128 plus the number of the signal.
        """
        if self.stop_signal is not None:
            _log.warning(
                "%s ended the run before its last step. Run the same command again to resume", self.stop_signal.name
            )
            raise SystemExit(128 + self.stop_signal)


def train(
    plan: RunPlan, *, run_dir: str | Path, title: str = "", fresh: bool = False, branch_point: BranchPoint | None = None
) -> Outcome:
    """Run the configured algorithm in a run directory, or resume the run that it holds. A run that lost a model worker
    or a node goes on from its newest checkpoint, on the remaining nodes. A finished run is left as it is.

    All checks that need no worker run before any process starts, the fastest first.

    Args:
        plan: Plan of the run.
        run_dir: Made, or resumed.
        title: Shown with the progress.
        fresh: Refuse to go on with an earlier run.
        branch_point: The run and step that a new run starts from.

    Raises:
        ConfigError, DataError, RunDirectoryError, WorkerEnvironmentError: Before anything is started.
        RLError: If the run fails, with role, rank, node and phase.
    """
    started = time.monotonic()
    config, plugin = plan.config, plan.plugin
    if not plugin.trains:
        raise ConfigError(f"algorithm: {plugin.name} does not train. Run this config with rl eval")
    branch = check_run_dir(run_dir, plan, fresh=fresh, branch_point=branch_point)
    metrics = finished_metrics(run_dir, plan) if branch is None else None
    if metrics is not None:
        return Outcome(metrics)
    name_images(config.policy.vision, run_dir)
    check_writers(config.logger)
    check_monitoring(config.logger)
    check_mlflow_store(config.logger)
    check_ray_address()
    check_devices(config.cluster)
    check_inputs(plan)
    check_adapters_of_made_models(plan)
    loaded = plan.algorithm.load(config)
    evaluates = plugin.evaluates_in_training is not None and plugin.evaluates_in_training(config)
    evaluation = plan.algorithm.evaluation(config) if evaluates else None
    untried = try_here(trials_of(plan, loaded, evaluation), config.cluster.worker_envs)
    callbacks = make_callbacks(config.callbacks)
    pusher = pusher_of(config.checkpointing)
    restoration = Restoration(saves=config.checkpointing.enabled)
    exports = export_suffixes(plugin.models(config))
    if config.policy.draft_head is not None:
        exports[DRAFTER] = f"_{DRAFTER}"
    with RunMonitoring(config.logger, findings=findings, restarts=lambda: restoration.goes_on) as monitoring:
        sessions = partial(
            RunSession,
            run_dir,
            config,
            title=title,
            since=started,
            exports=exports,
            callbacks=callbacks,
            pusher=pusher,
            observer=monitoring.observer,
        )
        start = partial(sessions, fresh=fresh, branch=branch)
        while True:
            try:
                return _run(plan, loaded, evaluation, untried, start, restoration, monitoring)
            except PlacementError as error:
                raise restoration.failed(error) from None
            except RLError:
                if not restoration.goes_on:
                    raise
            untried, start = [], sessions


def _run(
    plan: RunPlan,
    loaded: Any,
    evaluation: AlgorithmEvaluation | None,
    untried: Sequence[Trial],
    start: Callable[..., RunSession],
    restoration: Restoration,
    monitoring: RunMonitoring,
) -> Outcome:
    # imports transformers, which takes a second
    from rl_algos.token_bytes import TokenTexts
    from rl_algos.tokenizer import load_tokenizer

    restoration.goes_on = False
    given = plan.raw
    plan = with_local_models(plan)
    config, algorithm = plan.config, plan.algorithm
    tokenizer = load_tokenizer(config.policy.tokenizer, config.policy.model_name, config.policy.vision)
    check_tokenizer(tokenizer, config.policy)
    data = algorithm.prepare(config, tokenizer, loaded)
    needs = algorithm.rollouts(config, data) if plan.plugin.generates else None
    evaluated = None if evaluation is None else evaluation.plan(tokenizer)
    if evaluated is not None and needs is not None:
        needs = replace(needs, environments=needs.environments | evaluated.needs.environments)
    recording = RunRecording(needs.environments if needs is not None else ())
    session = start(recording=recording)
    if not restoration.follows_a_loss:
        _log.info("run directory: %s", session.directory.path)

    # Ray takes a second to import, which checks that fail should not wait for
    from rl_launch.cluster.virtual_cluster import VirtualCluster
    from rl_launch.commands.family_proof import prove_family
    from rl_launch.runtime.observed_steps import observe_steps
    from rl_launch.runtime.runtime import Runtime, check_engines, provision_workers

    device = plan.device
    check_placement(plan, device)
    check_profiling(plan, device)
    envs = provision_workers(plan, needs, device)
    try_in(envs.interpreters, untried)
    check_engines(plan, envs, device)
    for role, model in plan.backends.models.items():
        prove_family(plan.section(model.section), model.section, model.plugin, envs.interpreters[role])
    _log.info("starting Ray and the workers")
    # the run directory is taken after all checks, so that it stays free for another config after a refusal
    with session, ExitStack() as held:
        if given is not None:
            write_origins(session.directory.path, given)
        with session.phase("starting"):
            after_a_loss = restoration.follows_a_loss
            cluster = held.enter_context(VirtualCluster.of(config.cluster, device, after_a_loss=after_a_loss))
            logs, reads_load = session.directory.logs, config.logger.reads_workers
            started = Runtime(plan, envs, cluster, logs, profiling=config.profiling, reads_load=reads_load)
            runtime = held.enter_context(started)
            held.enter_context(restoration.judging(session, runtime.lost_nodes))
            components = replace(runtime.components(data, needs, vocabulary=len(tokenizer)), evaluation=evaluated)
            observe_steps(session, runtime, config.profiling, held)
        if runtime.rollout_pool is not None:
            session.write_rollouts_by(runtime.rollout_pool.write_rollouts)
            session.read_token_texts_from(TokenTexts(tokenizer))
        with session.with_models(), monitoring.watching(runtime):
            algorithm.run(config, components, session)
    return Outcome(session.last_metrics, session.stop_signal, session.is_finished)


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
    recording = RunRecording(recorded_environments(path / CONFIG) if is_run(path) else None)
    directory = RunDirectory(path, recording)
    if is_run(path) and branch_point is not None:
        known = directory.branch
        if known is None or not branch_point.is_of(known):
            raise RunDirectoryError(
                f"{run_dir} already holds a run that did not branch from {branch_point}. Choose another run_dir for "
                "the branch; to resume that run, leave --from out."
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


def finished_metrics(run_dir: str | Path, plan: RunPlan) -> Mapping[str, float] | None:
    """The last metrics of a finished run, with a message in the log; None if the run is not finished."""
    path = Path(run_dir).expanduser()
    if not is_run(path):
        return None
    run = RunFolder(path)
    steps, saves = run.checkpoint_steps(), plan.config.checkpointing.enabled
    message = finished(str(path), run.state(), steps[-1] if steps else None, plan.root, saves=saves)
    if not message:
        return None
    _log.info("%s", message)
    return {name: value for name, value in run.last_metrics().items() if name != "step" and value is not None}


def check_adapters_of_made_models(plan: RunPlan) -> None:
    """Refuse adapters on layers that a model made on this machine does not have, as `read_plan` does for folders.

    Raises:
        ConfigError: naming the layers.
    """
    for key in plan.model_sections:
        section, lora = plan.section(key), plan.section(key).lora_cfg
        if section.model_name in MADE_HERE and lora.enabled and lora.target_modules and not lora.match_all_linear:
            # the warmed-up model, which takes minutes to make, has the same layers
            folder = str(untrained_model(section.model_name))
            for problem in adapter_problems(f"{key}.lora_cfg.target_modules", folder, lora.target_modules):
                raise ConfigError(f"{problem.key}: {problem.message}")


def with_local_models(plan: RunPlan) -> RunPlan:
    """The plan with the names of models that are made on this machine replaced by their folders, and the file of the
    chat template by its text, because other machines may not have the file.
    """
    config = plan.config
    for key in plan.model_sections:
        section = plan.section(key)
        tokenizer = section.tokenizer.model_copy(update={"chat_template": section.tokenizer.template_text()})
        if tokenizer.name is not None:
            tokenizer = tokenizer.model_copy(update={"name": local_model(tokenizer.name)})
        changed = {"model_name": local_model(section.model_name), "tokenizer": tokenizer}
        config = with_section(config, key, with_values(section, changed))
    for key, name in plan.plugin.further_models(config).items():
        config = with_section(config, key, local_model(name))
    return plan.with_config(config)


def local_model(name: str) -> str:
    """The folder of a model that is made on this machine, made if need be; any other name unchanged, except that `~` is
    replaced by the home folder.
    """
    if name in (TINY, TINY_VISION):
        return str(untrained_model(name))
    if name in WARMED_UP:
        return str(_warmed_up_model(name))
    return str(Path(name).expanduser()) if name.startswith("~") else name


def keep_warmed_up(name: str, model: Path) -> None:
    """Keep a model that another run of the recipe of `WARMED_UP` has made under its name, unless there is one.

    Args:
        name: Of the model, such as `tiny-arithmetic-sft`.
        model: Folder of Hugging Face files, which is copied.
    """
    finished = _warmed_up_folder(name, read_plan(WARMED_UP[name]))
    if finished.exists():
        return
    finished.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=finished.parent) as scratch:
        copy = Path(shutil.copytree(model, Path(scratch) / name))
        with suppress(OSError):  # another one was faster
            copy.rename(finished)


def _warmed_up_model(name: str) -> Path:
    recipe = WARMED_UP[name]
    plan = read_plan(recipe)
    finished = _warmed_up_folder(name, plan)
    run_dir = finished.with_name(finished.name.replace(name, recipe, 1))
    if not finished.exists():
        if other := holder(run_dir):
            _log.info("waiting for %s, which trains %s by SFT in %s", other, plan.config.policy.model_name, run_dir)
            while holder(run_dir):
                time.sleep(1)
        _log.info("training %s by SFT once, in %s", plan.config.policy.model_name, run_dir)
        train(plan, run_dir=run_dir, title="warm-up").exit_if_stopped()
        with suppress(FileExistsError):  # the one that was waited for has made it meanwhile
            finished.symlink_to((newest_checkpoint(run_dir) / "hf").relative_to(finished.parent), True)
    return finished


def _warmed_up_folder(name: str, plan: RunPlan) -> Path:
    """Where the model is; another version of this package may have another recipe of that name."""
    version = hashlib.sha256(to_yaml(plan.root).encode()).hexdigest()[:8]
    return models_folder() / f"{name}-{version}"


def findings(rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The advice on the metrics of a run so far, except on its speed: what each is about, and its text with the remedy.

    Args:
        rows: Metrics of every step.
        config: Config of the run, as nested plain values.
    """
    return [(each.metrics[0], f"{each.found}: {each.remedy}") for each in advice(rows, {}, config) if each.metrics]
