"""Runs of a sweep that train at the same time, each an adapter of its own on one base model."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rl_core.config import as_written
from rl_core.errors import RLError
from rl_launch.commands.preparation import MODEL_CHECKS, WORKER_CHECKS, Preparation
from rl_launch.commands.start import GivenRun, run_of
from rl_launch.commands.train import TrainOutcome, train, with_local_models
from rl_launch.root_config import POLICY, with_section, with_values
from rl_launch.run_config.plan import RunPlan
from rl_launch.run_session import show_logs

if TYPE_CHECKING:
    from rl_launch.runtime.shared_base import SharedBase

_log = logging.getLogger(__name__)

BASE_MODULE = "rl_launch.runtime.shared_base"

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class SweptRun(NamedTuple):
    """A run of a sweep.

    Args:
        given: The run.
        recipe: Recipe, file or run directory that its config is read from.
        overrides: Keys that are set.
    """

    given: GivenRun
    recipe: str
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of its folder."""
        return self.given.run_dir.name


def shares_a_base(plan: RunPlan) -> bool:
    """Return whether a run of a sweep trains next to others on one base."""
    return plan.config.policy.lora_cfg.max_adapters > 1


def shared_problem(plan: RunPlan) -> str:
    """Return why a run cannot train on a base that others share; empty if it can."""
    evaluates = plan.plugin.evaluates_in_training
    others = sorted(set(plan.backends.models) - {POLICY})
    if plan.plugin.generates or others:
        reason = f"{plan.plugin.name} has {', '.join(others) if others else 'rollouts'}"
    elif plan.backends.models[POLICY].spec.role != "policy":
        reason = f"{plan.plugin.name} trains a head that its runs do not share"
    elif evaluates is not None and evaluates(plan.config):
        reason = "eval.period scores tasks with an engine"
    else:
        return _setting_problem(plan)
    return (
        f"policy.lora_cfg.max_adapters: only runs that learn from given rows, as sft and dpo do, can share a base, and "
        f"{reason}. Remove this key to train one run after another"
    )


def _setting_problem(plan: RunPlan) -> str:
    """Return which setting acts on the model or its processes, which others share; empty if none does."""
    for name, rule in plan.config.guardrails.items():
        if rule.action not in ("warn", "stop"):
            return (
                f"guardrails.{name}.action: {rule.action} changes the model's steps, which runs on one base share; set "
                "warn or stop, or remove policy.lora_cfg.max_adapters"
            )
    if plan.config.profiling.steps is not None:
        return "profiling.steps: the processes of the model are shared; remove it, or policy.lora_cfg.max_adapters"
    return ""


def train_together(
    runs: Sequence[SweptRun], folder: Path, explained: Callable[[Exception, Path], str]
) -> tuple[dict[str, str], TrainOutcome | None]:
    """Train runs that share a base, up to `max_adapters` at a time, each in a process of its own.

    Args:
        runs: The runs.
        folder: Folder of the sweep, for logs.
        explained: Returns the message for an error of the run in a folder.

    Returns:
        As `run_sweep`.

    Raises:
        RLError: If the base does not start.
    """
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    base = Preparation(_base_plan([run.given.plan for run in runs]), folder, with_local_models)
    base.take(MODEL_CHECKS)
    context = _forks()
    base.take(WORKER_CHECKS)

    # imports what checks that fail should not wait for
    from rl_launch.cluster.virtual_cluster import VirtualCluster
    from rl_launch.runtime.runtime import Runtime
    from rl_launch.runtime.shared_base import SharedBase

    config = base.plan.config
    with VirtualCluster.of(config.cluster, base.device) as cluster, Runtime(base.plan, base.envs, cluster, logs) as up:
        slots = config.policy.lora_cfg.max_adapters
        processes = _Processes(SharedBase(up.models()[POLICY], slots), logs, context)
        with processes.forwarding_signals():
            return processes.run(runs, slots, explained)


def _forks() -> ForkServerContext:
    """Return a context whose processes are forks of one that imports meanwhile what this one has imported for rows."""
    context = multiprocessing.get_context("forkserver")
    roots = {"rl_algos", "tokenizers", "transformers"}
    context.set_forkserver_preload(
        [__name__, BASE_MODULE, *(name for name in tuple(sys.modules) if name.partition(".")[0] in roots)]
    )
    forkserver.ensure_running()
    return context


@dataclass
class _Trained:
    """A run in its process."""

    run: SweptRun
    process: BaseProcess
    outcome: Connection
    server: threading.Thread


