"""`rl train`: one run of an algorithm, from its resolved config to its last checkpoint."""

from __future__ import annotations

import hashlib
import logging
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rl_algos.rollouts.recorded import RecordedTurns
from rl_core.config import as_written, to_yaml
from rl_core.errors import ConfigError, RLError
from rl_core.plugins import export_suffixes
from rl_core.rollouts.group import RolloutGroup
from rl_core.run import Components
from rl_launch.commands.preparation import DATA_CHECKS, FOLDER, MODEL_CHECKS, ROW_CHECKS, START_CHECKS, Preparation
from rl_launch.doctor.machine import gpu_names
from rl_launch.model_files.local_models import (
    TINY,
    TINY_VISION,
    WARMED_UP,
    models_folder,
    untrained_model,
    writable_models_folder,
)
from rl_launch.monitoring.run_monitoring import RunMonitoring
from rl_launch.placement.bundles import PlacementError
from rl_launch.planning.planned_steps import PhaseMemory, PlannedSteps
from rl_launch.root_config import DRAFTER, RunConfig, leaf_of, max_age, with_section, with_values
from rl_launch.run_config.plan import RunPlan
from rl_launch.run_config.reading import RunRecording, changed_plan, read_plan
from rl_launch.run_session import RunSession
from rl_launch.run_session.checkpoints.checkpoints import newest_checkpoint
from rl_launch.run_session.config import GuardrailConfig
from rl_launch.run_session.directory.branch import BranchPoint
from rl_launch.run_session.directory.lock import holder
from rl_launch.run_session.directory.recording import write_origins
from rl_launch.run_session.directory.remedies import finished
from rl_launch.run_session.directory.run_folder import RunFolder, is_run
from rl_launch.run_session.guardrails import FILE as GUARDRAILS
from rl_launch.run_session.guardrails import (
    GuardrailEvent,
    GuardrailRestart,
    Guardrails,
    changed_value,
    changes_of,
    read_events,
    write_changes,
)
from rl_launch.run_session.observer import RunObserver
from rl_launch.runtime.restoration import Restoration
from rl_launch.show.advice import advice

_log = logging.getLogger(__name__)


class TrainOutcome(NamedTuple):
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
        """End this process if a signal ended the run, as the signal would have: later stages need a finished run.

        Raises:
            SystemExit: With exit code 128 plus the number of the signal.
        """
        if self.stop_signal is not None:
            message = "%s ended the run before its last step. Run the same command again to resume"
            _log.warning(message, self.stop_signal.name)
            raise SystemExit(128 + self.stop_signal)


@dataclass(frozen=True)
class ReplayedSteps:
    """Steps that are made again with recorded completions.

    Args:
        turns: The completions.
        last: The last step that is made.
        as_trained: Returns a finished group as it is trained on; None to train on all rollouts.
        observer: Sees the phases of the steps; None for nobody.
    """

    turns: RecordedTurns
    last: int
    as_trained: Callable[[RolloutGroup], RolloutGroup] | None = None
    observer: RunObserver | None = None


def train(
    plan: RunPlan,
    *,
    run_dir: str | Path,
    title: str = "",
    fresh: bool = False,
    branch_point: BranchPoint | None = None,
    replayed: ReplayedSteps | None = None,
    shared: Callable[[Any], Components] | None = None,
) -> TrainOutcome:
    """Run the configured algorithm in a run directory, or resume the run that it holds. A run that lost a model worker
    or a node resumes from its newest checkpoint, on the remaining nodes. A finished run is left as it is.

    All checks that need no worker run before any process starts, the fastest first.

    Args:
        plan: Plan of the run.
        run_dir: Made, or resumed.
        title: Shown with the progress.
        fresh: Refuse to resume an earlier run.
        branch_point: The run and step that a new run starts from.
        replayed: Steps of that run that are made again; None to sample.
        shared: Function from the run's data to the objects of its algorithm, whose models other processes compute; None
            to start the models.

    Raises:
        ConfigError, DataError, RunDirectoryError, WorkerEnvironmentError: Before anything is started.
        RLError: If the run fails, with role, rank, node and phase.
    """
    started = time.monotonic()
    if (number := plan.config.policy.lora_cfg.max_adapters) > 1 and shared is None:
        raise ConfigError(
            f"policy.lora_cfg.max_adapters={number}: rl train trains one adapter. Remove this key, or train several "
            "with rl sweep, rl serve tinker or rl_launch.session. A run of a sweep is resumed by the sweep's command"
        )
    run = prepared(plan, run_dir, fresh=fresh, branch_point=branch_point)
    metrics = finished_metrics(run_dir, run.written) if run.branch is None else None
    if metrics is not None:
        return TrainOutcome(metrics)
    run.take(DATA_CHECKS)
    with opening(run, title=title, fresh=fresh, since=started, replayed=replayed) as opened:
        while True:
            try:
                start = opened.start() if shared is None else opened.start_on(shared)
                with start as (components, session):
                    run.plan.algorithm.run(run.plan.config, components, session)
                return TrainOutcome(session.last_metrics, session.stop_request.signal, session.is_finished)
            except GuardrailRestart as restart:
                opened.change(restart.event)
                run = opened.run
            except PlacementError as error:
                raise opened.restoration.failed(error) from None
            except RLError:
                if not opened.restoration.goes_on:
                    raise


