"""The environment that each worker of a run needs, and trials of agents and rollout environments in it."""

from __future__ import annotations

import json
import logging
import pickle
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rl_algos.judges.config import functions_of_models, judge_sections
from rl_algos.judges.needs import language_judges
from rl_core.algorithm import AlgorithmEvaluation
from rl_core.devices import CPU, Device
from rl_core.environments.instance import EnvironmentInstance, instance_of
from rl_core.environments.trial import Attempt, Trial, Verdict, try_out
from rl_core.errors import ConfigError, WorkerEnvironmentError
from rl_core.model_config import ModelConfig
from rl_core.plugins import Requirement
from rl_core.user_code import FromFile
from rl_launch.backends import Backend, Backends
from rl_launch.run_config.plan import RunPlan
from rl_launch.worker_envs.driver import missing
from rl_launch.worker_envs.provision import Mode
from rl_launch.worker_envs.spec import ROLLOUT_WORKER, WorkerEnvSpec, worker_env
from rl_launch.worker_envs.variables import worker_process_environment

_log = logging.getLogger(__name__)

_TRY = "from rl_core.environments.trial import main; main()"
_LOAD = """
import pickle, sys
from rl_core import resolve
agent = pickle.load(sys.stdin.buffer)
resolve(agent) if isinstance(agent, str) else agent.load()
"""
_TIMEOUT_S = 900.0


def trials_of(plan: RunPlan, loaded: Any, evaluation: AlgorithmEvaluation | None = None) -> list[Trial]:
    """Return every environment of the data and of the evaluation, with attempts on its first rows.

    Args:
        plan: Plan of the run.
        loaded: The data that its algorithm loaded.
        evaluation: The evaluation of the run, if it evaluates as it trains.
    """
    attempts = dict(plan.algorithm.attempts(plan.config, loaded))
    for name, each in evaluation.attempts().items() if evaluation is not None else ():
        attempts[name] = [*attempts.get(name, ()), *each]
    return trials_on(plan.config, attempts)


def trials_on(config: Any, attempts: Mapping[str, Sequence[Attempt]]) -> list[Trial]:
    """Return environments with attempts and the judges of a run.

    Args:
        config: Resolved config of the run.
        attempts: Attempts by the name of the environment.
    """
    judges = tuple(language_judges(config))
    reward_models = tuple(name for name in judge_sections(config) if name not in judges)
    later = functions_of_models(config)
    trials = []
    for name, each in attempts.items():
        instance, parts = instance_of(config.env, name), later.get(name, frozenset())
        trials.append(Trial(instance.without(parts), each, judges, reward_models))
        if parts:
            trials.append(Trial(instance.only(parts), each, judges, reward_models, is_scored=True))
    return trials


def try_here(trials: Sequence[Trial], mode: Mode) -> list[Trial]:
    """Try the environments whose processes can run in the driver's own environment; return the others.

    Raises:
        ConfigError: If environments cannot be used, with their names, the rows of the trials and the remedies.
    """
    # Environments compute on CPUs, also if models compute on GPUs.
    here = [
        trial
        for trial in trials
        if mode != "isolated" and not missing(worker_env(trial.instance.requirement, CPU.extras))
    ]
    if here:
        _report(try_out(here))
    return [trial for trial in trials if trial not in here]


def try_in(interpreters: Mapping[str, str], trials: Sequence[Trial]) -> None:
    """Try environments in the environments that their processes have.

    Args:
        interpreters: Interpreters, by role.
        trials: The environments.

    Raises:
        ConfigError: See `try_here`.
        WorkerEnvironmentError: If the trial itself does not run.
    """
    for trial in trials:
        python = interpreters[environment_role(trial.instance.name)]
        done = _run(python, _TRY, [trial])
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip()
            raise WorkerEnvironmentError(f"environment {trial.instance.label} could not be tried in {python}:\n{said}")
        _report(Verdict(*json.loads(done.stdout.splitlines()[-1])))


def load_agent_in(key: str, python: str, agent: str | FromFile, variables: Mapping[str, str]) -> None:
    """Import the function of an agent in the environment of the processes that call it.

    Args:
        key: Key of the agent's section.
        python: Interpreter of the rollout workers.
        agent: The function, by name or with its file.
        variables: Environment variables of the agent.

    Raises:
        ConfigError: If it cannot be imported.
    """
    done = _run(python, _LOAD, agent, variables)
    if done.returncode:
        *_, reason = done.stderr.decode(errors="replace").strip().splitlines() or ["its process ended"]
        reason = reason.removeprefix("ValueError: ").rstrip(".")
        raise ConfigError(
            f"{key}.run: {agent} cannot be imported in the environment of rollout workers ({python}): {reason}. To add "
            f"a package, run `uv pip install --target FOLDER PACKAGE` and set {key}.env.PYTHONPATH=FOLDER; or run the "
            f"agent in its own environment with {key}.command"
        )


def _run(
    python: str, script: str, given: object, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run a script in a worker's environment; it gets the pickled object on its standard input."""
    env = {**worker_process_environment(python), **(variables or {})}
    command, data = [python, "-c", script], pickle.dumps(given)
    return subprocess.run(command, input=data, capture_output=True, env=env, timeout=_TIMEOUT_S, check=False)


def _report(verdict: Verdict) -> None:
    for warning in verdict.warnings:
        _log.warning("%s", warning)
    if verdict.problems:
        raise ConfigError("\n".join(verdict.problems))


IMAGES = Requirement("rl-core", {"cpu": ("vision",), "cuda": ("vision",)}, ("PIL",))
"""Images of conversations, for processes that read or write them (`rl_core.images`)."""


def role_specs(
    backends: Backends, environments: Iterable[EnvironmentInstance], device: Device
) -> dict[str, WorkerEnvSpec]:
    """Return the specs of a run's workers by role: of each model, `generation`, and `env.<name>` of each environment.

    Args:
        backends: Backends of the models and of generation.
        environments: Environments that score its prompts.
        device: Device that determines the extras of engines.
    """

    def spec(chosen: Backend[Any], model: ModelConfig, sent: Iterable[Requirement]) -> WorkerEnvSpec:
        images = chosen.plugin.images
        of_images = [images, IMAGES] if model.vision.enabled and images is not None else []
        also = (*chosen.plugin.further(chosen.backend), *sent, *of_images)
        return worker_env(chosen.plugin.requirement, device.extras, also=also)

    specs = {role: spec(model, model.config, backends.requirements) for role, model in backends.models.items()}
    if backends.generation is not None:
        # Rollout programs compute no losses, so they do not need the extras of losses. Those of rl-core are for them.
        programs = [
            each if each.distribution == IMAGES.distribution else Requirement(each.distribution)
            for each in backends.requirements
        ]
        specs["generation"] = spec(backends.generation, backends.generation.model, [ROLLOUT_WORKER, *programs])
    stored = [IMAGES] if any(model.config.vision.enabled for model in backends.models.values()) else []
    for instance in sorted(environments, key=lambda each: each.name):
        specs[environment_role(instance.name)] = worker_env(instance.requirement, device.extras, also=stored)
    return specs


def environment_role(name: str) -> str:
    """Return the role of an environment's processes."""
    return f"env.{name}"
