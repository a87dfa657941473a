"""A run whose loop is the caller's: its models, rollouts, weights and records, call by call."""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from rl_algos import RolloutAlgorithm, RolloutSteps, steps_of
from rl_core.data.batch import Batch
from rl_core.errors import ConfigError, RLError, RunDirectoryError
from rl_core.metrics import Metric
from rl_core.model import Model
from rl_core.rollouts.group import RolloutGroup
from rl_core.run import Checkpointable, Components
from rl_launch.api.api import Overrides, Source, Values, told_plainly
from rl_launch.commands.preparation import DATA_CHECKS
from rl_launch.commands.start import run_of
from rl_launch.run_session import RunSession, show_logs
from rl_launch.run_session.directory.row_files import kept


class Session:
    """A run whose loop is yours; `rl_launch.session` opens one, and `rl train` runs the loops of algorithms in it.

    The usage loop::

        with rl_launch.session("grpo-arithmetic", {"run_dir": "runs/mine"}) as session:
            policy = session.models["policy"]
            for step in session.steps(10):
                batch = build_batch(session.rollouts(), session.config.grpo)
                metrics, logprobs = policy.accumulate(batch, loss)
                policy.apply()
                session.publish()
                session.record({"loss": metrics["loss"]})

    In a notebook, an interrupt (Ctrl-C) ends the statement in progress and leaves the session usable: run the cell of
    the loop again to make the interrupted step again, with the rollouts that it had.

    Args:
        config: Resolved config of the run.
        components: Its models, data, weights and rollout workers.
        run: Its directory, records and checkpoints.
        rolling: Rollouts of a step; None if the algorithm has none.
        held: Ends the run when it is left.

    Attributes:
        config: As given.
        components: As given.
        run: As given: what a loop of `AlgorithmPlugin` receives, for loops of rl-algos.
        step: Number of the step in progress, or of the last complete step between steps.
    """

    def __init__(
        self, config: Any, components: Components, run: RunSession, rolling: RolloutSteps | None, held: ExitStack
    ) -> None:
        self.config, self.components, self.run = config, components, run
        self.step = 0
        self._rolling, self._held = rolling, held
        self._steps: _Steps | None = None
        self._groups: list[RolloutGroup] | None = None
        self._before = self._revisions()
        run.stop_request.interrupt_statements()
        atexit.register(self.close)

    @property
    def models(self) -> Mapping[str, Model]:
        """Models by role: `policy`, and what else the algorithm has."""
        return self.components.models

    @property
    def data(self) -> Any:
        """The data of the algorithm, as its loop takes it; of SFT and DPO, `data.train.take(n)` are the next rows."""
        return self.components.data

    def steps(self, max_steps: int, *, state: Mapping[str, Checkpointable] | None = None) -> Iterator[int]:
        """Return the numbers of the steps still to do, counted from 1; the first call restores the newest checkpoint.

        After each step, metrics are written and a checkpoint is saved if one is due. A later call with the same number
        goes on where the loop was left. A step that was left before its end, by an interrupt, an error or `break`, is
        made again, without the gradient that it had accumulated. Updates that it had made stay made.

        Args:
            max_steps: Number of the last step.
            state: State of your loop that a checkpoint holds and restores, such as `{"data": session.data.train}`. That
                of rollouts and weights is always in it.
        """
        if self._steps is None:
            self._steps = _Steps(self, max_steps, dict(state or {}))
        elif self._steps.max_steps != max_steps:
            raise ConfigError(
                f"this session makes {self._steps.max_steps} steps, and {max_steps} were asked for; close it, and open "
                "another one in the same run_dir"
            )
        return self._steps

    def rollouts(self) -> list[RolloutGroup]:
        """Return the groups of this step: rollouts of the next `num_prompts_per_step` prompts with the weights that
        were last published. Further calls in the same step return the same groups.

        Raises:
            RLError: Outside a step, or if the algorithm has no rollouts.
        """
        rolling, steps = self._rollouts_at_hand("rollouts"), self._steps_at_hand("rollouts")
        if self._groups is None:
            with self.run.stop_request.held(), self.run.phase("generation"):
                self._groups, _ = rolling.collect(steps.max_steps - self.step)
        return self._groups

    def publish(self, batch: Batch | None = None) -> None:
        """Bring the generators to the policy's weights as they are now.

        Args:
            batch: Rollouts of the step, for a drafter that trains with the policy.

        Raises:
            RLError: Outside a step, or if the algorithm has no rollouts.
        """
        rolling = self._rollouts_at_hand("publish")
        self._steps_at_hand("publish")
        with self.run.stop_request.held():
            rolling.sync(self.step, batch)

    def record(self, metrics: Mapping[str, float | Metric]) -> None:
        """Record metrics of this step; several calls are merged into one line.

        Raises:
            RLError: Outside a step.
        """
        self._steps_at_hand("record")
        self.run.record(self.step, metrics)

    def checkpoint(self) -> None:
        """Save a checkpoint when this step ends, whatever `checkpointing.save_period` is.

        Raises:
            ConfigError: If `checkpointing.enabled` is false.
            RLError: Outside a step.
        """
        if not self.config.checkpointing.enabled:
            raise ConfigError("checkpointing.enabled is false; set it to true to save checkpoints")
        self._steps_at_hand(needs_step="checkpoint")
        self.run.saves_next = True

    def close(self) -> None:
        """End the run: save the last complete step, and end all processes. A later session with the same `run_dir`
        resumes the run. May be called again.
        """
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        atexit.unregister(self.close)
        if self._steps is not None and self._steps.is_under_way and self._revisions() != self._before:
            # What the models are now belongs to a step that is not complete.
            self.run.has_moved_on = True
        return self._held.pop_all().__exit__(kind, error, trace)

    def _steps_at_hand(self, needs_step: str) -> _Steps:
        if self._steps is None or not self._steps.is_under_way:
            raise RLError(f"{needs_step}: no step is in progress; call it in the loop over session.steps(...)")
        return self._steps

    def _rollouts_at_hand(self, what: str) -> RolloutSteps:
        if self._rolling is None:
            raise RLError(f"{what}: this algorithm has no rollouts; its rows are in session.data")
        return self._rolling

    def _revisions(self) -> list[int]:
        return [getattr(model, "revision", 0) for model in self.models.values()]

    def _begin(self, max_steps: int, state: dict[str, Checkpointable]) -> Iterator[int]:
        trained = {name: model for name, model in self.models.items() if model.trains}
        rolling, held = self._rolling, dict(state)
        if rolling is not None:
            held |= {"rollouts": rolling.rollouts, "weights": rolling.weights}
        numbers = self.run.steps(max_steps, models=trained, state=held)
        self.run.stop_request.interrupt_statements()
        if rolling is not None:
            with self.run.phase("weight_sync"):
                rolling.rollouts.adopt(rolling.weights.publish())
        return numbers

    def _take(self, numbers: Iterator[int]) -> int:
        self._groups = None
        try:
            self.step = next(numbers)
        except StopIteration:
            self.step = self.run.completed
            raise
        self._before = self._revisions()
        return self.step

    def _begin_again(self) -> None:
        for model in self.models.values():
            if model.trains:
                model.discard()