class _Processes:
    """The processes of runs on a base.

    Args:
        base: Answers their calls.
        logs: Folder for what they print.
        context: Starts them.
    """

    def __init__(self, base: SharedBase, logs: Path, context: ForkServerContext) -> None:
        self._base, self._logs, self._context = base, logs, context
        self._alive: dict[int, _Trained] = {}
        self._signal: signal.Signals | None = None

    def run(
        self, runs: Sequence[SweptRun], slots: int, explained: Callable[[Exception, Path], str]
    ) -> tuple[dict[str, str], TrainOutcome | None]:
        """Make the runs; see `train_together`."""
        waiting, failures = list(runs), dict[str, str]()
        try:
            while self._alive or (waiting and self._signal is None):
                while waiting and len(self._alive) < slots and self._signal is None:
                    self._start(waiting.pop(0))
                ready = wait(list(self._alive), timeout=1.0)
                for ended in [self._alive.pop(sentinel) for sentinel in list(self._alive) if sentinel in ready]:
                    error = self._end(ended)
                    if error is not None:
                        failures[ended.run.name] = explained(error, ended.run.given.run_dir)
                        _log.warning("%s failed: %s", ended.run.name, failures[ended.run.name])
                    else:
                        _log.info("%s has ended", ended.run.name)
                if self._base.death is not None:
                    failures |= {run.name: explained(self._base.death, run.given.run_dir) for run in waiting}
                    waiting.clear()
        finally:
            for left in self._alive.values():
                left.process.kill()
                left.process.join()
        stopped = None if self._signal is None else TrainOutcome({}, self._signal, is_finished=False)
        return failures, stopped

    @contextmanager
    def forwarding_signals(self) -> Iterator[None]:
        """Enter a context in which signals that end this process end the runs, which save."""

        def forward(number: int, frame: object) -> None:
            self._signal = signal.Signals(number)
            for trained in self._alive.values():
                with suppress(ProcessLookupError):
                    os.kill(trained.process.pid or 0, number)

        before = {number: signal.signal(number, forward) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _start(self, run: SweptRun) -> None:
        ours, theirs = self._context.Pipe()
        outcome, told = self._context.Pipe(duplex=False)
        args = (theirs, told, run.recipe, run.overrides, str(self._logs / f"{run.name}.log"))
        process = self._context.Process(target=_train, args=args, name=run.name)
        process.start()
        theirs.close()
        told.close()
        server = threading.Thread(target=self._base.serve, args=(ours, run.name), name=run.name, daemon=True)
        server.start()
        self._alive[process.sentinel] = _Trained(run, process, outcome, server)
        _log.info("%s: training, %d runs share the base; its log is %s", run.name, len(self._alive), args[-1])

    def _end(self, ended: _Trained) -> Exception | None:
        """Return the error of a run whose process has ended."""
        ended.process.join()
        ended.server.join()
        try:
            found: Exception | None = ended.outcome.recv()
        except EOFError:
            code, log = ended.process.exitcode, self._logs / f"{ended.run.name}.log"
            found = RLError(f"the process of the run ended with exit code {code}; its log is {log}")
        ended.outcome.close()
        return found


def _base_plan(plans: Sequence[RunPlan]) -> RunPlan:
    """Return the plan of the base of some runs: of the first, with room for the largest adapter."""
    policy = plans[0].config.policy
    lora = policy.lora_cfg.model_copy(update={"dim": max(plan.config.policy.lora_cfg.dim for plan in plans)})
    changed = with_values(policy, {"lora_cfg": lora, "max_grad_norm": None})
    return plans[0].with_config(with_section(plans[0].config, POLICY, changed))


def _train(models: Connection, told: Connection, recipe: str, overrides: Sequence[str], log: str) -> None:
    """Make a run in this process, on models that another process computes, and tell its end."""
    os.setpgrp()  # a Ctrl-C of the terminal goes to the process that started this one
    with Path(log).open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    show_logs()
    from rl_launch.runtime.shared_base import AdapterModel

    try:
        run = run_of(recipe, overrides)
        policy, spec = run.plan.config.policy, run.plan.backends.models[POLICY].spec
        model = AdapterModel(models, policy, spec.seed)
        train(run.plan, run_dir=run.run_dir, title=run.name, shared=model.components)
    except Exception as error:  # noqa: BLE001  # raised in the process of the sweep
        _log.exception("the run failed")
        try:
            told.send(error)
        except (TypeError, AttributeError, ValueError):  # it does not pickle
            told.send(RLError(f"{type(error).__name__}: {error}"))
    else:
        told.send(None)
    finally:
        models.close()


def base_of(run: SweptRun) -> str:
    """Return a text that is equal for runs that can share a base."""
    from rl_launch.runtime.shared_base import base_key

    plan = run.given.plan
    return base_key(plan.config.policy, {"algorithm": plan.plugin.name, "cluster": as_written(plan.config.cluster)})
