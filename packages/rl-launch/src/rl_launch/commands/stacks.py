"""`rl stacks`: the stacks of every process of a run in progress."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from rl_core.errors import RLError, RunDirectoryError
from rl_core.install_command import install_command
from rl_core.tracing.stacks import FOLDER, SIGNAL, SUFFIX
from rl_launch.cluster import process_stacks
from rl_launch.cluster.process_stacks import ProcessStacks, Registered, is_here, registered, stacks_here
from rl_launch.run_config.inputs import py_spy_program
from rl_launch.run_session.directory.lock import holder, host_of_holder
from rl_launch.run_session.directory.run_folder import RunFolder

ANSWER_S = 60.0
"""Maximum wait in seconds for another node."""


class Stacks(NamedTuple):
    """The stacks of a run.

    Args:
        processes: Processes in alphabetical order, the driver first.
        missing: Processes that were not reached, with the reason.
    """

    processes: Sequence[ProcessStacks]
    missing: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        processes = [asdict(process) for process in self.processes]
        return {"schema": 1, "processes": processes, "missing": list(self.missing)}

    def as_text(self) -> str:
        """Return the text that is printed."""
        parts = []
        for each in self.processes:
            text = "\n".join(f"    {line}" if line else "" for line in each.text.splitlines())
            parts.append(f"{each.name} (process {each.pid} on {each.host}): {each.state}\n{text}\n")
        return "\n".join([*parts, *self.missing])


def stacks_of(path: Path, *, is_native: bool = False) -> Stacks:
    """Return the stacks of the processes of a run, on this machine and, if RAY_ADDRESS is set, on its other nodes.

    Args:
        path: Directory of a run whose driver runs on this machine.
        is_native: Show native frames as well; needs py-spy, and its permission to read the processes.

    Raises:
        RunDirectoryError: If the folder is not a run, the run is not in progress, or its driver is on another machine.
    """
    run = require_running(path, "rl stacks")
    folder = str(run.path / "logs" / FOLDER)
    py_spy = py_spy_program() or ""
    if is_native and not py_spy:
        raise RunDirectoryError(
            "--native needs py-spy, which is not installed. Leave it out, or run "
            f"{install_command('rl-launch[profiling]')}"
        )
    known = registered(folder, SUFFIX)
    found = stacks_here(folder, SUFFIX, SIGNAL, py_spy=py_spy, is_native=is_native)
    names = {each.name for each in found}
    away = [each for each in known if not is_here(each) and each.name not in names]
    others, missing = _elsewhere(away, folder, is_native=is_native)
    ordered = sorted([*found, *others], key=lambda each: (each.name != "driver", each.name, each.pid))
    return Stacks(ordered, missing)


def require_running(path: Path, command: str) -> RunFolder:
    """Return a run whose driver is at work on this machine.

    Args:
        path: Run directory.
        command: The command that needs it, for messages.

    Raises:
        RunDirectoryError: If the folder is not a run, the run is not in progress, or its driver is on another machine.
    """
    run = RunFolder(path)
    host = host_of_holder(run.path)
    if host is None:
        state = run.state()
        raise RunDirectoryError(
            f"{path} is not running: its status is {state.status}, at step {state.step}. {command} needs a run in "
            "progress."
        )
    if host != socket.gethostname():
        raise RunDirectoryError(f"{path} is in use by {holder(run.path)}. Run {command} on that machine.")
    return run


def _elsewhere(away: Sequence[Registered], folder: str, *, is_native: bool) -> tuple[list[ProcessStacks], list[str]]:
    """Return the stacks of processes on other nodes, and a sentence for each that was not reached."""
    remote = [each for each in away if each.host != socket.gethostname()]
    missing = [f"{each.name}: process {each.pid} has ended" for each in away if each not in remote]
    if not remote:
        return [], missing
    if not os.environ.get("RAY_ADDRESS"):
        names = ", ".join(f"{each.name} on {each.host}" for each in remote)
        return [], [*missing, f"not shown: {names}. Set RAY_ADDRESS as for the run to see other machines."]
    try:
        import ray

        from rl_launch.cluster.ray_start import connect

        connect(os.environ["RAY_ADDRESS"], is_own=False)
        try:
            found = ask_nodes(sorted({each.node for each in remote if each.node}), folder, is_native=is_native)
        finally:
            ray.shutdown()
    except RLError as error:
        return [], [*missing, f"the other nodes were not asked: {error}"]
    seen = {each.name for each in found}
    return found, [*missing, *(f"{each.name}: not found on {each.host}" for each in remote if each.name not in seen)]


def ask_nodes(nodes: Sequence[str], folder: str, *, is_native: bool = False) -> list[ProcessStacks]:
    """Return the stacks on nodes of the connected cluster; a node that does not answer in time is left out.

    Args:
        nodes: Ray's ids of the nodes.
        folder: Folder of the files of the run, which the nodes share.
        is_native: See `stacks_of`.
    """
    answers = on_nodes(nodes, stacks_here, folder, SUFFIX, int(SIGNAL), py_spy="py-spy", is_native=is_native)
    # the results are of a class that was pickled by value
    return [ProcessStacks(**vars(each)) for found in answers for each in found]


def on_nodes(nodes: Sequence[str], function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Call a function of `process_stacks` on nodes of the connected cluster, by a task on each; returns the answers of
    the nodes that answer in time.

    Args:
        nodes: Ray's ids of the nodes.
        function: The function.
        args: Its arguments.
        kwargs: Its arguments by name.
    """
    import ray
    from ray import cloudpickle
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # a node's own interpreter need not have this package
    cloudpickle.register_pickle_by_value(process_stacks)
    try:
        task: Any = ray.remote(num_cpus=0, max_retries=0)(function)
        asked = [
            task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(*args, **kwargs)
            for node in nodes
        ]
    finally:
        cloudpickle.unregister_pickle_by_value(process_stacks)
    done, _ = ray.wait(asked, num_returns=len(asked), timeout=ANSWER_S)
    found = []
    for ref in done:
        with suppress(ray.exceptions.RayError):
            found.append(ray.get(ref))
    return found
