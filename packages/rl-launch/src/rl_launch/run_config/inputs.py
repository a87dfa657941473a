"""Check the models, data, profiling and other files of a run together, before anything starts."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from rl_core.config import Problem, is_changed
from rl_core.devices import Device
from rl_core.errors import ConfigError, ConfigProblems
from rl_core.install_command import install_command
from rl_core.tracing.profiling import Tool
from rl_launch.cluster.device import AUTO, resolve_device
from rl_launch.model_files.local_models import MADE_HERE
from rl_launch.model_files.model_folder import absent_models
from rl_launch.root_config import ClusterConfig
from rl_launch.run_config.plan import RunPlan


def input_problems(plan: RunPlan, *, is_evaluation: bool = False) -> Iterator[Problem]:
    """Yield the problems of inputs that a run, or its evaluation, cannot read: models, datasets, files and folders. The
    hub gets one request for each name.

    Args:
        plan: The run.
        is_evaluation: True to check the data of the evaluation instead of the training data.
    """
    yield from absent_models(model_names(plan))
    problems = plan.algorithm.evaluation_problems if is_evaluation else plan.algorithm.input_problems
    yield from problems(plan.config)


def check_inputs(plan: RunPlan, *, is_evaluation: bool = False) -> None:
    """Refuse a run, or its evaluation, that cannot read its models or its data.

    Raises:
        ConfigProblems: If there are problems; lists all of them.
    """
    problems = list(input_problems(plan, is_evaluation=is_evaluation))
    lines = [f"{problem.key}: {problem.message}" for problem in problems]
    if len(lines) > 1:
        lines = [f"{len(lines)} inputs cannot be read:", *(f"  {line}" for line in lines)]
    if lines:
        raise ConfigProblems("\n".join(lines), problems)


def model_names(plan: RunPlan) -> dict[str, str]:
    """Return the folders and hub names of the models and tokenizers of a run, by key, without models that are made
    locally."""
    names = {f"{key}.model_name": plan.section(key).model_name for key in plan.model_sections}
    tokenizer = plan.config.policy.tokenizer.name
    if tokenizer is not None:
        names["policy.tokenizer.name"] = tokenizer
    names |= plan.plugin.further_models(plan.config)
    return {key: name for key, name in names.items() if name not in MADE_HERE}


def device_here(cluster: ClusterConfig) -> Device | None:
    """Return the device of a run's models; None for another machine's cluster, whose devices are known once Ray has
    connected to it."""
    return None if cluster.device == AUTO and os.environ.get("RAY_ADDRESS") else resolve_device(cluster)


_NEEDS_CUDA: dict[Tool, str] = {
    "memory": "records the history of torch's CUDA allocator",
    "nsys": "records a range that the CUDA profiler begins and ends",
}


def py_spy_program() -> str | None:
    """Return the path of py-spy: next to this interpreter, where pip installs it, or on the PATH."""
    here = Path(sys.executable).with_name("py-spy")
    return str(here) if os.access(here, os.X_OK) else shutil.which("py-spy")


def profiling_checks(plan: RunPlan) -> Iterator[Problem]:
    """Yield the problems of `profiling` that do not depend on the devices of a cluster."""
    profiling = plan.config.profiling
    if profiling.steps is None:
        for key in ("ranks", "tools"):
            if is_changed(profiling, key):
                remedy = "Set profiling.steps, for example to [3, 4], or remove this key"
                yield Problem.unused(f"profiling.{key}", "without profiling.steps", remedy=remedy)
        return
    if not plan.plugin.trains:
        because = f"with algorithm: {plan.plugin.name}, because only training makes steps"
        yield Problem.unused("profiling.steps", because)
        return
    if "py-spy" in profiling.tools and py_spy_program() is None:
        remedy = f"Install it, or remove it from this key: {install_command('rl-launch[profiling]')}"
        yield Problem(
            "profiling.tools", "needs the program py-spy, which is not installed", got="py-spy", remedy=remedy
        )
    if "nsys" in profiling.tools and shutil.which("nsys") is None:
        remedy = "Install Nsight Systems on every node (package nsight-systems-cli), or remove it"
        yield Problem("profiling.tools", "needs Nsight Systems, but nsys is not on the PATH", got="nsys", remedy=remedy)
    if device := device_here(plan.config.cluster):
        yield from _problems_on(plan, device)


def check_profiling(plan: RunPlan, device: Device) -> None:
    """Refuse tools and ranks that do not fit the devices, once the kind of device is known.

    Raises:
        ConfigError: If there are problems; lists all of them.
    """
    if plan.config.profiling.steps is None:
        return
    if problems := list(_problems_on(plan, device)):
        raise ConfigError("\n".join(f"{problem.key}: {problem.message}" for problem in problems))


def _problems_on(plan: RunPlan, device: Device) -> Iterator[Problem]:
    """Yield the problems of tools that the device does not have, and of ranks that no worker has."""
    profiling, cluster = plan.config.profiling, plan.config.cluster
    for tool in profiling.tools:
        if tool in _NEEDS_CUDA and device.name != "cuda":
            reason = f"{_NEEDS_CUDA[tool]}, but the device of this run is {device.name}"
            remedy = "Remove it; torch and py-spy work on every device"
            yield Problem("profiling.tools", reason, got=tool, remedy=remedy)
    topology = plan.backends.topology(cluster.num_nodes, device.ranks_per_node(cluster), device)
    sizes = [topology.devices(role).count for role in plan.backends.models]
    if plan.backends.generation is not None:
        sizes.append(topology.most_replicas)
    for rank in profiling.ranks:
        if sizes and rank >= max(sizes):
            reason = "is neither a rank of a model nor the number of a generator"
            yield Problem("profiling.ranks", reason, got=rank, allowed=f"0 to {max(sizes) - 1}")