def prepared(
    plan: RunPlan, run_dir: str | Path, *, fresh: bool = False, branch_point: BranchPoint | None = None
) -> Preparation:
    """Return the preparation of a run whose folder has been checked; see `train` for the arguments.

    Raises:
        ConfigError, RunDirectoryError: If the run cannot be in this folder.
    """
    run = Preparation(
        guarded(plan, Path(run_dir).expanduser()), run_dir, with_local_models, fresh=fresh, branch_point=branch_point
    )
    run.take([FOLDER])
    return run


@contextmanager
def opening(
    run: Preparation,
    *,
    title: str = "",
    fresh: bool = False,
    since: float | None = None,
    replayed: ReplayedSteps | None = None,
) -> Iterator[OpenedRun]:
    """Enter a context in which a run is monitored, and can be started and started again.

    Args:
        run: The run, whose data has been checked.
        title: Shown with the progress.
        fresh: Refuse to resume an earlier run.
        since: Start of the run's time limit, by `time.monotonic`; now if not given.
        replayed: Steps that are made again; None to sample.
    """
    plan, folder = run.written, Path(run.run_dir).expanduser()
    restoration = Restoration(saves=plan.config.checkpointing.enabled)

    def found(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
        return findings(rows, as_written(plan.root), of_changes=True)

    # A step that is made again is not acted on again.
    guardrails = Guardrails({} if replayed else limited(plan.config, folder), folder, found)
    exports = export_suffixes(plan.plugin.models(plan.config))
    if plan.config.policy.draft_head is not None:
        exports[DRAFTER] = f"_{DRAFTER}"
    with RunMonitoring(plan.config.logger, findings=findings, restarts=lambda: restoration.goes_on) as monitoring:
        if replayed is not None and replayed.observer is not None:
            monitoring.observer.observers.append(replayed.observer)
        monitoring.observer.observers.append(PlannedSteps(plan, title, gpu_names))
        sessions = partial(
            RunSession,
            run.run_dir,
            title=title,
            since=since,
            exports=exports,
            callbacks=run.callbacks,
            pusher=run.pusher,
            observer=monitoring.observer,
            restarts=lambda: restoration.goes_on,
            guardrails=guardrails,
            last_step=None if replayed is None else replayed.last,
        )
        yield OpenedRun(run, restoration, monitoring, guardrails, replayed, sessions, fresh=fresh)


class OpenedRun:
    """A run that can be started, and started again after a loss.

    Args:
        run: The run, whose data has been checked.
        restoration: Restores it after a loss.
        monitoring: Watches its workers.
        guardrails: Rules over its metrics.
        replayed: Steps that are made again; None to sample.
        sessions: Makes the session of a start.
        fresh: Refuse to resume an earlier run at the first start.
    """

    def __init__(
        self,
        run: Preparation,
        restoration: Restoration,
        monitoring: RunMonitoring,
        guardrails: Guardrails,
        replayed: ReplayedSteps | None,
        sessions: Callable[..., RunSession],
        *,
        fresh: bool,
    ) -> None:
        self.run, self.restoration = run, restoration
        self._monitoring, self._guardrails, self._replayed = monitoring, guardrails, replayed
        self._sessions, self._is_fresh = sessions, fresh

    def change(self, event: GuardrailEvent) -> None:
        """Change the run as a guardrail asked for; the next start goes on from a checkpoint."""
        folder, made = Path(self.run.run_dir).expanduser(), self.run
        run = Preparation(_changed(made.written, event, self._guardrails, folder), made.run_dir, with_local_models)
        run.take([FOLDER])
        run.take(DATA_CHECKS)
        run.callbacks, run.pusher, run.untried = made.callbacks, made.pusher, ()
        self.run = run

    @contextmanager
    def start_on(self, shared: Callable[[Any], Components]) -> Iterator[tuple[Components, RunSession]]:
        """Make the checks of files and rows, and enter a context of the run on models that are running elsewhere.

        Args:
            shared: Function from the run's data to the objects of its algorithm.
        """
        run = self.run
        self.restoration.goes_on = False
        run.take((*MODEL_CHECKS, *ROW_CHECKS))
        session = self._sessions(
            run.written.config, recording=RunRecording(()), branch=run.branch, fresh=self._is_fresh
        )
        self._is_fresh = False
        with session, session.with_models():
            if run.written.raw is not None:
                write_origins(session.directory.path, run.written.raw)
            with session.phase("starting"):
                components = shared(run.data)
            yield components, session

    @contextmanager
    def start(self) -> Iterator[tuple[Components, RunSession]]:
        """Make the remaining checks, and enter a context of the started run: the objects of its algorithm, and its
        session.

        Raises:
            RLError: If a check fails, or the start of a worker.
        """
        run, restoration, replayed = self.run, self.restoration, self._replayed
        restoration.goes_on = False
        run.take(START_CHECKS)
        plan, needs = run.plan, run.needs
        config = plan.config
        recording = RunRecording(needs.environments if needs is not None else ())
        session = self._sessions(run.written.config, recording=recording, branch=run.branch, fresh=self._is_fresh)
        self._is_fresh, run.untried = False, ()
        if not restoration.follows_a_loss:
            _log.info("run directory: %s", session.directory.path)

        # imports what checks that fail should not wait for
        from rl_algos.token_bytes import TokenTexts
        from rl_launch.cluster.ray_start import UNREACHABLE
        from rl_launch.cluster.virtual_cluster import VirtualCluster
        from rl_launch.runtime.driver_watch import CONNECT_MARGIN_S, DriverWatch
        from rl_launch.runtime.observed_steps import observe_steps
        from rl_launch.runtime.runtime import Runtime

        _log.info("starting Ray and the workers")
        # the run directory is taken after all checks, so that it stays free for another config after a refusal
        with session, ExitStack() as held:
            if run.written.raw is not None:
                write_origins(session.directory.path, run.written.raw)
            watch = held.enter_context(DriverWatch(session))
            with session.phase("starting"):
                after_a_loss = restoration.follows_a_loss
                timeout_s = config.cluster.process_timeout_s
                late = RLError(f"Ray did not answer within {timeout_s:g} s (cluster.process_timeout_s). {UNREACHABLE}")
                # a Ray that is started here has its own bound, which ends the run in order
                with watch.bounded(timeout_s + CONNECT_MARGIN_S, late):
                    cluster = held.enter_context(
                        VirtualCluster.of(config.cluster, run.device, after_a_loss=after_a_loss)
                    )
                watch.watch(cluster)
                logs, reads_load = session.directory.logs, config.logger.reads_workers
                started = Runtime(plan, run.envs, cluster, logs, profiling=config.profiling, reads_load=reads_load)
                runtime = held.enter_context(started)
                held.push(watch.begin_close)
                held.enter_context(restoration.judging(session, runtime.nodes.lost))
                components = runtime.components(run.data, needs, vocabulary=len(run.tokenizer))
                components = replace(components, evaluation=run.evaluated)
                if replayed is not None and runtime.rollout_pool is not None:
                    runtime.rollout_pool.with_turns = replayed.turns
                    runtime.rollout_pool.as_trained = replayed.as_trained
                session.observe(PhaseMemory(runtime.ranks))
                observe_steps(session, config.profiling, runtime.processes, runtime.profiled, held)
            if runtime.rollout_pool is not None:
                session.write_rollouts_by(runtime.rollout_pool.write_rollouts)
                runtime.rollout_pool.is_asked_to_end = session.stop_request.is_asked_by_signal
                session.read_token_texts_from(TokenTexts(run.tokenizer))
            with session.with_models(), self._monitoring.watching(runtime):
                yield components, session


def guarded(plan: RunPlan, run_dir: Path) -> RunPlan:
    """Return the plan with what guardrails set: steps that are skipped, and the changes that they have made in the run.

    Raises:
        RLError: If the record of earlier changes cannot be read.
    """
    for name, rule in plan.config.guardrails.items():
        changed_plan(plan, _changed_values(plan, rule.change), f"guardrails.{name}.change")
    rules = plan.config.guardrails.values()
    skipped = [rule.above for rule in rules if rule.action == "skip_step" and rule.above is not None]
    if skipped:
        plan = changed_plan(plan, {"policy.skipped_grad_norm": min(skipped)}, "guardrails")
    changes = changes_of(read_events(run_dir)) if is_run(run_dir) else {}
    if changes:
        listed = ", ".join(f"{key}={value}" for key, value in changes.items())
        _log.info("guardrails have changed this run: %s (%s)", listed, run_dir / GUARDRAILS)
        write_changes(run_dir, changes)
    return changed_plan(plan, changes, GUARDRAILS)


def limited(config: RunConfig, run_dir: Path) -> dict[str, GuardrailConfig]:
    """Return the guardrails of a run; one that lowers the age of rollouts acts as often as there is an age to lower."""
    taken, found = Counter(event.rule for event in read_events(run_dir)), max_age(config)
    age = 0 if found is None else found[1]
    return {
        name: rule
        if rule.action != "lower_staleness"
        else with_values(rule, {"max_actions": min(rule.max_actions, taken[name] + age)})
        for name, rule in config.guardrails.items()
    }


def _changed(plan: RunPlan, event: GuardrailEvent, guardrails: Guardrails, run_dir: Path) -> RunPlan:
    """Return the plan that a run goes on with after a guardrail acted, which is written into its folder."""
    change = dict(plan.config.guardrails[event.rule].change)
    if event.action == "lower_staleness":
        found = max_age(plan.config)
        assert found is not None, "the checks refuse it"
        key, age = found
        change = {key: age - 1}
    change = _changed_values(plan, change)
    # A change that the config refuses is not noted, so that the run can be resumed.
    changed_plan(plan, change, f"guardrails.{event.rule}.change")
    listed = ", ".join(f"{key}={value}" for key, value in change.items()) or "the same config"
    back = f"back to checkpoint step_{event.resumes_after}" if event.action == "rollback" else "on from its checkpoint"
    _log.warning("%s; the run goes %s with %s", event, back, listed)
    guardrails.note(replace(event, change=change))
    return guarded(plan, run_dir)


def _changed_values(plan: RunPlan, change: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that keys have after a change of a guardrail."""
    return {key: changed_value(value, leaf_of(plan.config, key), key) for key, value in change.items()}


def finished_metrics(run_dir: str | Path, plan: RunPlan) -> Mapping[str, float] | None:
    """Return the last metrics of a finished run, with a message in the log; None if the run is not finished."""
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


def with_local_models(plan: RunPlan, warmed_up: Callable[[str], Path] | None = None) -> RunPlan:
    """Return the plan with each model that is made on this machine replaced by its folder, and the file of
    the chat template by its text, because other machines may not have the file.

    Args:
        plan: Plan of a run.
        warmed_up: See `local_model`.
    """
    config, local = plan.config, partial(local_model, warmed_up=warmed_up)
    for key in plan.model_sections:
        section = plan.section(key)
        tokenizer = section.tokenizer.model_copy(update={"chat_template": section.tokenizer.template_text()})
        if tokenizer.name is not None:
            tokenizer = tokenizer.model_copy(update={"name": local(tokenizer.name)})
        changed = {"model_name": local(section.model_name), "tokenizer": tokenizer}
        config = with_section(config, key, with_values(section, changed))
    for key, name in plan.plugin.further_models(config).items():
        config = with_section(config, key, local(name))
    return plan.with_config(config)


def local_model(name: str, warmed_up: Callable[[str], Path] | None = None) -> str:
    """Return the folder of a model that is made on this machine, made if need be; any other name unchanged, except that
    `~` is replaced by the home folder.

    Args:
        name: Name of the model, as in a config.
        warmed_up: Function from the name of a warmed-up model to its folder. By default a missing model is trained.
    """
    if name in (TINY, TINY_VISION):
        return str(untrained_model(name))
    if name in WARMED_UP:
        return str((warmed_up or _warmed_up_model)(name))
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
        with suppress(OSError):  # another process was faster
            copy.rename(finished)


def _warmed_up_model(name: str) -> Path:
    recipe = WARMED_UP[name]
    plan = read_plan(recipe)
    finished = _warmed_up_folder(name, plan)
    run_dir = finished.with_name(finished.name.replace(name, recipe, 1))
    if not finished.exists():
        writable_models_folder()
        if other := holder(run_dir):
            _log.info("waiting for %s, which trains %s by %s in %s", other, name, recipe, run_dir)
            while holder(run_dir):
                time.sleep(1)
        _log.info("training %s by %s once, in %s", name, recipe, run_dir)
        train(plan, run_dir=run_dir, title="warm-up").exit_if_stopped()
        with suppress(FileExistsError):  # the one that was waited for has made it meanwhile
            finished.symlink_to((newest_checkpoint(run_dir) / "hf").relative_to(finished.parent), True)
    return finished


def _warmed_up_folder(name: str, plan: RunPlan) -> Path:
    """Return the folder of the model; another version of this package may have another recipe of that name."""
    version = hashlib.sha256(to_yaml(plan.root).encode()).hexdigest()[:8]
    return models_folder() / f"{name}-{version}"


def findings(
    rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any], *, of_changes: bool = False
) -> list[tuple[str, str]]:
    """Return the advice on the metrics of a run so far, except on its speed: its metric, and its text with the remedy.

    Args:
        rows: Metrics of every step.
        config: Config of the run, as nested plain values.
        of_changes: Leave out advice that is only shown, which guardrails do not act on.
    """
    return [
        (each.metrics[0], f"{each.found}: {each.remedy}")
        for each in advice(rows, {}, config)
        if each.metrics and not (of_changes and each.is_only_shown)
    ]
