"""`rl doctor` and `rl worker-envs`: whether a machine can run a recipe, and the environments that its workers need."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from rl_core.errors import ConfigError, ConfigProblems, RLError
from rl_launch.cluster.machine import local_gpus
from rl_launch.commands.preparation import Preparation, StartCheck, checks_of
from rl_launch.commands.start import run_of
from rl_launch.commands.train import with_local_models
from rl_launch.doctor.checks import CHECKS
from rl_launch.doctor.findings import Diagnosis, Report, examine
from rl_launch.doctor.machine import Machine
from rl_launch.doctor.needs import needs_of, needs_of_plan
from rl_launch.model_files.local_models import untrained_model
from rl_launch.root_config import with_section
from rl_launch.run_config.plan import RunPlan
from rl_launch.worker_envs.provision import provision


def diagnose(recipe: str, overrides: Sequence[str] = (), machine: Machine | None = None) -> Report:
    """Check this machine, and make the checks that `rl train` makes before it starts Ray.

    Args:
        recipe: A recipe's name, a YAML file, or a run directory.
        overrides: Keys to set.
        machine: The machine; this one by default.

    Raises:
        ConfigError: If the config is wrong.
    """
    here = machine or Machine()
    given = run_of(recipe, overrides)
    needs = needs_of_plan(given.plan, given.name, num_gpus=here.num_gpus)
    report = examine(here, needs, CHECKS)
    run = Preparation(given.plan, given.run_dir, _quickly_local, known_device=needs.device)
    known = {finding.name for finding in report.missing}
    return replace(report, findings=(*start_findings(run, checks_of(given.plan), known), *report.findings))


def start_findings(run: Preparation, checks: Sequence[StartCheck], known: Collection[str] = ()) -> Iterator[Diagnosis]:
    """Make the checks of a start, and report those that fail or have to wait.

    Args:
        run: The run.
        checks: The checks, in their order.
        known: Names of findings on the machine that keep the run from starting.
    """
    passed: list[str] = []
    for check in checks:
        if not all(each in passed for each in check.after):
            continue
        if reason := check.waits(run):
            yield Diagnosis(check.name, "ok", f"not checked: {reason}")
            continue
        found: list[Diagnosis] = []
        try:
            check.look(run)
            passed.append(check.name)
        except ConfigProblems as error:
            found = [Diagnosis(problem.key or check.name, "missing", problem.message) for problem in error.problems]
        except Exception as error:  # noqa: BLE001  # of the user's functions too; each would end the start
            text = str(error) if isinstance(error, RLError) else f"{type(error).__name__}: {error}"
            found = [Diagnosis(check.name, "missing", text)]
        if not set(check.machine) & set(known):
            yield from found
    said = f"these checks of rl train, which precede the start of Ray, pass: {', '.join(passed)}"
    yield Diagnosis("start", "ok", said)


def _quickly_local(plan: RunPlan) -> RunPlan:
    """Return the plan with the folders of models made here, none of them trained, whose checks leave no process."""
    cluster = plan.config.cluster.model_copy(update={"fork_server_s": 0.0})
    config = with_section(plan.config, "cluster", cluster)
    return with_local_models(plan.with_config(config), warmed_up=untrained_model)


def build_worker_envs(recipe: str, overrides: Sequence[str], *, roles: Collection[str] = ()) -> dict[str, str]:
    """Find or build the environments of a recipe's workers on this machine, as a run does before it starts.

    Args:
        recipe: A recipe's name, a YAML file, or a run directory.
        overrides: Keys to set. Without GPUs on this machine, `cluster.device=cuda` builds the environments for GPUs.
        roles: Roles to build for, such as `policy`, `generation` or `env.math`; empty for all.

    Returns:
        The Python interpreter of each role.

    Raises:
        ConfigError: If the config is wrong, or has no such role.
        WorkerEnvironmentError: If an environment cannot be built.
    """
    needs = needs_of(recipe, overrides, num_gpus=local_gpus())
    unknown = sorted(set(roles) - needs.workers.keys())
    if unknown:
        raise ConfigError(f"{recipe} has no role {unknown[0]!r}. Its roles: {', '.join(needs.workers)}")
    wanted = {role: spec for role, spec in needs.workers.items() if not roles or role in roles}
    built = provision(wanted.values(), needs.worker_envs)
    return {role: built[spec] for role, spec in wanted.items()}
