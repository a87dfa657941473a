"""The observers of a run's steps: its traces and its profiles."""

from __future__ import annotations

from contextlib import ExitStack

from rl_launch.run_config.profiling_checks import py_spy_program
from rl_launch.runtime.process_spans import ProcessSpans
from rl_launch.runtime.profiled_steps import ProfiledSteps
from rl_launch.runtime.runtime import Runtime
from rl_launch.session.config import ProfilingConfig
from rl_launch.session.session import RunSession
from rl_launch.session.traces.step_trace import StepTrace
from rl_launch.session.traces.trace_folder import FOLDER


def observe_steps(session: RunSession, runtime: Runtime, config: ProfilingConfig, stack: ExitStack) -> None:
    """Have a run traced and profiled, as the section `profiling` says.

    Args:
        session: Session of the run.
        runtime: Its processes, started.
        config: The section.
        stack: Ends the observation before the processes end.
    """
    run_dir = session.directory.path
    if config.traces:
        trace = StepTrace(run_dir / FOLDER, ProcessSpans(runtime.processes).collect)
        session.observe(trace)
        stack.callback(trace.close)
    if config.steps is not None:
        profiles = ProfiledSteps(config, run_dir, runtime.profiled, py_spy=py_spy_program() or "py-spy")
        session.observe(profiles)
        stack.callback(profiles.close)
