"""Digests of the inputs of an evaluation, so that rollouts of different evaluations are never mixed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rl_algos.rollouts.driver.task_evaluation import EvaluationPlan
from rl_core.config import as_written
from rl_core.environments.instance import instance_of
from rl_core.environments.rewards import RewardSum
from rl_core.rollouts.rollout import Prompt
from rl_core.user_code import FromFile
from rl_launch.root_config import RunConfig

_WEIGHTS = ("*.safetensors", "*.json")


def identity_of(config: RunConfig, plan: EvaluationPlan) -> dict[str, str]:
    """A digest of each part of an evaluation that its rollouts depend on, by a name for messages.

    Args:
        config: Resolved root, with the folder of the model in `policy.model_name`.
        plan: Plan of the evaluation.
    """
    policy = config.policy
    return {
        "the model": _digest([policy.model_name, policy.precision, policy.hf_config_overrides, *_files(policy)]),
        "the engine": _digest(policy.generation.backend),
        "prompts": _digest([[task.name, *_prompts(task.groups)] for task in plan.tasks]),
        "sampling": _digest(
            [[task.name, task.num_samples, *({**asdict(g.sampling), "seeds": g.seeds} for g in task.groups)]]
            for task in plan.tasks
        ),
        "environments": _digest([_environment(config, name) for name in sorted(plan.needs.environments)]),
        "turns": _digest([_code(plan.needs.program), dict(plan.needs.program_args), plan.needs.max_seconds]),
    }


def prompt_digest(prompt: Prompt) -> str:
    """A short digest of a prompt's messages, by which two evaluations know that they share it."""
    return _digest(list(prompt.messages))[:12]


def _prompts(groups: Any) -> Iterator[Any]:
    for group in groups:
        prompt = group.prompt
        yield [prompt.id, prompt.environment, dict(prompt.info), prompt.token_ids.tolist()]


def _environment(config: RunConfig, name: str) -> list[Any]:
    instance = instance_of(config.env, name)
    return [name, as_written(instance.config), _code(instance.environment)]


def _code(code: str | FromFile | RewardSum | None) -> Any:
    if isinstance(code, RewardSum):
        return [_code(code.environment), *([part.name, part.weight, _code(part.function)] for part in code.parts)]
    return [code.source.sha256, code.name] if isinstance(code, FromFile) else code


def _files(policy: Any) -> Iterator[Any]:
    """Names, sizes and times of the files of a model in a local folder: weights trained anew are other weights."""
    folder = Path(policy.model_name).expanduser()
    for pattern in _WEIGHTS if folder.is_dir() else ():
        for path in sorted(folder.glob(pattern)):
            found = path.stat()
            yield [path.name, found.st_size, found.st_mtime_ns]


def _digest(value: Any) -> str:
    digest = hashlib.sha256()
    for part in value if isinstance(value, Iterator) else [value]:
        digest.update(json.dumps(part, sort_keys=True, default=repr).encode())
    return digest.hexdigest()