class _Steps:
    """Iterator over the steps of a session that outlives the loops over it.

    Attributes:
        max_steps: Number of the last step.
        is_under_way: True if a step has begun and not ended.
    """

    def __init__(self, session: Session, max_steps: int, state: dict[str, Checkpointable]) -> None:
        self.max_steps, self.is_under_way = max_steps, False
        self._session, self._is_again = session, False
        with session.run.stop_request.held():
            self._numbers = session._begin(max_steps, state)

    def __iter__(self) -> Self:
        self._is_again = self.is_under_way
        return self

    def __next__(self) -> int:
        session = self._session
        with session.run.stop_request.held():
            if self._is_again:
                self._is_again = False
                session._begin_again()
                return session.step
            self.is_under_way = False
            number = session._take(self._numbers)
            self.is_under_way = True
            return number


@told_plainly
def session(
    config: Source, overrides: Overrides = (), *, fresh: bool = False, branch_from: str = "", verbose: bool = False
) -> Session:
    """Start the workers of a recipe, and return them for a loop of your own; a run in the same folder is resumed.

    Close it, or use it as a context manager. See `train` for the arguments.

    Raises:
        ConfigError, DataError, RunDirectoryError, WorkerEnvironmentError: Before anything is started.
        RLError: If a worker does not start.
    """
    show_logs(verbose=verbose)
    values = Values.of(config, overrides)
    given = run_of(*values.given(), branch_from)
    if values.files:
        given = run_of(*values.given(given.run_dir), branch_from)
    _check_guardrails(given.plan.config)
    folder = given.run_dir

    # imports what only a run needs
    from rl_launch.commands.train import finished_metrics, opening, prepared

    with ExitStack() as stack:
        stack.enter_context(kept(values.files, folder, given.plan.config.logger.run_dir_access))
        run = prepared(given.plan, folder, fresh=fresh, branch_point=given.branch_point)
        if run.branch is None and finished_metrics(folder, run.written) is not None:
            raise RunDirectoryError(f"{folder} contains a finished run. Choose another run_dir, or set more steps")
        run.take(DATA_CHECKS)
        opened = stack.enter_context(opening(run, title=given.name, fresh=fresh))
        components, started = stack.enter_context(opened.start())
        resolved: Any = run.plan.config
        has_rollouts = isinstance(run.plan.algorithm, RolloutAlgorithm) and components.pool is not None
        rolling = steps_of(resolved, components, started) if has_rollouts else None
        return Session(resolved, components, started, rolling, stack.pop_all())


def _check_guardrails(config: Any) -> None:
    for name, rule in config.guardrails.items():
        if rule.action in ("rollback", "lower_staleness"):
            raise ConfigError(
                f"guardrails.{name}.action: {rule.action} starts a run again, which the loop of a session cannot do; "
                "set warn, skip_step or stop"
            )
